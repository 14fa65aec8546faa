"""The random steps of `check_loss`, and the ways in which it cuts them over micro-batches and ranks."""

import random
from itertools import product

from megatron_rl_loss.audit.simulation import DrawnRow, DrawnStep, LossCall, for_labels

UNCUT, TOGETHER = "in one micro-batch on one rank", "over all of these together"
PADDED = "with masked tokens behind rows"
#: Ways of cutting a step: over micro-batches (K), data-parallel (D) and context-parallel ranks (C).
CUTS: dict[str, str] = {
    **{"over micro-batches": "K", "over data-parallel ranks": "D", "over context-parallel ranks": "C"},
    **{UNCUT: "", PADDED: "", TOGETHER: "KDC"},
}


#: Entries of a mask of weights; exact in binary, so that sums are.
_FRACTIONS = (0.25, 0.5, 1.0)


def _weighed(mask: tuple[float, ...], rng: random.Random) -> tuple[float, ...]:
    """A mask of weights in the place of ones, of which one stays: trainers may divide by no less than 1."""
    weights = [entry and rng.choice(_FRACTIONS) for entry in mask]
    if any(mask):
        weights[rng.choice([t for t, entry in enumerate(mask) if entry])] = 1.0
    return tuple(weights)


def draw_step(call: LossCall, over: str, seed: str, *, is_large: bool, is_fractional: bool = False) -> DrawnStep:
    """A random step with an active token, cut over the sizes that `over` names (see `CUTS`).

    `is_fractional`: masks hold weights, where the call has such masks.
    """
    rng = random.Random(seed)
    most, longest = (3, 11) if is_large else (2, 3)
    ends = {"K": (3, 5), "D": (2, 4), "C": (2, 4)}
    K, D, C = ((rng.randint(*ends[size]) if is_large else 2) if size in over else 1 for size in ends)
    least, most = (1, most) if K * D > 1 else (most - 1, most**2)  # rows of a micro-batch
    even = rng.randint(least, most)
    numbers = {
        place: even if call.even_microbatches else rng.randint(least, most) for place in product(range(D), range(K))
    }
    places = [place for place, number in numbers.items() for _ in range(number)]
    rows = list[DrawnRow]()
    for i in range(len(places)):
        rollout, prompt = i, rng.randint(0, len(places) // 3)
        if i in (0, len(places) - 1):
            prompt = int(i > 0)  # two prompts at least
        if call.split_rollouts and (i == 1 or (i and rng.random() < 0.4)):
            rollout, prompt = rows[-1].rollout, rows[-1].prompt
        share = rng.choice([0.0, 0.5, 1.0]) if i else 1.0  # of a fully masked step nothing is trained
        mask = tuple(int(rng.random() < share) for _ in range(rng.randint(1, longest)))
        mask = mask if any(mask) or call.masked_samples else (1, *mask[1:])
        rows.append(DrawnRow(mask, rollout, prompt))
    if call.fractional_masks and is_fractional:
        rows = [row._replace(mask=_weighed(row.mask, rng)) for row in rows]
    rng.shuffle(rows)
    placed = tuple(row._replace(dp_rank=d, microbatch=k) for row, (d, k) in zip(rows, places, strict=True))
    return for_labels(DrawnStep(placed, K, D, C if call.cp else 1, rng.randrange(2**31)), call)
