"""Validation of layouts that users define: their pieces, and that each token is held by the ranks that it should be."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from megatron_rl_loss.errors import is_int
from megatron_rl_loss.step.layouts import Layout


def check_pieces(layout: Layout, what: str, pieces: Sequence[tuple[int, ...]]) -> None:
    """Validate pieces of a user's layout: ints, in order, without overlap, within the buffer."""
    is_list = isinstance(pieces, Sequence) and all(
        isinstance(piece, Sequence) and len(piece) in (2, 3) for piece in pieces
    )
    if not is_list or not all(map(is_int, [layout.total_tokens, *chain(*pieces)])):
        raise TypeError(
            f"{type(layout).__name__} puts {what} at {pieces!r}: pieces must be a list of two ints each, [begin, end), "
            "or three with a step, and total_tokens an int. Return ints from the layout."
        )
    ends, begins = [0, *(piece[1] for piece in pieces)], [*(piece[0] for piece in pieces), layout.total_tokens]
    is_ordered = all(end <= begin for end, begin in zip(ends, begins, strict=True))
    if not is_ordered or any(end < begin or min(step, default=1) < 1 for begin, end, *step in pieces):
        raise ValueError(
            f"{type(layout).__name__} puts {what} at {list(pieces[:8])}: pieces must be in order, apart, and within "
            f"the {layout.total_tokens} tokens of its buffer. Fix its mask_starts, pieces or total_tokens."
        )


def check_cut(layout: Layout, masks: Sequence[tuple[int, int]], cp_size: int) -> None:
    """Raise ValueError for a user's layout that gives a sample's token to several CP ranks or to none."""
    holders, expected = np.zeros(layout.total_tokens, np.int64), cp_size if layout.is_whole else 1
    for rank in range(cp_size):
        check_pieces(layout, f"what CP rank {rank} of {cp_size} holds", pieces := layout.pieces(rank, cp_size))
        for piece in pieces:
            holders[slice(*piece)] += 1
    for begin, end in masks:
        for position in (begin + np.flatnonzero(holders[begin:end] != expected)[:1]).tolist():
            raise ValueError(
                f"{type(layout).__name__} gives position {position} to {holders[position]} of {cp_size} CP ranks: each "
                f"token of a sample must be held by {expected}. Fix its pieces, or set is_whole where every rank holds "
                "every token."
            )
