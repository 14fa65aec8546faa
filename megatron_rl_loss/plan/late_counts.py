"""What only the end of a step knows: the count that a mode divides by, and what the end makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from megatron_rl_loss.modes.table import Mode, OwnMode
from megatron_rl_loss.step.totals import StepTotals, UnitCounting, UnitCounts


@dataclass(frozen=True)
class LateCount:
    """What a mode divides by and only the end of the step knows: U.

    Attributes:
        name: ``step_tokens``, ``rollouts.all``, ``prompts.active``, ...; empty for ``token_sum``, which has none.
        mask: of the further mask that it is counted by; None for the loss mask.
        whole: the kind of unit whose tokens are D, so that it must come as a whole: ``rollout``, ``prompt`` or empty.
    """

    name: str
    mask: str | None = None
    whole: str = field(default="", compare=False)

    @classmethod
    def of(cls, mode: Mode | OwnMode, units: UnitCounting, mask: str | None = None) -> "LateCount":
        """That of a mode; ValueError for one's own, whose weights may be anything."""
        if isinstance(mode, OwnMode):
            raise ValueError(
                f"the mode {mode.name!r} in an open plan: how its weights hang on counts of the step is not known. Use "
                "a built-in mode, or plan_step."
            )
        if mode.unit != "step":
            return cls(f"{mode.unit}s.{units}", mask, "" if mode.takes_divisor else mode.unit)
        return cls("") if mode.takes_divisor else cls("step_tokens", mask)

    def in_step(self, totals: StepTotals) -> float | None:
        """The count; 1 where there is none, None where this rank does not know it."""
        value: float | None = attrgetter(self.name)(totals.with_mask(self.mask)) if self.name else 1
        return value

    def __str__(self) -> str:
        return (self.name or "no count") + (f" by the mask {self.mask!r}" if self.mask else "")


class _NominalTotals(StepTotals):
    """Totals whose counts stand for others, so that nothing of them can be checked."""

    def __post_init__(self) -> None: ...


def nominal_totals(totals: StepTotals, nominal: int, tokens: int) -> StepTotals:
    """The nominal numbers for every count of the step and its active tokens; the tokens of units as they are."""
    units = [UnitCounts(all=nominal, active=nominal, tokens=one.tokens) for one in (totals.rollouts, totals.prompts)]
    return _NominalTotals(
        step_tokens=nominal,
        step_active_tokens=tokens,
        rollouts=units[0],
        prompts=units[1],
        by_mask={name: nominal_totals(one, nominal, tokens) for name, one in totals.by_mask.items()},
    )


@dataclass(frozen=True, kw_only=True)
class ClosedPlan:
    """What the end of a step knows.

    Attributes:
        factor: what all gradients are multiplied by, but for those that an `OpenMegatronPlan` splits off.
        totals: denominators of the whole step.
        counts: what the policy loss, and what else has gradients of its own, is divided by.
        divides_by_tokens: whether `factor` counts on Megatron's division by the step's active tokens.
        numerator_scale, num_ranks, late_counts, split_units: what `report` goes by.
    """

    factor: float
    totals: StepTotals
    counts: Mapping[LateCount, float]
    divides_by_tokens: bool
    numerator_scale: int
    num_ranks: int
    late_counts: Mapping[str, LateCount]
    split_units: Sequence[str]

    def report(self, reports: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What `Microbatch.loss` reported in all calls on this rank -> by name [numerator, normaliser], float64.

        Both are parts: their sums over DP and CP ranks are the step's, and the quotient of the sums is the value. It is
        NaN for a mean over units that did not come as a whole.

        Raises ValueError for a name that `Microbatch.loss` did not report.
        """
        if unknown := sorted({name for report in reports for name in report} - set(self.late_counts)):
            raise ValueError(
                f"a report named {unknown[0]!r}: what it is divided by is known for the terms and metrics of "
                "Microbatch.loss alone. Divide it yourself: totals holds the step's counts."
            )
        found = {}
        for name in dict.fromkeys(name for report in reports for name in report):
            late = self.late_counts[name]
            numerator = torch.stack([report[name][0].double() for report in reports if name in report]).sum()
            count = late.in_step(self.totals)
            if count is None or late.whole in self.split_units:
                count = torch.nan
            normaliser = torch.full_like(numerator, count / self.num_ranks)
            found[name] = torch.stack([numerator * (self.numerator_scale if late.name else 1), normaliser])
        return found
