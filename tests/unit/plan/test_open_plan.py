"""An open plan without Megatron, in one process: its gradients, its reports, and what it refuses."""

from typing import Any

import oracle
import pytest
import torch
from refusals import refusal_tests, refusals
from step_samples import DIVISOR, step_samples
from torch import Tensor

from megatron_rl_loss import Samples
from megatron_rl_loss.plan import open_plan, plan_step
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


def values() -> Tensor:
    return torch.zeros(sum(len(STEP[i].mask) for i in (0, 1)), requires_grad=True)


def with_loss(losses: Any, metrics: Any = None, form: Any = "3-tuple") -> Any:
    """The report of a step of one call of one micro-batch."""
    plan = open_plan("token_mean")
    returned: Any = plan.add([described([0, 1])])[0].loss(losses, metrics, form=form)
    return plan.close().report([returned[-1]])


def with_term(mode: str) -> Any:
    return with_loss({"pg": values(), "kl": Term(values(), mode, coef=0.1)})


def with_metric(kind: Any) -> Any:
    return with_loss(values(), {"largest": Metric(values(), kind=kind)})


def with_form(form: str) -> Any:
    return with_loss(values(), form=form)


def of_two_forms(second: str) -> None:
    plan = open_plan("token_mean")
    for form in ("3-tuple", second):
        plan.add([described([0, 1])])[0].loss(values(), form=form)  # type: ignore[call-overload]


def with_report(name: str) -> Any:
    return open_plan("token_mean").close().report([{name: torch.ones(2)}])


def call(mode: Any = "token_mean", closed: bool = False, **options: Any) -> Any:
    plan = open_plan(mode, **options)
    if closed:
        plan.close()
    return plan.add([described([0])])


def over_step(plan: Any, flags: bool) -> Any:
    return plan.keep("x", lambda one: one.tokens.mask > 0) if flags else plan.measure(lambda one: one.tokens.mask)


BY_SAMPLE, OF_WHOLE = (
    "the term 'kl' divides by rollouts.all, the policy loss by step_tokens",
    "measure, keep or sum_by in",
)
WHOLE, DECLARED = plan_step([described([0])], "token_mean"), {"terms": {"kl": "sample_mean"}}
test_refusals = refusal_tests(
    {
        **refusals(
            call,
            ((own_mode,), "the mode .*own_mode' in an open plan", ("token_mean",)),
            (DECLARED, BY_SAMPLE, DECLARED | {"mode": "sample_mean"}),
            ({"closed": True}, "a plan that was closed or abandoned", {}),
            ({"nominal_tokens": 0}, "nominal_tokens is 0", {"nominal_tokens": 10}),
            ({"nominal": 0}, "nominal is 0", {"nominal": 10}),
        ),
        **refusals(with_term, (("sample_mean",), BY_SAMPLE, ("token_mean",))),
        **refusals(with_metric, (("max",), "the metric 'largest' of kind 'max' in an open plan", ("mean",))),
        **refusals(with_form, (("slime",), "form='slime' in an open plan", ("2-tuple",))),
        **refusals(of_two_forms, (("2-tuple",), "form='2-tuple' in .* that has returned '3-tuple'", ("3-tuple",))),
        **refusals(with_report, (("mine",), "a report named 'mine'", ("pg_loss",))),
        **refusals(over_step, *(((call(), flags), OF_WHOLE, (WHOLE, flags)) for flags in (True, False))),
    }
)
