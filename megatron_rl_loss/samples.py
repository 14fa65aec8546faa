"""Samples: what is to be known of the samples of one micro-batch, checked once, and which tokens a CP rank holds.

Lengths, ids and layouts are looked at on the host; masks stay on their device. On a device nothing waits: whether masks
are sound is then a tensor, which the step's totals carry (see totals.py) or `torch._assert_async` looks at.
"""

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss import layouts
from megatron_rl_loss.checks import check_cp, require
from megatron_rl_loss.errors import refused
from megatron_rl_loss.ids import Ids, as_ids
from megatron_rl_loss.layouts import Ints, Layout, as_ints, concatenated_ranges

#: Beyond these the float32 weight of a token could vanish or be infinite.
SMALLEST, LARGEST = 1e-30, 1e30
#: Their pieces are in order, apart and inside the buffer: foreign layouts are looked at.
_SOUND_LAYOUTS = {
    layouts.ZigzagTHD,
    layouts.ZigzagBSHD,
    layouts.ZigzagResponse,
    layouts.Contiguous,
    layouts.Gathered,
    type(None),
}


class Samples:
    """The samples of one micro-batch (or of one rank's whole step).

    Args:
        loss_masks: one 1-D tensor a sample: 0/1 (ints, bools or floats) or fractional token weights >= 0, over the
            sample's full length (never cut for a CP rank). Any number, none included; all on one device.
        layout: where the losses of those tokens are; None for plain concatenation, which has no CP cut.
        rollout_ids: one id (int or str) a sample, equal for samples that are parts of one rollout; None if each sample
            is a rollout. Unique within the step, not only within a prompt.
        prompt_ids: one id a sample, equal for the responses to one prompt. Needed by ``prompt_mean``.

    Attributes:
        loss_masks, layout: as given.
        mask_lengths: int64 array [num_samples].
        rollout_ids, prompt_ids: int64 [num_samples] on the host, or None.
        total_tokens: positions in the layout's buffer.

    Raises:
        TypeError: masks that are not tensors, are complex, or ids of another type.
        ValueError: masks that are not 1-D, negative, NaN, infinite, too small for float32, or ints above 1 (on a
            device: once it is waited for); numbers or lengths that disagree with the layout or the ids.
    """

    def __init__(
        self,
        loss_masks: Sequence[Tensor],
        *,
        layout: Layout | None = None,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
    ) -> None:
        self.loss_masks = _checked(loss_masks)
        self.mask_lengths: Ints = np.array([len(mask) for mask in self.loss_masks], np.int64)
        self.layout = layout
        if layout is None:
            self.total_tokens = int(self.mask_lengths.sum())
            self._starts: Ints = self.mask_lengths.cumsum() - self.mask_lengths
        else:
            self._starts = as_ints("mask_starts", layout.mask_starts(self.mask_lengths))
            self.total_tokens = layout.total_tokens
        self._check_places("loss masks", self._starts, self.mask_lengths)
        self._has_gaps = int(self.mask_lengths.sum()) < self.total_tokens
        self._joined = self.in_buffer(self.loss_masks)
        n = len(self.loss_masks)
        self.rollout_ids = None if rollout_ids is None else as_ids("rollout_ids", rollout_ids, n)
        self.prompt_ids = None if prompt_ids is None else as_ids("prompt_ids", prompt_ids, n)
        if self._joined.is_cpu:
            self.check_masks()

    def __len__(self) -> int:
        return len(self.loss_masks)

    def _check_places(self, what: str, starts: Ints, lengths: Ints) -> None:
        """Refuse a layout of one's own that misplaces pieces of the buffer."""
        if type(self.layout) in _SOUND_LAYOUTS:
            return
        bounds = np.concatenate([[0], np.stack([starts, starts + lengths], 1).ravel(), [self.total_tokens]])
        if (np.diff(bounds)[::2] < 0).any():
            places = ", ".join(f"[{start}, {end})" for start, end in bounds[1:-1].reshape(-1, 2)[:8])
            facts = {"what": what, "places": places, "total_tokens": self.total_tokens}
            raise refused("misplaced", layout=type(self.layout).__name__, **facts)

    # --- the masks, on their device

    def in_buffer(self, values: Sequence[Tensor]) -> Tensor:
        """One 1-D tensor a sample, each as long as its mask -> the layout's buffer, [total_tokens], 0 in padding.

        On the values' device; their dtypes are promoted together.
        """
        values = list(values)
        ends = self._starts + self.mask_lengths
        if not values:
            return torch.zeros(self.total_tokens, device="cpu")
        if self._has_gaps:
            gaps = np.append(self._starts, self.total_tokens) - np.append(0, ends)
            padding = values[0].new_zeros(int(gaps.max()))
            paddings = [padding[:gap] for gap in gaps.tolist()]
            values = [part for pair in zip(paddings, values, strict=False) for part in pair] + paddings[-1:]
        return torch.cat(values).detach()

    @cached_property
    def flat_mask(self) -> Tensor:
        """The masks in the layout's buffer, float32 [total_tokens], 0 in padding. Not to be changed."""
        return self._joined.float()

    @property
    def _holds_flags(self) -> bool:
        """Whether all masks are ints or bools, and so zeros and ones."""
        return not self._joined.is_floating_point()

    @cached_property
    def mask_sums(self) -> Tensor:
        """M_i, the sum of each sample's mask, float64 [num_samples]."""
        return self._sums(self.flat_mask if self._holds_flags else self._joined.double())

    @cached_property
    def active_tokens(self) -> Tensor:
        """Number of tokens of nonzero weight in each sample, float64 [num_samples]."""
        return self.mask_sums if self._holds_flags else self._sums((self._joined != 0).float())

    def _sums(self, buffer: Tensor) -> Tensor:
        """Of each sample; exact for fewer than 2**24 float32 zeros and ones a sample."""
        if len(self) == 1:
            return buffer.sum()[None].double()
        # From each start to the next one; what lies between samples is 0.
        lengths = np.diff(self._starts, append=self.total_tokens) if self._has_gaps else self.mask_lengths
        moved = torch.from_numpy(lengths).to(buffer.device, non_blocking=True)
        begin = int(self._starts[0]) if len(self) else 0
        return torch.segment_reduce(buffer[begin:], "sum", lengths=moved, unsafe=True).double()

    @cached_property
    def sound(self) -> Tensor:
        """Whether every mask entry is a usable weight, 0-dim bool on the masks' device."""
        masks = self._joined
        if masks.dtype == torch.bool or not masks.numel():
            return torch.ones((), dtype=torch.bool, device=masks.device)
        low, high = masks.aminmax()
        if masks.is_cpu and low >= 0 and high <= 1 and self._holds_flags:
            return _SOUND  # found fast
        within = (low >= 0) & (high <= self._largest)  # NaN is neither
        return within & ((masks == 0) | (masks >= SMALLEST)).all()

    @property
    def _largest(self) -> float:
        return 1 if self._holds_flags else LARGEST

    def check_masks(self, wait: bool = False) -> None:
        """Refuse masks that are not `sound`. On a device without waiting, unless asked to: then it can say which."""
        if self.sound is not _SOUND:
            require(self.sound.cpu() if wait else self.sound, "unsound_mask", self._first_unsound)

    def _first_unsound(self) -> dict[str, object]:
        masks = self._joined.cpu()
        position = int(((masks < 0) | ~(masks <= self._largest) | (masks != 0) & ~(masks >= SMALLEST)).int().argmax())
        sample = int(np.searchsorted(self._starts + self.mask_lengths, position, side="right"))
        return {"sample": sample, "value": float(masks[position])}

    # --- what a CP rank holds of them

    def local(self, cp_rank: int, cp_size: int) -> "LocalTokens":
        """The tokens that this CP rank holds.

        Raises ValueError where the layout cannot be cut so, or where none says how.
        """
        check_cp(cp_rank, cp_size)
        if self.layout is not None:
            pieces = self.layout.local_segments(cp_rank, cp_size)
            starts, lengths = (as_ints("local_segments", part) for part in pieces)
            self._check_places(f"what CP rank {cp_rank} of {cp_size} holds", starts, lengths)
        elif cp_size == 1:
            starts, lengths = self._starts, self.mask_lengths
        else:
            raise refused("no_layout", cp_size=cp_size)
        return LocalTokens(self, cp_size, starts, lengths)

    def loss_shapes(self, num_local_tokens: int, cp_size: int) -> list[tuple[int, ...]]:
        """Shapes this rank's ``per_token_loss`` may have."""
        if self.layout is not None:
            return self.layout.loss_shapes(num_local_tokens, cp_size)
        shapes: list[tuple[int, ...]] = [(num_local_tokens,), (1, num_local_tokens)]
        lengths = set(self.mask_lengths.tolist())
        return shapes + [(len(self), length) for length in lengths if len(lengths) == 1]


class LocalTokens:
    """The tokens of a micro-batch that one CP rank holds, in the order of its losses; tensors on the masks' device.

    Attributes:
        samples: of the micro-batch.
        cp_size: ranks that the micro-batch is cut for.
    """

    def __init__(self, samples: Samples, cp_size: int, starts: Ints, lengths: Ints) -> None:
        self.samples = samples
        self.cp_size = cp_size
        self._starts, self._lengths = starts, lengths  # of the pieces of the buffer; some may be empty
        self._size = int(lengths.sum())

    def __len__(self) -> int:
        return self._size

    @property
    def copies(self) -> int:
        """CP ranks that hold each of these tokens, and add their shares of it."""
        layout = self.samples.layout
        return self.cp_size if layout is not None and layout.replicated_over_cp else 1

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in the layout's buffer, int64 [num_local_tokens]."""
        device = self.samples._joined.device
        if device.type == "cpu":
            return torch.from_numpy(concatenated_ranges(self._starts, self._lengths))
        shifts = self._starts - (self._lengths.cumsum() - self._lengths)
        return torch.arange(self._size, device=device) + self._repeated(torch.from_numpy(shifts), self._lengths)

    @cached_property
    def sample_index(self) -> Tensor:
        """The sample each token belongs to, int64 [num_local_tokens]; padding has that of a sample beside it."""
        return self.spread(torch.arange(len(self.samples), device=self.samples._joined.device))

    @cached_property
    def mask(self) -> Tensor:
        """What this rank holds of the flat mask, float32 [num_local_tokens]. Not to be changed."""
        masks = self.samples._joined
        if not masks.is_cpu or self._size == self.samples.total_tokens:
            return self.of(masks).float()
        flat = (masks if masks.dtype != torch.bfloat16 else masks.float()).numpy()  # slices of NumPy's are cheap
        pieces = zip(self._starts.tolist(), (self._starts + self._lengths).tolist(), strict=True)
        return torch.from_numpy(np.concatenate([flat[begin:end] for begin, end in pieces])).float()

    def of(self, buffer: Tensor) -> Tensor:
        """The rank's part, [num_local_tokens, ...], of values of all tokens, [total_tokens, ...]."""
        if self._size == self.samples.total_tokens:
            return buffer
        return buffer.index_select(0, self.positions.to(buffer.device))

    def spread(self, of_samples: Tensor) -> Tensor:
        """A value a sample, [num_samples] -> the value of each token's sample, [num_local_tokens]."""
        if not len(of_samples):
            return of_samples.new_zeros(self._size)  # all is padding
        return of_samples.expand(self._size) if len(of_samples) == 1 else self._repeated(of_samples, self._counts)

    @cached_property
    def _counts(self) -> Ints:
        """How many of the rank's tokens go with each sample: padding with the sample before it, or the first one."""
        # Tokens are in the order of the buffer, as samples are: how many lie before each sample?
        filled = self._lengths > 0
        starts, lengths = (
            (self._starts, self._lengths) if filled.all() else (self._starts[filled], self._lengths[filled])
        )
        if not starts.size:
            return np.zeros(len(self.samples), np.int64)
        held = lengths.cumsum() - lengths
        at = np.maximum(starts.searchsorted(self.samples._starts, side="right") - 1, 0)
        before = held[at] + np.minimum(np.maximum(self.samples._starts - starts[at], 0), lengths[at])
        before[0] = 0
        return np.diff(before, append=self._size)

    def _repeated(self, values: Tensor, counts: Ints) -> Tensor:
        """Each value as often as its count says; on a device without waiting, on the host by NumPy, which is faster."""
        device = self.samples._joined.device
        if device.type == "cpu":
            return torch.from_numpy(values.numpy().repeat(counts))
        repeats = torch.from_numpy(counts).to(device, non_blocking=True)
        return values.to(device, non_blocking=True).repeat_interleave(repeats, output_size=self._size)


#: What most masks are.
_SOUND = torch.ones((), dtype=torch.bool, device="cpu")


def _checked(loss_masks: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(loss_masks, Tensor):
        raise refused("masks_in_one", shape=tuple(loss_masks.shape))
    masks = list(loss_masks)
    if set(map(type, masks)) != {Tensor} or set(map(Tensor.dim, masks)) != {1}:  # else sound, found fast
        for i, mask in enumerate(masks):
            if not isinstance(mask, Tensor):
                raise refused("mask_no_tensor", sample=i, type=type(mask).__name__)
            if mask.dim() != 1:
                raise refused("mask_not_1d", sample=i, shape=tuple(mask.shape))
    if len(masks) > 1 and len(devices := set(map(attrgetter("device"), masks))) > 1:
        raise refused("masks_apart", devices=sorted(map(str, devices)))
    if any(map(torch.is_complex, masks)):
        i = next(i for i, mask in enumerate(masks) if mask.is_complex())
        raise refused("mask_complex", sample=i, dtype=masks[i].dtype)
    return masks
