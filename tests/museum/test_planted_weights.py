"""Every published bug, planted into the package's reducers as the weights that it gives, must turn the comparison red.

The comparison is the one that sound code passes on the same step: the gradient of each token's loss, added up over all
ranks and micro-batches, against the float64 oracle. The mutant goes the sound code's way but for `weigh`.
"""

import itertools

import numpy as np
import oracle
import pytest
import torch
from counted_steps import Array, Step
from published import BUGS, Bug
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.reduction import sums
from megatron_rl_loss.step import LocalTokens, StepTotals, counting

pytestmark = pytest.mark.slow  # hundreds of random steps

TOLERANCE = 1e-6


def microbatches(step: Step) -> list[Samples]:
    """Packed, each row padded so that it can be cut for context parallelism."""
    held = []
    for chosen in (chosen for rank in step.rows for chosen in rank):
        lengths = [len(row.mask) for row in chosen]
        slots = [-(-length // (2 * step.cp_size)) * 2 * step.cp_size for length in lengths]
        layout = ZigzagTHD([0, *itertools.accumulate(slots)], total_lengths=lengths)
        masks = [torch.tensor(row.mask, dtype=torch.float32) for row in chosen]
        ids = {"rollout_ids": [row.rollout for row in chosen], "prompt_ids": [row.prompt for row in chosen]}
        held.append(Samples(masks, layout=layout, **ids))  # type: ignore[arg-type]
    return held


def cut(values: Array, held: list[Samples]) -> list[Tensor]:
    """A value for each entry of the step's masks, as each micro-batch's layout wants it."""
    parts = iter(torch.from_numpy(values).split([length for one in held for length in one.mask_lengths]))
    return [one.in_buffer([next(parts) for _ in one.mask_lengths]) for one in held]


def gradient(step: Step, asked: Aggregation) -> Array:
    """Of every entry of the step's masks."""
    held = microbatches(step)
    leaf = torch.zeros(len(step.counted.m), requires_grad=True)
    table = torch.cat([leaf, torch.zeros(1)])  # the last is padding
    numbers = cut(np.arange(1, len(leaf) + 1), held)
    step_totals = counting.reduce_step_totals(held)
    loss = torch.zeros(())
    for samples, places in zip(held, numbers, strict=True):
        for cp_rank in range(step.cp_size):
            local = samples.local(cp_rank, step.cp_size)
            loss = loss + sums.reducer_of(asked, local, step_totals)(table[local.of(places) - 1])
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad.double().numpy()


def off(weights: Array, expected: Array) -> float:
    worst = float(np.abs(weights - expected).max() / np.abs(expected).max())
    return worst if np.isfinite(worst) else np.inf


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.id) for bug in BUGS])
def test_the_planted_bug_is_caught_where_sound_code_is_not(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    step = bug.step(1)
    asked = resolve(bug.asked, divisor=bug.divisor)
    samples = [oracle.sample([0.0] * len(r.mask), r.mask, r.rollout, r.prompt) for r in step.counted.samples]
    divisor = asked.divisor if asked.mode.name == "constant" else None
    expected = torch.cat(oracle.step_gradient(asked.mode.name, samples, divisor, "all")).numpy()
    assert off(gradient(step, asked), expected) < TOLERANCE
    planted = bug.weights(step.counted)
    by_masks: dict[tuple[int, ...], Tensor] = {}

    def weigh(aggregation: Aggregation, local: LocalTokens, step_totals: StepTotals) -> Tensor:
        return local.of(by_masks[tuple(map(id, local.samples.loss_masks))]).float()

    sound = counting.reduce_step_totals

    def reduce_step_totals(held: list[Samples]) -> StepTotals:
        for one, weights in zip(held, cut(planted, held), strict=True):
            by_masks[tuple(map(id, one.loss_masks))] = weights
        return sound(held)

    monkeypatch.setattr(sums, "weigh", weigh)
    monkeypatch.setattr(counting, "reduce_step_totals", reduce_step_totals)
    found = gradient(step, asked)
    assert off(found, expected) > 1000 * TOLERANCE, "the comparison does not see this bug"
    on = np.isfinite(planted)
    np.testing.assert_allclose(found[on], planted[on], rtol=2 * TOLERANCE, atol=1e-12)
