"""From what each rank measured of its tokens to the one `MeasuredStep`. NumPy; nothing here communicates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, Split, StepTokens
from megatron_rl_loss.step.layouts import concatenated_ranges
from megatron_rl_loss.step.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The samples of a micro-batch as arrays that can be sent.

    Attributes:
        starts, lengths: of each sample's mask in the layout's buffer, [num_samples].
        mask: all entries, one sample after the other.
        rollouts, prompts: ids [num_samples], or None.
        copies: context-parallel ranks whose gradients of a token add up to one that is so many times too large.
    """

    starts: Ints
    lengths: Ints
    mask: Floats
    rollouts: Ints | None
    prompts: Ints | None
    response_lengths: Ints | None
    total_lengths: Ints | None
    total_tokens: int
    replicated: bool
    copies: int

    @classmethod
    def of(cls, samples: Samples, cp_size: int) -> "Rows":
        """Waits for a device, if the masks are on one."""
        layout = samples.layout
        masks = [mask.detach().double().cpu().numpy() for mask in samples.loss_masks]
        replicated = layout is not None and layout.replicated_over_cp
        sums = layout is None or layout.gather_sums_gradients
        return cls(
            starts=np.array(samples.mask_starts, np.int64),
            lengths=np.array(samples.mask_lengths, np.int64),
            mask=np.concatenate([np.zeros(0), *masks]),
            rollouts=None if samples.rollout_ids is None else samples.rollout_ids.numpy(),
            prompts=None if samples.prompt_ids is None else samples.prompt_ids.numpy(),
            response_lengths=None if layout is None else _known(layout.response_lengths),
            total_lengths=None if layout is None else _known(layout.total_lengths),
            total_tokens=samples.total_tokens,
            replicated=replicated,
            copies=cp_size if replicated and not sums else 1,
        )

    def __len__(self) -> int:
        return len(self.lengths)


def _known(lengths: Sequence[int] | None) -> Ints | None:
    return None if lengths is None else np.array(lengths, np.int64)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank measured of one micro-batch: a gradient for each token that it holds.

    Attributes:
        rows: the whole micro-batch's samples; given by context-parallel rank 0 alone.
        positions: of the rank's tokens in the layout's buffer, [num_local_tokens].
        gradients: of the loss that Megatron was to minimise, by each token's loss, [num_local_tokens].
    """

    dp_rank: int
    cp_rank: int
    microbatch: int
    rows: Rows | None
    positions: Ints
    gradients: Floats


def measured_step(
    parts: Sequence[Part],
    factor: float,
    split: Split,
    *,
    unknown: Sequence[str] = (),
    notes: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> MeasuredStep:
    """The step, with ``weight = factor * sum of gradients over the ranks that hold the token``."""
    by_place: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        by_place.setdefault((part.dp_rank, part.microbatch), []).append(part)
    stray_places, stray_weight = 0, 0.0
    columns = _Columns()
    for place in sorted(by_place):
        here = sorted(by_place[place], key=lambda part: part.cp_rank)
        rows = here[0].rows
        assert rows is not None, f"nobody described micro-batch {place}"
        weights, holder = np.zeros(rows.total_tokens), np.full(rows.total_tokens, -1)
        for part in here:
            weights[part.positions] += part.gradients * np.float64(factor / rows.copies)  # a position comes once
            if not rows.replicated:
                holder[part.positions] = part.cp_rank
        entries = concatenated_ranges(rows.starts, rows.lengths)
        columns.add(rows, weights[entries], holder[entries] if split.cp_size > 1 else np.full(len(entries), 0), place)
        weights[entries] = 0
        strayed = np.flatnonzero(weights)
        stray_places += strayed.size
        stray_weight += float(np.abs(weights[strayed]).sum())
    return MeasuredStep(
        tokens=columns.tokens(),
        weights=columns.joined("weights", np.float64),
        split=split,
        stray=(stray_places, stray_weight),
        unknown=tuple(unknown),
        notes=tuple(notes),
        facts=dict(facts or {}),
    )


class _Columns:
    """The arrays of `StepTokens`, piece by piece."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Any]] = {}
        self._num_samples = 0
        self._ids: dict[str, dict[object, int]] = {"rollout": {}, "prompt": {}}

    def add(self, rows: Rows, weights: Floats, cp_rank: Ints, place: tuple[int, int]) -> None:
        samples = np.arange(self._num_samples, self._num_samples + len(rows))
        self._num_samples += len(rows)
        ones = np.ones(len(weights), np.int64)
        rollouts = samples if rows.rollouts is None else rows.rollouts  # without ids a sample is a rollout
        given: dict[str, Any] = {
            "weights": weights,
            "mask": rows.mask,
            "sample": samples.repeat(rows.lengths),
            "position": concatenated_ranges(np.zeros(len(rows), np.int64), rows.lengths),
            "dp_rank": place[0] * ones,
            "microbatch": place[1] * ones,
            "cp_rank": cp_rank,
            "rollout": self._numbers("rollout", rollouts).repeat(rows.lengths),
            "prompt": -ones if rows.prompts is None else self._numbers("prompt", rows.prompts).repeat(rows.lengths),
        }
        if len(rows):
            given |= {"response_lengths": rows.response_lengths, "total_lengths": rows.total_lengths}
        for name, piece in given.items():
            self._pieces.setdefault(name, []).append(piece)

    def _numbers(self, kind: str, ids: Ints) -> Ints:
        """Ids as numbers from 0 on, in the order in which they come up."""
        numbers = self._ids[kind]
        return np.array([numbers.setdefault(unit, len(numbers)) for unit in ids.tolist()], np.int64)

    def joined(self, name: str, dtype: Any) -> Any:
        return np.concatenate([np.zeros(0, dtype), *self._pieces.get(name, [])]).astype(dtype)

    def _known(self, name: str) -> Ints | None:
        """Lengths of all samples, if those of every micro-batch with samples are known."""
        pieces: list[Ints | None] = self._pieces.get(name, [])
        return None if any(piece is None for piece in pieces) else self.joined(name, np.int64)

    def tokens(self) -> StepTokens:
        ints = "sample", "position", "dp_rank", "microbatch", "cp_rank", "rollout", "prompt"
        return StepTokens(
            mask=self.joined("mask", np.float64),
            **{name: self.joined(name, np.int64) for name in ints},
            response_lengths=self._known("response_lengths"),
            total_lengths=self._known("total_lengths"),
        )


def union(texts: Iterator[str]) -> tuple[str, ...]:
    """Each text once, in the order in which they come up."""
    return tuple(dict.fromkeys(texts))
