"""Advantages with the aggregation folded in: each is times its token's weight, which is the oracle's."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from oracle import COUNTINGS
from refusals import refusal_tests, refusals
from step_samples import step_samples
from steps import divisor_of, ids_of
from torch import Tensor

from megatron_rl_loss import Gathered, Samples, ZigzagTHD, fold_into_advantages, weights_column

SAMPLES = step_samples(seed=4)
MASKS = [sample.mask for sample in SAMPLES]
LENGTHS = [len(mask) for mask in MASKS]
ADVANTAGES = list(torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(4)).split(LENGTHS))


def fold(mode: str = "token_mean", part: slice = slice(None), advantages: Any = None, **options: Any) -> list[Tensor]:
    """Folded advantages of a rank that has this part of the samples."""
    options = {"divisor": divisor_of(mode), **options}
    samples = Samples(MASKS[part], **ids_of(SAMPLES[part]))
    values: Sequence[Any] = ADVANTAGES if advantages is None else advantages
    return fold_into_advantages(values[part], samples, mode=mode, **options)


@pytest.mark.parametrize(("mode", "units"), COUNTINGS, ids=[f"{m}-{u}" for m, u in COUNTINGS])
def test_an_advantage_is_times_its_tokens_weight(mode: str, units: Any) -> None:
    """Half of the step folded alone would be another product, but in a plain sum."""
    weights = [
        w for sample_weights in oracle.step_weights(mode, SAMPLES, divisor_of(mode), units) for w in sample_weights
    ]
    expected = torch.tensor(weights, dtype=torch.float64) * torch.cat(ADVANTAGES)
    folded = torch.cat(fold(mode, units=units))
    torch.testing.assert_close(folded.double(), expected, rtol=oracle.EXACT, atol=0)
    halves = [row for part in (slice(6), slice(6, None)) for row in fold(mode, part, units=units)]
    assert torch.allclose(torch.cat(halves).double(), expected, rtol=1e-3, atol=0) == (mode == "token_sum")


def test_numbers_a_sample_are_values_of_all_its_tokens() -> None:
    numbers = [float(i) - 2.5 for i in range(len(MASKS))]
    rows = [torch.full((length,), a) for a, length in zip(numbers, LENGTHS, strict=True)]
    expected = torch.cat(fold("sample_mean", advantages=rows))
    for values in (
        numbers,
        torch.tensor(numbers),
        [torch.tensor(a) for a in numbers],
        torch.tensor(numbers).bfloat16(),
    ):
        folded = torch.cat(fold("sample_mean", advantages=values))
        assert folded.dtype == torch.float32
        torch.testing.assert_close(folded, expected)


def test_parts_share_no_storage_and_have_no_graph_and_masked_nan_is_ignored() -> None:
    leaves = [row.clone().requires_grad_() for row in ADVANTAGES]
    for row in fold(advantages=leaves):
        assert not row.requires_grad
        assert row.untyped_storage().nbytes() == row.numel() * row.element_size()
    nan = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    (folded,) = fold_into_advantages([nan], [[1, 0]], mode="token_sum")
    assert (folded.tolist(), folded.dtype) == ([1, 0], torch.float64)
    assert fold_into_advantages([], [], mode="token_mean") == []


def test_folding_twice_is_refused() -> None:
    """The bug of SkyRL #925's review: the critic's pass and the policy's each normalised the batch's advantages."""
    folded = fold()
    for again in (folded, [torch.zeros_like(row) for row in folded[:-1]] + folded[-1:]):
        with pytest.raises(ValueError, match="folded already: folding them again would divide by the step's counts"):
            fold(advantages=again)
    fold(advantages=[row + 0 for row in folded])


PAIR, SOUND = [[1, 0], [1]], ([1.0, 3.0],)


def fold_two(advantages: Any, mode: Any = "token_mean") -> list[Tensor]:
    return fold_into_advantages(advantages, PAIR, mode=mode)


UNFOLDABLE, INF_AT_MASKED = "advantages with NaN or Inf at active tokens", [torch.tensor([1, float("inf")]), 1.0]


def laid_out(layout: Any) -> list[Tensor]:
    return fold_into_advantages(*SOUND, Samples(PAIR, layout=layout), mode="token_mean")


def test_weights_lie_where_the_advantages_do() -> None:
    with torch.device("meta"):
        folded = fold_two([torch.ones(2, device="cpu"), 1.0])
    assert {row.device.type for row in folded} == {"cpu"}


test_refusals = refusal_tests(
    {
        **refusals(laid_out, ((Gathered([0, 2, 3]),), "samples with a layout for columns", (None,))),
        **refusals(
            fold_two,
            (([1.0],), "1 advantages for 2 loss masks", SOUND),
            (([torch.ones(2), torch.ones(2)],), r"rows of \[2, 2\] values for loss masks of \[2, 1\]", SOUND),
            (([float("nan"), 1.0],), UNFOLDABLE, (INF_AT_MASKED,)),
            ((SOUND[0], lambda step: [2.0, -1.0]), "token weights down to -1", (SOUND[0], lambda step: [2.0, 1.0])),
        ),
        **refusals(
            fold_two,
            (({0: 1.0, 1: 3.0},), "advantages is a dict: there must be one entry", SOUND),
            (([1.0, 1j],), "advantages of sample 1 are complex: they must be real numbers", SOUND),
            (([Decimal(1), 1.0],), "advantages of sample 0 are Decimal", SOUND),
            (([np.ma.array([1.0, 2.0]), 1.0],), r"sample 0 are a MaskedArray: .*filled\(0\)", SOUND),
            ((np.ma.array([1.0, 2.0]),), "advantages are a MaskedArray", SOUND),
            (([[1.0, [2.0]], 1.0],), "advantages of sample 0 are list", SOUND),
            (([torch.ones(2, device="meta"), 1.0],), "sample 0 are a torch.strided Tensor on meta", SOUND),
            ((torch.tensor([1j, 2]),), "advantages of sample 0 are torch.complex64", SOUND),
            (([True, 1.0],), "advantages of sample 0 are bool", SOUND),
            error=TypeError,
        ),
    }
)


def test_a_row_of_weights_takes_no_other_along() -> None:
    """A driver that sends one row does not send the step."""
    rows = weights_column("token_mean", [[1.0] * 1000 for _ in range(50)])
    assert all(row.untyped_storage().nbytes() == 4 * 1000 for row in rows)


def test_weights_of_a_layout_are_refused() -> None:
    samples = Samples([[1, 1], [1]], layout=ZigzagTHD([0, 4, 8], total_lengths=[2, 1]))
    with pytest.raises(ValueError, match="Leave layout= out"):
        weights_column("token_mean", samples)
