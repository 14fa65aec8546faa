"""Positions that a context-parallel (CP) rank holds: literal vectors, and what is refused.

Every layout is one of `placements`, whose oracle says token by token what a rank holds.
"""

import functools
from abc import ABCMeta
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from placements import PLACES, Place, every_layout, laid_out, padded_masks
from refusals import refusal_tests, refusals
from repository import ROOT

import megatron_rl_loss
from megatron_rl_loss import Contiguous, Gathered, PrefixTree, Samples, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.audit.simulation import DRAWN_LAYOUTS
from megatron_rl_loss.core import layouts
from megatron_rl_loss.core.layouts import Layout, Slots
from megatron_rl_loss.core.samples import LocalTokens

TE = [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]  # Transformer Engine's own expected vector


def positions(layout: Layout, cp_rank: Any, cp_size: Any) -> list[int]:
    return [at for piece in layout.pieces(cp_rank, cp_size) for at in range(*piece)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        *((ZigzagTHD(cu), TE) for cu in ([0, 8, 16], (0, 8, 16), torch.tensor([0, 8, 16]).int(), np.array([0, 8, 16]))),
        (ZigzagBSHD(1, 16), [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),  # get_batch_on_this_cp_rank
        (ZigzagTHD([0, 4, 4, 12, 12, 12]), [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
        (ZigzagTHD([0, 16]), [[i, 15 - i] for i in range(8)]),
        # 8 tokens, chunks of 2, logits 4..6 predict the response 5..7: logits 4, 5 are rank 1's, logit 6 rank 0's.
        (ZigzagResponse([8], [3]), [[2], [0, 1]]),
        # The same padded to 12: chunks of 3, logits 4 and 5 lie in chunk 1 (rank 1), logit 6 in chunk 2 (rank 1).
        (ZigzagResponse([8], [3], [12]), [[], [0, 1, 2]]),
    ],
)
def test_literal_vectors(layout: Layout, expected: list[list[int]]) -> None:
    assert [positions(layout, rank, len(expected)) for rank in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("layout", "lengths", "expected"),
    [
        (ZigzagTHD([0, 4, 12], [3, 5]), [3, 8], [0, 4]),  # an unpadded mask, and a padded one
        (ZigzagTHD([0, 0, 4, 4, 12, 12]), [4, 8], [0, 4]),  # slots of length 0 hold none
        (ZigzagTHD([0, 0, 4, 4, 12]), [0, 4, 0, 8], [0, 0, 4, 4]),  # or an empty one
        (ZigzagTHD([0, 4, 12, 20, 20], filler_slots=2), [4], [0]),  # fillers before repeated ends
        (ZigzagTHD([0]), [], []),
        (ZigzagBSHD(2, 8, [3, 0]), [3, 0], [0, 8]),
        (ZigzagResponse([8, 5], [0, 4]), [0, 4], [0, 0]),
    ],
)
def test_mask_starts(layout: Layout, lengths: list[int], expected: list[int]) -> None:
    assert layout.mask_starts(lengths) == expected


#: The package's layouts; `Layout`, `Slots` and `Zigzag` are bases of others.
DEFINED = [layout for layout in vars(layouts).values() if isinstance(layout, ABCMeta) and issubclass(layout, Layout)]
DEFINED.append(PrefixTree)  # in a room of its own
BASES = {base for layout in DEFINED for base in layout.__mro__[1:]}
LAYOUTS = {layout.__name__: layout for layout in DEFINED if layout not in BASES}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_placed_public_and_on_its_page(name: str) -> None:
    placed = {type(laid_out(place, (4, 2), 2).layout) for place in PLACES}
    missing = {
        "a function that places it, in PLACES of tests/support/placements.py": LAYOUTS[name] not in placed,
        f"from {LAYOUTS[name].__module__} import {name} as {name}, in megatron_rl_loss/__init__.pyi": (
            name not in vars(megatron_rl_loss)["__all__"]
        ),
        "a row in docs/data.md, which layout": f"`{name}(" not in (ROOT / "docs/data.md").read_text(),
    }
    assert not any(missing.values()), f"{name}: add {'; '.join(what for what in missing if missing[what])}"


def test_every_layout_with_a_cut_is_drawn_by_it() -> None:
    """`check_loss` finds layouts in the table alone; the rows of a batch are drawn as packed ones are."""
    drawn = {**DRAWN_LAYOUTS, "rows": ZigzagBSHD}
    assert {cut for cut, layout in DRAWN_LAYOUTS.items() if layout.cut != cut} == set()
    assert set(drawn.values()) == {layout for layout in LAYOUTS.values() if layout.cut or layout is ZigzagBSHD}


@every_layout
def test_a_rank_holds_the_oracles_tokens(place: Place, cp_size: int) -> None:
    lengths = (5, 1, 3, 8)
    placed = laid_out(place, lengths, cp_size)
    chosen = [oracle.sample([0.0] * length, [1] * length) for length in lengths]
    samples = Samples(padded_masks(chosen, placed), layout=placed.layout)
    tokens: list[oracle.Token] = [None] * samples.total_tokens
    for number, (start, length) in enumerate(zip(samples.mask_starts, lengths, strict=True)):
        tokens[start : start + length] = [(number, t) for t in range(length)]
    for rank, held in enumerate(placed.held):
        assert [tokens[position] for position in samples.local(rank, cp_size).positions] == held


OF_PIECES = [layout for layout in LAYOUTS.values() if issubclass(layout, Slots) and not layout.is_whole]


@pytest.mark.parametrize("layout", OF_PIECES)
def test_a_slot_that_ranks_cannot_share_evenly_is_refused(layout: Any) -> None:
    with pytest.raises(ValueError, match=r"has 7 tokens: it must be a multiple of .*cp_size = "):
        layout.drawn([0, 7], [7]).pieces(0, 2)


class Own(Layout):
    """A user's layout of 8 tokens, right or wrong: the pieces of each of two ranks."""

    total_tokens = 8

    def __init__(self, starts: Any, *pieces: list[tuple[int, ...]], whole: bool = False) -> None:
        self.starts, self.of_ranks, self.is_whole = starts, pieces, whole

    def mask_starts(self, mask_lengths: Any) -> Any:
        return self.starts

    def pieces(self, cp_rank: int, cp_size: int) -> Any:
        return self.of_ranks[cp_rank]


HALVES = [(0, 2), (2, 2), (4, 8)], [(2, 4)]


def own(starts: Any, first: Any = HALVES[0], second: Any = HALVES[1], whole: bool = False) -> LocalTokens:
    return Samples([[1] * 3] * 2, layout=Own(starts, first, second, whole=whole)).local(0, 2)


@pytest.mark.parametrize("starts", [(0, 4), torch.tensor([0, 4]).int(), np.array([0, 4], np.uint8)])
def test_a_users_layout(starts: Any) -> None:
    local = own(starts)
    assert local.mask.tolist() == [1, 1, 1, 1, 1, 0]
    assert local.sample_index.tolist() == [0, 0, 1, 1, 1, 1]
    assert own([0, 4], [(0, 8)], [(0, 8)], whole=True).copies == 2


def test_a_users_layout_by_strides() -> None:
    """Tokens of a strided piece, their samples, and the runs that a scan goes along; a stride that repeats a token."""
    for rank in range(2):
        local = Samples([[1, 0, 1]] * 2, layout=Own([0, 4], [(0, 4, 2), (4, 8, 2)], [(1, 8, 2)])).local(rank, 2)
        assert local.positions.tolist() == [rank, 2 + rank, 4 + rank, 6 + rank]
        assert local.mask.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0]][rank]
        assert local.counts.tolist() == [2, 2]
        assert local.runs == [(position, 1, k // 2) for k, position in enumerate(local.positions)]
    for pieces, text in (([(0, 8, 2)], "position 2 to 2 of 2"), ([(0, 8, 0)], "must be in order, apart")):
        with pytest.raises(ValueError, match=text):
            own([0, 4], pieces, [(1, 8)])


# --- refusals, each beside its nearest legal neighbour


def fit(layout: Layout, *lengths: int) -> Any:
    return Samples([torch.ones(length) for length in lengths], layout=layout)


THD, TWO = ZigzagTHD([0, 4]), ZigzagTHD([0, 4, 8])
WITH_FILLER, UNPADDED = ZigzagTHD([0, 4, 8], filler_slots=1), ZigzagTHD([0, 4, 8], [4, 3])
RESPONSE, LENGTH = ZigzagResponse([8], [3]), "must be as long as its slot or its total_length"
PER_SLOT = [Contiguous(ends, per_slot=True) for ends in ([0, 3, 4], [0, 4, 6])]
INTS, OUT = "must be a list of ints", r"Own puts .* must be in order, apart, and within the 8 tokens"

test_refusals = refusal_tests(
    {
        **refusals(
            positions,
            *(
                ((ZigzagTHD(bad), 0, 2), rf"slot {i} has 6 tokens.*multiple of 2 \* cp_size = 4", (TWO, 0, 2))
                for i, bad in ((0, [0, 6, 16]), (2, [0, 8, 8, 14]))
            ),
            ((ZigzagTHD([0, 7]), 0, 2), "has 7 tokens", (ZigzagTHD([0, 7]), 0, 1)),
            ((ZigzagBSHD(2, 6), 0, 2), "row 0 has 6 tokens", (ZigzagBSHD(2, 8), 0, 2)),
            ((Contiguous([0, 3]), 0, 2), "packed buffer has 3 tokens.*multiple of cp_size", (Contiguous([0, 4]), 0, 2)),
            ((PER_SLOT[0], 0, 2), "slot 0 has 3 tokens.*multiple of cp_size = 2", (PER_SLOT[1], 0, 2)),
            *(
                ((layout, rank, size), f"cp_rank={rank}, cp_size={size}", (layout, 0, 2))
                for layout in (ZigzagTHD([0, 8]), Gathered([0, 8]), RESPONSE)
                for rank, size in ((2, 2), (-1, 2), (0, 0))
            ),
        ),
        **refusals(
            positions,
            ((THD, 0.0, 2), "cp_rank=0.0", (THD, 0, 2)),
            ((RESPONSE, 0, True), "cp_size=True", (RESPONSE, 0, 1)),
            error=TypeError,
        ),
        **refusals(
            fit,
            ((TWO, 4), r"1 loss masks for 2 slots.*\(filler_slots=0\).*count them in filler_slots", (TWO, 4, 4)),
            ((TWO, 4, 4, 4), "3 loss masks for 2 slots", (ZigzagTHD([0, 4, 8, 8]), 4, 4, 0)),
            ((WITH_FILLER, 4, 4), r"2 loss masks for 1 slots with a sample \(filler_slots=1\)", (WITH_FILLER, 4)),
            ((TWO, 4, 3), f"sample 1: a mask of 3 entries, a slot of 4 tokens.*{LENGTH}", (UNPADDED, 4, 3)),
            ((ZigzagTHD([0, 8], [6]), 7), "a slot of 8 tokens, total_length 6", (ZigzagTHD([0, 8], [6]), 8)),
            ((ZigzagTHD([0, 4, 8], [4]), 4, 4), "1 total_lengths for 2", (UNPADDED, 4, 4)),
            ((ZigzagTHD([0, 4], [5]), 4), "total_length 5", (ZigzagTHD([0, 4], [4]), 4)),
            ((ZigzagTHD([0, 4], [-1]), 4), "total_length -1", (ZigzagTHD([0, 4], [0]), 0)),
            ((ZigzagBSHD(2, 4), 4), "1 loss masks for 2", (ZigzagBSHD(3, 4, [4, 4], 1), 4, 4)),
            ((RESPONSE, 8), "mask of sample 0 has 8 entries.*one per response token, 3", (RESPONSE, 3)),
            ((ZigzagResponse([8, 8], [3, 3]), 3), "1 loss masks for 2", (ZigzagResponse([8, 8], [3, 3]), 3, 3)),
        ),
        **refusals(
            ZigzagTHD,
            (([8, 16],), r"begins \[8, 16\]: it must begin with 0", ([0, 8, 16],)),
            (([],), "begin with 0", ([0],)),
            (([0, 8, 4],), r"\[0, 8, 4\]: it must .* never decrease", ([0, 8, 8],)),
            (([0, 4], None, -1), "filler_slots is -1", ([0, 4], None, 0)),
            (([0, 4], None, True), "filler_slots is True", ([0, 4], None, 1)),
        ),
        **refusals(
            ZigzagTHD,
            *(
                ((wrong,), INTS, ([0, 8],))
                for wrong in (
                    [0, 8.0], [False, True], 8, torch.tensor([0.0, 8]), torch.tensor([[0, 8]]), [[0], [1, 2]], ["0"],
                )
            ),
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
            (([8, 4], [3, 4]), "response_length 4, total_length 4.*leave a prompt token", ([8, 5], [3, 4])),
            (([8], [-1]), "response_length -1", ([8], [0])),
            (([8], [3], [7]), "padded length 7", ([8], [3], [8])),
            (([8, 8], [3]), "1 response_lengths for 2 total_lengths", ([8, 8], [3, 3])),
            (([8], [3], [8, 8]), "2 padded_lengths for 1", ([8], [3], [9])),
        ),
        **refusals(
            functools.partial(Gathered, [0, 8]),
            ({"backward": "mean"}, "'mean': there is no such backward of a gather", {"backward": "slice"}),
        ),
        **refusals(
            own,
            *(((starts,), OUT, ([1, 5],)) for starts in ([4, 0], [0, 2], [-1, 4], [0, 6])),
            *(
                (([0, 4], pieces, []), OUT, ([0, 4],))
                for pieces in ([(4, 8), (0, 2)], [(0, 4), (3, 8)], [(-1, 4)], [(4, 9)])
            ),
            (([0, 4], [(0, 8)], [(4, 8)]), "position 4 to 2 of 2 CP ranks: .* must be held by 1", ([0, 4],)),
            (([0, 4], [(0, 4)], [(5, 8)]), "position 4 to 0 of 2", ([0, 4], [(0, 8)], [])),
            (([0, 4], [(0, 8)], [(0, 4)], True), "position 4 to 1 of 2.*held by 2", ([0, 4], [(0, 8)], [(0, 8)], True)),
        ),
        **refusals(
            own,
            (([0.0, 4.5],), f"mask_starts is .*{INTS}", ([0, 4],)),
            *(
                (([0, 4], wrong), "pieces must be a list of two ints each", ([0, 4], [*map(list, HALVES[0])]))
                for wrong in (None, [0, 8], [(0.0, 8.0)], [(0, 4, 1, 8)], torch.tensor([[0, 8]]))
            ),
            error=TypeError,
        ),
        **refusals(own, (([0],), "1 mask_starts for 2 loss masks", ([0, 4],))),
    }
)  # fmt: skip
