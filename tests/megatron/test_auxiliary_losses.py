"""Auxiliary losses keep Megatron's scale: MoE load balancing and router z-loss, and multi-token prediction (MTP).

With a policy loss of zero weight, all gradients are those of the auxiliary losses, and must equal what stock Megatron
gives in the same layout. What it divides by hangs on what a loss function returns only with per-token loss: there the
stock one must count the active tokens as they are. Expert parallelism takes one conversion on a CPU, see `build`. Not
covered: sequence-wise and global balancing losses, virtual stages, grouped GEMM, other token dispatchers.
"""

import functools
import re
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from missing import has
from moe_gpt import build, run_step, step_data
from ranks import run_ranks
from tiny_gpt import Batch

from megatron_rl_loss import LossAggregation, tap
from megatron_rl_loss.core.record import StepRecord
from megatron_rl_loss.megatron.flags import AggregationSettings

pytestmark = pytest.mark.slow

DIVISOR = 5.0
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "cp 2 x dp 2": (4, {"cp": 2}),
    "tp 2 with sequence parallelism": (2, {"tp": 2}),
    "ep 2": (2, {"ep": 2}),
    "pp 2": (2, {"pp": 2}),
}
WITH_MTP = ("cp 2 x dp 2", "tp 2 with sequence parallelism", "pp 2")


#: MTP beside experts, where a layout and this Megatron-Core have it.
MODELS = {layout: "moe and mtp" if layout in WITH_MTP and has("MTP") else "moe" for layout in LAYOUTS}


def ours(model: Any, batches: list[Batch], mode: str = "sample_mean") -> Any:
    def loss_of(microbatch: Any, losses: torch.Tensor) -> Any:
        return microbatch.loss(microbatch.data.advantages * losses)

    divisor = oracle.divisor_of(mode, DIVISOR)
    settings = AggregationSettings.resolve(mode, divisor=divisor, with_per_token_loss=True)
    wrap = LossAggregation(settings, lambda batch: batch.samples).wrap_schedule
    return run_step(model, batches, loss_of, wrap)


def stock(model: Any, batches: list[Batch], *, counts: bool) -> Any:
    """A step of Megatron alone with a loss of zero: loss functions return a 3-tuple with `counts`, else a 2-tuple."""

    def loss_of(batch: Batch, losses: torch.Tensor) -> Any:
        loss, num_tokens = (losses * batch.mask).sum() * 0, batch.mask.sum().int()
        return (loss, num_tokens, {}) if counts else (loss, {})

    return run_step(model, batches, loss_of)


def worst_error(actual: Any, expected: Any, of: str = "") -> float:
    """Largest difference of a parameter's gradient (of those named so), relative to that gradient's largest entry."""
    assert actual.keys() == expected.keys()
    errors = [0.0]
    for name, wanted in ((name, wanted) for name, wanted in expected.items() if of in name):
        assert torch.isfinite(actual[name]).all(), name
        difference, scale = float((actual[name] - wanted).abs().max()), float(wanted.abs().max())
        errors.append(difference / scale if scale else float(difference > 0))
    return max(errors)


def without_auxiliary_losses(config: Any) -> dict[str, Any]:
    """Turn them off (Megatron reads these at each forward); what turns them on again."""
    kept = {name: getattr(config, name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")}
    kept["mtp_loss_scaling_factor"] = config.mtp_loss_scaling_factor
    config.moe_aux_loss_coeff, config.moe_z_loss_coeff, config.mtp_loss_scaling_factor = 0.0, None, 0.0
    return kept


def cases_of(model_name: str, layout: dict[str, int]) -> list[dict[str, Any]]:
    cases = []
    for per_token in (False, True):
        model = build(model_name, per_token, **layout)
        for num_microbatches in (1, 3) if per_token else (3,):
            case = {"case": f"per_token={per_token}, {num_microbatches} micro-batches"}
            zero = step_data(num_microbatches, with_policy=False)
            auxiliary = ours(model, zero)
            for counts in (True,) if per_token else (True, False):
                expected = stock(model, zero, counts=counts)
                routers = [name for name in expected if "router" in name]
                # Not its experts: some get no token.
                mtp = [name for name in expected if name.startswith("mtp.") and "expert" not in name]
                largest = [float(expected[name].abs().max()) for name in (*routers, *mtp)]
                cases.append(
                    case
                    | {"what": f"stock, counts={counts}", "error": worst_error(auxiliary, expected)}
                    | {"routers": len(routers), "mtp": len(mtp), "smallest": min(largest, default=1.0)}
                )
            batches = step_data(num_microbatches, with_policy=True)
            both = ours(model, batches)
            kept = without_auxiliary_losses(model.config)
            policy = ours(model, batches)
            vars(model.config).update(kept)
            added = {name: policy[name] + auxiliary[name] for name in policy}
            cases.append(
                case
                | {"what": "sum", "error": worst_error(both, added)}
                | {"without auxiliary": worst_error(policy, both), "without policy": worst_error(auxiliary, both)}
            )
    return cases


@pytest.mark.parametrize(("layout", "model"), MODELS.items())
def test_auxiliary_gradients_are_those_of_megatron_alone(layout: str, model: str, record_property: Any) -> None:
    world_size, sizes = LAYOUTS[layout]
    ranks = run_ranks(world_size, cases_of, model, sizes)
    for rank, cases in enumerate(ranks):
        for case in cases:
            assert case["error"] < oracle.chain_error(3, 64), (rank, case)  # two layers and MTP's, 64 tokens at most
            if case["what"] == "sum":  # both parts matter, or adding them would prove nothing
                assert min(case["without auxiliary"], case["without policy"]) > 0.01, (rank, case)
            elif "smallest" in case:
                assert case["smallest"] > 1e-3, (rank, case)
    # Every rank has routers; MTP is on the last pipeline stage.
    assert all(case["routers"] > 0 for case in ranks[0] if "routers" in case)
    assert all(case["mtp"] > 0 for case in ranks[-1] if "mtp" in case) == ("mtp" in model)
    record_property("cases", sum(len(cases) for cases in ranks))


# ---- negative controls: adapters that get the loss right and the auxiliary losses wrong


def errors_of_wrong_adapters(model_name: str, layout: dict[str, int]) -> list[float]:
    errors, controlled = [], ["router", "mtp."][: 1 + ("mtp" in model_name)]
    for wrong in ("scales by grad_scale_func", "counts 2"):
        model = build(model_name, per_token=wrong == "counts 2", **layout)
        batches = step_data(3, with_policy=False)
        expected = stock(model, batches, counts=True)
        if wrong == "counts 2":
            # The policy loss would be as exact, if it were scaled by the sum of these in the place of the tokens.
            setattr(StepRecord, "constant", lambda facts, value, device: torch.full((), 2, dtype=torch.int32))  # noqa: B010
        else:
            # Undoes Megatron's division by the loss scale, which auxiliary losses take part in.
            model.config.grad_scale_func = lambda loss: loss * 3 * dist.get_world_size()
        errors += [worst_error(ours(model, batches), expected, of) for of in controlled]
    return errors


def test_the_comparison_sees_adapters_that_rescale_auxiliary_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RL_LOSS_PROOF", "off")  # the proof of the first step would stop them
    layout = "cp 2 x dp 2"
    world_size, sizes = LAYOUTS[layout]
    for errors in run_ranks(world_size, errors_of_wrong_adapters, MODELS[layout], sizes):
        assert min(errors) > 0.1, errors


# ---- an audit beside them: they change no token's weight


def tapped(model: Any, batches: list[Batch], count: int | None = None) -> None:
    """Megatron's own 3-tuple, or one with a count that is not the tokens'."""

    def loss_of(batch: Batch, losses: torch.Tensor) -> Any:
        losses = tap(batch.advantages * losses, samples=batch.samples)
        num_tokens = batch.mask.sum() if count is None else torch.tensor(count)
        return (losses * batch.mask).sum(), num_tokens.int(), {}

    run_step(model, batches, loss_of)


def audited(model_name: str, layout: dict[str, int]) -> list[Any]:
    """With per-token loss off and on: our sample mean, and the stock 3-tuple; then that one with another count."""
    from megatron_rl_loss import Audit

    audits = []
    for per_token in (False, True):
        model = build(model_name, per_token, **layout)
        steps: list[Any] = [ours, tapped, *[functools.partial(tapped, count=2)] * per_token]
        for step in steps:
            with Audit(model) as audit:
                step(model, step_data(3, with_policy=True))
            audits.append(audit.measured)
    return audits


@pytest.mark.parametrize("layout", ["ep 2", "pp 2"])
def test_measured_weights_are_those_of_the_policy_loss(layout: str) -> None:
    """Formulas of the step's masks: the sample mean of our carriers, and Megatron's own 3-tuple."""
    world_size, sizes = LAYOUTS[layout]
    (*first, counts_2), *others = run_ranks(world_size, audited, MODELS[layout], sizes)
    assert not any(step for steps in others for step in steps)
    weigh = counts_2.tokens.mask.sum() / (2 * 3 * counts_2.split.dp_size)
    (note,) = counts_2.notes
    assert re.match(rf"Auxiliary losses \(moe_aux_loss_coeff, .*\) weigh {weigh:.4g} times what they should", note)
    assert not any(step.notes for step in first)
    assert not any(step.unknown for step in first), [step.unknown for step in first]
    tokens, split = first[0].tokens, first[0].split
    rollout = tokens.groups("rollout")
    sums = np.bincount(rollout, tokens.mask)
    sample_mean = tokens.mask / np.maximum(sums, 1)[rollout] / len(sums)
    place = tokens.dp_rank * 3 + tokens.microbatch
    by_microbatch = tokens.mask / np.bincount(place, tokens.mask)[place].clip(1) / (3 * split.dp_size)
    token_mean = tokens.mask / tokens.mask.sum()
    for step, expected in zip(first, (sample_mean, by_microbatch, sample_mean, token_mean), strict=True):
        np.testing.assert_allclose(step.weights, expected, rtol=1e-6, atol=0)
    # The masks are ragged: these three are not one and the same.
    for weights, other in ((sample_mean, by_microbatch), (token_mean, by_microbatch)):
        assert np.abs(weights - other).max() > 0.01 * weights.max()
