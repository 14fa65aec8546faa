"""Whole steps in one process: random ones, what a launch would make of them, and what the oracle says.

`run_step` cuts the step into micro-batches, lays each out, hands every CP rank its own piece of the losses, and adds up
the shares and the gradients.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import oracle
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from oracle import NAN, WORKED_DIVISOR, Sample
from placements import Place, laid_out, padded_masks, plain
from step_samples import random_samples
from torch import Tensor

from megatron_rl_loss import StepTotals, make_pg_loss_reducer
from megatron_rl_loss.step import masks

quick = settings(deadline=None, derandomize=True, max_examples=4)


def ids_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Keyword arguments: the rollout and prompt ids, where the step has some."""
    rollouts, prompts = [one.rollout_id for one in samples], [one.prompt_id for one in samples]
    return {"rollout_ids": None if None in rollouts else rollouts, "prompt_ids": None if None in prompts else prompts}


def totals_of(step: Sequence[Sample]) -> StepTotals:
    some_ids = ids_of(step) if step else {}
    return StepTotals.from_loss_masks([one.mask for one in step], **some_ids)


def divisor_of(mode: str) -> float | None:
    return WORKED_DIVISOR if mode in ("constant", "token_sum") else None


def on_both(work: Callable[[], Any]) -> list[Any]:
    """What comes of masks on the host, and what would of masks on a device."""
    with pytest.MonkeyPatch.context() as patch:
        of_host = work()
        patch.setattr(masks, "on_host", lambda values: False)
        return [of_host, work()]


@dataclass
class Outcome:
    """The step loss, and its gradient for every token of the step, sample after sample."""

    value: float
    gradient: Tensor


def run_step(
    step: Sequence[Sample],
    microbatches: Sequence[Sequence[int]],
    mode: str,
    units: str = "all",
    *,
    place: Place = plain,
    cp_size: int = 1,
    padding: float = NAN,
) -> Outcome:
    """Reduce the step as its ranks would. `padding` is the loss where there is no token."""
    totals = totals_of(step)
    losses = [one.losses.tolist() for one in step]
    shares, parts = [], []
    for microbatch in microbatches:
        samples = [step[i] for i in microbatch]
        placed = laid_out(place, tuple(len(one.losses) for one in samples), cp_size)
        for rank, held in enumerate(placed.held):
            reducer = make_pg_loss_reducer(
                mode,
                padded_masks(samples, placed),
                totals=totals,
                divisor=divisor_of(mode),
                units=units,  # type: ignore[arg-type]
                **ids_of(samples),
                layout=placed.layout,
                cp_rank=rank,
                cp_size=cp_size,
            )
            flat = [padding if token is None else losses[microbatch[token[0]]][token[1]] for token in held]
            local = torch.tensor(flat).reshape(placed.shape(len(held))).requires_grad_()
            share = reducer(local)
            assert share.dtype == torch.float32
            assert share.shape == ()
            shares.append(share)
            parts.append((microbatch, held, local))
    total = torch.stack(shares).double().sum()
    total.backward()
    gradient = [[0.0] * len(one) for one in losses]
    for microbatch, held, local in parts:
        for token, slope in zip(held, local.grad.flatten().tolist(), strict=True):
            if token is None:
                assert slope == 0, "padding has a gradient"
            else:
                gradient[microbatch[token[0]]][token[1]] += slope
    return Outcome(float(total.detach()), torch.tensor([x for one in gradient for x in one], dtype=torch.float64))


def oracle_gradient(step: Sequence[Sample], mode: str, units: str = "all") -> Tensor:
    return torch.cat(oracle.step_gradient(mode, step, divisor_of(mode), units))


def assert_equals_oracle(outcome: Outcome, step: Sequence[Sample], mode: str, units: str = "all") -> None:
    """The value to what its sum may be off by, the gradient of every token to that of its weight."""
    divisor = divisor_of(mode)
    error = oracle.sum_error(oracle.num_tokens(step)) * oracle.step_scale(mode, step, divisor, units)
    assert outcome.value == pytest.approx(float(oracle.step_loss(mode, step, divisor, units)), rel=0, abs=error)
    torch.testing.assert_close(outcome.gradient, oracle_gradient(step, mode, units), rtol=oracle.EXACT, atol=0)


MASK_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
    torch.float16, torch.bfloat16,
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    samples: list[Sample]
    microbatches: list[list[int]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A ragged step: prompt groups of uneven size, rollouts split over samples, all in any order and cut anyhow."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    split = draw(st.booleans())
    ids = draw(st.sampled_from([int, str, lambda i: -i - 2**60]))
    mask_dtype = draw(st.sampled_from([*MASK_DTYPES, None]))
    samples, rollouts = [], itertools.count()
    for prompt, group_size in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))):
        for _ in range(group_size):
            rollout = ids(next(rollouts)) if split else None
            for _ in range(rng.choice([1, 1, 2, 3]) if split else 1):
                fractions = [0.0, rng.uniform(0.001, 0.1), rng.uniform(0.1, 3.0)]
                weights = rng.choice([[1.0], [0.0, 1.0, 1.0], fractions, [0.0]])
                (one,) = random_samples(rng, [(rollout, ids(prompt))], [0, 1, 2, rng.randrange(3, 14)], weights)
                as_type = mask_dtype or rng.choice(MASK_DTYPES)
                mask = (one.mask if as_type.is_floating_point else one.mask.clamp(max=1)).to(as_type)
                samples.append(replace(one, losses=one.losses.float().double(), mask=mask).poisoned())
    order = list(range(len(samples)))
    rng.shuffle(order)
    cuts = sorted({0, len(order), *(rng.randrange(len(order) + 1) for _ in range(rng.randrange(5)))})
    return Step(samples, [order[a:b] for a, b in itertools.pairwise(cuts)])
