"""`audit.attach` in workers that an engine starts: the verdict comes, and training goes on as if nobody had looked."""

import functools
import importlib
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from attached_engine import ATTACH, LAYOUT, train
from fork_server import PYTHONPATH
from ranks import environment, run_ranks

pytestmark = pytest.mark.slow

Trained = list[tuple[list[Any], str, bool]]
VARIABLE = "MEGATRON_RL_LOSS_AUDIT"
EXPECT = "--expect token_mean --json "


def in_ranks(scaling: str, options: str | None, out: Path, later: bool = False) -> Trained:
    """`later`: of an engine that finalises gradients after the schedule."""
    plugin = None if options is None else ATTACH
    return run_ranks(LAYOUT.world_size, train, scaling, {VARIABLE: f"{options}{out}"}, plugin, later)


def in_ray(scaling: str, options: str | None, out: Path) -> Trained:
    """A local cluster; a worker imports the module because the job says so, and the engine knows nothing of it."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    store = vars(dist)["TCPStore"]("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world_size = LAYOUT.world_size
    variables = environment(world_size, store.port) | {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""}
    job: dict[str, Any] = {"env_vars": variables | {VARIABLE: f"{options}{out}"}}
    if options is not None:
        job["worker_process_setup_hook"] = f"{ATTACH}.attach"

    @ray.remote(num_cpus=1)
    class Worker:
        def train(self, rank: int) -> Any:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            importlib.import_module("warm_megatron")
            return importlib.import_module("attached_engine").train(scaling, {})

    actor: Any = Worker
    ray.init(num_cpus=world_size, runtime_env=job, include_dashboard=False, log_to_driver=False)
    try:
        workers = [actor.remote() for _ in range(world_size)]
        by_rank: Trained = ray.get([worker.train.remote(rank) for rank, worker in enumerate(workers)], timeout=600)
        return by_rank
    finally:
        ray.shutdown()


LAUNCHES: dict[str, tuple[Any, str, str]] = {
    "ranks": (in_ranks, "mean", "NOT SOUND: expected"),
    "later": (functools.partial(in_ranks, later=True), "per token", "SOUND:"),
    "ray": (in_ray, "mean", "NOT SOUND: expected"),
}


@functools.cache
def alone(name: str) -> Trained:
    launch, scaling, _ = LAUNCHES[name]
    trained: Trained = launch(scaling, None, Path())
    return trained


def same(left: Trained, right: Trained) -> bool:
    """True if they are equal to the bit."""
    pairs = zip(left, right, strict=True)
    return all(np.array_equal(a, b) for mine, theirs in pairs for a, b in zip(mine[0], theirs[0], strict=True))


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_first_step_is_judged_and_training_goes_on(name: str, tmp_path: Path) -> None:
    launch, scaling, headline = LAUNCHES[name]
    out = tmp_path / "verdict.json"
    audited = launch(scaling, EXPECT, out)
    verdict = json.loads(out.read_text())["pg"]
    assert verdict["sound"] is headline.startswith("SOUND")
    assert verdict["unknown"] == []
    printed = [text for _, text, _ in audited]
    assert re.search(rf"training goes on:\n(?:.*\n)+?{headline} token_mean", printed[0])
    assert re.search(
        rf"training goes on:\n.*log-probs of {verdict['tokens']} tokens in .*rounded to bfloat16", printed[0], re.DOTALL
    )
    assert not any(printed[1:])
    assert all(clean for _, _, clean in audited)
    assert same(audited, alone(name))


def test_an_audit_that_fails_says_so_and_training_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "verdict.json"
    audited = in_ranks("mean", "--expect token_meen --json ", out)
    assert re.search(r"training goes on:\nNO VERDICT: The audit failed\. ValueError: .*'token_meen'", audited[0][1])
    assert "token_meen" in json.loads(out.read_text())["error"]
    assert all(clean for _, _, clean in audited)
    assert same(audited, alone("ranks"))


def test_a_worker_whose_megatron_is_broken_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", ModuleType("parallel_state"))
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel.schedules", None)
    importlib.import_module(ATTACH)
    del sys.modules[ATTACH]
    assert "NO VERDICT: Megatron's schedules cannot be imported." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--expct token_mean", "'--expct token_mean': unrecognized arguments: --expct token_mean"),
        ("--json it's", ": No closing quotation"),
        ("--step 0", "argument --step: '0': a training step is an int >= 1"),
    ],
)
def test_misspelt_options_are_refused_before_training(options: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, VARIABLE, options)
    with pytest.raises(ValueError, match=text):
        importlib.import_module(ATTACH)
