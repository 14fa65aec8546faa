"""From what each rank measured of its tokens to the one `MeasuredStep`. NumPy; nothing here communicates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, Split, StepTokens
from megatron_rl_loss.step.layouts import concatenated_ranges
from megatron_rl_loss.step.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The samples of a micro-batch as arrays that can be sent, [num_samples] each."""

    starts: Ints  # of masks in the layout's buffer
    lengths: Ints  # of masks
    mask: Floats  # all entries, one sample after the other
    rollouts: Ints | None
    prompts: Ints | None
    response_lengths: Ints | None
    total_lengths: Ints | None
    total_tokens: int
    replicated: bool
    copies: int  # context-parallel ranks whose gradients of a token add up to one that is so many times too large

    @classmethod
    def of(cls, samples: Samples, cp_size: int) -> "Rows":
        """Waits for a device, if the masks are on one."""
        layout = samples.layout
        masks = [mask.detach().double().cpu().numpy() for mask in samples.loss_masks]
        replicated = layout is not None and layout.replicated_over_cp
        sums = layout is None or layout.gather_sums_gradients
        lengths: dict[str, Any] = {}
        for name in ("response_lengths", "total_lengths"):
            known = getattr(layout, name, None)
            lengths[name] = None if known is None else np.array(known, np.int64)
        return cls(
            starts=np.array(samples.mask_starts, np.int64),
            lengths=np.array(samples.mask_lengths, np.int64),
            mask=np.concatenate([np.zeros(0), *masks]),
            rollouts=None if samples.rollout_ids is None else samples.rollout_ids.numpy(),
            prompts=None if samples.prompt_ids is None else samples.prompt_ids.numpy(),
            **lengths,
            total_tokens=samples.total_tokens,
            replicated=replicated,
            copies=cp_size if replicated and not sums else 1,
        )

    def __len__(self) -> int:
        return len(self.lengths)


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

    @property
    def place(self) -> tuple[int, int]:
        return self.dp_rank, self.microbatch


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
    for part in sorted(parts, key=lambda part: (part.place, part.cp_rank)):
        by_place.setdefault(part.place, []).append(part)
    stray_places, stray_weight, num_samples = 0, 0.0, 0
    numbers: dict[str, dict[object, int]] = {"rollout": {}, "prompt": {}}
    columns: dict[str, list[Any]] = {name: [] for name in ("weights", *StepTokens.__dataclass_fields__)}
    for place, here in by_place.items():
        rows = here[0].rows
        assert rows is not None, f"nobody described micro-batch {place}"
        weights, holder = np.zeros(rows.total_tokens), np.full(rows.total_tokens, -1)
        for part in here:
            weights[part.positions] += part.gradients * np.float64(factor / rows.copies)  # a position comes once
            if not rows.replicated:
                holder[part.positions] = part.cp_rank
        entries = concatenated_ranges(rows.starts, rows.lengths)
        samples = np.arange(num_samples, num_samples + len(rows))
        num_samples += len(rows)
        ids = {
            "sample": samples,
            "dp_rank": np.full(len(rows), place[0]),
            "microbatch": np.full(len(rows), place[1]),
            "rollout": _numbered(samples if rows.rollouts is None else rows.rollouts, numbers["rollout"]),
            "prompt": np.full(len(rows), -1) if rows.prompts is None else _numbered(rows.prompts, numbers["prompt"]),
        }
        found: dict[str, Any] = {name: of_sample.repeat(rows.lengths) for name, of_sample in ids.items()}
        found |= {
            "weights": weights[entries],
            "mask": rows.mask,
            "position": concatenated_ranges(np.zeros(len(rows), np.int64), rows.lengths),
            "cp_rank": holder[entries] if split.cp_size > 1 else np.zeros(len(entries)),
        }
        if len(rows):
            found |= {"response_lengths": rows.response_lengths, "total_lengths": rows.total_lengths}
        for name, piece in found.items():
            columns[name].append(piece)
        weights[entries] = 0
        stray_places += int(np.count_nonzero(weights))
        stray_weight += float(np.abs(weights).sum())
    joined: dict[str, Any] = {}
    for name, pieces in columns.items():  # lengths are those of all samples, or unknown
        dtype = np.float64 if name in ("weights", "mask") else np.int64
        unknown_length = any(piece is None for piece in pieces)
        joined[name] = None if unknown_length else np.concatenate([np.zeros(0), *pieces]).astype(dtype)
    return MeasuredStep(
        weights=joined.pop("weights"),
        tokens=StepTokens(**joined),
        split=split,
        stray=(stray_places, stray_weight),
        unknown=tuple(unknown),
        notes=tuple(notes),
        facts=dict(facts or {}),
    )


def _numbered(ids: Ints, numbers: dict[object, int]) -> Ints:
    """Ids as numbers from 0 on, in the order in which they come up in the step."""
    return np.array([numbers.setdefault(unit, len(numbers)) for unit in ids.tolist()], np.int64)
