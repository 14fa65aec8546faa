"""Layouts: which token positions of a micro-batch this context-parallel (CP) rank holds.

A micro-batch is one flat buffer of ``total_tokens`` positions. A layout says where in it each sample's loss mask
begins (`mask_starts`) and which positions, in which order, a CP rank's per-token losses stand for (`local_segments`).
Everything is plain ints on the host, computed sample by sample: most micro-batches have few samples, for which that is
faster than arrays, and no device has to wait.

| layout           | flat buffer                          | rank r of c holds                                       |
|------------------|--------------------------------------|---------------------------------------------------------|
| `ZigzagTHD`      | padded packed slots                  | chunks r and 2c-1-r of every slot cut into 2c           |
| `ZigzagBSHD`     | rows of ``seq_length``               | the same, each row a slot                               |
| `ZigzagResponse` | response tokens, one after the other | response tokens whose logit lies in chunks r and 2c-1-r |
| `Contiguous`     | padded packed slots                  | the r-th of c equal pieces (of the buffer or each slot) |
| `Gathered`       | packed slots                         | everything, on every rank                               |
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.errors import check_choice, check_cp, check_int, check_one_each, is_int

Ints = list[int]
IntList = Sequence[int] | Tensor | npt.NDArray[Any]
Positions = npt.NDArray[np.int64]


def as_ints(name: str, values: IntList) -> Ints:
    """`values` as a list of ints; TypeError for anything that is not whole numbers in a row."""
    if type(values) is list and set(map(type, values)) == {int}:  # sound, found fast
        return values.copy()
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(values)
    if isinstance(values, Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(
                f"{name} is {values.dtype} of shape {tuple(values.shape)}: it must be a 1-D tensor of ints. Convert it "
                "first."
            )
        return values.tolist()
    if not isinstance(values, Sequence):
        raise TypeError(
            f"{name} is {values!r} ({type(values).__name__}): it must be a list or tensor of ints. Pass one entry per "
            "sample or slot."
        )
    for odd in (value for value in values if not is_int(value)):
        raise TypeError(f"{name} holds {odd!r} ({type(odd).__name__}): it must hold whole numbers. Pass an int tensor.")
    return list(map(int, values))


def starts_of(lengths: Iterable[int]) -> Ints:
    """Where each of so many things after each other begins."""
    starts = [0, *accumulate(lengths)]
    starts.pop()
    return starts


def concatenated_ranges(starts: IntList, lengths: IntList) -> Positions:
    """``concatenate([arange(s, s + n) for s, n in zip(starts, lengths)])`` without the loop."""
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + (starts - (ends - lengths)).repeat(lengths)


def _shown(values: Ints, most: int = 8) -> str:
    return f"[{', '.join(map(str, values[:most]))}{', ...' if len(values) > most else ''}]"


class Layout(ABC):
    """Common to all layouts. A value object: made once per micro-batch, never changed.

    A layout of your own answers the two abstract methods; lists, arrays and tensors of ints will do.
    """

    #: True when every CP rank holds every token, so that each counts for 1/cp_size of it.
    replicated_over_cp: bool = False
    #: Whether a gather over CP ranks, where there was one, adds their gradients on the way back.
    gather_sums_gradients: bool = True
    #: Of each sample, [num_samples], where the layout knows them: without padding, and without the prompt.
    total_lengths: Ints | None = None
    response_lengths: Ints | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether it is a layout of one's own, whose answers are checked; tests prove those of this file."""
        return type(self).__module__ != __name__

    @property
    @abstractmethod
    def total_tokens(self) -> int:
        """Positions in the flat buffer, over all CP ranks."""

    @abstractmethod
    def mask_starts(self, mask_lengths: Ints) -> IntList:
        """First buffer position of each sample's loss mask, ints [num_samples].

        Raises ValueError when the number or the lengths of the masks do not fit the layout.
        """

    @abstractmethod
    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[IntList, IntList]:
        """First positions and lengths of the buffer's pieces that this CP rank holds, both ints [num_segments].

        In the order of its per-token losses, which is that of the buffer; pieces may be empty.
        Raises ValueError when a slot cannot be cut for ``cp_size`` ranks.
        """

    def local_indices(self, cp_rank: int, cp_size: int) -> Positions:
        """Buffer positions this CP rank holds, in the order of its per-token losses, int64 [num_local_tokens].

        Raises ValueError when a slot cannot be cut for ``cp_size`` ranks.
        """
        starts, lengths = (as_ints("local_segments", part) for part in self.local_segments(cp_rank, cp_size))
        return concatenated_ranges(starts, lengths)

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        """Shapes a rank's ``per_token_loss`` may have; all are read in row-major order."""
        return [(num_local_tokens,), (1, num_local_tokens)]


class _PackedSlots(Layout):
    """Samples in consecutive padded slots ``[cu_seqlens_padded[i], cu_seqlens_padded[i+1])`` of one buffer.

    A mask has exactly the length of its slot or, with ``total_lengths``, exactly that sample's unpadded length: a
    shorter mask could as well be a response-only one, so it is never guessed. Masks are aligned with the losses: entry
    t belongs to the loss at position t, that is to the label there, not to the input token.

    Zero-length slots and repeated end values (tail-padded ``cu_seqlens``) are legal and hold no sample, unless there
    are as many masks as slots. ``filler_slots`` says how many of the last non-empty slots hold no sample either
    (padding to a fixed pack size). Do not give those as masked samples: they would count as units.
    """

    _slot = "slot {}"  # what an error calls one that is to be cut

    def __init__(self, cu_seqlens_padded: IntList, total_lengths: IntList | None = None, filler_slots: int = 0) -> None:
        cu = as_ints("cu_seqlens_padded", cu_seqlens_padded)
        if not cu or cu[0] != 0:
            raise ValueError(
                f"cu_seqlens_padded is {_shown(cu)}: it must begin with 0. Pass cumulative padded lengths, 0 included."
            )
        sizes = [end - start for start, end in pairwise(cu)]
        if sizes and min(sizes) < 0:
            raise ValueError(
                f"cu_seqlens_padded is {_shown(cu)}: it must not decrease. Pass cumulative lengths, not lengths."
            )
        check_int("filler_slots", filler_slots, 0, "Count the last slots that hold no sample")
        self.filler_slots = filler_slots
        self._total_tokens = cu.pop()
        self._starts, self._sizes = self._cut_slots = cu, sizes
        self.total_lengths = None if total_lengths is None else as_ints("total_lengths", total_lengths)

    @property
    def total_tokens(self) -> int:
        return self._total_tokens

    def _sample_slots(self, num_samples: int) -> Sequence[int]:
        """The slot each sample is in."""
        slots = range(len(self._sizes))
        if num_samples == len(slots) and self.filler_slots == 0:
            return slots
        filled = [slot for slot in slots if self._sizes[slot]]
        used = filled[: max(len(filled) - self.filler_slots, 0)]
        if num_samples == len(used):
            return used
        raise ValueError(
            f"{num_samples} loss masks for {len(used)} slots with a sample (filler_slots={self.filler_slots}): there "
            "must be one mask per slot, in order. If the last slots only pad the pack, say so with filler_slots; do "
            "not add masks for them."
        )

    def mask_starts(self, mask_lengths: Ints) -> Ints:
        slots = self._sample_slots(len(mask_lengths))
        sizes = [self._sizes[slot] for slot in slots]
        lengths, allowed = sizes, "its slot's {}"
        if self.total_lengths is not None:
            lengths, allowed = self.total_lengths, "its slot's {} or its total_length's {}"
            check_one_each("total_lengths", len(lengths), "loss masks", len(mask_lengths), _SAME_MICROBATCH)
        for i, (mask_length, size, length) in enumerate(zip(mask_lengths, sizes, lengths, strict=True)):
            if not 0 <= length <= size:
                raise ValueError(
                    f"sample {i} has total_length {length} in a slot of {size} tokens: it must fit its padded slot. "
                    "Pass cu_seqlens_padded and total_lengths of the same micro-batch."
                )
            if mask_length not in (size, length):
                raise ValueError(
                    f"the loss mask of sample {i} has {mask_length} entries: it must have "
                    f"{allowed.format(size, length)}. A mask of the unpadded sample needs total_lengths; one of the "
                    "response only needs ZigzagResponse."
                )
        return [self._starts[slot] for slot in slots]

    def _chunks(self, cp_rank: int, cp_size: int) -> tuple[int, Sequence[int]]:
        """Into how many chunks each slot is cut, and which of them the rank holds."""
        return 2 * cp_size, (cp_rank, 2 * cp_size - 1 - cp_rank)

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Ints, Ints]:
        check_cp(cp_rank, cp_size)
        if cp_size == 1:
            return self._starts, self._sizes
        chunks, held = self._chunks(cp_rank, cp_size)
        starts, lengths = Ints(), Ints()
        for i, (start, size) in enumerate(zip(*self._cut_slots, strict=True)):
            chunk, rest = divmod(size, chunks)
            if rest:
                rule = "cp_size" if chunks == cp_size else "2 * cp_size"
                raise ValueError(
                    f"{self._slot.format(i)} has {size} tokens: it must be a multiple of {rule} = {chunks}, or the cut "
                    "repeats and drops tokens. Pad it."
                )
            starts += [start + number * chunk for number in held]
            lengths += [chunk] * len(held)
        return starts, lengths


_SAME_MICROBATCH = "Pass those of this micro-batch"


class ZigzagTHD(_PackedSlots):
    """Packed sequences as Megatron-Core and Transformer Engine cut them over CP ranks.

    Of slot ``[s, e)`` with ``c = (e - s) / (2 * cp_size)`` rank r holds ``[s + r*c, s + (r+1)*c)``, then
    ``[e - (r+1)*c, e - r*c)``. Losses: ``[num_local_tokens]`` or ``[1, num_local_tokens]``.
    Source: Transformer Engine's `thd_get_partitioned_indices`, which Megatron-Core calls in `core/utils.py`.

    >>> layout = ZigzagTHD([0, 8, 16])
    >>> layout.local_indices(cp_rank=0, cp_size=2).tolist()
    [0, 1, 6, 7, 8, 9, 14, 15]
    """


class ZigzagBSHD(_PackedSlots):
    """An unpacked batch ``[batch_size, seq_length]`` cut along the sequence, zigzag, row by row.

    Masks have ``seq_length`` entries or, with ``total_lengths``, each row's unpadded length; the last ``filler_slots``
    rows hold no sample.
    Losses: ``[batch_size, seq_length / cp_size]`` (batch first) or flat.
    Source: Megatron `core/utils.py`, `get_batch_on_this_cp_rank`.
    """

    _slot = "row {}"

    def __init__(
        self, batch_size: int, seq_length: int, total_lengths: IntList | None = None, filler_slots: int = 0
    ) -> None:
        for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
            check_int(name, value, 1, "Pass the padded shape")
        super().__init__([row * seq_length for row in range(batch_size + 1)], total_lengths, filler_slots)
        self.batch_size = batch_size
        self.seq_length = seq_length

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        return [(num_local_tokens,), (self.batch_size, self.seq_length // cp_size)]


class Contiguous(_PackedSlots):
    """Contiguous pieces, as with all-gather context parallelism: rank r holds piece r of ``cp_size`` equal ones.

    The packed buffer as a whole is cut; with ``per_slot`` every slot is (each row of an unpacked batch, say).
    """

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
        if not per_slot:
            self._slot, self._cut_slots = "the packed buffer", ([0], [self.total_tokens])

    def _chunks(self, cp_rank: int, cp_size: int) -> tuple[int, Sequence[int]]:
        return cp_size, [cp_rank]


class Gathered(_PackedSlots):
    """Losses gathered over CP (or never sliced) before the reducer: every CP rank holds every position.

    The reducer then gives each rank 1/cp_size of the value, so that the sum over CP ranks stays the step loss. What the
    gather does backward must be said where it is not the usual: ``backward="sum"`` adds the gradients of the CP ranks,
    as Megatron's `gather_from_sequence_parallel_region` does; ``backward="slice"`` hands each rank back the gradient of
    its own loss alone, which the reducer then makes cp_size times larger than that of its share.
    """

    replicated_over_cp = True

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

    def _chunks(self, cp_rank: int, cp_size: int) -> tuple[int, Sequence[int]]:
        return 1, [0]


class ZigzagResponse(Layout):
    """Response tokens only, zigzag by sample, as slime and miles keep their log-probs.

    Sample i of ``total_lengths[i]`` tokens is cut into 2 * cp_size chunks of ``ceil(total / (2 * cp_size))`` tokens.
    Rank r owns the logits of chunks r and 2 * cp_size - 1 - r, and keeps those that predict a response token (logit t
    predicts token t + 1). Masks have ``response_lengths[i]`` entries. With ``padded_lengths`` (rows padded to a common
    maximum) the chunks are cut from the padded length. Losses: ``[num_local_tokens]``.
    """

    total_lengths: Ints
    response_lengths: Ints

    def __init__(
        self, total_lengths: IntList, response_lengths: IntList, padded_lengths: IntList | None = None
    ) -> None:
        totals = as_ints("total_lengths", total_lengths)
        responses = as_ints("response_lengths", response_lengths)
        padded = totals if padded_lengths is None else as_ints("padded_lengths", padded_lengths)
        if not len(totals) == len(responses) == len(padded):
            raise ValueError(
                f"{len(totals)} total_lengths, {len(responses)} response_lengths, {len(padded)} padded_lengths: there "
                "must be one of each per sample. Pass those of one micro-batch."
            )
        for i, (total, response, size) in enumerate(zip(totals, responses, padded, strict=True)):
            if not 0 <= response < total:
                raise ValueError(
                    f"sample {i} has response_length {response} and total_length {total}: it must leave a prompt "
                    "token, whose logit predicts the first response token. Count the prompt in total_lengths."
                )
            if size < total:
                raise ValueError(
                    f"sample {i} has padded length {size} and total_length {total}: tokens would be dropped. Pass the "
                    "padded length of the batch."
                )
        self.total_lengths, self.response_lengths, self._padded_lengths = totals, responses, padded
        self._starts = starts_of(responses)

    @property
    def total_tokens(self) -> int:
        return sum(self.response_lengths)

    def mask_starts(self, mask_lengths: Ints) -> Ints:
        if mask_lengths != (lengths := self.response_lengths):
            check_one_each("loss masks", len(mask_lengths), "response_lengths", len(lengths), _SAME_MICROBATCH)
            i = next(i for i, length in enumerate(mask_lengths) if length != lengths[i])
            raise ValueError(
                f"the loss mask of sample {i} has {mask_lengths[i]} entries: it must have its response_length's "
                f"{lengths[i]}. Cut a mask of the whole sample to the response, or use ZigzagTHD."
            )
        return self._starts

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Ints, Ints]:
        check_cp(cp_rank, cp_size)
        if cp_size == 1:
            return self._starts, self.response_lengths
        starts, lengths = Ints(), Ints()
        of_samples = zip(self.total_lengths, self.response_lengths, self._padded_lengths, self._starts, strict=True)
        for total, response, padded, start in of_samples:
            chunk = -(-padded // (2 * cp_size))
            first_logit = total - response - 1  # that predicts a response token
            for piece in (cp_rank, 2 * cp_size - 1 - cp_rank):
                begin = piece * chunk - first_logit
                end = begin + chunk
                # min and max would take as long as all the rest
                begin = 0 if begin < 0 else response if begin > response else begin
                end = 0 if end < 0 else response if end > response else end
                starts.append(start + begin)
                lengths.append(end - begin)
        return starts, lengths
