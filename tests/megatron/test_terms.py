"""A loss of several terms and metrics of every kind, by hand and what is refused of them, in this process.

Over layouts of ranks, against float64: test_aggregation.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import Call, Refusal, check_refusal, each_of
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, UnitCounts
from megatron_rl_loss.megatron import AggregationSettings, Microbatch
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.plan import Plan
from megatron_rl_loss.reduction import Metric, Term

MASKS = [torch.tensor([1.0, 1, 0]), torch.tensor([1.0])]


def microbatch_of(
    mode: str = "sample_mean", terms: dict[str, str] | None = None, masks: list[Tensor] = MASKS, **changes: Any
) -> Microbatch:
    correct = [mask * (torch.arange(len(mask)) == 1) for mask in masks]
    samples = Samples(masks, prompt_ids=range(len(masks)), term_masks={"correct": correct})
    totals = StepTotals.from_loss_masks(masks)
    by_mask = {"correct": StepTotals.from_loss_masks(correct)}
    settings = AggregationSettings.resolve(mode, 2.0 if mode == "constant" else None, terms=terms or {})
    totals = replace(totals, by_mask=by_mask, **changes)
    return Plan(samples=[samples], modes=settings.modes, totals=totals, num_microbatches=1)[0]


X = [1.0, 2.0, math.nan, 6.0]


def leaf() -> Tensor:
    return torch.tensor(X, requires_grad=True)


def test_by_hand() -> None:
    x = leaf()
    loss, _, report = microbatch_of().loss(
        {"pg": x, "kl": Term(3 * x, "token_mean", coef=0.1), "nll": Term(5 * x, coef=2.0, mask="correct")}
    )
    # 1/2 (1.5 + 6); 3 * 9 / 3; 5 * (1/2) (2 + 0)
    assert {name: float(pair[0] / pair[1]) for name, pair in report.items()} == pytest.approx(
        {"loss": 3.75 + 0.9 + 10, "pg": 3.75, "kl": 9, "nll": 5}
    )
    loss.backward()
    assert x.grad.tolist() == pytest.approx([0.25 + 0.1, 0.25 + 0.1 + 5, 0, 0.5 + 0.1])


def test_one_node_and_shared_weights() -> None:
    x = leaf()
    microbatch = microbatch_of()
    loss, _, _ = microbatch.loss({"a": x, "b": Term(x, "sample_mean"), "c": Term(x, "token_mean"), "d": Term(x)})
    node = loss.grad_fn.next_functions[0][0]
    assert "WithGradient" in type(node).__name__
    assert [type(after).__name__ for after, _ in node.next_functions if after is not None] == ["AccumulateGrad"] * 4
    assert len({id(reducer) for reducer in microbatch._reducers.values()}) == 2
    assert microbatch.pg_loss in microbatch._reducers.values()


def test_terms_take_the_policys_mode_unless_one_is_declared() -> None:
    x = leaf()
    values = {"pg": x, "kl": Term(x), "entropy": Term(x)}
    _, _, report = microbatch_of("token_mean", terms={"kl": "sample_mean"}).loss(values)
    assert {name: float(pair[0] / pair[1]) for name, pair in report.items()} == pytest.approx(
        {"loss": 3 + 3.75 + 3, "pg": 3, "kl": 3.75, "entropy": 3}
    )


def test_without_gradient_a_term_is_only_reported() -> None:
    x = leaf()
    loss, _, report = microbatch_of().loss({"pg": x, "seen": Term(x.detach() * 2), "zero": Term(x * 4, coef=0)})
    loss.backward()
    assert x.grad.tolist() == pytest.approx([0.25, 0.25, 0, 0.5])
    assert float(report["seen"][0] / report["seen"][1]) == 7.5
    assert float(report["zero"][0] / report["zero"][1]) == 15


def test_settings_of_terms() -> None:
    settings = AggregationSettings.resolve(
        "constant", 8.0, "active", terms={"kl": "verl:token-mean", "value": None, "entropy": "constant"}
    )
    assert {name: one.mode.name for name, one in settings.modes.terms.items()} == {
        "kl": "token_mean",
        "entropy": "constant",
    }
    assert settings.modes.terms["entropy"] == resolve("constant", divisor=8.0, units="active")
    of_verl = {"kl": "verl:seq-mean-token-sum-norm", "value": "verl:seq-mean-token-sum"}  # the divisor given, and 1
    terms = AggregationSettings.resolve("constant", 8.0, terms=of_verl).modes.terms
    assert {name: one.divisor for name, one in terms.items()} == {"kl": 8, "value": 1}
    with pytest.raises(
        ValueError, match="the term 'kl' by verl:seq-mean-token-sum-norm beside a policy loss by token_sum"
    ):
        AggregationSettings.resolve("token_sum", 8.0, terms=of_verl)
    assert not settings.modes.needs_prompt_ids
    assert settings.modes.with_terms({"kl": "prompt_mean"}).needs_prompt_ids


# --- metrics that no sum of shares is

KINDS = ("min", "max", "variance", "ess")


def finished(masks: list[Tensor], values: Tensor) -> dict[str, float]:
    microbatch = microbatch_of(masks=masks)
    metrics = {kind: Metric(values, "tokens", kind=kind) for kind in KINDS}  # type: ignore[arg-type]
    _, _, report = microbatch.loss(torch.ones(len(values), requires_grad=True), metrics)
    assert all(math.isnan(float(report[kind][0])) for kind in KINDS)  # until the step is finished
    return {name: float(value) for name, value in microbatch._plan.parts.finish([]).items()}


def test_metrics_by_hand() -> None:
    # Tokens 1, 3, 5: mean 3, of squares 35/3.
    found = finished(MASKS, torch.tensor([1.0, 3.0, math.nan, 5.0]))
    assert found == pytest.approx({"min": 1, "max": 5, "variance": 35 / 3 - 9, "ess": 27 / 35})


def test_without_an_active_token_there_is_no_metric() -> None:
    found = finished([torch.zeros(2)], torch.ones(2))
    assert all(math.isnan(value) for value in found.values())
    assert found.keys() == set(KINDS)


# --- refusals, each beside its nearest legal neighbour


def loss_of(terms: Any, metrics: Any = None, **changes: Any) -> Call:
    return lambda: microbatch_of(**changes).loss(terms(leaf()), metrics)


def metric(over: Any = "samples", values: Any = None, **keywords: Any) -> Call:
    given = leaf().detach() if values is None else values
    return lambda: microbatch_of().loss(leaf(), {"x": Metric(given, over, **keywords)})


REFUSALS: dict[str, Refusal] = {
    "no term": (loss_of(lambda x: {}), ValueError, "there must be one at least", loss_of(lambda x: {"a": x})),
    "a term named loss": (
        loss_of(lambda x: {"loss": x, "kl": x}),
        ValueError,
        r"a loss of the terms \['loss', 'kl'\]",
        loss_of(lambda x: {"pg_loss": x, "kl": x}),
    ),
    "a metric named as a term": (
        loss_of(lambda x: {"pg": x, "kl": x}, {"kl": torch.ones(4)}),
        ValueError,
        "a metric named 'kl'",
        loss_of(lambda x: {"pg": x, "kl": x}, {"kl_metric": torch.ones(4)}),
    ),
    "a term of another number of tokens": (
        loss_of(lambda x: {"pg": x, "kl": x[:3]}),
        ValueError,
        r"a term of shape \(3,\)",
        loss_of(lambda x: {"pg": x, "kl": x[None]}),
    ),
    "units without a mode": (
        loss_of(lambda x: {"kl": Term(x, units="active")}),
        ValueError,
        "the term 'kl' with units or a divisor and no mode",
        loss_of(lambda x: {"kl": Term(x, "sample_mean", units="active")}),
    ),
    "a coefficient that is not finite": (
        loss_of(lambda x: {"kl": Term(x, coef=math.nan)}),
        ValueError,
        "the term 'kl' with coef=nan",
        loss_of(lambda x: {"kl": Term(x, coef=-1)}),
    ),
    "a mode that nothing was counted for": (
        loss_of(lambda x: {"pg": x, "kl": Term(x, "prompt_mean")}),
        ValueError,
        "'kl' by prompt_mean and totals without prompts.all.+terms={'kl': 'prompt_mean'}",
        loss_of(lambda x: {"pg": x, "kl": Term(x, "prompt_mean")}, prompts=UnitCounts(all=2, tokens={0: 2, 1: 1})),
    ),
    "a mask that is not there": (
        loss_of(lambda x: {"pg": x, "nll": Term(x, mask="wrong")}),
        ValueError,
        "totals of the masks: correct; a term by the mask 'wrong'",
        loss_of(lambda x: {"pg": x, "nll": Term(x, mask="correct")}),
    ),
    "an unknown normaliser": (
        metric("rollouts"),
        ValueError,
        "there is no such normaliser of a metric. Choose one of samples, tokens, prompts, none",
        metric("tokens"),
    ),
    "an unknown kind": (
        metric(kind="std"),
        ValueError,
        "there is no such kind of metric. Choose one of mean, min, max, variance, ess",
        metric(kind="variance"),
    ),
    "over prompts that nothing counted": (
        metric("prompts"),
        ValueError,
        "'x' by prompt_mean and totals without prompts.all",
        metric("none"),
    ),
    "an extreme of another number of tokens": (
        metric(kind="max", values=leaf().detach()[:3]),
        ValueError,
        r"a metric of shape \(3,\)",
        metric(kind="max", values=leaf().detach()[None]),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
