"""A step as other frameworks see it: a padded matrix of losses and masks, and how its rows are dealt to ranks."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """A step as frameworks see it: losses and 0/1 masks [rows, tokens], and the prompt of each row."""

    losses: Tensor
    masks: Tensor
    prompts: list[int]

    @property
    def rows(self) -> int:
        return len(self.prompts)


def random_batch(seed: int) -> Batch:
    """Ragged rows and prompt groups. Two rows are fully masked, one of them alone in its group; losses everywhere."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, width = rng.randint(6, 11), rng.randint(5, 13)
    masks = torch.zeros(rows, width)
    for row in range(2, rows):
        length = rng.randint(1, width)
        masks[row, :length] = (torch.rand(length) < 0.7).float()
        masks[row, rng.randrange(length)] = 1
    return Batch(torch.randn(rows, width) * 3, masks, [0, *(1 + rng.randrange(3) for _ in range(rows - 1))])


def deal(rows: int, dp_size: int, seed: int) -> list[list[list[int]]]:
    """Rows of each micro-batch of each DP rank: uneven, some empty."""
    rng = random.Random(seed)
    ranks: list[list[list[int]]] = [[[] for _ in range(rng.randint(1, 3))] for _ in range(dp_size)]
    for row in rng.sample(range(rows), rows):
        rng.choice(rng.choice(ranks)).append(row)
    return ranks


def later_tokens_more(inputs: Any) -> list[Tensor]:
    """A mode of one's own whose weights differ within a sample."""
    return [torch.arange(1.0, length + 1) for length in inputs.samples.mask_lengths]
