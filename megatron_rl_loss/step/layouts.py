"""Layouts: where each sample's mask lies in a micro-batch's flat buffer, and which pieces of it a CP rank holds.

A layout is slots, one after the other, and a cut of them over the ranks of a context-parallel (CP) group.

| layout           | slots                                | rank r of c holds                                         |
|------------------|--------------------------------------|-----------------------------------------------------------|
| `ZigzagTHD`      | padded packed sequences              | chunks r and 2c-1-r of every slot cut into 2c             |
| `ZigzagBSHD`     | rows of ``seq_length``               | the same                                                  |
| `Contiguous`     | padded packed sequences              | the r-th of c equal pieces (of the buffer or each slot)   |
| `Gathered`       | packed sequences                     | everything                                                |
| `ZigzagResponse` | responses                            | response tokens whose logit lies in chunks r and 2c-1-r   |

All but the first are in `further_layouts.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_rl_loss.errors import check_cp, check_int, check_one_each

IntList = Sequence[int] | Tensor | npt.NDArray[Any]
#: [begin, end) of each piece, or (begin, end, step): a token of every `step`, as `range` and `slice` take them.
Pieces = list[tuple[int, ...]]
Cut = Literal["zigzag", "contiguous", "buffer", "whole"]
SAME_MICROBATCH = "Pass those of this micro-batch"


def as_ints(name: str, values: IntList) -> list[int]:
    """`values` as a list; TypeError for anything but whole numbers in a row."""
    if type(values) is list and set(map(type, values)) <= {int}:
        return values.copy()
    try:
        array = np.asarray(values.tolist() if isinstance(values, Tensor) else values)
    except ValueError:  # ragged
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"{name} is {values!r}: it must be a list of ints. Pass one int per sample or slot.")
    return array.astype(np.int64).tolist()


class Layout(ABC):
    """Base of all layouts, and of user-defined ones, which are validated. A value: never changed once made.

    Attributes:
        is_whole: every CP rank holds every token, so that each counts for 1/cp_size of it.
        gather_sums_gradients: a gather over CP ranks adds their gradients on the way back.
        total_lengths, response_lengths: of each sample where known: without padding, and without the prompt.
    """

    is_whole: bool = False
    gather_sums_gradients: bool = True
    total_lengths: list[int] | None = None
    response_lengths: list[int] | None = None

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
    """Samples in consecutive padded slots ``[cu_seqlens_padded[i], cu_seqlens_padded[i+1])``, each cut by `cut`.

    A mask is as long as its slot or, with ``total_lengths``, as its unpadded sample; other lengths are refused, not
    guessed. Entry t of a mask belongs to the loss at position t. Empty slots hold no sample unless there are as many
    masks as slots; ``filler_slots`` of the last non-empty ones hold none either.
    """

    cut: Cut
    slot = "slot"  # what an error calls one

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

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        return self.cut == "whole"

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
        bounds = [0, self.total_tokens] if self.cut == "buffer" else self.bounds
        is_zigzag = self.cut == "zigzag"
        chunks = 2 * cp_size if is_zigzag else cp_size
        held = (cp_rank, chunks - 1 - cp_rank) if is_zigzag else (cp_rank,)
        pieces = Pieces()
        for i, (begin, end) in enumerate(pairwise(bounds)):
            size, rest = divmod(end - begin, chunks)
            if rest:
                rule = "2 * cp_size" if is_zigzag else "cp_size"
                what = "the packed buffer" if self.cut == "buffer" else f"{self.slot} {i}"
                raise ValueError(
                    f"{what} has {end - begin} tokens: it must be a multiple of {rule} = {chunks}, or the cut would "
                    "repeat and drop tokens. Pad it."
                )
            pieces += [(begin + chunk * size, begin + (chunk + 1) * size) for chunk in held]
        return pieces


class ZigzagTHD(Slots):
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
