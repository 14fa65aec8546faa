"""StepTotals: the denominators of one optimizer step, over all its micro-batches and data-parallel (DP) ranks.

Masks are replicated over context-, tensor- and pipeline-parallel ranks, so counts are summed over DP alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import numpy as np

from megatron_rl_loss.errors import check_count
from megatron_rl_loss.step.collectives import Group, StepGroups, attempt, size_of, stated_dp_group, world_size
from megatron_rl_loss.step.counting import gather_counts
from megatron_rl_loss.step.ids import Ids, IdsByName
from megatron_rl_loss.step.masks import Mask
from megatron_rl_loss.step.samples import Labels, Samples
from megatron_rl_loss.step.units import ByKey, Sum, Units

#: Sums of fractional masks may differ in the last bit.
_SLACK = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Denominators of one optimizer step.

    `from_loss_masks` makes them. Where counts are known beforehand, make them by hand with the counts that the mode
    needs; a mode without a count that it needs raises an error that names the count.

    Attributes:
        step_tokens: sum of all mask entries, fractional weights included.
        step_active_tokens: number of tokens of nonzero weight. For Megatron's per-token-loss carrier.
        step_entries: number of mask entries of any weight. For the log alone.
        units: by the name of their ids, ``rollout`` and ``prompt`` for instance.
        by_mask: the same counts by each of the samples' further masks, for terms of the loss that have their own.
        dp_size: ranks of the data-parallel group that the counts were summed over; None for counts made by hand.
        dynamic_cp: true if some micro-batches of the step have a context-parallel group of their own.
    """

    step_tokens: float | None = None
    step_active_tokens: int | None = None
    step_entries: int | None = None
    units: Mapping[str, Units] = field(default_factory=dict, hash=False)
    by_mask: Mapping[str, "StepTotals"] = field(default_factory=dict, hash=False)
    dp_size: int | None = field(default=None, compare=False)
    dynamic_cp: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("step_tokens", "step_active_tokens", "step_entries"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name, units in self.units.items():
            if not isinstance(units, Units):
                raise TypeError(f"the {name} units are {units!r}: they must be Units. Pass Units(all=...).")
            if isinstance(units.tokens, ByKey) and self.step_tokens is not None:
                _check_fits("step_tokens", units.tokens.total, self.step_tokens)
        tokens, active = self.step_tokens, self.step_active_tokens
        if None not in (tokens, active) and (tokens == 0) != (active == 0):
            raise ValueError(
                f"step_tokens of {tokens:g} and step_active_tokens of {active}: both must be 0, or neither. Count the "
                "same masks for both."
            )

    def with_mask(self, name: str | None) -> "StepTotals":
        """These totals by one of the further masks, for None unchanged; ValueError for an unknown mask."""
        if name is not None and name not in self.by_mask:
            raise ValueError(
                f"a term has the mask {name!r}, and the totals count the masks: {', '.join(self.by_mask) or 'none'}: "
                f"the step must count the mask of each term. Declare it: plan_step(..., term_masks=[{name!r}])."
            )
        return self if name is None else self.by_mask[name]

    def check_apart(self, cp_size: int) -> None:
        """Raise ValueError for a data-parallel group so large that it must contain context-parallel ranks."""
        ranks = self.dp_size or 1
        if ranks > 1 and cp_size > 1 and ranks * cp_size > world_size():
            raise ValueError(
                f"totals over a dp_group of {ranks} ranks, and cp_size={cp_size}, in a job of {world_size()} ranks: "
                "the dp_group contains context-parallel ranks, which hold the same samples. Pass the data-parallel "
                "group without CP."
            )

    def check_covers(self, samples: Samples) -> None:
        """Raise ValueError for totals below the counts of these samples, so of a part of the step."""
        if not len(samples):
            return
        if self.step_tokens is not None:
            _check_fits("step_tokens", float(samples.mask_sums.sum()), self.step_tokens)
        for name, units in self.units.items():
            if name in samples.parts:
                keys, at = np.unique(samples.parts[name].keys, return_inverse=True)
                sums = np.bincount(at, samples.mask_sums_by(name), len(keys))
                if isinstance(units.tokens, ByKey) and len(keys):
                    whole = units.tokens.of(f"{name} id", keys)
                    worst = int((sums - whole * _SLACK).argmax())
                    _check_fits(f"mask tokens of one {name}", float(sums[worst]), float(whole[worst]))
            elif name in ("rollout", "sample"):
                sums = samples.mask_sums
            else:
                continue
            _check_fits(f"{name} units (all)", len(sums), units.all)
            _check_fits(f"{name} units (active)", int(np.count_nonzero(sums)), units.active)

    @classmethod
    def from_loss_masks(
        cls,
        loss_masks: Iterable[Mask],
        *,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
        ids: IdsByName | None = None,
        labels: Labels | None = None,
        sums: Sequence[Sum] = (),
        dp_group: Group | EllipsisType | None = ...,
        replica_groups: Sequence[Group] = (),
    ) -> "StepTotals":
        """Totals of a step from the full (not CP-sliced) masks of all samples this DP rank holds in it.

        >>> StepTotals.from_loss_masks([torch.tensor([1, 1, 0]), torch.tensor([1])]).step_tokens
        3.0

        Args:
            loss_masks: one per sample, over all micro-batches of the step; none if the rank has no sample.
            rollout_ids, prompt_ids, ids, labels: as in `Samples`. Units may straddle micro-batches and DP ranks.
            sums: those that a mode declares (``list(mode.sums.values())``), in the same order on every rank.
            dp_group: the data-parallel group *without* context parallelism; None where this rank alone holds the whole
                step. Required where `torch.distributed` has several ranks.
            replica_groups: groups whose ranks hold the same samples (context, tensor, pipeline parallel); their ranks
                are checked to agree.

        Raises:
            TypeError, ValueError: as `Samples`; no dp_group argument in a job of several ranks.
            BadBatchError: with groups, on every rank, naming the rank that failed and why.
        """
        groups = StepGroups(stated_dp_group(dp_group, "totals"), replica_groups=tuple(replica_groups))
        given: dict[str, Any] = {"rollout_ids": rollout_ids, "prompt_ids": prompt_ids, "ids": ids, "labels": labels}
        return count_step(attempt(lambda: [Samples(loss_masks, **given)]), groups, sums=sums)


def count_step(
    microbatches: Sequence[Samples] | Exception | None,
    groups: StepGroups,
    *,
    masks: Sequence[str] = (),
    sums: Sequence[Sum] = (),
    settings: str = "",
) -> StepTotals:
    """The totals of a step from this rank's micro-batches; arguments, collectives and errors as `gather_counts`."""
    of_loss_masks, *further = gather_counts(microbatches, groups, masks=masks, sums=sums, settings=settings)
    by_mask = {name: StepTotals(**vars(counts)) for name, counts in zip(masks, further, strict=True)}
    return StepTotals(**{**vars(of_loss_masks), "by_mask": by_mask, "dp_size": size_of(groups.dp_group)})


def _check_fits(name: str, here: float, whole: float | None) -> None:
    """Raise ValueError for a count of the whole step that is below that of some samples in it."""
    if whole is not None and here > whole * _SLACK:
        raise ValueError(
            f"{name} of {whole:g} in the totals, and {here:g} in these samples alone: totals must count the whole "
            "step. Make them from all of its samples, on all ranks."
        )
