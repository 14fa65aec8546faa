"""From rows of token ids to slots: a token that several rows have in common, with the same tokens before it, is one.

Rows are sorted, so that neighbours share the longest prefixes; each then adds the slots that its neighbour lacks. Work
and memory are linear in the tokens, with a loop over rows alone.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.errors import is_unordered
from megatron_rl_loss.core.masks import join_on_host

Ints = npt.NDArray[np.int64]
#: Token ids of one sample: a 1-D tensor on any device, an array, or a list.
Row = Tensor | npt.NDArray[Any] | Sequence[int]


class JoinedRows(NamedTuple):
    """Rows of token ids end to end, int64 [total_tokens], and where each begins, [num_rows + 1]."""

    ids: Ints
    bounds: list[int]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "JoinedRows":
        """Check the rows; TypeError unless each is a row of ints, ValueError for a negative id or an empty row."""
        if isinstance(rows, Tensor | np.ndarray | str) or is_unordered(rows) or not isinstance(rows, Sequence):
            raise TypeError(
                f"rows is one {type(rows).__name__}: there must be a list of rows of token ids, without padding, which "
                "would be trained on as tokens. Pass [ids[:length] for ids, length in zip(rows, lengths)]."
            )
        tensors = [_as_tensor(number, row) for number, row in enumerate(rows)]
        bounds = [0, *accumulate(map(len, tensors))]
        ids = join_on_host(tensors) if tensors else np.zeros(0)
        joined = cls(np.asarray(ids, np.int64), bounds)
        if joined.ids.size and (lowest := int(joined.ids.min())) < 0:
            raise ValueError(
                f"row {joined.row_of(int(joined.ids.argmin()))} has the token id {lowest}: ids are those of the "
                "vocabulary, >= 0. Cut padding such as -100 off the rows."
            )
        return joined

    @property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def row_of(self, token: int) -> int:
        return int(np.searchsorted(self.bounds, token, "right")) - 1

    def sorted(self) -> list[tuple[int, int]]:
        """The numbers of the rows in an order in which neighbours share the longest prefixes, and how much of each.

        The second number is the length of the prefix in common with the row before.
        """
        # Big-endian bytes sort as the numbers do. What two rows have in common, all rows between them have too.
        keys = self.ids.astype(">u4" if not self.ids.size or self.ids.max() < 2**32 else ">u8")
        numbers = sorted(range(len(self.bounds) - 1), key=lambda i: keys[self.bounds[i] : self.bounds[i + 1]].tobytes())
        shared, before = [], self.ids[:0]
        for number in numbers:
            row = self.ids[self.bounds[number] : self.bounds[number + 1]]
            most = min(len(row), len(before))
            differs = row[:most] != before[:most]
            first = int(differs.argmax()) if most else 0
            shared.append(first if most and differs[first] else most)
            before = row
        return list(zip(numbers, shared, strict=True))


class SlotTable(NamedTuple):
    """The slots of some rows, in the order of a walk through their tree, depth first; int64 [num_slots] each.

    Attributes:
        tokens: the token of each slot.
        depths: its place in every row that runs through it.
        parents: the slot before it, -1 for none.
        ends: the first slot that does not lie behind it: slot k is before or at slot q iff ``k <= q < ends[k]``.
        token_slots: the slot of each token of the rows, which lie end to end, int64 [total_tokens].
    """

    tokens: Ints
    depths: Ints
    parents: Ints
    ends: Ints
    token_slots: Ints


def build_slots(rows: JoinedRows, multiple: int) -> SlotTable:
    """The slots of the rows, padded to a multiple of that many; a padding slot is a token 0 that sees itself alone."""
    most = len(rows.ids) + multiple
    tokens, depths = np.zeros(most, np.int64), np.zeros(most, np.int64)
    parents, ends = np.full(most, -1, np.int64), np.arange(1, most + 1)
    token_slots = np.empty(len(rows.ids), np.int64)
    path, num_slots = token_slots[:0], 0
    for number, common in rows.sorted():
        begin, end = rows.bounds[number : number + 2]
        ends[path[common:]] = num_slots  # no further row runs through these
        mine = token_slots[begin:end]
        mine[:common] = path[:common]
        new = slice(num_slots, num_slots := num_slots + end - begin - common)
        mine[common:] = np.arange(new.start, new.stop)
        tokens[new] = rows.ids[begin + common : end]
        depths[new] = np.arange(common, end - begin)
        parents[new] = mine[common:] - 1
        if common and new.stop > new.start:
            parents[new.start] = path[common - 1]
        elif not common:
            parents[new.start] = -1
        path = mine
    ends[path] = num_slots
    padded = max(num_slots + -num_slots % multiple, multiple)  # without a row, what a model can run on
    tokens, depths, parents, ends = (values[:padded].copy() for values in (tokens, depths, parents, ends))
    table = SlotTable(tokens, depths, parents, ends, token_slots)
    for values in table:
        values.setflags(write=False)
    return table


def _as_tensor(number: int, row: Any) -> Tensor:
    """A row as a tensor of ints, on its device."""
    try:
        ids = row if isinstance(row, Tensor) else np.asarray(row)
    except (ValueError, TypeError, RuntimeError):  # ragged
        ids = np.asarray(None)
    is_nested = isinstance(ids, Tensor) and (ids.is_nested or ids.layout != torch.strided)
    if isinstance(ids, Tensor):
        has_ints = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    else:
        has_ints = ids.dtype.kind in "iu"
    if is_nested or ids.ndim != 1 or (not has_ints and ids.shape[0]):
        shown = f"{ids.dtype} {'ragged' if is_nested else tuple(ids.shape)}"
        raise TypeError(
            f"row {number} is {shown}: it must be one row of ints, the token ids of a sample. Pass a 1-D tensor, an "
            "array or a list of ids."
        )
    if not ids.shape[0]:
        raise ValueError(f"row {number} has no token: a sample has at least one. Leave the row and its mask out.")
    if isinstance(ids, Tensor):
        return ids.detach().to(torch.int64)
    return torch.from_numpy(ids.astype(np.int64))
