"""The reducers: the shares of all micro-batches and context-parallel (CP) ranks add up to the step loss.

`steps.run_step` does what a launch does, in one process; `oracle` says what must come out.
Not exercised here: data-parallel groups (test_totals.py) and Megatron's own scaling.
"""

import doctest
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import MODES, NAN, WORKED, WORKED_DIVISOR, WORKED_VALUES
from placements import Place, Placement, every_layout, response, thd
from refusals import Call, Refusal, check_refusal, each_of
from steps import (
    Outcome,
    Step,
    assert_equals_oracle,
    divisor_of,
    every_counting,
    oracle_gradient,
    quick,
    run_step,
    steps,
    totals_of,
    value_error,
)
from torch import Tensor

from megatron_rl_loss import (
    Gathered,
    Layout,
    StepTotals,
    UnitCounts,
    ZigzagBSHD,
    ZigzagResponse,
    ZigzagTHD,
    make_pg_loss_reducer,
)
from megatron_rl_loss.reduction import sums as reduction

INF = float("inf")


def test_docstring_examples() -> None:
    result = doctest.testmod(reduction)
    assert result.attempted > 0
    assert result.failed == 0


# --- the worked batch


def subsets(n: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, n + 1):
        yield from itertools.combinations(range(n), size)


def set_partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every way of cutting the items into micro-batches."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for others in itertools.chain([()], *(itertools.combinations(rest, size) for size in range(1, len(rest) + 1))):
        for partition in set_partitions(tuple(item for item in rest if item not in others)):
            yield [(first, *others), *partition]


PARTITIONS = list(set_partitions((0, 1, 2, 3)))


def test_there_are_15_ways_to_cut_4_samples() -> None:
    assert len({frozenset(partition) for partition in PARTITIONS}) == 15
    assert all(sorted(itertools.chain(*partition)) == [0, 1, 2, 3] for partition in PARTITIONS)


@every_counting
def test_the_oracle_gives_the_worked_values(mode: str, units: str) -> None:
    value = oracle.step_loss(mode, [one.poisoned() for one in WORKED], divisor_of(mode), units)
    assert float(value) == pytest.approx(WORKED_VALUES[mode, units], rel=1e-14)  # float64


@every_layout
@every_counting
def test_worked_batch(mode: str, units: str, place: Place, cp_size: int) -> None:
    step = [one.poisoned() for one in WORKED]
    totals = totals_of(step)
    # A micro-batch's share depends on itself and the totals only: reduce each of the 15 subsets once.
    parts = {
        subset: run_step(step, [subset], mode, units, place=place, cp_size=cp_size, totals=totals)
        for subset in subsets(4)
    }
    for partition in PARTITIONS:
        value = sum(parts[microbatch].value for microbatch in partition)
        assert value == pytest.approx(WORKED_VALUES[mode, units], abs=value_error(step, mode, units)), partition
    slopes = oracle_gradient(step, mode, units)
    for subset, part in parts.items():
        member = torch.cat([torch.full_like(one.losses, i in subset) for i, one in enumerate(step)])
        torch.testing.assert_close(part.gradient, slopes * member, rtol=oracle.EXACT, atol=0)


@every_layout
def test_token_sum_without_a_divisor_is_the_plain_sum(place: Place, cp_size: int) -> None:
    """Whatever the totals hold, none included: it counts nothing."""
    step = [replace(one.poisoned(), rollout_id=None) for one in WORKED]
    outcome = run_step(step, [[2, 0], [1, 3]], "token_sum", place=place, cp_size=cp_size, totals=StepTotals())
    assert_equals_oracle(outcome, WORKED, "token_sum")  # run_step gives it L
    for divisor in (None, 1):
        reducer = make_pg_loss_reducer("token_sum", [one.mask for one in step], totals=StepTotals(), divisor=divisor)
        assert float(reducer(torch.cat([one.losses for one in step]))) == 27.5


# --- random steps


@pytest.mark.slow
@every_layout
@quick
@given(step=steps(), units=st.sampled_from(["all", "active"]))
def test_random_steps(step: Step, units: str, place: Place, cp_size: int) -> None:
    totals = totals_of(step.samples)
    for mode in MODES:
        outcome = run_step(step.samples, step.microbatches, mode, units, place=place, cp_size=cp_size, totals=totals)
        assert_equals_oracle(outcome, step.samples, mode, units)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=["bf16", "fp16"])
@quick
@given(data=st.data())
def test_half_precision_losses_are_summed_in_float32(
    mode: str, dtype: torch.dtype, bits: int, data: st.DataObject
) -> None:
    step = data.draw(steps(dtype))
    outcome = run_step(step.samples, step.microbatches, mode, place=thd, cp_size=2, dtype=dtype)
    # The gradient of a half-precision loss is itself rounded to half precision, whose smallest number is 2^-24 in fp16.
    assert_equals_oracle(outcome, step.samples, mode, rtol=oracle.EXACT + 2.0**-bits, atol=2.0**-25)


def test_float64_losses_give_a_float32_share() -> None:
    step = [one.poisoned() for one in WORKED]
    assert_equals_oracle(run_step(step, [[0, 1, 2, 3]], "sample_mean", dtype=torch.float64), step, "sample_mean")


# --- many tokens

MANY = 2**22


def many_losses(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "constant":
        return torch.full((MANY,), 0.1)
    if kind == "0/1":
        return (torch.rand(MANY, generator=generator) < 0.3).float()
    return torch.randn(MANY, generator=generator) + 1


@pytest.mark.parametrize("kind", ["constant", "0/1", "random"])
def test_four_million_tokens_keep_their_precision(kind: str) -> None:
    """A float32 sum from the first token to the last is off by 1e-3 there, and is what some BLAS libraries do."""
    mask = torch.rand(MANY, generator=torch.Generator().manual_seed(2)) < 0.9
    losses = many_losses(kind)
    reducer = make_pg_loss_reducer("token_mean", [mask], totals=StepTotals.from_loss_masks([mask]))
    expected = float(losses.double()[mask].mean())
    loss, sums = reducer.with_metrics(losses, [3 * losses, losses.view(1, -1)])
    for value in (reducer(losses), loss, sums[0] / 3, sums[1]):
        assert float(value) == pytest.approx(expected, rel=1e-6)  # pairwise, 22 additions deep: 22 + 4 roundings
    other = make_pg_loss_reducer("sample_mean", [mask], totals=StepTotals.from_loss_masks([mask]))
    assert float(reducer.with_metrics(losses, [losses], other)[1][0]) == pytest.approx(expected, rel=1e-6)


def test_a_sum_from_first_to_last_would_be_seen() -> None:
    """Negative control: the running float32 sum of the constant losses."""
    losses = many_losses("constant")
    running = float(losses.numpy().cumsum(dtype="float32")[-1]) / MANY
    assert abs(running / float(losses.double().mean()) - 1) > 1e-4


def test_bf16_masks_are_counted_in_full() -> None:
    # In bf16, a running sum of ones stops at 256.
    masks = [torch.ones(40_000, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)]
    totals = StepTotals.from_loss_masks(masks)
    assert totals.step_tokens == 41_000
    share = make_pg_loss_reducer("token_mean", masks, totals=totals)(torch.ones(41_000, dtype=torch.bfloat16))
    assert float(share) == pytest.approx(1, rel=1e-6)


# --- sums of losses and metrics, around the edges of the blocks they are added up in

SIZES = (0, 1, 31, 32, 33, 5000, 2**16 - 1, 2**16, 2**16 + 1, 140_000, 2**19 - 1, 2**19, 2**19 + 1)


@pytest.fixture(params=["looking", "without looking"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the host sums are looked at for NaN; on a device, or compiled, nothing is."""
    if request.param == "without looking":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return str(request.param)


def with_weights(weights: Tensor) -> reduction.WeightedSum:
    mask = torch.ones(len(weights), dtype=torch.bool)
    return make_pg_loss_reducer(lambda inputs: [weights], [mask], totals=StepTotals())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_tokens", SIZES)
def test_sums_of_losses_and_metrics(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    losses, *metrics = (torch.randn(num_tokens, generator=generator) for _ in range(4))
    losses.requires_grad_()
    weights, others = (torch.rand(num_tokens, generator=generator) for _ in range(2))
    weights[::3] = others[::5] = 0
    reducer, other = with_weights(weights), with_weights(others)
    for metric_sum, of_metrics in ((None, weights), (other, others)):
        share, sums = reducer.with_metrics(losses, metrics, metric_sum)
        for value, row, weight in zip([share, *sums], [losses, *metrics], [weights, *[of_metrics] * 3], strict=True):
            assert value.dtype == torch.float32
            terms = row.detach().double() * weight.double()
            # Pairwise sums: an addition a doubling, and some terms at a time at the bottom.
            error = 32 * oracle.ROUNDING * float(terms.abs().sum())
            assert float(value.detach()) == pytest.approx(float(terms.sum()), rel=0, abs=error)
        (gradient,) = torch.autograd.grad(share, losses)
        assert torch.equal(gradient, weights)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize(
    ("at", "num_tokens"),
    [*((at, 140_000) for at in (0, 32, 2**16 - 1, 2**16, 139_999)), (7, 2**19), (2**19, 2**19 + 1)],
)
def test_what_does_not_count_is_ignored_and_what_counts_comes_through(value: float, at: int, num_tokens: int) -> None:
    weights = torch.ones(num_tokens)
    row, clean = torch.ones(num_tokens), torch.full((num_tokens,), 2.0)
    row[at] = value
    for rows in ((row, clean), (clean, row)):
        share, (metric,) = with_weights(weights).with_metrics(rows[0], [rows[1]])
        expected = [2.0 * num_tokens if one is clean else value for one in rows]
        assert [float(share), float(metric)] == pytest.approx(expected, nan_ok=True)
    weights[at] = 0
    for rows in ((row, clean), (clean, row)):
        share, (metric,) = with_weights(weights).with_metrics(rows[0], [rows[1]])
        kept = num_tokens - 1.0
        assert [float(share), float(metric)] == [2 * kept if one is clean else kept for one in rows]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
def test_losses_and_metrics_of_several_kinds(mode: str, dtype: torch.dtype) -> None:
    """Strided, two-dimensional, with a graph of their own; against the float64 oracle."""
    lengths, generator = [5, 3, 4], torch.Generator().manual_seed(0)
    masks = [(torch.rand(n, generator=generator) < 0.7).int() for n in lengths]
    rows = torch.randn(12, 3, generator=generator).to(dtype)
    totals = StepTotals.from_loss_masks(masks)
    reducer = make_pg_loss_reducer(mode, masks, totals=totals)
    losses = rows[:, 0].clone().requires_grad_()
    metrics = [rows[:, 1], rows[:, 2].contiguous().view(1, 12), rows[:, 1].clone().requires_grad_()]
    total, found = reducer.with_metrics(losses, metrics, reducer)
    for value, values in zip([total, *found], [losses, *metrics], strict=True):
        parts = values.detach().double().reshape(-1).split(lengths)
        samples = [oracle.sample(loss.tolist(), mask.tolist()) for loss, mask in zip(parts, masks, strict=True)]
        error = oracle.sum_error(12) * oracle.step_scale(mode, samples)
        assert float(value.detach()) == pytest.approx(float(oracle.step_loss(mode, samples)), rel=0, abs=error)
    assert total.requires_grad
    assert not any(value.requires_grad for value in found)


# --- properties


@every_counting
@quick
@given(step=steps())
def test_weights_sum_to_one(mode: str, units: str, step: Step) -> None:
    """Or to the share of units with an active token where all count, to tokens / (L * N) for constant, and to
    tokens / d for token_sum."""
    ones = [replace(one, losses=torch.ones_like(one.losses)).poisoned() for one in step.samples]
    members = oracle.units_of(mode, ones)
    active = sum(oracle.mask_tokens([ones[i] for i in unit]) > 0 for unit in members)
    tokens = oracle.mask_tokens(ones)
    counted = active if units == "active" else len(members)
    if mode == "constant":
        expected = tokens / (WORKED_DIVISOR * counted) if counted else 0
    elif mode == "token_sum":
        expected = tokens / WORKED_DIVISOR
    elif mode == "token_mean":
        expected = 1 if tokens else 0
    else:
        expected = active / counted if counted else 0
    outcome = run_step(ones, step.microbatches, mode, units, place=thd, cp_size=2)
    assert outcome.value == pytest.approx(expected, rel=oracle.sum_error(oracle.num_tokens(ones)))


@pytest.mark.parametrize("mode", MODES)
@quick
@given(step=steps(), units=st.sampled_from(["all", "active"]), seed=st.integers(0, 2**16))
def test_order_and_cuts_do_not_matter(mode: str, step: Step, units: str, seed: int) -> None:
    rng = random.Random(seed)
    order = list(range(len(step.samples)))
    rng.shuffle(order)
    one_by_one = run_step(step.samples, [[i] for i in order], mode, units, place=response, cp_size=4)
    at_once = run_step(step.samples, [list(range(len(step.samples)))], mode, units)
    assert one_by_one.value == pytest.approx(at_once.value, rel=0, abs=2 * value_error(step.samples, mode, units))
    torch.testing.assert_close(one_by_one.gradient, at_once.gradient, rtol=2 * oracle.EXACT, atol=0)


@quick
@given(step=steps(), divisor=st.floats(1e-3, 1e6))
def test_constant_is_linear_in_one_over_l(step: Step, divisor: float) -> None:
    at_one = run_step(step.samples, step.microbatches, "constant", divisor=1)
    at_divisor = run_step(step.samples, step.microbatches, "constant", divisor=divisor)
    error = 2 * oracle.sum_error(oracle.num_tokens(step.samples)) * oracle.step_scale("constant", step.samples, 1.0)
    assert at_divisor.value * divisor == pytest.approx(at_one.value, rel=0, abs=error)


@every_layout
@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
def test_what_is_masked_never_matters(poison: float, place: Place, cp_size: int) -> None:
    step = [one.poisoned(poison) for one in WORKED]
    for mode in MODES:
        outcome = run_step(step, [[2, 0], [1, 3]], mode, place=place, cp_size=cp_size, padding=poison)
        assert_equals_oracle(outcome, WORKED, mode)


@every_layout
@pytest.mark.parametrize("mode", MODES)
def test_what_is_active_always_surfaces(mode: str, place: Place, cp_size: int) -> None:
    for i, t, poison in [(0, 0, NAN), (1, 1, INF), (2, 3, -INF)]:
        losses = WORKED[i].losses.clone()
        losses[t] = poison
        step = [replace(one, losses=losses) if k == i else one for k, one in enumerate(WORKED)]
        outcome = run_step(step, [[2, 0], [1, 3]], mode, place=place, cp_size=cp_size)
        assert outcome.value == pytest.approx(poison, nan_ok=True), (i, t)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("masks", "layout", "rank", "num_losses"),
    [
        pytest.param([torch.zeros(4), torch.zeros(8)], ZigzagTHD([0, 4, 12]), 1, 6, id="no active token"),
        pytest.param([torch.ones(3)], ZigzagResponse([16], [3]), 1, 0, id="no token on this rank"),
        pytest.param([], ZigzagTHD([0]), 0, 0, id="empty micro-batch"),
        pytest.param([], ZigzagTHD([0, 8], filler_slots=1), 0, 4, id="filler only"),
        pytest.param([torch.ones(0)], ZigzagTHD([0, 0]), 1, 0, id="empty mask"),
        pytest.param([torch.ones(0)], ZigzagResponse([5], [0]), 0, 0, id="empty response"),
    ],
)
def test_the_graph_stays_connected(mode: str, masks: list[Tensor], layout: Layout, rank: int, num_losses: int) -> None:
    n = len(masks)
    elsewhere = torch.ones(5)  # so that the step is not empty
    totals = StepTotals.from_loss_masks([*masks, elsewhere], prompt_ids=[0] * (n + 1))
    reducer = make_pg_loss_reducer(
        mode, masks, totals=totals, divisor=divisor_of(mode), prompt_ids=[0] * n, layout=layout, cp_rank=rank, cp_size=2
    )
    logits = torch.full((num_losses,), 3.0, requires_grad=True)
    share = reducer(logits * 2)
    assert share.dtype == torch.float32
    assert share.shape == ()
    share.backward()
    assert float(share.detach()) == 0
    torch.testing.assert_close(logits.grad, torch.zeros(num_losses))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_an_active_token_is_zero(mode: str) -> None:
    step = [oracle.sample([1, 2], [0, 0]).poisoned(), oracle.sample([3], [0]).poisoned()]
    for units in ("all", "active"):
        outcome = run_step(step, [[0], [1]], mode, units)
        assert outcome.value == 0
        assert not outcome.gradient.any()


def test_masks_are_not_part_of_the_graph() -> None:
    mask = torch.ones(2, requires_grad=True)
    losses = torch.ones(2, requires_grad=True)
    make_pg_loss_reducer("token_mean", [mask], totals=StepTotals.from_loss_masks([mask]))(losses).backward()
    assert mask.grad is None
    assert losses.grad.tolist() == [0.5, 0.5]


def test_a_reducer_can_be_used_again() -> None:
    """The loss and the metrics of one micro-batch share it."""
    reducer = make_pg_loss_reducer("sample_mean", [torch.ones(2)], totals=StepTotals(rollouts=UnitCounts(all=1)))
    assert [float(reducer(torch.full((2,), x))) for x in (1.0, 5.0, 1.0)] == [1, 5, 1]


# --- negative controls: each planted bug makes the comparisons above fail, by the factor shown

HALVES = [[0, 1], [2, 3]]


def share_with(totals: StepTotals, microbatch: Sequence[int], mode: str = "token_mean") -> float:
    return run_step(WORKED, [microbatch], mode, totals=totals).value


def local_denominator() -> float:
    return sum(share_with(totals_of([WORKED[i] for i in part]), part) for part in HALVES)


def mean_of_means() -> float:
    return local_denominator() / len(HALVES)


def mean_of_microbatch_sample_means() -> float:
    halves = [[0], [1, 2, 3]]
    return sum(share_with(totals_of([WORKED[i] for i in part]), part, "sample_mean") for part in halves) / 2


def phantom_token() -> float:
    tokens = sum(max(float(one.mask.sum()), 1) for one in WORKED)
    return sum(share_with(replace(totals_of(WORKED), step_tokens=tokens), part) for part in HALVES)


def unmasked_numerator() -> float:
    ones = [replace(one, mask=torch.ones_like(one.mask)) for one in WORKED]
    totals = StepTotals(step_tokens=oracle.mask_tokens(WORKED))
    return sum(run_step(ones, [part], "token_mean", totals=totals).value for part in HALVES)


def tokens_counted_by_length() -> float:
    tokens = float(sum(len(one.mask) for one in WORKED))
    return sum(share_with(StepTotals(step_tokens=tokens), part) for part in HALVES)


def tokens_summed_over_cp() -> float:
    doubled = StepTotals(step_tokens=2 * oracle.mask_tokens(WORKED))
    return run_step(WORKED, HALVES, "token_mean", place=thd, cp_size=2, totals=doubled).value


def gathered_losses_said_to_be_cut() -> float:
    """Every CP rank holds all tokens and each counts for a whole one."""
    return sum(run_step(WORKED, HALVES, "token_mean").value for _ in range(2))


def masked_by_multiplication() -> float:
    return float(sum((one.poisoned().losses * one.mask).sum() for one in WORKED)) / oracle.mask_tokens(WORKED)


def bshd_cut_read_as_thd() -> float:
    """Rows [1 2 3 4 - - - -] and [5 6 - - - - - -], cut by row, weighed as if the whole buffer were one slot."""
    rows = oracle.padded_slots([4, 2], [8, 8])
    masks = [torch.cat([WORKED[0].mask, torch.zeros(4), WORKED[1].mask, torch.zeros(6)])]
    value = 0.0
    for rank in range(2):
        local = [
            0.0 if token is None else float(WORKED[token[0]].losses[token[1]]) for token in oracle.zigzag(rows, rank, 2)
        ]
        reducer = make_pg_loss_reducer(
            "token_mean",
            masks,
            totals=StepTotals(step_tokens=9),
            layout=ZigzagTHD([0, 16]),
            cp_rank=rank,
            cp_size=2,
        )
        value += float(reducer(torch.tensor(local)))
    return value + share_with(StepTotals(step_tokens=9), [2, 3])


@pytest.mark.parametrize(
    ("mode", "planted", "factor"),
    [
        ("token_mean", local_denominator, (21 / 6 + 6.5 / 3) / (27.5 / 9)),
        ("token_mean", mean_of_means, (21 / 6 + 6.5 / 3) / 2 / (27.5 / 9)),
        ("sample_mean", mean_of_microbatch_sample_means, (2.5 + (5.5 + 6.5 / 3) / 3) / 2 / ((2.5 + 5.5 + 6.5 / 3) / 4)),
        ("token_mean", phantom_token, 9 / 10),
        ("token_mean", unmasked_numerator, 35.5 / 27.5),
        ("token_mean", tokens_counted_by_length, 9 / 13),
        ("token_mean", tokens_summed_over_cp, 1 / 2),
        ("token_mean", gathered_losses_said_to_be_cut, 2),
        ("token_mean", masked_by_multiplication, NAN),
        # Rank 0 holds 1 2 - - 5 6 - -, and only its first four places have weight; rank 1's 3 4 fall in padding.
        ("token_mean", bshd_cut_read_as_thd, (1 + 2 + 6.5) / 27.5),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_planted_bugs_are_seen(mode: str, planted: Callable[[], float], factor: float) -> None:
    wrong, right = planted(), WORKED_VALUES[mode, "all"]
    assert wrong / right == pytest.approx(factor, rel=1e-5, nan_ok=True)  # some 10 tokens and a cancellation of 2
    seen = Outcome(wrong, oracle_gradient(WORKED, mode))
    with pytest.raises(AssertionError):
        assert_equals_oracle(seen, WORKED, mode)


def test_a_wrong_gradient_is_seen() -> None:
    slopes = oracle_gradient(WORKED, "token_mean")
    assert_equals_oracle(Outcome(27.5 / 9, slopes), WORKED, "token_mean")
    with pytest.raises(AssertionError):
        assert_equals_oracle(Outcome(27.5 / 9, slopes * 1.001), WORKED, "token_mean")


def test_a_layout_that_drops_a_rank_is_seen() -> None:
    def lossy(lengths: list[int], cp_size: int) -> Placement:
        placed = thd(lengths, cp_size)
        return replace(placed, held=placed.held[:-1])

    outcome = run_step(WORKED, HALVES, "token_mean", place=lossy, cp_size=4)
    with pytest.raises(AssertionError):
        assert_equals_oracle(outcome, WORKED, "token_mean")


# --- refused losses, each beside its nearest legal neighbour


def reduce(layout: Layout | None, lengths: list[int], losses: Any, cp_rank: int = 0, cp_size: int = 1) -> Call:
    masks = [torch.ones(length) for length in lengths]

    def call() -> Tensor:
        reducer = make_pg_loss_reducer(
            "sample_mean",
            masks,
            totals=StepTotals.from_loss_masks(masks),
            layout=layout,
            cp_rank=cp_rank,
            cp_size=cp_size,
        )
        return reducer(losses)

    return call


def reduce_masked(losses: Tensor) -> Call:
    mask = [torch.tensor([1.0, 0, 1, 1, 0, 0, 0])]
    return lambda: make_pg_loss_reducer("token_mean", mask, totals=StepTotals.from_loss_masks(mask))(losses)


def reduce_metric(metric: Any) -> Call:
    reducer = make_pg_loss_reducer("token_mean", [torch.ones(3)], totals=StepTotals(step_tokens=3))
    return lambda: reducer.with_metrics(torch.ones(3), [torch.ones(3), metric])


REFUSALS: dict[str, Refusal] = {
    "transposed losses, [s, b]": (
        reduce(ZigzagBSHD(2, 8), [8, 8], torch.ones(4, 2), 0, 2),
        ValueError,
        r"shape \(4, 2\).*\(8,\) or \(2, 4\).*transpose to batch first",
        reduce(ZigzagBSHD(2, 8), [8, 8], torch.ones(2, 4), 0, 2),
    ),
    "packed losses, [s, 1]": (
        reduce(ZigzagTHD([0, 8]), [8], torch.ones(8, 1)),
        ValueError,
        "transpose",
        reduce(ZigzagTHD([0, 8]), [8], torch.ones(1, 8)),
    ),
    "losses not cut": (
        reduce(ZigzagTHD([0, 8]), [8], torch.ones(8), 0, 2),
        ValueError,
        "not cut over CP ranks",
        reduce(Gathered([0, 8]), [8], torch.ones(8), 0, 2),
    ),
    "losses neither cut nor padded": (
        reduce(ZigzagTHD([0, 8, 16], [5, 7]), [5, 7], torch.ones(12)),
        ValueError,
        "unpadded, uncut",
        reduce(ZigzagTHD([0, 8, 16], [5, 7]), [5, 7], torch.ones(16)),
    ),
    "losses cut for more ranks": (
        reduce(ZigzagTHD([0, 16]), [16], torch.ones(4), 0, 2),
        ValueError,
        "1/4 of the micro-batch: check that cp_size is right",
        reduce(ZigzagTHD([0, 16]), [16], torch.ones(4), 0, 4),
    ),
    "losses of one sample more": (
        reduce(None, [4, 3], torch.ones(9)),
        ValueError,
        r"shape \(9,\).*\(7,\)",
        reduce(None, [4, 3], torch.ones(7)),
    ),
    "rows of unequal samples": (
        reduce(None, [4, 3], torch.ones(2, 4)),
        ValueError,
        r"shape \(2, 4\)",
        reduce(None, [4, 4], torch.ones(2, 4)),
    ),
    "rows transposed, without a layout": (
        reduce(None, [4, 4], torch.ones(4, 2)),
        ValueError,
        "transpose to batch first",
        reduce(None, [4, 4], torch.ones(1, 8)),
    ),
    "scalar loss": (reduce(None, [1], torch.ones(())), ValueError, r"shape \(\)", reduce(None, [1], torch.ones(1))),
    "integer losses": (
        reduce(None, [1], torch.ones(1, dtype=torch.int64)),
        TypeError,
        "torch.int64: it must be a float",
        reduce(None, [1], torch.ones(1).double()),
    ),
    "losses that are no tensor": (
        reduce(None, [1], [1.0]),
        TypeError,
        "per_token_loss is list",
        reduce(None, [1], torch.ones(1)),
    ),
    "active tokens only": (
        reduce_masked(torch.ones(3)),
        ValueError,
        r"shape \(3,\).*the active tokens only: pass the losses of all positions",
        reduce_masked(torch.ones(7)),
    ),
    "a metric of another shape": (
        reduce_metric(torch.ones(4)),
        ValueError,
        r"a metric of shape \(4,\)",
        reduce_metric(torch.ones(1, 3)),
    ),
    "integer metrics": (
        reduce_metric(torch.ones(3).int()),
        TypeError,
        "a metric is torch.int32",
        reduce_metric(torch.ones(3).half()),
    ),
}


@each_of(REFUSALS)
def test_refused_losses(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
