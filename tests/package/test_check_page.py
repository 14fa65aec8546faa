"""docs/check.md: its code prints what it shows; its test passes in a folder of its own, and a wrong loss fails."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import code_of
from repository import ROOT

from megatron_rl_loss import assert_exact
from megatron_rl_loss.audit import pytest_plugin
from megatron_rl_loss.audit.simulation import CALLS

PAGE = (ROOT / "docs/check.md").read_text()
FIRST, LOOP, TEST = code_of("check.md")
WRONG = TEST.replace("/ num_items_in_batch", "/ mask.sum()")


def pytest_prints(folder: Path, test: str) -> tuple[int, str]:
    (folder / "test_my_loss.py").write_text(test)
    words = [sys.executable, "-m", "pytest", "-q", "-p", pytest_plugin.__name__, "test_my_loss.py"]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return run.returncode, run.stdout


def test_the_first_block_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(FIRST, {})
    shown = re.search(r"<!-- example: without a mode -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert capsys.readouterr().out == shown[1]


@pytest.mark.parametrize("mode", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize("cut", [[[0, 1, 2]], [[0], [1, 2]], [[2, 0], [1]]])
def test_the_loop_is_exact_in_every_cut(mode: str, cut: list[list[int]], capfd: pytest.CaptureFixture[str]) -> None:
    masks = torch.tensor([[0.0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]])
    prompts, page = ["a", "a", "b"], dict[str, Any]()
    exec(LOOP, page)
    model = torch.nn.Embedding(12, 1)  # the loss of each token is a parameter, whose gradient is the token's weight
    places, before = torch.arange(12).view(3, 4), model.weight.detach().clone()
    batches = [{"mask": masks[rows], "prompts": [prompts[row] for row in rows], "at": places[rows]} for rows in cut]
    losses = torch.nn.Sequential(model)
    losses.forward = lambda batch: model(batch["at"])[..., 0]  # type: ignore[method-assign]
    page["train_step"](losses, torch.optim.SGD(model.parameters(), lr=1.0), batches, mode)
    counts = torch.full((3, 1), 6.0) if mode == "token_mean" else torch.tensor([[8.0], [8], [4]])
    torch.testing.assert_close((before - model.weight.detach()).view(3, 4), masks / counts, atol=1e-6, rtol=0)
    assert f"megatron_rl_loss: {mode} on the policy loss, aggregation proved on 6 tokens" in capfd.readouterr().out


def test_the_fixture_passes_a_right_loss_and_fails_a_wrong_one(tmp_path: Path) -> None:
    assert pytest_prints(tmp_path, TEST)[0] == 0
    assert WRONG != TEST
    status, printed = pytest_prints(tmp_path, WRONG)
    assert status == 1
    assert "AssertionError: NOT SOUND: my_loss is not invariant; expected token_mean" in printed
    assert "divided by the tokens of the micro-batch" in printed


def test_the_installed_package_brings_the_fixture() -> None:
    points = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.pytest11]\n")[2].splitlines()
    assert points[0] == f'megatron_rl_loss = "{pytest_plugin.__name__}"'


def test_an_assertion_takes_what_check_loss_takes() -> None:
    assert_exact(mode="sample_mean", draws=2)
    with pytest.raises(ValueError, match="call"):
        assert_exact(lambda losses, mask: (losses * mask).sum(), "token_mean", call="nobody")


def test_the_table_has_every_call() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ")]
    assert set(re.findall(r"`(\w+)`", "".join(row.split("|")[2] for row in rows))) - {"call", "LossCall"} == set(CALLS)
