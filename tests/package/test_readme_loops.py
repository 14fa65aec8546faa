"""README's loops, pasted into a file as they are: they need torch alone, are proved, and print what it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import code_of
from repository import ROOT

ALONE, WITH_DDP = [code for code in code_of("../README.md") if code.startswith("import torch\n")]
#: Makes Megatron unavailable to what runs after it.
WITHOUT_MEGATRON = 'import sys\nsys.modules["megatron"] = None\n'


def run(code: str, folder: Path, *launcher: str) -> str:
    (folder / "loop.py").write_text(WITHOUT_MEGATRON + code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, "loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_first_loop_prints_what_readme_shows(tmp_path: Path) -> None:
    assert run(ALONE, tmp_path).split() == code_of("../README.md", "console")[0].split()  # there in two lines


@pytest.mark.slow
def test_the_loop_with_ddp_is_proved(tmp_path: Path) -> None:
    printed = run(WITH_DDP, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (counts,) = (f"proved on {n} tokens of {k} samples" for n, k in [(18, 6)])
    assert printed.count("aggregation ") == printed.count(counts) == 1
    assert f"`{counts}`" in (ROOT / "README.md").read_text()


def test_what_ddp_changes_is_marked() -> None:
    """A line that is not in the first loop says DDP, or the line above it does."""
    lines, before = WITH_DDP.splitlines(), ALONE.splitlines()
    new = [n for n, line in enumerate(lines) if line not in before]
    assert new
    assert not [lines[n] for n in new if "DDP" not in lines[n] + lines[n - 1]]
    gone = [line.strip() for line in before if line not in lines]
    assert gone == ['plan = plan_step(samples, "token_mean")']


def test_a_loop_is_short() -> None:
    """From the samples to the optimizer's step: about ten lines."""
    assert len(ALONE.partition("for step in")[2].splitlines()) <= 13


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 225
    assert [line for line in lines if len(line) > 130] == []
