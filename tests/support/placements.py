"""Micro-batches laid out, with what each context-parallel (CP) rank holds said by the oracle, token by token."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import oracle
import pytest
import torch
from oracle import Token

from megatron_rl_loss import Contiguous, Gathered, PrefixTree, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.core.layouts import Layout

CP_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Placement:
    """One micro-batch laid out: what each CP rank holds, the shape of its losses, and the mask lengths where padded."""

    layout: Layout | None
    held: list[list[Token]]
    shape: Callable[[int], tuple[int, ...]] = lambda n: (n,)
    mask_lengths: list[int] | None = None


Place = Callable[[list[int], int], Placement]


def cumulative(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


def padded(lengths: Sequence[int], multiple: int) -> list[int]:
    return [-(-length // multiple) * multiple for length in lengths]


def plain(lengths: list[int], cp_size: int) -> Placement:
    return Placement(None, [[token for slot in oracle.padded_slots(lengths, lengths) for token in slot]])


def thd(lengths: list[int], cp_size: int) -> Placement:
    sizes = padded(lengths, 2 * cp_size)
    slots = oracle.padded_slots(lengths, sizes)
    held = [oracle.zigzag(slots, rank, cp_size) for rank in range(cp_size)]
    return Placement(ZigzagTHD(cumulative(sizes)), held, lambda n: (1, n), mask_lengths=sizes)


def thd_unpadded_masks_and_filler(lengths: list[int], cp_size: int) -> Placement:
    # A sample of length 0 gets a slot too: a filler cannot be told from it by its mask alone.
    sizes = [max(size, 2 * cp_size) for size in padded(lengths, 2 * cp_size)]
    slots = oracle.padded_slots([*lengths, 0], [*sizes, 4 * cp_size])
    held = [oracle.zigzag(slots, rank, cp_size) for rank in range(cp_size)]
    cu = cumulative([*sizes, 4 * cp_size, 0, 0])
    return Placement(ZigzagTHD(cu, total_lengths=lengths, filler_slots=1), held)


def bshd(lengths: list[int], cp_size: int) -> Placement:
    row = max(padded([*lengths, 1], 2 * cp_size))
    slots = oracle.padded_slots(lengths, [row] * len(lengths))
    held = [oracle.zigzag(slots, rank, cp_size) for rank in range(cp_size)]
    layout = ZigzagBSHD(len(lengths), row, total_lengths=lengths)
    return Placement(layout, held, lambda n: (len(lengths), n // len(lengths)))


def response(lengths: list[int], cp_size: int) -> Placement:
    totals = [length + 1 + 3 * i % 5 for i, length in enumerate(lengths)]  # prompts of 1, 4, 2, 5, 3, ... tokens
    held = [oracle.response_only(totals, lengths, totals, rank, cp_size) for rank in range(cp_size)]
    return Placement(ZigzagResponse(totals, lengths), held)


def response_of_padded_rows(lengths: list[int], cp_size: int) -> Placement:
    totals = [length + 2 + i for i, length in enumerate(lengths)]
    rows = [max(totals, default=0) + 3] * len(lengths)
    held = [oracle.response_only(totals, lengths, rows, rank, cp_size) for rank in range(cp_size)]
    return Placement(ZigzagResponse(totals, lengths, rows), held)


def contiguous(lengths: list[int], cp_size: int) -> Placement:
    sizes = [*lengths]
    sizes[-1:] = [sizes[-1] + -sum(sizes) % cp_size] if sizes else []  # only the buffer is padded, at its end
    slots = oracle.padded_slots(lengths, sizes)
    held = [oracle.contiguous(slots, rank, cp_size) for rank in range(cp_size)]
    return Placement(Contiguous(cumulative(sizes)), held, mask_lengths=sizes)


def contiguous_per_slot(lengths: list[int], cp_size: int) -> Placement:
    sizes = padded(lengths, cp_size)
    slots = oracle.padded_slots(lengths, sizes)
    held = [oracle.contiguous_per_slot(slots, rank, cp_size) for rank in range(cp_size)]
    return Placement(Contiguous(cumulative(sizes), total_lengths=lengths, per_slot=True), held)


def gathered(lengths: list[int], cp_size: int) -> Placement:
    slots = oracle.padded_slots(lengths, padded(lengths, 3))
    everything = [token for slot in slots for token in slot]
    return Placement(Gathered(cumulative(padded(lengths, 3)), total_lengths=lengths), [everything] * cp_size)


def prefix_tree(lengths: list[int], cp_size: int) -> Placement:
    """Rows that have their first tokens in common, each of one token more than its mask, which no loss predicts."""
    rows = [[t if t < 3 else 10 * i + t for t in range(length + 1)] for i, length in enumerate(lengths)]
    places: dict[tuple[int, ...], int] = {}
    for row in sorted(rows):
        for t in range(len(row)):
            places.setdefault(tuple(row[: t + 1]), len(places))
    size = -(-max(len(places), 1) // (2 * cp_size))
    held: list[list[Token]] = [[] for _ in range(cp_size)]
    for i, row in enumerate(rows):
        for t in range(len(row)):
            chunk = places[tuple(row[: t + 1])] // size
            rank = min(chunk, 2 * cp_size - 1 - chunk)
            held[rank].append((i, t) if t < lengths[i] else None)
    layout = PrefixTree(rows, multiple=2 * cp_size, cp_attention=True)
    return Placement(layout, held, mask_lengths=[length + 1 for length in lengths])


@functools.cache
def laid_out(place: Place, lengths: tuple[int, ...], cp_size: int) -> Placement:
    return place(list(lengths), cp_size)


PLACES: list[Place] = [
    thd,
    thd_unpadded_masks_and_filler,
    bshd,
    response,
    response_of_padded_rows,
    contiguous,
    contiguous_per_slot,
    gathered,
    prefix_tree,
]
LAID_OUT = [(plain, 1), *itertools.product(PLACES, CP_SIZES)]
every_layout = pytest.mark.parametrize(
    ("place", "cp_size"), LAID_OUT, ids=[f"{place.__name__}-cp{cp_size}" for place, cp_size in LAID_OUT]
)


def padded_masks(chosen: Sequence[oracle.Sample], placed: Placement) -> list[torch.Tensor]:
    lengths = placed.mask_lengths or [len(sample.mask) for sample in chosen]
    return [
        torch.cat([sample.mask, sample.mask.new_zeros(n - len(sample.mask))])
        for sample, n in zip(chosen, lengths, strict=True)
    ]
