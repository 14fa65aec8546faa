"""Samples: what the reducers need to know of the samples of one micro-batch, checked once."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss import host_kernels
from megatron_rl_loss.errors import explain
from megatron_rl_loss.layouts import Layout, as_int_vector, check_cp, concatenated_ranges, is_int

Ids = Sequence[int | str] | Tensor

#: Ids travel between ranks as int64 with one bit for their kind and one for the sign.
_ID_LIMIT = 2**61
#: Beyond these the float32 weight of a token could vanish or be infinite.
_SMALLEST, _LARGEST = 1e-30, 1e30
#: Pieces of fewer tokens than this on average are moved by index: a slice each would cost more.
_SHORT = 256


def host_work[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run outside torch's function modes, which slow every call (`torch.set_default_device` is one)."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def as_ids(name: str, ids: Ids, num_samples: int) -> Tensor:
    """One id a sample as int64 [num_samples]; strings by a 61-bit BLAKE2b hash, the same on every rank.

    Raises TypeError for other types, ValueError for a wrong count or an int beyond 61 bits.
    """
    values: list[Any] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(values) != num_samples:
        raise ValueError(
            explain(
                f"{len(values)} {name} for {num_samples} loss masks", "there must be one a sample", "Pass both in order"
            )
        )
    if set(map(type, values)) != {int}:  # else sound, found fast
        odd = [value for value in values if not isinstance(value, str) and not is_int(value)]
        if odd:
            given = f"{name} holds {odd[0]!r} ({type(odd[0]).__name__})"
            raise TypeError(explain(given, "an id must be an int or a str", "Pass one such id a sample"))
        values = [_hashed(value) if isinstance(value, str) else int(value) for value in values]
    if values and not -_ID_LIMIT < min(values) <= max(values) < _ID_LIMIT:
        raise ValueError(explain(f"{name} go beyond 61 bits", "such ids cannot be exchanged", "Pass them as strings"))
    return torch.from_numpy(np.array(values, np.int64))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % _ID_LIMIT


class Samples:
    """The samples of one micro-batch (or of one rank's whole step). Everything about them is computed on the host.

    Args:
        loss_masks: one 1-D tensor a sample: 0/1, bool, or fractional token weights >= 0, over the sample's full length
            (never cut for a CP rank). Any number, none included. On any device; masks on a GPU are copied once, which
            waits for it.
        layout: where the losses of those tokens are; None for plain concatenation, which has no CP cut.
        rollout_ids: one id (int or str) a sample, equal for samples that are parts of one rollout; None if each sample
            is a rollout. Unique within the step, not only within a prompt.
        prompt_ids: one id a sample, equal for the responses to one prompt. Needed by ``prompt_mean``.

    Raises:
        TypeError: masks that are not tensors, are complex, or ids of another type.
        ValueError: masks that are not 1-D, negative, NaN, infinite or too small for float32; numbers or lengths that
            disagree with the layout or the ids.
    """

    @host_work
    def __init__(
        self,
        loss_masks: Sequence[Tensor],
        *,
        layout: Layout | None = None,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
    ) -> None:
        self.loss_masks, self._dtypes = _checked(loss_masks)
        self.mask_lengths = torch.from_numpy(np.array(list(map(Tensor.numel, self.loss_masks)), np.int64))
        self.layout = layout
        if layout is None:
            self._starts = self.mask_lengths.cumsum(0) - self.mask_lengths
            self._total_tokens = int(self.mask_lengths.sum())
        else:
            self._starts = as_int_vector("mask_starts", layout.mask_starts(self.mask_lengths))
            self._total_tokens = layout.total_tokens
        self._gaps = self._gaps_between("loss masks", self._starts, self.mask_lengths)
        flags = None
        if len(self) and host_kernels.available():
            place = self._starts.numpy(), self.mask_lengths.numpy(), self._total_tokens
            flags = host_kernels.join_flags(self.loss_masks, self._dtypes, *place)
        if flags is not None:
            self._buffer = torch.from_numpy(flags[0])
            self._mask_sums = self._active_tokens = torch.from_numpy(flags[1]).double()
        else:
            values = self.in_buffer(self.loss_masks)
            self._mask_sums, self._active_tokens = self._measured(values)
            self._buffer = values.float()
        n = len(self)
        self.rollout_ids = None if rollout_ids is None else as_ids("rollout_ids", rollout_ids, n)
        self.prompt_ids = None if prompt_ids is None else as_ids("prompt_ids", prompt_ids, n)
        self._local_segments: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._local_parts: dict[tuple[int, int], Tensor] = {}

    @property
    def flat_mask(self) -> Tensor:
        """The masks in the layout's buffer, float32 [total_tokens], 0 in padding. Not to be changed."""
        return self._buffer.float()

    def _gaps_between(self, what: str, starts: Tensor, lengths: Tensor) -> np.ndarray[Any, Any]:
        """Free positions of the buffer before, between and after pieces of it; refuses a layout that misplaces them."""
        bounds = np.zeros(2 * len(starts) + 2, np.int64)
        bounds[1:-1:2], bounds[2::2] = starts.numpy(), (starts + lengths).numpy()
        bounds[-1] = self._total_tokens
        gaps = bounds[1::2] - bounds[::2]
        if gaps.min() < 0:
            places = ", ".join(f"[{start}, {end})" for start, end in bounds[1:-1].reshape(-1, 2)[:8])
            given = f"{type(self.layout).__name__} puts {what} at {places}"
            rule = f"they must be in order, apart, and within the {self._total_tokens} tokens of its buffer"
            raise ValueError(explain(given, rule, "Mend the layout's mask_starts, local_segments or total_tokens"))
        return gaps

    def _measured(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and number of nonzero entries of each mask, float64 [num_samples]; refuses unsound values."""
        low, high = values.aminmax() if values.numel() else (values.sum(), values.sum())
        if not bool((low >= 0) & (high <= _LARGEST)):  # NaN is neither
            self._refuse(values, ~((values >= 0) & (values <= _LARGEST)))
        flat = values.numpy()
        sums = self._sums(flat)
        if high <= 1 and not any(dtype.is_floating_point for dtype in self._dtypes):
            return sums, sums
        active = self._sums((flat != 0).astype(np.float32))
        if high <= 1 and torch.equal(sums, active):
            return sums, active
        tiny = (flat < _SMALLEST) & (flat != 0)
        if tiny.any():
            self._refuse(values, torch.from_numpy(tiny))
        return self._sums(flat.astype(np.float64)), active

    def _sums(self, flat: np.ndarray[Any, Any]) -> Tensor:
        """Of each sample, float64 [num_samples]; exact for fewer than 2**24 float32 zeros and ones a sample."""
        filled = self.mask_lengths > 0
        sums = torch.zeros(len(self), dtype=torch.float64, device="cpu")
        # From each start to the next one; what lies between samples is 0.
        sums[filled] = torch.from_numpy(np.add.reduceat(flat, self._starts[filled].numpy())).double()
        return sums

    def _refuse(self, buffer: Tensor, unsound: Tensor) -> None:
        position = int(unsound.nonzero()[0])
        i = int(torch.searchsorted(self._starts + self.mask_lengths, position, right=True))
        given = f"the loss mask of sample {i} holds {float(buffer[position])}"
        rule = f"token weights must be finite and >= 0 (0, or from {_SMALLEST:g} to {_LARGEST:g})"
        raise ValueError(explain(given, rule, "Pass 0 for tokens that do not count"))

    def __len__(self) -> int:
        return len(self.loss_masks)

    def mask_sums(self) -> Tensor:
        """M_i, the sum of each sample's mask, float64 [num_samples]."""
        return self._mask_sums

    def active_tokens(self) -> Tensor:
        """Number of tokens of nonzero weight in each sample, float64 [num_samples]."""
        return self._active_tokens

    def in_buffer(self, values: Sequence[Tensor]) -> Tensor:
        """One 1-D tensor a sample, each as long as its mask -> the layout's buffer, [total_tokens], 0 in padding.

        On the host; float64 if one of them is, else float32.
        """
        if not values:
            return torch.zeros(self._total_tokens, dtype=torch.float32, device="cpu")
        dtypes = {value.dtype for value in values}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        gaps = self._gaps
        if values[0].device.type != "cpu" or torch.bfloat16 in dtypes or self.mask_lengths.double().mean() < _SHORT:
            joined = torch.cat(list(values)).detach().cpu().to(dtype)
            if not gaps.any():
                return joined
            buffer = joined.new_zeros(self._total_tokens)
            buffer[concatenated_ranges(self._starts, self.mask_lengths)] = joined
            return buffer
        arrays = [value.numpy(force=True) for value in values]
        if gaps.any():
            padding = np.zeros(gaps.max(), bool)
            parts = zip(gaps[:-1].tolist(), arrays, strict=True)
            arrays = [part for gap, array in parts for part in (padding[:gap], array)] + [padding[: gaps[-1]]]
        return torch.from_numpy(np.concatenate(arrays, dtype=str(dtype).removeprefix("torch."), casting="unsafe"))

    def local(self, buffer: Tensor, cp_rank: int, cp_size: int) -> Tensor:
        """The part of a flat buffer, [total_tokens], that this CP rank holds, in the order of its losses."""
        starts, lengths = self.local_segments(cp_rank, cp_size)
        if int(lengths.sum()) == self._total_tokens:
            return buffer
        if not len(lengths) or lengths.double().mean() < _SHORT:
            return buffer[concatenated_ranges(starts, lengths)]
        pieces = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        flat = buffer.numpy()
        return torch.from_numpy(np.concatenate([flat[start:end] for start, end in pieces]))

    def _local_part(self, cp_rank: int, cp_size: int) -> Tensor:
        place = cp_rank, cp_size
        if place not in self._local_parts:
            self._local_parts[place] = self.local(self._buffer, *place)
        return self._local_parts[place]

    def local_mask(self, cp_rank: int, cp_size: int) -> Tensor:
        """What this CP rank holds of `flat_mask`, float32 [num_local_tokens]. Not to be changed."""
        return self._local_part(cp_rank, cp_size).float()

    def local_active_tokens(self, cp_rank: int, cp_size: int) -> int:
        """Number of tokens of nonzero weight that this CP rank holds."""
        return int(np.count_nonzero(self._local_part(cp_rank, cp_size).numpy()))

    @host_work
    def weighted_mask(self, sample_weights: Tensor, cp_rank: int, cp_size: int) -> Tensor:
        """`local_mask` with each sample's tokens multiplied by that sample's weight, float32 [num_local_tokens]."""
        weights = sample_weights.float()
        starts, lengths = self.local_segments(cp_rank, cp_size)
        if self._buffer.dtype == torch.uint8:
            segments = starts.numpy(), lengths.numpy()
            flags, sample_starts = self._buffer.numpy(), self._starts.numpy()
            return torch.from_numpy(host_kernels.weigh_flags(flags, sample_starts, weights.numpy(), segments))
        mask = self.local_mask(cp_rank, cp_size)
        if not len(self) or not mask.numel():
            return mask
        if bool((weights == weights[0]).all()):
            return mask * float(weights[0])
        # The rank holds a sample's tokens together and samples in order: how many does it hold before each one?
        at = torch.searchsorted(starts, self._starts, right=True) - 1
        held = lengths.cumsum(0) - lengths
        before = torch.where(at < 0, 0, held[at] + torch.minimum(self._starts - starts[at], lengths[at]))
        before[0] = 0
        counts = np.diff(before.numpy(), append=mask.numel())
        return torch.from_numpy(np.repeat(weights.numpy(), counts)).mul_(mask)

    def local_positions(self, cp_rank: int, cp_size: int) -> Tensor:
        """Positions of the layout's flat buffer that this CP rank holds, in the order of its losses, int64."""
        return concatenated_ranges(*self.local_segments(cp_rank, cp_size))

    def local_segments(self, cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
        """First positions and lengths of the buffer's pieces that this CP rank holds, none of them empty.

        Raises ValueError where the layout cannot be cut so, or where none says how.
        """
        check_cp(cp_rank, cp_size)
        place = cp_rank, cp_size
        if place not in self._local_segments:
            if self.layout is not None:
                segments = self.layout.local_segments(cp_rank, cp_size)
                starts, lengths = (as_int_vector("local_segments", part) for part in segments)
            elif cp_size == 1:
                starts, lengths = self._starts, self.mask_lengths
            else:
                given = f"cp_size is {cp_size} and no layout was given"
                rule = "how tokens are cut over CP ranks must be said, never guessed"
                remedy = "Pass one of megatron_rl_loss.layouts (Gathered if they are not)"
                raise ValueError(explain(given, rule, remedy))
            if bool((lengths <= 0).any()):
                starts, lengths = starts[lengths > 0], lengths[lengths > 0]
            self._gaps_between(f"what CP rank {cp_rank} of {cp_size} holds", starts, lengths)
            self._local_segments[place] = starts, lengths
        return self._local_segments[place]

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        """Shapes this rank's ``per_token_loss`` may have."""
        if self.layout is not None:
            return self.layout.loss_shapes(num_local_tokens, cp_size)
        shapes: list[tuple[int, ...]] = [(num_local_tokens,), (1, num_local_tokens)]
        lengths = set(self.mask_lengths.tolist())
        return shapes + [(len(self), length) for length in lengths if len(lengths) == 1]


def _checked(loss_masks: Sequence[Tensor]) -> tuple[list[Tensor], set[torch.dtype]]:
    """The masks, and their dtypes."""
    if isinstance(loss_masks, Tensor):
        given = f"loss_masks is one tensor of shape {tuple(loss_masks.shape)}"
        raise TypeError(explain(given, "it must be a list of 1-D tensors, one a sample", "Pass list(loss_masks)"))
    masks = list(loss_masks)
    if set(map(type, masks)) != {Tensor} or set(map(Tensor.dim, masks)) != {1}:  # else sound, found fast
        for i, mask in enumerate(masks):
            if not isinstance(mask, Tensor):
                given = f"the loss mask of sample {i} is a {type(mask).__name__}"
                raise TypeError(explain(given, "it must be a 1-D tensor", "Wrap it in torch.tensor"))
            if mask.dim() != 1:
                given = f"the loss mask of sample {i} has shape {tuple(mask.shape)}"
                raise ValueError(explain(given, "it must be 1-D, one entry a token", "Pass one tensor a sample"))
    dtypes = set(map(attrgetter("dtype"), masks))
    if any(dtype.is_complex for dtype in dtypes):
        i = next(i for i, mask in enumerate(masks) if mask.is_complex())
        given = f"the loss mask of sample {i} is {masks[i].dtype}"
        raise TypeError(explain(given, "token weights must be real numbers", "Pass 0/1, bool or float weights"))
    devices = set() if all(map(attrgetter("is_cpu"), masks)) else {mask.device for mask in masks}
    if len(devices) > 1:
        given = f"loss masks on {sorted(map(str, devices))}"
        raise ValueError(explain(given, "they must share one device", "Move them together"))
    return masks, dtypes
