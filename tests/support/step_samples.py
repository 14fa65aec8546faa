"""The samples of a step that most tests share, and how they are dealt out: nothing of the package, or of Megatron."""

import random
from collections.abc import Iterable, Sequence

import oracle

DIVISOR = 7.0


def random_samples(
    rng: random.Random,
    ids: Iterable[tuple[int | str | None, int | str]],
    lengths: Sequence[int] = (1, 2, 3, 5, 8, 13),
    weights: Sequence[float] = (0, 1, 1, 0.5),
) -> list[oracle.Sample]:
    """A ragged sample for each pair of a rollout's and a prompt's id: the one maker of random steps."""
    samples = []
    for rollout_id, prompt_id in ids:
        length = rng.choice(lengths)
        mask = [rng.choice(weights) for _ in range(length)]
        samples.append(oracle.sample([rng.uniform(-3, 3) for _ in range(length)], mask, rollout_id, prompt_id))
    return samples


def step_samples(seed: int) -> list[oracle.Sample]:
    """Samples with fractional, partly and fully masked tokens, split rollouts and uneven prompt groups."""
    ids = [(f"r{i - i % 3 // 2}", f"p{min(i // 3, 2)}") for i in range(13)]
    samples = random_samples(random.Random(seed), ids)
    for i in (4, 9):
        samples[i].mask.zero_()
    return samples


def dealt(samples: list[oracle.Sample], dp_rank: int, dp_size: int, num_microbatches: int) -> list[list[int]]:
    """Sample numbers of each of this rank's micro-batches: uneven, so that units straddle ranks and micro-batches."""
    slots: list[list[int]] = [[] for _ in range(dp_size * num_microbatches)]
    rng = random.Random(5)
    for i in range(len(samples)):
        slots[rng.randrange(len(slots))].append(i)
    return slots[dp_rank::dp_size]
