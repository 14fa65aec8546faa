"""A step as other frameworks see it: a padded matrix of losses and masks, and how its rows are dealt to ranks."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from step_samples import random_samples
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


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
    prompts = [0, *(1 + rng.randrange(3) for _ in range(rng.randint(5, 10)))]
    samples = random_samples(rng, [(None, prompt) for prompt in prompts], range(3, rng.randint(6, 14)), (0, 1, 1))
    for i, sample in enumerate(samples):
        sample.mask[0] = 1  # of those that are not
        sample.mask.mul_(i > 1)
    masks = pad_sequence([sample.mask for sample in samples], batch_first=True)
    losses = pad_sequence([sample.losses.float() for sample in samples], batch_first=True, padding_value=7.0)
    return Batch(losses, masks, prompts)


def deal(rows: int, dp_size: int, seed: int) -> list[list[list[int]]]:
    """Rows of each micro-batch of each DP rank: uneven, some empty."""
    rng = random.Random(seed)
    ranks: list[list[list[int]]] = [[[] for _ in range(rng.randint(1, 3))] for _ in range(dp_size)]
    for row in rng.sample(range(rows), rows):
        rng.choice(rng.choice(ranks)).append(row)
    return ranks


def later_tokens_more(inputs: Any) -> list[Tensor]:
    """A mode of one's own whose weights differ within a sample."""
    return [torch.arange(1.0, length + 1) for length in inputs.batch.mask_lengths]
