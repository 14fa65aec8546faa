"""Which positions a context-parallel (CP) rank holds: literal vectors, an independent cut, and what is refused."""

import doctest
import functools
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


THD, TWO = ZigzagTHD([0, 4]), ZigzagTHD([0, 4, 8])
WITH_FILLER = ZigzagTHD([0, 4, 8], filler_slots=1)

#: A cut that cannot be, its error, and the nearest that can.
CUTS = [
    (cut(ZigzagTHD([0, 6, 16])), r"slot 0 has 6 tokens.*multiple of 2 \* cp_size = 4", cut(ZigzagTHD([0, 8, 16]))),
    (cut(ZigzagTHD([0, 8, 8, 14])), "slot 2 has 6 tokens", cut(ZigzagTHD([0, 8, 8, 16]))),
    (cut(THD, 4), "cp_size = 8", cut(THD, 2)),
    (cut(ZigzagTHD([0, 7]), 2), "has 7 tokens", cut(ZigzagTHD([0, 7]), 1)),
    (cut(ZigzagBSHD(2, 6)), "row 0 has 6 tokens", cut(ZigzagBSHD(2, 8))),
    (cut(Contiguous([0, 3])), "packed buffer has 3 tokens.*multiple of cp_size = 2", cut(Contiguous([0, 3, 4]))),
    (
        cut(Contiguous([0, 3, 4], per_slot=True)),
        "slot 0 has 3 tokens.*multiple of cp_size = 2",
        cut(Contiguous([0, 4, 6], per_slot=True)),
    ),
]
#: Masks that do not fit a layout, the error, and the nearest that do.
FITS = [
    (fit(TWO, 4), "1 loss masks for 2 slots.*say so with filler_slots", fit(TWO, 4, 4)),
    (fit(TWO, 4), r"\(filler_slots=0\)", fit(WITH_FILLER, 4)),
    (fit(TWO, 4, 4, 4), "3 loss masks for 2 slots", fit(ZigzagTHD([0, 4, 8, 8]), 4, 4, 0)),
    (fit(WITH_FILLER, 4, 4), r"2 loss masks for 1 slots with a sample \(filler_slots=1\)", fit(WITH_FILLER, 4)),
    (fit(TWO, 4, 3), "mask of sample 1 has 3 entries.*slot's 4", fit(ZigzagTHD([0, 4, 8], [4, 3]), 4, 3)),
    (fit(TWO, 5, 4), "sample 0 has 5 entries", fit(ZigzagTHD([0, 5, 9]), 5, 4)),
    (fit(THD, 1), "has 1 entries", fit(ZigzagTHD([0, 1]), 1)),
    (fit(ZigzagTHD([0, 8], [6]), 7), "slot's 8 or its total_length's 6", fit(ZigzagTHD([0, 8], [6]), 8)),
    (fit(ZigzagTHD([0, 4, 8], [4]), 4, 4), "1 total_lengths for 2", fit(ZigzagTHD([0, 4, 8], [4, 4]), 4, 4)),
    (fit(ZigzagTHD([0, 4], [5]), 4), "total_length 5 in a slot of 4", fit(ZigzagTHD([0, 4], [4]), 4)),
    (fit(ZigzagTHD([0, 4], [-1]), 4), "total_length -1", fit(ZigzagTHD([0, 4], [0]), 0)),
    (fit(ZigzagBSHD(2, 4), 4), "1 loss masks for 2", fit(ZigzagBSHD(1, 4), 4)),
    (fit(ZigzagBSHD(1, 4), 5), "sample 0 has 5 entries: it must have its slot's 4", fit(ZigzagBSHD(1, 8, [5]), 5)),
    (
        fit(ZigzagResponse([8], [3]), 8),
        "mask of sample 0 has 8 entries.*response_length's 3",
        fit(ZigzagResponse([8], [3]), 3),
    ),
    (fit(ZigzagResponse([8, 8], [3, 3]), 3), "1 loss masks for 2", fit(ZigzagResponse([8, 8], [3, 3]), 3, 3)),
]
#: A layout, arguments it refuses, the error, and the nearest that it takes.
ARGUMENTS = [
    (ZigzagTHD, ([8, 16],), ValueError, r"\[8, 16\]: it must begin with 0", ([0, 8, 16],)),
    (ZigzagTHD, ([],), ValueError, "begin with 0", ([0],)),
    (Gathered, ([0, 8, 4],), ValueError, r"\[0, 8, 4\]: it must not decrease", ([0, 8, 8],)),
    (ZigzagTHD, ([0, 8.0],), TypeError, r"holds 8.0 \(float\).*whole numbers", ([0, 8],)),
    (ZigzagTHD, ([False, True],), TypeError, "holds False", ([0, 1],)),
    (ZigzagTHD, (8,), TypeError, r"cu_seqlens_padded is 8 \(int\)", ((0, 8),)),
    (
        ZigzagTHD,
        (torch.tensor([0.0, 8.0]),),
        TypeError,
        r"float32 of shape \(2,\): it must be a 1-D tensor of ints",
        (torch.tensor([0, 8]),),
    ),
    (ZigzagTHD, (torch.tensor([False, True]),), TypeError, r"bool of shape \(2,\)", (torch.tensor([0, 1]).short(),)),
    (ZigzagTHD, (torch.tensor([[0, 8]]),), TypeError, r"shape \(1, 2\)", (torch.tensor([[0, 8]])[0],)),
    (ZigzagTHD, ([0, 4], None, -1), ValueError, "filler_slots is -1", ([0, 4], None, 0)),
    (ZigzagTHD, ([0, 4], None, True), ValueError, "filler_slots is True", ([0, 4], None, 1)),
    (ZigzagBSHD, (0, 8), ValueError, "batch_size is 0", (1, 8)),
    (ZigzagBSHD, (1.0, 8), ValueError, "batch_size is 1.0", (1, 8)),
    (ZigzagBSHD, (1, 0), ValueError, "seq_length is 0", (1, 1)),
    (
        ZigzagResponse,
        ([8, 4], [3, 4]),
        ValueError,
        "sample 1 has response_length 4 and total_length 4",
        ([8, 5], [3, 4]),
    ),
    (ZigzagResponse, ([8], [-1]), ValueError, "response_length -1", ([8], [0])),
    (
        ZigzagResponse,
        ([8], [3], [7]),
        ValueError,
        "padded length 7 and total_length 8: tokens would be dropped",
        ([8], [3], [8]),
    ),
    (ZigzagResponse, ([8, 8], [3]), ValueError, "2 total_lengths, 1 response_lengths", ([8, 8], [3, 3])),
    (ZigzagResponse, ([8], [3], [8, 8]), ValueError, "2 padded_lengths", ([8], [3], [9])),
    (ZigzagResponse, ([8], [3.5]), TypeError, "response_lengths holds 3.5", ([8], [3])),
]
#: A CP place that each layout refuses, the error, and the nearest that it takes.
CP_PLACES = [
    ((2, 2), ValueError, "cp_rank=2, cp_size=2", (1, 2)),
    ((-1, 2), ValueError, "cp_rank=-1", (0, 2)),
    ((0, 0), ValueError, "cp_size=0", (0, 1)),
    ((0.0, 2), TypeError, "cp_rank=0.0", (0, 2)),
    ((0, True), TypeError, "cp_size=True", (0, 1)),
]
EACH = [ZigzagTHD([0, 8]), ZigzagBSHD(1, 8), Contiguous([0, 8]), Gathered([0, 8]), ZigzagResponse([8], [3])]

REFUSALS: dict[str, Refusal] = {
    **{f"{i}: {text}": (bad, ValueError, text, good) for i, (bad, text, good) in enumerate(CUTS + FITS)},
    **{
        f"{layout.__name__}, {text}": (functools.partial(layout, *bad), error, text, functools.partial(layout, *good))
        for layout, bad, error, text, good in ARGUMENTS
    },
    **{
        f"{type(layout).__name__}, {text}": (
            functools.partial(layout.local_indices, *bad),
            error,
            text,
            functools.partial(layout.local_indices, *good),
        )
        for layout, (bad, error, text, good) in itertools.product(EACH, CP_PLACES)
    },
    "a gather that goes backward in another way": (
        lambda: Gathered([0, 8], backward="mean"),  # type: ignore[arg-type]
        ValueError,
        "'mean': there is no such backward of a gather",
        lambda: Gathered([0, 8], backward="slice"),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
