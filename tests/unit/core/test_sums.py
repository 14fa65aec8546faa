"""Sums of weight times value: the loss and its gradient, terms with coefficients, metrics.

Everything here is linear in the weights, which tests/unit/core/test_weights.py proves. The worked batch goes the whole
way, from masks to gradients.
"""

import copy
from typing import Any

import oracle
import pytest
import torch
from oracle import MODES, NAN, WORKED
from placements import Place, bshd, gathered, laid_out, padded_masks, plain, response, thd
from refusals import refusal_tests, refusals
from steps import divisor_of, ids_of, totals_of
from torch import Tensor

from megatron_rl_loss import Gathered, Samples, StepTotals, ZigzagBSHD, ZigzagResponse, ZigzagTHD, make_pg_loss_reducer
from megatron_rl_loss.core import reducers
from megatron_rl_loss.core.layouts import Layout
from megatron_rl_loss.core.reducers import Summand, WeightedSum

INF = float("inf")


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
        (plain, 1, "token_sum"), (thd, 4, "sample_mean"), (bshd, 2, "prompt_mean"), (response, 2, "token_mean"),
        (gathered, 4, "constant"),
    ],
)  # fmt: skip
def test_worked_batch_whatever_is_masked_or_padding(poison: float, place: Place, cp_size: int, mode: str) -> None:
    value, divisor = 0.0, divisor_of(mode)
    slopes = [torch.zeros(len(sample.mask), dtype=torch.float64) for sample in WORKED]
    for chosen in ([2, 0], [1, 3]):
        part = [WORKED[i].poisoned(poison) for i in chosen]
        at = laid_out(place, tuple(len(sample.mask) for sample in part), cp_size)
        for rank, held in enumerate(at.held):
            reducer = make_pg_loss_reducer(
                mode, Samples(padded_masks(part, at), layout=at.layout, **ids_of(part)), totals=totals_of(WORKED),
                divisor=divisor, cp_rank=rank, cp_size=cp_size,
            )  # fmt: skip
            losses = torch.tensor([float(part[t[0]].losses[t[1]]) if t else poison for t in held], requires_grad=True)
            share = reducer(losses.reshape(at.shape(len(held))))
            share.backward()
            value += float(share.detach())
            assert (share.dtype, share.shape) == (torch.float32, ())
            for token, slope in zip(held, losses.grad.tolist(), strict=True):
                if token is None:
                    assert slope == 0, "padding has a gradient"
                else:
                    slopes[chosen[token[0]]][token[1]] += slope
    error = oracle.sum_error(oracle.num_tokens(WORKED)) * oracle.step_scale(mode, WORKED, divisor)
    assert value == pytest.approx(oracle.WORKED_VALUES[mode, "all"], rel=0, abs=error)
    expected = torch.cat(oracle.step_gradient(mode, WORKED, divisor))
    torch.testing.assert_close(torch.cat(slopes), expected, rtol=oracle.EXACT, atol=0)
    with pytest.raises(AssertionError):  # negative control
        torch.testing.assert_close(torch.cat(slopes) * 1.001, expected, rtol=oracle.EXACT, atol=0)


@pytest.mark.parametrize("backward", ["sum", "slice"])
def test_a_gather_by_its_backward(backward: Any) -> None:
    """Two CP ranks gather their halves of 8 log-probs: a token's gradient is its weight, and the value is the loss."""
    masks, place = [torch.ones(4), torch.tensor([1.0, 0, 1, 0])], dict[str, Any](cp_size=2)
    place["totals"] = StepTotals.of(masks)
    samples = Samples(masks, layout=Gathered([0, 4, 8], backward=backward))
    gradients, value = [torch.zeros(4), torch.zeros(4)], 0.0
    for rank in range(2):
        losses = torch.arange(8.0, requires_grad=True)
        share = make_pg_loss_reducer("token_mean", samples, cp_rank=rank, **place)(losses)
        share.backward()
        value += float(share.detach())
        for owner in range(2) if backward == "sum" else [rank]:
            gradients[owner] += losses.grad.view(2, 4)[owner]
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
    ],
)
def test_the_graph_stays_connected(masks: list[Tensor], layout: Layout, rank: int, num_losses: int) -> None:
    """A step without one active token has a graph, too."""
    ids, logits = [0] * len(masks), torch.full((num_losses,), 3.0, requires_grad=True)
    for elsewhere in (torch.ones(5), torch.zeros(5)):
        totals = StepTotals.of(Samples([*masks, elsewhere], prompt_ids=[*ids, 0]))
        place: Any = {"cp_rank": rank, "cp_size": 2}
        samples = Samples(masks, layout=layout, prompt_ids=ids)
        for mode in MODES:
            reducer = make_pg_loss_reducer(mode, samples, totals=totals, divisor=divisor_of(mode), **place)
            share = reducer(logits * 2)
            (gradient,) = torch.autograd.grad(share, logits)
            assert (share.dtype, share.shape, float(share.detach())) == (torch.float32, (), 0)
            assert not gradient.any()


def test_masks_are_not_part_of_the_graph_and_a_reducer_can_be_used_again() -> None:
    mask, losses = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    reducer = make_pg_loss_reducer("token_mean", [mask], totals=StepTotals.of([mask]))
    reducer(losses).backward()
    assert mask.grad is None
    assert losses.grad.tolist() == [0.5, 0.5]
    assert [float(reducer(torch.full((2,), loss))) for loss in (1.0, 5.0, 1.0)] == [1, 5, 1]


# --- weighted rows


def with_weights(weights: Tensor, copies: int = 1) -> WeightedSum:
    """A sum by these weights; of `copies` ranks that all hold the tokens, the first."""
    mask = torch.ones(len(weights), dtype=torch.bool)
    samples = Samples([mask], layout=Gathered([0, len(weights)], backward="slice"))
    place: dict[str, Any] = {"cp_rank": 0, "cp_size": copies}
    return make_pg_loss_reducer(lambda step: [weights * copies], samples, totals=StepTotals.of([mask]), **place)


def sums_of(reducer: WeightedSum, losses: Tensor, *metrics: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The share of the losses, and the sums of metrics."""
    share, _ = reducers.sum_terms([Summand(losses, reducer)])
    return share, [*reducer.sums(metrics)] if metrics else []


def close(value: Tensor, row: Tensor, weights: Tensor, factor: float = 1.0) -> bool:
    """The float32 sum of row times weights, to what 3 roundings a term and a pairwise sum of blocks may be off by."""
    terms = row.detach().double().reshape(-1) * weights.double() * factor
    return abs(float(value.detach()) - float(terms.sum())) <= 32 * oracle.ROUNDING * float(terms.abs().sum())


@both_ways
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 5000])
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
    share, own = reducers.sum_terms(summands)
    metric_values = [by.sums([row])[0] for row, by in metrics]
    rows = [(summand.values, weights if summand.reducer is reducer else others) for summand in summands]
    rows += [(row, weights if by is reducer else others) for row, by in metrics]
    assert len(own) == len(metric_values) == 3
    for value, (row, by) in zip([*own, *metric_values], rows, strict=True):
        assert value.dtype == torch.promote_types(row.dtype, torch.float32)
        assert not value.requires_grad
        assert close(value, row, by)
    whole = torch.cat([summand.values.detach().double().view(-1) * summand.coef for summand in summands])
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
@pytest.mark.parametrize("at", [0, 139_999])
def test_what_does_not_count_is_ignored_and_what_counts_comes_through(at: int, caplog: Any) -> None:
    for value in (NAN, INF, -INF):
        weights, row, clean = torch.ones(140_000), torch.ones(140_000), torch.full((140_000,), 2.0)
        row[at] = value
        for expected in ({id(clean): 280_000.0, id(row): value}, {id(clean): 279_998.0, id(row): 139_999.0}):
            for rows in ((row, clean), (clean, row)):
                share, (metric,) = sums_of(with_weights(weights), rows[0], rows[1])
                right = [expected[id(row)] for row in rows]
                assert [float(share), float(metric)] == pytest.approx(right, nan_ok=True)
            weights[at] = 0
    if caplog.text:  # on the host, at once
        assert f"at token {at} of sample 0" in caplog.text


@both_ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_that_the_losses_cannot_hold_are_not_lost(dtype: torch.dtype) -> None:
    """2e-8, that of a token of 5e7, is 0 in float16; scaled by the carrier or a loss scale the gradient is not."""
    weight = 2e-8
    losses = torch.tensor([2.0, -0.5, 4.0], dtype=dtype, requires_grad=True)
    reducer = with_weights(torch.full((3,), weight))
    share, (metric,) = sums_of(reducer, losses, losses.detach())
    for value in (share.detach(), metric, reducer(losses.detach())):
        assert float(value) == pytest.approx(5.5 * weight, rel=oracle.sum_error(3))
    (share * 2**16).backward()
    expected = torch.full((3,), weight * 2**16, dtype=torch.float64)
    torch.testing.assert_close(losses.grad.double(), expected, rtol=oracle.EXACT + torch.finfo(dtype).eps / 2, atol=0)


def test_float16_losses_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Weights of 1 / 3e7 are rounded to 6e-8: gradients then add up to 1.79. A loss scale of 2^11 holds them."""
    reducers.say_float16.cache_clear()
    weight = 1 / 3e7
    reducer = with_weights(torch.tensor([weight, weight, 0]))
    for dtype, by, needs_grad in (
        (torch.float32, reducer, True), (torch.bfloat16, reducer, True), (torch.float16, reducer, False),
        (torch.float16, with_weights(torch.tensor([0.25, 2.0**-14, 0])), True),
        (torch.float16, with_weights(torch.zeros(3)), True),
    ):  # fmt: skip
        by(torch.ones(3, dtype=dtype, requires_grad=needs_grad))
    with torch.no_grad():
        reducer(torch.ones(3, dtype=torch.float16, requires_grad=True))
    assert not caplog.records
    losses = torch.ones(3, dtype=torch.float16, requires_grad=True)
    reducer(losses).backward()
    reducer(losses)
    (record,) = caplog.records
    assert "2^11 times too small" in record.message
    assert losses.grad[0].item() / weight == pytest.approx(1.79, abs=0.005)
    scaled = torch.ones(3, dtype=torch.float16, requires_grad=True)
    (reducer(scaled) * 2**11).backward()
    assert scaled.grad[0].item() / 2**11 / weight == pytest.approx(1, abs=2.0**-11)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("first", [True, False])
def test_a_term_of_coefficient_0_is_reported_and_trains_nothing(value: float, first: bool) -> None:
    """Whatever its values and slopes: 0 times infinity would be NaN."""
    weights, values = torch.tensor([0.5, 0.25, 0.0]), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    trained, reported = with_weights(weights), with_weights(weights)
    terms = [Summand(values * 2, trained, 3.0, "pg"), Summand(values * value, reported, 0, "kl")]
    share, (*own,) = reducers.sum_terms(terms[:: 1 if first else -1])
    share.backward()
    assert float(share.detach()) == 3 * (1 + 1)
    assert values.grad.tolist() == [3.0, 1.5, 0.0]
    reports = dict(zip([summand.term for summand in terms[:: 1 if first else -1]], map(float, own), strict=True))
    assert reports == pytest.approx({"pg": 2.0, "kl": value}, nan_ok=True)


def test_a_loss_of_coefficients_0_is_0_and_has_a_graph() -> None:
    losses = torch.tensor([1.0, 2.0], requires_grad=True)
    share, own = reducers.sum_terms([Summand(losses, with_weights(torch.ones(2)), 0, "kl")])
    share.backward()
    assert (float(share.detach()), float(own[0]), losses.grad.tolist()) == (0, 3, [0, 0])


def test_a_term_without_a_graph_beside_trained_ones_is_refused() -> None:
    """It would train nothing. To be reported it has coefficient 0; alone, or without gradients, it is an evaluation."""
    reducer, losses = with_weights(torch.ones(2)), torch.ones(2, requires_grad=True)
    pg, kl = Summand(losses, reducer, 1.0, "pg"), Summand(losses.detach(), reducer, -0.1, "kl")
    for terms in ([pg, kl], [kl, pg]):
        with pytest.raises(ValueError, match=r"the term 'kl' with coef=-0.1 and values without a graph: .* coef=0\."):
            reducers.sum_terms(terms)
        with torch.no_grad():
            assert float(reducers.sum_terms(terms)[0]) == pytest.approx(1.8)
    assert float(reducers.sum_terms([pg, kl._replace(coef=0)])[0].detach()) == 2
    assert float(reducers.sum_terms([kl])[0]) == pytest.approx(-0.2)


def test_four_million_tokens_keep_their_precision() -> None:
    """torch adds 16 terms at a time over several levels: some 100 roundings on a term's way to the sum, of 2^-24 each.

    As they point both ways they add up to about sqrt(100) * 2^-24 = 6e-7 at the most. Negative control: the running
    float32 sum of losses that are all alike, as some BLAS libraries have it.
    """
    number = 2**22
    mask = torch.rand(number, generator=torch.Generator().manual_seed(2)) < 0.9
    reducer = make_pg_loss_reducer("token_mean", [mask], totals=StepTotals.of([mask]))
    alike = torch.full((number,), 0.1)
    share, (metric, flat) = sums_of(reducer, alike, 3 * alike, alike.view(1, -1))
    expected = [float(alike.double()[mask].mean())] * 3
    assert [float(value) for value in (share, metric / 3, flat)] == pytest.approx(expected, rel=1e-6)
    assert abs(float(alike.numpy().cumsum(dtype="float32")[-1]) / float(alike.double().sum()) - 1) > 1e-4


def test_weights_that_change_between_forward_and_backward_are_refused() -> None:
    """Such weights would be another micro-batch's. A backward pass before the change, or a copy after it, is sound."""
    losses = torch.ones(3, requires_grad=True)
    reducer = with_weights(torch.tensor([1.0, 2, 3]))
    share = reducer(losses)
    reducer.weights.copy_(torch.tensor([5.0, 5, 5]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own check
        share.backward()
    reducer(losses).backward()
    assert losses.grad.tolist() == [5, 5, 5]
    assert copy.copy(reducer).weights is reducer.weights


# --- refused losses, each beside its nearest legal neighbour


def reduce(layout: Layout | None, lengths: list[int], losses: Any, cp_rank: int = 0, cp_size: int = 1) -> Tensor:
    masks = [torch.ones(length) for length in lengths]
    options: dict[str, Any] = {"totals": StepTotals.of(masks), "cp_rank": cp_rank, "cp_size": cp_size}
    return make_pg_loss_reducer("sample_mean", Samples(masks, layout=layout), **options)(losses)


def reduce_masked(losses: Tensor) -> Tensor:
    mask = [torch.tensor([1.0, 0, 1, 1, 0, 0, 0])]
    return make_pg_loss_reducer("token_mean", mask, totals=StepTotals.of(mask))(losses)


class PolicyLoss:
    per_token_loss = torch.ones(1)


ROWS, PACKED, UNPADDED = ZigzagBSHD(2, 8), ZigzagTHD([0, 8]), ZigzagTHD([0, 8, 16], [5, 7])
TOKEN, LONG = torch.ones(1), ZigzagTHD([0, 16])
test_refused_losses = refusal_tests(
    {
        **refusals(
            reduce,
            ((ROWS, [8, 8], torch.ones(4, 2), 0, 2), r"shape \(4, 2\).*\(8,\) or \(2, 4\).*transpose to batch first",
             (ROWS, [8, 8], torch.ones(2, 4), 0, 2)),
            ((PACKED, [8], torch.ones(8), 0, 2), "not cut over CP ranks", (Gathered([0, 8]), [8], torch.ones(8), 0, 2)),
            ((UNPADDED, [5, 7], torch.ones(12)), "unpadded, uncut", (UNPADDED, [5, 7], torch.ones(16))),
            ((LONG, [16], torch.ones(4), 0, 2), "1/4 of the micro-batch: check that cp_size is right",
             (LONG, [16], torch.ones(4), 0, 4)),
            ((None, [4, 3], torch.ones(9)), r"shape \(9,\).*\(7,\).*have fewer entries: .*of responses alone, pass",
             (None, [4, 3], torch.ones(7))),
            ((None, [4, 3], torch.ones(5)), "each mask has one entry too many", (None, [3, 2], torch.ones(5))),
            ((None, [4, 3], torch.ones(2)), "one per sample: samples.in_buffer", (None, [4, 3], torch.ones(7))),
            ((None, [4, 3], torch.ones(2, 4)), r"shape \(2, 4\)", (None, [4, 4], torch.ones(2, 4))),
            ((None, [1], torch.ones(())), r"shape \(\).*Pass unreduced values", (None, [1], TOKEN)),
        ),
        **refusals(
            reduce,
            ((None, [1], TOKEN.long()), "torch.int64: it must be a float", (None, [1], TOKEN.double())),
            ((None, [1], [1.0]), "per_token_loss is list", (None, [1], TOKEN)),
            ((None, [1], PolicyLoss()), "is a PolicyLoss: it must be a float tensor. Pass its .per_token_loss",
             (None, [1], PolicyLoss.per_token_loss)),
            error=TypeError,
        ),
        **refusals(
            reduce_masked,
            ((torch.ones(3),), r"shape \(3,\).*the active tokens only: pass the losses of all", (torch.ones(7),)),
        ),
    }
)  # fmt: skip
