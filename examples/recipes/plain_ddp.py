"""Plain DistributedDataParallel, no Megatron. DDP averages gradients over its ranks, which the plan is told.

torchrun --nproc-per-node 2 plain_ddp.py
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megatron_rl_loss import Samples, plan_step, ppo_clip_loss, prove_step

Batch = dict[str, Any]  # tokens, labels, old_log_probs, advantages: [tokens]; loss_masks, prompt_ids: 1 per sample


def train_step(model: Any, optimizer: Any, batches: list[Batch], mode: str, divisor: float | None = None) -> Tensor:
    """Run one optimizer step over this rank's micro-batches, any number. Returns the step loss of all ranks."""

    def describe() -> list[Samples]:  # a function: what it raises on one rank is raised on all
        return [Samples(**{name: batch[name] for name in ("loss_masks", "prompt_ids", "tokens")}) for batch in batches]

    plan = plan_step(
        describe,
        mode,
        divisor=divisor,
        dp_group=dist.group.WORLD,
        gradients="averaged over ranks",
    )
    optimizer.zero_grad()
    # The first step is proved; a wrong one stops all ranks.
    with prove_step(model, plan):
        for batch, microbatch in zip(batches, plan, strict=True):
            is_last = microbatch is plan[-1]
            with contextlib.nullcontext() if is_last else model.no_sync():
                logits = model(batch["tokens"])
                log_probs = logits.log_softmax(-1).gather(-1, batch["labels"][:, None])[:, 0]
                old, advantages = batch["old_log_probs"], batch["advantages"]
                policy = ppo_clip_loss(log_probs, old, advantages, microbatch)
                microbatch.loss(policy.per_token_loss).backward()
    # Clip gradients here.
    values = plan.finish()
    optimizer.step()
    return values["pg_loss"]


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(9, 16), torch.nn.Linear(16, 9)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tokens = torch.randint(9, (8,), generator=generator)
    batch: Batch = {"tokens": tokens, "labels": tokens.roll(-1), "old_log_probs": torch.full((8,), -2.2)}
    batch |= {"loss_masks": [torch.ones(5), torch.ones(3)], "prompt_ids": [dist.get_rank()] * 2}
    batch["advantages"] = torch.tensor([1.0, -1.0]).repeat_interleave(torch.tensor([5, 3]))
    for step in range(3):
        print(step, float(train_step(model, optimizer, [batch], "prompt_mean")))


if __name__ == "__main__":
    main()
