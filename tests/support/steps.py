"""Random steps as plain data, how ranks hold them, and how far weights are from the oracle's."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
import torch
from oracle import WORKED_DIVISOR, Sample
from placements import Placement, laid_out, padded_masks
from step_samples import random_samples
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.totals_by_hand import place_in_cp, reducer_by

MASK_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float64, torch.float16, torch.bfloat16)


def ids_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Keyword arguments: the rollout and prompt ids, where the step has some."""
    rollouts, prompts = [sample.rollout_id for sample in samples], [sample.prompt_id for sample in samples]
    return {"rollout_ids": None if None in rollouts else rollouts, "prompt_ids": None if None in prompts else prompts}


def token_weights(
    mode: Any, samples: Samples, totals: StepTotals, *, cp_rank: int | None = None, cp_size: int = 1, **asked: Any
) -> Tensor:
    """The weights of a reducer of these samples, checked as `make_pg_loss_reducer` checks them."""
    local = samples.local(place_in_cp(cp_rank, cp_size), cp_size)
    return reducer_by(resolve(mode, **asked), local, totals).weights


def totals_of(step: Sequence[Sample]) -> StepTotals:
    return StepTotals.of(Samples([sample.mask for sample in step], **(ids_of(step) if step else {})))


def divisor_of(mode: Any) -> float | None:
    return oracle.divisor_of(mode, WORKED_DIVISOR, optional=True)


@dataclass(frozen=True)
class Step:
    """``hands[dp_rank][microbatch]`` are numbers of samples."""

    samples: list[Sample]
    hands: list[list[list[int]]]


def drawn_step(seed: int, dp_size: int = 1, num_microbatches: int = 3) -> Step:
    """A ragged step: uneven prompt groups, rollouts split over samples, some masked, in any order and dealt out anyhow.

    Masks of every dtype, ints or strings for ids, some micro-batches and ranks without a sample.
    """
    rng = random.Random(seed)
    split, dtype = rng.random() < 0.5, rng.choice([None, *MASK_DTYPES])
    ids: Any = rng.choice([int, str, lambda i: 2**61 - 1 - i])
    step, rollout = list[Sample](), 0
    for prompt in range(rng.randint(1, 5)):
        for _ in range(rng.randint(1, 4)):
            rollout += 1
            named = [(ids(rollout) if split else None, ids(prompt))]
            fractions = [0.0, rng.uniform(0.001, 0.1), rng.uniform(0.1, 3.0)]
            weights = rng.choice([[1.0], [0.0, 1.0, 1.0], fractions, [0.0]])
            for sample in random_samples(rng, named * rng.choice([1, 2] if split else [1]), [0, 1, 2, 7, 13], weights):
                as_type = dtype or rng.choice(MASK_DTYPES)
                mask = (sample.mask if as_type.is_floating_point else sample.mask.clamp(max=1)).to(as_type)
                step.append(replace(sample, mask=mask, labels={"counted": len(step) % 3 == 0}))
    hands: list[list[list[int]]] = [[[] for _ in range(num_microbatches)] for _ in range(dp_size)]
    for i in rng.sample(range(len(step)), len(step)):
        rng.choice(rng.choice(hands)).append(i)
    return Step(step, hands)


def as_any_type(rng: random.Random, mask: Tensor) -> Any:
    """A mask as users give it: a tensor, an array or a list."""
    if mask.dtype == torch.bfloat16:
        return mask
    return rng.choice([mask, mask.numpy(), mask.tolist()])


def samples_of(chosen: Sequence[Sample], placed: Placement, **options: Any) -> Samples:
    rng = random.Random(len(chosen))
    masks = [as_any_type(rng, mask) for mask in padded_masks(chosen, placed)]
    turns = [
        [*turns_of(sample), *[""] * (len(mask) - len(sample.mask))] for sample, mask in zip(chosen, masks, strict=True)
    ]
    ids: Any = {"session": [session_of(sample) for sample in chosen], "turn": turns}
    names = set.intersection(*(set(sample.labels) for sample in chosen)) if chosen else ()
    labels = {name: [sample.labels[name] for sample in chosen] for name in names}
    named: Any = ids_of(chosen) if chosen else {}
    return Samples(masks, layout=placed.layout, ids=ids, labels=labels, **named, **options)


def session_of(sample: Sample) -> str:
    return f"session {len(str(sample.prompt_id))} {len(sample.mask) % 2}"


def turns_of(sample: Sample) -> list[str]:
    """Turns of tokens: three go on in other samples of the session, and come again; some masked tokens have none."""
    return ["" if not m and t % 2 else f"{session_of(sample)} {t // 3 % 2}" for t, m in enumerate(sample.mask.tolist())]


def weights_of(mode: str, samples: Sequence[Sample], units: str) -> list[list[float]]:
    """The weight of every token of the step, by the oracle."""
    if mode not in oracle.BY_IDS:
        return oracle.step_weights(mode, samples, divisor_of(mode), units)
    ids = [session_of(sample) for sample in samples], [turns_of(sample) for sample in samples]
    return oracle.weights_by_ids(mode, [sample.mask for sample in samples], *ids, units, [s.labels for s in samples])


def placed(step: Step, dp_rank: int, place: Any, cp_size: int) -> list[tuple[list[Sample], Placement]]:
    hands = [[step.samples[i] for i in hand] for hand in step.hands[dp_rank]]
    return [(hand, laid_out(place, tuple(len(sample.mask) for sample in hand), cp_size)) for hand in hands if hand]


def error_of(weights: Tensor, expected: Iterable[float]) -> float:
    """The largest relative error of a token's weight; infinite for one that should be 0 and is not."""
    right = np.array(list(expected), np.float64)
    assert weights.dtype == torch.float32
    assert weights.shape == right.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.abs(weights.numpy() - right) / np.abs(right)
    return oracle.worst_of(0.0, *np.where(weights.numpy() == right, 0, errors).tolist())
