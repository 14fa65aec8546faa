"""SkyRL's registry from the run script to a worker: SKYRL_PATH=~/SkyRL, and Ray.

Real: the registration in the driver, `sync_registries`, SkyRL's registry actor, and in a Ray worker SkyRL's Megatron
module and the loss that its `PolicyLossRegistry` gives there. Not started: `MegatronPolicyWorker`, whose step
test_real_skyrl.py runs; SkyRL's command line and its checks of the config.
"""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkouts import SKYRL, Settings, checkout
from ranks import run_ranks
from ray_workers import local_ray

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

_REAL = ("ray", "pydantic", "yaml")
ENGINE = replace(SKYRL, stand_ins=tuple(name for name in SKYRL.stand_ins if name not in _REAL))
_BACKEND = "skyrl.backends.skyrl_train"


def stub() -> None: ...


class Worker:
    """Where SkyRL's worker takes its loss: after its Megatron module, as `MegatronPolicyWorker` does, or before."""

    def loss(self, registry_first: bool) -> str:
        """What a call of the loss says whose advantages nobody weighed; then the process's adapters."""
        registry = importlib.import_module(f"{_BACKEND}.utils.ppo_utils").PolicyLossRegistry
        loss = registry.get("mine") if registry_first else None
        importlib.import_module(f"{_BACKEND}.workers.megatron.megatron_model_wrapper")
        loss = loss or registry.get("mine")
        rows = torch.zeros(2, 3)
        try:
            loss(rows, rows, rows, Settings())
        except ValueError as error:
            return str(error)
        return ""


def drive(root: str) -> tuple[list[str], list[str]]:
    """As a run script does: registered before Ray starts, then synchronised."""
    with local_ray(__name__, root, gpus=1) as lines:
        ppo_utils = importlib.import_module(f"{_BACKEND}.utils.ppo_utils")
        of_ours = importlib.import_module("megatron_rl_loss.engines.skyrl").AggregatedPolicyLoss
        ppo_utils.PolicyLossRegistry.register("mine", of_ours("regular", "prompt_mean", kl="token_mean"))
        ppo_utils.sync_registries()
        workers = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(2)]
        says = ray.get([worker.loss.remote(first) for worker, first in zip(workers, (False, True), strict=True)])
        return says, lines()


def test_a_worker_installs_or_says_that_it_did_not() -> None:
    (((installed, late), lines),) = run_ranks(1, drive, checkout(SKYRL))
    (line,) = [line for line in lines if "SkyRL worker 0: replaced" in line]
    assert "MegatronModelWrapper.forward_backward_mini_batch" in line
    assert "Set trainer.strategy=megatron" in installed  # a call by hand, beside the wrapper that adds weights
    assert "took the loss from SkyRL's registry before it imported MegatronModelWrapper" in late
