"""What the totals of a step must be, by plain sums, beside what they are."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from oracle import Sample, mask_tokens, num_tokens, units_of

from megatron_rl_loss import StepTotals
from megatron_rl_loss.step.ids import as_ids
from megatron_rl_loss.step.totals import TokensById

KINDS = {"rollout": "sample_mean", "prompt": "prompt_mean"}
#: Sums of some hundred numbers in float64, in whatever order.
FLOAT64 = 1e-12


def ids_of(samples: Sequence[Sample], kind: str) -> list[Any] | None:
    ids = [getattr(one, f"{kind}_id") for one in samples]
    return None if None in ids or not ids else ids


def all_ids(samples: Sequence[Sample]) -> dict[str, Any]:
    return {f"{kind}_ids": ids_of(samples, kind) for kind in KINDS}


def expected_of(step: Sequence[Sample], mine: Sequence[Sample], count_prompts: bool = True) -> dict[str, Any]:
    """What a rank with these of the step's samples is to be told."""
    expected: dict[str, Any] = {
        "step_tokens": pytest.approx(mask_tokens(step), rel=FLOAT64),
        "step_active_tokens": sum(int((one.mask != 0).sum()) for one in step),
        "step_entries": num_tokens(step),
    }
    for kind, mode in KINDS.items():
        units = [mask_tokens([step[i] for i in unit]) for unit in units_of(mode, step)]
        by_id = bool(ids_of(step, kind)) and (kind == "rollout" or count_prompts)
        for which, count in (("all", len(units)), ("active", sum(map(bool, units)))):
            expected[f"{kind}s.{which}"] = count if by_id or kind == "rollout" else None
        expected[f"{kind}s.tokens"] = {
            key: pytest.approx(mask_tokens([one for one in step if getattr(one, f"{kind}_id") == key]), rel=FLOAT64)
            for key in (by_id and ids_of(mine, kind)) or []
        }
    return expected


def said_of(totals: StepTotals, mine: Sequence[Sample]) -> dict[str, Any]:
    """What the totals say, of this rank's own units by id."""
    said = {name: getattr(totals, name) for name in ("step_tokens", "step_active_tokens", "step_entries")}
    for kind in KINDS:
        units, ids = getattr(totals, f"{kind}s"), ids_of(mine, kind)
        counts = []
        if isinstance(units.tokens, TokensById) and ids:
            counts = units.tokens.of(kind, as_ids(kind, ids, len(ids))).tolist()
        said |= {f"{kind}s.all": units.all, f"{kind}s.active": units.active}
        said[f"{kind}s.tokens"] = dict(zip(ids or [], counts, strict=False))
    return said


def all_totals(step: Sequence[Sample], **groups: Any) -> StepTotals:
    return StepTotals.from_loss_masks([one.mask for one in step], **all_ids(step), **groups)


Share = list[list[Sample]] | Callable[[], Any] | None
"""A rank's micro-batches; or what it does instead of preparing some; or None if its stage reads no data."""


def ragged(num_ranks: int, ids: Callable[[int], int | str] | None, split: bool) -> list[Share]:
    """Ranks of 5, 0, 7, ... samples: prompt groups of 3, and rollouts of 1 or 2 samples, straddle ranks."""
    generator = torch.Generator().manual_seed(num_ranks)
    sizes = {1: [6], 2: [7, 4], 4: [5, 0, 7, 3]}[num_ranks]
    samples = []
    for i in range(sum(sizes)):
        length = int(torch.randint(0, 6, (), generator=generator))
        mask = torch.rand(length, generator=generator) * (torch.rand(length, generator=generator) < 0.7) * (i % 4 != 2)
        rollout = ids(100 + i * 2 // 3) if ids and split else None
        samples.append(Sample(mask.double(), mask, rollout, ids(i * 2 // 3 // 2) if ids else None))
    shares: list[Share] = []
    for size in sizes:
        mine, samples = samples[:size], samples[size:]
        shares.append([mine[:2], mine[2:]] if size > 2 else [mine])
    return shares
