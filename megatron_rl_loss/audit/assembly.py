"""`MeasuredStep` from the gradients that the ranks of a step measured. NumPy alone, no communication."""

import pickle
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit.log_prob_gap import LogProbGap, compare_log_probs
from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, PlacedSamples, Split, slots_of
from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import attempt
from megatron_rl_loss.core.samples import LocalTokens, Samples, read_masks
from megatron_rl_loss.core.transfers import on_device

#: The largest difference of gradients that should be equal, relative to the largest gradient.
_APART = 1e-3


@dataclass(frozen=True, kw_only=True)
class Part:
    """Gradients that one rank measured in one micro-batch, one for each token that the rank holds."""

    dp_rank: int
    cp_rank: int
    microbatch: int
    samples: Samples | None  # `portable`; from context-parallel rank 0 alone
    positions: Ints  # of the rank's tokens in the layout's buffer, [num_local_tokens]
    gradients: Floats  # of what was to be minimised, by each token's loss, [num_local_tokens]
    copies: int = 1  # ranks that hold each of these tokens
    gradient_scale: int = 1  # the sum of a token's gradients over these ranks is so many times its gradient
    reached: bool = True  # by a backward pass; else the gradients are zeros
    lacks_tokens: bool = False  # the model's ids were tapped, and the samples have none to compare them with
    declared: dict[str, Any] | None = None  # facts that the tap was told of the term
    aggregation: Aggregation | None = None  # the term's own, if it can be sent
    log_probs: Floats | None = None  # of both sides, [2, num_local_tokens], where they are to be compared

    @classmethod
    def of(cls, local: LocalTokens, gradients: Floats, samples: Samples | None, **fields: Any) -> "Part":
        """The part with these tokens."""
        return cls(
            samples=samples, positions=local.positions, gradients=gradients, copies=local.copies,
            gradient_scale=local.gradient_scale, **fields,
        )  # fmt: skip

    @property
    def place(self) -> tuple[int, int]:
        return self.dp_rank, self.microbatch


def can_be_sent(value: Any) -> bool:
    """False for a function or a class that other processes cannot import, and for what holds one."""
    return isinstance(attempt(lambda: pickle.dumps(value)), bytes)


def portable(samples: Samples) -> Samples:
    """The samples as another rank can have them: on the host, without tokens, group and what cannot be sent.

    Without its layout a buffer has the same masks in the same places.
    """
    read_masks([samples])
    sent = copy(samples)
    sent.tokens, sent.cp_group, sent.by_mask = None, None, {}
    labels = {name: _on_host(entries) for name, entries in samples.labels.items()}
    sent.labels = {name: entries for name, entries in labels.items() if can_be_sent(entries)}
    sent.layout = samples.layout if can_be_sent(samples.layout) else None
    return sent


def _on_host(entries: Any) -> Any:
    if isinstance(entries, Tensor):
        return entries.detach().cpu()
    if any(isinstance(entry, Tensor) for entry in entries):
        return [_on_host(entry) if isinstance(entry, Tensor) else entry for entry in entries]
    return entries


def measured_step(parts: Sequence[Part], factor: float, split: Split, **fields: Any) -> MeasuredStep:
    """The step, with ``weight = factor * sum of gradients over the ranks that hold the token``.

    `fields` are others of a `MeasuredStep`: unknown, notes, facts.
    """
    by_place: dict[tuple[int, int], list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.place, part.cp_rank)):
        by_place.setdefault(part.place, []).append(part)
    microbatches, entry_weights = list[PlacedSamples](), [np.zeros(0)]
    stray_places, stray_weight = 0, 0.0
    for (dp_rank, microbatch), here in by_place.items():
        samples = here[0].samples
        assert samples is not None, f"no rank described micro-batch {microbatch} of DP rank {dp_rank}"
        weights, holder = np.zeros(samples.total_tokens), np.full(samples.total_tokens, -1)  # of the layout's buffer
        for part in here:
            weights[part.positions] += part.gradients * np.float64(factor / part.gradient_scale)  # each comes once
            if part.copies == 1:
                holder[part.positions] = part.cp_rank
        slots = slots_of(samples)
        placed = PlacedSamples(dp_rank=dp_rank, microbatch=microbatch, samples=samples, cp_rank=holder[slots])
        microbatches.append(placed)
        entry_weights.append(weights[slots])
        weights[slots] = 0  # the rest is on padding, or in other samples' slots
        stray_places += int(np.count_nonzero(weights))
        stray_weight += float(np.abs(weights).sum())
    named: list[set[Any]] = [{*placed.samples.parts} for placed in microbatches if len(placed.samples)]
    if partly := sorted(set().union(*named) - set.intersection(*named)) if named else []:
        why = f"Ids are missing in some micro-batches: {', '.join(partly)}. Give them to all samples, or to none."
        fields["unknown"] = (*fields.get("unknown", ()), why)
    weights, stray = np.concatenate(entry_weights), (stray_places, stray_weight)
    return MeasuredStep(microbatches=tuple(microbatches), weights=weights, split=split, stray=stray, **fields)


def differ_over_cp(parts: Sequence[Part]) -> bool:
    """True if a token that all CP ranks hold has a different gradient on some of them."""
    firsts = {part.place: part.gradients for part in parts if part.samples is not None and part.gradient_scale > 1}
    pairs = [(firsts[part.place], part.gradients) for part in parts if part.place in firsts]
    return any(np.abs(own - first).max(initial=0) > _APART * np.abs(first).max(initial=0) for first, own in pairs)


def log_prob_gap(parts: Sequence[Part]) -> LogProbGap | None:
    """The gap between the two sides' log-probs, over samples whose ranks all gave them; None without such samples."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    parts = [part for part in parts if part.log_probs is not None]
    for first in sorted(parts, key=lambda part: part.place):
        if (samples := first.samples) is None:
            continue
        values, is_known = np.zeros((2, samples.total_tokens)), np.zeros(samples.total_tokens, np.bool_)
        for part in parts:
            if part.place == first.place:
                values[:, part.positions], is_known[part.positions] = part.log_probs, True
        for start, mask in zip(samples.mask_starts, samples.loss_masks, strict=True):
            here = slice(start, start + len(mask))
            if is_known[here].all():
                train, rollout = torch.from_numpy(values[:, here])
                rows.append((train, rollout, on_device(mask, train.device)))
    return compare_log_probs(*zip(*rows, strict=True)) if rows else None
