"""A plan without Megatron, in one process: what it hands out, in every form, what it reports, and what it refuses."""

import functools
import math
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from ranks import run_ranks, start_process_group
from refusals import outcome_of
from step_samples import DIVISOR, dealt, step_samples
from steps import token_weights
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trainers import Split, active_in, trainer_of

from megatron_rl_loss import (
    Gathered,
    Metric,
    Mode,
    Samples,
    StepTotals,
    Sum,
    Term,
    ZigzagBSHD,
    ZigzagTHD,
    pass_gap,
    plan_step,
)
from megatron_rl_loss.core.carriers import (
    DEFAULT,
    FORMS,
    IN_A_LOOP,
    Carrier,
    Count,
    check_returned,
    find_form,
    product,
)
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.errors import BadBatchError
from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.plan import Plan, check_active_tokens

STEP = step_samples(seed=4)
DEALT = dealt(STEP, 0, 1, 3)


def described(chosen: list[int], **options: Any) -> Samples:
    for kind in ("rollout", "prompt"):
        options[f"{kind}_ids"] = [str(getattr(STEP[i], f"{kind}_id")) for i in chosen]
    return Samples([STEP[i].mask.to(DEVICE) for i in chosen], **options)


def planned(mode: Any = "sample_mean", **options: Any) -> Plan:
    divisor = oracle.divisor_of(mode, DIVISOR)
    return plan_step([described(chosen) for chosen in DEALT], mode, divisor=divisor, dp_group=None, **options)


def losses_of(chosen: list[int]) -> Tensor:
    return torch.cat([STEP[i].losses for i in chosen]).float().to(DEVICE).requires_grad_()


def placed(plan: Plan, cp_rank: int = 0, cp_size: int = 1, dp_size: int = 1) -> Plan:
    """The plan as one rank of groups that do not exist."""
    groups = [
        SimpleNamespace(size=lambda: dp_size, rank=lambda: 0),
        SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank),
    ]
    trainer = replace(plan.record.trainer, groups=StepGroups(*groups))  # type: ignore[arg-type]
    return Plan(plan.samples, replace(plan.record, trainer=trainer))


@pytest.mark.gpus
@pytest.mark.parametrize(("mode", "units"), oracle.COUNTINGS)
def test_shares_add_up_to_the_step_loss(mode: str, units: Any) -> None:
    plan, total, divisor = planned(mode, units=units), 0.0, oracle.divisor_of(mode, DIVISOR)
    assert len(plan) == len(list(plan)) == len(DEALT)
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        losses = losses_of(chosen)
        share = microbatch.loss(losses)
        share.backward()
        weights = token_weights(mode, microbatch.samples, plan.totals, divisor=divisor, units=units)
        assert torch.equal(microbatch.weights.cpu(), weights)
        assert torch.equal(losses.grad.cpu(), weights)
        total += float(share.detach())
    error = oracle.sum_error(oracle.num_tokens(STEP)) * oracle.step_scale(mode, STEP, divisor, units)
    assert total == pytest.approx(float(oracle.step_loss(mode, STEP, divisor, units)), abs=error)
    assert float(plan.finish()["pg_loss"]) == pytest.approx(total)


# --- what is returned


for _name in ("slime", "verl", "nemo_rl"):
    find_form(_name)  # loads the forms of engines
ROWS = {**FORMS, **IN_A_LOOP}
CARRIERS = {
    f"{name}-{per_token}": carrier for name, form in ROWS.items() for per_token, carrier in form.carriers.items()
}


@pytest.mark.parametrize("row", CARRIERS.values(), ids=CARRIERS)
def test_the_powers_of_each_count_cancel(row: Carrier) -> None:
    counts: dict[Count, float] = {"num_microbatches": 3, "ranks": 35, "dp_size": 5, "cp_size": 7}
    counts |= {"step_active_tokens": 11, "rollouts": 13}
    places = (row.returned, row.engine, row.schedule, row.ddp, row.finalize)
    assert math.prod(product(powers, counts) for powers in places) == pytest.approx(1)


def test_forms_of_the_schedule_are_averaged_and_finalised_alike() -> None:
    """A launch reads what DDP multiplies by once, for the default form; no loop or engine comes between."""
    for form in FORMS.values():
        for per_token, carrier in form.carriers.items() if form.caller == "schedule" else ():
            default = DEFAULT.carriers[per_token]
            assert (carrier.ddp, carrier.engine) == (default.ddp, {}), form.name


def test_what_is_returned_in_each_form() -> None:
    losses, masks = losses_of(DEALT[0]), [[STEP[i].mask for i in chosen] for chosen in DEALT]
    split = Split(3, 5, 1, num_tokens=sum(map(active_in, masks)), rollouts=len({sample.rollout_id for sample in STEP}))
    for name, per_token in [(name, per_token) for name, form in ROWS.items() for per_token in form.carriers]:
        form, trainer = ROWS[name], trainer_of(name, per_token)
        gradients = {"gradients": name} if name in IN_A_LOOP else {}
        microbatch = placed(planned("token_mean", per_token_loss=per_token, **gradients), dp_size=5)[0]
        returned = microbatch.loss(losses, form=None if gradients else name)
        share = (losses.detach() * microbatch.weights).sum()
        parts = form.read(returned)
        assert parts is not None
        if form.caller == "schedule":
            check_returned(returned, microbatch.receipt)
        loss, report = parts.pop("loss"), parts.pop("report", {"pg_loss": None})
        assert float(loss.detach()) == pytest.approx(float(share) / trainer.factor(split))
        assert report.keys() == {"pg_loss"}
        assert list(parts.values()) == trainer.counts(masks[0])
        assert all(number.dtype == torch.int32 for number in parts.values())
    copies = plan_step([Samples([[1] * 4], layout=Gathered([0, 4]))], "token_mean", per_token_loss=True, dp_group=None)
    of_ranks = [placed(copies, rank, 2)[0].loss(torch.ones(4, requires_grad=True), form="3-tuple") for rank in range(2)]
    assert [int(returned[1]) for returned in of_ranks] == [4, 0]  # counted on the first of the ranks that hold them


@pytest.mark.parametrize("copies", [1, 2])
def test_a_share_that_was_summed_elsewhere_has_the_layouts_gradient(copies: int) -> None:
    """As of the output head: where ranks hold copies and a gather drops gradients, times the number of copies."""
    samples = Samples([[1, 1, 0, 1]], layout=Gathered([0, 4], backward="slice"))
    microbatch = placed(plan_step([samples], "token_mean", dp_group=None), 0, copies)[0]
    losses = torch.tensor([1.0, 2, 3, 4], requires_grad=True)
    share = microbatch.loss(microbatch.summed((losses * microbatch.weights).sum(), losses))
    share.backward()
    assert float(share.detach()) == pytest.approx(7 / 3 / copies)
    assert losses.grad.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_what_a_loss_function_returns_must_be_what_was_handed_out() -> None:
    plan, losses = planned(), losses_of(DEALT[0])
    with pytest.raises(ValueError, match=r"its loss\(\) was not called"):
        check_returned((losses.sum(), torch.ones(()), {}), plan[0].receipt)
    loss, count, report = plan[0].loss(losses, form="3-tuple")
    check_returned((loss, count, report), plan[0].receipt)
    check_returned((loss, count, {**report, "lr": 0.1}), plan[0].receipt)
    for wrong, text in (
        (loss, "returned a loss alone: Megatron's schedule takes"),
        (3, "returned a int"),
        ((loss, report), "returned 2 values"),
        ((loss * 2, count, report), "it is another aggregation, has a factor"),
        ((loss, 1, report), "num_tokens that this micro-batch did not hand out: it is a int"),
        ((loss, count, {"kl": torch.ones(())}), "a report of kl alone: Megatron logs the mean"),
        ((plan[1].loss(losses_of(DEALT[1]), form="3-tuple")[0], count, report), "an earlier micro-batch's loss"),
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
        plan[number].loss(losses_of(DEALT[number])).backward()


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
    text = r"trained on already, all of it. Pass all terms in one call of loss, .*plan.reset\(\) first"
    with pytest.raises(ValueError, match=text):
        train(plan, 1)
    plan.reset()
    train(plan, 2, 0, 1)
    plan.finish()
    plan.reset()
    for number in (0, 1, 2):  # a loop that trains on shares as they are
        plan[number].loss(losses_of(DEALT[number]).requires_grad_()).backward()
    plan.finish()
    with pytest.raises(ValueError, match=r"micro-batch 1 of a plan, a second time: .* all of it"):
        plan[1].loss(losses_of(DEALT[1]).requires_grad_())
    with torch.no_grad():  # evaluation carries as often as it likes
        plan.reset()
        for number in (0, 1, 1, 2):
            plan[number].loss(losses_of(DEALT[number]))
        plan.finish()


# --- one door: what a share was put together of by hand, a loss is made of in one call


def test_a_micro_batch_has_one_door() -> None:
    """A foreign term added to a share before it was scaled trained micro-batches x DP times too strongly."""
    doors = {"pg_loss", "scale_for_trainer", "report", "sample_mean", "token_mean", "folded"}
    assert not doors & set(dir(planned()[0]))


@pytest.mark.parametrize("names", [("pg", "kl"), ("kl", "pg")])
def test_the_order_of_terms_does_not_matter(names: tuple[str, ...]) -> None:
    plan, losses = planned("token_mean"), losses_of(DEALT[0])
    terms: dict[str, Any] = {"pg": losses, "kl": Term(losses, "sample_mean", coef=0.1)}
    plan[0].loss({name: terms[name] for name in names}).backward()
    expected = plan[0].weights + 0.1 * planned("sample_mean")[0].weights
    torch.testing.assert_close(losses.grad.cpu(), expected, rtol=1e-6, atol=0)


def test_another_micro_batchs_losses_do_not_fit() -> None:
    with pytest.raises(ValueError, match="this rank's part of the layout"):
        planned()[0].loss(losses_of(DEALT[1]))


def test_a_share_that_is_changed_in_place_does_not_change_the_log() -> None:
    plan = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
    share = plan[0].loss(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        share *= 8
    assert float(plan.finish()["pg_loss"]) == 1


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", "constant"])
def test_float64_losses_have_float64_weights(mode: str) -> None:
    """The gradient is checked against finite differences, and the loss against the oracle to 1e-14."""
    plan, total = planned(mode), 0.0
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        losses = torch.cat([STEP[i].losses for i in chosen]).double().cpu().requires_grad_()
        with torch.no_grad():
            share = microbatch.loss(losses)
        assert share.dtype == torch.float64
        assert torch.autograd.gradcheck(lambda values, of=microbatch: _reset(of).loss(values), losses)
        total += float(share)
    expected = float(oracle.step_loss(mode, STEP, oracle.divisor_of(mode, DIVISOR), "all"))
    assert total == pytest.approx(expected, rel=1e-14, abs=1e-14)


def _reset(microbatch: Microbatch) -> Microbatch:
    microbatch._record.reset()
    return microbatch


# --- reports


def test_reports_are_filled_in_at_the_end_and_each_micro_batch_counts_once() -> None:
    """A plan runs again after an error: variance is not counted twice."""
    values = [losses_of(chosen).detach() for chosen in DEALT]
    masks = torch.cat([torch.cat([STEP[i].mask for i in chosen]) for chosen in DEALT])
    flat, kinds = torch.cat(values).double(), list[Any](["mean", "min", "max", "variance", "ess"])
    plan = planned("token_mean")
    for again in range(2):
        reports = []
        for microbatch, chosen, losses in list(zip(plan, DEALT, values, strict=True))[: 3 if again else 2]:
            metrics: dict[str, Any] = {kind: Metric(losses, "tokens", kind=kind) for kind in kinds}
            reports.append(
                microbatch.loss(
                    losses_of(chosen), {**metrics, "sum": Metric(losses, "none"), "plain": losses}, form="3-tuple"
                )[2]
            )
        assert all(math.isnan(value) for report in reports for value in report.values())
        if not again:
            plan.reset()
    report = plan.finish(reports)
    mean = float((masks * flat).sum() / masks.sum())
    square = float((masks * flat**2).sum() / masks.sum())
    seen = flat[masks != 0]
    expected: dict[str, Any] = {
        "pg_loss": mean, "mean": mean, "min": seen.min(), "max": seen.max(), "variance": square - mean**2,
        "ess": mean**2 / square, "sum": (masks * flat).sum(),
        "plain": oracle.step_loss("sample_mean", STEP, None, "active"),
    }  # fmt: skip
    of_step = {name: float(value) for name, value in report.items()}
    assert of_step == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-4)
    for own_report in reports:
        assert {name: float(value) for name, value in own_report.items()} == of_step


@pytest.mark.parametrize("units", ["all", "active"])
@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "prompt_mean"])
def test_a_fully_masked_unit_is_in_no_mean_of_a_metric(mode: str, units: Any) -> None:
    """Rollouts, prompts and turns without a token: a KL of 1 is logged as 1, however the loss counts them."""
    samples = [
        Samples([[1, 1], [0, 0]], prompt_ids=["a", "b"], ids={"turn": [["u", "v"], ["w", "w"]]},
                term_masks={"own": [[1, 0], [0, 0]]}),
        Samples([[0, 1]], prompt_ids=["a"], ids={"turn": [["x", "y"]]}, term_masks={"own": [[0, 0]]}),
    ]  # fmt: skip
    plan = plan_step(samples, mode, units=units, dp_group=None, term_masks=["own"])
    for microbatch in plan:
        ones = torch.ones(len(microbatch.tokens), requires_grad=True)
        metrics = {over: Metric(ones, over) for over in ("samples", "prompts", "tokens", "turn", "sample", "none")}
        metrics |= {"as the loss": Metric(ones, "sample_mean"), "own": Metric(ones, mask="own")}
        microbatch.loss(ones, {"plain": ones, **metrics})
    report = {name: float(value) for name, value in plan.finish().items()}
    assert report.pop("pg_loss") == pytest.approx(
        {"token_mean": 1, "sample_mean": 2 / 3, "prompt_mean": 1 / 2}[mode] if units == "all" else 1
    )
    assert report.pop("as the loss") == pytest.approx(2 / 3 if units == "all" else 1)
    assert report.pop("none") == 3
    assert report == pytest.approx(dict.fromkeys(report, 1.0))
    assert "1 rollouts fully masked, left out of metric means" in plan.describe()


@settings(deadline=None, derandomize=True, max_examples=40)
@for_all(
    st.lists(st.tuples(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0]), min_size=1, max_size=4), st.integers(0, 2)),
             min_size=2, max_size=6),
    st.sampled_from(["sample_mean", "token_mean"]),
    st.sampled_from(["all", "active"]),
)  # fmt: skip
def test_a_mean_of_equal_values_is_the_value(drawn: list[Any], mode: str, units: Any) -> None:
    """Whatever is masked, and however the loss counts; between the values of the active tokens if they differ."""
    masks, prompts = [mask for mask, _ in drawn], [prompt for _, prompt in drawn]
    parts = [slice(None, 1), slice(1, None)]
    samples = [Samples(masks[part], prompt_ids=prompts[part]) for part in parts]
    values = torch.cat([torch.full((len(mask),), float(i)) for i, mask in enumerate(masks)])
    active = [float(i) for i, mask in enumerate(masks) if any(mask)]
    plan = plan_step(samples, mode, units=units, dp_group=None)
    of_parts = values.split([of_microbatch.total_tokens for of_microbatch in samples])
    for microbatch, part in zip(plan, of_parts, strict=True):
        equal, losses = torch.full_like(part, 3.0), part.clone().requires_grad_()
        metrics = {f"{over}, {k}": Metric(values, over) for over in ("samples", "prompts", "tokens")
                   for k, values in enumerate((equal, part))}  # fmt: skip
        microbatch.loss(losses, metrics)
    for name, value in plan.finish().items():
        if name.endswith("0"):
            assert float(value) == pytest.approx(3.0 if active else 0, rel=1e-5)
        elif name.endswith("1") and active:
            assert min(active) - 1e-4 <= float(value) <= max(active) + 1e-4
    if active:
        expected = sum(active) / len(active)
        assert float(plan.finish()["samples, 1"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


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
        losses = torch.tensor([value for i in hand for value in OF_SESSIONS[i]])
        microbatch.loss(losses.requires_grad_(), {name: Metric(losses, name) for name in over})
    report = {name: float(value) for name, value in plan.finish().items()}
    turns = (1 + 3 + 1 + (1 + 1 + 9) / 3 + 5) / 5
    assert report == pytest.approx({
        "pg_loss": (2 + (1 + 9 + 5) / 3) / 2, "session": (2 + 20 / 8) / 2, "session_mean": 3.5, "sample": 17 / 4,
        "samples": 17 / 4, "turn": turns, "turn_mean": turns, "tokens": 24 / 10,
    })  # fmt: skip
    assert {"sessions": 2, "turns": 5, "active_turns": 5}.items() <= plan.summary.items()
    assert "4 rollouts, 2 sessions (2.0 each), 5 turns (1.2 per rollout), 10 of 10 tokens" in plan.describe()
    with pytest.raises(ValueError, match=r"a metric over 'max': there are no such units.* Pass kind='max'\."):
        plan[0].loss(torch.ones(3, requires_grad=True), {"x": Metric(torch.ones(3), "max")})
    with pytest.raises(ValueError, match=r"a metric over 'rollouts': there are no such.* Did you mean rollout"):
        plan.reset() or plan[0].loss(torch.ones(3, requires_grad=True), {"x": Metric(torch.ones(3), "rollouts")})


def test_a_warning_that_is_made_an_error_stops_no_rank(caplog: pytest.LogCaptureFixture) -> None:
    """It is one rank's alone, while the others wait for its collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_step([Samples([[1, 1], [1]], prompt_ids=["a", "b"])], "prompt_mean", dp_group=None)
        plan[0].log_probs["now"] = torch.zeros(3)
        assert float(pass_gap(plan[0], "now", torch.ones(3))) == 1
    assert "every prompt group of the step has one rollout" in caplog.text
    assert "now of the training pass" in caplog.text


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is warned of inside the ``with``; a warning made an error would be logged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not caught


def test_ids_that_look_counted_anew_are_warned_of() -> None:
    """Turns that are numbered from 0 on in each sample; a session whose id is that of all."""
    ids: Any = {"turn": [[0, 0, 1], [0, 1]], "session": [1, 1]}
    for mode, key in (("turn_mean", "turn"), ("session_mean", "session")):
        with pytest.warns(UserWarning, match=f"one {key} has tokens of all 2 samples .*start again") as caught:
            plan_step([Samples([[1, 1, 1], [1, 1]], ids=ids)], mode, dp_group=None)
        assert len(caught) == 1
        if sys.version_info >= (3, 12):
            assert caught[0].filename == __file__, "it names the user's line, not the library's"
    with quiet():
        plan_step([Samples([[1, 1, 1], [1, 1]], ids={"turn": [[0, 0, 1], [2, 3]]})], "turn_mean", dp_group=None)


@pytest.mark.parametrize("key", ["rollout", "session"])
def test_ids_that_start_again_in_each_microbatch_are_warned_of(key: str) -> None:
    """8 rollouts would be counted as 2. Rows of a rollout may lie in several micro-batches, but hardly of all."""

    def planned(*of_microbatches: list[int]) -> None:
        samples = [Samples([[1, 1], [1]], ids={key: ids}) for ids in of_microbatches]
        plan_step(samples, "sample_mean" if key == "rollout" else "session_mean", dp_group=None)

    with pytest.warns(UserWarning, match=f"all 4 micro-batches have the same {key} ids, so .* 2 {key}s"):
        planned(*[[0, 1]] * 4)
    with quiet():
        planned([0, 1], [1, 2])


def test_rollout_ids_that_are_prompt_ids_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="each of the 2 rollouts of the step is a whole prompt group, of 4 samples"):
        plan_step([Samples([[1]] * 4, rollout_ids=[0, 0, 1, 1], prompt_ids=[0, 0, 1, 1])], "sample_mean", dp_group=None)
    with quiet():
        plan_step([Samples([[1]] * 4, rollout_ids=[0, 0, 1, 2], prompt_ids=[0, 0, 1, 1])], "sample_mean", dp_group=None)


def test_one_rollout_id_for_all_samples_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="all 2 samples of the step have one rollout id, so the step has 1 rollout"):
        plan_step([Samples([[1], [1, 1]], rollout_ids=[3, 3])], "sample_mean", dp_group=None)
    with quiet():
        plan_step([Samples([[1], [1, 1]], rollout_ids=[3, 4])], "sample_mean", dp_group=None)
        plan_step([Samples([[1]], rollout_ids=[3])], "sample_mean", dp_group=None)


def restarted() -> list[list[str]]:
    """On a rank: what is warned of where ids are the same on both ranks, of one unit, and of their own."""
    start_process_group()
    rank = dist.get_rank()
    of_each: list[tuple[str, dict[str, Any]]] = [
        *(("sample_mean", {"rollout_ids": ids}) for ids in ([0, 1], [0, 1 + rank], [f"r{rank}", f"s{rank}"])),
        ("turn_mean", {"ids": {"turn": [[0, 1], [2]]}}),
        ("turn_mean", {"ids": {"turn": [[3 * rank, 1 + 3 * rank], [2 + 3 * rank]]}}),
    ]
    messages = []
    for mode, options in of_each:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan_step(
                [Samples([[1, 1 - rank], [1]], **options)],
                mode,
                dp_group=dist.group.WORLD,
                gradients="summed over ranks",
            )
        messages.append([str(warning.message) for warning in caught])
    return messages


def test_ids_that_start_again_on_each_rank_are_warned_of() -> None:
    first, other = run_ranks(2, restarted)
    assert not any(other)
    rollouts, one_rollout, own, turns, own_turns = first
    assert "each of the 2 rollouts of this rank has samples on other ranks too: rollout ids that start" in rollouts[0]
    assert "each of the 3 turns of this rank" in turns[0]
    assert not [*one_rollout, *own, *own_turns]


def test_weights_that_are_handed_out_are_a_copy() -> None:
    plan = planned()
    plan[0].weights.numpy()[:] = 9
    plan[0].weights.mul_(3)
    assert torch.equal(plan[0].weights, planned()[0].weights)
    assert torch.equal(plan[0].loss(losses_of(DEALT[0])), planned()[0].loss(losses_of(DEALT[0])))


@pytest.mark.parametrize("no_unit", [-1, ""])
def test_a_fully_masked_step_whose_tokens_are_in_no_unit_trains_nothing(no_unit: int | str) -> None:
    """The check of ids runs on the first rank alone: an error there would leave the others waiting."""
    plan = plan_step([Samples([[0, 0], [0]], ids={"turn": [[no_unit] * 2, [no_unit]]})], "turn_mean", dp_group=None)
    losses = torch.ones(3, requires_grad=True)
    plan[0].loss(losses).backward()
    assert losses.grad is not None
    assert (losses.grad.tolist(), plan.finish()["pg_loss"].item()) == ([0.0] * 3, 0.0)


def test_without_an_active_token_a_metric_is_not_a_number() -> None:
    plan = plan_step([Samples([[0, 0]])], "token_mean", dp_group=None)
    metrics = {kind: Metric(torch.ones(2), "tokens", kind=kind) for kind in ("min", "max", "variance", "ess")}
    plan[0].loss(torch.ones(2, requires_grad=True), metrics)
    report = plan.finish()
    assert all(math.isnan(report[kind]) for kind in metrics)
    assert float(report["pg_loss"]) == 0


def test_what_is_not_finite_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_step([Samples([[1, 0], [1, 1]])], "token_mean", dp_group=None)
    bad = torch.tensor([1, math.nan, 2, math.inf], requires_grad=True)
    plan[0].loss({"pg": torch.ones(4, requires_grad=True), "kl": bad}, {"gap": bad.detach()})
    assert "the term 'kl' is inf at token 1 of sample 1 of a micro-batch" in caplog.text


def test_what_is_checked_at_the_end_of_a_step_is_of_that_step_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What a device holds, whose values and counts of wrong tokens are read at the end."""
    plan = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)

    def train_on(*values: float) -> None:
        losses = torch.tensor(values, requires_grad=True)
        plan[0].loss(plan[0].summed((losses * plan[0].weights).sum(), losses))

    train_on(1.0, math.nan)
    plan.record.wrong_tokens.append(torch.tensor(1))
    plan.reset()
    train_on(1.0, 2.0)
    plan.finish()
    assert not caplog.records
    plan.reset()
    train_on(1.0, math.nan)
    for _ in range(2):
        plan.finish()
        assert [record.message.partition(" of a micro-batch")[0] for record in caplog.records] == [
            "rank 0: per_token_loss is nan at token 1 of sample 0"
        ]


def test_losses_on_a_device_are_not_waited_for() -> None:
    """The meta device has no values. What evaluation moves there serves in training, where its changes are counted."""
    plan = plan_step([Samples([[1, 0], [1, 1]])], "token_mean", dp_group=None)
    losses = torch.ones(4, device="meta", requires_grad=True)
    with torch.inference_mode():
        plan[0].loss(losses.detach())
    plan[0].loss({"pg": losses, "kl": Term(losses * 2, coef=0.1)}, {"same": losses.detach()}).backward()
    assert losses.grad is not None
    assert losses.grad.is_meta


# --- terms


def test_a_metric_by_a_mask_is_a_mean_over_the_units_that_the_mask_has() -> None:
    """Where the loss masks leave no unit out, and the metric's own mask does."""
    samples = Samples([[1, 1], [1]], prompt_ids=["a", "b"], term_masks={"own": [[1, 0], [0]]})
    plan = plan_step([samples], "sample_mean", term_masks=["own"], dp_group=None)
    ones = torch.ones(3, requires_grad=True)
    plan[0].loss(ones, {over: Metric(ones, over, mask="own") for over in ("samples", "prompts", "tokens")})
    assert {float(value) for value in plan.finish().values()} == {1.0}


def test_micro_batches_with_other_functions_of_one_name_for_a_term_are_refused() -> None:
    """The mode that a `Term` brings is compared at the end of the step, as those of `plan_step` are before it."""
    for factors in ((0.5, 0.5), (0.5, 1 / 3)):
        plan = plan_step([Samples([[1, 1]]) for _ in "ab"], "token_mean", dp_group=None)
        for microbatch, factor in zip(plan, factors, strict=True):
            losses = torch.ones(2, requires_grad=True)
            microbatch.loss({"pg": losses, "kl": Term(losses, partial(scaled, factor=factor))})
        if factors[0] == factors[1]:
            assert float(plan.finish()["kl"]) == 0.5
        else:
            with pytest.raises(ValueError, match=r"'kl'.*a name must have one kind, mask, aggregation and coefficient"):
                plan.finish()


def test_a_coefficient_that_differs_between_micro_batches_is_refused() -> None:
    """As of a controller of the KL that adapts on each rank, or in each micro-batch, by itself."""
    for coefs in ((0.1, 0.1), (0.1, 0.2), (0, 0.2)):
        plan = plan_step([Samples([[1, 1]]) for _ in "ab"], "token_mean", dp_group=None)
        for microbatch, coef in zip(plan, coefs, strict=True):
            losses = torch.ones(2, requires_grad=True)
            microbatch.loss({"pg": losses, "kl": Term(losses, coef=coef)})
        if coefs[0] == coefs[1]:
            assert float(plan.finish()["kl"]) == 1
        else:
            with pytest.raises(ValueError, match=r"'kl'.*coef 0.2.*a name must have one .* and coefficient in a step"):
                plan.finish()


def test_a_step_has_one_form() -> None:
    plan = plan_step([Samples([[1, 1]]) for _ in "ab"], "token_mean", dp_group=None)
    losses = torch.ones(2, requires_grad=True)
    plan[0].loss(losses)
    with pytest.raises(
        ValueError, match=r"for form='2-tuple' in a step whose .* for gradients summed over ranks: .*all"
    ):
        plan[1].loss(losses, form="2-tuple")
    plan[1].loss(losses)
    plan.reset()
    plan[0].loss(losses, form="2-tuple")


def test_a_loss_of_terms_by_hand() -> None:
    masks, correct = [torch.tensor([1.0, 1, 0]), torch.tensor([1.0])], [torch.tensor([0.0, 1, 0]), torch.tensor([0.0])]
    samples = [Samples(masks, rollout_ids=["a", "b"], term_masks={"correct": correct})]
    losses = torch.tensor([1.0, 2.0, math.nan, 6.0], requires_grad=True)
    terms: dict[str, Any] = {
        "pg": losses, "kl": Term(3 * losses, coef=0.1), "nll": Term(5 * losses, coef=2.0, mask="correct"),
        "same": Term(losses, coef=0), "seen": Term(losses.detach() * 2, "token_mean", coef=0),
    }  # fmt: skip
    plan = plan_step(samples, "sample_mean", terms={"kl": "token_mean"}, term_masks=["correct"], dp_group=None)
    loss, _, report = plan[0].loss(terms, form="3-tuple")
    plan.finish([report])
    # 1/2 (1.5 + 6); 3 * 9 / 3; 5 * (1/2) (2 + 0)
    expected = {"loss": 3.75 + 0.9 + 10, "pg": 3.75, "kl": 9, "nll": 5, "same": 3.75, "seen": 6}
    assert {name: float(value) for name, value in report.items()} == pytest.approx(expected)
    loss.backward()
    assert losses.grad.tolist() == pytest.approx([0.25 + 0.1, 0.25 + 0.1 + 5, 0, 0.5 + 0.1])
    assert len({id(reducer) for reducer in plan[0]._reducers.values()}) == 3  # by sample, by token, by the mask


def test_terms_and_metrics_count_the_units_and_masks_that_they_say() -> None:
    """Terms that differ in nothing but their counting do not share weights; a metric's own mask has its own mean."""
    own = [sample.mask * (torch.arange(len(sample.mask)) % 2 == 0) for sample in STEP]
    samples = [described(chosen, term_masks={"own": [own[i] for i in chosen]}) for chosen in DEALT]
    ours = Sum(of=lambda samples: samples.mask_sums)
    declared = Mode(name="declared", function=lambda step: 1 / step.sum("all"), sums={"all": ours})
    terms: Any = {"declared": declared}
    plan = plan_step(samples, "sample_mean", units="active", terms=terms, term_masks=["own"], dp_group=None)
    for microbatch, chosen in zip(plan, DEALT, strict=True):
        losses = losses_of(chosen)
        by_name: dict[str, Any] = {
            "pg": losses, "all": Term(losses, "sample_mean", units="all"), "as policy": Term(losses, "sample_mean"),
            "peer": Term(losses, "openrlhf:token_level_loss=false"), "declared": Term(losses, mask="own"),
            "declared too": Term(losses, declared, mask="own"),
        }  # fmt: skip
        microbatch.loss(by_name, {"masked": Metric(losses.detach(), mask="own")})
    report = {name: float(value) for name, value in plan.finish().items()}
    of_own = [replace(sample, mask=mask) for sample, mask in zip(STEP, own, strict=True)]
    mean = float(oracle.step_loss("token_mean", of_own))
    expected = {
        name: float(oracle.step_loss("sample_mean", step, None, units))
        for name, step, units in (
            ("pg", STEP, "active"), ("all", STEP, "all"), ("as policy", STEP, "active"), ("masked", of_own, "active"),
            ("peer", STEP, "active"),
        )
    } | {"declared": mean, "declared too": mean}  # fmt: skip
    assert expected["pg"] != expected["all"]
    assert report == pytest.approx(expected | {"loss": sum(report[name] for name in by_name)}, rel=1e-5)


# --- fillers, cuts, tokens


@pytest.mark.filterwarnings("ignore:one prompt has tokens of all")
@pytest.mark.parametrize("filler", [Samples([]), Samples([], layout=ZigzagTHD([0, 4], filler_slots=1), prompt_ids=[])])
def test_empty_micro_batches_and_steps(filler: Samples) -> None:
    masks = {"own": [STEP[i].mask for i in (0, 1)]}
    plan = plan_step([described([0, 1], term_masks=masks), filler], "prompt_mean", term_masks=["own"], dp_group=None)
    losses = torch.ones(filler.total_tokens, requires_grad=True) * math.nan
    plan[1].loss({"pg": losses, "own": Term(losses, mask="own")}).backward()
    alone = plan_step([described([0, 1])], "prompt_mean", dp_group=None)
    assert plan.summary == alone.summary
    assert torch.equal(plan[0].weights, alone[0].weights)
    with pytest.raises(BadBatchError, match="a step without one active token"):
        plan_step([filler], "token_mean", empty_step="error", dp_group=None)


def test_as_many_tokens_as_megatron_counts() -> None:
    totals = StepTotals.of([[1]])
    for per_token_loss, number in ((True, 2**31 - 1), (False, 2**31)):
        check_active_tokens(
            replace(totals, step_active_tokens=number), per_token_loss=per_token_loss, empty_step="warn"
        )
    with pytest.raises(BadBatchError, match="Megatron sums token counts as int32"):
        check_active_tokens(replace(totals, step_active_tokens=2**31), per_token_loss=True, empty_step="warn")


PACKED = Samples([torch.ones(4), torch.ones(6)], layout=ZigzagTHD([0, 8, 16], [4, 6]), tokens=torch.arange(16))
OF_ROWS = Samples([torch.ones(4)] * 2, layout=ZigzagBSHD(2, 4), tokens=torch.arange(8).view(2, 4))


def test_a_step_without_samples_has_counts() -> None:
    plan = plan_step([Samples([], prompt_ids=[])], "token_mean", dp_group=None)
    assert "| 0 rollouts, 0 of 0 tokens active" in plan.describe()
    plan = plan_step([Samples([[0, 0]], ids={"turn": [[-1, -1]]})], "token_mean", dp_group=None)
    assert "| 1 rollouts, 0 turns (0.0 each), 0 of 2 tokens active" in plan.describe()


def test_evaluation_before_training_changes_nothing() -> None:
    """What a plan keeps serves both; a filler, too. An inference tensor could not be trained with."""
    layout = ZigzagTHD([0, 4], filler_slots=1)
    plan = plan_step([Samples([[1, 1]]), Samples([], layout=layout)], "token_mean", dp_group=None)
    for _ in range(2):
        with torch.inference_mode():
            parts = [plan[0].loss(torch.ones(2)), plan[1].loss(torch.ones(4))]
            assert float(plan[0].loss(torch.ones(2))) == 1  # without a graph that could be hooked
        assert [float(part) for part in parts] == [1, 0]
    losses = [torch.ones(2, requires_grad=True), torch.ones(4, requires_grad=True)]
    for microbatch, values in zip(plan, losses, strict=True):
        loss, count, report = microbatch.loss(values, form="3-tuple")
        loss.backward()
        count += 1
        report["pg_loss"] += 1
    assert [values.grad.tolist() for values in losses if values.grad is not None] == [[1, 1], [0] * 4]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_loss(reentrant: bool) -> None:
    plan, values = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None), torch.ones(2, requires_grad=True)
    checkpoint(plan[0].loss, values, use_reentrant=reentrant).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.5]
    plan.finish()


def test_local_cuts_what_has_a_value_a_token() -> None:
    whole, batch = torch.arange(16), torch.arange(8).view(2, 4)
    both, plan = torch.stack([whole, -whole], 1), plan_step([PACKED, OF_ROWS], "token_mean", dp_group=None)
    for cp_rank, held in enumerate(([0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13])):
        packed, rows = placed(plan, cp_rank, 2)
        columns = batch[:, [[0, 3], [1, 2]][cp_rank]]  # row by row
        for microbatch, values, expected in (
            (packed, whole.bool(), whole.bool()[held]), (packed, whole[None], whole[held][None]),
            (packed, both, both[held]), (packed, both[None], both[held][None]), (rows, batch, columns),
            (rows, batch.flatten(), columns.flatten()),
        ):  # fmt: skip
            assert torch.equal(microbatch.local(values), expected)
        with pytest.raises(ValueError, match=r"shape \(4, 2\)"):  # which would be cut as a whole
            rows.local(batch.view(4, 2))


def test_a_mask_and_a_buffer_have_the_shape_of_losses() -> None:
    """Also where a plan was first used in evaluation: an inference tensor could not be trained with."""
    holed = Samples([[1, 0, 1, 1], [0.5, 1, 0]], layout=ZigzagBSHD(2, 4, [4, 3]))
    assert holed.in_buffer([[1, 2, 3, 4], 7]).tolist() == [[1, 2, 3, 4], [7, 7, 7, 0]]
    assert holed.in_buffer(torch.tensor([5, 7])).tolist() == [[5, 5, 5, 5], [7, 7, 7, 0]]
    plan = plan_step([holed, Samples([[1, 0], [0.5]]), Samples([])], "token_sum", dp_group=None)
    rows, flat, empty = placed(plan, 1, 2)[0], plan[1], plan[2]
    with torch.inference_mode():
        assert (rows.mask.tolist(), flat.mask.tolist(), empty.mask.tolist()) == ([[0, 1], [1, 0]], [1, 0, 0.5], [])
    losses = torch.arange(1.0, 5).view(2, 2).requires_grad_()
    assert rows.local(holed.in_buffer(torch.tensor([5, 7]))).tolist() == [[5, 5], [7, 7]]
    (losses * rows.mask).sum().backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0, 1], [1, 0]]
    plan.record.trainer = replace(plan.record.trainer, device=torch.device("meta"))
    assert placed(plan, 0, 2)[0].mask.device.type == "meta"


@pytest.mark.parametrize("coef", [Fraction(1, 4), np.float32(0.25), 10**-1 * Fraction(5, 2)])
def test_a_coefficient_is_any_number(coef: Any) -> None:
    plan, values = plan_step([Samples([[1, 1]])], "token_sum", dp_group=None), torch.ones(2, requires_grad=True)
    plan[0].loss(Term(values, "token_sum", coef=coef, divisor=Fraction(1, 2))).backward()  # type: ignore[arg-type]
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.5]


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


def scaled(step: Any, factor: float = 1.0) -> Any:
    return factor / step.tokens("step")


def summed(by_tokens: bool) -> Mode:
    """A mode over a declared sum; the functions of both sums have one name."""

    def of(samples: Samples) -> Any:
        return samples.mask_sums

    def of_tokens(samples: Samples) -> Any:
        return samples.active_tokens

    of_tokens.__name__, of_tokens.__qualname__ = of.__name__, of.__qualname__
    return Mode(name="mine", function=scaled, sums={"n": Sum(of=of_tokens if by_tokens else of)})


#: The modes of ranks 0 and 1, and what both are told; "" for modes that are alike.
MODES_OF_RANKS: dict[str, tuple[Any, Any, str]] = {
    "misspelt": ("token_mean", "tokn_mean", "rank 1: ValueError: .*there is no such mode. Did you mean token_mean"),
    "equal partials": (partial(scaled, factor=0.5), partial(scaled, factor=0.5), ""),
    "other partials": (partial(scaled, factor=0.5), partial(scaled, factor=1 / 3), "all ranks must aggregate alike"),
    "equal sums": (summed(True), summed(True), ""),
    "other sums": (summed(False), summed(True), "all ranks must aggregate alike"),
}


def outcomes_of_modes() -> dict[str, str]:
    start_process_group()
    rank = dist.get_rank()
    mine = described(dealt(STEP, rank, 2, 1)[0])
    return {
        name: outcome_of(
            functools.partial(plan_step, [mine], modes[rank], dp_group=dist.group.WORLD, gradients="summed over ranks")
        )
        for name, modes in MODES_OF_RANKS.items()
    }


def test_modes_that_differ_between_ranks_are_refused_on_all() -> None:
    for outcomes in run_ranks(2, outcomes_of_modes):
        for name, (_, _, expected) in MODES_OF_RANKS.items():
            assert re.search(f"^BadBatchError: .*{expected}" if expected else "^accepted$", outcomes[name]), (
                name,
                outcomes,
            )


def test_a_mode_declared_for_no_term_is_refused() -> None:
    plan = planned(terms={"kll": "sample_mean"})
    for number, microbatch in enumerate(plan):
        losses = losses_of(DEALT[number])
        microbatch.loss({"pg": losses, "kl": Term(losses.detach(), coef=0)})
    with pytest.raises(ValueError, match=r"a mode for the term 'kll', and a loss of \['kl', 'loss', 'pg'\]"):
        plan.finish()


def test_a_mode_declared_beside_a_loss_without_terms_is_refused() -> None:
    plan = planned(terms={"kl": "sample_mean"})
    with torch.no_grad():  # an evaluation may leave terms out
        for number, microbatch in enumerate(plan):
            microbatch.loss(losses_of(DEALT[number]))
    plan.finish()
    for number, microbatch in enumerate(plan):
        microbatch.loss(losses_of(DEALT[number]))
    with pytest.raises(ValueError, match=r"a mode for the term 'kl', and a loss of \['pg_loss'\]"):
        plan.finish()
    of_a_metric = Mode(name="own", function=lambda step: 1.0, sums={"all": Sum(of=lambda samples: samples.mask_sums)})
    plan = planned(terms={"own": of_a_metric})  # declared, so that its sums are counted
    for number, microbatch in enumerate(plan):
        microbatch.loss(losses_of(DEALT[number]))
    plan.finish()


def test_no_graph_outlives_the_loss() -> None:
    plan, losses = planned(), [losses_of(chosen) for chosen in DEALT]
    graphs = [ref(plan[number].loss(losses[number])) for number in (0, 1)]
    assert [graph() for graph in graphs] == [None, None]
    held = ref(plan[0])
    del plan
    assert held() is None  # nor a micro-batch the plan, without the garbage collector


@pytest.mark.parametrize("model", [torch.nn.Linear(1, 1), [torch.nn.Linear(1, 1)], "gpt"])
def test_a_model_that_is_not_megatrons_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"In plain PyTorch leave model= out, pass dp_group= and gradients="):
        plan_step([Samples([[1]])], "token_mean", model=model)
