"""Random ragged steps, for checks that try something on many of them and then look for the smallest that shows it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import Sum


@dataclass(frozen=True)
class DrawnSample:
    """A row of data: its loss mask, of zeros and ones, and the numbers of the rollout and the prompt it belongs to."""

    mask: tuple[int, ...]
    rollout: int = 0
    prompt: int = 0


def draw_samples(rng: random.Random, split_rollouts: bool, number: int) -> list[DrawnSample]:
    """Ragged, unevenly masked samples, some fully masked."""
    samples: list[DrawnSample] = []
    for rollout in range(number):
        prompt = rng.randrange(max(3, number))
        for _ in range(rng.choice([1, 2]) if split_rollouts else 1):
            share = rng.choice([0.0, 0.5, 0.5, 1.0])
            mask = tuple(int(rng.random() < share) for _ in range(rng.randrange(1, 12)))
            samples.append(DrawnSample(mask, rollout, prompt))
    return samples[:number]


@dataclass(frozen=True)
class LossCase:
    """A step and how it is split; plain data, whose `repr` makes it again."""

    ranks: tuple[tuple[tuple[DrawnSample, ...], ...], ...]  # [dp_size][num_microbatches][rows]
    cp_size: int = 1  # context-parallel ranks that every micro-batch is cut for
    split_rollouts: bool = False  # whether samples of one rollout number are one rollout
    seed: int = 0  # of the losses of tokens
    poisoned: bool = False  # whether losses are NaN where the mask is 0
    padded_masks: bool = False  # whether a function that asks for masks gets them as long as their padded slots

    @property
    def num_microbatches(self) -> int:
        return len(self.ranks[0])

    @property
    def dp_size(self) -> int:
        return len(self.ranks)

    @cached_property
    def samples(self) -> tuple[DrawnSample, ...]:
        """All of them, in order."""
        return tuple(sample for rank in self.ranks for microbatch in rank for sample in microbatch)

    @cached_property
    def masks(self) -> list[Tensor]:
        """Loss masks, float32, a 1-D tensor per sample."""
        return [torch.tensor(sample.mask, dtype=torch.float32) for sample in self.samples]

    def ids(self, rows: slice = slice(None)) -> dict[str, Any]:
        """Of some samples, for `Samples` and totals; rollouts are None where each sample is one."""
        rollouts = [sample.rollout for sample in self.samples[rows]] if self.split_rollouts else None
        return {"prompt_ids": [sample.prompt for sample in self.samples[rows]], "rollout_ids": rollouts}

    @cached_property
    def labels(self) -> dict[str, list[Any]]:
        """What modes of one's own may look at: one entry per sample, turns one per token."""
        numbers = range(len(self.samples))
        return {
            "advantage": [1.0 if (i * 7 + sample.prompt) % 3 else -1.0 for i, sample in enumerate(self.samples)],
            "weight": [0.5 + i % 3 for i in numbers],
            "adapter": [f"adapter {i % 2}" for i in numbers],
            "turns": [torch.arange(len(mask)) // 3 for mask in self.masks],
        }

    def totals_with(self, sums: Sequence[Sum]) -> StepTotals:
        """The step's totals, with sums that a mode declares."""
        return StepTotals.from_loss_masks(self.masks, **self.ids(), labels=self.labels, sums=sums, dp_group=None)

    def uncut(self) -> "LossCase":
        """The same samples in one micro-batch on one rank."""
        return replace(self, ranks=((self.samples,),), cp_size=1, padded_masks=False)

    def losses(self, takes: str = "losses") -> Tensor:
        """A random number per mask entry, float32 [num_entries]: of both signs, or below 0 for log-probs."""
        generator = torch.Generator().manual_seed(self.seed)
        masks = torch.cat(self.masks)
        values = 3 * torch.randn(len(masks), generator=generator)
        values = -values.abs() - 0.1 if takes == "log_probs" else values
        return values.masked_fill(masks == 0, float("nan")) if self.poisoned else values

    def advantages(self) -> Tensor:
        """A random number per sample, float32 [num_samples], of both signs and at least 0.5 in size."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        values = torch.randn(len(self.samples), generator=generator)
        return values + 0.5 * torch.where(values < 0, -1.0, 1.0)

    def __str__(self) -> str:
        """The masks: samples apart by a space, micro-batches by a bar, with their rollouts where those are split."""
        ranks = [" | ".join(" ".join(map(self._shown, microbatch)) for microbatch in rank) for rank in self.ranks]
        named = [f"rank {i}: {rows}" for i, rows in enumerate(ranks)] if self.dp_size > 1 else ranks
        return "; ".join(named) + (f"; CP {self.cp_size}" if self.cp_size > 1 else "")

    def _shown(self, sample: DrawnSample) -> str:
        rollout = f"rollout {sample.rollout}:" if self.split_rollouts else ""
        return f"{rollout}[{''.join(map(str, sample.mask))}]"
