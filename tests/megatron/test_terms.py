"""A loss of several terms, each with its own mode, mask and coefficient, through the real schedule and DDP.

The model is a table of numbers (`table_step`), a term's values are a function of a token's number, and the gradient
that Megatron arrives at is compared with the sum of the terms' in float64. Over micro-batches, DP, CP, both carriers.
"""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from megatron_rl_loss.megatron.microbatch import Step
from ranks import RankError, run_ranks
from refusals import Call, Refusal, check_refusal, each_of
from table_step import Batch, aggregation, dealt, logged_by_step, relative_error, start, step_samples, table_model
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, UnitCounts
from megatron_rl_loss.megatron import AggregationSettings, Microbatch
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.reduction import Term

SAMPLES = step_samples(5)
TABLE = [float(torch.tensor(x)) for one in SAMPLES for x in one.losses.tolist()]


def kept_masks() -> list[Tensor]:
    """Of the NLL of correct samples: every third, without its first token."""
    return [
        one.mask * (i % 3 == 0) * (torch.arange(len(one.mask)) > 0 if len(one.mask) > 1 else 1)
        for i, one in enumerate(SAMPLES)
    ]


Value = Callable[[Tensor], Tensor]
#: name: values, mode (None: the policy loss's), coefficient, mask.
TERMS: dict[str, tuple[Value, str | None, float, str | None]] = {
    "pg": (lambda x: x, None, 1.0, None),
    "kl": (lambda x: x * x / 2, "token_mean", 0.05, None),
    "entropy": (torch.sin, "prompt_mean", -0.3, None),
    "value": (lambda x: (x - 0.5) ** 2, "constant", 0.7, None),
    "nll": (lambda x: x**3 / 9, "token_mean", 0.2, "correct"),
    "declared": (torch.cos, None, 0.4, "correct"),
}
DIVISOR = 7.0
# DP, CP, micro-batches
LAYOUTS = [(2, 2, 2), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((1, 1, 2), (4, 1, 1), (1, 4, 1)))]


def one_step(
    dp: int, cp: int, microbatches: int, cases: list[dict[str, Any]], own_counts: bool = False
) -> list[tuple[Tensor, dict[str, float]]]:
    """On a rank: the gradient and what is logged, of every case; planted: a micro-batch's own counts of the mask."""
    from megatron.core import parallel_state

    start(cp=cp)
    dp_rank, cp_rank = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    hands = dealt(SAMPLES, dp_rank, dp, microbatches)
    masks, found = kept_masks(), []
    for case in cases:
        model = table_model([*TABLE, 0.0], per_token=case["per_token"])
        batches = []
        for chosen in hands:
            batch = Batch(SAMPLES, chosen, cp)
            given = batch.samples
            batch.samples = Samples(
                given.loss_masks,
                layout=given.layout,
                rollout_ids=given.rollout_ids,
                prompt_ids=given.prompt_ids,
                term_masks={"correct": [masks[i] for i in chosen]},
            )
            batches.append(batch)
        divisor = DIVISOR if case["mode"] == "constant" else None
        settings = AggregationSettings.resolve(case["mode"], divisor, case["units"], with_per_token_loss=True)
        whole = aggregation(terms={"declared": "prompt_mean"}, term_masks=["correct"], prepared=settings)

        def forward_step(iterator: Any, model: Any) -> Any:
            microbatch = next(iterator)
            if own_counts:
                kept = microbatch.samples.by_mask["correct"]
                ids = {"rollout_ids": kept.rollout_ids, "prompt_ids": kept.prompt_ids}
                here = StepTotals.from_loss_masks(kept.loss_masks, dp_group=None, **ids)
                microbatch.totals = replace(microbatch.totals, by_mask={"correct": here})
            numbers = model(microbatch.data.local_numbers(cp_rank, cp))

            def loss_func(x: Tensor) -> Any:
                terms = {
                    name: Term(of(x)[None], mode, coef=coef, mask=mask, divisor=DIVISOR if mode == "constant" else None)
                    for name, (of, mode, coef, mask) in TERMS.items()
                }
                return microbatch.loss({**terms, "plain": 0 * x[None]}, {"metric": 2 * x[None]})

            return numbers, loss_func

        model.zero_grad_buffer()
        logged = logged_by_step(whole, forward_step, batches, model)
        found.append((model.module.losses.main_grad.clone(), logged))
    return found


CASES = [
    {"mode": mode, "units": units, "per_token": per_token}
    for mode, units in [("sample_mean", "all"), ("sample_mean", "active"), ("token_mean", "all"), ("constant", "all")]
    for per_token in (False, True)
]


@functools.cache
def expected(mode: str, units: str) -> tuple[Tensor, dict[str, float], dict[str, float]]:
    """Gradient, values by name and their scales, in float64."""
    masks = kept_masks()
    leaf = torch.tensor(TABLE, dtype=torch.float64, requires_grad=True)
    parts = leaf.split([len(one.mask) for one in SAMPLES])
    values, scales, loss = {}, {}, torch.zeros((), dtype=torch.float64)
    for name, (of, own, coef, mask) in TERMS.items():
        asked = own or ("prompt_mean" if name == "declared" else mode)
        divisor = DIVISOR if asked == "constant" else None
        samples = [
            replace(one, losses=of(part), mask=masks[i] if mask else one.mask)
            for i, (one, part) in enumerate(zip(SAMPLES, parts, strict=True))
        ]
        term = oracle.step_loss(asked, samples, divisor, units)
        loss = loss + coef * term
        values[name] = float(term.detach())
        detached = [replace(one, losses=one.losses.detach()) for one in samples]
        scales[name] = oracle.step_scale(asked, detached, divisor, units)
    values |= {"loss": float(loss.detach()), "plain": 0.0}
    scales |= {"loss": sum(abs(coef) * scales[name] for name, (_, _, coef, _) in TERMS.items()), "plain": 1.0}
    twice = [replace(one, losses=2 * part.detach()) for one, part in zip(SAMPLES, parts, strict=True)]
    values["metric"] = float(oracle.step_loss("sample_mean", twice, None, units))
    scales["metric"] = oracle.step_scale("sample_mean", twice, None, units)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient, values, scales


@pytest.mark.parametrize(("dp", "cp", "microbatches"), LAYOUTS)
def test_gradient_and_report_are_the_sum_of_the_terms(
    dp: int, cp: int, microbatches: int, record_property: Callable[[str, Any], None]
) -> None:
    of_ranks = run_ranks(dp * cp, one_step, dp, cp, microbatches, CASES)
    worst = 0.0
    for case, *outcomes in zip(CASES, *of_ranks, strict=True):
        gradient, values, scales = expected(case["mode"], case["units"])
        for found, logged in outcomes:
            # Values are float32 functions of the table, their gradients a product or two more, and six are added up.
            worst = max(worst, relative_error(found[:-1], gradient))
            assert logged.keys() == values.keys()
            assert next(iter(logged)) == "loss"
            for name, value in values.items():
                rounding = 3 * oracle.sum_error(oracle.num_tokens(SAMPLES)) * scales[name]
                assert logged[name] == pytest.approx(value, abs=rounding), (name, case)
    record_property("terms_error", worst)
    assert worst < 3 * oracle.EXACT


def test_a_count_of_the_micro_batch_would_be_seen() -> None:
    """Planted: the NLL divided by the tokens of its own micro-batch (NeMo-RL before PR #3791)."""
    case = {"mode": "sample_mean", "units": "all", "per_token": False}
    gradient, values, scales = expected("sample_mean", "all")
    for (found, logged), *_ in run_ranks(2, one_step, 2, 1, 2, [case], True):
        assert relative_error(found[:-1], gradient) > 1e-2
        assert abs(logged["nll"] - values["nll"]) > 1e-2 * scales["nll"]


def test_a_mask_that_is_not_counted_or_not_given_is_refused_on_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, step_without_mask)
    assert set(caught.value.errors) == {0, 1}
    for text in caught.value.errors.values():
        assert "a mask 'correct' of samples whose further masks are: none" in text


def step_without_mask() -> None:
    """On a rank: the second one's data has no such mask."""
    start()
    rank = int(os.environ["RANK"])
    batch = Batch(SAMPLES, [0, 1], 1)
    given = batch.samples
    if rank == 0:
        batch.samples = Samples(given.loss_masks, layout=given.layout, term_masks={"correct": given.loss_masks})
    else:
        batch.samples = Samples(given.loss_masks, layout=given.layout)
    model = table_model([*TABLE, 0.0])
    aggregation(term_masks=["correct"]).begin_step(iter([batch]), model=model, num_microbatches=1)


# --- in this process


def microbatch_of(mode: str = "sample_mean", terms: dict[str, str] | None = None, **changes: Any) -> Microbatch:
    masks = [torch.tensor([1.0, 1, 0]), torch.tensor([1.0])]
    correct = [torch.tensor([0.0, 1, 0]), torch.tensor([0.0])]
    samples = Samples(masks, prompt_ids=[0, 1], term_masks={"correct": correct})
    totals = StepTotals.from_loss_masks(masks)
    by_mask = {"correct": StepTotals.from_loss_masks(correct)}
    settings = AggregationSettings.resolve(mode, 2.0 if mode == "constant" else None, terms=terms or {})
    step = Step(
        aggregation=settings.aggregation,
        terms=settings.terms,
        totals=replace(totals, by_mask=by_mask, **changes),
        num_microbatches=1,
        cp_rank=0,
        cp_size=1,
        dp_cp_size=1,
    )
    return Microbatch(None, samples, step)


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


def test_the_sum_of_terms_is_the_terms_apart() -> None:
    terms = {"a": ("sample_mean", 1.0), "b": ("token_mean", -0.5), "c": ("constant", 0.25)}
    x = leaf()
    together, _, _ = microbatch_of().loss(
        {name: Term(x, mode, coef=c, divisor=3.0 if mode == "constant" else None) for name, (mode, c) in terms.items()}
    )
    together.backward()
    apart = torch.zeros(4)
    for mode, coef in terms.values():
        y = leaf()
        alone, _, _ = microbatch_of().loss({"x": Term(y, mode, coef=coef, divisor=3.0 if mode == "constant" else None)})
        alone.backward()
        apart += y.grad
    torch.testing.assert_close(x.grad, apart)


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
    assert {name: one.mode.name for name, one in settings.terms.items()} == {"kl": "token_mean", "entropy": "constant"}
    assert settings.terms["entropy"] == resolve("constant", divisor=8.0, units="active")
    assert not settings.needs_prompt_ids
    assert settings.with_terms({"kl": "prompt_mean"}).needs_prompt_ids


# --- refusals, each beside its nearest legal neighbour


def loss_of(terms: Any, metrics: Any = None, **changes: Any) -> Call:
    return lambda: microbatch_of(**changes).loss(terms(leaf()), metrics)


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
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
