"""Rows dealt out into trees of a budget of slots, and trees to data-parallel ranks."""

import numpy as np

from megatron_rl_loss.trees.building import JoinedRows

#: Numbers of rows in the order of their prefixes, and the slots that each adds.
Pack = list[tuple[int, int]]


def pack_rows(rows: JoinedRows, max_slots: int, dp_size: int) -> list[list[list[int]]]:
    """``[rank][micro-batch]`` -> numbers of rows; see `PrefixTree.pack`."""
    for number, length in enumerate(rows.lengths):
        if length > max_slots:
            raise ValueError(
                f"row {number} has {length} tokens, of at most {max_slots} slots in a tree: a row is never cut. Raise "
                "max_slots, or leave the row out."
            )
    packs = _first_fit(rows, max_slots)
    while len(packs) % dp_size and max(map(len, packs)) > 1:
        largest = max((pack for pack in packs if len(pack) > 1), key=_size)
        packs.remove(largest)
        packs += _halves(rows, largest)
    packs += [Pack() for _ in range(-len(packs) % dp_size)]
    packs.sort(key=_size, reverse=True)
    rank_packs, slots = [list[list[int]]() for _ in range(dp_size)], np.zeros(dp_size, np.int64)
    for begin in range(0, len(packs), dp_size):  # a round: the largest tree to the rank with the fewest slots
        for rank, pack in zip(slots.argsort(kind="stable"), packs[begin : begin + dp_size], strict=True):
            rank_packs[rank].append(sorted(number for number, _ in pack))
            slots[rank] += _size(pack)
    return rank_packs


def _first_fit(rows: JoinedRows, max_slots: int) -> list[Pack]:
    """Each row, in the order of prefixes, into the pack where it shares most, of those where it fits."""
    packs = list[Pack]()
    # Of each pack: its slots, and the prefix that its last row has in common with the row that comes next. In sorted
    # order it is the least of the prefixes of all neighbours between them.
    sizes, shared = np.zeros(len(rows.lengths), np.int64), np.zeros(len(rows.lengths), np.int64)
    for number, common in rows.sorted():
        known, length = len(packs), rows.lengths[number]
        np.minimum(shared[:known], common, out=shared[:known])
        fits = sizes[:known] + length - shared[:known] <= max_slots
        if fits.any():
            chosen = int(np.where(fits, shared[:known], -1).argmax())
        else:
            chosen = known
            packs.append([])
        added = length - int(shared[chosen])
        packs[chosen].append((number, added))
        sizes[chosen] += added
        shared[chosen] = length
    return packs


def _halves(rows: JoinedRows, pack: Pack) -> list[Pack]:
    """A pack of several rows cut in two, where the larger half is smallest."""
    added = np.array([slots for _, slots in pack])
    # The first row of the second half no longer shares what stays in the first one.
    lengths = np.array([rows.lengths[number] for number, _ in pack])
    first = added.cumsum()[:-1]
    second = added.sum() - first - added[1:] + lengths[1:]
    cut = int(np.maximum(first, second).argmin()) + 1
    return [pack[:cut], [(pack[cut][0], int(lengths[cut])), *pack[cut + 1 :]]]


def _size(pack: Pack) -> int:
    return sum(slots for _, slots in pack)
