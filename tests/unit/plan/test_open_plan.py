"""An open plan without Megatron, in one process: its gradients, its reports, and what it refuses."""

from typing import Any

import oracle
import pytest
import torch
from refusals import refusal_tests, refusals
from step_samples import DIVISOR, step_samples
from torch import Tensor

from megatron_rl_loss import Samples
from megatron_rl_loss.plan import OpenPlan, open_plan, plan_step
from megatron_rl_loss.reduction import Metric, Term

STEP = step_samples(8)
CALLS = oracle.units_of("prompt_mean", STEP)


def described(chosen: list[int]) -> Samples:
    return Samples(
        [STEP[i].mask for i in chosen],
        rollout_ids=[str(STEP[i].rollout_id) for i in chosen],
        prompt_ids=[str(STEP[i].prompt_id) for i in chosen],
        term_masks={"odd": [STEP[i].mask * (torch.arange(len(STEP[i].mask)) % 2) for i in chosen]},
    )


@pytest.mark.parametrize(("mode", "units"), oracle.COUNTINGS)
def test_calls_add_up_to_the_step(mode: str, units: Any) -> None:
    """A policy loss, a term by the same mode, reported terms and metrics by other ones: each by its own count."""
    divisor = DIVISOR if mode == "constant" else None
    plan = open_plan(mode, units=units, divisor=divisor, term_masks=["odd"], nominal=9)
    leaves, reports = [one.losses.float().requires_grad_() for one in STEP], []
    for chosen in CALLS:
        (microbatch,) = plan.add([described(chosen)])
        losses = torch.cat([leaves[i] for i in chosen])
        terms = {"pg": Term(losses), "kl": Term(losses, coef=2.0), "off": Term(losses, "token_mean", coef=0)}
        metrics = {
            "mean": losses,
            "of_tokens": Metric(losses, "tokens"),
            "of_odd": Metric(losses, "tokens", mask="odd"),
        }
        loss, report = microbatch.loss(terms, metrics, form="2-tuple")
        loss.backward()
        reports.append(report)
    closed = plan.close()
    for leaf, expected in zip(leaves, oracle.step_gradient(mode, STEP, divisor, units), strict=True):
        assert torch.allclose(leaf.grad.double() * closed.factor, 3 * expected, rtol=2e-6, atol=1e-9)
    values = {name: float(pair[0] / pair[1]) for name, pair in closed.report(reports).items()}
    odd = [oracle.Sample(one.losses, one.mask * (torch.arange(len(one.mask)) % 2)) for one in STEP]
    of_policy = float(oracle.step_loss(mode, STEP, divisor, units))
    of_tokens = float(oracle.step_loss("token_mean", STEP))
    assert values == pytest.approx(
        {
            "loss": 3 * of_policy,
            "pg": of_policy,
            "kl": of_policy,
            "off": of_tokens,
            "mean": float(oracle.step_loss("sample_mean", STEP, None, units)),
            "of_tokens": of_tokens,
            "of_odd": float(oracle.step_loss("token_mean", odd)),
        },
        rel=1e-5,
    )
    assert closed.report(reports)["of_tokens"][1] == oracle.mask_tokens(STEP)


def test_a_step_of_fillers_has_factor_1() -> None:
    plan = open_plan("prompt_mean", dp_group=None)
    plan.add([Samples([])])
    assert plan.close().factor == 1


def test_a_split_rollout_is_refused_and_not_reported() -> None:
    halves = [Samples([torch.ones(2)], rollout_ids=["a"]), Samples([torch.ones(3)], rollout_ids=["a"])]
    plans = {mode: open_plan(mode) for mode in ("sample_mean", "token_mean")}
    reports = [plan.add([half])[0].loss(torch.ones(n, requires_grad=True), {"kl": torch.ones(n)}, form="2-tuple")[1]
               for plan in plans.values() for n, half in zip((2, 3), halves, strict=True)]  # fmt: skip
    with pytest.raises(ValueError, match="a rollout with 2 mask tokens in call 0 of this rank and 5 in the step"):
        plans["sample_mean"].close()
    report = plans["token_mean"].close().report(reports[2:])
    assert float(report["pg_loss"][0] / report["pg_loss"][1]) == 1
    assert report["kl"].isnan()[1]


def own_mode(inputs: Any) -> float:
    return 1.0


def with_loss(losses: Any, metrics: Any = None, **options: Any) -> Any:
    """The report of a step of one call of one micro-batch."""
    plan = open_plan("token_mean")
    returned = plan.add([described([0, 1])])[0].loss(losses(), metrics and metrics(), **options)
    return plan.close().report([returned[-1]])


def values() -> Tensor:
    return torch.zeros(sum(len(STEP[i].mask) for i in (0, 1)), requires_grad=True)


def closed() -> OpenPlan:
    plan = open_plan("token_mean")
    plan.add([described([0])])
    plan.close()
    return plan


def of_two_forms(second: str) -> None:
    plan = open_plan("token_mean")
    for form in ("3-tuple", second):
        plan.add([described([0, 1])])[0].loss(values(), form=form)  # type: ignore[call-overload]


def call(**options: Any) -> Any:
    return open_plan("token_mean", **options).add([described([0])])


def in_plan() -> Any:
    return plan_step([described([0])], "token_mean")


def mask_of(one: Any) -> Tensor:
    return one.tokens.mask  # type: ignore[no-any-return]


def flags_of(one: Any) -> Tensor:
    return mask_of(one) > 0


BY_SAMPLE = "the term 'kl' divides by rollouts.all, the policy loss by step_tokens"
OF_WHOLE = "measure, keep or sum_by in an open plan"
test_refusals = refusal_tests(
    refusals(
        lambda use: use(),
        *(
            ((refused,), text, (accepted,))
            for refused, text, accepted in (
                (lambda: open_plan(own_mode), "the mode .*own_mode' in an open plan", call),  # type: ignore[arg-type]
                (
                    lambda: open_plan("token_mean", terms={"kl": "sample_mean"}),
                    BY_SAMPLE,
                    lambda: open_plan("sample_mean", terms={"kl": "sample_mean"}),
                ),
                (
                    lambda: with_loss(lambda: {"pg": values(), "kl": Term(values(), "sample_mean")}),
                    BY_SAMPLE,
                    lambda: with_loss(lambda: {"pg": values(), "kl": Term(values(), "token_mean", coef=0.1)}),
                ),
                (
                    lambda: with_loss(values, lambda: {"largest": Metric(values(), kind="max")}),
                    "the metric 'largest' of kind 'max' in an open plan",
                    lambda: with_loss(values, lambda: {"largest": Metric(values())}),
                ),
                (
                    lambda: with_loss(values, form="slime"),
                    "form='slime' in an open plan",
                    lambda: with_loss(values, form="2-tuple"),
                ),
                (
                    lambda: of_two_forms("2-tuple"),
                    "form='2-tuple' in an open plan that has returned '3-tuple'",
                    lambda: of_two_forms("3-tuple"),
                ),
                (
                    lambda: open_plan("token_mean").close().report([{"mine": torch.ones(2)}]),
                    "a report named 'mine'",
                    lambda: open_plan("token_mean").close().report([{"pg_loss": torch.ones(2)}]),
                ),
                (lambda: call().measure(mask_of), OF_WHOLE, lambda: in_plan().measure(mask_of)),
                (
                    lambda: call().keep("x", mask_of),
                    OF_WHOLE,
                    lambda: in_plan().keep("x", flags_of),
                ),
                (lambda: closed().add([described([0])]), "a plan that was closed or abandoned", call),
                (lambda: call(nominal_tokens=0), "nominal_tokens is 0", lambda: call(nominal_tokens=10)),
                (lambda: call(nominal=0), "nominal is 0", lambda: call(nominal=10)),
            )
        ),
    )
)
