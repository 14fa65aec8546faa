"""Layouts: where each sample's mask lies in a micro-batch's flat buffer, and which pieces of it a CP rank holds.

A layout is slots, one after the other, and a cut of them over the ranks of a context-parallel (CP) group. `Slots` is
the base of layouts whose slots are cut one by one: such a layout says what a rank holds of one slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice, check_int, check_one_each, is_int
from megatron_rl_loss.core.masks import Array

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

    def check_masks(self, buffer: Array) -> None:  # noqa: B027  most layouts have a loss at each token
        """Raise ValueError for masks, in the layout's buffer, that have entries where there is no loss."""

    def model_tokens(self, cp_rank: int, cp_size: int) -> Array | None:
        """The input ids of a rank's model, where the layout knows them; None for those of ``Samples(tokens=...)``."""
        return None

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
                "are padding alone, count them in filler_slots and pass no masks for them. Empty slots are left out "
                "already: never count them."
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
        chunks, pieces = self.chunks_per_rank * cp_size, list[tuple[int, ...]]()
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


class ZigzagBSHD(Zigzag):
    """An unpacked batch ``[batch_size, seq_length]`` cut along the sequence, zigzag, row by row.

    Losses: ``[batch_size, seq_length / cp_size]`` (batch first) or flat. Source: Megatron `core/utils.py`,
    `get_batch_on_this_cp_rank`.
    """

    def __init__(
        self, batch_size: int, seq_length: int, total_lengths: IntList | None = None, filler_slots: int = 0
    ) -> None:
        for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
            check_int(name, value, 1, "Pass the padded shape")
        super().__init__([row * seq_length for row in range(batch_size + 1)], total_lengths, filler_slots)

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        return [(num_local_tokens,), self.rows(num_local_tokens)]

    def rows(self, num_tokens: int) -> tuple[int, ...]:
        return len(self.sizes), num_tokens // len(self.sizes)

    def slot_name(self, number: int) -> str:
        return f"row {number}"

    @classmethod
    def drawn(cls, bounds: list[int], lengths: list[int]) -> Layout:
        return cls(len(lengths), bounds[1], total_lengths=lengths)


class Contiguous(Slots):
    """Contiguous pieces, as with all-gather context parallelism: rank r holds piece r of ``cp_size`` equal ones.

    The packed buffer as a whole is cut; with ``per_slot`` every slot is (each row of an unpacked batch, say).
    """

    cut = "contiguous"

    def __init__(
        self,
        cu_seqlens_padded: IntList,
        total_lengths: IntList | None = None,
        filler_slots: int = 0,
        *,
        per_slot: bool = False,
    ) -> None:
        super().__init__(cu_seqlens_padded, total_lengths, filler_slots)
        self.per_slot = per_slot

    def cut_at(self) -> list[int]:
        return self.bounds if self.per_slot else [0, self.total_tokens]

    def slot_name(self, number: int) -> str:
        return super().slot_name(number) if self.per_slot else "the packed buffer"

    @classmethod
    def drawn(cls, bounds: list[int], lengths: list[int]) -> Layout:
        return cls(bounds, total_lengths=lengths, per_slot=True)


class Gathered(Slots):
    """Losses gathered over CP (or never sliced) before the reducer: every CP rank holds every position.

    Each rank is given 1/cp_size of the weights, so that the sum over CP ranks is the step loss. ``backward="sum"``: the
    gather adds the gradients of the CP ranks, as Megatron's `gather_from_sequence_parallel_region` does;
    ``backward="slice"``: each rank gets the gradient of its own loss alone, which is then multiplied by cp_size.
    """

    cut, is_whole = "gathered", True

    def __init__(
        self,
        cu_seqlens_padded: IntList,
        total_lengths: IntList | None = None,
        filler_slots: int = 0,
        *,
        backward: Literal["sum", "slice"] = "sum",
    ) -> None:
        super().__init__(cu_seqlens_padded, total_lengths, filler_slots)
        check_choice("backward of a gather", backward, ("sum", "slice"))
        self.gather_sums_gradients = backward == "sum"


class ZigzagResponse(Layout):
    """Response tokens only, zigzag by sample, as slime and miles keep their log-probs.

    Sample i is cut into 2 * cp_size chunks of ``ceil(total_lengths[i] / (2 * cp_size))`` tokens (with
    ``padded_lengths``, of these). Rank r owns the logits of chunks r and 2 * cp_size - 1 - r, and keeps those that
    predict a response token (logit t predicts token t + 1). Losses: ``[num_local_tokens]``.
    """

    cut = "responses"
    total_lengths: list[int]
    response_lengths: list[int]

    def __init__(
        self, total_lengths: IntList, response_lengths: IntList, padded_lengths: IntList | None = None
    ) -> None:
        totals = as_ints("total_lengths", total_lengths)
        responses = as_ints("response_lengths", response_lengths)
        padded = totals if padded_lengths is None else as_ints("padded_lengths", padded_lengths)
        check_one_each("response_lengths", len(responses), "total_lengths", len(totals), SAME_MICROBATCH)
        check_one_each("padded_lengths", len(padded), "total_lengths", len(totals), SAME_MICROBATCH)
        for i, (response, total, size) in enumerate(zip(responses, totals, padded, strict=True)):
            if not 0 <= response < total <= size:
                raise ValueError(
                    f"sample {i} has response_length {response}, total_length {total}, padded length {size}: "
                    "lengths must be 0 <= response < total <= padded, and leave a prompt token, whose logit predicts "
                    "the first response token. Count the prompt in total_lengths."
                )
        self.total_lengths, self.response_lengths, self.padded_lengths = totals, responses, padded
        self.bounds = [0, *accumulate(responses)]

    @property
    def total_tokens(self) -> int:
        return self.bounds[-1]

    def mask_starts(self, mask_lengths: list[int]) -> list[int]:
        check_one_each("loss masks", len(mask_lengths), "response_lengths", len(self.response_lengths))
        for i, (length, response) in enumerate(zip(mask_lengths, self.response_lengths, strict=True)):
            if length != response:
                raise ValueError(
                    f"the loss mask of sample {i} has {length} entries: it must have one per response token, "
                    f"{response}. Cut a mask of the whole sample to the response, or use ZigzagTHD."
                )
        return self.bounds[:-1]

    def pieces(self, cp_rank: int, cp_size: int) -> Pieces:
        check_cp(cp_rank, cp_size)
        if cp_size == 1:
            return [(0, self.total_tokens)]
        pieces: Pieces = []
        lengths = zip(self.total_lengths, self.response_lengths, self.padded_lengths, self.bounds, strict=False)
        for total, response, padded, start in lengths:
            size, first_logit = -(-padded // (2 * cp_size)), total - response - 1  # the one that predicts a response
            for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
                begin = chunk * size - first_logit
                end = begin + size
                # min and max would take as long as all the rest
                begin = 0 if begin < 0 else response if begin > response else begin
                end = 0 if end < 0 else response if end > response else end
                pieces.append((start + begin, start + end))
        return pieces

    @classmethod
    def drawn(cls, bounds: list[int], lengths: list[int]) -> Layout:
        """Responses of these lengths behind prompts of three tokens, for `check_loss`; they have no other slots."""
        return cls([length + 3 for length in lengths], lengths)


#: By the name of the cut in `LossCall.cp_cut`.
LAYOUTS: dict[str, Any] = {str(layout.cut): layout for layout in (ZigzagTHD, Contiguous, Gathered, ZigzagResponse)}


@cache
def is_user_defined(kind: type[Layout]) -> bool:
    """True for layouts of another package, whose pieces are then validated."""
    return not kind.__module__.startswith(f"{__package__.partition('.')[0]}.")


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
