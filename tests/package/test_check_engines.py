"""`tools/check_engines.py`: what it finds missing, and that it knows each function that an adapter replaces."""

import os
import re
from pathlib import Path
from typing import Any

import check_engines
import pytest
from repository import ROOT

ROLL = "roll/distributed/strategy/megatron_strategy.py"
VARIABLES = ["SLIME", "MILES", "VERL", "SKYRL", "NEMO_RL", "AREAL", "ROLL", "RLINF", "MS_SWIFT", "BRIDGE"]
VARIABLES += ["VIME", "MEGATRON_LM"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("class MegatronTrainStrategy:\n    def train_step(self, batch, *, loss_func=None): ...\n", ""),
        ("class MegatronTrainStrategy:\n    def train_step(self, batch, **more): ...\n", "train_step has no loss_func"),
        (
            "class MegatronTrainStrategy:\n    def step(self, batch, loss_func): ...\n",
            "has no MegatronTrainStrategy.",
        ),
        ("def train_step(self, batch, loss_func): ...\n", f"{ROLL} has no MegatronTrainStrategy.train_step"),
    ],
)
def test_a_name_that_changed_is_said(
    code: str, says: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions: check_engines.Functions = {"MegatronTrainStrategy.train_step": ["batch", "loss_func"]}
    monkeypatch.setitem(check_engines.ENGINES, "ROLL", {ROLL: functions})
    file = tmp_path / "checkout" / ROLL
    file.parent.mkdir(parents=True)
    file.write_text(code)
    assert check_engines.main([str(tmp_path / "checkout")]) == (says != "")
    assert (says or "ROLL: all names found") in capsys.readouterr().out


def test_what_is_no_engine_and_a_missing_file(tmp_path: Path, capsys: Any) -> None:
    assert check_engines.main([str(tmp_path)]) == check_engines.main([]) == 1
    assert "no engine of slime, miles" in capsys.readouterr().out
    first, *others = check_engines.ENGINES["slime"]
    (tmp_path / first).parent.mkdir(parents=True)
    (tmp_path / first).write_text("from slime.loss import loss_function\n")
    lines = check_engines.missing_in(tmp_path, check_engines.ENGINES["slime"])
    assert lines == [f"{first} has no train_one_step", *(f"no {other}" for other in others)]


def test_it_knows_what_adapters_replace() -> None:
    files = [*(ROOT / "megatron_rl_loss" / "engines").glob("*.py")]
    code = "".join(file.read_text() for file in files)
    replaced = set(re.findall(r'Function\(\s*[\w.]+, "(\w+)"', code))
    known = {
        name.rpartition(".")[2] for engine in check_engines.ENGINES.values() for of in engine.values() for name in of
    }
    assert replaced
    assert replaced <= known
    code += "".join(file.read_text() for file in (ROOT / "examples" / "recipes").glob("*.py"))
    unnamed = {name for name in known if not re.search(rf"\b{name}\b", code)}
    assert unnamed <= {"__call__", "compute_ppo_actor_loss", "grpo_loss_fn"}


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_engines_that_were_run_have_all_names(variable: str) -> None:
    if not (path := os.environ.get(f"{variable}_PATH")):
        pytest.skip(f"needs a checkout: {variable}_PATH")
    assert check_engines.main([path]) == 0
