"""An error in any function of this package, on one rank of two under DDP: no rank waits for another."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_call import Job, check_every_call
from torch.nn.parallel import DistributedDataParallel

from megatron_rl_loss import Samples, plan_step, ppo_clip_loss

pytestmark = pytest.mark.slow


class PlainJob(Job):
    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        torch.manual_seed(0)
        self.inputs = [torch.randn(3 + self.rank, 4), torch.randn(5 - self.rank, 4)]

    def plan(self) -> Any:
        def describe() -> list[Samples]:
            return [Samples([torch.ones(len(of))], prompt_ids=[f"{self.rank} {k}"]) for k, of in enumerate(self.inputs)]

        return plan_step(describe, "prompt_mean", dp_group=dist.group.WORLD, gradients="averaged over ranks")

    def model(self) -> Any:
        self.ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
        return self.ddp

    def train(self, plan: Any) -> None:
        for number, (of, microbatch) in enumerate(zip(self.inputs, plan, strict=True)):
            with contextlib.nullcontext() if number else self.ddp.no_sync():
                log_probs = torch.nn.functional.logsigmoid(self.ddp(of)[:, 0])
                policy = ppo_clip_loss(log_probs, log_probs.detach(), torch.ones(len(of)), microbatch)
                microbatch.loss(policy.per_token_loss).backward()


@pytest.mark.parametrize(("phase", "least"), [("plan", 60), ("proof", 60), ("finish", 8)])
def test_an_error_in_any_function_leaves_no_rank_waiting(phase: str, least: int) -> None:
    check_every_call(PlainJob, phase, least)
