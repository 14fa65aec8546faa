"""From what each rank measured of its tokens to the one `MeasuredStep`. NumPy; nothing here communicates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit.log_prob_gap import LogProbGap, compare_log_probs
from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, Split, StepTokens
from megatron_rl_loss.step.samples import LocalTokens


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The samples of a micro-batch as arrays that can be sent."""

    mask: Floats  # all entries of the masks, one sample after the other, [num_entries]
    starts: Ints  # of each sample's in the layout's buffer, [num_samples]
    lengths: Ints  # mask entries of each sample, [num_samples]
    ids: dict[str, Ints]  # by name, [num_samples]
    total_tokens: int
    replicated: bool  # True where each context-parallel rank holds all
    copies: int  # context-parallel ranks whose gradients of a token add up to one that is so many times too large

    @classmethod
    def of(cls, local: LocalTokens) -> "Rows":
        samples = local.samples
        return cls(
            mask=np.concatenate([np.zeros(0), *samples.loss_masks]),
            starts=np.array(samples.mask_starts, np.int64),
            lengths=np.array(samples.mask_lengths, np.int64),
            ids={name: np.asarray(values, np.int64) for name, values in samples.ids.items()},
            total_tokens=samples.total_tokens,
            replicated=local.copies > 1,
            copies=local.gradient_scale,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank measured of one micro-batch: a gradient for each token that it holds."""

    dp_rank: int
    cp_rank: int
    microbatch: int
    rows: Rows | None  # the whole micro-batch's samples; of context-parallel rank 0 alone
    positions: Ints  # of the rank's tokens in the layout's buffer, [num_local_tokens]
    gradients: Floats  # of what was to be minimised, by each token's loss, [num_local_tokens]
    reached: bool = True  # whether backward came by; else the gradients are zeros
    declared: dict[str, Any] | None = None  # what its term should be, as facts
    log_probs: Floats | None = None  # of both sides, [2, num_local_tokens], where they are to be compared

    @property
    def place(self) -> tuple[int, int]:
        return self.dp_rank, self.microbatch


def measured_step(parts: Sequence[Part], factor: float, split: Split, **said: Any) -> MeasuredStep:
    """The step, with ``weight = factor * sum of gradients over the ranks that hold the token``.

    `said` is what else a `MeasuredStep` says: unknown, notes, facts.
    """
    by_place: dict[tuple[int, int], list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.place, part.cp_rank)):
        by_place.setdefault(part.place, []).append(part)
    names = {name for here in by_place.values() if len(_rows(here).lengths) for name in _rows(here).ids}
    places = ("sample", "position", "dp_rank", "microbatch", "cp_rank", *names)
    columns: dict[str, list[Any]] = {name: [np.zeros(0, np.int64)] for name in places}
    columns |= {"weights": [np.zeros(0)], "mask": [np.zeros(0)]}
    stray_places, stray_weight, num_samples = 0, 0.0, 0
    for place, here in by_place.items():
        rows = _rows(here)
        weights, holder = np.zeros(rows.total_tokens), np.full(rows.total_tokens, -1)
        for part in here:
            weights[part.positions] += part.gradients * np.float64(factor / rows.copies)  # a position comes once
            if not rows.replicated:
                holder[part.positions] = part.cp_rank
        number = len(rows.lengths)
        positions = np.arange(len(rows.mask)) - (rows.lengths.cumsum() - rows.lengths).repeat(rows.lengths)
        entries = positions + rows.starts.repeat(rows.lengths)
        of_samples = rows.ids | {"sample": np.arange(num_samples, num_samples + number)}
        found: dict[str, Any] = {name: values.repeat(rows.lengths) for name, values in of_samples.items()}
        found |= {"dp_rank": np.full(len(entries), place[0]), "microbatch": np.full(len(entries), place[1])}
        found |= {"weights": weights[entries], "mask": rows.mask, "position": positions, "cp_rank": holder[entries]}
        for name in columns if number else ():
            columns[name].append(found[name])
        num_samples += number
        weights[entries] = 0
        stray_places += int(np.count_nonzero(weights))
        stray_weight += float(np.abs(weights).sum())
    joined: dict[str, Any] = {name: np.concatenate(pieces) for name, pieces in columns.items()}
    weights, ids = joined.pop("weights"), {name: joined.pop(name) for name in sorted(names)}
    tokens, stray = StepTokens(**joined, ids=ids), (stray_places, stray_weight)
    return MeasuredStep(tokens=tokens, weights=weights, split=split, stray=stray, **said)


def _rows(here: Sequence[Part]) -> Rows:
    rows = here[0].rows
    assert rows is not None, f"nobody described micro-batch {here[0].place}"
    return rows


def log_prob_gap(parts: Sequence[Part]) -> LogProbGap | None:
    """The gap between the log-probs that parts have, of the samples of which all ranks gave them; None without any."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    parts = [part for part in parts if part.log_probs is not None]
    for one in sorted(parts, key=lambda part: part.place):
        if (rows := one.rows) is None:
            continue
        values, given = np.zeros((2, rows.total_tokens)), np.zeros(rows.total_tokens, np.bool_)
        for part in parts:
            if part.place == one.place:
                values[:, part.positions], given[part.positions] = part.log_probs, True
        masks = torch.from_numpy(rows.mask).split(rows.lengths.tolist())
        for start, mask in zip(rows.starts.tolist(), masks, strict=True):
            here = slice(start, start + len(mask))
            ours, theirs = torch.from_numpy(values[:, here])
            if given[here].all():
                found.append((ours, theirs, mask))
    return compare_log_probs(*zip(*found, strict=True)) if found else None
