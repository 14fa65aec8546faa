"""An audit beside experts with their auxiliary losses and beside multi-token prediction: they change no token's weight.

Expected weights are formulas of the step's masks: the sample mean of our carriers, and Megatron's own 3-tuple.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from moe_gpt import build, run_step, step_data
from ranks import run_ranks

from megatron_rl_loss.megatron import AggregationSettings

pytestmark = pytest.mark.slow

EXACT = 1e-6
MICROBATCHES = 3
LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {
    "tp 2 x cp 2": (4, "moe and mtp", {"tp": 2, "cp": 2}),
    "pp 2": (2, "moe and mtp", {"pp": 2}),
    "ep 2": (2, "moe", {"ep": 2}),
}


def measured_steps(model_name: str, layout: dict[str, int]) -> list[Any]:
    """With per-token loss off and on: our sample mean, and the stock 3-tuple."""
    from megatron_rl_loss.audit.megatron import Audit, tap
    from megatron_rl_loss.megatron import LossAggregation

    def ours(microbatch: Any, losses: torch.Tensor) -> Any:
        return microbatch.loss(microbatch.data.advantages * losses)

    def stock(batch: Any, losses: torch.Tensor) -> Any:
        tapped = tap(batch.advantages * losses, samples=batch.samples)
        return (tapped * batch.mask).sum(), batch.mask.sum().int(), {}

    found = []
    for per_token in (False, True):
        model = build(model_name, per_token, **layout)
        settings = AggregationSettings.resolve("sample_mean", with_per_token_loss=True)
        wrap = LossAggregation(settings, lambda batch: batch.samples).wrap_schedule
        for loss_of, wrapped in ((ours, {"wrap": wrap}), (stock, {})):
            with Audit(model) as audit:
                run_step(model, step_data(MICROBATCHES, with_policy=True), loss_of, **wrapped)  # type: ignore[arg-type]
            found.append(audit.measured)
    return found


def sample_mean(tokens: Any) -> Any:
    sums = np.bincount(tokens.rollout, tokens.mask, minlength=tokens.rollout.max() + 1)
    return tokens.mask / np.maximum(sums, 1)[tokens.rollout] / len(sums)


def stock_3_tuple(tokens: Any, split: Any) -> Any:
    place = (tokens.dp_rank * MICROBATCHES + tokens.microbatch) * split.cp_size + tokens.cp_rank
    counts = np.bincount(place, tokens.mask)
    return tokens.mask / counts[place].clip(1) / (MICROBATCHES * split.dp_size * split.cp_size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auxiliary_losses_change_no_tokens_weight(layout: str) -> None:
    world_size, model, sizes = LAYOUTS[layout]
    first, *others = run_ranks(world_size, functools.partial(measured_steps, model, sizes))
    assert not any(step for steps in others for step in steps)
    ours, stock, ours_per_token, stock_per_token = first
    assert not any(step.unknown for step in first), [step.unknown for step in first]
    for step, expected in (
        (ours, sample_mean(ours.tokens)),
        (ours_per_token, sample_mean(ours.tokens)),
        (stock, stock_3_tuple(stock.tokens, stock.split)),
        (stock_per_token, stock.tokens.mask / stock.tokens.mask.sum()),
    ):
        np.testing.assert_allclose(step.weights, expected, rtol=EXACT, atol=0)
    # The masks are ragged: these three are not one and the same.
    assert np.abs(ours.weights - stock.weights).max() > 0.01 * ours.weights.max()
    assert np.abs(stock_per_token.weights - stock.weights).max() > 0.01 * stock.weights.max()
