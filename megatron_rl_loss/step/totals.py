"""StepTotals: the denominators of one optimizer step, over all its micro-batches and data-parallel (DP) ranks.

Masks are replicated over context-, tensor- and pipeline-parallel ranks, so counts are summed over DP alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

from megatron_rl_loss.step.collectives import Group, StepGroups, attempt, stated_dp_group
from megatron_rl_loss.step.ids import Ids, IdsByName
from megatron_rl_loss.step.masks import Mask
from megatron_rl_loss.step.samples import Labels, Samples
from megatron_rl_loss.step.units import Sum, Units


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTotals:
    """Denominators of one optimizer step. They are counted, by `from_loss_masks` or by a plan, never made by hand.

    Attributes:
        step_tokens: sum of all mask entries, fractional weights included.
        step_active_tokens: number of tokens of nonzero weight. For Megatron's per-token-loss carrier.
        step_entries: number of mask entries of any weight. For the log alone.
        units: by the name of their ids, ``rollout`` and ``prompt`` for instance: ``units["rollout"].number["all"]`` is
            the number of rollouts. None on a pipeline stage that reads no data.
        by_mask: the same counts by each of the samples' further masks, for terms of the loss that have their own.
        dp_size: ranks of the data-parallel group that the counts were summed over.
        dynamic_cp: true if some micro-batches of the step have a context-parallel group of their own.
    """

    step_tokens: float
    step_active_tokens: int
    step_entries: int
    units: Mapping[str, Units]
    by_mask: Mapping[str, "StepTotals"] = field(default_factory=dict)
    dp_size: int = 1
    dynamic_cp: bool = False

    def with_mask(self, name: str | None) -> "StepTotals":
        """These totals by one of the further masks, for None unchanged; ValueError for an unknown mask."""
        if name is not None and name not in self.by_mask:
            raise ValueError(
                f"a term has the mask {name!r}, and the totals count the masks: {', '.join(self.by_mask) or 'none'}: "
                f"the step must count the mask of each term. Declare it: plan_step(..., term_masks=[{name!r}])."
            )
        return self if name is None else self.by_mask[name]

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
        from megatron_rl_loss.step.counting import count_step  # it makes these totals

        groups = StepGroups(stated_dp_group(dp_group, "totals"), replica_groups=tuple(replica_groups))
        options: dict[str, Any] = {"rollout_ids": rollout_ids, "prompt_ids": prompt_ids, "ids": ids, "labels": labels}
        return count_step(attempt(lambda: [Samples(loss_masks, **options)]), groups, sums=sums)
