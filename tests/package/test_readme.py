"""The README says what is so: its code runs, its flags are the parser's, its numbers come out."""

import argparse
import re
from typing import Any

import oracle
import pytest
from repository import ROOT

from megatron_rl_loss import available_modes, modes
from megatron_rl_loss.arguments import add_loss_aggregation_args

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_code_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_REGISTERED", {})
    script, core, own_mode = BLOCKS
    compile(script, "README.md", "exec")  # a whole launch: test_example.py runs the same calls
    names: dict[str, Any] = {}
    exec(core, names)
    assert float(names["share"]) == pytest.approx(18 / 7)
    assert f"# tensor({18 / 7:.4f}), (1 + 4 + 5 + 8) / 7" in core
    exec(own_mode, {})
    assert "sum_per_prompt" in available_modes()


def test_the_flags_are_the_parsers() -> None:
    parser = add_loss_aggregation_args(argparse.ArgumentParser(add_help=False))
    flags = {action.option_strings[0] for action in parser._actions}
    table = re.findall(r"^\| `(--[a-z-]+)", README, flags=re.MULTILINE)
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
