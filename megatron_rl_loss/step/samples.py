"""Samples: what is to be known of the samples of one micro-batch, checked once, and which tokens a CP rank holds.

The host checks lengths, ids and layouts; masks stay on their device (see masks.py). There, whether masks are sound is a
tensor that nobody waits for: the step's totals carry it, or `torch._assert_async` stops the device.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.errors import check_cp, check_one_each, require
from megatron_rl_loss.step import masks
from megatron_rl_loss.step.collectives import Group, rank_in, size_of
from megatron_rl_loss.step.ids import Ids, as_ids
from megatron_rl_loss.step.layouts import Ints, Layout, as_ints, concatenated_ranges, starts_of

Labels = Mapping[str, Sequence[Any] | Tensor]


class Samples:
    """The samples of one micro-batch (or of one rank's whole step).

    Args:
        loss_masks: one 1-D tensor per sample: 0/1 (ints, bools or floats) or fractional token weights >= 0, over the
            sample's full length (never cut for a CP rank). Any number, none included; all on one device.
        layout: where the losses of those tokens are; None for plain concatenation, which has no CP cut.
        rollout_ids: one id (int or str) per sample, equal for samples that are parts of one rollout; None if each
            sample is a rollout. Unique within the step, not only within a prompt.
        prompt_ids: one id per sample, equal for the responses to one prompt. Needed by ``prompt_mean``.
        tokens: the micro-batch's input ids or whatever else its replicas must share, of any shape, uncut: then they are
            compared between context, tensor and pipeline parallel ranks along with the masks.
        labels: whatever else your own modes look at, by name: lists or tensors with one entry per sample (the sign of
            the advantage, a task, the turn of each token).
        term_masks: further masks by name, as `loss_masks`, for terms of the loss that have their own (`Term`).
        cp_group: the context-parallel group of this micro-batch, where groups change between micro-batches (dynamic or
            hybrid context parallelism): each of its ranks has these `Samples`, the first one counts them. None: that of
            the launch.

    Attributes:
        loss_masks, layout, tokens, labels, cp_group: as given.
        by_mask: the same samples with each of the further masks.
        mask_lengths: ints [num_samples].
        mask_starts: first position of each mask in the layout's buffer, ints [num_samples].
        rollout_ids, prompt_ids: int64 [num_samples] on the host, or None.
        total_tokens: positions in the layout's buffer.
        holds_flags: whether all masks are ints or bools.

    Raises:
        TypeError: masks that are not tensors, are complex, or ids of another type.
        ValueError: masks that are not 1-D, negative, NaN, infinite, too small for float32, or ints above 1 (on a
            device: a device assertion, or in the step's totals); numbers or lengths that disagree with the layout or
            the ids.
    """

    def __init__(
        self,
        loss_masks: Sequence[Tensor],
        *,
        layout: Layout | None = None,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
        tokens: Tensor | None = None,
        term_masks: Mapping[str, Sequence[Tensor]] | None = None,
        labels: Labels | None = None,
        cp_group: Group | None = None,
    ) -> None:
        self.cp_group = cp_group
        size_of(cp_group)  # refuses what is no group
        self.loss_masks, self.mask_lengths = masks.check_masks(loss_masks)
        self.layout = layout
        self.tokens = tokens
        self.labels = {} if labels is None else dict(labels)
        if layout is None:
            self.total_tokens, self.mask_starts = sum(self.mask_lengths), starts_of(self.mask_lengths)
        else:
            self.total_tokens = layout.total_tokens
            self.mask_starts = as_ints("mask_starts", layout.mask_starts(self.mask_lengths))
            if layout.is_foreign:
                _check_pieces(layout, "loss masks", self.mask_starts, self.mask_lengths)
        n = len(self.loss_masks)
        self.rollout_ids = None if rollout_ids is None else as_ids("rollout_ids", rollout_ids, n)
        self.prompt_ids = None if prompt_ids is None else as_ids("prompt_ids", prompt_ids, n)
        try:
            joined = self.in_buffer(self.loss_masks)
        except RuntimeError:
            masks.check_device("loss masks", self.loss_masks)
            raise
        self.holds_flags = not joined.is_floating_point()
        self._buffer = joined if joined.dtype == torch.float64 else joined.float()
        if joined.is_cpu:
            self.check_masks()
        for name, entries in self.labels.items():
            check_one_each(f"labels {name!r}", len(entries), "loss masks", n)
        self.by_mask = {name: self._with(name, further) for name, further in (term_masks or {}).items()}

    def _with(self, name: str, further: Sequence[Tensor]) -> "Samples":
        """These samples by other masks."""
        check_one_each(f"masks {name!r}", len(masks.check_masks(further)[0]), "loss masks", len(self))
        ids: dict[str, Any] = {"rollout_ids": self.rollout_ids, "prompt_ids": self.prompt_ids}
        samples = Samples(further, layout=self.layout, labels=self.labels, cp_group=self.cp_group, **ids)
        masks.check_device(f"loss masks and masks {name!r}", [self._buffer, samples._buffer])
        if samples.mask_lengths != self.mask_lengths:
            raise ValueError(
                f"masks {name!r} of {samples.mask_lengths} tokens beside loss masks of {self.mask_lengths}: they must "
                "be of the same tokens. Pass an entry for each, 0 where it does not count."
            )
        return samples

    def with_kept_tokens(self, name: str, kept: Tensor) -> "Samples":
        """These samples with a further mask: the loss mask where ``kept``, bools [total_tokens], is true, else 0."""
        pieces = zip(self.loss_masks, self.mask_starts, self.mask_lengths, strict=True)
        further = [mask * kept[start : start + length].to(mask.device) for mask, start, length in pieces]
        samples = copy.copy(self)
        samples.by_mask = {**self.by_mask, name: self._with(name, further)}
        return samples

    def label(self, name: str) -> Sequence[Any] | Tensor:
        """The labels of that name; ValueError where there are none."""
        if name not in self.labels:
            raise ValueError(
                f"a label {name!r} of samples whose labels are: {', '.join(self.labels) or 'none'}: what a mode looks "
                "at must be there in every micro-batch. Give Samples labels with it."
            )
        return self.labels[name]

    def with_mask(self, name: str | None) -> "Samples":
        """These samples with one of the further masks, or for None as they are; ValueError for an unknown one."""
        if name is not None and name not in self.by_mask:
            raise ValueError(
                f"a mask {name!r} of samples whose further masks are: {', '.join(self.by_mask) or 'none'}: a mask that "
                "is declared, or that a term names, must be there in every micro-batch. Give Samples term_masks with "
                "it."
            )
        return self if name is None else self.by_mask[name]

    def __len__(self) -> int:
        return len(self.loss_masks)

    def in_buffer(self, values: Sequence[Tensor]) -> Tensor:
        """One 1-D tensor per sample, each as long as its mask -> the layout's buffer, [total_tokens], 0 in padding.

        On the values' device; their dtypes are promoted together.
        """
        return masks.join(values, self.mask_starts, self.mask_lengths, self.total_tokens)

    @property
    def flat_mask(self) -> Tensor:
        """The masks in the layout's buffer, float32 [total_tokens], 0 in padding, on their device."""
        return self._buffer.float()

    @cached_property
    def mask_sums(self) -> Tensor:
        """M_i, the sum of each sample's mask, float64 [num_samples] on the masks' device."""
        return masks.sum_each(self._buffer, self.mask_starts, self.mask_lengths, self.holds_flags)

    @cached_property
    def active_tokens(self) -> Tensor:
        """Number of tokens of nonzero weight in each sample, float64 [num_samples] on the masks' device."""
        if self.holds_flags:
            return self.mask_sums
        return masks.sum_each((self._buffer != 0).float(), self.mask_starts, self.mask_lengths, True)

    @cached_property
    def sound(self) -> bool | Tensor:
        """Whether every mask entry is a usable weight: a bool, or on a device 0-dim, and nobody waits for it."""
        sound = masks.are_sound(self._buffer, self.holds_flags)
        for mask in [] if self.holds_flags else self.loss_masks:
            if not mask.is_floating_point():  # ints beside floats are flags all the same
                sound = sound & (mask <= 1).all()
        return sound

    def check_masks(self, wait: bool = False) -> None:
        """Refuse masks that are not sound. On a device without waiting, unless told to: then the error says which."""

        def first_unsound() -> str:
            for i, mask in enumerate(self.loss_masks):
                largest = masks.LARGEST if mask.is_floating_point() else 1
                unsound = mask[(mask < 0) | ~(mask <= largest) | (mask != 0) & ~(mask >= masks.SMALLEST)]
                if unsound.numel():
                    return f"the loss mask of sample {i} holds {float(unsound[0])}"
            raise AssertionError("all masks are sound")

        require(
            bool(self.sound) if wait else self.sound,
            first_unsound,
            "token weights must be finite and >= 0 (0, or from 1e-30 to 1e+30), and those of integer masks 0 or 1. "
            "Pass 0 for tokens that do not count, 1 or a float weight for those that do.",
        )

    def digest(self) -> bytes:
        """Of masks, their order, ids and tokens: equal where all of these are. Waits for a device."""
        digest = hashlib.blake2b(repr(self.mask_lengths).encode(), digest_size=8)
        digest.update(self._mask_bytes())
        for values in (self.rollout_ids, self.prompt_ids, self.tokens):
            digest.update(b"none" if values is None else values.numpy(force=True).tobytes())
        for name, entries in sorted(self.labels.items()):
            plain = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in entries]
            digest.update(repr((name, plain)).encode())
        for name, samples in sorted(self.by_mask.items()):
            digest.update(name.encode() + samples._mask_bytes())
        return digest.digest()

    @property
    def has_identity(self) -> bool:
        """Whether a digest tells these samples from others: equal masks alone may be chance."""
        return len(self) > 0 and any(one is not None for one in (self.rollout_ids, self.prompt_ids, self.tokens))

    def _mask_bytes(self) -> bytes:
        """The same for the same masks, whatever integer type holds flags."""
        if self.holds_flags:
            return np.packbits((self._buffer != 0).numpy(force=True)).tobytes()
        return self.flat_mask.numpy(force=True).tobytes()

    @property
    def counts_here(self) -> bool:
        """Whether this rank counts them for the step: the first rank of the micro-batch's own cp_group does."""
        return rank_in(self.cp_group) == 0

    def place_in(self, cp_group: Group | None) -> tuple[int, int]:
        """(cp_rank, cp_size) of this rank in the micro-batch's own context-parallel group, else in the launch's."""
        group = cp_group if self.cp_group is None else self.cp_group
        return rank_in(group), size_of(group)

    def local(self, cp_rank: int, cp_size: int) -> "LocalTokens":
        """The tokens that this CP rank holds.

        Raises ValueError where the layout cannot be cut so, or where none says how.
        """
        layout = self.layout
        if layout is None:
            check_cp(cp_rank, cp_size)
            if cp_size > 1:
                raise ValueError(
                    f"cp_size is {cp_size} and no layout was given: how tokens are cut over CP ranks must be said, "
                    "never guessed. Pass one of megatron_rl_loss's layouts: ZigzagTHD as Megatron packs, Gathered if "
                    "they are not cut."
                )
            return LocalTokens(self, cp_size, self.mask_starts, self.mask_lengths)
        starts, lengths = (as_ints("local_segments", part) for part in layout.local_segments(cp_rank, cp_size))
        if layout.is_foreign:
            check_cp(cp_rank, cp_size)
            _check_parts(self, layout, cp_size)
        return LocalTokens(self, cp_size, starts, lengths)


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

    def __len__(self) -> int:
        return sum(self._lengths)

    @cached_property
    def loss_shapes(self) -> list[tuple[int, ...]]:
        """Shapes this rank's ``per_token_loss`` may have."""
        if self.samples.layout is not None:
            return self.samples.layout.loss_shapes(len(self), self.cp_size)
        shapes: list[tuple[int, ...]] = [(len(self),), (1, len(self))]
        lengths = set(self.samples.mask_lengths)
        return shapes + [(len(self.samples), length) for length in lengths if len(lengths) == 1]

    @property
    def copies(self) -> int:
        """CP ranks that hold each of these tokens, and add their shares of it."""
        layout = self.samples.layout
        return self.cp_size if layout is not None and layout.replicated_over_cp else 1

    @property
    def gradient_scale(self) -> int:
        """What the gradient of a share must be multiplied by: a slicing gather loses that of the other copies."""
        layout = self.samples.layout
        return 1 if layout is None or layout.gather_sums_gradients else self.copies

    @cached_property
    def mask(self) -> Tensor:
        """What this rank holds of the masks, float32 [num_local_tokens]. Not to be changed."""
        return masks.cut(self.samples._buffer, self._starts, self._lengths).float()

    @property
    def num_active(self) -> Tensor:
        """How many of these tokens have a nonzero weight, 0-dim int64."""
        return self.mask.count_nonzero()

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in the layout's buffer, int64 [num_local_tokens]."""
        positions = torch.from_numpy(concatenated_ranges(self._starts, self._lengths))
        return positions.to(self.mask.device, non_blocking=True)

    @cached_property
    def sample_index(self) -> Tensor:
        """The sample each token belongs to, int64 [num_local_tokens]; padding has that of a sample beside it, or 0."""
        if not len(self.samples):
            return torch.zeros_like(self.mask, dtype=torch.int64)
        return self.spread(torch.arange(len(self.samples), device=self.mask.device))

    @property
    def counts(self) -> Tensor:
        """How many of these tokens go with each sample, in order, int64 [num_samples] on the host."""
        return torch.tensor(self._counts, dtype=torch.int64, device="cpu")

    def of(self, buffer: Tensor) -> Tensor:
        """The rank's part, [num_local_tokens, ...], of values of all tokens, [total_tokens, ...].

        Raises ValueError for another number of tokens.
        """
        if not buffer.dim() or len(buffer) != self.samples.total_tokens:
            raise ValueError(
                f"a tensor of shape {tuple(buffer.shape)}: it must have a value for each of the micro-batch's "
                f"{self.samples.total_tokens} tokens. Pass the whole, uncut tensor, in the order of the layout."
            )
        return masks.cut(buffer, self._starts, self._lengths)

    def spread(self, of_samples: Tensor) -> Tensor:
        """One value per sample, [num_samples] -> the value of each token's sample, [num_local_tokens]."""
        return masks.repeat(of_samples, self._counts)

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """First position, number of tokens and sample of each run: tokens of one piece that go with one sample.

        In the order of the tokens, none empty. Padding goes with the sample before it, or the first one.
        """
        samples, i, runs = self.samples, 0, []
        next_starts = [*samples.mask_starts[1:], samples.total_tokens]
        for start, length in zip(self._starts, self._lengths, strict=True):
            end = start + length
            while end > next_starts[i]:  # pieces are in the order of the buffer, as samples are
                if start < next_starts[i]:
                    runs.append((start, next_starts[i] - start, i))
                    start = next_starts[i]
                i += 1
            if end > start:
                runs.append((start, end - start, i))
        return runs

    @cached_property
    def runs_of_ranks(self) -> list[tuple[int, int, int]]:
        """Those of all CP ranks, in the order of the buffer; of this rank alone where it holds everything."""
        if self.copies == self.cp_size:
            return self.runs
        return sorted(run for rank in range(self.cp_size) for run in self.samples.local(rank, self.cp_size).runs)

    @cached_property
    def _counts(self) -> Ints:
        """How many of the rank's tokens go with each sample."""
        if len(self.samples) < 2:
            return [sum(self._lengths)] * len(self.samples)
        counts = [0] * len(self.samples)
        for _, length, i in self.runs:
            counts[i] += length
        return counts


# --- layouts of one's own


def _check_pieces(layout: Layout, what: str, starts: Ints, lengths: Ints) -> None:
    """Refuse pieces of the buffer that are misplaced."""
    pieces = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    ends, begins = [0, *(end for _, end in pieces)], [*starts, layout.total_tokens]
    if any(end > begin for end, begin in zip(ends, begins, strict=True)):
        places = ", ".join(f"[{start}, {end})" for start, end in pieces[:8])
        raise ValueError(
            f"{type(layout).__name__} puts {what} at {places}: they must be in order, apart, and within the "
            f"{layout.total_tokens} tokens of its buffer. Mend the layout's mask_starts, local_segments or "
            "total_tokens."
        )


def _check_parts(samples: Samples, layout: Layout, cp_size: int) -> None:
    """Refuse a cut that misplaces pieces, or gives a sample's token to several CP ranks or to none."""
    holders = np.zeros(layout.total_tokens, np.int64)
    for rank in range(cp_size):
        starts, lengths = (as_ints("local_segments", part) for part in layout.local_segments(rank, cp_size))
        _check_pieces(layout, f"what CP rank {rank} of {cp_size} holds", starts, lengths)
        holders[concatenated_ranges(starts, lengths)] += 1
    expected = cp_size if layout.replicated_over_cp else 1
    positions = concatenated_ranges(samples.mask_starts, samples.mask_lengths)
    for position in positions[holders[positions] != expected][:1]:
        raise ValueError(
            f"{type(layout).__name__} gives position {position} of the buffer to {holders[position]} of {cp_size} CP "
            f"ranks: each token of a sample must be held by {expected}. Mend the layout's local_segments, or set "
            "replicated_over_cp where every rank holds everything."
        )
