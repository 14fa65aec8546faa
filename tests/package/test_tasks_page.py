"""docs/tasks.md: its code prints what it shows or is of the files that it names; the index is whole."""

import re
from pathlib import Path
from typing import Any

import pytest
from pages import ENGINE_PAGES, code_of
from repository import EXAMPLES, ROOT

from megatron_rl_loss.__main__ import copy_example, example_names

PAGE = (ROOT / "docs/tasks.md").read_text()
RECIPES = {path.name: path.read_text() for path in sorted((EXAMPLES / "recipes").iterdir()) if path.is_file()}
FROM_FILE = re.compile(r"# of examples/recipes/(\w+\.py)\b.*\n")


def test_each_section_runs_after_the_first_lines_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    first, *blocks = [code for code in code_of("tasks.md") if not FROM_FILE.match(code)]
    assert blocks
    for code in blocks:
        names: dict[str, Any] = {}
        exec(first, names)
        exec(code, names)
        shown = re.findall(r"^ *(?:print\(.*\)  # |# prints )(.*)$", code, flags=re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == shown


def test_other_code_is_of_the_files_that_it_names() -> None:
    """Line by line, in their order, with ... where lines are left out.

    tests/examples/test_recipes.py and megatron/test_late_counts.py run these files.
    """
    blocks = [code for code in code_of("tasks.md") if FROM_FILE.match(code)]
    assert blocks
    for code in blocks:
        heading = FROM_FILE.match(code)
        assert heading is not None
        begin = next(line for line in code[heading.end() :].splitlines() if line.strip() not in ("", "..."))
        lines = dedented(RECIPES[heading[1]], begin)
        at, is_gap = 0, True  # the head of the file is left out, too
        for line in filter(str.strip, code[heading.end() :].splitlines()):
            if line.strip() == "...":
                is_gap = True
                continue
            assert line in lines[at:], (heading[1], line)
            found = lines.index(line, at)
            assert at == 0 or is_gap == (found > at), f"{heading[1]}: before {line!r} lines are left out without a mark"
            at, is_gap = found + 1, False


def dedented(text: str, begin: str) -> list[str]:
    """The lines of a file, shifted to the left until that line of it begins at the margin."""
    lines = [line for line in text.splitlines() if line.strip()]
    (indent,) = {len(line) - len(line.lstrip()) for line in lines if line.strip() == begin}
    return [line[indent:] if line[:indent].isspace() else line for line in lines]


def test_the_index_has_every_section() -> None:
    sections = re.findall(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    index = PAGE.partition("\n## ")[0].partition("**")[2]
    indexed = re.findall(r"\[([^\]]*)\]\(#.*?\)", index)
    assert sections
    assert indexed == sections


def test_every_recipe_has_a_link_and_stands_alone(tmp_path: Path) -> None:
    named = ("tasks.md", "using.md", "losses.md", "logprobs.md", "engines.md", "check.md", "trees.md")
    pages = "".join((ROOT / "docs" / name).read_text() for name in named)
    pages += "".join(page.read_text().replace("](../../", "](../") for page in ENGINE_PAGES)
    for name in RECIPES:
        assert f"](../examples/recipes/{name})" in pages
        assert f"recipes/{name}" in example_names()
        needed = {
            "own_loop.py": ["megatron_on_cpu.py", "packed_attention.py"],
            "tree_gpt.py": ["megatron_on_cpu.py", "packed_attention.py"],
            "verl_rows_proof.py": ["verl_rows.py"],
        }.get(name, [])
        assert copy_example(f"recipes/{name}", tmp_path) == [tmp_path / file for file in (name, *needed)]
