"""README and docs/using.md say what is so: their code runs, their flags are the parser's, their numbers come out."""

import argparse
import re
from typing import Any

import oracle
import pytest
from repository import ROOT

from megatron_rl_loss.megatron import add_loss_aggregation_args
from megatron_rl_loss.modes import available_modes
from megatron_rl_loss.modes import table as modes

README = (ROOT / "README.md").read_text()
USING = (ROOT / "docs/using.md").read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_the_five_lines_run() -> None:
    lines, script = blocks(README)
    assert script == (ROOT / "examples/recipes/pretrain_packed.py").read_text()  # test_pretrain_recipes.py runs it
    names: dict[str, Any] = {}
    exec(lines, names)
    assert float(names["share"]) == 4
    assert "# tensor(4.)" in lines


def test_nothing_is_wide_or_long() -> None:
    lines = README.splitlines()
    assert max(map(len, lines)) <= 120
    script = len(blocks(README)[1].splitlines())
    assert len(lines) - script <= 110


def test_code_blocks_of_using_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_REGISTERED", {})
    core, own_mode = blocks(USING)
    names: dict[str, Any] = {}
    exec(core, names)
    assert float(names["share"]) == pytest.approx(18 / 7)
    assert f"# tensor({18 / 7:.4f}), (1 + 4 + 5 + 8) / 7" in core
    exec(own_mode, {})
    assert "sum_per_prompt" in available_modes()


def test_the_flags_are_the_parsers() -> None:
    parser = add_loss_aggregation_args(argparse.ArgumentParser(add_help=False))
    flags = {action.option_strings[0] for action in parser._actions}
    table = re.findall(r"^\| `(--[a-z-]+)", USING, flags=re.MULTILINE)
    assert set(table) - {"--loss-aggregation"} == flags - {"--loss-aggregation"}
    assert "--loss-aggregation" in table


def test_the_worked_batch_has_its_numbers() -> None:
    given = re.search(r"they give\n([\d., and]+?) \(", README)
    assert given is not None
    values = [float(value) for value in re.findall(r"\d\.\d+", given[1])]
    computed = [float(oracle.step_loss(mode, oracle.WORKED, 8.0)) for mode in oracle.MODES]
    assert values == pytest.approx(computed, abs=1e-6)


def test_named_files_exist() -> None:
    root = ROOT
    links = re.findall(r"\]\(([A-Za-z_/.]+)\)", README)
    paths = re.findall(r"`((?:tools|tests|examples)/[a-z_./]+)`", README)
    assert len(links) >= 3
    for name in links + paths:
        assert (root / name).exists(), name
