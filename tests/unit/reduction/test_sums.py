"""Sums of weight times value: the loss and its gradient, terms with coefficients, metrics.

Everything here is linear in the weights, which tests/unit/modes/test_weights.py proves. The worked batch goes the whole
way, from masks to gradients.
"""

import math
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from oracle import MODES, NAN, WORKED
from placements import Place, Placement, bshd, contiguous, gathered, plain, response, thd
from refusals import refusal_tests, refusals
from steps import Outcome, assert_equals_oracle, divisor_of, oracle_gradient, run_step
from torch import Tensor

from megatron_rl_loss import (
    Gathered,
    Layout,
    Samples,
    StepTotals,
    ZigzagBSHD,
    ZigzagResponse,
    ZigzagTHD,
    make_pg_loss_reducer,
)
from megatron_rl_loss.reduction import WeightedSum, sums
from megatron_rl_loss.reduction.metrics import Metric, Parts
from megatron_rl_loss.reduction.sums import Summand

INF = float("inf")
HALVES = [[2, 0], [1, 3]]


@pytest.fixture(params=["on the host", "as on a device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks whether a sum is finite; on a device, or compiled, no value may be looked at."""
    if request.param == "as on a device":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


both_ways = pytest.mark.usefixtures("way")


# --- from masks to gradients


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize(
    ("place", "cp_size", "mode"),
    [
        (plain, 1, "token_sum"),
        (thd, 4, "sample_mean"),
        (bshd, 2, "prompt_mean"),
        (response, 2, "token_mean"),
        (contiguous, 2, "sample_mean"),
        (gathered, 4, "constant"),
    ],
)
def test_worked_batch_whatever_is_masked_or_padding(poison: float, place: Place, cp_size: int, mode: str) -> None:
    step = [one.poisoned(poison) for one in WORKED]
    for units in ("all", "active"):
        outcome = run_step(step, HALVES, mode, units, place=place, cp_size=cp_size, padding=poison)
        assert_equals_oracle(outcome, WORKED, mode, units)


def test_wrong_gradients_and_a_layout_that_drops_a_rank_are_seen() -> None:
    """Negative controls."""

    def lossy(lengths: list[int], cp_size: int) -> Placement:
        placed = thd(lengths, cp_size)
        return replace(placed, held=placed.held[:-1])

    slopes = oracle_gradient(WORKED, "token_mean")
    assert_equals_oracle(Outcome(27.5 / 9, slopes), WORKED, "token_mean")
    of_lossy = run_step(WORKED, HALVES, "token_mean", place=lossy, cp_size=4)
    for wrong in (Outcome(27.5 / 9, slopes * 1.001), of_lossy):
        with pytest.raises(AssertionError):
            assert_equals_oracle(wrong, WORKED, "token_mean")


@pytest.mark.parametrize("backward", ["sum", "slice"])
def test_a_gather_by_its_backward(backward: Any) -> None:
    """Two CP ranks gather their halves of 8 log-probs: a token's gradient is its weight, and the value is the loss."""
    masks, place = [torch.ones(4), torch.tensor([1.0, 0, 1, 0])], {"cp_size": 2}
    place |= {"layout": Gathered([0, 4, 8], backward=backward), "totals": StepTotals.from_loss_masks(masks)}
    gradients, value = [torch.zeros(4), torch.zeros(4)], 0.0
    for rank in range(2):
        gathered = torch.arange(8.0, requires_grad=True)
        share = make_pg_loss_reducer("token_mean", masks, cp_rank=rank, **place)(gathered)
        share.backward()
        value += float(share.detach())
        grad = gathered.grad.view(2, 4)
        for owner in range(2) if backward == "sum" else [rank]:
            gradients[owner] += grad[owner]
    assert value == pytest.approx((0 + 1 + 2 + 3 + 4 + 6) / 6, rel=oracle.EXACT)
    torch.testing.assert_close(torch.cat(gradients), torch.cat(masks) / 6, rtol=oracle.EXACT, atol=0)


@pytest.mark.parametrize(
    ("masks", "layout", "rank", "num_losses"),
    [
        ([torch.zeros(4), torch.zeros(8)], ZigzagTHD([0, 4, 12]), 1, 6),  # no active token
        ([torch.ones(3)], ZigzagResponse([16], [3]), 1, 0),  # no token on this rank
        ([], ZigzagTHD([0]), 0, 0),  # empty micro-batch
        ([], ZigzagTHD([0, 8], filler_slots=1), 0, 4),  # filler only
        ([torch.ones(0)], ZigzagTHD([0, 0]), 1, 0),  # empty mask
        ([torch.ones(0)], ZigzagResponse([5], [0]), 0, 0),  # empty response
    ],
)
def test_the_graph_stays_connected(masks: list[Tensor], layout: Layout, rank: int, num_losses: int) -> None:
    ids, logits = [0] * len(masks), torch.full((num_losses,), 3.0, requires_grad=True)
    elsewhere = torch.ones(5)  # so that the step is not empty
    totals = StepTotals.from_loss_masks([*masks, elsewhere], prompt_ids=[*ids, 0])
    place: Any = {"layout": layout, "cp_rank": rank, "cp_size": 2}
    for mode in MODES:
        reducer = make_pg_loss_reducer(mode, masks, totals=totals, divisor=divisor_of(mode), prompt_ids=ids, **place)
        share = reducer(logits * 2)
        assert (share.dtype, share.shape) == (torch.float32, ())
        (gradient,) = torch.autograd.grad(share, logits)
        assert float(share.detach()) == 0
        assert not gradient.any()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_an_active_token_is_zero(mode: str) -> None:
    step = [oracle.sample([1, 2], [0, 0]).poisoned(), oracle.sample([3], [0]).poisoned()]
    for units in ("all", "active"):
        outcome = run_step(step, [[0], [1]], mode, units)
        assert outcome.value == 0
        assert not outcome.gradient.any()


def test_masks_are_not_part_of_the_graph_and_a_reducer_can_be_used_again() -> None:
    mask = torch.ones(2, requires_grad=True)
    losses = torch.ones(2, requires_grad=True)
    reducer = make_pg_loss_reducer("token_mean", [mask], totals=StepTotals.from_loss_masks([mask]))
    reducer(losses).backward()
    assert mask.grad is None
    assert losses.grad.tolist() == [0.5, 0.5]
    assert [float(reducer(torch.full((2,), x))) for x in (1.0, 5.0, 1.0)] == [1, 5, 1]


# --- weighted rows


def with_weights(weights: Tensor, copies: int = 1) -> WeightedSum:
    """A sum by these weights; of `copies` ranks that all hold the tokens, the first."""
    mask = torch.ones(len(weights), dtype=torch.bool)
    options: dict[str, Any] = {"layout": Gathered([0, len(mask)], backward="slice"), "cp_rank": 0, "cp_size": copies}
    return make_pg_loss_reducer(lambda inputs: [weights * copies], [mask], totals=StepTotals(), **options)


def close(value: Tensor, row: Tensor, weights: Tensor, factor: float = 1.0) -> bool:
    """The float32 sum of row times weights, to what 3 roundings a term and a pairwise sum of blocks may be off by."""
    terms = row.detach().double().reshape(-1) * weights.double() * factor
    return abs(float(value.detach()) - float(terms.sum())) <= 32 * oracle.ROUNDING * float(terms.abs().sum())


@both_ways
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 5000, 140_000])
@pytest.mark.parametrize("copies", [1, 4])
def test_terms_with_coefficients_and_metrics(num_tokens: int, copies: int) -> None:
    """Over weights of their own, strided, two-dimensional, of other dtypes, with a graph of their own."""
    generator = torch.Generator().manual_seed(num_tokens)
    table = torch.randn(num_tokens, 5, generator=generator)
    weights, others = (torch.rand(num_tokens, generator=generator) for _ in range(2))
    weights[::3] = others[::5] = 0
    reducer, other = with_weights(weights, copies), with_weights(others, copies)
    leaves = [table[:, k].clone().to(dtype).requires_grad_() for k, dtype in ((0, torch.float32), (1, torch.bfloat16))]
    values = [leaves[0], leaves[1].view(1, -1), leaves[0]]
    summands = [
        Summand(row, by, coef, f"term{k}")
        for k, (row, by, coef) in enumerate(zip(values, [reducer, reducer, other], [2.0, -0.5, 3.0], strict=True))
    ]
    metrics = [(table[:, 3], reducer), (table[:, 4].double(), other), (leaves[1] * 2, other)]
    share, own, found = sums.sum_terms(summands, metrics)
    rows = [(one.values, weights if one.reducer is reducer else others) for one in summands]
    rows += [(row, weights if by is reducer else others) for row, by in metrics]
    assert len(own) == len(found) == 3
    for value, (row, by) in zip([*own, *found], rows, strict=True):
        assert value.dtype == torch.float32
        assert not value.requires_grad
        assert close(value, row, by)
    whole = torch.cat([one.values.detach().double().view(-1) * one.coef for one in summands])
    assert close(share, whole, torch.cat([by for _, by in rows[:3]]))
    share.backward()
    slopes = [2 * weights.double() + 3 * others, -0.5 * weights.double()]
    for leaf, slope in zip(leaves, slopes, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        rtol = oracle.EXACT + torch.finfo(leaf.dtype).eps
        torch.testing.assert_close(leaf.grad.double(), slope * copies, rtol=rtol, atol=0)
    share /= 2  # as Megatron divides in place
    if num_tokens:
        assert close(own[0], *rows[0]), "a term's own sum does not change with the share"


@both_ways
def test_a_loss_with_metrics_by_other_weights() -> None:
    weights, others = torch.tensor([0.5, 0, 2, 0]), torch.tensor([0.0, 1, 1, 0])
    losses = torch.tensor([1.0, NAN, 3, INF], requires_grad=True)
    share, (metric,) = with_weights(weights).with_metrics(
        losses, [torch.tensor([7.0, 5, -2, NAN])], with_weights(others)
    )
    assert (share.item(), metric.item(), metric.requires_grad) == (6.5, 3, False)


@both_ways
@pytest.mark.parametrize("at", [0, 139_999])
def test_what_does_not_count_is_ignored_and_what_counts_comes_through(at: int) -> None:
    for value in (NAN, INF, -INF):
        weights, row, clean = torch.ones(140_000), torch.ones(140_000), torch.full((140_000,), 2.0)
        row[at] = value
        for expected in ({id(clean): 280_000.0, id(row): value}, {id(clean): 279_998.0, id(row): 139_999.0}):
            for rows in ((row, clean), (clean, row)):
                share, (metric,) = with_weights(weights).with_metrics(rows[0], [rows[1]])
                right = [expected[id(one)] for one in rows]
                assert [float(share), float(metric)] == pytest.approx(right, nan_ok=True)
            weights[at] = 0


@both_ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_that_the_losses_cannot_hold_are_not_lost(dtype: torch.dtype) -> None:
    """2e-8, that of a token of 5e7, is 0 in float16; scaled by the carrier or a loss scale the gradient is not."""
    weight = 2e-8
    assert (torch.tensor(weight, dtype=torch.float16) == 0).all()
    losses = torch.tensor([2.0, -0.5, 4.0], dtype=dtype, requires_grad=True)
    reducer = with_weights(torch.full((3,), weight))
    share, (metric,) = reducer.with_metrics(losses, [losses.detach()])
    for value in (share.detach(), metric, reducer(losses.detach())):
        assert float(value) == pytest.approx(5.5 * weight, rel=oracle.sum_error(3))
    (share * 2**16).backward()
    expected = torch.full((3,), weight * 2**16, dtype=torch.float64)
    torch.testing.assert_close(losses.grad.double(), expected, rtol=oracle.EXACT + torch.finfo(dtype).eps / 2, atol=0)


def test_four_million_tokens_keep_their_precision() -> None:
    """torch adds 16 terms at a time over several levels: some 100 roundings on a term's way to the sum, of 2^-24 each.

    As they point both ways they add up to about sqrt(100) * 2^-24 = 6e-7 at the most. Negative control: the running
    float32 sum of losses that are all alike, as some BLAS libraries have it.
    """
    generator, number = torch.Generator().manual_seed(2), 2**22
    mask = torch.rand(number, generator=generator) < 0.9
    reducer = make_pg_loss_reducer("token_mean", [mask], totals=StepTotals.from_loss_masks([mask]))
    alike = torch.full((number,), 0.1)
    for losses in (alike, torch.randn(number, generator=generator) + 1):
        share, (metric, flat) = reducer.with_metrics(losses, [3 * losses, losses.view(1, -1)])
        expected = float(losses.double()[mask].mean())
        assert [float(value) for value in (reducer(losses), share, metric / 3, flat)] == pytest.approx(
            [expected] * 4, rel=1e-6
        )
    assert abs(float(alike.numpy().cumsum(dtype="float32")[-1]) / float(alike.double().sum()) - 1) > 1e-4


@pytest.mark.parametrize(("kind", "expected"), [("min", -2.0), ("max", 5.0)])
def test_a_rank_without_tokens_has_no_extreme(kind: Any, expected: float) -> None:
    """Three response tokens at the end of 16 lie on one of two ranks; other kinds: tests/megatron."""
    masks, layout = [torch.tensor([1, 0, 1])], ZigzagResponse([16], [3])
    values, parts, sizes = torch.tensor([5.0, NAN, -2.0]), Parts(), []
    for rank in range(2):
        local, place = Samples(masks, layout=layout).local(rank, 2), {"layout": layout, "cp_rank": rank, "cp_size": 2}
        reducer = make_pg_loss_reducer("token_mean", masks, totals=StepTotals(step_tokens=2), **place)  # type: ignore[arg-type]
        parts.add("x", kind, Metric(local.of(values), "tokens", kind=kind).extreme(reducer))
        sizes.append(len(local))
    assert sorted(sizes) == [0, 3]
    assert float(parts.finish([None])["x"]) == expected
    without = make_pg_loss_reducer("token_mean", [torch.zeros(2)], totals=StepTotals(step_tokens=0))
    parts = Parts({"x": kind}, {"x": [Metric(torch.ones(2), "tokens", kind=kind).extreme(without)]})
    assert math.isnan(parts.finish([None])["x"])


# --- refused losses, each beside its nearest legal neighbour


def reduce(layout: Layout | None, lengths: list[int], losses: Any, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    masks = [torch.ones(length) for length in lengths]
    options: dict[str, Any] = {"totals": StepTotals.from_loss_masks(masks), "layout": layout}
    return make_pg_loss_reducer("sample_mean", masks, cp_rank=cp_rank, cp_size=cp_size, **options)(losses)


def reduce_masked(losses: Tensor) -> Tensor:
    mask = [torch.tensor([1.0, 0, 1, 1, 0, 0, 0])]
    return make_pg_loss_reducer("token_mean", mask, totals=StepTotals.from_loss_masks(mask))(losses)


THREE = make_pg_loss_reducer("token_mean", [torch.ones(3)], totals=StepTotals(step_tokens=3))


def reduce_metric(metric: Any) -> Any:
    return THREE.with_metrics(torch.ones(3), [torch.ones(3), metric])


def reduce_terms(term: Any) -> Any:
    return sums.sum_terms([Summand(torch.ones(3), THREE, 1, "pg"), Summand(term, THREE, 1, "kl")])


ROWS, PACKED, UNPADDED = ZigzagBSHD(2, 8), ZigzagTHD([0, 8]), ZigzagTHD([0, 8, 16], [5, 7])
TOKEN = torch.ones(1)
REFUSALS = {
    **refusals(
        reduce,
        (
            (ROWS, [8, 8], torch.ones(4, 2), 0, 2),
            r"shape \(4, 2\).*\(8,\) or \(2, 4\).*transpose to batch first",
            (ROWS, [8, 8], torch.ones(2, 4), 0, 2),
        ),
        ((PACKED, [8], torch.ones(8, 1)), "transpose", (PACKED, [8], torch.ones(1, 8))),
        ((PACKED, [8], torch.ones(8), 0, 2), "not cut over CP ranks", (Gathered([0, 8]), [8], torch.ones(8), 0, 2)),
        ((UNPADDED, [5, 7], torch.ones(12)), "unpadded, uncut", (UNPADDED, [5, 7], torch.ones(16))),
        (
            (ZigzagTHD([0, 16]), [16], torch.ones(4), 0, 2),
            "1/4 of the micro-batch: check that cp_size is right",
            (ZigzagTHD([0, 16]), [16], torch.ones(4), 0, 4),
        ),
        ((None, [4, 3], torch.ones(9)), r"shape \(9,\).*\(7,\)", (None, [4, 3], torch.ones(7))),
        ((None, [4, 3], torch.ones(2, 4)), r"shape \(2, 4\)", (None, [4, 4], torch.ones(2, 4))),
        ((None, [4, 4], torch.ones(4, 2)), "transpose to batch first", (None, [4, 4], torch.ones(1, 8))),
        ((None, [1], torch.ones(())), r"shape \(\)", (None, [1], TOKEN)),
    ),
    **refusals(
        reduce,
        ((None, [1], TOKEN.long()), "torch.int64: it must be a float", (None, [1], TOKEN.double())),
        ((None, [1], [1.0]), "per_token_loss is list", (None, [1], TOKEN)),
        error=TypeError,
    ),
    **refusals(
        reduce_masked,
        ((torch.ones(3),), r"shape \(3,\).*the active tokens only: pass the losses of all", (torch.ones(7),)),
    ),
    **refusals(reduce_metric, ((torch.ones(4),), r"a metric of shape \(4,\)", (torch.ones(1, 3),))),
    **refusals(reduce_terms, ((torch.ones(4),), r"a term of shape \(4,\)", (torch.ones(1, 3),))),
    **refusals(
        reduce_metric,
        ((torch.ones(3).int(),), "a metric is torch.int32", (torch.ones(3).half(),)),
        error=TypeError,
    ),
}

test_refused_losses = refusal_tests(REFUSALS)
