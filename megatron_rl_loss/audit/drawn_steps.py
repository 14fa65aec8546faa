"""Random ragged steps, for checks that try something on many of them and then look for the smallest that shows it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.step.totals import Statistic, StepTotals


@dataclass(frozen=True)
class DrawnSample:
    """A row of data: its loss mask, of zeros and ones, and the numbers of the rollout and the prompt it belongs to."""

    mask: tuple[int, ...]
    rollout: int = 0
    prompt: int = 0


@dataclass(frozen=True)
class DrawnStep:
    """The samples of an optimizer step. With `split_rollouts`, samples of one rollout number are one rollout."""

    samples: tuple[DrawnSample, ...]
    split_rollouts: bool = False

    @classmethod
    def random(cls, rng: random.Random, split_rollouts: bool, num_samples: int) -> "DrawnStep":
        """Ragged, unevenly masked samples, some fully masked."""
        samples: list[DrawnSample] = []
        for rollout in range(num_samples):
            prompt = rng.randrange(max(3, num_samples))
            for _ in range(rng.choice([1, 2]) if split_rollouts else 1):
                share = rng.choice([0.0, 0.5, 0.5, 1.0])
                mask = tuple(int(rng.random() < share) for _ in range(rng.randrange(1, 12)))
                samples.append(DrawnSample(mask, rollout, prompt))
        return cls(tuple(samples[:num_samples]), split_rollouts)

    @cached_property
    def masks(self) -> list[Tensor]:
        """Loss masks, float32, a 1-D tensor a sample."""
        return [torch.tensor(sample.mask, dtype=torch.float32) for sample in self.samples]

    @property
    def prompt_ids(self) -> list[int]:
        return [sample.prompt for sample in self.samples]

    @property
    def rollout_ids(self) -> list[int] | None:
        """None where each sample is a rollout."""
        return [sample.rollout for sample in self.samples] if self.split_rollouts else None

    @cached_property
    def labels(self) -> dict[str, list[Any]]:
        """What modes over declared sums look at (`paper_modes`): one entry a sample, turns one a token."""
        numbers = range(len(self.samples))
        return {
            "advantage": [1.0 if (i * 7 + sample.prompt) % 3 else -1.0 for i, sample in enumerate(self.samples)],
            "weight": [0.5 + i % 3 for i in numbers],
            "adapter": [f"adapter {i % 2}" for i in numbers],
            "turns": [torch.arange(len(mask)) // 3 for mask in self.masks],
        }

    def totals_with(self, statistics: Mapping[str, Statistic]) -> StepTotals:
        """The step's totals, with sums that a mode declares."""
        ids: Any = {"prompt_ids": self.prompt_ids, "rollout_ids": self.rollout_ids}
        return StepTotals.from_loss_masks(self.masks, **ids, dp_group=None, labels=self.labels, statistics=statistics)
