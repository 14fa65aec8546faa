"""A micro-batch hands Megatron a loss that its scaling undoes: both carriers, the reports, and the cut for a CP rank.

In this process, with Megatron's scaling stated here a second time. Its real schedule, DDP and reduction are in
test_aggregation.py, and what is refused inside the schedule in test_bad_input.py.
"""

import math
from typing import Any

import oracle
import pytest
import torch
from megatron_rl_loss.megatron.carriers import CARRIERS, PER_TOKEN, Carrier
from megatron_rl_loss.megatron.microbatch import Step
from placements import Place, gathered, laid_out, plain, response, thd_unpadded_masks_and_filler
from refusals import Call, Refusal, check_refusal, each_of
from steps import divisor_of, every_counting, ids_of, totals_of
from torch import Tensor

from megatron_rl_loss import Gathered, Samples, StepTotals, ZigzagBSHD, ZigzagTHD
from megatron_rl_loss.megatron import AggregationSettings, Microbatch

LENGTHS = [4, 2, 6, 1]
STEP = [
    oracle.sample([1, 2, 3, 4], [1, 1, 0.5, 1], rollout_id="a", prompt_id=0),
    oracle.sample([5, 6], [1, 1], rollout_id="a", prompt_id=0),
    oracle.sample([-1, 0.5, 2, 7, 1, 3], [1, 0.25, 0, 1, 0, 0], rollout_id="b", prompt_id=1),
    oracle.sample([2], [0], rollout_id="c", prompt_id=1),
]
HALVES = [[0, 2], [1, 3]]
ACTIVE = sum(int((one.mask != 0).sum()) for one in STEP)


def step_with(mode: str = "sample_mean", units: str = "all", **changes: Any) -> Step:
    settings = AggregationSettings.resolve(mode, divisor_of(mode), units)  # type: ignore[arg-type]
    place = {"num_microbatches": 2, "cp_rank": 0, "cp_size": 1, "dp_cp_size": 1}
    return Step(aggregation=settings.aggregation, **{"totals": totals_of(STEP), **place, **changes})


def samples_of(chosen: list[int], layout: Any = None) -> Samples:
    samples = [STEP[i] for i in chosen]
    return Samples([one.mask for one in samples], layout=layout, **ids_of(samples))


def losses_of(chosen: list[int]) -> Tensor:
    return torch.cat([STEP[i].losses for i in chosen]).float().requires_grad_()


# --- the carriers


Handed = list[tuple[Tensor, Tensor]]


def as_megatron_scales(handed: Handed, per_token: bool, num_microbatches: int, ranks: int) -> Tensor:
    """What `forward_step_calc_loss`, DDP and `finalize_model_grads` make of (loss, num_tokens), over all ranks."""
    if per_token:
        return sum(loss for loss, _ in handed) / sum(int(count) for _, count in handed)
    return sum(loss / count for loss, count in handed) / num_microbatches / ranks


def run(place: Place, cp_size: int, carrier: Carrier, mode: str, units: str) -> tuple[Tensor, list[Tensor], list[Any]]:
    """Two data-parallel ranks of two micro-batches each, one of them empty, times CP ranks: what Megatron makes of the
    losses, the gradient of every token, and the reports."""
    totals = totals_of(STEP)
    handed, reports, leaves = [], [], []
    for microbatches in ([[2, 0], []], [[3], [1]]):
        for cp_rank in range(cp_size):
            where = {"cp_rank": cp_rank, "cp_size": cp_size, "dp_cp_size": 2 * cp_size, "carrier": carrier}
            step = step_with(mode, units, totals=totals, **where)
            for chosen in microbatches:
                placed = laid_out(place, tuple(LENGTHS[i] for i in chosen), cp_size)
                held = [None if at is None else (chosen[at[0]], at[1]) for at in placed.held[cp_rank]]
                losses = torch.tensor([math.nan if at is None else float(STEP[at[0]].losses[at[1]]) for at in held])
                losses.requires_grad_()
                microbatch = Microbatch(None, samples_of(chosen, placed.layout), step)
                loss, count, report = microbatch.loss(losses, {"twice": 2 * losses})
                assert count.dtype == torch.int32
                assert (count.shape, loss.shape) == ((), ())
                handed.append((loss, count))
                reports.append(report)
                leaves.append((held, losses))
    total = as_megatron_scales(handed, carrier.per_token, 2, 2 * cp_size)
    total.backward()
    gradient = [torch.zeros(len(one.mask), dtype=torch.float64) for one in STEP]
    for held, losses in leaves:
        for at, slope in zip(held, losses.grad.tolist(), strict=True):
            if at is not None:
                gradient[at[0]][at[1]] += slope
    return total, gradient, reports


@pytest.mark.parametrize(
    ("place", "cp_size"), [(plain, 1), (thd_unpadded_masks_and_filler, 2), (gathered, 2), (response, 4)]
)
@pytest.mark.parametrize("carrier", CARRIERS, ids=["mean", "per token"])
def test_after_megatrons_scaling_the_loss_is_the_step_loss(place: Place, cp_size: int, carrier: Carrier) -> None:
    for mode, units in oracle.COUNTINGS:
        total, gradient, reports = run(place, cp_size, carrier, mode, units)
        divisor = divisor_of(mode)
        right = float(oracle.step_loss(mode, STEP, divisor, units))
        rounding = oracle.sum_error(oracle.num_tokens(STEP)) * oracle.step_scale(mode, STEP, divisor, units)
        assert float(total.detach()) == pytest.approx(right, abs=rounding)
        expected = oracle.step_gradient(mode, STEP, divisor, units)
        torch.testing.assert_close(gradient, expected, rtol=oracle.EXACT, atol=0)
        # As `train_step` logs: numerators and denominators are summed over micro-batches and ranks, then divided.
        for name, of_mode, factor in (("pg_loss", mode, 1), ("twice", "sample_mean", 2)):
            pairs = torch.stack([report[name] for report in reports])
            assert pairs.dtype == torch.float32
            numerator, denominator = pairs.double().sum(0).tolist()
            right = factor * float(oracle.step_loss(of_mode, STEP, divisor, units))
            rounding = oracle.sum_error(oracle.num_tokens(STEP)) * oracle.step_scale(of_mode, STEP, divisor, units)
            assert numerator / denominator == pytest.approx(right, abs=factor * rounding)


def test_what_a_carrier_multiplies_by_is_what_megatron_divides_by() -> None:
    assert [carrier.per_token for carrier in CARRIERS] == [False, True]
    for carrier in CARRIERS:
        divisors = (*carrier.schedule_divisors, *carrier.ddp_divisors, *carrier.finalize_divisors)
        assert sorted(carrier.factors) == sorted(divisors)


def test_per_token_tokens_are_counted_as_they_are() -> None:
    """So that what else Megatron divides by the count keeps its scale; a token that all CP ranks hold counts once."""
    for layout, expected in (
        (ZigzagTHD([0, 4, 12], [4, 6]), [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
        (Gathered([0, 4, 10]), [list(range(10)), []]),
    ):
        samples = samples_of([0, 2], layout)
        for cp_rank, positions in enumerate(expected):
            step = step_with(cp_rank=cp_rank, cp_size=2, dp_cp_size=2, carrier=PER_TOKEN)
            microbatch = Microbatch(None, samples, step)
            losses = torch.ones(len(samples.local(cp_rank, 2)), requires_grad=True)
            _, count, _ = microbatch.loss(losses)
            assert int(count) == int((samples.local(0, 1).mask[positions] != 0).sum()), (layout, cp_rank)


def test_mean_counts_one_whatever_is_masked() -> None:
    for chosen in ([0, 1], [3], []):
        step = step_with(num_microbatches=3, dp_cp_size=4)
        microbatch = Microbatch(None, samples_of(chosen), step)
        losses = losses_of(chosen) if chosen else torch.zeros(0, requires_grad=True)
        loss, count, report = microbatch.loss(losses)
        assert int(count) == 1
        share, part = report["pg_loss"].tolist()
        assert float(loss.detach()) == pytest.approx(12 * share, rel=2 * oracle.ROUNDING)
        assert part == pytest.approx(1 / 12, rel=oracle.ROUNDING)


def test_a_share_of_ones_own_is_carried_alike() -> None:
    microbatch = Microbatch(None, samples_of([0, 1]), step_with("token_mean", num_microbatches=2, dp_cp_size=3))
    losses = losses_of([0, 1])
    share = microbatch.pg_loss(losses) + 0.5 * microbatch.sample_mean(losses.square())
    loss, count, report = microbatch.carry(share, {"a": share, "b": microbatch.token_mean(losses)})
    assert float(loss.detach()) == pytest.approx(6 * float(share.detach()), rel=oracle.ROUNDING)
    assert int(count) == 1
    assert list(report) == ["a", "b"]
    assert not any(pair.requires_grad for pair in report.values())
    assert microbatch.carry(share, {"b": share, "a": share})[2].keys() == {"a", "b"}  # any order
    bare = Microbatch(None, samples_of([0]), step_with())
    assert bare.carry(bare.pg_loss(losses_of([0])), {})[2] == {}


# --- reducers for the loss and for metrics


@every_counting
def test_reducers_of_a_micro_batch(mode: str, units: str) -> None:
    """`pg_loss` by the asked mode; metrics by sample and token mean whatever it is, with the asked unit counting."""
    step = step_with(mode, units, num_microbatches=2)
    sums = {"pg_loss": 0.0, "sample_mean": 0.0, "token_mean": 0.0}
    for chosen in HALVES:
        microbatch = Microbatch("a batch", samples_of(chosen), step)
        assert (microbatch.data, microbatch.totals) == ("a batch", step.totals)
        for name in sums:
            sums[name] += float(getattr(microbatch, name)(losses_of(chosen)).detach())
        assert (microbatch.pg_loss is microbatch.sample_mean) == (mode == "sample_mean")
    for name, value in sums.items():
        of_mode = mode if name == "pg_loss" else name
        divisor = divisor_of(of_mode)
        error = oracle.sum_error(13) * oracle.step_scale(of_mode, STEP, divisor, units)
        assert value == pytest.approx(float(oracle.step_loss(of_mode, STEP, divisor, units)), abs=error), name


# --- the cut for a CP rank


def test_local_cuts_what_has_a_value_a_token() -> None:
    samples = samples_of([0, 2], ZigzagTHD([0, 8, 16], [4, 6]))
    whole = torch.arange(16)
    for cp_rank, held in enumerate([[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]):
        microbatch = Microbatch(None, samples, step_with(cp_rank=cp_rank, cp_size=2, dp_cp_size=2))
        assert microbatch.local(whole).tolist() == held
        assert microbatch.local(whole[None]).tolist() == [held]
        assert microbatch.local(torch.stack([whole, -whole], 1)).tolist() == [[p, -p] for p in held]
        assert microbatch.local(torch.stack([whole, -whole], 1)[None]).shape == (1, 8, 2)


def test_local_cuts_rows_row_by_row() -> None:
    rows = Samples([torch.ones(4)] * 2, layout=ZigzagBSHD(2, 4))
    batch = torch.arange(8).view(2, 4)
    for cp_rank, columns in enumerate([[0, 3], [1, 2]]):
        microbatch = Microbatch(None, rows, step_with(cp_rank=cp_rank, cp_size=2, dp_cp_size=2))
        assert microbatch.local(batch).tolist() == batch[:, columns].tolist()
        assert microbatch.local(batch.flatten()).tolist() == batch[:, columns].flatten().tolist()


def test_local_without_context_parallelism_is_all() -> None:
    microbatch = Microbatch(None, samples_of([0, 1]), step_with())
    assert microbatch.local(torch.arange(6)).tolist() == list(range(6))


# --- refusals that show here alone, each beside its nearest legal neighbour; the others: test_bad_input.py


def loss_with(losses: Tensor | None = None, **changes: Any) -> Call:
    given = losses_of([0]) if losses is None else losses
    return lambda: Microbatch(None, samples_of([0]), step_with(**changes)).loss(given)


def cut(tensor: Tensor) -> Call:
    samples = samples_of([0], ZigzagTHD([0, 4]))
    return lambda: Microbatch(None, samples, step_with(cp_rank=1, cp_size=2, dp_cp_size=2)).local(tensor)


KNOWN = totals_of(STEP)
REFUSALS: dict[str, Refusal] = {
    "per-token loss without its count": (
        loss_with(carrier=PER_TOKEN, totals=StepTotals(rollouts=KNOWN.rollouts)),
        ValueError,
        "totals without step_active_tokens: per-token loss needs it",
        loss_with(carrier=PER_TOKEN, totals=StepTotals(rollouts=KNOWN.rollouts, step_active_tokens=9)),
    ),
    "a cut of another number of tokens": (cut(torch.ones(5)), ValueError, r"shape \(5,\)", cut(torch.ones(4))),
    "a cut of tokens in the second dimension": (
        cut(torch.ones(2, 4)),
        ValueError,
        r"shape \(2, 4\)",
        cut(torch.ones(1, 4)),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)


def test_without_gradients_no_graph_is_needed() -> None:
    """Megatron evaluates under no_grad."""
    with torch.no_grad():
        loss, _, _ = loss_with(losses=torch.ones(4))()
    assert not loss.requires_grad


def test_names_of_reports_are_those_of_a_step() -> None:
    for names in (["kl"], ["entropy"], []):
        step = step_with()
        for _ in range(2):
            Microbatch(None, samples_of([0]), step).loss(losses_of([0]), dict.fromkeys(names, torch.ones(4)))
