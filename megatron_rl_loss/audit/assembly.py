"""`MeasuredStep` from the gradients that the ranks of a step measured. NumPy alone, no communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit.log_prob_gap import LogProbGap, compare_log_probs
from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, Split, StepTokens
from megatron_rl_loss.step.samples import LocalTokens

#: The largest difference of gradients that should be equal, relative to the largest gradient.
_APART = 1e-3
_COLUMNS = ("mask", "sample", "position", "dp_rank", "microbatch", "cp_rank", "weights")


@dataclass(frozen=True, kw_only=True)
class SampleArrays:
    """The samples of a micro-batch as arrays that can be sent."""

    mask: Floats  # the masks of all samples, end to end, [num_entries]
    starts: Ints  # of each mask in the layout's buffer, [num_samples]
    lengths: Ints  # of each mask, [num_samples]
    ids: dict[str, Ints]  # by name, [num_samples]
    of_tokens: dict[str, Ints]  # ids that are given per token, [num_entries]; -1 is no unit
    total_tokens: int  # length of the layout's buffer
    replicated: bool  # each context-parallel rank holds all tokens
    copies: int  # the sum of a token's gradients over context-parallel ranks is so many times its gradient

    @classmethod
    def of(cls, local: LocalTokens) -> "SampleArrays":
        samples = local.samples
        return cls(
            mask=np.concatenate([np.zeros(0), *samples.loss_masks]),
            starts=np.array(samples.mask_starts, np.int64),
            lengths=np.array(samples.mask_lengths, np.int64),
            ids=samples.ids,
            of_tokens={
                name: np.append(parts.keys, -1)[parts.of_entry]
                for name, parts in samples.parts.items()
                if parts.of_entry is not None
            },
            total_tokens=samples.total_tokens,
            replicated=local.copies > 1,
            copies=local.gradient_scale,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """Gradients that one rank measured in one micro-batch, one for each token that the rank holds."""

    dp_rank: int
    cp_rank: int
    microbatch: int
    samples: SampleArrays | None  # the whole micro-batch; from context-parallel rank 0 alone
    positions: Ints  # of the rank's tokens in the layout's buffer, [num_local_tokens]
    gradients: Floats  # of what was to be minimised, by each token's loss, [num_local_tokens]
    reached: bool = True  # by a backward pass; else the gradients are zeros
    declared: dict[str, Any] | None = None  # facts that the tap was told of the term
    log_probs: Floats | None = None  # of both sides, [2, num_local_tokens], where they are to be compared

    @property
    def place(self) -> tuple[int, int]:
        return self.dp_rank, self.microbatch


def measured_step(parts: Sequence[Part], factor: float, split: Split, **said: Any) -> MeasuredStep:
    """The step, with ``weight = factor * sum of gradients over the ranks that hold the token``.

    `said` holds the other fields of a `MeasuredStep`: unknown, notes, facts.
    """
    by_place: dict[tuple[int, int], list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.place, part.cp_rank)):
        by_place.setdefault(part.place, []).append(part)
    pieces: list[dict[str, Any]] = []  # columns of each micro-batch
    stray_places, stray_weight, num_samples, per_token = 0, 0.0, 0, frozenset[str]()
    num_empty, of_empty = 0, dict[str, list[Ints]]()
    for (dp_rank, microbatch), here in by_place.items():
        samples = here[0].samples
        assert samples is not None, f"no rank described micro-batch {microbatch} of DP rank {dp_rank}"
        weights, holder = np.zeros(samples.total_tokens), np.full(samples.total_tokens, -1)  # of the layout's buffer
        for part in here:
            weights[part.positions] += part.gradients * np.float64(factor / samples.copies)  # a position comes once
            if not samples.replicated:
                holder[part.positions] = part.cp_rank
        lengths, number = samples.lengths, len(samples.lengths)
        position = np.arange(len(samples.mask)) - (lengths.cumsum() - lengths).repeat(lengths)
        slots = position + samples.starts.repeat(lengths)  # of mask entries in the buffer
        num_empty += int((lengths == 0).sum())
        for name, keys in samples.ids.items():
            of_empty.setdefault(name, []).append(keys[lengths == 0])
        if number:
            per_token |= samples.of_tokens.keys()
            columns: dict[str, Any] = {
                name: ids.repeat(lengths) for name, ids in samples.ids.items()
            } | samples.of_tokens
            columns |= {"weights": weights[slots], "mask": samples.mask, "position": position}
            columns["sample"] = np.arange(num_samples, num_samples + number).repeat(lengths)
            places: dict[str, Any] = {"dp_rank": dp_rank, "microbatch": microbatch, "cp_rank": holder[slots]}
            pieces.append(columns | {name: np.broadcast_to(place, len(slots)) for name, place in places.items()})
        num_samples += number
        weights[slots] = 0  # the rest is on padding, or in other samples' slots
        stray_places += int(np.count_nonzero(weights))
        stray_weight += float(np.abs(weights).sum())
    named = [{*piece}.difference(_COLUMNS) for piece in pieces]
    ids = sorted(set.intersection(*named)) if named else []
    if partly := sorted(set().union(*named).difference(ids)):
        why = f"Ids are missing in some micro-batches: {', '.join(partly)}. Give them to all samples, or to none."
        said["unknown"] = (*said.get("unknown", ()), why)
    joined: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, np.int64), *(piece[name] for piece in pieces)]) for name in (*_COLUMNS, *ids)
    }
    weights = joined.pop("weights")
    joined["ids"] = {name: joined.pop(name) for name in ids}
    empty_ids = {name: np.concatenate(of_empty[name]) for name in ids if name in of_empty}
    tokens = StepTokens(per_token=per_token & {*ids}, num_empty=num_empty, empty_ids=empty_ids, **joined)
    return MeasuredStep(tokens=tokens, weights=weights, split=split, stray=(stray_places, stray_weight), **said)


def differ_over_cp(parts: Sequence[Part]) -> bool:
    """True if a token that all CP ranks hold has a different gradient on some of them."""
    firsts = {part.place: part.gradients for part in parts if part.samples is not None and part.samples.copies > 1}
    pairs = [(firsts[part.place], part.gradients) for part in parts if part.place in firsts]
    return any(np.abs(own - first).max(initial=0) > _APART * np.abs(first).max(initial=0) for first, own in pairs)


def log_prob_gap(parts: Sequence[Part]) -> LogProbGap | None:
    """The gap between the two sides' log-probs, over samples whose ranks all gave them; None without such samples."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    parts = [part for part in parts if part.log_probs is not None]
    for first in sorted(parts, key=lambda part: part.place):
        if (samples := first.samples) is None:
            continue
        values, given = np.zeros((2, samples.total_tokens)), np.zeros(samples.total_tokens, np.bool_)
        for part in parts:
            if part.place == first.place:
                values[:, part.positions], given[part.positions] = part.log_probs, True
        masks = torch.from_numpy(samples.mask).split(samples.lengths.tolist())
        for start, mask in zip(samples.starts.tolist(), masks, strict=True):
            here = slice(start, start + len(mask))
            if given[here].all():
                train, rollout = torch.from_numpy(values[:, here])
                found.append((train, rollout, mask))
    return compare_log_probs(*zip(*found, strict=True)) if found else None
