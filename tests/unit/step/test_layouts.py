"""Which positions a context-parallel (CP) rank holds: literal vectors, and what is refused.

The cut that the oracle makes of every layout is compared in test_samples.py.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal_tests, refusals

from megatron_rl_loss import Contiguous, Gathered, Layout, Samples, ZigzagBSHD, ZigzagResponse, ZigzagTHD


class NumpyLike:
    """NumPy's ints are no int, but have __index__."""

    def __index__(self) -> int:
        return 8


TE = [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]  # Transformer Engine's own expected vector


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        *((ZigzagTHD(cu), TE) for cu in ([0, 8, 16], (0, 8, 16), torch.tensor([0, 8, 16]).int(), [0, NumpyLike(), 16])),
        (ZigzagBSHD(1, 16), [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),  # get_batch_on_this_cp_rank
        (ZigzagTHD([0, 4, 4, 12, 12, 12]), [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
        (ZigzagTHD([0, 6]), [[0, 5], [1, 4], [2, 3]]),
        (ZigzagTHD([0, 16]), [[i, 15 - i] for i in range(8)]),
        # 8 tokens, chunks of 2, logits 4..6 predict the response 5..7: logits 4, 5 are rank 1's, logit 6 rank 0's.
        (ZigzagResponse([8], [3]), [[2], [0, 1]]),
        # The same padded to 12: chunks of 3, logits 4 and 5 lie in chunk 1 (rank 1), logit 6 in chunk 2 (rank 1).
        (ZigzagResponse([8], [3], [12]), [[], [0, 1, 2]]),
    ],
)
def test_literal_vectors(layout: Layout, expected: list[list[int]]) -> None:
    held = [layout.local_indices(rank, len(expected)) for rank in range(len(expected))]
    assert [positions.tolist() for positions in held] == expected
    assert {positions.dtype for positions in held} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("layout", "lengths", "expected"),
    [
        (ZigzagTHD([0, 4, 12], [3, 5]), [3, 8], [0, 4]),  # an unpadded mask, and a padded one
        (ZigzagTHD([0, 4, 12, 12, 12]), [4, 8], [0, 4]),  # repeated ends hold no sample
        (ZigzagTHD([0, 0, 4, 4, 12]), [4, 8], [0, 4]),  # slots of length 0 hold none
        (ZigzagTHD([0, 0, 4, 4, 12]), [0, 4, 0, 8], [0, 0, 4, 4]),  # or an empty one
        (ZigzagTHD([0, 4, 12, 20, 20], filler_slots=2), [4], [0]),  # fillers before repeated ends
        (ZigzagTHD([0, 8], filler_slots=1), [], []),
        (ZigzagTHD([0]), [], []),
        (ZigzagBSHD(2, 8, [3, 0]), [3, 0], [0, 8]),
        (ZigzagResponse([8, 5], [0, 4]), [0, 4], [0, 0]),
    ],
)
def test_mask_starts(layout: Layout, lengths: list[int], expected: list[int]) -> None:
    assert layout.mask_starts(lengths) == expected


# --- refusals, each beside its nearest legal neighbour


def fit(layout: Layout, *lengths: int) -> Any:
    return Samples([torch.ones(length) for length in lengths], layout=layout)


def cut(layout: Layout, cp_rank: Any = 0, cp_size: Any = 2) -> Any:
    return layout.local_indices(cp_rank, cp_size)


THD, TWO = ZigzagTHD([0, 4]), ZigzagTHD([0, 4, 8])
WITH_FILLER = ZigzagTHD([0, 4, 8], filler_slots=1)
ROWS = ZigzagBSHD(3, 4, [4, 4], 1)
PER_SLOT = [Contiguous(ends, per_slot=True) for ends in ([0, 3, 4], [0, 4, 6])]
EACH = [ZigzagTHD([0, 8]), ZigzagBSHD(1, 8), Contiguous([0, 8]), Gathered([0, 8]), ZigzagResponse([8], [3])]
#: A CP place that each layout refuses, the error, and the nearest that it takes.
WRONG_RANKS = [((2, 2), "cp_rank=2, cp_size=2", (1, 2)), ((-1, 2), "cp_rank=-1", (0, 2)), ((0, 0), "cp_size=0", (0, 1))]
NO_INTS = [((0.0, 2), "cp_rank=0.0", (0, 2)), ((0, True), "cp_size=True", (0, 1))]


def at_each(places: list[Any]) -> list[Any]:
    return [((one, *bad), text, (one, *good)) for one in EACH for bad, text, good in places]


REFUSALS = {
    **refusals(
        cut,
        ((ZigzagTHD([0, 6, 16]),), r"slot 0 has 6 tokens.*multiple of 2 \* cp_size = 4", (ZigzagTHD([0, 8, 16]),)),
        ((ZigzagTHD([0, 8, 8, 14]),), "slot 2 has 6 tokens", (ZigzagTHD([0, 8, 8, 16]),)),
        ((THD, 0, 4), "cp_size = 8", (THD, 0, 2)),
        ((ZigzagTHD([0, 7]), 0, 2), "has 7 tokens", (ZigzagTHD([0, 7]), 0, 1)),
        ((ZigzagBSHD(2, 6),), "row 0 has 6 tokens", (ZigzagBSHD(2, 8),)),
        ((Contiguous([0, 3]),), "packed buffer has 3 tokens.*multiple of cp_size = 2", (Contiguous([0, 3, 4]),)),
        ((PER_SLOT[0],), "slot 0 has 3 tokens.*multiple of cp_size = 2", (PER_SLOT[1],)),
        *at_each(WRONG_RANKS),
    ),
    **refusals(cut, *at_each(NO_INTS), error=TypeError),
    **refusals(
        fit,
        ((TWO, 4), "1 loss masks for 2 slots.*say so with filler_slots", (TWO, 4, 4)),
        ((TWO, 4), r"\(filler_slots=0\)", (WITH_FILLER, 4)),
        ((TWO, 4, 4, 4), "3 loss masks for 2 slots", (ZigzagTHD([0, 4, 8, 8]), 4, 4, 0)),
        ((WITH_FILLER, 4, 4), r"2 loss masks for 1 slots with a sample \(filler_slots=1\)", (WITH_FILLER, 4)),
        ((TWO, 4, 3), "mask of sample 1 has 3 entries.*slot's 4", (ZigzagTHD([0, 4, 8], [4, 3]), 4, 3)),
        ((TWO, 5, 4), "sample 0 has 5 entries", (ZigzagTHD([0, 5, 9]), 5, 4)),
        ((ZigzagTHD([0, 8], [6]), 7), "slot's 8 or its total_length's 6", (ZigzagTHD([0, 8], [6]), 8)),
        ((ZigzagTHD([0, 4, 8], [4]), 4, 4), "1 total_lengths for 2", (ZigzagTHD([0, 4, 8], [4, 4]), 4, 4)),
        ((ZigzagTHD([0, 4], [5]), 4), "total_length 5 in a slot of 4", (ZigzagTHD([0, 4], [4]), 4)),
        ((ZigzagTHD([0, 4], [-1]), 4), "total_length -1", (ZigzagTHD([0, 4], [0]), 0)),
        ((ZigzagBSHD(2, 4), 4), "1 loss masks for 2", (ROWS, 4, 4)),
        ((ZigzagBSHD(1, 4), 5), "sample 0 has 5 entries: it must have its slot's 4", (ZigzagBSHD(1, 8, [5]), 5)),
        ((EACH[4], 8), "mask of sample 0 has 8 entries.*response_length's 3", (EACH[4], 3)),
        ((ZigzagResponse([8, 8], [3, 3]), 3), "1 loss masks for 2", (ZigzagResponse([8, 8], [3, 3]), 3, 3)),
    ),
    **refusals(
        ZigzagTHD,
        (([8, 16],), r"\[8, 16\]: it must begin with 0", ([0, 8, 16],)),
        (([],), "begin with 0", ([0],)),
        (([0, 8, 4],), r"\[0, 8, 4\]: it must not decrease", ([0, 8, 8],)),
        (([0, 4], None, -1), "filler_slots is -1", ([0, 4], None, 0)),
        (([0, 4], None, True), "filler_slots is True", ([0, 4], None, 1)),
    ),
    **refusals(
        ZigzagTHD,
        (([0, 8.0],), r"holds 8.0 \(float\).*whole numbers", ([0, 8],)),
        (([False, True],), "holds False", ([0, 1],)),
        ((8,), r"cu_seqlens_padded is 8 \(int\)", ((0, 8),)),
        ((torch.tensor([0.0, 8]),), r"float32 of shape \(2,\): it must be a 1-D", (torch.tensor([0, 8]),)),
        ((torch.tensor([False, True]),), r"bool of shape \(2,\)", (torch.tensor([0, 1]).short(),)),
        ((torch.tensor([[0, 8]]),), r"shape \(1, 2\)", (torch.tensor([[0, 8]])[0],)),
        error=TypeError,
    ),
    **refusals(
        ZigzagBSHD,
        ((0, 8), "batch_size is 0", (1, 8)),
        ((1.0, 8), "batch_size is 1.0", (1, 8)),
        ((1, 0), "seq_length is 0", (1, 1)),
    ),
    **refusals(
        ZigzagResponse,
        (([8, 4], [3, 4]), "sample 1 has response_length 4 and total_length 4", ([8, 5], [3, 4])),
        (([8], [-1]), "response_length -1", ([8], [0])),
        (([8], [3], [7]), "padded length 7 and total_length 8: tokens would be dropped", ([8], [3], [8])),
        (([8, 8], [3]), "2 total_lengths, 1 response_lengths", ([8, 8], [3, 3])),
        (([8], [3], [8, 8]), "2 padded_lengths", ([8], [3], [9])),
    ),
    **refusals(ZigzagResponse, (([8], [3.5]), "response_lengths holds 3.5", ([8], [3])), error=TypeError),
    **refusals(
        functools.partial(Gathered, [0, 8]),
        ({"backward": "mean"}, "'mean': there is no such backward of a gather.*one of sum, slice", {"backward": "sum"}),
    ),
}


test_refusals = refusal_tests(REFUSALS)
