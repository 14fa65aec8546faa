"""Layouts: which token positions of a micro-batch this context-parallel (CP) rank holds.

A micro-batch is one flat buffer of ``total_tokens`` positions. A layout says where in it each sample's loss mask
begins (`mask_starts`) and which positions, in which order, a CP rank's per-token losses stand for (`local_segments`).
Everything is computed on the host (whatever torch's default device), without a Python loop over samples.

| layout           | flat buffer                          | rank r of c holds                                       |
|------------------|--------------------------------------|---------------------------------------------------------|
| `ZigzagTHD`      | padded packed slots                  | chunks r and 2c-1-r of every slot cut into 2c           |
| `ZigzagBSHD`     | rows of ``seq_length``               | the same, a slot a row                                  |
| `ZigzagResponse` | response tokens, one after the other | response tokens whose logit lies in chunks r and 2c-1-r |
| `Contiguous`     | padded packed slots                  | the r-th of c equal pieces (of the buffer or each slot) |
| `Gathered`       | packed slots                         | everything, on every rank                               |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.errors import explain

IntList = Sequence[int] | Tensor


def as_int_vector(name: str, values: IntList) -> Tensor:
    """`values` as a 1-D int64 tensor on the host; TypeError for anything that is not whole numbers."""
    if not isinstance(values, Tensor | Sequence):
        given = f"{name} is {values!r} ({type(values).__name__})"
        raise TypeError(explain(given, "it must be a list or tensor of ints", "Pass one entry a sample or slot"))
    if not isinstance(values, Tensor):
        if set(map(type, values)) != {int}:  # else sound, found fast
            for value in values:
                if not is_int(value):
                    given = f"{name} holds {value!r} ({type(value).__name__})"
                    raise TypeError(explain(given, "it must hold whole numbers", "Pass ints or an int tensor"))
        return torch.from_numpy(np.array(values, np.int64))
    if values.dim() != 1 or values.dtype == torch.bool or values.is_floating_point() or values.is_complex():
        given = f"{name} is a {values.dtype} tensor of shape {tuple(values.shape)}"
        raise TypeError(explain(given, "it must be a 1-D tensor of ints", "Convert it first"))
    return values.detach().to(device="cpu", dtype=torch.int64)


def is_int(value: object) -> bool:
    """True for a whole number (NumPy's too) that is not a bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor)


def concatenated_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """``cat([arange(s, s + n) for s, n in zip(starts, lengths)])`` without the loop."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    return torch.arange(total, device="cpu") + (starts - (ends - lengths)).repeat_interleave(lengths)


def check_cp(cp_rank: int, cp_size: int) -> None:
    """Refuse a CP coordinate that cannot be one."""
    given, remedy = f"cp_rank={cp_rank!r}, cp_size={cp_size!r}", "Pass cp_group.rank() and cp_group.size()"
    if not is_int(cp_rank) or not is_int(cp_size):
        raise TypeError(explain(given, "both must be ints", remedy))
    if not 0 <= cp_rank < cp_size:
        raise ValueError(explain(given, "needs 0 <= cp_rank < cp_size", remedy))


def _starts_of(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _shown(values: Tensor, most: int = 8) -> str:
    return f"[{', '.join(str(int(v)) for v in values[:most])}{', ...' if values.numel() > most else ''}]"


def _first(condition: Tensor) -> int | None:
    """Index of the first True, or None."""
    return int(condition.nonzero()[0]) if bool(condition.any()) else None


class Layout(ABC):
    """Common to all layouts. A value object: made once a micro-batch, never changed."""

    #: True when every CP rank holds every token, so that each counts for 1/cp_size of it.
    replicated_over_cp: bool = False

    @property
    @abstractmethod
    def total_tokens(self) -> int:
        """Positions in the flat buffer, over all CP ranks."""

    @abstractmethod
    def mask_starts(self, mask_lengths: Tensor) -> Tensor:
        """First buffer position of each sample's loss mask, int64 [num_samples].

        Raises ValueError when the number or the lengths of the masks do not fit the layout.
        """

    @abstractmethod
    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
        """First positions and lengths of the buffer's pieces that this CP rank holds, both int64 [num_segments].

        In the order of its per-token losses, which is that of the buffer; pieces may be empty.
        Raises ValueError when a slot cannot be cut for ``cp_size`` ranks.
        """

    def local_indices(self, cp_rank: int, cp_size: int) -> Tensor:
        """Buffer positions this CP rank holds, in the order of its per-token losses, int64 [num_local_tokens].

        Raises ValueError when a slot cannot be cut for ``cp_size`` ranks.
        """
        return concatenated_ranges(*self.local_segments(cp_rank, cp_size))

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

    def __init__(self, cu_seqlens_padded: IntList, total_lengths: IntList | None = None, filler_slots: int = 0) -> None:
        cu = as_int_vector("cu_seqlens_padded", cu_seqlens_padded)
        if cu.numel() == 0 or int(cu[0]) != 0:
            given, remedy = f"cu_seqlens_padded is {_shown(cu)}", "Pass cumulative padded lengths, 0 included"
            raise ValueError(explain(given, "it must begin with 0", remedy))
        sizes = cu.diff()
        if bool((sizes < 0).any()):
            given, remedy = f"cu_seqlens_padded is {_shown(cu)}", "Pass cumulative lengths, not lengths"
            raise ValueError(explain(given, "it must not decrease", remedy))
        if not is_int(filler_slots) or filler_slots < 0:
            given = f"filler_slots is {filler_slots!r}"
            raise ValueError(explain(given, "it must be an int >= 0", "Count the last slots that hold no sample"))
        self.filler_slots = filler_slots
        self._starts = cu[:-1]
        self._sizes = sizes
        self._true_lengths = None if total_lengths is None else as_int_vector("total_lengths", total_lengths)

    @property
    def total_tokens(self) -> int:
        return int(self._sizes.sum())

    def _sample_slots(self, num_samples: int) -> Tensor | slice:
        """The slot each sample is in."""
        if num_samples == self._sizes.numel() and self.filler_slots == 0:
            return slice(None)
        filled = self._sizes.nonzero().flatten()
        used = filled[: max(filled.numel() - self.filler_slots, 0)]
        if num_samples == used.numel():
            return used
        raise ValueError(
            explain(
                f"{num_samples} loss masks for {used.numel()} slots with a sample (filler_slots={self.filler_slots})",
                "there must be one mask a slot, in order",
                "If the last slots only pad the pack, say so with filler_slots; do not add masks for them",
            )
        )

    def mask_starts(self, mask_lengths: Tensor) -> Tensor:
        slots = self._sample_slots(mask_lengths.numel())
        sizes = self._sizes[slots]
        fits = mask_lengths == sizes
        true_lengths = self._true_lengths
        if true_lengths is not None:
            if true_lengths.numel() != mask_lengths.numel():
                given = f"{true_lengths.numel()} total_lengths for {mask_lengths.numel()} loss masks"
                raise ValueError(explain(given, "there must be one a sample", "Pass those of this micro-batch"))
            i = _first((true_lengths > sizes) | (true_lengths < 0))
            if i is not None:
                given = f"sample {i} has total_length {int(true_lengths[i])} in a slot of {int(sizes[i])} tokens"
                remedy = "Pass cu_seqlens_padded and total_lengths of the same micro-batch"
                raise ValueError(explain(given, "it must fit its padded slot", remedy))
            fits = fits | (mask_lengths == true_lengths)
        i = _first(~fits)
        if i is not None:
            allowed = f"it must have its slot's {int(sizes[i])}"
            if true_lengths is not None:
                allowed += f" or its total_length's {int(true_lengths[i])}"
            remedy = "A mask of the unpadded sample needs total_lengths; one of the response only needs ZigzagResponse"
            raise ValueError(
                explain(f"the loss mask of sample {i} has {int(mask_lengths[i])} entries", allowed, remedy)
            )
        return self._starts[slots]


def _zigzag(starts: Tensor, sizes: Tensor, cp_rank: int, cp_size: int, slot: str) -> tuple[Tensor, Tensor]:
    """Chunks cp_rank and 2 * cp_size - 1 - cp_rank of every slot; the slots stay in order."""
    check_cp(cp_rank, cp_size)
    if cp_size == 1:
        return starts, sizes
    i = _first(sizes % (2 * cp_size) != 0)
    if i is not None:
        rule = f"it must be a multiple of 2 * cp_size = {2 * cp_size}, or the zigzag cut repeats and drops tokens"
        raise ValueError(explain(f"{slot} {i} has {int(sizes[i])} tokens", rule, f"Pad every {slot}"))
    chunk = sizes // (2 * cp_size)
    head = starts + cp_rank * chunk
    tail = starts + (2 * cp_size - 1 - cp_rank) * chunk
    return torch.stack([head, tail], 1).flatten(), torch.stack([chunk, chunk], 1).flatten()


class ZigzagTHD(_PackedSlots):
    """Packed sequences as Megatron-Core and Transformer Engine cut them over CP ranks.

    Of slot ``[s, e)`` with ``c = (e - s) / (2 * cp_size)`` rank r holds ``[s + r*c, s + (r+1)*c)``, then
    ``[e - (r+1)*c, e - r*c)``. Losses: ``[num_local_tokens]`` or ``[1, num_local_tokens]``.
    Source: Transformer Engine's `thd_get_partitioned_indices`, which Megatron-Core calls in `core/utils.py`.

    >>> layout = ZigzagTHD([0, 8, 16])
    >>> layout.local_indices(cp_rank=0, cp_size=2).tolist()
    [0, 1, 6, 7, 8, 9, 14, 15]
    """

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
        return _zigzag(self._starts, self._sizes, cp_rank, cp_size, "slot")


class ZigzagBSHD(_PackedSlots):
    """An unpacked batch ``[batch_size, seq_length]`` cut along the sequence, zigzag, row by row.

    Masks have ``seq_length`` entries or, with ``total_lengths``, each row's unpadded length.
    Losses: ``[batch_size, seq_length / cp_size]`` (batch first) or flat.
    Source: Megatron `core/utils.py`, `get_batch_on_this_cp_rank`.
    """

    def __init__(self, batch_size: int, seq_length: int, total_lengths: IntList | None = None) -> None:
        for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
            if not is_int(value) or value < 1:
                raise ValueError(explain(f"{name} is {value!r}", "it must be an int >= 1", "Pass the padded shape"))
        super().__init__(torch.arange(batch_size + 1, device="cpu") * seq_length, total_lengths)
        self.batch_size = batch_size
        self.seq_length = seq_length

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
        return _zigzag(self._starts, self._sizes, cp_rank, cp_size, "row")

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

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
        check_cp(cp_rank, cp_size)
        starts, sizes = self._starts, self._sizes
        if not self.per_slot:
            starts, sizes = torch.zeros(1, dtype=torch.int64, device="cpu"), sizes.sum()[None]
        i = _first(sizes % cp_size != 0)
        if i is not None:
            given = f"{f'slot {i}' if self.per_slot else 'the packed buffer'} has {int(sizes[i])} tokens"
            raise ValueError(explain(given, f"it must be a multiple of cp_size = {cp_size}", "Pad it"))
        piece = sizes // cp_size
        return starts + cp_rank * piece, piece


class Gathered(_PackedSlots):
    """Losses gathered over CP (or never sliced) before the reducer: every CP rank holds every position.

    The reducer then gives each rank 1/cp_size of the value, so that the sum over CP ranks stays the step loss. That is
    right for a gather whose backward *sums* the gradients of the CP ranks, such as Megatron's
    `gather_from_sequence_parallel_region`. One whose backward only slices leaves the gradient cp_size times too small.
    """

    replicated_over_cp = True

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
        check_cp(cp_rank, cp_size)
        return self._starts, self._sizes


class ZigzagResponse(Layout):
    """Response tokens only, zigzag by sample, as slime and miles keep their log-probs.

    Sample i of ``total_lengths[i]`` tokens is cut into 2 * cp_size chunks of ``ceil(total / (2 * cp_size))`` tokens.
    Rank r owns the logits of chunks r and 2 * cp_size - 1 - r, and keeps those that predict a response token (logit t
    predicts token t + 1). Masks have ``response_lengths[i]`` entries. With ``padded_lengths`` (rows padded to a common
    maximum) the chunks are cut from the padded length. Losses: ``[num_local_tokens]``.
    """

    def __init__(
        self, total_lengths: IntList, response_lengths: IntList, padded_lengths: IntList | None = None
    ) -> None:
        totals = as_int_vector("total_lengths", total_lengths)
        responses = as_int_vector("response_lengths", response_lengths)
        padded = totals if padded_lengths is None else as_int_vector("padded_lengths", padded_lengths)
        if not totals.numel() == responses.numel() == padded.numel():
            counts = (
                f"{totals.numel()} total_lengths, {responses.numel()} response_lengths, {padded.numel()} padded_lengths"
            )
            raise ValueError(explain(counts, "there must be one of each a sample", "Pass those of one micro-batch"))
        i = _first((responses >= totals) | (responses < 0))
        if i is not None:
            given = f"sample {i} has response_length {int(responses[i])} and total_length {int(totals[i])}"
            rule = "it must leave a prompt token, whose logit predicts the first response token"
            raise ValueError(explain(given, rule, "Count the prompt in total_lengths"))
        i = _first(padded < totals)
        if i is not None:
            given = f"sample {i} has padded length {int(padded[i])} and total_length {int(totals[i])}"
            raise ValueError(explain(given, "tokens would be dropped", "Pass the padded length of the batch"))
        self._totals, self._responses, self._padded = totals, responses, padded

    @property
    def total_tokens(self) -> int:
        return int(self._responses.sum())

    def mask_starts(self, mask_lengths: Tensor) -> Tensor:
        if mask_lengths.numel() != self._responses.numel():
            given = f"{mask_lengths.numel()} loss masks for {self._responses.numel()} response_lengths"
            raise ValueError(explain(given, "there must be one a sample", "Pass those of one micro-batch"))
        i = _first(mask_lengths != self._responses)
        if i is not None:
            given = f"the loss mask of sample {i} has {int(mask_lengths[i])} entries"
            rule = f"it must have its response_length's {int(self._responses[i])}"
            remedy = "Cut a mask of the whole sample to the response, or use ZigzagTHD"
            raise ValueError(explain(given, rule, remedy))
        return _starts_of(self._responses)

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
        check_cp(cp_rank, cp_size)
        chunk = (self._padded + 2 * cp_size - 1) // (2 * cp_size)
        first_logit, end_logit = self._totals - self._responses - 1, self._totals - 1
        starts, lengths = [], []
        for piece in (cp_rank, 2 * cp_size - 1 - cp_rank):
            begin = torch.maximum(piece * chunk, first_logit)
            end = torch.minimum((piece + 1) * chunk, end_logit)
            starts.append(_starts_of(self._responses) + begin - first_logit)
            lengths.append((end - begin).clamp(min=0))
        return torch.stack(starts, 1).flatten(), torch.stack(lengths, 1).flatten()
