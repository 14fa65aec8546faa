"""The tokens of one optimizer step and their measured weights: the input of every verdict.

A token's *effective weight* is the derivative of the reduced and finalised gradient's loss with respect to that token's
unreduced loss. `audit.megatron` measures it in a training step, `simulation` in a drawn one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.segments import segments_by

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
#: Columns that identify a micro-batch, and its piece on a context-parallel rank.
MICROBATCH, CP_PIECE = ("dp_rank", "microbatch"), ("dp_rank", "microbatch", "cp_rank")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Sizes of the step's split: micro-batches and parallel ranks."""

    num_microbatches: int = 1
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, kw_only=True)
class PlacedSamples:
    """The samples of a micro-batch, and its place in the step."""

    dp_rank: int
    microbatch: int  # numbered on each data-parallel rank from 0
    samples: Samples
    cp_rank: Ints  # the rank that holds the token of each mask entry, [num_entries]; -1 if all ranks do


def slots_of(samples: Samples) -> Ints:
    """The position in the layout's buffer of each mask entry, masks end to end, [num_entries]."""
    lengths = np.array(samples.mask_lengths, np.int64)
    position = np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)
    slots: Ints = position + np.array(samples.mask_starts, np.int64).repeat(lengths)
    return slots


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """All entries of the step's loss masks, masked ones too, as columns [num_entries].

    Entries are ordered by data-parallel rank, micro-batch, sample and position.
    """

    mask: Floats
    sample: Ints  # number of the sample (a row of data) in the step, over all ranks and micro-batches
    position: Ints  # within the sample's mask
    dp_rank: Ints
    microbatch: Ints  # numbered on each data-parallel rank from 0
    cp_rank: Ints  # the rank that holds the token; -1 if all ranks do
    ids: dict[str, Ints]  # rollout, prompt and further ids that the samples of every micro-batch name
    per_token: frozenset[str]  # names of ids that are given per token: -1 is no unit

    @classmethod
    def of(cls, microbatches: Sequence[PlacedSamples]) -> "StepTokens":
        filled = [placed for placed in microbatches if len(placed.samples)]
        names = sorted(set.intersection(*({*placed.samples.parts} for placed in filled))) if filled else []
        columns: dict[str, list[Any]] = {name: [] for name in ("mask", "sample", "position", *MICROBATCH, "cp_rank")}
        ids: dict[str, list[Ints]] = {name: [] for name in names}
        num_samples, per_token = 0, set[str]()
        for placed in filled:
            samples, slots = placed.samples, slots_of(placed.samples)
            lengths, starts = np.array(samples.mask_lengths), np.array(samples.mask_starts)
            columns["mask"].append(samples.buffer[slots].astype(np.float64))
            columns["sample"].append(np.arange(num_samples, num_samples + len(samples)).repeat(lengths))
            columns["position"].append(slots - starts.repeat(lengths))
            for name in MICROBATCH:
                columns[name].append(np.full(len(slots), getattr(placed, name)))
            columns["cp_rank"].append(placed.cp_rank)
            for name in names:
                segments = segments_by(name, samples, "an audit")
                per_token |= {name} if segments.entry_segments is not None else set()
                ids[name].append(np.append(segments.ids, -1)[segments.in_buffer[slots]])
            num_samples += len(samples)
        joined = {name: np.concatenate([np.zeros(0, np.int64), *column]) for name, column in columns.items()}
        id_columns = {name: np.concatenate(column) for name, column in ids.items()}
        return cls(**joined, ids=id_columns, per_token=frozenset(per_token))

    def __len__(self) -> int:
        return len(self.mask)

    def column(self, name: str) -> Ints:
        """The column of that name, a place or an id; without rollout ids each sample is a rollout."""
        if name in self.ids:
            return self.ids[name]
        column: Ints = self.sample if name == "rollout" else getattr(self, name)
        return column

    def groups(self, *names: str) -> Ints:
        """The group of each entry: entries that agree in all these columns. Numbered from 0 in lexicographic order."""
        return group_by([self.column(name) for name in names], len(self))


def group_by(columns: Sequence[Ints], length: int) -> Ints:
    """The group of each row, [length]: rows that agree in all columns. Numbered from 0 in lexicographic order."""
    group = np.zeros(length, np.int64)
    for column in columns:
        numbers = np.unique(column, return_inverse=True)[1].reshape(-1)
        group = np.unique(group * (numbers.max(initial=0) + 1) + numbers, return_inverse=True)[1].reshape(-1)
    return group


def extremes(group: Ints, values: Floats, number: int) -> tuple[Floats, Floats]:
    """The lowest and the highest value of each group, [number]; inf and -inf for an empty group."""
    low, high = np.full(number, np.inf), np.full(number, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return low, high


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The micro-batches of a step, with the effective weights of their tokens.

    `facts` by name: ``rounding``, the type that gradients were rounded to (default "float32"); ``coefficient``, the
    declared factor of the term; ``expected``, the term's own mode, divisor and unit counting; ``doubt``, a reason why a
    difference of weights may be no fault; ``tokens_compared``, the number of input ids that agreed with the samples';
    and numbers of the measurement.
    """

    microbatches: tuple[PlacedSamples, ...]  # ordered by data-parallel rank and micro-batch
    weights: Floats  # of each mask entry, masks end to end, [num_entries]; NaN for a NaN gradient
    split: Split = field(default_factory=Split)
    #: weight outside all entries (padding, other samples' slots): number of places, sum of sizes
    stray: tuple[int, float] = (0, 0.0)
    unknown: tuple[str, ...] = ()  # reasons against any verdict, in sentences
    notes: tuple[str, ...] = ()  # limits of the measurement, in sentences
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> StepTokens:
        """The mask entries as columns."""
        return StepTokens.of(self.microbatches)
