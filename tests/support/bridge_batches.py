"""Micro-batches for the recipe of Megatron-Bridge, on a table of losses, and what must come out."""

from typing import Any

import oracle
import torch
from step_samples import dealt
from torch import Tensor
from world import CP, DP, STEP, TABLE


def of_entries() -> tuple[Tensor, Tensor, Tensor]:
    """Minus the log-prob, the old log-prob, in part beyond the clip, and the advantage of each entry of the table."""
    generator = torch.Generator().manual_seed(3)
    noise, advantages = torch.randn(2, len(TABLE), generator=generator)
    table = torch.tensor(TABLE).abs() + 1
    return table, noise / 4 - table, advantages


def clipped_samples(table: Tensor | None = None) -> tuple[list[oracle.Sample], Tensor]:
    """PPO's loss of the step's tokens, each row a rollout, and its derivative by each entry of the table; float64.

    `table`: what earlier steps have made of it.
    """
    first, old, advantages = (values.double() for values in of_entries())
    table = (first if table is None else table).clone().requires_grad_()
    ratio = (-table - old).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    (factor,) = torch.autograd.grad(losses.sum(), table)
    parts = losses.detach()[:-1].split([len(sample.mask) for sample in STEP])
    rows = zip(parts, STEP, strict=True)
    return [oracle.Sample(part, sample.mask, None, sample.prompt_id) for part, sample in rows], factor


def grpo_batches(dp_rank: int) -> list[dict[str, Any]]:
    """The recipe's micro-batches of rows; a token is its entry of the table, the last one is padding."""
    lengths = [len(sample.mask) for sample in STEP]
    first, length = [sum(lengths[:i]) for i in range(len(STEP))], -(-max(lengths) // (2 * CP)) * 2 * CP
    _, old, advantages = of_entries()
    batches = []
    for chosen in dealt(STEP, dp_rank, DP, 3):
        tokens = torch.full((len(chosen), length), len(TABLE) - 1)
        masks = [torch.zeros(length, dtype=torch.float64) for _ in chosen]
        for row, i in enumerate(chosen):
            tokens[row, : lengths[i]] = first[i] + torch.arange(lengths[i])
            masks[row][: lengths[i]] = STEP[i].mask
        values: dict[str, Any] = {"tokens": tokens, "labels": tokens}
        values |= {
            "positions": torch.arange(length).expand_as(tokens),
            "old_log_probs": old[tokens],
            "advantages": advantages[tokens],
            "loss_masks": masks,
        }
        batches.append(values | {"prompt_ids": [str(STEP[i].prompt_id) for i in chosen]})
    return batches
