"""docs/check.md: its code prints what it shows; its test passes in a folder of its own, and a wrong loss fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import code_of
from repository import ROOT

from megatron_rl_loss import assert_exact
from megatron_rl_loss.audit import pytest_plugin
from megatron_rl_loss.audit.simulation import CALLS

PAGE = (ROOT / "docs/check.md").read_text()
FIRST, TEST = code_of("check.md")
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
