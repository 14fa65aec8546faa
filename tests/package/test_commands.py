"""Every command that a page shows is run by a test, or the table below says what it needs that a test has not.

A command is a line of a `bash` block, or code in the text that begins like one. A new one fails here until it has its
row.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pages import PAGES, commands_of
from repository import ROOT

from megatron_rl_loss.__main__ import main


@dataclass(frozen=True)
class Row:
    """Commands that a regular expression matches whole, and who runs them, or what they need."""

    command: str
    by: str = ""  # the test file that does; "here" for this one, in an empty folder
    named: str = ""  # a fragment of that file's text
    needs: str = ""  # why no test does


ROWS = [
    # our own entry points
    Row(r"python -m megatron_rl_loss (modes( prompt_mean| --all)?|example( (pretrain_\w+|on_cpu|own_loop|plain_ddp))?)",
        by="here"),
    Row(r"torchrun --nproc-per-node 2 loop\.py", by="package/test_readme_loops.py", named='"loop.py"'),
    Row(r"python examples/quickstart\.py", by="examples/test_quickstart.py", named='"quickstart.py"'),
    Row(r"(torchrun .* |python )-m megatron_rl_loss audit.*",
        by="megatron/test_audit_launch.py", named='"megatron_rl_loss", "audit"'),
    Row(r"python -m megatron_rl_loss log-probs( train\.pt rollout\.pt)?",
        by="unit/audit/test_log_prob_gap.py", named='"megatron_rl_loss", "log-probs"'),
    Row(r'export MEGATRON_RL_LOSS_AUDIT=".*"', by="megatron/test_audit_attach.py", named="MEGATRON_RL_LOSS_AUDIT"),
    Row(r"python -m megatron_rl_loss example NAME", by="package/test_example_command.py", named='"pretrain_grpo"'),
    Row(r"torchrun --nproc-per-node 2 (plain_ddp|own_loop)\.py",
        by="examples/test_recipes.py", named="run_ranks(2, printed_by"),
    Row(r"torchrun --nproc-per-node \d (tree_ddp|tree_gpt)\.py",
        by="examples/test_tree_recipes.py", named="printed_by(folder, script)"),
    Row(r"torchrun .* on_cpu\.py .*", by="examples/test_pretrain_recipes.py", named="LAUNCH.split()"),
    Row(r"examples/launch_grpo\.slurm", needs="Slurm"),
    Row(r"megatron rlhf .*", needs="ms-swift"),
    Row(r"examples/launch_grpo\.sh", by="megatron/test_example.py", named='"launch_grpo.sh"'),
    Row(r"\.\.\. --loss-aggregation verl:.*", by="unit/core/test_aliases.py", named="verl"),
    # lines of other frameworks' launches, whose code is not here: its loaders' way, and the real code from checkouts
    Row(r"--(custom-pg-loss-reducer-function|rollout-data-postprocess|custom-megatron-[\w-]+)-path .*",
        by="engines/test_slime.py", named="load_function"),
    Row(r"uv run .* skyrl_main .*", by="engines/real/test_start_skyrl.py", named='code_of("engines/skyrl.md", "bash")'),
    Row(r"'?\+ray_kwargs\..*", by="engines/real/test_launch_scripts.py", named="lines_of_page"),
    Row(r"grep -rhE 'megatron_rl_loss.*", by="support/ray_workers.py", named="megatron_rl_loss"),
    Row(r"PYTHONPATH=\$MEGATRON_LM torchrun .*", by="engines/real/test_real_train_rl.py", named="MEGATRON_LM"),
    Row(r"([A-Z_]+_PATH=\S+ )+(python -m pytest|tools/test\.sh) tests/engines/real\S*|tools/test_engines\.sh .*",
        needs="checkouts of those frameworks"),
    Row(r"python tools/check_engines\.py .*", by="package/test_check_engines.py", named="check_engines.main"),
    Row(r"pip install megatron-bridge.*|python -c 'from megatron\.bridge .*", needs="a GPU and a model"),
    # what checks this repository; all of it is what runs this test
    Row(r"tools/test\.sh( tests/\S+| -m 'not slow'| --lint-only)?", needs="to be what runs this test"),
    Row(r"tools/demo\.sh|tools/test_core\.sh", needs="a package index: the first two commands of a fresh clone"),
    Row(r"(PARTS=all )?tools/test_versions\.sh.*", needs="a package index, for other versions of Megatron"),
    Row(r"TEST_DEVICE=cuda tools/test\.sh.*", needs="GPUs"),
    Row(r"tools/refresh_constraints\.sh", needs="a package index"),
    Row(r"tools/docs\.sh", needs="mkdocs; tools/test.sh runs it"),
    Row(r"tools/check_package\.sh|python -m build", needs="a package index; test_distribution.py builds without"),
    Row(r"python tools/tour\.py", by="examples/test_tour.py", named='"tour.py"'),
    Row(r"python tools/vectors\.py docs/vectors\.json", by="package/test_vectors.py", named="vectors.text()"),
    Row(r"tools/api_reference\.py", by="package/test_api_reference.py", named="api_reference.pages()"),
    Row(r"python tools/names_page\.py", by="package/test_pages.py", named="names_page.with_tables"),
    Row(r"python -m megatron_rl_loss modes verl:gspo",
        by="package/test_modes_command.py", named='"modes", "verl:gspo"'),
    Row(r"tools/check_names\.py", needs="a package index; test_check_names.py names what it stored"),
    Row(r"git clone URL .*", needs="a repository's address"),
    Row(r"pip install (-e \.|-e '\.\[\w+\]')", needs="a package index; tools/setup.sh does it"),
    Row(r"pip install shtab|eval \"\$\(shtab .*make_parser\)\"",
        by="package/test_completion.py", named='"megatron_rl_loss.__main__.make_parser"'),
    Row(r"python check_vectors\.py vectors\.json token_mean", by="package/test_vectors.py", named="check_vectors.py"),
    # what the online example and the audit show
    Row(r"(torchrun .* |python )examples/online_grpo\.py .*",
        by="examples/test_online.py", named="online_grpo.main(flags)"),
    Row(r"python tools/plot_online\.py .*", by="examples/test_online_tools.py", named="plot_online"),
    Row(r"(OMP_NUM_THREADS=1 )?python (examples/does_it_matter|tools/vary_matter)\.py .*",
        by="examples/test_does_it_matter.py", named="does_it_matter.py"),
    Row(r"(OMP_NUM_THREADS=1 )?python examples/does_centering_matter\.py .*",
        by="examples/test_does_centering_matter.py", named="does_centering_matter.py"),
    Row(r"tools/audit_picture\.py", by="unit/audit/test_picture.py", named="audit_picture.main()"),
    Row(r"python tools/count_museum\.py", needs="half an hour"),
    # measurements
    Row(r"python tools/compare_kernels\.py( --cases 300 --tp 1 2 3)?",
        by="unit/logprobs/test_triton.py", named="compare_kernels.compare("),
    Row(r"python tools/compile_kernels\.py( --capability 90)?",
        by="unit/logprobs/test_choice.py", named='"compile_kernels.py"'),
    Row(r"tools/gpu_proof\.sh", by="package/test_gpu_proof.py", named="gpu_proof.py"),
    Row(r"(python )?tools/bench/\w+\.py.*|python -m timeit .*", needs="a quiet machine and minutes"),
]  # fmt: skip


COMMANDS = sorted({command for page in PAGES for command in commands_of(page.read_text())})


def row_of(command: str) -> Row | None:
    return next((row for row in ROWS if re.fullmatch(row.command, command)), None)


def test_every_command_has_its_row_and_every_row_is_needed_and_true() -> None:
    without = [command for command in COMMANDS if row_of(command) is None]
    assert not without, "say in ROWS which test runs them, or what they need"
    assert COMMANDS
    for row in ROWS:
        assert any(row_of(command) is row for command in COMMANDS), row
        assert (row.by == "") == (row.needs != ""), row
        if row.named:
            assert row.named in (ROOT / "tests" / row.by).read_text(), row
    for command in COMMANDS:
        for name in re.findall(r"(?<!\S)((?:tools|tests|examples)/[\w./]+)", command):
            assert (ROOT / name).exists(), command


def test_the_tests_that_tools_and_guides_name_are_there() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    files = [
        *(ROOT / "tools").glob("*.sh"),
        *(ROOT / "tools").glob("*.py"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
    ]
    named = {name for path in files for name in re.findall(r"\btest_\w+\.py\b", path.read_text())}
    assert named
    assert named - there == set()


HERE = [command for command in COMMANDS if (row := row_of(command)) and row.by == "here"]


@pytest.mark.parametrize("command", HERE)
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command.split()[2:])
    main()
    assert capsys.readouterr().out.strip()


def test_a_new_command_would_be_seen() -> None:
    """Negative control."""
    block = "```bash\ntools/new.sh a \\\n    b   # c\n# d\n```\n"
    page = f"Run `python tools/new.py --fast`, not `new.py`.\n{block}```python\npython(`python x`)\n```\n"
    assert list(commands_of(page)) == ["tools/new.sh a b", "python tools/new.py --fast"]
    assert row_of("tools/new.sh a b") is None
