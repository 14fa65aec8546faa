"""Pages: names have one home, code runs, tables are those of the code. Links: `mkdocs --strict` (tools/docs.sh)."""

import argparse
import ast
import doctest
import importlib
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import audit_examples
import checkouts
import names_page
import oracle
import pytest
import torch
from pages import ENGINE_PAGES, FENCED, PAGES, code_of, code_under
from replacements import in_few_modules, undone
from repository import EXAMPLES, ROOT

import megatron_rl_loss
from megatron_rl_loss import Microbatch, Samples, add_loss_aggregation_args, weights_column
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.modes import available_modes
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.engines import names as mode_names
from megatron_rl_loss.engines import replacing
from megatron_rl_loss.proof.outcomes import TOLERANCES

README, USING, NAMES, PERFORMANCE, SUPPORT = (
    (ROOT / "docs" / name).read_text()
    for name in ("../README.md", "using.md", "names.md", "performance.md", "support.md")
)
#: The pages of the engines, then that of what they have in common.
FRAMEWORKS = "\n".join(page.read_text() for page in [*ENGINE_PAGES, ROOT / "docs" / "engines.md"])
RECIPES = {path.name: path.read_text() for path in sorted((EXAMPLES / "recipes").iterdir()) if path.is_file()}


#: Pages that are written to other widths.
OF_OTHERS = {*ENGINE_PAGES, ROOT / "docs" / "engines.md"}


def is_there(module: str, name: str) -> bool:
    """True if a file of the package defines the name; imports from another file do not count."""
    path = ROOT.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    computed = re.search(r"^def __getattr__", source, re.MULTILINE)
    return bool(re.search(rf"^(?:(?:def|class) {name}\b|{name}\b.*?=)", source, re.MULTILINE)) or bool(
        computed and hasattr(importlib.import_module(module), name)
    )


def wrong_names(text: str) -> Iterator[str]:
    """Names that are not there, and imports from elsewhere than the one place: the package, if the name is public."""
    for dotted in sorted(set(re.findall(r"\bmegatron_rl_loss(?:\.\w+)+", text))):
        parts = dotted.split(".")
        at = [n for n in range(1, len(parts) + 1) if ROOT.joinpath(*parts[:n]).is_dir()][-1]
        at += at < len(parts) and ROOT.joinpath(*parts[: at + 1]).with_suffix(".py").exists()
        if at < len(parts) and not is_right(".".join(parts[:at]), parts[at]):
            yield dotted
    for module, names in re.findall(r"\bfrom (megatron_rl_loss[\w.]*) import (\([^)]*\)|[^\n#`]*)", text):
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names) if not is_right(module, name))
    for name, module in re.findall(r"`(\w+)`\s+of\s+`(megatron_rl_loss\.[\w.]+)`", text):
        if not is_right(module, name):
            yield f"{module}.{name}"


#: Pages that say how a task is done: names that these lack are nobody's to type.
GUIDES = ["../README.md", "tasks.md", "using.md", "data.md", "losses.md", "logprobs.md", "audit.md", "check.md"]
GUIDES += ["engines.md", "proof.md", *(f"engines/{page.name}" for page in ENGINE_PAGES)]


def names_in_code(text: str) -> set[str]:
    """The words of a page's blocks of code, and of code in its sentences."""
    blocks = FENCED.findall(text)
    return {
        word for code in [*blocks, *re.findall(r"`([^`]+)`", FENCED.sub("", text))] for word in re.findall(r"\w+", code)
    }


def test_every_public_name_has_a_task() -> None:
    used = names_in_code("\n\n".join((ROOT / "docs" / name).read_text() for name in GUIDES))
    assert set(vars(megatron_rl_loss)["__all__"]) - used == set()


def test_a_name_that_no_code_has_would_be_seen() -> None:
    """Negative control."""
    assert names_in_code("Tokens and `Samples(masks)`\n```python\nimport tap\n```\nTerm") == {
        *("Samples", "masks", "python", "import", "tap")
    }


def is_right(module: str, name: str) -> bool:
    public = name in vars(megatron_rl_loss)["__all__"]
    return public if module == "megatron_rl_loss" else not public and is_there(module, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_have_one_home(page: Path) -> None:
    assert list(wrong_names(page.read_text())) == []


def test_examples_import_as_pages_do() -> None:
    paths = list(EXAMPLES.rglob("*.py"))
    assert paths
    assert [(path.name, name) for path in paths for name in wrong_names(path.read_text())] == []


def test_what_pages_say_of_a_plan_and_a_micro_batch_is_there() -> None:
    text = "".join(page.read_text() for page in PAGES)
    called = {(owner, name) for owner, name in re.findall(r"\b(plan|microbatch)\.(\w+)\(", text)}
    assert called
    assert [name for owner, name in called if not hasattr(Plan if owner == "plan" else Microbatch, name)] == []


def test_every_example_compares_its_tokens() -> None:
    """Else ranks that read other tokens under equal masks go unseen; a column of weights is made on one rank."""
    calls = [
        node
        for path in EXAMPLES.rglob("*.py")
        if "weights_column" not in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Samples"
    ]
    assert calls
    knowing = ("tokens", "layout=tree")  # a PrefixTree has the tokens itself
    texts = [ast.unparse(call) for call in calls]
    assert [text for text in texts if not any(word in text for word in knowing)] == []


def test_the_files_of_the_architecture_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    files = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page))
    assert files
    assert not [name for name in files if not any((root / name).exists() for root in (ROOT, ROOT / "megatron_rl_loss"))]
    folders = [path for path in (ROOT / "megatron_rl_loss").iterdir() if (path / "__init__.py").exists()]
    assert not [folder for folder in folders if f"| `{folder.name}/` |" not in page]


def test_the_tests_that_prove_are_there() -> None:
    """A file without a folder is in the folder of the one before it."""
    section = SUPPORT.split("## What is proven\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| .* \| .* \| (`.*`) \|$", section, flags=re.MULTILINE)[1:]
    cells += re.findall(r"\((`[\w/.]+`)\)", section.partition("Other tests: ")[2])
    paths = set()
    for cell in cells:
        folder = ""
        for name in re.findall(r"`([^`]+)`", cell):
            folder = name.rpartition("/")[0] or folder
            paths.add(ROOT / "tests" / folder / name.rpartition("/")[2])
    assert paths
    assert [path for path in paths if not path.exists()] == []
    files = set(re.findall(r"\btest_\w+\.py\b", SUPPORT))
    assert files <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_the_versions_of_megatron_are_those_of_the_printed_table() -> None:
    """Parts whose tests were all skipped under a version, and parts of which some were; none failed."""
    printed = (ROOT / "docs/bench/versions-cpu.txt").read_text()
    lines = re.findall(r"^\| .*", printed, flags=re.MULTILINE)
    head, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    table = {}
    for version, *counts in rows:
        parts = dict(zip(head[1:], counts, strict=True))
        assert not [count for count in counts if not re.fullmatch(r"\d+ passed|(\d+ passed, )?\d+ skipped", count)]
        of_all = [part for part, count in parts.items() if "passed" not in count]
        some = [part for part, count in parts.items() if "passed" in count and "skipped" in count]
        said = [f"{word} of {', '.join(names)}" for word, names in (("all", of_all), ("some", some)) if names]
        name = version.replace("Megatron-LM@", "main ").replace("Megatron-dev@", "dev ")
        table[name] = "; ".join(said)
    assert table
    assert dict(re.findall(r"^\| ((?:main |dev )?[\da-f.]+) \| ([^|]*) \|", SUPPORT, flags=re.MULTILINE)) == table
    script = (ROOT / "tools/test_versions.sh").read_text()
    assert " ".join(head[1:]) in script
    named = SUPPORT.partition("these parts: ")[2]
    assert all(re.search(rf"\b{part}\b", named) for part in head[1:])


def test_wrong_names_would_be_seen() -> None:
    """Negative control."""
    right = "`megatron_rl_loss.losses.token`, `megatron_rl_loss.engines.slime.constant_8`, `megatron_rl_loss.Term`"
    right += "from megatron_rl_loss import (\n    Term,\n    tap,\n)\n"
    right += "from megatron_rl_loss.losses.sequence import gspo_loss\n"
    assert list(wrong_names(right)) == []
    for wrong in (
        "megatron_rl_loss.no_such_name",
        "megatron_rl_loss.losses.no_such_file",
        "megatron_rl_loss.losses.token.no_such_name",
        "megatron_rl_loss.losses.token.ppo_clip_loss",  # public: megatron_rl_loss.ppo_clip_loss
        "megatron_rl_loss.engines.slime.constant_x",
        "megatron_rl_loss.gspo_loss",
        "megatron_rl_loss.losses.gspo_loss",
        "megatron_rl_loss.losses.by_name.gspo_loss",  # only imported there
        "megatron_rl_loss.core.Term",
        "megatron_rl_loss.core.reducers.Term",
    ):
        module, _, name = wrong.rpartition(".")
        assert list(wrong_names(f"`{wrong}`")) == [wrong]
        assert list(wrong_names(f">>> from {module} import {name}  # x\n"))[-1:] == [wrong]


@pytest.mark.parametrize("page", [page.name for page in PAGES if "```pycon" in page.read_text()])
def test_examples_of_a_page_give_what_it_shows(page: str) -> None:
    example = doctest.DocTestParser().get_doctest("\n".join(code_of(page, "pycon")), {}, page, page, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


WITH_EXAMPLES = [path for path in (ROOT / "megatron_rl_loss").rglob("*.py") if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_of_docstrings_give_what_they_show(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    result = doctest.testmod(module, extraglobs={"Samples": Samples, "torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_the_column_of_a_page(page: Path) -> None:
    """78 characters, or one word of a shell, which cannot be broken. What a program prints is as it prints it."""
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        for line in code.splitlines() if language not in ("text", "console") else []:
            assert len(line) <= 78 or (language == "bash" and len(shlex.split(line)) == 1), line


def wide_lines(text: str) -> list[str]:
    """Lines of prose beyond 120 columns; a row of a table, and a picture's text, cannot be broken."""
    return [line for line in FENCED.sub("", text).splitlines() if len(line) > 120 and line.strip()[0] not in "|![<"]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OF_OTHERS], ids=lambda page: page.name)
def test_prose_has_120_columns(page: Path) -> None:
    assert wide_lines(page.read_text()) == []


def test_a_wide_line_would_be_seen() -> None:
    """Negative control."""
    wide = "a " * 61
    assert wide_lines(f"{wide}\n| {wide} |\n```text\n{wide}\n```\n") == [wide]


#: Guides to read with a Python prompt at hand: their first block is whole, and shows the use of the page.
OPENED_BY_AN_EXAMPLE = ["audit.md", "check.md", "logprobs.md", "losses.md", "proof.md", "tasks.md", "trees.md"]


@pytest.mark.parametrize("page", OPENED_BY_AN_EXAMPLE)
def test_a_guide_opens_with_an_example_that_runs_as_it_is(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    language, code = blocks[0]
    assert language == "python"
    exec(code, {})
    printed = capsys.readouterr().out
    shown = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert all(line in printed.splitlines() for line in shown)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python\n" in page.read_text()], ids=lambda page: page.name
)
def test_code_begins_at_the_margin_and_is_python(page: Path) -> None:
    """What was left out is marked by ``...``, at the indentation of what it stands for."""
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        is_fragment = "\nreturn " in f"\n{code}"  # of a function that the sentence before names
        compile(f"def function():\n{textwrap.indent(code, '    ')}" if is_fragment else code, page.name, "exec")


def test_code_at_an_inner_indentation_would_be_seen() -> None:
    """Negative control."""
    with pytest.raises(IndentationError):
        compile("# of a file\n    plan = plan_step(samples, mode)\n", "page", "exec")


def test_the_diff_of_readme_ends_in_the_recipe() -> None:
    """Each line that the diff leaves or adds is in the script, in this order; what it takes away is not."""
    (diff,) = code_of("../README.md", "diff")
    script = RECIPES["pretrain_packed.py"].splitlines()
    nodes = [node for node in ast.parse(RECIPES["pretrain_packed.py"]).body if isinstance(node, ast.ImportFrom)]
    of_package = {alias.name for node in nodes if node.module == "megatron_rl_loss" for alias in node.names}
    at = 0
    for line in diff.splitlines():
        if line[0] == "-":
            assert line[1:] not in script
        elif imported := re.match(r"\+from megatron_rl_loss import (.*)", line):
            assert set(imported[1].split(", ")) <= of_package
        elif line.strip() != "...":
            code = (
                line[1:].partition("(")[0] + "(" if line[1:].lstrip().startswith("def ") else line[1:]
            )  # without types
            at += next(n for n, candidate in enumerate(script[at:], start=1) if candidate.startswith(code))


def test_the_filter_of_a_log_keeps_our_lines_alone() -> None:
    """Also in a clone of this name, whose path every warning has."""
    (pattern,) = re.findall(r"grep -E '([^']+)'", USING)
    (shown,) = code_of("../README.md", "text")
    kept = [*shown.splitlines(), " [2026-11-28 10:00:00] iteration        5/       5 | consumed samples: 40 |"]
    assert all(re.search(pattern, line) for line in kept)
    for dropped in ("/home/a/megatron_rl_loss/core/plan.py:7: UserWarning: x", "  warn('loss aggregation')"):
        assert not re.search(pattern, dropped)


def test_the_code_of_using_runs() -> None:
    few_lines = code_under("using.md", "Without Megatron")
    own_modes = code_under("using.md", "Your own mode") + code_under("using.md", "Sums of your own")
    names: dict[str, Any] = {}
    exec(few_lines, names)
    assert f"# {names['share']!r}" in few_lines
    exec(own_modes, {})
    assert "task_mean" in available_modes()
    # Levels x with prompts a (two responses) and b, and y with prompt c: 1 / 2 levels, 2 prompts, 3 tokens each.
    rows, levels = [[1, 1], [1], [1, 1, 1], [1]], {"level": ["x", "x", "x", "y"]}
    ids: Any = {"prompt_ids": ["a", "a", "b", "c"], "ids": levels, "labels": {"group_size": [2, 2, 1, 1]}}
    weights = torch.cat(weights_column("level_mean", Samples(rows, **ids)))
    assert weights.tolist() == pytest.approx([1 / 12] * 6 + [1 / 2])


def test_the_modes_of_readme_are_the_tables_and_give_the_worked_numbers() -> None:
    table = README[README.index("## Modes") :]
    of_oracle = [*oracle.MODES, *oracle.BY_IDS]
    of_ids = (ROOT / "docs/data.md").read_text().partition("### Sessions and turns")[2]
    of_pages = re.findall(r"^\| `(\w+_\w+|constant)`", table + of_ids, flags=re.MULTILINE)
    of_both = "README's table of modes, or docs/data.md's of sessions and turns,"
    for rows, place in ((of_oracle, "ROWS, tests/support/oracle.py"), (of_pages, of_both)):
        missing = ", ".join(mode for mode in available_modes() if mode not in rows) or "none"
        assert list(available_modes()) == rows, f"{place} must have the modes of core/modes.py in order; add {missing}"
    values = re.search(r"they give ([\d., and]+?)\n\(", table)
    assert values is not None, "README's sentence of worked values, below its table, reads otherwise"
    shown = dict(zip(oracle.MODES, map(float, re.findall(r"\d+\.\d+", values[1])), strict=False))
    computed = {mode: float(oracle.step_loss(mode, oracle.WORKED, 8.0)) for mode in oracle.MODES}
    assert shown == pytest.approx(computed, abs=1e-6), "README's sentence of worked values has one for each mode"


def test_the_flags_of_using_are_the_parsers() -> None:
    parser = add_loss_aggregation_args(argparse.ArgumentParser(add_help=False))
    flags = {action.option_strings[0] for action in parser._actions}
    rows = re.findall(r"^\| (`--[^|]+) \|", USING, flags=re.MULTILINE)
    assert {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)", row)} == flags | {"--loss-aggregation"}


def test_the_tables_of_names_are_the_codes() -> None:
    assert names_page.with_tables(NAMES) == NAMES, "python tools/names_page.py renews them"
    assert names_page.BLOCK.findall(NAMES) == list(mode_names.FRAMEWORKS)


def test_every_name_of_a_mode_is_in_its_frameworks_section_and_no_other() -> None:
    headed = re.findall(r"^## (.*)\n([^#]*)", NAMES, flags=re.MULTILINE)
    sections = {title.lower().replace("-", "_"): text for title, text in headed}
    aliases = (peer.alias.replace(mode_names.NUMBER, "8192") for peer in mode_names.NAMES)
    peers = dict(zip(aliases, mode_names.NAMES, strict=True))
    assert set(sections) == {peer.framework for peer in peers.values()}
    for framework, text in sections.items():
        named = set(re.findall(rf"\b{framework}(?:@[\w.]+)?:[\w=-]+", text))
        assert named == {alias for alias, peer in peers.items() if peer.framework == framework}
        for alias in named:
            if not peers[alias].refused:
                resolve(alias, divisor=4096.0 if isinstance(peers[alias].divisor, str) else None)


def test_the_examples_and_tolerances_of_the_audit_are_the_codes() -> None:
    page = audit_examples.PAGE.read_text()
    assert audit_examples.with_examples(page) == page, f"python {audit_examples.__name__}.py --write renews them"
    assert set(dict(audit_examples.BLOCK.findall(page))) == set(audit_examples.EXAMPLES)
    said = re.search(r"(\S+) for float32 gradients, (\S+) for float16, (\S+) for bfloat16", " ".join(page.split()))
    assert said is not None
    tolerances = [TOLERANCES[name] for name in ("float32", "float16", "bfloat16")]
    assert [float(number) for number in said.groups()] == pytest.approx(tolerances, rel=0.05)


def test_the_messages_of_troubleshooting_are_the_codes() -> None:
    """Symptoms that quote this library. A number in the page stands for any value in the code."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    symptoms = re.findall(r"^\| ([^|]+) \|", page[page.index("### Errors") :], flags=re.MULTILINE)
    quoted = {quote for symptom in symptoms for quote in re.findall(r"`([^`]* [^`]*)`", symptom)}
    assert quoted
    texts = [text for path in (ROOT / "megatron_rl_loss").rglob("*.py") for text in _texts(path)]
    absent = [quote for quote in quoted if not any(re.sub(r"\d[\d.]*", "0", quote) in text for text in texts)]
    others = {
        "Received data size doesn't match expected size",
        "Connection closed by peer",
        "len() of a 0-d tensor",
        "'tuple' object has no attribute 'backward'",
    }
    assert set(absent) == others  # gloo's, torch's, Python's


def _texts(path: Path) -> Iterator[str]:
    """The strings of a file, with 0 for a value that is formatted into one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_versions_are_the_same_on_all_pages() -> None:
    dates: dict[str, set[str]] = {}
    for commit, date in re.findall(r"`([0-9a-f]{8})` \((\d{4}-\d\d-\d\d)\)", FRAMEWORKS + NAMES):
        dates.setdefault(commit, set()).add(date)
    assert all(len(named) == 1 for named in dates.values())
    assert set(re.findall(r"`([0-9a-f]{8})`", README)) <= set(re.findall(r"`([0-9a-f]{8})`", FRAMEWORKS))


def _stepping(package: str, *methods: str) -> type:
    """A class of an engine with empty methods."""
    names: dict[str, Any] = {}
    exec("\n".join(f"def {method}: ..." for method in methods), names)
    del names["__builtins__"]
    return type("Stand", (), {**names, "__module__": f"{package}.worker"})


OF_ENGINES, _, PLANTED = (ROOT / "docs/bench/engines-cpu.txt").read_text().partition("Faults planted")
ENGINES = re.findall(
    r"^\| (\S+) \| (\S+) \| (.*) \| (\S+) \| (\S+) \|$", OF_ENGINES.partition("|---|")[2], flags=re.MULTILINE
)


def test_the_table_of_engines_has_all_and_no_stale_row() -> None:
    """Tests that need checkouts print it: here, the words of its settings are looked for in them."""
    files = [path.read_text() for path in (ROOT / "tests" / "engines" / "real").glob("*.py")]
    of_starts = "".join((ROOT / "tests/support" / name).read_text() for name in ("start_stages.py", "slime_starts.py"))
    names = {name for name, value in vars(checkouts).items() if isinstance(value, checkouts.Framework)}
    assert names == {engine.upper().replace("-", "_") for engine, *_ in ENGINES}
    assert len(set(ENGINES)) == len(ENGINES)
    for engine, version, setting, *_ in ENGINES:
        name = engine.upper().replace("-", "_")
        of_engine = [text for text in files if re.search(rf"\b{name}\b", text)]
        recorded = "".join(["every mode, other rows", of_starts, *of_engine])
        assert version in FRAMEWORKS.partition("setting: own error")[0]
        parts = setting.removeprefix("started: ").split(", ")
        assert all(part.strip("`") in recorded for part in parts), (engine, setting)


def test_the_errors_of_frameworks_are_the_tables() -> None:
    wrong: dict[tuple[str, str], list[str]] = {}
    for engine, version, setting, own, _ in ENGINES:
        if own != "-" and float(own) > 1e-5:
            wrong.setdefault((engine, version), []).append(f"{setting}: {own}")
    table = FRAMEWORKS.partition("setting: own error")[2]
    shown = re.findall(r"^\| (\S+) \| (\S+(?:, \S+)*) \| (.*) \|$", table, flags=re.MULTILINE)
    assert [(engine, version, own) for engine, versions, own in shown for version in versions.split(", ")] == [
        (*place, "; ".join(settings)) for place, settings in wrong.items()
    ]
    assert len({(engine, own) for engine, _, own in shown}) == len(shown), "versions with the same errors are one row"
    said = re.search(r"With\s+this\s+library\s+it\s+is\s+at\s+most\s+(\S+\d)\.", FRAMEWORKS)
    assert said is not None
    assert float(said[1]) == max(float(ours) for *_, ours in ENGINES if ours != "-")


def test_the_modes_that_verl_takes_are_those_that_ran() -> None:
    """A run records what its version refuses; `every loss_agg_mode` names those that it takes."""
    known = {"every `loss_agg_mode`", "every `loss_agg_mode`, CP 2 with per-token loss"}
    of_verl = [(version, setting) for engine, version, setting, *_ in ENGINES if engine == "verl"]
    versions = [version for version in dict.fromkeys(dict(of_verl)) if {(version, ran) for ran in known} <= {*of_verl}]
    shown = re.findall(r"^\| (\S+) \| every `loss_agg_mode` \| (.*) \|$", FRAMEWORKS, flags=re.MULTILINE)
    assert versions == [version for version, _ in shown]
    for version, under_cp in shown:
        refused = re.findall(
            r"refused by verl, (`\S+`), CP 2", "\n".join(setting for of, setting in of_verl if of == version)
        )
        right = f"refuses {', '.join(refused)} in the first update" if refused else "every `loss_agg_mode`"
        assert under_cp == right


def test_the_figures_of_changes_for_upstream_are_the_tables() -> None:
    """Of verl's count also that of 16k tokens: at CP 2, half a token of a micro-batch is missing on average."""
    page, errors = (ROOT / "docs/upstream/README.md").read_text(), {row[:3]: row[3:] for row in ENGINES}
    of_pack, _, rest = page.partition("# Mamba in packs")[0].partition("[verl-mamba-in-packs]")
    own, _ = errors["verl", "`1dda039b`", "every `loss_agg_mode`, CP 2 with per-token loss"]
    ((rows, long_rows),) = re.findall(
        r"by (\S+) of their largest entry on our short rows at CP 2, by (\S+) with 16k", of_pack
    )
    assert (rows, float(long_rows)) == (own, float(f"{0.5 / 2**14:.0e}"))
    ((pack, mended),) = re.findall(r"samples is off by (\S+) from their own; with it, by (\S+)\. \|", rest)
    for engine, version in (("verl", "`1dda039b`"), ("areal", "`cbff54d6`")):
        own, ours = errors[engine, version, "a pack on a Mamba layer, `docs/upstream`"]
        assert (pack, float(mended)) == (own, float(ours))
    own, _ = errors["skyrl", "`a9564572`", "KL penalty"]
    assert f"KL is off by {own} from the sample mean" in page


def test_the_counts_of_planted_faults_add_up() -> None:
    rows = re.findall(r"\| (\d+) \| (\d+) \| (\d+) \|$", PLANTED, flags=re.MULTILINE)
    planted, stopped, unproved = (sum(map(int, column)) for column in zip(*rows, strict=True))
    assert planted == stopped + unproved
    assert f"plant [{planted} faults]" in FRAMEWORKS
    assert re.search(rf"{stopped}\s+abort before the optimizer, and of {unproved} the line says", FRAMEWORKS)


def test_the_code_of_frameworks_that_needs_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, ppo_utils = dict[str, Any](), ModuleType("skyrl.backends.skyrl_train.utils.ppo_utils")
    registry = SimpleNamespace(register=losses.__setitem__, get=lambda name: name)
    ppo_utils.PolicyLossRegistry = registry  # type: ignore[attr-defined]
    estimators = SimpleNamespace(register=lambda name, function: None, list_available=list)
    ppo_utils.AdvantageEstimatorRegistry = estimators  # type: ignore[attr-defined]
    entry = ModuleType("skyrl.train.entrypoints.main_base")
    entry.main = None  # type: ignore[attr-defined]
    places = (ppo_utils.__name__, entry.__name__)
    parents = [place.rsplit(".", levels)[0] for place in places for levels in range(1, place.count(".") + 1)]
    for module in (*map(ModuleType, parents), ppo_utils, entry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    masks = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]])
    names: dict[str, Any] = {"loss_masks": list(masks), "uids": ["a", "b"]}
    (skyrl,), (tinker,), (train_rl,) = (code_of(f"engines/{name}.md") for name in ("skyrl", "tinker", "train_rl"))
    names["policy"] = SimpleNamespace(train=lambda data, loss_fn, gbs=None: None)
    names["master_config"] = SimpleNamespace(grpo=SimpleNamespace(num_generations_per_prompt=4))
    names["loss_fn"] = SimpleNamespace(positive_example_nll_weight=0.0, reference_policy_kl_penalty=0.1)
    of_engine: dict[str, dict[str, Any]] = {
        "areal": {"PPOTrainer": SimpleNamespace},
        "areal.engine": {"MegatronPPOActor": _stepping("areal", "train_batch(self, input_, loss_fn, loss_weight_fn)",
                                                       "ppo_update(self, *args)")},
        "roll.distributed.strategy.megatron_strategy": {
            "MegatronTrainStrategy": _stepping("roll", "train_step(self, batch, loss_func)")
        },
        "roll.distributed.strategy.strategy": {"TrainStrategy": object},
        "roll.distributed.strategy.factory": {"create_strategy": lambda worker: None},
        "roll.pipeline.rlvr.actor_worker": {"ActorWorker": object},
        "rlinf.workers.actor.megatron_actor_worker": {
            "MegatronActor": _stepping("rlinf", "training_step(self, batch)")
        },
        "rlinf.scheduler.worker.worker_group": {"WorkerGroup": _stepping("rlinf", "launch(self, cluster)")},
        "nemo_rl.algorithms": {"advantage_estimator": ModuleType("advantage_estimator")},
        "swift.megatron.trainers": {"grpo_trainer": SimpleNamespace(
            MegatronGRPOTrainer=_stepping("swift", "_on_train_step_batch(self, encoded_batches)",
                                          "_preprocess_inputs(self, samples)", "loss_func(self, output_tensor, data)"),
            compute_logps_and_entropy_from_logits=lambda logits: logits)},
        "swift.rlhf_trainers": {"utils": SimpleNamespace(collate_to_grpo_micro_batch=lambda samples: None)},
    }  # fmt: skip
    for place, attributes in of_engine.items():
        for name in accumulate(place.split("."), "{}.{}".format):
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[place]).update(attributes)
    with in_few_modules(), undone():
        for name in ("nemo_rl", "areal", "roll", "rlinf", "ms_swift"):
            (code,) = code_of(f"engines/{name}.md")
            exec(code, names)
        assert type(names["loss_fn"]).__name__ == "AggregatedPGLossFn"
        assert names["Trainer"]._create_train_engine
        for engine in ("NeMo-RL", "AReaL", "ROLL", "RLinf", "ms-swift"):
            assert any(line.startswith(engine) for line in replacing.active())
    launcher = (EXAMPLES / "train_rl_with_loss_aggregation.py").read_text()
    called = [ast.unparse(node.func) for node in ast.walk(ast.parse(train_rl)) if isinstance(node, ast.Call)]
    assert sorted(called) == ["aggregation.attached", "loss_aggregation", "pretrain", "with_loss_aggregation"]
    assert [name for name in called if f"{name}(" not in launcher] == []
    for code in (RECIPES["skyrl_main.py"], skyrl):
        exec(code, names)
        assert type(losses.pop("mine")).__name__ == "AggregatedPolicyLoss"
    exec(tinker, names)
    assert names["datum_advantages"][1] == pytest.approx([-0.7 / 4, 0, 0, 0])


def test_the_recipe_for_bridge_wraps_the_schedule_of_its_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = code_of("engines/bridge.md")
    below = ("", ".train", ".eval", ".config", ".pretrain")
    for name in ("megatron.bridge", *(f"megatron.bridge.training{module}" for module in below)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        if name != "megatron.bridge":
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, sys.modules[name])

    def stock(**_: Any) -> None: ...

    *loops, config, entry = (sys.modules[f"megatron.bridge.training{module}"] for module in below[1:])
    for loop in loops:
        loop.get_forward_backward_func = lambda: stock  # type: ignore[attr-defined]
    recipe, seen = ModuleType("bridge_grpo"), list[Any]()
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)
    config.DatasetProvider = object  # type: ignore[attr-defined]
    entry.pretrain = lambda config, step: seen.extend(  # type: ignore[attr-defined]
        [config, step, *(loop.get_forward_backward_func() for loop in loops)]
    )
    exec(RECIPES["bridge_grpo.py"], vars(recipe))
    names = {"config": SimpleNamespace(), "read": lambda dp_rank: iter([dp_rank])}
    exec(shown, names)
    assert seen[:2] == [names["config"], vars(recipe)["forward_step"]]
    assert seen[0].dataset.dataloader_type == "external"
    assert seen[0].dataset.read is names["read"]
    assert stock not in seen
    assert [loop.get_forward_backward_func() for loop in loops] == [stock, stock]


def test_the_cost_of_the_proof_is_the_files() -> None:
    page = " ".join(PERFORMANCE.split())
    cost = r"takes (\S+) ms of CPU time, once, for ([\d,]+) tokens .*? peak (\S+) bytes"
    ((ms, tokens, peak),) = re.findall(cost, page)
    printed = (ROOT / "docs/bench/audit-cpu.txt").read_text()
    ((more, bytes_a_token, kept),) = re.findall(r"^proof +\S+ +(\S+) +(\S+) +(\S+)$", printed, flags=re.MULTILINE)
    assert (ms, peak) == (more, bytes_a_token)
    assert float(kept) < 0.05
    assert f"tokens {tokens.replace(',', '')}, micro-batches" in printed
    (row,) = json.loads((ROOT / "docs/bench/proof-cpu.json").read_text())["CPU time, and what a rank sends"]
    ns = row["more ns an entry and micro-batch"]
    assert f"takes {ns:.3g} ns of CPU time for each entry of the model and micro-batch" in page


def test_small_steps_are_those_of_their_file() -> None:
    page = " ".join(PERFORMANCE.split())
    tables = json.loads((ROOT / "docs/bench/reducers-cpu.json").read_text())

    def row(part: str, cp: int) -> dict[str, float]:
        rows = tables[f"{part}: fastest turn, ms"]
        return next(row for row in rows if (row["size"], row["cp"]) == ("1x4096", cp))

    parts = {row["part"]: row["us"] for row in tables["parts of a step of 1 samples, CP 4"]}
    checks = [us for part, us in parts.items() if part.startswith(("of these", "totals"))]
    assert f"takes {row('whole', 4)['ours to the faster']:.3g} times that of the faster peer at CP 4" in page
    assert f"totals takes {sum(checks):.1f} µs" in page
    assert f"closure in {1e3 * min(row('build', 1)[peer] for peer in ('slime', 'miles')):.1f} µs at CP 1" in page


def test_times_on_a_gpu_are_those_of_its_page() -> None:
    of_gpu = json.loads((ROOT / "docs/bench/gpu-nvidia-h200.json").read_text())
    parts = {part["part"]: part for part in of_gpu["parts"]}
    section, tables = PERFORMANCE[PERFORMANCE.index("## On a GPU") :], parts["reducers"]["figures"]

    def figures(part: str, size: str) -> dict[str, float]:
        (row,) = (
            row
            for row in tables[f"{part}: fastest turn, ms"]
            if (row["size"], row["cp"], row["metrics"]) == (size, 4, 0)
        )
        return row

    rows = re.findall(r"^\| (\d+) \S (\d+) \| (.*) \|$", section, flags=re.MULTILINE)
    assert rows
    for samples, length, cells in rows:
        whole, sums = (figures(part, f"{samples}x{length}") for part in ("whole", "fwd+bwd"))
        shown = [
            whole["ours"],
            whole["slime"],
            whole["miles"],
            whole["ours to the faster"],
            sums["ours"],
            sums["slime"],
        ]
        assert cells.split(" | ") == [f"{figure:.3g}" for figure in shown]
    printed = "\n".join(parts["audit"]["output"])
    ((more, of_token),) = re.findall(r"^proof +\S+ +(\S+) +(\S+) ", printed, re.MULTILINE)
    assert f"takes {more} ms more for 16,777,216 tokens, and {of_token} bytes" in " ".join(section.split())


@pytest.mark.parametrize("name", ["reducers", "segments", "totals"])
def test_times_are_those_of_the_file(name: str) -> None:
    """All numbers of a row are in one line of the file."""
    lines = [set(re.findall(r"[\d.]+|[a-z]+", line)) for line in (ROOT / f"docs/bench/{name}-cpu.txt").open()]
    section = PERFORMANCE[PERFORMANCE.index(f"tools/bench/{name}.py") :].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", section, flags=re.MULTILINE)[1:]
    assert rows
    for row in rows:
        shown = set(re.findall(r"[\d.]+|[a-z]+", row.replace(",", "")))
        assert len(shown) >= 4
        assert any(shown <= line for line in lines), row
