"""What the totals of a step must be, by plain sums, beside what they are."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pytest
from oracle import Sample, mask_tokens, num_tokens, units_of

from megatron_rl_loss import StepTotals
from megatron_rl_loss.step.ids import as_ids
from megatron_rl_loss.step.totals import TokensById

#: Sums of some hundred numbers in float64, in whatever order.
FLOAT64 = 1e-12


def ids_of(samples: Sequence[Sample], name: str) -> list[Any] | None:
    ids = [getattr(one, name) for one in samples]
    return None if None in ids or not ids else ids


def expected_of(step: Sequence[Sample], mine: Sequence[Sample], kinds: Sequence[str]) -> dict[str, Any]:
    """What a rank with these of the step's samples is to be told; `kinds` of ids are counted."""

    def active(units: list[list[int]]) -> int:
        return sum(mask_tokens([step[i] for i in unit]) > 0 for unit in units)

    def tokens_of(kind: str, unit: Any) -> Any:
        return pytest.approx(mask_tokens([one for one in step if getattr(one, kind) == unit]), rel=FLOAT64)

    rollouts, prompts = units_of("sample_mean", step), units_of("prompt_mean", step)
    by_prompt = "prompt_id" in kinds
    return {
        "step_tokens": pytest.approx(mask_tokens(step), rel=FLOAT64),
        "step_active_tokens": sum(int((one.mask != 0).sum()) for one in step),
        "step_entries": num_tokens(step),
        "rollouts.all": len(rollouts),
        "rollouts.active": active(rollouts),
        "prompts.all": len(prompts) if by_prompt else None,
        "prompts.active": active(prompts) if by_prompt else None,
        "rollouts.tokens": {k: tokens_of("rollout_id", k) for k in ids_of(mine, "rollout_id") or []},
        "prompts.tokens": {k: tokens_of("prompt_id", k) for k in ids_of(mine, "prompt_id") or [] if by_prompt},
    }


COUNTS = ["step_tokens", "step_active_tokens", "step_entries"]
COUNTS += [f"{kind}.{which}" for kind in ("rollouts", "prompts") for which in ("all", "active")]


def said_of(totals: StepTotals, mine: Sequence[Sample]) -> dict[str, Any]:
    """What the totals say, of this rank's own units by id."""
    said = {name: attrgetter(name)(totals) for name in COUNTS}
    for name in ("rollout", "prompt"):
        ids, tokens = ids_of(mine, f"{name}_id"), attrgetter(f"{name}s.tokens")(totals)
        known = isinstance(tokens, TokensById) and ids is not None
        counts = tokens.of(name, as_ids(name, ids, len(ids))).tolist() if known else []
        said[f"{name}s.tokens"] = dict(zip(ids if known else [], counts, strict=True))
    return said


def kinds_of(step: Sequence[Sample]) -> list[str]:
    return [kind for kind in ("rollout_id", "prompt_id") if ids_of(step, kind)]


def all_totals(step: Sequence[Sample], **groups: Any) -> StepTotals:
    ids = {f"{kind}s": ids_of(step, kind) for kind in kinds_of(step)}
    return StepTotals.from_loss_masks([one.mask for one in step], **ids, **groups)
