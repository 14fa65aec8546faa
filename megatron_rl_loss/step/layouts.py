"""Layouts: where each sample's mask lies in a micro-batch's flat buffer, and which pieces of it a CP rank holds.

A layout is slots, one after the other, and a cut of them over the ranks of a context-parallel (CP) group. `Slots` is
the base of layouts whose slots are cut one by one: such a layout says what a rank holds of one slot. `ZigzagTHD`, which
a default launch has, is here; the others are in `further_layouts.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_rl_loss.errors import check_int, check_one_each, is_int

IntList = Sequence[int] | Tensor | npt.NDArray[Any]
#: [begin, end) of each piece, or (begin, end, step): a token of every `step`, as `range` and `slice` take them.
Pieces = list[tuple[int, ...]]
SAME_MICROBATCH = "Pass those of this micro-batch"


def as_ints(name: str, values: IntList) -> list[int]:
    """`values` as a list; TypeError for anything but whole numbers in a row."""
    # The usual case, for which no array is made; bools are no ints here.
    if type(values) is list and set(map(type, values)) <= {int}:
        return values.copy()
    try:
        array = np.asarray(values.tolist() if isinstance(values, Tensor) else values)
    except ValueError:  # ragged
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"{name} is {values!r}: it must be a list of ints. Pass one int per sample or slot.")
    return array.astype(np.int64).tolist()


def check_cp(cp_rank: int, cp_size: int) -> None:
    """Validate a rank's place in its context-parallel (CP) group."""
    are_ints = is_int(cp_rank) and is_int(cp_size)
    if are_ints and 0 <= cp_rank < cp_size:
        return
    place, remedy = f"cp_rank={cp_rank!r}, cp_size={cp_size!r}", "Pass cp_group.rank() and cp_group.size()"
    if not are_ints:
        raise TypeError(f"{place}: both must be ints. {remedy}.")
    raise ValueError(f"{place}: cp_rank must be from 0 to cp_size - 1. {remedy}.")


class Layout(ABC):
    """Base of all layouts, and of user-defined ones, which are validated. A value: never changed once made.

    Attributes:
        is_whole: every CP rank holds every token, so that each counts for 1/cp_size of it.
        gather_sums_gradients: a gather over CP ranks adds their gradients on the way back.
        total_lengths, response_lengths: of each sample where known: without padding, and without the prompt.
        cut: the name of the cut in `LossCall.cp_cut`, by which `check_loss` draws the layout; none for one of yours.
    """

    is_whole: bool = False
    gather_sums_gradients: bool = True
    total_lengths: list[int] | None = None
    response_lengths: list[int] | None = None
    cut: str | None = None

    @property
    @abstractmethod
    def total_tokens(self) -> int:
        """Positions in the flat buffer, over all CP ranks."""

    @abstractmethod
    def mask_starts(self, mask_lengths: list[int]) -> IntList:
        """First position of each sample's mask, ints [num_samples]; ValueError for masks that do not fit."""

    @abstractmethod
    def pieces(self, cp_rank: int, cp_size: int) -> Sequence[tuple[int, ...]]:
        """[begin, end) of each piece that the rank holds, in the order of the buffer and of its losses; may be empty.

        A third number is a step, as in `range`. Raises ValueError for a slot that cannot be cut for ``cp_size`` ranks.
        """

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        """Shapes that a rank's ``per_token_loss`` may have, all row-major."""
        return [(num_local_tokens,), (1, num_local_tokens)]

    def rows(self, num_tokens: int) -> tuple[int, ...]:
        """The shape of that many tokens, of all ranks or of one, where the layout has rows of one length."""
        return (num_tokens,)

    def describe(self) -> str:
        """The facts in which replicas must agree."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | str | list)}
        return f"{type(self).__name__} {self.total_tokens} {sorted(plain.items())}"


class Slots(Layout):
    """Samples in consecutive padded slots ``[cu_seqlens_padded[i], cu_seqlens_padded[i+1])``, each cut for itself.

    A mask is as long as its slot or, with ``total_lengths``, as its unpadded sample; other lengths are refused, not
    guessed. Entry t of a mask belongs to the loss at position t. Empty slots hold no sample unless there are as many
    masks as slots; ``filler_slots`` of the last non-empty ones hold none either.

    Attributes:
        chunks_per_rank: the length of a slot must be a multiple of this times the number of CP ranks.
    """

    chunks_per_rank: int = 1

    def __init__(self, cu_seqlens_padded: IntList, total_lengths: IntList | None = None, filler_slots: int = 0) -> None:
        self.bounds = as_ints("cu_seqlens_padded", cu_seqlens_padded)
        self.sizes = [end - begin for begin, end in pairwise(self.bounds)]
        if not self.bounds or self.bounds[0] or min(self.sizes, default=0) < 0:
            raise ValueError(
                f"cu_seqlens_padded begins {self.bounds[:8]}: it must begin with 0 and never decrease. Pass cumulative "
                "padded lengths, the leading 0 included."
            )
        check_int("filler_slots", filler_slots, 0, "Count the last slots that hold no sample")
        self.filler_slots = filler_slots
        self.total_lengths = None if total_lengths is None else as_ints("total_lengths", total_lengths)

    @property
    def total_tokens(self) -> int:
        return self.bounds[-1]

    def mask_starts(self, mask_lengths: list[int]) -> list[int]:
        slots = list(range(len(self.sizes)))
        if self.filler_slots or len(mask_lengths) != len(slots):
            filled = [slot for slot in slots if self.sizes[slot]]
            slots = filled[: max(len(filled) - self.filler_slots, 0)]
        if len(mask_lengths) != len(slots):
            raise ValueError(
                f"{len(mask_lengths)} loss masks for {len(slots)} slots with a sample "
                f"(filler_slots={self.filler_slots}): there must be one mask per slot, in order. If the last slots "
                "are padding alone, count them in filler_slots and pass no masks for them."
            )
        sizes = [self.sizes[slot] for slot in slots]
        totals = sizes if self.total_lengths is None else self.total_lengths
        check_one_each("total_lengths", len(totals), "loss masks", len(sizes), SAME_MICROBATCH)
        for i, (length, size, total) in enumerate(zip(mask_lengths, sizes, totals, strict=True)):
            if not 0 <= total <= size or length not in (size, total):
                raise ValueError(
                    f"sample {i}: a mask of {length} entries, a slot of {size} tokens, total_length {total}: a mask "
                    "must be as long as its slot or its total_length, which must fit the slot. Pass total_lengths for "
                    "masks of unpadded samples; masks of responses alone need ZigzagResponse."
                )
        return [self.bounds[slot] for slot in slots]

    def pieces(self, cp_rank: int, cp_size: int) -> Pieces:
        check_cp(cp_rank, cp_size)
        if cp_size == 1 or self.is_whole:
            return [(0, self.total_tokens)]
        chunks, pieces = self.chunks_per_rank * cp_size, Pieces()
        for i, (begin, end) in enumerate(pairwise(self.cut_at())):
            if (end - begin) % chunks:
                rule = f"{self.chunks_per_rank} * cp_size" if self.chunks_per_rank > 1 else "cp_size"
                raise ValueError(
                    f"{self.slot_name(i)} has {end - begin} tokens: it must be a multiple of {rule} = {chunks}, or the "
                    "cut would repeat and drop tokens. Pad it."
                )
            pieces += self.held(begin, end, cp_rank, cp_size)
        return pieces

    def held(self, begin: int, end: int, cp_rank: int, cp_size: int) -> Pieces:
        """The pieces that a rank holds of the slot [begin, end): by default its one of ``cp_size`` equal ones."""
        size = (end - begin) // cp_size
        return [(begin + cp_rank * size, begin + (cp_rank + 1) * size)]

    def cut_at(self) -> list[int]:
        """Where one part that is cut for itself ends and the next begins."""
        return self.bounds

    def slot_name(self, number: int) -> str:
        """What an error calls the part of that number."""
        return f"slot {number}"

    @classmethod
    def drawn(cls, bounds: list[int], lengths: list[int]) -> Layout:
        """The layout of samples of these lengths in slots with these bounds, for `check_loss`."""
        return cls(bounds, total_lengths=lengths)


class Zigzag(Slots):
    """Slots cut into 2 * cp_size chunks: rank r holds chunk r and chunk 2 * cp_size - 1 - r.

    Under a causal mask all ranks then have about as much work: a late chunk attends to more tokens than an early one.
    """

    chunks_per_rank = 2

    def held(self, begin: int, end: int, cp_rank: int, cp_size: int) -> Pieces:
        size = (end - begin) // (2 * cp_size)
        before = cp_rank * size  # tokens outside the two chunks, on either side
        return [(begin + before, begin + before + size), (end - before - size, end - before)]


class ZigzagTHD(Zigzag):
    """Packed sequences as Megatron-Core and Transformer Engine cut them over CP ranks.

    Of slot ``[s, e)`` with ``c = (e - s) / (2 * cp_size)`` rank r holds ``[s + r*c, s + (r+1)*c)``, then
    ``[e - (r+1)*c, e - r*c)``. Losses: ``[num_local_tokens]`` or ``[1, num_local_tokens]``.
    Source: Transformer Engine's `thd_get_partitioned_indices`, which Megatron-Core calls in `core/utils.py`.

    >>> ZigzagTHD([0, 8, 16]).pieces(cp_rank=0, cp_size=2)
    [(0, 2), (6, 8), (8, 10), (14, 16)]
    """

    cut = "zigzag"


def is_user_defined(layout: Layout) -> bool:
    return not type(layout).__module__.startswith(f"{__package__}.")
