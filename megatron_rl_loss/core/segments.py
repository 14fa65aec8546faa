"""Segments: what each sample of a micro-batch has of each unit by a key, and the tokens that lie in it.

A segment is a whole sample where ids are given per sample, and the sample's tokens of one turn where they are given per
token. Modes, counts, statistics of sequences and advantages all ask here which tokens belong together.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_rl_loss.core.ids import Ints, argument_of, example_of
from megatron_rl_loss.core.masks import Array, Floats, place
from megatron_rl_loss.core.samples import LocalTokens, Samples


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments by a key, in the order of samples and of each segment's first mask entry. See `segments_by`.

    Attributes:
        samples: of the micro-batch, whose mask counts.
        key: ``step``, ``sample``, ``rollout``, ``prompt`` or another name of the samples' ids.
        ids: the id of each segment's unit, int64 [num_segments].
        sample: of each segment, int64 [num_segments].
        entry_segments: the segment of each mask entry, end to end; -1 in no unit. None where each sample is a segment.
        have_ids: False where each sample is a unit by itself; ids then number the samples of this micro-batch alone.
    """

    samples: Samples
    key: str
    ids: Ints
    sample: Ints
    entry_segments: Ints | None = None
    have_ids: bool = True

    def __len__(self) -> int:
        return len(self.ids)

    # --- of segments

    @cached_property
    def mask_sums(self) -> Floats:
        """The sum of the mask over each segment, float64 [num_segments]."""
        if self.entry_segments is None:
            return self.samples.mask_sums
        entries = np.concatenate([np.zeros(0), *self.samples.loss_masks])
        return np.bincount(self.entry_segments + 1, entries, len(self) + 1)[1:]

    @property
    def active(self) -> npt.NDArray[np.bool_]:
        """True for each segment with a token whose mask is not 0."""
        return self.mask_sums > 0

    def spread(self, values: Array) -> Array:
        """One value per sample -> the value of each segment's sample."""
        return values if self.entry_segments is None else values[self.sample]

    # --- of units

    @cached_property
    def unit(self) -> Ints:
        """The number of each segment's unit, among those of this micro-batch."""
        return np.unique(self.ids, return_inverse=True)[1] if self.have_ids else self.ids

    @cached_property
    def num_units(self) -> int:
        """Units of which this micro-batch has a segment."""
        if not self.have_ids:
            return len(self)
        return int(self.unit.max(initial=-1)) + 1

    @property
    def unit_mask_sums(self) -> Floats:
        """The sum of the mask over each unit, as far as it lies in this micro-batch, float64 [num_units]."""
        return np.bincount(self.unit, self.mask_sums, self.num_units)

    # --- of tokens

    @cached_property
    def in_buffer(self) -> Ints:
        """The segment of each position of the layout's buffer, int64 [total_tokens]; -1 in none."""
        samples = self.samples
        entry_segments = (
            self.sample.repeat(samples.mask_lengths) if self.entry_segments is None else self.entry_segments
        )
        return place(entry_segments + 1, samples.places, samples.total_tokens) - 1

    @cached_property
    def active_places(self) -> Ints:
        """The positions in the buffer that count: of a nonzero mask, which always lie in a segment."""
        return np.flatnonzero(self.samples.buffer)

    def at_tokens(self, values: Array, tokens: LocalTokens, otherwise: Any) -> Array:
        """One value per segment -> the value at each token that a rank holds, [num_local_tokens]."""
        return np.append(values, otherwise).astype(values.dtype)[tokens.of(self.in_buffer)]

    def at_entries(self, values: Floats) -> Any:
        """One value per segment -> what a mode returns: one per sample, or a row per sample; NaN in no segment."""
        if self.entry_segments is None:
            return values
        rows = np.empty(len(self.samples), object)
        entry_values = np.append(values, np.nan)[self.entry_segments]
        ends = np.cumsum(self.samples.mask_lengths)
        for i, (length, end) in enumerate(zip(self.samples.mask_lengths, ends, strict=True)):
            rows[i] = entry_values[end - length : end]
        return rows

    def sort(self, tokens: LocalTokens) -> tuple[Ints, Ints | None]:
        """How many of a rank's tokens each segment has, and these tokens' places in that order.

        None for samples, whose tokens lie in order; padding then goes with the sample beside it.
        """
        if self.entry_segments is None:
            return tokens.counts, None
        segment = tokens.of(self.in_buffer)
        counts = np.bincount(segment + 1, minlength=len(self) + 1)
        return counts[1:], segment.argsort(kind="stable")[counts[0] :]

    # --- along a sample

    def check_order(self) -> None:
        """Raise ValueError where a sample comes back to a segment: its segments are then no steps, one after another.

        Masked tokens are passed over, as they are in a sample.
        """
        segment = self.in_buffer[self.active_places]
        if (np.diff(segment) < 0).any():
            i = int((np.diff(segment) < 0).argmax())
            raise ValueError(
                f"sample {self.sample[segment[i]]} comes back to a {self.key} after another one: the active tokens of "
                f"a {self.key} must lie side by side, for advantages run along the sample. Give what comes later a "
                f"{self.key} id of its own."
            )

    @property
    def firsts(self) -> Floats:
        """1 at the first active token of each segment, else 0, in the layout's buffer [total_tokens]."""
        firsts = np.zeros(self.samples.total_tokens)
        segment = self.in_buffer[self.active_places]
        firsts[self.active_places[np.unique(segment, return_index=True)[1]]] = 1
        return firsts

    def as_tokens(self) -> LocalTokens:
        """The same samples with a token for each segment, masked where the segment is masked whole."""
        bounds = np.bincount(self.sample, minlength=len(self.samples)).cumsum()[:-1]
        return Samples(np.split(self.active, bounds) if len(self.samples) else []).local(0, 1)


def segments_by(key: str, samples: Samples, asked: str, *, over_microbatches: bool = False) -> Segments:
    """The segments of samples by a key.

    Without a sample there are none, whatever the key: a filler of any layout has no ids, and needs none.

    Args:
        asked: what asked for the key, which an error names.
        over_microbatches: units may have segments in other micro-batches, so samples without ids are no units.

    Raises ValueError for a key that the samples lack.
    """
    each = np.arange(len(samples))
    if key == "step":
        return Segments(samples, key, np.zeros_like(each), each)
    if not len(samples):
        return Segments(samples, key, each, each, have_ids=key in samples.parts)
    if key in samples.parts:
        return Segments(samples, key, *samples.parts[key])
    if key in ("sample", "rollout") and not over_microbatches:
        return Segments(samples, key, each, each, have_ids=False)
    raise ValueError(
        f"{asked} and samples without {argument_of(key)} (they have {', '.join(samples.parts) or 'none'}): {key} ids "
        f"must say which samples are one {key}. Pass Samples(..., {example_of(key)})."
    )
