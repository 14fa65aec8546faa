"""A plan without Megatron, in one process: what it hands out, in every form, and what it refuses."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import oracle
import pytest
import torch
from step_samples import DIVISOR, dealt, step_samples
from torch import Tensor

from megatron_rl_loss import (
    BadBatchError,
    Gathered,
    Samples,
    StepTotals,
    UnitCounts,
    ZigzagBSHD,
    ZigzagTHD,
    token_weights,
)
from megatron_rl_loss.modes import vl_norm_undivided as vl_norm
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.plan import CARRIERS, Carrier, Plan, plan_step
from megatron_rl_loss.plan.carriers import Count, product
from megatron_rl_loss.reduction import Metric, Term

STEP = step_samples(seed=4)
DEALT = dealt(STEP, 0, 1, 3)


def described(chosen: list[int], **options: Any) -> Samples:
    for kind in ("rollout", "prompt"):
        options[f"{kind}_ids"] = [str(getattr(STEP[i], f"{kind}_id")) for i in chosen]
    return Samples([STEP[i].mask for i in chosen], **options)


def planned(mode: str = "sample_mean", **options: Any) -> Plan:
    divisor = DIVISOR if mode == "constant" else None
    return plan_step([described(chosen) for chosen in DEALT], mode, divisor=divisor, **options)


def losses_of(chosen: list[int]) -> Tensor:
    return torch.cat([STEP[i].losses for i in chosen]).float().requires_grad_()


@pytest.mark.parametrize("with_totals", [False, True])
@pytest.mark.parametrize(("mode", "units"), [("sample_mean", "all"), ("prompt_mean", "active"), ("constant", "all")])
def test_shares_add_up_to_the_step_loss(mode: str, units: Any, with_totals: bool) -> None:
    """By the weights, which tests/unit/modes proves, of the totals that are counted, or given."""
    whole = described(list(range(len(STEP))))
    ids: Any = {"rollout_ids": whole.rollout_ids, "prompt_ids": whole.prompt_ids}
    totals = StepTotals.from_loss_masks(whole.loss_masks, **ids)
    plan, total = planned(mode, units=units, totals=totals if with_totals else None), 0.0
    assert len(plan) == len(list(plan)) == len(DEALT)
    divisor = DIVISOR if mode == "constant" else None
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        losses = losses_of(chosen)
        share = microbatch(losses)
        microbatch.carry(share, form="sum").backward()
        weights = token_weights(mode, microbatch.samples, totals, divisor=divisor, units=units)
        assert torch.equal(microbatch.weights, weights)
        assert torch.equal(losses.grad, weights)
        total += float(share.detach())
    error = oracle.sum_error(oracle.num_tokens(STEP)) * oracle.step_scale(mode, STEP, divisor, units)
    assert total == pytest.approx(float(oracle.step_loss(mode, STEP, divisor, units)), abs=error)


@pytest.mark.parametrize("row", CARRIERS, ids=lambda row: f"{row.form}-{row.per_token}")
def test_the_powers_of_each_count_cancel(row: Carrier) -> None:
    counts: dict[Count, float | None] = {"num_microbatches": 3, "dp_size": 5, "cp_size": 7}
    counts |= {"step_active_tokens": 11, "rollouts": 13}
    places = (row.returned, row.engine, row.schedule, row.ddp, row.finalize)
    assert math.prod(product(powers, counts) for powers in places) == pytest.approx(1)
    sizes = {"num_microbatches": 3, "dp_size": 5, "cp_size": 7}
    plan = Plan(samples=None, modes=LossModes.resolve("token_mean"), totals=StepTotals(), **sizes)  # type: ignore[arg-type]
    reported_by = plan.constants_on(torch.device("cpu"))[1]  # what reported shares are divided by
    assert float(reported_by) == pytest.approx(1 / 105)
    for name in row.returned.keys() & {"step_active_tokens", "rollouts"}:
        with pytest.raises(ValueError, match=f"totals without {name}"):
            product(row.returned, counts | {name: None})


def test_what_is_returned_in_each_form() -> None:
    plan, per_token = planned("token_mean"), planned("token_mean", per_token_loss=True)
    losses, active = losses_of(DEALT[0]), [sum(int((STEP[i].mask != 0).sum()) for i in chosen) for chosen in DEALT]
    mine = {"nested": {"loss": 1, "list": [1, "two"]}, "lr": 1e-6}
    forms: list[tuple[Any, Plan, int]] = [
        ("3-tuple", plan, 3 * 5), ("2-tuple", plan, 3 * 5), ("sum", plan, 1), ("mean", plan, 5),  # 3 micro-batches
        ("3-tuple", per_token, sum(active)), ("slime", plan, len({one.rollout_id for one in STEP})),
        ("verl", plan, 5), ("verl", per_token, 5), ("nemo_rl", per_token, 1),
    ]  # fmt: skip
    for form, one, factor in forms:
        microbatch = replace(one, dp_size=5)[0]
        share = microbatch(losses)
        returned = microbatch.carry(share, mine, form=form)
        loss, *num_tokens, report = (returned, mine) if isinstance(returned, Tensor) else returned
        assert float(loss.detach()) == pytest.approx(factor * float(share.detach()))
        assert report is mine
        assert num_tokens == ([active[0] if one is per_token else 1] if form == "3-tuple" else [])
        assert all(number.dtype == torch.int32 for number in num_tokens)
    assert plan[0].carry(plan[0](losses), form="2-tuple")[1] == {}
    copies = [Samples([torch.ones(4)], layout=Gathered([0, 4]))]  # counted on the first of the ranks that hold them
    per_token = plan_step(copies, "token_mean", per_token_loss=True)
    of_ranks = [replace(per_token, cp_rank=rank, cp_size=2) for rank in range(2)]
    assert [int(one[0].loss(torch.ones(4, requires_grad=True))[1]) for one in of_ranks] == [4, 0]


def test_the_report_is_of_the_last_loss_unless_shares_are_given() -> None:
    plan = planned()
    share = plan[0](losses_of(DEALT[0]))
    assert plan[0].report().keys() == {"pg_loss"}
    numerator, denominator = plan[0].report({"pg_loss": 2 * share})["pg_loss"].tolist()
    assert (numerator, denominator) == (pytest.approx(2 * float(share.detach())), pytest.approx(1 / 3))
    plan = planned(terms={"kl": "token_mean"})
    losses = losses_of(DEALT[1])
    metrics = {"most": Metric(losses.detach(), "tokens", kind="max")}
    _, _, report = plan[1].loss({"pg": losses, "kl": Term(losses, coef=0.5)}, metrics)
    assert report.keys() == {"loss", "pg", "kl", "most"}
    plan.finish_metrics([report])
    largest = pytest.approx(losses.detach()[torch.cat([STEP[i].mask for i in DEALT[1]]) != 0].max().item())
    assert float(report["most"][0] / report["most"][1]) == largest
    metrics = {"most": Metric(losses.detach() - 1, "tokens", kind="max")}  # another pass begins anew
    _, _, report = plan[1].loss({"pg": losses, "kl": Term(losses, coef=0.5)}, metrics)
    plan.finish_metrics([report])
    assert float(report["most"][0] / report["most"][1]) + 1 == largest
    with pytest.raises(ValueError, match="Report the same names every time"):
        plan[1].loss(losses, form="2-tuple")


def test_terms_and_metrics_count_the_units_and_masks_that_they_say() -> None:
    """Terms that differ in nothing but their counting do not share weights; a metric's own mask has its own mean."""
    own = [one.mask * (torch.arange(len(one.mask)) % 2 == 0) for one in STEP]
    samples = [described(chosen, term_masks={"own": [own[i] for i in chosen]}) for chosen in DEALT]
    plan = plan_step(samples, "sample_mean", units="active", term_masks=["own"])
    found: dict[str, float] = {}
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        losses = losses_of(chosen)
        terms = {
            "pg": losses,
            "all": Term(losses, "sample_mean", units="all"),
            "as policy": Term(losses, "sample_mean"),
        }
        _, _, report = microbatch.loss(terms, {"masked": Metric(losses.detach(), mask="own")})
        for name, pair in report.items():
            found[name] = found.get(name, 0.0) + float(pair[0])
    of_own = [replace(one, mask=mask) for one, mask in zip(STEP, own, strict=True)]
    expected = {
        name: float(oracle.step_loss("sample_mean", step, None, units))
        for name, step, units in (
            ("pg", STEP, "active"), ("all", STEP, "all"), ("as policy", STEP, "active"), ("masked", of_own, "active"),
        )
    }  # fmt: skip
    assert expected["pg"] != expected["all"]
    assert found == pytest.approx(expected | {"loss": sum(found[name] for name in terms)}, rel=1e-5)


@pytest.mark.parametrize("ids", [{}, {"rollout_ids": [], "prompt_ids": []}], ids=["without ids", "with none"])
def test_empty_micro_batches_and_steps(ids: dict[str, Any]) -> None:
    filler = Samples([], layout=ZigzagTHD([0, 4], filler_slots=1), **ids)
    plan = plan_step([described([0, 1]), filler], "prompt_mean")
    losses = torch.tensor([1.0, torch.nan, torch.inf, 0.0], requires_grad=True)
    plan[1].carry(plan[1](losses), form="mean").backward()
    assert torch.equal(losses.grad, torch.zeros(4))
    alone = plan_step([described([0, 1])], "prompt_mean")
    assert plan.summary == alone.summary
    assert torch.equal(plan[0].weights, alone[0].weights)
    with pytest.raises(ValueError, match="a step without one active token"):
        plan_step([filler], "token_mean", empty_step="error")
    none = plan_step(None, "token_mean", num_microbatches=2, totals=StepTotals(step_tokens=3))
    assert len(none) == 2
    with pytest.raises(ValueError, match="a plan without samples"):
        none[0]


def of_tokens(number: int) -> StepTotals:
    return StepTotals(step_tokens=number, step_active_tokens=number)


def test_as_many_tokens_as_megatron_counts() -> None:
    for per_token, number in ((True, 2**31 - 1), (False, 2**31), (False, 2**33)):
        assert planned("token_mean", per_token_loss=per_token, totals=of_tokens(number)).totals.step_tokens == number


def test_a_loss_of_terms_by_hand() -> None:
    masks = [torch.tensor([1.0, 1, 0]), torch.tensor([1.0])]
    correct = [torch.tensor([0.0, 1, 0]), torch.tensor([0.0])]
    samples = [Samples(masks, rollout_ids=["a", "b"], term_masks={"correct": correct})]
    x = torch.tensor([1.0, 2.0, math.nan, 6.0], requires_grad=True)
    terms = {
        "pg": x, "kl": Term(3 * x, coef=0.1), "nll": Term(5 * x, coef=2.0, mask="correct"), "same": Term(x, coef=0),
        "seen": Term(x.detach() * 2, "token_mean"),
    }  # fmt: skip
    plan = plan_step(samples, "sample_mean", terms={"kl": "token_mean"}, term_masks=["correct"])
    loss, _, report = plan[0].loss(terms)
    # 1/2 (1.5 + 6); 3 * 9 / 3; 5 * (1/2) (2 + 0)
    expected = {"loss": 3.75 + 0.9 + 10 + 6, "pg": 3.75, "kl": 9, "nll": 5, "same": 3.75, "seen": 6}
    assert {name: float(pair[0] / pair[1]) for name, pair in report.items()} == pytest.approx(expected)
    loss.backward()
    assert x.grad.tolist() == pytest.approx([0.25 + 0.1, 0.25 + 0.1 + 5, 0, 0.5 + 0.1])
    assert len({id(reducer) for reducer in plan[0]._reducers.values()}) == 3  # by sample, by token, by the mask
    assert plan[0].pg_loss in plan[0]._reducers.values()


def test_without_an_active_token_a_metric_is_not_a_number() -> None:
    plan = plan_step([Samples([torch.zeros(2)], rollout_ids=["a"])], "token_mean")
    kinds: Any = ("min", "max", "variance", "ess")
    metrics = {kind: Metric(torch.ones(2), "tokens", kind=kind) for kind in kinds}
    plan[0].loss(torch.ones(2, requires_grad=True), metrics)
    found = plan.parts.finish([])
    assert found.keys() == set(kinds)
    assert all(math.isnan(float(value)) for value in found.values())


def test_local_cuts_what_has_a_value_a_token() -> None:
    packed = Samples([torch.ones(4), torch.ones(6)], layout=ZigzagTHD([0, 8, 16], [4, 6]))
    rows = Samples([torch.ones(4)] * 2, layout=ZigzagBSHD(2, 4))
    whole, batch = torch.arange(16), torch.arange(8).view(2, 4)
    both = torch.stack([whole, -whole], 1)
    plan = plan_step([packed, rows], "token_mean")
    for cp_rank, held in enumerate(([0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13])):
        microbatch, of_rows = replace(plan, cp_rank=cp_rank, cp_size=2)
        columns = batch[:, [[0, 3], [1, 2]][cp_rank]]  # row by row
        for one, given, expected in (
            (microbatch, whole.bool(), whole.bool()[held]), (microbatch, whole[None], whole[held][None]),
            (microbatch, both, both[held]), (microbatch, both[None], both[held][None]), (of_rows, batch, columns),
            (of_rows, batch.flatten(), columns.flatten()),
        ):  # fmt: skip
            assert torch.equal(one.local(given), expected)
        with pytest.raises(ValueError, match=r"shape \(4, 2\)"):  # which would be cut as a whole
            of_rows.local(batch.view(4, 2))


OF_ONE_RANK: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
OF_TWO_RANKS: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
WRONG: list[tuple[str, str, type[Exception], Callable[[], Any]]] = [
    ("no list", "must be a list with one Samples", TypeError, lambda: plan_step(described([0]), "token_mean")),  # type: ignore[arg-type]
    ("no Samples", "micro-batch 0 are a dict", TypeError, lambda: plan_step([{}], "token_mean")),  # type: ignore[list-item]
    ("number", "1 Samples for 2 micro-batches", ValueError,
     lambda: plan_step([described([0])], "token_mean", num_microbatches=2)),
    ("negative number", "num_microbatches is -1", ValueError, lambda: plan_step([], "token_mean", num_microbatches=-1)),
    ("empty list", "an empty list of samples", ValueError, lambda: plan_step([], "token_mean")),
    ("nothing", "neither samples nor num_microbatches", ValueError, lambda: plan_step(None, "token_mean")),
    ("prompt ids", "samples without prompt_ids", ValueError,
     lambda: plan_step([Samples([torch.ones(2)])], "prompt_mean")),
    ("mode", "there is no such mode", ValueError, lambda: planned("mean")),
    ("divisor", "without a divisor", ValueError, lambda: plan_step([described([0])], "constant")),
    ("empty step", "no such empty step handling", ValueError, lambda: planned(empty_step="stop")),
    ("term's mask", "a mask 'kl'", ValueError, lambda: planned(term_masks=["kl"])),
    ("totals", "the denominators are those of the whole step", TypeError, lambda: planned(totals=3)),
    ("missing statistic", "totals without the statistic", ValueError,
     lambda: plan_step([Samples([torch.ones(2)])], vl_norm, totals=of_tokens(2))),
    ("missing count", "totals without step_tokens", ValueError,
     lambda: plan_step([described([0])], "token_mean", totals=StepTotals(rollouts=UnitCounts(all=3)))),
    ("2^31 tokens with per-token loss", "Megatron sums token counts as int32", BadBatchError,
     lambda: planned("token_mean", per_token_loss=True, totals=of_tokens(2**31))),
    ("missing count of an empty step", "empty step handling 'error' needs it", ValueError,
     lambda: planned(totals=StepTotals(rollouts=UnitCounts(all=3, tokens={0: 1})), empty_step="error")),
    ("small totals", "the totals say 1", ValueError,
     lambda: plan_step([described(DEALT[0])], "token_mean", totals=StepTotals(step_tokens=1))),
    ("totals over CP ranks", "it has context-parallel ranks", ValueError,
     lambda: plan_step([Samples([torch.ones(4)], layout=ZigzagTHD([0, 4]))], "token_mean", cp_group=OF_TWO_RANKS,
                       totals=StepTotals(step_tokens=4, dp_size=2))),
    ("cp_groups of plan and samples", "0 with a cp_group of their own, in a plan with a cp_group of 2", ValueError,
     lambda: plan_step([Samples([torch.ones(4)], cp_group=OF_ONE_RANK)], "token_mean", cp_group=OF_TWO_RANKS,
                       totals=StepTotals(step_tokens=4, dynamic_cp=True))),
    ("totals without a word of cp_groups", "ranks without such samples would scale as in other steps", ValueError,
     lambda: plan_step([Samples([torch.ones(4)], cp_group=OF_ONE_RANK)], "token_mean",
                       totals=StepTotals(step_tokens=4))),
    ("unknown form", "form='tuple': there is no such form", ValueError, lambda: carried(form="tuple")),
    ("pair with per-token loss", "form='2-tuple' with per-token loss", ValueError,
     lambda: carried(form="2-tuple", per_token_loss=True)),
    ("mean with per-token loss", "form='mean' with per-token loss", ValueError,
     lambda: carried(form="mean", per_token_loss=True)),
    ("slime with per-token loss", "form='slime' with per-token loss", ValueError,
     lambda: carried(form="slime", per_token_loss=True)),
    ("NeMo-RL without", "form='nemo_rl' without per-token loss", ValueError, lambda: carried(form="nemo_rl")),
    ("no reducer", "without this micro-batch's reducers", ValueError, lambda: planned()[0].carry(torch.ones(()))),
    ("unreduced", "the loss is of shape (2,)", ValueError, lambda: planned()[0].carry(torch.ones(2))),
    ("coefficient", "coef='2': it must be a finite number", ValueError,
     lambda: planned()[0].loss({"pg": Term(losses_of(DEALT[0]), coef="2")})),  # type: ignore[arg-type]
    ("report of numbers", "kl is 0.5", ValueError, lambda: planned()[0].report({"kl": 0.5})),  # type: ignore[dict-item]
    ("per-token loss without its count", "totals without step_active_tokens: what is returned is multiplied by it",
     ValueError, lambda: replace(planned("token_mean", per_token_loss=True), totals=StepTotals(step_tokens=9))[0].loss(
         losses_of(DEALT[0]))),
    ("a cut of another number of tokens", "shape (5,)", ValueError, lambda: cut(torch.ones(5))),
    ("a cut of tokens in the second dimension", "shape (2, 4)", ValueError, lambda: cut(torch.ones(2, 4))),
    ("no term", "there must be one at least", ValueError, lambda: of_terms(lambda x: {})),
    ("a term named loss", "a loss of the terms ['loss', 'kl']", ValueError,
     lambda: of_terms(lambda x: {"loss": x, "kl": x})),
    ("a metric named as a term", "a metric named 'kl'", ValueError,
     lambda: of_terms(lambda x: {"pg": x, "kl": x}, kl=Metric(torch.ones(4)))),
    ("a metric named as the loss of terms", "a metric named 'loss'", ValueError,
     lambda: of_terms(lambda x: {"pg": x, "kl": x}, loss=Metric(torch.ones(4)))),
    ("a term of another number of tokens", "a term of shape (3,)", ValueError,
     lambda: of_terms(lambda x: {"pg": x, "kl": x[:3]})),
    ("units without a mode", "the term 'kl' with units or a divisor and no mode", ValueError,
     lambda: of_terms(lambda x: {"kl": Term(x, units="active")})),
    ("a coefficient that is not finite", "the term 'kl' with coef=nan", ValueError,
     lambda: of_terms(lambda x: {"kl": Term(x, coef=math.nan)})),
    ("a mode that nothing was counted for", "'kl' by prompt_mean and totals without prompts.all", ValueError,
     lambda: of_terms(lambda x: {"pg": x, "kl": Term(x, "prompt_mean")})),
    ("a mask that is not there", "totals of the masks: none; a term by the mask 'wrong'", ValueError,
     lambda: of_terms(lambda x: {"pg": x, "nll": Term(x, mask="wrong")})),
    ("an unknown normaliser", "Choose one of samples, tokens, prompts, none", ValueError,
     lambda: of_terms(lambda x: x, x=Metric(torch.ones(4), "rollouts"))),  # type: ignore[arg-type]
    ("an unknown kind", "Choose one of mean, min, max, variance, ess", ValueError,
     lambda: of_terms(lambda x: x, x=Metric(torch.ones(4), kind="std"))),  # type: ignore[arg-type]
    ("a metric over prompts that nothing counted", "'x' by prompt_mean and totals without prompts.all", ValueError,
     lambda: of_terms(lambda x: x, x=Metric(torch.ones(4), "prompts"))),
    ("an extreme of another number of tokens", "a metric of shape (3,)", ValueError,
     lambda: of_terms(lambda x: x, x=Metric(torch.ones(3), kind="max"))),
]  # fmt: skip


def cut(tensor: Tensor) -> Tensor:
    plan = plan_step([Samples([torch.ones(4)], layout=ZigzagTHD([0, 4]))], "token_mean")
    return replace(plan, cp_rank=1, cp_size=2)[0].local(tensor)


def of_terms(terms: Callable[[Tensor], Any], **metrics: Metric) -> Any:
    plan = plan_step([Samples([torch.ones(4)])], "token_mean")
    return plan[0].loss(terms(torch.ones(4, requires_grad=True)), metrics)


def carried(form: Any, per_token_loss: bool = False) -> Any:
    plan = planned("token_mean", per_token_loss=per_token_loss)
    return plan[0].carry(plan[0](losses_of(DEALT[0])), form=form)


@pytest.mark.parametrize(("text", "error", "use"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_uses_are_refused(text: str, error: type[Exception], use: Callable[[], Any]) -> None:
    with pytest.raises(error, match=re.escape(text)):
        use()


def test_no_graph_outlives_the_loss() -> None:
    plan = planned()
    losses = losses_of(DEALT[0])
    graphs = [ref(plan[0].loss(losses)[0]), ref(plan[0](losses))]
    assert [graph() for graph in graphs] == [None, None]
    held = ref(plan[0])
    del plan
    assert held() is None  # nor a micro-batch the plan, without the garbage collector
