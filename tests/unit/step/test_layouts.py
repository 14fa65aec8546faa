"""Which positions a context-parallel (CP) rank holds: literal vectors, an independent cut, and what is refused."""

import doctest
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import contiguous, contiguous_per_slot, padded_slots, response_only, zigzag
from refusals import Call, Refusal, check_refusal, each_of

from megatron_rl_loss import Contiguous, Gathered, Layout, Samples, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.step import layouts

CP_SIZES = (1, 2, 3, 4, 8)


def indices(layout: Layout, cp_size: int) -> list[list[int]]:
    held = [layout.local_indices(rank, cp_size) for rank in range(cp_size)]
    assert {positions.dtype for positions in held} == {np.dtype(np.int64)}
    return [positions.tolist() for positions in held]


def masks(*lengths: int) -> list[torch.Tensor]:
    return [torch.ones(length) for length in lengths]


def test_docstring_examples() -> None:
    result = doctest.testmod(layouts)
    assert result.attempted > 0
    assert result.failed == 0


# --- literal vectors


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param(  # Transformer Engine's own expected vector
            ZigzagTHD([0, 8, 16]), [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]], id="THD, TE's vector"
        ),
        pytest.param(ZigzagTHD([0, 4, 4, 12, 12, 12]), [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]], id="THD, ragged"),
        pytest.param(
            ZigzagBSHD(1, 16),  # Megatron's get_batch_on_this_cp_rank
            [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]],
            id="BSHD, one row",
        ),
        pytest.param(ZigzagBSHD(2, 4), [[0, 3, 4, 7], [1, 2, 5, 6]], id="BSHD, two rows"),
        pytest.param(Contiguous([0, 2, 8]), [[0, 1, 2, 3], [4, 5, 6, 7]], id="contiguous"),
        pytest.param(Contiguous([0, 2, 8], per_slot=True), [[0, 2, 3, 4], [1, 5, 6, 7]], id="contiguous per slot"),
        pytest.param(Gathered([0, 2, 5]), [[0, 1, 2, 3, 4]] * 2, id="gathered"),
        # 8 tokens, chunks of 2, logits 4..6 predict the response 5..7: logits 4, 5 are rank 1's, logit 6 rank 0's.
        pytest.param(ZigzagResponse([8], [3]), [[2], [0, 1]], id="response"),
        # The same padded to 12: chunks of 3, logits 4 and 5 lie in chunk 1 (rank 1), logit 6 in chunk 2 (rank 1).
        pytest.param(ZigzagResponse([8], [3], [12]), [[], [0, 1, 2]], id="response, padded row"),
    ],
)
def test_literal_vectors(layout: Layout, expected: list[list[int]]) -> None:
    assert indices(layout, 2) == expected


def test_integers_of_any_kind_are_accepted() -> None:
    class NumpyLike:  # NumPy's ints are no int, but have __index__
        def __index__(self) -> int:
            return 8

    expected = indices(ZigzagTHD([0, 8, 16]), 2)
    for cu in ((0, 8, 16), torch.tensor([0, 8, 16], dtype=torch.int32), [0, NumpyLike(), 16]):
        assert indices(ZigzagTHD(cu), 2) == expected


# --- against the independent cut

sizes = st.lists(st.integers(0, 5), max_size=6)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(sizes, st.sampled_from(CP_SIZES))
def test_packed_layouts_hold_what_a_literal_cut_holds(units: list[int], cp_size: int) -> None:
    lengths = [unit * 2 * cp_size for unit in units]
    cu = [0, *itertools.accumulate(lengths)]
    slots = padded_slots(lengths, lengths)
    for layout, cut in [
        (ZigzagTHD(cu), zigzag),
        (Contiguous(cu), contiguous),
        (Contiguous(cu, per_slot=True), contiguous_per_slot),
    ]:
        flat = [[cu[token[0]] + token[1] for token in cut(slots, r, cp_size) if token] for r in range(cp_size)]
        assert indices(layout, cp_size) == flat
        assert sorted(itertools.chain(*flat)) == list(range(layout.total_tokens)), "not a partition"


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(CP_SIZES))
def test_bshd_holds_what_a_literal_cut_holds(rows: int, unit: int, cp_size: int) -> None:
    length = unit * 2 * cp_size
    slots = padded_slots([length] * rows, [length] * rows)
    expected = [[token[0] * length + token[1] for token in zigzag(slots, r, cp_size) if token] for r in range(cp_size)]
    assert indices(ZigzagBSHD(rows, length), cp_size) == expected
    assert sorted(itertools.chain(*expected)) == list(range(rows * length))


@st.composite
def responses(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Total, response and padded lengths of a few samples."""
    pairs = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 17)), max_size=5))
    totals = [prompt + response for prompt, response in pairs]
    row = max(totals, default=0) + draw(st.integers(0, 20))
    return totals, [response for _, response in pairs], draw(st.sampled_from([totals, [row] * len(totals)]))


@settings(deadline=None, derandomize=True, max_examples=120)
@given(responses(), st.sampled_from(CP_SIZES))
def test_response_layout_follows_slimes_rule(batch: tuple[list[int], list[int], list[int]], cp_size: int) -> None:
    totals, lengths, padded = batch
    starts = [0, *itertools.accumulate(lengths)]
    expected = [
        [starts[token[0]] + token[1] for token in response_only(*batch, r, cp_size) if token] for r in range(cp_size)
    ]
    assert indices(ZigzagResponse(totals, lengths, padded), cp_size) == expected
    assert sorted(itertools.chain(*expected)) == list(range(sum(lengths))), "not a partition"


# --- where the masks lie


@pytest.mark.parametrize(
    ("layout", "lengths", "expected"),
    [
        pytest.param(ZigzagTHD([0, 4, 12]), [4, 8], [0, 4], id="padded masks"),
        pytest.param(ZigzagTHD([0, 4, 12], [3, 5]), [3, 5], [0, 4], id="unpadded masks"),
        pytest.param(ZigzagTHD([0, 4, 12], [3, 5]), [3, 8], [0, 4], id="both kinds"),
        pytest.param(ZigzagTHD([0, 4, 12, 12, 12]), [4, 8], [0, 4], id="repeated ends hold no sample"),
        pytest.param(ZigzagTHD([0, 0, 4, 4, 12]), [4, 8], [0, 4], id="zero-length slots hold no sample"),
        pytest.param(ZigzagTHD([0, 0, 4, 4, 12]), [0, 4, 0, 8], [0, 0, 4, 4], id="or an empty one"),
        pytest.param(ZigzagTHD([0, 4, 12, 20], filler_slots=1), [4, 8], [0, 4], id="filler slot"),
        pytest.param(ZigzagTHD([0, 4, 12, 20, 20], filler_slots=2), [4], [0], id="filler slots before repeated ends"),
        pytest.param(ZigzagTHD([0]), [], [], id="no slot"),
        pytest.param(ZigzagTHD([0, 8], filler_slots=1), [], [], id="filler alone"),
        pytest.param(ZigzagBSHD(2, 8), [8, 8], [0, 8], id="rows"),
        pytest.param(ZigzagBSHD(2, 8, [3, 0]), [3, 0], [0, 8], id="rows, unpadded masks"),
        pytest.param(ZigzagResponse([8, 5], [3, 4]), [3, 4], [0, 3], id="responses"),
        pytest.param(ZigzagResponse([8, 5], [0, 4]), [0, 4], [0, 0], id="empty response"),
    ],
)
def test_mask_starts(layout: Layout, lengths: list[int], expected: list[int]) -> None:
    assert layout.mask_starts(lengths) == expected


# --- refusals, each beside its nearest legal neighbour


def cut(layout: Layout, cp_size: int = 2) -> Call:
    return lambda: layout.local_indices(0, cp_size)


def fit(layout: Layout, *lengths: int) -> Call:
    return lambda: Samples(masks(*lengths), layout=layout)


REFUSALS: dict[str, Refusal] = {
    "slot not divisible, the first of two": (
        cut(ZigzagTHD([0, 6, 16])),
        ValueError,
        r"slot 0 has 6 tokens.*multiple of 2 \* cp_size = 4",
        cut(ZigzagTHD([0, 8, 16])),
    ),
    "slot not divisible, the last": (
        cut(ZigzagTHD([0, 8, 8, 14])),
        ValueError,
        "slot 2 has 6 tokens",
        cut(ZigzagTHD([0, 8, 8, 16])),
    ),
    "slot divisible for a smaller cp_size only": (
        cut(ZigzagTHD([0, 4]), 4),
        ValueError,
        "cp_size = 8",
        cut(ZigzagTHD([0, 4]), 2),
    ),
    "odd slot": (cut(ZigzagTHD([0, 7]), 2), ValueError, "has 7 tokens", cut(ZigzagTHD([0, 7]), 1)),
    "row not divisible": (cut(ZigzagBSHD(2, 6)), ValueError, "row 0 has 6 tokens", cut(ZigzagBSHD(2, 8))),
    "buffer not divisible": (
        cut(Contiguous([0, 3])),
        ValueError,
        "packed buffer has 3 tokens.*multiple of cp_size = 2",
        cut(Contiguous([0, 3, 4])),
    ),
    "slot not divisible, contiguous": (
        cut(Contiguous([0, 3, 4], per_slot=True)),
        ValueError,
        "slot 0 has 3 tokens",
        cut(Contiguous([0, 4, 6], per_slot=True)),
    ),
    "cu_seqlens without the leading 0": (
        lambda: ZigzagTHD([8, 16]),
        ValueError,
        r"\[8, 16\]: it must begin with 0",
        lambda: ZigzagTHD([0, 8, 16]),
    ),
    "cu_seqlens empty": (lambda: ZigzagTHD([]), ValueError, "begin with 0", lambda: ZigzagTHD([0])),
    "cu_seqlens decreasing": (
        lambda: Gathered([0, 8, 4]),
        ValueError,
        r"\[0, 8, 4\]: it must not decrease",
        lambda: Gathered([0, 8, 8]),
    ),
    "cu_seqlens of floats": (
        lambda: ZigzagTHD([0, 8.0]),
        TypeError,
        r"holds 8.0 \(float\).*whole numbers",
        lambda: ZigzagTHD([0, 8]),
    ),
    "cu_seqlens of bools": (lambda: ZigzagTHD([False, True]), TypeError, "holds False", lambda: ZigzagTHD([0, 1])),
    "cu_seqlens a float tensor": (
        lambda: ZigzagTHD(torch.tensor([0.0, 8.0])),
        TypeError,
        r"float32 of shape \(2,\): it must be a 1-D tensor of ints",
        lambda: ZigzagTHD(torch.tensor([0, 8])),
    ),
    "cu_seqlens a bool tensor": (
        lambda: ZigzagTHD(torch.tensor([False, True])),
        TypeError,
        r"bool of shape \(2,\)",
        lambda: ZigzagTHD(torch.tensor([0, 1]).short()),
    ),
    "cu_seqlens 2-D": (
        lambda: ZigzagTHD(torch.tensor([[0, 8]])),
        TypeError,
        r"shape \(1, 2\)",
        lambda: ZigzagTHD(torch.tensor([[0, 8]])[0]),
    ),
    "too few masks": (
        fit(ZigzagTHD([0, 4, 8]), 4),
        ValueError,
        "1 loss masks for 2 slots",
        fit(ZigzagTHD([0, 4, 8]), 4, 4),
    ),
    "too many masks": (
        fit(ZigzagTHD([0, 4, 8]), 4, 4, 4),
        ValueError,
        "3 loss masks for 2 slots",
        fit(ZigzagTHD([0, 4, 8, 8]), 4, 4, 0),
    ),
    "mask for a filler slot": (
        fit(ZigzagTHD([0, 4, 8], filler_slots=1), 4, 4),
        ValueError,
        r"2 loss masks for 1 slots with a sample \(filler_slots=1\)",
        fit(ZigzagTHD([0, 4, 8], filler_slots=1), 4),
    ),
    "filler not said": (
        fit(ZigzagTHD([0, 4, 8]), 4),
        ValueError,
        "say so with filler_slots",
        fit(ZigzagTHD([0, 4, 8], filler_slots=1), 4),
    ),
    "filler_slots negative": (
        lambda: ZigzagTHD([0, 4], filler_slots=-1),
        ValueError,
        "filler_slots is -1",
        lambda: ZigzagTHD([0, 4], filler_slots=0),
    ),
    "filler_slots a bool": (
        lambda: ZigzagTHD([0, 4], filler_slots=True),
        ValueError,
        "is True",
        lambda: ZigzagTHD([0, 4], filler_slots=1),
    ),
    "mask too short": (
        fit(ZigzagTHD([0, 4, 8]), 4, 3),
        ValueError,
        "mask of sample 1 has 3 entries.*slot's 4",
        fit(ZigzagTHD([0, 4, 8], [4, 3]), 4, 3),
    ),
    "mask too long": (
        fit(ZigzagTHD([0, 4, 8]), 5, 4),
        ValueError,
        "sample 0 has 5 entries",
        fit(ZigzagTHD([0, 5, 9]), 5, 4),
    ),
    "mask of length 1": (fit(ZigzagTHD([0, 4]), 1), ValueError, "has 1 entries", fit(ZigzagTHD([0, 1]), 1)),
    "mask neither of the slot nor of the sample": (
        fit(ZigzagTHD([0, 8], [6]), 7),
        ValueError,
        "slot's 8 or its total_length's 6",
        fit(ZigzagTHD([0, 8], [6]), 8),
    ),
    "total_lengths of another number": (
        fit(ZigzagTHD([0, 4, 8], [4]), 4, 4),
        ValueError,
        "1 total_lengths for 2",
        fit(ZigzagTHD([0, 4, 8], [4, 4]), 4, 4),
    ),
    "total_length beyond its slot": (
        fit(ZigzagTHD([0, 4], [5]), 4),
        ValueError,
        "total_length 5 in a slot of 4",
        fit(ZigzagTHD([0, 4], [4]), 4),
    ),
    "total_length negative": (
        fit(ZigzagTHD([0, 4], [-1]), 4),
        ValueError,
        "total_length -1",
        fit(ZigzagTHD([0, 4], [0]), 0),
    ),
    "row missing": (fit(ZigzagBSHD(2, 4), 4), ValueError, "1 loss masks for 2", fit(ZigzagBSHD(1, 4), 4)),
    "row shorter than its sample": (
        fit(ZigzagBSHD(1, 4), 5),
        ValueError,
        "sample 0 has 5 entries: it must have its slot's 4",
        fit(ZigzagBSHD(1, 8, [5]), 5),
    ),
    "batch_size 0": (lambda: ZigzagBSHD(0, 8), ValueError, "batch_size is 0", lambda: ZigzagBSHD(1, 8)),
    "batch_size a float": (lambda: ZigzagBSHD(1.0, 8), ValueError, "batch_size is 1.0", lambda: ZigzagBSHD(1, 8)),
    "seq_length 0": (lambda: ZigzagBSHD(1, 0), ValueError, "seq_length is 0", lambda: ZigzagBSHD(1, 1)),
    "response as long as the sample": (
        lambda: ZigzagResponse([8, 4], [3, 4]),
        ValueError,
        "sample 1 has response_length 4 and total_length 4",
        lambda: ZigzagResponse([8, 5], [3, 4]),
    ),
    "response negative": (
        lambda: ZigzagResponse([8], [-1]),
        ValueError,
        "response_length -1",
        lambda: ZigzagResponse([8], [0]),
    ),
    "padded length below the sample's": (
        lambda: ZigzagResponse([8], [3], [7]),
        ValueError,
        "padded length 7 and total_length 8: tokens would be dropped",
        lambda: ZigzagResponse([8], [3], [8]),
    ),
    "response_lengths of another number": (
        lambda: ZigzagResponse([8, 8], [3]),
        ValueError,
        "2 total_lengths, 1 response_lengths",
        lambda: ZigzagResponse([8, 8], [3, 3]),
    ),
    "padded_lengths of another number": (
        lambda: ZigzagResponse([8], [3], [8, 8]),
        ValueError,
        "2 padded_lengths",
        lambda: ZigzagResponse([8], [3], [9]),
    ),
    "response_lengths of floats": (
        lambda: ZigzagResponse([8], [3.5]),
        TypeError,
        "3.5",
        lambda: ZigzagResponse([8], [3]),
    ),
    "mask of the whole sample for a response": (
        fit(ZigzagResponse([8], [3]), 8),
        ValueError,
        "mask of sample 0 has 8 entries.*response_length's 3",
        fit(ZigzagResponse([8], [3]), 3),
    ),
    "mask missing for a response": (
        fit(ZigzagResponse([8, 8], [3, 3]), 3),
        ValueError,
        "1 loss masks for 2",
        fit(ZigzagResponse([8, 8], [3, 3]), 3, 3),
    ),
    "cp_rank too large": (
        lambda: ZigzagTHD([0, 8]).local_indices(2, 2),
        ValueError,
        "cp_rank=2, cp_size=2",
        lambda: ZigzagTHD([0, 8]).local_indices(1, 2),
    ),
    "cp_rank negative": (
        lambda: Contiguous([0, 8]).local_indices(-1, 2),
        ValueError,
        "cp_rank=-1",
        cut(Contiguous([0, 8])),
    ),
    "cp_size 0": (lambda: Gathered([0, 8]).local_indices(0, 0), ValueError, "cp_size=0", cut(Gathered([0, 8]), 1)),
    "cp_rank a float": (
        lambda: ZigzagResponse([8], [3]).local_indices(0.0, 2),
        TypeError,
        "cp_rank=0.0",
        cut(ZigzagResponse([8], [3])),
    ),
    "cp_size a bool": (
        lambda: Gathered([0, 8]).local_indices(0, True),
        TypeError,
        "cp_size=True",
        cut(Gathered([0, 8]), 1),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
