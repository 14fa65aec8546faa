"""The recipes of pretrain scripts train through the real `pretrain`, and give the same in other layouts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import code_of, commands_of
from ranks import run_ranks
from repository import ROOT
from scripts import printed_by

from megatron_rl_loss.__main__ import copy_example

pytestmark = pytest.mark.slow

#: The page's launch line, but for the mode and what a CPU has not.
LAUNCH = next(line for line in commands_of((ROOT / "docs/using.md").read_text()) if "--num-layers" in line)
FLAGS = LAUNCH.split()[LAUNCH.split().index("--num-layers") :]
ROWS = {"pretrain_packed": "1", "pretrain_bshd": "2"}  # of a micro-batch


def train(recipe: str, flags: list[str]) -> list[dict[str, float]]:
    """The values that Megatron logs, by step."""
    import importlib

    import on_cpu
    from megatron.training import training

    on_cpu.prepare()
    script = importlib.import_module(f"recipes.{recipe}")
    logged: list[dict[str, float]] = []
    training_log = training.training_log

    def catch(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "pg_loss" in loss_dict:
            logged.append({"pg_loss": float(loss_dict["pg_loss"]), "grad_norm": float(args[6])})
        return training_log(loss_dict, *args, **kwargs)

    training.training_log = catch
    words = [word for word in FLAGS if word != "--bf16"]
    sys.argv = [f"{recipe}.py", *words, *on_cpu.FLAGS, "--train-iters", "2", "--micro-batch-size", ROWS[recipe], *flags]
    script.main()
    return logged


@pytest.mark.parametrize("recipe", ROWS)
def test_it_trains_and_saves_and_is_alike_in_every_layout(recipe: str, tmp_path: Path) -> None:
    mode = ["--loss-aggregation", "prompt_mean"]
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    (alone,) = run_ranks(1, train, recipe, [*mode, *save])
    assert len(alone) == 2
    assert list(tmp_path.glob("iter_*2"))
    assert all(step["grad_norm"] > 1e-3 for step in alone)
    # From a random start, which the page's `--padded-vocab-size` makes the same at TP 2.
    over_tp = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    for flags in (["--context-parallel-size", "2"], over_tp)[: 1 + (recipe == "pretrain_packed")]:
        for step, expected in zip(run_ranks(2, train, recipe, [*mode, *flags])[-1], alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
    (other,) = run_ranks(1, train, recipe, ["--loss-aggregation", "sample_mean"])
    assert all(other[0][name] != pytest.approx(alone[0][name], rel=0.01) for name in alone[0])  # the log shows the mode


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's launch line names."""
    folder = tmp_path_factory.mktemp("launch")
    copy_example("pretrain_packed", folder)
    copy_example("on_cpu", folder)
    return folder


def test_an_audit_runs_without_a_gpu(copied: Path) -> None:
    """As docs/audit.md launches it; the script ends after its first step."""
    audit = ["-m", "megatron_rl_loss", "audit", "--fail", "on_cpu.py"]
    printed, _ = run_ranks(2, printed_by, copied, *audit, *LAUNCH[LAUNCH.index("pretrain_packed.py") :].split())
    assert "SOUND: prompt_mean" in printed
    assert "NOT SOUND" not in printed
    assert "iteration        2/" not in printed


def test_the_pages_launch_line_runs_without_a_gpu(copied: Path) -> None:
    words = LAUNCH.split()[1:]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=copied, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    printed = done.stdout
    assert "iteration        5/       5" in printed
    (shown,) = code_of("../README.md", "text")
    counted, proved = (line.removesuffix("...") for line in shown.splitlines())
    assert counted in printed
    assert proved in printed
    assert proved in (ROOT / "docs/proof.md").read_text()
