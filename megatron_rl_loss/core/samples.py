"""Samples: masks, ids and layout of one micro-batch, checked once; and the tokens of it that a CP rank holds.

Masks lie on the host, in one NumPy buffer per micro-batch. Masks on a device are copied there when they are first
needed: `read_masks` copies those of many micro-batches in one transfer, before any of them is trained on.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, rank_in, size_of, warn_on_one_rank
from megatron_rl_loss.core.errors import check_mapping, check_one_each, check_sized, is_number
from megatron_rl_loss.core.ids import Ids, IdsByName, Parts, check_units, parts_of, type_of_ids
from megatron_rl_loss.core.layouts import (
    Layout,
    Pieces,
    as_ints,
    check_cp,
    check_cut,
    check_pieces,
    is_user_defined,
)
from megatron_rl_loss.core.masks import (
    Array,
    Floats,
    Mask,
    check_entries,
    check_masks,
    groups_in_cache,
    is_sound,
    join_on_host,
    place,
    sum_each,
    to_array,
)
from megatron_rl_loss.core.notebook import SHOWN_ROWS, first_numbers, html_table
from megatron_rl_loss.core.transfers import to_device


def plain_label(label: Any) -> Any:
    """A label in the form that replicas compare: numbers and texts unchanged, sets sorted, other objects by type."""
    if isinstance(label, Tensor | np.ndarray):
        return to_array(label).tolist()
    if isinstance(label, list | tuple):
        return [plain_label(entry) for entry in label]
    if isinstance(label, dict):
        return sorted(repr((plain_label(key), plain_label(value))) for key, value in label.items())
    if isinstance(label, set | frozenset):
        return sorted(repr(plain_label(entry)) for entry in label)
    if isinstance(label, np.generic):
        return label.item()
    return label if isinstance(label, str | bytes | int | float | None) else type(label).__qualname__


def as_numbers(labels: Any) -> Any:
    """A list of numbers as an array, so that modes may calculate with it; other labels as they are."""
    is_list = isinstance(labels, list | tuple) and all(is_number(label) for label in labels)
    return np.array(labels) if is_list else labels


Labels = Mapping[str, Sequence[Any] | Tensor]


@dataclass(frozen=True)
class UnreadMasks:
    """Masks of which some lie on a device, and nobody has read them yet."""

    tensors: list[Tensor]


class ReadMasks(NamedTuple):
    """Masks on the host, checked and summed.

    Attributes:
        buffer: float32 or float64 [total_tokens], 0 in padding.
        sums, active_tokens: of each sample, float64 [num_samples].
        holds_flags: every mask is of ints or bools.
    """

    buffer: Array
    sums: Floats
    active_tokens: Floats
    holds_flags: bool


class Samples:
    """The samples of one micro-batch (or of one rank's whole step).

    Args:
        loss_masks: one mask per sample, a 1-D tensor on any device, an array or a list: 0/1 (ints, bools or floats) or
            fractional token weights >= 0, over the sample's full length (never cut for a CP rank). Any number, none
            included.
        layout: places of the tokens in the buffer of losses; None for plain concatenation, which has no CP cut.
        rollout_ids: one id (int or str) per sample, equal for samples that are parts of one rollout; None if each
            sample is a rollout. Unique within the step, not only within a prompt.
        prompt_ids: one id per sample, equal for the responses to one prompt.
        ids: further ids by name (``{"session": [...]}``), for modes, metrics and losses by units of that name. Rows
            (``{"turn": [[0, 0, 1], [-1, 2]]}``) give each mask entry an id; a negative id or "" is of no unit.
        tokens: input ids, uncut, one for each position of the layout's buffer; where the layout is of responses alone,
            of whole samples or of responses. Ranks compare them along with the masks.
        labels: further inputs of your own modes, by name: one entry per sample.
        term_masks: further masks by name, as `loss_masks`, for terms of the loss that have their own.
        cp_group: the context-parallel group of this micro-batch, where groups change between micro-batches: all of
            its ranks have these samples, the first one counts them. None for the launch's group.

    Attributes:
        parts: by name, the samples' parts of units, ``rollout`` and ``prompt`` among them where given.
        ids: int64 [num_samples] by name, of those that are given per sample.
        by_mask: the same samples with each of the further masks.
        mask_lengths, mask_starts: of each sample's mask in the layout's buffer of `total_tokens` positions.

    Raises:
        TypeError: masks that are not real numbers, or ids of another type.
        ValueError: masks that are not 1-D; numbers or lengths that disagree with the layout or the ids; entries that
            are negative, not finite, too small for float32, ints above 1, or not 0 and of no unit (of masks on a
            device: when they are read).
    """

    def __init__(
        self,
        loss_masks: Iterable[Mask],
        *,
        layout: Layout | None = None,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
        ids: IdsByName | None = None,
        tokens: Tensor | Array | None = None,
        labels: Labels | None = None,
        term_masks: Mapping[str, Iterable[Mask]] | None = None,
        cp_group: Group | None = None,
    ) -> None:
        size_of(cp_group)  # refuses what is no group
        for what, by_name in (("ids", ids), ("labels", labels), ("term_masks", term_masks)):
            if by_name:
                check_mapping(what, by_name, "Pass {name: one entry per sample}")
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(f"layout is {layout!r}: it must be a Layout. Pass e.g. ZigzagTHD(cu_seqlens_padded).")
        masks, self.mask_lengths = check_masks(loss_masks)
        self.layout, self.tokens, self.labels, self.cp_group = layout, tokens, dict(labels or {}), cp_group
        bounds = [0, *accumulate(self.mask_lengths)]
        self.total_tokens, self.mask_starts = bounds.pop(), bounds
        if layout is not None:
            self.total_tokens = layout.total_tokens
            starts = layout.mask_starts(self.mask_lengths)
            if is_user_defined(type(layout)):
                self.mask_starts = as_ints("mask_starts", starts)
                check_one_each("mask_starts", len(self.mask_starts), "loss masks", len(self), "Mend the layout")
                check_pieces(layout, "loss masks", self.places)
            else:
                self.mask_starts = list(starts)
        self.parts: dict[str, Parts] = {}
        self.ids: dict[str, Array] = {}
        self.id_types: tuple[tuple[str, str], ...] = ()
        if rollout_ids is not None or prompt_ids is not None or ids:
            named = [("rollout", rollout_ids), ("prompt", prompt_ids), *(ids or {}).items()]
            self._read_ids([(name, values) for name, values in named if values is not None])
        for name, entries in self.labels.items():
            check_sized(f"labels {name!r}", entries)
            check_one_each(f"labels {name!r}", len(entries), "loss masks", len(self))
        if tokens is not None:
            self._check_tokens(tokens)
        self._cut: dict[tuple[int, int], Pieces] = {}  # of the rank that was asked for last
        self._masks = self._held(masks)
        self.by_mask = {name: self.masked_by(name, further) for name, further in (term_masks or {}).items()}

    def _read_ids(self, named: list[tuple[str, Any]]) -> None:
        by_key = dict(named)
        if len(by_key) < len(named):
            twice = next(name for name in by_key if sum(name == other for other, _ in named) > 1)
            raise ValueError(
                f"{twice}_ids= together with ids={{{twice!r}: ...}}: both are the ids of the {twice}s, which must be "
                "given once. Drop one of the two."
            )
        for reserved in ("sample", "step"):
            if reserved in by_key:
                raise ValueError(f"ids named {reserved!r}: the step and each sample are units already. Rename them.")
        self.parts = {name: parts_of(name, values, self.mask_lengths) for name, values in by_key.items()}
        for parts in self.parts.values():
            for array in parts:
                if array is not None:
                    array.setflags(write=False)
        self.ids = {name: parts.ids for name, parts in self.parts.items() if parts.entry_parts is None}
        self.id_types = tuple(sorted([(name, type_of_ids(values)) for name, values in by_key.items()]))

    def _check_tokens(self, tokens: Any) -> None:
        try:
            shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else np.asarray(tokens).shape
        except ValueError:  # ragged
            raise TypeError(
                "tokens in rows of different lengths: all must lie in one buffer. Join or pad them."
            ) from None
        if not isinstance(tokens, Tensor) and np.asarray(tokens).dtype.kind not in "iuf":
            raise TypeError(
                f"tokens of type {type(tokens).__name__}: they must be numbers. Pass the model's input ids."
            )
        whole = None if self.layout is None or self.layout.response_lengths is None else self.layout.total_lengths
        if math.prod(shape) not in (self.total_tokens, sum(whole or [self.total_tokens])):
            remedy = "Pass the micro-batch's input ids, padded and ordered as the layout says, not cut for a CP rank."
            if self.layout is None and math.prod(shape) > self.total_tokens:
                remedy = f"{MASKS_TOO_SHORT}."
            raise ValueError(
                f"tokens of shape {shape} for a buffer of {self.total_tokens} positions: there must be one token for "
                f"each. {remedy}"
            )

    def masked_by(self, name: str, other_masks: Iterable[Mask]) -> "Samples":
        """These samples with other masks, which errors call by that name."""
        masks, lengths = check_masks(other_masks)
        check_one_each(f"masks {name!r}", len(masks), "loss masks", len(self))
        if lengths != self.mask_lengths:
            raise ValueError(
                f"masks {name!r} of {lengths[:8]} entries, loss masks of {self.mask_lengths[:8]}: both must cover the "
                "same tokens. Pass one entry per token, 0 where the token does not count."
            )
        samples = copy.copy(self)
        samples.by_mask, samples._masks, samples._cut = {}, self._held(masks), self._cut
        return samples

    def __len__(self) -> int:
        return len(self.mask_lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cut": {}}  # each rank has its own

    def __repr__(self) -> str:
        """Counts that are on the host; masks on a device are not read."""
        masks = self._masks
        active = f", {masks.active_tokens.sum():,.0f} active" if isinstance(masks, ReadMasks) else ""
        units = ", ".join(sorted({"sample", *self.parts}))
        counts = f"{len(self)} samples, {sum(self.mask_lengths):,} tokens{active}"
        layout = "no layout" if self.layout is None else type(self.layout).__name__
        return f"Samples({counts}, {layout}, parts by {units})"

    def _repr_html_(self) -> str:
        """A notebook's table: of each sample its tokens and its mask; masks on a device are not read."""
        head, rows = ["sample", "tokens", "active", "first entries of the loss mask"], []
        for number, length in enumerate(self.mask_lengths[:SHOWN_ROWS]):
            row = [number, f"{length:,}", "on a device", ""]
            if isinstance(self._masks, ReadMasks):
                begin = self.mask_starts[number]
                entries = self._masks.buffer[begin : begin + length]
                row[2:] = [f"{self._masks.active_tokens[number]:,.0f}", first_numbers(entries.tolist())]
            rows.append(row)
        return html_table(repr(self), head, rows, len(self))

    @property
    def places(self) -> list[tuple[int, int]]:
        """[begin, end) of each sample's mask in the buffer."""
        return [(start, start + n) for start, n in zip(self.mask_starts, self.mask_lengths, strict=True)]

    def _held(self, masks: list[Tensor]) -> ReadMasks | UnreadMasks:
        """Masks on the host are read at once."""
        if not all(mask.is_cpu for mask in masks):
            return UnreadMasks(masks)
        if (read := self._read_flags(masks)) is not None:
            return read
        return self._read(join_on_host(masks), masks, is_own=len(masks) > 1)

    def _read_flags(self, masks: list[Tensor]) -> ReadMasks | None:
        """Masks of ints or bools on the host, each entry read once; None where one is to be looked at closer."""
        dtypes = {mask.dtype for mask in masks}
        if len(dtypes) != 1 or masks[0].dtype.is_floating_point or len(self.parts) > len(self.ids):
            return None
        is_filled = sum(self.mask_lengths) == self.total_tokens
        buffer, sums = (np.empty if is_filled else np.zeros)(self.total_tokens, np.float32), np.empty(len(masks))
        for first, last in groups_in_cache(self.mask_lengths):
            group, lengths = slice(first, last), self.mask_lengths[first:last]
            joined = join_on_host(masks[group])
            if not is_sound(joined, 1):
                return None  # the error names the sample
            sums[group] = sum_each(joined, lengths)
            begin = self.mask_starts[first]
            if self.mask_starts[last - 1] + lengths[-1] - begin == len(joined):  # side by side
                buffer[begin : begin + len(joined)] = joined
                continue
            at = 0
            for start, length in zip(self.mask_starts[group], lengths, strict=True):
                buffer[start : start + length] = joined[at : at + length]
                at += length
        if self.layout is not None:
            self.layout.check_masks(buffer)
        return _unchanged(ReadMasks(buffer, sums, sums, holds_flags=True))

    def _read(self, joined: Array, masks: list[Tensor], is_own: bool) -> ReadMasks:
        """The masks, which lie end to end on the host; ValueError for entries that are no usable weights.

        If nobody else has the memory (`is_own`), it may become the buffer.
        """
        holds_flags = check_entries(joined, masks)
        if not holds_flags:
            _warn_of_token_ids(joined, self.mask_lengths)
        check_units(self.parts, joined)
        # Sums of a float64 mask keep its digits; a narrower mask is float32, as its weights are. Entries that
        # are the user's mask too are copied: they would change with it.
        weights = joined.astype(np.float64 if joined.dtype == np.float64 else np.float32, copy=not is_own)
        sums = sum_each(joined, self.mask_lengths)
        active_tokens = sums if holds_flags else sum_each(weights != 0, self.mask_lengths)
        buffer = place(weights, self.places, self.total_tokens)
        if self.layout is not None:
            self.layout.check_masks(buffer)
        return _unchanged(ReadMasks(buffer, sums, active_tokens, holds_flags))

    @property
    def masks(self) -> ReadMasks:
        """The masks on the host; waits for those on a device."""
        if isinstance(self._masks, UnreadMasks):
            read_masks([self])
        assert isinstance(self._masks, ReadMasks)
        return self._masks

    @property
    def buffer(self) -> Array:
        """The masks in the layout's buffer, float32 or float64 [total_tokens], 0 in padding. Not to be changed."""
        return self.masks.buffer

    @property
    def loss_masks(self) -> list[Array]:
        """The mask of each sample on the host, views of `buffer`."""
        return [self.buffer[begin:end] for begin, end in self.places]

    @property
    def mask_sums(self) -> Floats:
        """M_i, the sum of each sample's mask, float64 [num_samples]."""
        return self.masks.sums

    @property
    def active_tokens(self) -> Floats:
        """Number of tokens of nonzero weight in each sample, float64 [num_samples]."""
        return self.masks.active_tokens

    @property
    def holds_flags(self) -> bool:
        """True where every mask is of ints or bools, so that its entries are 0 or 1."""
        return self.masks.holds_flags

    def in_buffer(self, values: Sequence[Any] | Tensor) -> Any:
        """One row or number per sample -> the layout's buffer [total_tokens], 0 in padding.

        With `ZigzagBSHD` the buffer is [batch, sequence], as uncut losses are. A row is as long as the sample's mask; a
        number, such as an advantage, stands at each entry of the mask. Tensors stay differentiable and on their device;
        others give a float64 array.
        """
        check_sized("values", values)
        check_one_each("rows", len(values), "loss masks", len(self))
        rows = [_to_row(value, length) for value, length in zip(values, self.mask_lengths, strict=True)]
        shapes = [tuple(row.shape) if hasattr(row, "shape") else np.shape(row) for row in rows]
        if shapes != [(length,) for length in self.mask_lengths]:
            lengths = [shape[0] if len(shape) == 1 else shape for shape in shapes[:8]]
            raise ValueError(
                f"rows of {lengths} values for loss masks of {self.mask_lengths[:8]}: a row must be as long as its "
                "sample's mask. Pass one value per mask entry."
            )
        flat = _place_rows(rows, self.places, self.total_tokens)
        if isinstance(values, Tensor) and not rows:
            flat = values.new_zeros(self.total_tokens)
        return flat if self.layout is None else flat.reshape(self.layout.rows(len(flat)))

    def label(self, name: str) -> Any:
        """The labels of that name, an array where each is a number; ValueError where there are none."""
        return as_numbers(_find_named("label", name, self.labels, "labels"))

    def with_mask(self, name: str | None) -> "Samples":
        """These samples with one of the further masks, for None unchanged; ValueError for an unknown mask.

        No samples have every mask.
        """
        return self if name is None or not len(self) else _find_named("mask", name, self.by_mask, "term_masks")

    @property
    def counts_here(self) -> bool:
        """True where this rank counts the samples: on the first rank of the micro-batch's own cp_group."""
        return rank_in(self.cp_group) == 0

    def place_in(self, cp_group: Group | None) -> tuple[int, int]:
        """(cp_rank, cp_size) of this rank in the micro-batch's own context-parallel group, else in the launch's."""
        group = cp_group if self.cp_group is None else self.cp_group
        return rank_in(group), size_of(group)

    def digest(self) -> bytes:
        """A hash of masks, ids, layout, labels and tokens with their shape."""
        digest = blake2b(repr(self.mask_lengths).encode(), digest_size=8)
        digest.update(b"" if self.layout is None else self.layout.describe().encode())
        for name, samples in [("", self), *sorted(self.by_mask.items())]:
            flags = samples.buffer != 0
            # A bit for a flag, whatever its dtype: ranks may read one mask as ints and as bools.
            packed = np.packbits(flags) if samples.holds_flags else samples.buffer.astype(np.float32)
            digest.update(name.encode() + packed.tobytes())
        for name, parts in sorted(self.parts.items()):
            digest.update(name.encode() + b"".join(array.tobytes() for array in parts if array is not None))
        if self.tokens is not None:
            tokens = to_array(self.tokens)
            plain = tokens.astype(np.int64 if tokens.dtype.kind in "biu" else np.float64)
            digest.update(f"{tokens.shape}".encode() + plain.tobytes())
        for name, entries in sorted(self.labels.items()):
            digest.update(repr((name, [plain_label(entry) for entry in entries])).encode())
        return digest.digest()

    def local(self, cp_rank: int, cp_size: int) -> "LocalTokens":
        """The tokens that this CP rank holds; ValueError without a layout, or for one that cannot be cut that way."""
        check_cp(cp_rank, cp_size)
        if self.layout is None:
            if cp_size > 1 and len(self):  # nothing needs no cut
                raise ValueError(
                    f"cp_size is {cp_size} and no layout was given: the layout says how CP ranks cut the tokens. "
                    "Pass layout=: ZigzagTHD for Megatron's packing, Gathered if losses are not cut."
                )
            return LocalTokens(self, cp_size, [(0, self.total_tokens)], cp_rank)
        if (cp_rank, cp_size) not in self._cut:
            if is_user_defined(type(self.layout)):
                check_cut(self.layout, self.places, cp_size)
            self._cut.clear()
            self._cut[cp_rank, cp_size] = list(self.layout.pieces(cp_rank, cp_size))
        return LocalTokens(self, cp_size, self._cut[cp_rank, cp_size], cp_rank)


def as_samples(samples: Samples | Iterable[Mask]) -> Samples:
    """Samples as they are; of masks alone, samples without ids."""
    return samples if isinstance(samples, Samples) else Samples(samples)


def _unchanged(masks: ReadMasks) -> ReadMasks:
    """As ids: a change would not be counted."""
    for counted in (masks.buffer, masks.sums, masks.active_tokens):
        counted.setflags(write=False)
    return masks


def _warn_of_token_ids(joined: Array, lengths: Sequence[int]) -> None:
    """Warn of a mask of floats that look like token ids: whole numbers far above 1, of many values in one sample."""
    if not joined.size or joined.max() < 100:
        return
    ends = list(accumulate(lengths))
    for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        entries = joined[end - length : end]
        if (entries == np.floor(entries)).all() and len(np.unique(entries[entries > 1])) >= 8:
            warn_on_one_rank(
                f"the loss mask of sample {i} holds whole numbers up to {float(entries.max()):g}, of many values: they "
                "look like token ids, and would weigh tokens by them. Pass the loss mask, 1 where a token counts."
            )
            return


def read_masks(microbatches: Iterable[Samples]) -> None:
    """Copy masks that are still on a device to the host, in one transfer per device; raises as `Samples`."""
    microbatches = list(microbatches)
    waiting = [
        (number, samples, samples._masks.tensors)
        for number, microbatch in enumerate(microbatches)
        for samples in (microbatch, *microbatch.by_mask.values())
        if isinstance(samples._masks, UnreadMasks)
    ]
    joined = join_on_host([mask for _, _, masks in waiting for mask in masks])
    ends = np.cumsum([0, *(sum(samples.mask_lengths) for _, samples, _ in waiting)])
    for (number, samples, masks), begin, end in zip(waiting, ends, ends[1:], strict=False):
        try:
            samples._masks = samples._read(joined[begin:end], masks, is_own=True)
        except ValueError as error:
            if len(microbatches) == 1:
                raise
            raise ValueError(f"micro-batch {number}: {error}") from error


def _find_named(what: str, name: str, columns: Mapping[str, Any], argument: str) -> Any:
    """The entry of that name; ValueError where the samples lack it."""
    if name not in columns:
        raise ValueError(
            f"the samples have no {what} {name!r} (they have {', '.join(columns) or 'none'}): every micro-batch must "
            f"bring the {what}s that a mode or a term uses. Pass Samples(..., {argument}={{{name!r}: [...]}})."
        )
    return columns[name]


class LocalTokens:
    """The tokens of a micro-batch that one CP rank holds, in the order of its losses.

    Attributes:
        samples: of the micro-batch.
        cp_rank, cp_size: the rank, of those that the micro-batch is cut for.
        pieces: [begin, end), or (begin, end, step), in the layout's buffer; some may be empty.
    """

    def __init__(self, samples: Samples, cp_size: int, pieces: Pieces, cp_rank: int = 0) -> None:
        self.samples, self.cp_rank, self.cp_size, self.pieces = samples, cp_rank, cp_size, pieces
        self._length = sum([len(range(*piece)) for piece in pieces])

    def __len__(self) -> int:
        return self._length

    @cached_property
    def loss_shapes(self) -> list[tuple[int, ...]]:
        """Shapes that this rank's ``per_token_loss`` may have."""
        if self.samples.layout is not None:
            return self.samples.layout.loss_shapes(len(self), self.cp_size)
        lengths = set(self.samples.mask_lengths)
        rows = [(len(self.samples), length) for length in lengths if len(lengths) == 1]
        return list(dict.fromkeys([(len(self),), (1, len(self)), *rows]))

    @property
    def copies(self) -> int:
        """CP ranks that hold each of these tokens, and add their shares of it."""
        layout = self.samples.layout
        return self.cp_size if layout is not None and layout.is_whole else 1

    @property
    def gradient_scale(self) -> int:
        """The factor of a share's gradient: a slicing gather loses the gradients of the other copies."""
        layout = self.samples.layout
        return 1 if layout is None or layout.gather_sums_gradients else self.copies

    def of(self, buffer: Any) -> Any:
        """This rank's part of a tensor or array with a value, or a vector, for each token of the micro-batch.

        Args:
            buffer: [total_tokens, ...], or with the tokens in two dimensions, [1, total_tokens, ...] or
                [batch, sequence, ...], in the order of the layout's buffer.

        Returns:
            [num_local_tokens, ...], or [1, num_local_tokens, ...] or [batch, local sequence, ...], as given.

        Raises:
            ValueError: another number of tokens.
        """
        total_tokens = self.samples.total_tokens
        if not hasattr(buffer, "ndim"):
            raise TypeError(
                f"a {type(buffer).__name__} to cut: it must be a tensor or an array. Pass torch.tensor(...)."
            )
        if buffer.ndim >= 2 and len(buffer) != total_tokens and math.prod(buffer.shape[:2]) == total_tokens:
            rows = len(buffer)
            if (rows, len(self) // rows) in [(1, len(self)), *self.loss_shapes]:  # other cuts would mix rows
                return self.of(buffer.reshape(-1, *buffer.shape[2:])).reshape(rows, -1, *buffer.shape[2:])
        if not buffer.ndim or len(buffer) != self.samples.total_tokens:
            raise ValueError(
                f"a tensor of shape {tuple(buffer.shape)}: it must have a value for each of the micro-batch's "
                f"{self.samples.total_tokens} tokens. Pass the whole, uncut tensor, in the order of the layout."
            )
        if self.pieces == [(0, len(buffer))]:
            return buffer
        parts = [buffer[slice(*piece)] for piece in self.pieces]
        return torch.cat([buffer[:0], *parts]) if isinstance(buffer, Tensor) else np.concatenate([buffer[:0], *parts])

    @cached_property
    def mask(self) -> Array:
        """This rank's part of the masks, [num_local_tokens]. Not to be changed."""
        mask = self.of(self.samples.buffer)
        mask.flags.writeable = False
        return mask

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """Position of each token in the layout's buffer, int64 [num_local_tokens]."""
        return self.of(np.arange(self.samples.total_tokens))

    @cached_property
    def _parts(self) -> list[tuple[int, int, int, int]]:
        """First position, number of tokens, step and sample of each part of a piece that goes with one sample.

        In the order of the tokens, none empty. Padding goes with the sample before it, or the first one.
        """
        bounds = [*self.samples.mask_starts[1:], self.samples.total_tokens]
        i, parts = 0, []
        for piece in self.pieces:
            begin, end, step = piece if len(piece) == 3 else (*piece, 1)
            while begin < end and i < len(self.samples):
                until = min(end, bounds[i])
                if until > begin:
                    number = -((begin - until) // step)  # rounded up
                    parts.append((begin, number, step, i))
                    begin += number * step
                i += begin < end
        return parts

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """First position, number of tokens and sample of each run of tokens that lie side by side in the buffer."""
        runs = []
        for begin, number, step, i in self._parts:
            tokens = range(begin, begin + number * step, step)
            runs += [(begin, number, i)] if step == 1 else [(position, 1, i) for position in tokens]
        return runs

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of these tokens that each sample has, in order, int64 [num_samples]."""
        counts = [0] * len(self.samples)
        for _, number, _, i in self._parts:
            counts[i] += number
        return np.array(counts, np.int64)

    @cached_property
    def sample_index(self) -> npt.NDArray[np.int64]:
        """The sample that each token belongs to, int64 [num_local_tokens]; padding has that of a sample beside it."""
        return self.spread(np.arange(len(self.samples)))

    def place_of(self, token: int) -> tuple[int, int]:
        """The sample of a local token, and the token's place in the sample's mask."""
        sample = int(self.sample_index[token])
        return sample, int(self.positions[token]) - self.samples.mask_starts[sample]

    @cached_property
    def runs_of_ranks(self) -> list[tuple[int, int, int]]:
        """The runs of all CP ranks, in the order of the buffer; of this rank alone where it holds everything."""
        if self.copies == self.cp_size:
            return self.runs
        return sorted(run for rank in range(self.cp_size) for run in self.samples.local(rank, self.cp_size).runs)

    @cached_property
    def num_active(self) -> int:
        """The number of these tokens with a nonzero mask."""
        return int(np.count_nonzero(self.mask))

    def spread(self, sample_values: Array) -> Array:
        """One value per sample, [num_samples] -> the value of each token's sample, [num_local_tokens].

        0 at the tokens of a filler micro-batch, which has no sample.
        """
        if not len(self.samples):
            return np.zeros(len(self), sample_values.dtype)
        return sample_values.repeat(self.counts)


def _to_row(value: Any, length: int) -> Any:
    """A row of that length where the value is one number, else the value itself."""
    if np.ndim(value):
        return value
    if isinstance(value, Tensor):
        return value.expand(length)
    if not isinstance(value, (Real, np.generic)):
        raise TypeError(f"{value!r} for a sample: it must be a number, or a row as long as the mask. Pass either.")
    return np.full(length, value)


def _place_rows(rows: Sequence[Any], places: Sequence[tuple[int, int]], total_tokens: int) -> Any:
    """`place` of rows that are not joined yet; of tensors a tensor, which stays differentiable and on their device."""
    like = next((row for row in rows if isinstance(row, Tensor)), None)
    if like is None:
        return place(np.concatenate([np.zeros(0), *rows]), places, total_tokens)
    rows = [
        row if isinstance(row, Tensor) else to_device(torch.as_tensor(row), like.device, like.dtype) for row in rows
    ]
    parts, at = list[Tensor](), 0
    for (begin, end), row in zip(places, rows, strict=True):
        parts += [row.new_zeros(begin - at), row]
        at = end
    return torch.cat([*parts, parts[-1].new_zeros(total_tokens - at)])


def check_values(what: str, values: object, local: LocalTokens) -> None:
    """Validate values: one float for each token that a rank holds; `what` names the values in an error."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        if isinstance(getattr(values, "per_token_loss", None), Tensor):
            raise TypeError(
                f"{what} is a {type(values).__name__}: it must be a float tensor. Pass its .per_token_loss."
            )
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{what} is {kind}: it must be a float tensor. Pass one unreduced value per token.")
    if values.shape not in local.loss_shapes:
        hint = layout_hint(values.numel(), len(local), local.samples)
        shown = " or ".join(map(str, local.loss_shapes))
        raise ValueError(f"{what} of shape {tuple(values.shape)}: this rank's part of the layout is {shown}. {hint}.")


#: Where samples without a layout have fewer mask entries than tokens.
MASKS_TOO_SHORT = (
    "The masks have fewer entries: if they are of responses alone, pass masks of whole samples, 0 at the prompt; if "
    "samples are padded, pass layout="
)


def layout_hint(num_values: int, num_local: int, samples: Samples) -> str:
    """The most likely reason for a wrong number of values."""
    if num_values == 1:
        return "Pass unreduced values, one per token"
    if num_values == num_local:
        return "The number of tokens fits: transpose to batch first if it is [s, b], or flatten in the layout's order"
    layout = samples.layout
    if layout is not None and num_values == layout.total_tokens:
        cut = "cut them with microbatch.local(...); if losses are not cut over CP ranks, the layout is Gathered"
        return f"These are all tokens of the micro-batch: {cut}"
    if num_values == sum(samples.mask_lengths):
        return "These are the unpadded, uncut tokens: cut and pad them as the layout says, or change the layout"
    if num_values == int(samples.active_tokens.sum()):
        return "These are the active tokens only: pass the losses of all positions, or ZigzagResponse for responses"
    if layout is not None and num_values and layout.total_tokens % num_values == 0:
        return f"These are 1/{layout.total_tokens // num_values} of the micro-batch: check that cp_size is right"
    if layout is None and num_values > num_local and num_local:
        return MASKS_TOO_SHORT
    if layout is None and num_values == sum(samples.mask_lengths) - len(samples):
        fewer = "each mask has one entry too many, since it goes with the labels: drop the entry of the first token"
        return f"If these are this micro-batch's values, {fewer}"
    if num_values == len(samples):
        return "These are one per sample: samples.in_buffer gives each token its sample's value"
    return "Pass the values of this micro-batch's tokens, cut as its layout says"
