"""An audit beside experts with their auxiliary losses and beside multi-token prediction: they change no token's weight.

Expected weights are formulas of the step's masks: the sample mean of our carriers, and Megatron's own 3-tuple.
"""

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
import torch
from moe_gpt import build, run_step, step_data
from ranks import run_ranks

from megatron_rl_loss import resolve
from megatron_rl_loss.audit import judge
from megatron_rl_loss.megatron import AggregationSettings

pytestmark = pytest.mark.slow

EXACT = 1e-6
MICROBATCHES = 3
LAYOUTS: dict[str, tuple[int, str, dict[str, int]]] = {
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


# ---- what the auxiliary losses weigh, in a step that is counted at its end


def audited_calls(loop: str) -> tuple[Any, float]:
    """A step of a call for each micro-batch: what was measured, and the step's tokens for each rollout.

    "nemo_rl" does what its split step does (7ea279ab, `_finish_train_step_body`): sums without a token count, gradients
    that are scaled by 1 / rollouts, those of auxiliary losses among them, and then reduced.
    """
    from megatron_rl_loss.audit.megatron import Audit, tap
    from megatron_rl_loss.megatron import open_plan, plan_step

    def ours(given: Any, losses: torch.Tensor) -> Any:
        return given[1].loss(given[0].advantages * losses)

    def sums(batch: Any, losses: torch.Tensor) -> Any:
        tapped = tap(batch.advantages * losses, samples=batch.samples)
        return (tapped * batch.mask).sum(), torch.zeros((), dtype=torch.int32), {}

    model = build("moe and mtp", True, cp=2)
    batches = step_data(MICROBATCHES, with_policy=True)
    totals = plan_step([batch.samples for batch in batches], "sample_mean", model=model).totals
    assert totals.step_active_tokens
    assert totals.rollouts.all
    model.zero_grad_buffer()
    with Audit(model) as audit:
        if loop in ("ours", "passes"):
            with open_plan("token_mean" if loop == "ours" else "token_sum", model=model) as plan:
                for batch in batches:
                    for microbatches in plan.passes(plan.add([batch.samples])):
                        call = list(zip([batch], microbatches, strict=True))
                        run_step(model, call, ours, fresh=False)  # type: ignore[arg-type]
                plan.close()
        else:
            finalize, model.config.finalize_model_grads_func = model.config.finalize_model_grads_func, hold
            model.config.no_sync_func = contextlib.nullcontext
            with model.no_sync():
                for batch in batches:
                    run_step(model, [batch], sums, fresh=False)
            model.scale_gradients(1 / totals.rollouts.all)
            finalize([model], None)
    return audit.measured, totals.step_active_tokens / totals.rollouts.all


def hold(*_: Any, **__: Any) -> None: ...


def audited_loops() -> dict[str, tuple[Any, float]]:
    return {loop: audited_calls(loop) for loop in ("ours", "nemo_rl", "passes")}


def test_an_inherited_scale_of_auxiliary_losses_is_measured() -> None:
    found, *_ = run_ranks(2, audited_loops)
    in_passes, _ = found.pop("passes")
    assert any("in several passes" in why for why in in_passes.unknown), in_passes.unknown
    for loop, (measured, tokens_per_rollout) in found.items():
        assert not measured.unknown, measured.unknown
        times, mode = (1, "token_mean") if loop == "ours" else (tokens_per_rollout, "token_sum")
        settings = ("mtp_num_layers", "moe_aux_loss_coeff", "moe_z_loss_coeff")
        assert measured.facts["auxiliary"] == {name: pytest.approx((times, times), rel=EXACT) for name in settings}
        divisor = None if loop == "ours" else float(len(set(measured.tokens.rollout)))
        verdict = judge(measured, resolve(mode, divisor=divisor))
        assert verdict.sound, verdict
        said = [f"Of {name} the auxiliary loss weighs {times:.4g} times what it should." for name in settings]
        assert list(measured.notes) == (said if loop == "nemo_rl" else [])
