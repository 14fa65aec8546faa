"""A plan without Megatron, in one process: what it hands out, in every form, what it reports, and what it refuses."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from refusals import outcome_of
from step_samples import DIVISOR, dealt, step_samples
from steps import token_weights
from torch import Tensor

from megatron_rl_loss import (
    BadBatchError,
    Gathered,
    Metric,
    Mode,
    Samples,
    StepTotals,
    Sum,
    Term,
    ZigzagBSHD,
    ZigzagTHD,
    plan_step,
)
from megatron_rl_loss.plan.carriers import CARRIERS, Carrier, Count, product
from megatron_rl_loss.plan.checks import check_active_tokens
from megatron_rl_loss.plan.plan import Plan
from megatron_rl_loss.plan.returned import check_returned
from megatron_rl_loss.step.collectives import StepGroups

STEP = step_samples(seed=4)
DEALT = dealt(STEP, 0, 1, 3)


def described(chosen: list[int], **options: Any) -> Samples:
    for kind in ("rollout", "prompt"):
        options[f"{kind}_ids"] = [str(getattr(STEP[i], f"{kind}_id")) for i in chosen]
    return Samples([STEP[i].mask for i in chosen], **options)


def planned(mode: Any = "sample_mean", **options: Any) -> Plan:
    divisor = DIVISOR if mode == "constant" else None
    return plan_step([described(chosen) for chosen in DEALT], mode, divisor=divisor, dp_group=None, **options)


def losses_of(chosen: list[int]) -> Tensor:
    return torch.cat([STEP[i].losses for i in chosen]).float().requires_grad_()


def placed(plan: Plan, cp_rank: int = 0, cp_size: int = 1, dp_size: int = 1) -> Plan:
    """The plan as one rank of groups that do not exist."""
    groups = [
        SimpleNamespace(size=lambda: dp_size, rank=lambda: 0),
        SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank),
    ]
    facts = replace(plan.facts, groups=StepGroups(*groups))  # type: ignore[arg-type]
    return Plan(plan.samples, facts)


@pytest.mark.parametrize(("mode", "units"), oracle.COUNTINGS)
def test_shares_add_up_to_the_step_loss(mode: str, units: Any) -> None:
    plan, total, divisor = planned(mode, units=units), 0.0, DIVISOR if mode == "constant" else None
    assert len(plan) == len(list(plan)) == len(DEALT)
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        losses = losses_of(chosen)
        share = microbatch(losses)
        microbatch.carry(share, form="sum").backward()
        weights = token_weights(mode, microbatch.samples, plan.totals, divisor=divisor, units=units)
        assert torch.equal(microbatch.weights, weights)
        assert torch.equal(losses.grad, weights)
        total += float(share.detach())
    error = oracle.sum_error(oracle.num_tokens(STEP)) * oracle.step_scale(mode, STEP, divisor, units)
    assert total == pytest.approx(float(oracle.step_loss(mode, STEP, divisor, units)), abs=error)
    assert float(plan.finish()["pg_loss"]) == pytest.approx(total)


# --- what is returned


@pytest.mark.parametrize("row", CARRIERS, ids=lambda row: f"{row.form}-{row.per_token}")
def test_the_powers_of_each_count_cancel(row: Carrier) -> None:
    counts: dict[Count, float | None] = {"num_microbatches": 3, "dp_size": 5, "cp_size": 7}
    counts |= {"step_active_tokens": 11, "rollouts": 13}
    places = (row.returned, row.engine, row.schedule, row.ddp, row.finalize)
    assert math.prod(product(powers, counts) for powers in places) == pytest.approx(1)
    for name in row.returned.keys() & {"step_active_tokens", "rollouts"}:
        with pytest.raises(ValueError, match=f"totals without {name}"):
            product(row.returned, counts | {name: None})


def test_what_is_returned_in_each_form() -> None:
    losses, active = losses_of(DEALT[0]), [sum(int((STEP[i].mask != 0).sum()) for i in chosen) for chosen in DEALT]
    mine = {"nested": {"loss": 1, "list": [1, "two"]}, "lr": 1e-6}
    forms: list[tuple[Any, bool, int]] = [
        ("3-tuple", False, 3 * 5), ("2-tuple", False, 3 * 5), ("sum", False, 1), ("mean", False, 5),
        ("3-tuple", True, sum(active)), ("slime", False, len({one.rollout_id for one in STEP})),
        ("verl", False, 5), ("verl", True, 5), ("nemo_rl", True, 1),
    ]  # fmt: skip
    for form, per_token, factor in forms:  # of 3 micro-batches, over 5 ranks
        microbatch = placed(planned("token_mean", per_token_loss=per_token), dp_size=5)[0]
        share = microbatch(losses)
        returned = microbatch.carry(share, mine, form=form)
        loss, *num_tokens, report = (returned, mine) if isinstance(returned, Tensor) else returned
        assert float(loss.detach()) == pytest.approx(factor * float(share.detach()))
        assert report is mine
        assert num_tokens == ([active[0] if per_token else 1] if form == "3-tuple" else [])
        assert all(number.dtype == torch.int32 for number in num_tokens)
    copies = plan_step([Samples([[1] * 4], layout=Gathered([0, 4]))], "token_mean", per_token_loss=True, dp_group=None)
    of_ranks = [placed(copies, rank, 2)[0].loss(torch.ones(4, requires_grad=True)) for rank in range(2)]
    assert [int(one[1]) for one in of_ranks] == [4, 0]  # counted on the first of the ranks that hold them


def test_what_a_loss_function_returns_must_be_what_was_handed_out() -> None:
    plan, losses = planned(), losses_of(DEALT[0])
    with pytest.raises(ValueError, match=r"neither its loss\(\) nor its carry\(\) was called"):
        check_returned((losses.sum(), torch.ones(()), {}), plan[0].receipt)
    loss, count, report = plan[0].loss(losses)
    check_returned((loss, count, report), plan[0].receipt)
    check_returned((loss, count, {**report, "lr": 0.1}), plan[0].receipt)
    for wrong, text in (
        (loss, "returned a loss alone, the result of form='sum' or form='mean'"),
        (3, "returned a int"),
        ((loss, report), "returned 2 values"),
        ((loss * 2, count, report), "it is another aggregation, has a factor"),
        ((loss, 1, report), "token count that this micro-batch did not hand out: it is a int"),
        ((loss, count, {"kl": torch.ones(())}), "a report of single numbers, kl: Megatron logs their mean"),
        ((plan[1].loss(losses_of(DEALT[1]))[0], count, report), "an earlier micro-batch's loss"),
    ):
        with pytest.raises(ValueError, match=text):
            check_returned(wrong, plan[0].receipt)
    loss.data.add_(1)
    loss.detach().add_(1)
    with pytest.raises(ValueError, match="it was changed in place"):
        check_returned((loss, count, report), plan[0].receipt)


# --- a plan is used up


def train(plan: Plan, *numbers: int) -> None:
    for number in numbers:
        plan[number].loss(losses_of(DEALT[number]))[0].backward()


def test_a_plan_is_trained_on_once() -> None:
    """A plan of an earlier step, half of its micro-batches, a micro-batch twice: each is refused, or meant."""
    plan = planned()
    train(plan, 0)
    with pytest.raises(ValueError, match=r"micro-batch 0 of a plan, a second time: the plan is being trained on"):
        train(plan, 0)
    train(plan, 1)
    with pytest.raises(ValueError, match=r"a plan of 3 micro-batches, of which \[2\] were not trained on"):
        plan.finish()
    train(plan, 2)
    plan.finish()
    with pytest.raises(
        ValueError, match=r"trained on already, all of it. Call plan_step for each step; .*plan.restart\(\) first"
    ):
        train(plan, 1)
    plan.restart()
    train(plan, 2, 0, 1)
    plan.finish()
    plan.restart()
    with pytest.raises(ValueError, match="put together without this micro-batch's reducers"):
        plan[0].carry(plan[1](losses_of(DEALT[1])))  # its uses in the pass before do not count
    plan.restart()
    for number in (0, 1, 2):  # a loop that trains on shares as they are
        losses = losses_of(DEALT[number]).requires_grad_()
        (plan[number](losses) + plan[number](losses)).backward()  # terms may share a reducer until then
    plan.finish()
    with pytest.raises(ValueError, match=r"micro-batch 1 of a plan, a second time: .* all of it"):
        plan[1](losses_of(DEALT[1]).requires_grad_())
    with torch.no_grad():  # evaluation carries as often as it likes
        plan.restart()
        for number in (0, 1, 1, 2):
            plan[number].loss(losses_of(DEALT[number]))
        plan.finish()


def test_a_share_of_another_micro_batch_is_refused() -> None:
    plan = planned()
    with pytest.raises(ValueError, match="without this micro-batch's reducers"):
        plan[0].carry(plan[1](losses_of(DEALT[1])))


# --- reports


def test_reports_are_filled_in_at_the_end_and_each_micro_batch_counts_once() -> None:
    """A plan runs again after an error: variance is not counted twice."""
    values = [losses_of(chosen).detach() for chosen in DEALT]
    masks = torch.cat([torch.cat([STEP[i].mask for i in chosen]) for chosen in DEALT])
    flat, kinds = torch.cat(values).double(), ("mean", "min", "max", "variance", "ess")
    plan = planned("token_mean")
    for again in range(2):
        reports = []
        for microbatch, chosen, x in list(zip(plan, DEALT, values, strict=True))[: 3 if again else 2]:
            metrics: dict[str, Any] = {kind: Metric(x, "tokens", kind=kind) for kind in kinds}
            reports.append(microbatch.loss(losses_of(chosen), {**metrics, "sum": Metric(x, "none"), "plain": x})[2])
        assert all(math.isnan(value) for report in reports for value in report.values())
        if not again:
            plan.restart()
    found = plan.finish(reports)
    mean = float((masks * flat).sum() / masks.sum())
    square = float((masks * flat**2).sum() / masks.sum())
    seen = flat[masks != 0]
    expected = {
        "pg_loss": mean, "mean": mean, "min": seen.min(), "max": seen.max(), "variance": square - mean**2,
        "ess": mean**2 / square, "sum": (masks * flat).sum(), "plain": oracle.step_loss("sample_mean", STEP),
    }  # fmt: skip
    assert {name: float(one) for name, one in found.items()} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-4
    )
    for report in reports:
        assert {name: float(one) for name, one in report.items()} == {name: float(one) for name, one in found.items()}


SESSIONS = ["a", "b", "b", "b"]
OF_SESSIONS = [[1.0, 3], [1.0] * 6, [9.0], [5.0]]  # token means of 2, 1, 9 and 5
TURNS = [["a1", "a2"], ["b1"] * 4 + ["b2"] * 2, ["b2"], ["b3"]]


def test_metrics_over_any_ids_and_modes() -> None:
    """Over sessions of 2 and of 8 tokens: tokens pooled, rows averaged, rows alone; over turns, which cross rows."""
    held = [[0, 3], [], [2, 1]]
    samples = [
        Samples([[1.0] * len(OF_SESSIONS[i]) for i in hand], ids={
            "session": [SESSIONS[i] for i in hand], "turn": [TURNS[i] for i in hand]
        })
        for hand in held
    ]  # fmt: skip
    plan = plan_step(samples, "session_mean", dp_group=None)
    over = ("session", "session_mean", "sample", "samples", "turn", "turn_mean", "tokens")
    for microbatch, hand in zip(plan, held, strict=True):
        x = torch.tensor([value for i in hand for value in OF_SESSIONS[i]])
        microbatch.loss(x.requires_grad_(), {name: Metric(x, name) for name in over})
    found = {name: float(value) for name, value in plan.finish().items()}
    turns = (1 + 3 + 1 + (1 + 1 + 9) / 3 + 5) / 5
    assert found == pytest.approx({
        "pg_loss": (2 + (1 + 9 + 5) / 3) / 2, "session": (2 + 20 / 8) / 2, "session_mean": 3.5, "sample": 17 / 4,
        "samples": 17 / 4, "turn": turns, "turn_mean": turns, "tokens": 24 / 10,
    })  # fmt: skip
    assert {"sessions": 2, "turns": 5, "active_turns": 5}.items() <= plan.summary.items()
    assert "4 rollouts, 2 sessions (2.0 each), 5 turns (1.2 per rollout), 10 of 10 tokens" in plan.describe()
    with pytest.raises(ValueError, match="'mean over rollouts' and samples without rollouts_ids"):
        plan.restart() or plan[0].loss(torch.ones(3, requires_grad=True), {"x": Metric(torch.ones(3), "rollouts")})


def test_ids_that_look_counted_anew_are_warned_of() -> None:
    """Turns that are numbered from 0 on in each sample; a session whose id is that of all."""
    for mode, ids, key in (
        ("turn_mean", {"turn": [[0, 0, 1], [0, 1]], "session": [1, 1]}, "turn"),
        ("session_mean", {"turn": [[0, 0, 1], [0, 1]], "session": [1, 1]}, "session"),
    ):
        with pytest.warns(UserWarning, match=f"one {key} has tokens of all 2 samples .*start again") as caught:
            plan_step([Samples([[1, 1, 1], [1, 1]], ids=ids)], mode, dp_group=None)
        assert len(caught) == 1
    plan_step([Samples([[1, 1, 1], [1, 1]], ids={"turn": [[0, 0, 1], [2, 3]]})], "turn_mean", dp_group=None)


def test_a_report_of_shares() -> None:
    plan, values = planned(), []
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        share = microbatch.token_mean(losses_of(chosen))
        values.append(float(share.detach()))
        report = microbatch.carry(share, microbatch.report({"mine": 2 * share}))[2]
    assert float(plan.finish([report])["mine"]) == pytest.approx(2 * sum(values))
    assert float(report["mine"]) == pytest.approx(2 * sum(values))


def test_without_an_active_token_a_metric_is_not_a_number() -> None:
    plan = plan_step([Samples([[0, 0]])], "token_mean", dp_group=None)
    metrics = {kind: Metric(torch.ones(2), "tokens", kind=kind) for kind in ("min", "max", "variance", "ess")}  # type: ignore[arg-type]
    plan[0].loss(torch.ones(2, requires_grad=True), metrics)
    found = plan.finish()
    assert all(math.isnan(found[kind]) for kind in metrics)
    assert float(found["pg_loss"]) == 0


def test_what_is_not_finite_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_step([Samples([[1, 0], [1, 1]])], "token_mean", dp_group=None)
    bad = torch.tensor([1, math.nan, 2, math.inf], requires_grad=True)
    plan[0].loss({"pg": torch.ones(4, requires_grad=True), "kl": bad}, {"gap": bad.detach()})
    assert "the term 'kl' is inf at token 1 of sample 1 of a micro-batch" in caplog.text


# --- terms


def test_a_loss_of_terms_by_hand() -> None:
    masks, correct = [torch.tensor([1.0, 1, 0]), torch.tensor([1.0])], [torch.tensor([0.0, 1, 0]), torch.tensor([0.0])]
    samples = [Samples(masks, rollout_ids=["a", "b"], term_masks={"correct": correct})]
    x = torch.tensor([1.0, 2.0, math.nan, 6.0], requires_grad=True)
    terms = {
        "pg": x, "kl": Term(3 * x, coef=0.1), "nll": Term(5 * x, coef=2.0, mask="correct"), "same": Term(x, coef=0),
        "seen": Term(x.detach() * 2, "token_mean"),
    }  # fmt: skip
    plan = plan_step(samples, "sample_mean", terms={"kl": "token_mean"}, term_masks=["correct"], dp_group=None)
    loss, _, report = plan[0].loss(terms)
    plan.finish([report])
    # 1/2 (1.5 + 6); 3 * 9 / 3; 5 * (1/2) (2 + 0)
    expected = {"loss": 3.75 + 0.9 + 10 + 6, "pg": 3.75, "kl": 9, "nll": 5, "same": 3.75, "seen": 6}
    assert {name: float(value) for name, value in report.items()} == pytest.approx(expected)
    loss.backward()
    assert x.grad.tolist() == pytest.approx([0.25 + 0.1, 0.25 + 0.1 + 5, 0, 0.5 + 0.1])
    assert len({id(reducer) for reducer in plan[0]._reducers.values()}) == 3  # by sample, by token, by the mask


def test_terms_and_metrics_count_the_units_and_masks_that_they_say() -> None:
    """Terms that differ in nothing but their counting do not share weights; a metric's own mask has its own mean."""
    own = [one.mask * (torch.arange(len(one.mask)) % 2 == 0) for one in STEP]
    samples = [described(chosen, term_masks={"own": [own[i] for i in chosen]}) for chosen in DEALT]
    ours = Sum(of=lambda samples: samples.mask_sums)
    declared = Mode(name="declared", function=lambda step: 1 / step.sum("all"), sums={"all": ours})
    terms: Any = {"declared": declared}
    plan = plan_step(samples, "sample_mean", units="active", terms=terms, term_masks=["own"], dp_group=None)
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        x = losses_of(chosen)
        by_name = {
            "pg": x, "all": Term(x, "sample_mean", units="all"), "as policy": Term(x, "sample_mean"),
            "peer": Term(x, "openrlhf:token_level_loss=false"), "declared": Term(x, mask="own"),
            "declared too": Term(x, declared, mask="own"),
        }  # fmt: skip
        microbatch.loss(by_name, {"masked": Metric(x.detach(), mask="own")})
    found = {name: float(value) for name, value in plan.finish().items()}
    of_own = [replace(one, mask=mask) for one, mask in zip(STEP, own, strict=True)]
    mean = float(oracle.step_loss("token_mean", of_own))
    expected = {
        name: float(oracle.step_loss("sample_mean", step, None, units))
        for name, step, units in (
            ("pg", STEP, "active"), ("all", STEP, "all"), ("as policy", STEP, "active"), ("masked", of_own, "active"),
            ("peer", STEP, "active"),
        )
    } | {"declared": mean, "declared too": mean}  # fmt: skip
    assert expected["pg"] != expected["all"]
    assert found == pytest.approx(expected | {"loss": sum(found[name] for name in by_name)}, rel=1e-5)


# --- fillers, cuts, tokens


@pytest.mark.filterwarnings("ignore:one prompt has tokens of all")
@pytest.mark.parametrize("filler", [Samples([]), Samples([], layout=ZigzagTHD([0, 4], filler_slots=1), prompt_ids=[])])
def test_empty_micro_batches_and_steps(filler: Samples) -> None:
    masks = {"own": [STEP[i].mask for i in (0, 1)]}
    plan = plan_step([described([0, 1], term_masks=masks), filler], "prompt_mean", term_masks=["own"], dp_group=None)
    losses = torch.ones(filler.total_tokens, requires_grad=True) * math.nan
    plan[1].loss({"pg": losses, "own": Term(losses, mask="own")})[0].backward()
    alone = plan_step([described([0, 1])], "prompt_mean", dp_group=None)
    assert plan.summary == alone.summary
    assert torch.equal(plan[0].weights, alone[0].weights)
    with pytest.raises(BadBatchError, match="a step without one active token"):
        plan_step([filler], "token_mean", empty_step="error", dp_group=None)


def test_as_many_tokens_as_megatron_counts() -> None:
    for per_token_loss, number in ((True, 2**31 - 1), (False, 2**31)):
        check_active_tokens(StepTotals(step_active_tokens=number), per_token_loss=per_token_loss, empty_step="warn")
    with pytest.raises(BadBatchError, match="Megatron sums token counts as int32"):
        check_active_tokens(StepTotals(step_active_tokens=2**31), per_token_loss=True, empty_step="warn")


PACKED = Samples([torch.ones(4), torch.ones(6)], layout=ZigzagTHD([0, 8, 16], [4, 6]), tokens=torch.arange(16))
OF_ROWS = Samples([torch.ones(4)] * 2, layout=ZigzagBSHD(2, 4), tokens=torch.arange(8).view(2, 4))


def test_local_cuts_what_has_a_value_a_token() -> None:
    whole, batch = torch.arange(16), torch.arange(8).view(2, 4)
    both, plan = torch.stack([whole, -whole], 1), plan_step([PACKED, OF_ROWS], "token_mean", dp_group=None)
    for cp_rank, held in enumerate(([0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13])):
        packed, rows = placed(plan, cp_rank, 2)
        columns = batch[:, [[0, 3], [1, 2]][cp_rank]]  # row by row
        for one, given, expected in (
            (packed, whole.bool(), whole.bool()[held]), (packed, whole[None], whole[held][None]),
            (packed, both, both[held]), (packed, both[None], both[held][None]), (rows, batch, columns),
            (rows, batch.flatten(), columns.flatten()),
        ):  # fmt: skip
            assert torch.equal(one.local(given), expected)
        with pytest.raises(ValueError, match=r"shape \(4, 2\)"):  # which would be cut as a whole
            rows.local(batch.view(4, 2))


def test_a_models_tokens_are_compared_with_the_plans_cut() -> None:
    plan = plan_step([PACKED, OF_ROWS], "token_mean", dp_group=None)
    packed, rows = placed(plan, 1, 2)
    packed.check_tokens(torch.tensor([2, 3, 4, 5, 10, 11, 12, 13])[None])
    rows.check_tokens(torch.tensor([[1, 2], [5, 6]]))
    with pytest.raises(ValueError, match="8 local tokens that are not those of the plan's layout: the model cuts"):
        packed.check_tokens(torch.arange(8, 16))  # cut as a whole
    with pytest.raises(ValueError, match="4 local tokens: this rank's part of the layout is 8"):
        placed(plan, 0, 2)[0].check_tokens(torch.arange(4))
    with pytest.raises(ValueError, match="check_tokens of Samples without tokens"):
        planned()[0].check_tokens(torch.arange(4))


def misspelt_on_one_rank() -> str:
    start_process_group()
    mode = ("token_mean", "tokn_mean")[dist.get_rank()]
    return outcome_of(lambda: plan_step([described(DEALT[0])], mode, dp_group=dist.group.WORLD))


def test_a_mode_that_one_rank_alone_misspells_is_told_to_all() -> None:
    for told in run_ranks(2, misspelt_on_one_rank):
        assert re.search("BadBatchError: .*rank 1: ValueError: .*there is no such mode. Did you mean token_mean", told)


def test_a_mode_declared_for_no_term_is_refused() -> None:
    plan = planned(terms={"kll": "sample_mean"})
    for number, microbatch in enumerate(plan):
        losses = losses_of(DEALT[number])
        microbatch.loss({"pg": losses, "kl": Term(losses.detach())})
    with pytest.raises(ValueError, match=r"a mode for the term 'kll', and a loss that reports \['kl', 'loss', 'pg'\]"):
        plan.finish()


def test_a_mode_declared_beside_a_loss_without_terms_is_refused() -> None:
    plan = planned(terms={"kl": "sample_mean"})
    with torch.no_grad():  # an evaluation may leave terms out
        for number, microbatch in enumerate(plan):
            microbatch.loss(losses_of(DEALT[number]))
    plan.finish()
    for number, microbatch in enumerate(plan):
        microbatch.loss(losses_of(DEALT[number]))
    with pytest.raises(ValueError, match=r"a mode for the term 'kl', and a loss that reports \['pg_loss'\]"):
        plan.finish()
    of_a_metric = Mode(name="own", function=lambda step: 1.0, sums={"all": Sum(of=lambda samples: samples.mask_sums)})
    plan = planned(terms={"own": of_a_metric})  # type: ignore[dict-item]  # declared, so that its sums are counted
    for number, microbatch in enumerate(plan):
        microbatch.loss(losses_of(DEALT[number]))
    plan.finish()


def test_no_graph_outlives_the_loss() -> None:
    plan, losses = planned(), [losses_of(one) for one in DEALT]
    graphs = [ref(plan[0].loss(losses[0])[0]), ref(plan[1](losses[1]))]

    assert [graph() for graph in graphs] == [None, None]
    held = ref(plan[0])
    del plan
    assert held() is None  # nor a micro-batch the plan, without the garbage collector
