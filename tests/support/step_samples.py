"""The samples of a step that most tests share, and how they are dealt out: nothing of the package, or of Megatron."""

import random

import oracle

DIVISOR = 7.0


ALL_SETTINGS = [
    {"mode": mode, "units": units, "divisor": DIVISOR if mode == "constant" else None}
    for mode, units in oracle.COUNTINGS
]


def step_samples(seed: int) -> list[oracle.Sample]:
    """Ragged samples with fractional, partly and fully masked tokens, split rollouts and uneven prompt groups."""
    rng = random.Random(seed)
    samples = []
    for i in range(13):
        length = rng.choice([1, 2, 3, 5, 8, 13])
        mask = [rng.choice([0, 1, 1, 0.5]) for _ in range(length)]
        if i in (4, 9):
            mask = [0] * length
        losses = [rng.uniform(-3, 3) for _ in range(length)]
        samples.append(oracle.sample(losses, mask, rollout_id=f"r{i - i % 3 // 2}", prompt_id=f"p{min(i // 3, 2)}"))
    return samples


def dealt(samples: list[oracle.Sample], dp_rank: int, dp_size: int, num_microbatches: int) -> list[list[int]]:
    """Sample numbers of each of this rank's micro-batches: uneven, so that units straddle ranks and micro-batches."""
    slots: list[list[int]] = [[] for _ in range(dp_size * num_microbatches)]
    rng = random.Random(5)
    for i in range(len(samples)):
        slots[rng.randrange(len(slots))].append(i)
    return slots[dp_rank::dp_size]
