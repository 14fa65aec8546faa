"""StepTotals: the step-global denominators of one optimizer step, and how they are made from what each rank holds.

A *step* is everything that goes into one optimizer update: all micro-batches of all data-parallel (DP) ranks. Masks
are replicated over context-, tensor- and pipeline-parallel ranks, so counts are summed over DP alone.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from operator import attrgetter
from types import EllipsisType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_count, require
from megatron_rl_loss.step.collectives import (
    Group,
    attempt,
    check_together,
    if_several,
    raise_together,
    rank_in,
    several,
    size_of,
    stated_dp_group,
    world_size,
)
from megatron_rl_loss.step.counting import (
    CountedUnits,
    HeldSamples,
    check_agreement,
    check_apart,
    reduced,
    warn_of_twins,
)
from megatron_rl_loss.step.ids import Ids
from megatron_rl_loss.step.masks import count_active, total
from megatron_rl_loss.step.samples import Labels, Samples
from megatron_rl_loss.step.units import By, Statistic, TokensById, UnitCounting, UnitCounts

__all__ = [
    "By",
    "Statistic",
    "StepTotals",
    "TokensById",
    "UnitCounting",
    "UnitCounts",
    "compare_totals",
    "reduce_step_totals",
]


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Denominators of one optimizer step, over all its micro-batches and DP ranks.

    Made by `from_loss_masks`, or by hand where the counts are known beforehand: give what the mode needs and leave the
    rest out; a mode that misses a count says which.

    Attributes:
        step_tokens: sum of all mask entries (fractional weights as they are). For ``token_mean``.
        step_active_tokens: number of tokens of nonzero weight. For Megatron's per-token-loss carrier.
        step_entries: number of mask entries, whatever their weight. For the log alone.
        rollouts: for ``sample_mean`` and ``constant``.
        prompts: for ``prompt_mean``.
        statistics: sums by key that modes of one's own have asked for, by name.
        by_mask: the same counts by each of the samples' further masks, for terms of the loss that have their own.
        dp_size: ranks of the data-parallel group that they were summed over; None where they were given by hand.
        dynamic_cp: whether some micro-batches of the step have a context-parallel group of their own.
    """

    step_tokens: float | None = None
    step_active_tokens: int | None = None
    step_entries: int | None = None
    rollouts: UnitCounts = field(default_factory=UnitCounts)
    prompts: UnitCounts = field(default_factory=UnitCounts)
    by_mask: Mapping[str, "StepTotals"] = field(default_factory=dict, hash=False)
    statistics: Mapping[str, TokensById] = field(default_factory=dict, hash=False)
    dp_size: int | None = field(default=None, compare=False)
    dynamic_cp: bool = field(default=False, compare=False)

    def check_apart(self, cp_size: int) -> None:
        """Refuse totals of a data-parallel group so large that its ranks must be context-parallel ones too."""
        ranks = 1 if self.dp_size is None else self.dp_size
        if ranks > 1 and cp_size > 1 and ranks * cp_size > world_size():
            raise ValueError(
                f"totals over a dp_group of {ranks} ranks, and cp_size={cp_size}, in a job of {world_size()} ranks: "
                "it has context-parallel ranks, which hold the same samples. Pass the data-parallel group without CP."
            )

    def with_mask(self, name: str | None) -> "StepTotals":
        """These totals by one of the further masks, or for None as they are; ValueError for an unknown one."""
        if name is not None and name not in self.by_mask:
            raise ValueError(
                f"totals of the masks: {', '.join(self.by_mask) or 'none'}; a term by the mask {name!r}: its tokens "
                "and units must be counted over the step too. Declare it: LossAggregation or plan_step(..., "
                "term_masks=[its name])."
            )
        return self if name is None else self.by_mask[name]

    def __post_init__(self) -> None:
        for name in ("step_tokens", "step_active_tokens", "step_entries"):
            if (count := getattr(self, name)) is not None:
                check_count(name, count)
        for name in ("rollouts", "prompts"):
            if not isinstance(units := getattr(self, name), UnitCounts):
                raise TypeError(
                    f"{name} is {units!r}: it must be UnitCounts. Pass UnitCounts(all=...), with active and tokens "
                    "where the mode needs them."
                )
            if isinstance(units.tokens, TokensById) and self.step_tokens is not None:
                _check_fits("step_tokens", units.tokens.total, self.step_tokens)
        tokens, active = self.step_tokens, self.step_active_tokens
        if None not in (tokens, active) and (tokens == 0) != (active == 0):
            raise ValueError(
                f"step_tokens of {tokens:g} and step_active_tokens of {active}: both are 0 or none is. Count the same "
                "masks for both."
            )

    def check_covers(self, samples: Samples) -> None:
        """Refuse totals of a part of the step (a micro-batch, one rank): these samples alone are more than all of it.

        On a device without waiting.
        """
        if not len(samples):
            return
        if self.step_tokens is not None:
            _check_fits("step_tokens", total(samples.mask_sums), self.step_tokens)
        _check_units("rollout", samples.mask_sums, samples.rollout_ids, self.rollouts)
        if samples.prompt_ids is not None:
            _check_units("prompt", samples.mask_sums, samples.prompt_ids, self.prompts)

    @classmethod
    def from_loss_masks(
        cls,
        loss_masks: Sequence[Tensor],
        *,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
        dp_group: Group | EllipsisType | None = ...,
        replica_groups: Sequence[Group] = (),
        labels: Labels | None = None,
        statistics: Mapping[str, Statistic] | None = None,
    ) -> "StepTotals":
        """Totals of a step from the full (not CP-sliced) masks of all samples this DP rank holds in it.

        Args:
            loss_masks: one 1-D tensor per sample, over all micro-batches of the step; none if the rank has no sample.
            rollout_ids, prompt_ids: as in `Samples`. Units may straddle micro-batches and DP ranks.
            dp_group: the data-parallel group *without* context parallelism, else every share is 1/cp_size of what it
                must be. None where this rank alone holds the whole step; that must be said where `torch.distributed`
                has several ranks.
            replica_groups: groups whose ranks hold the same samples (context, tensor, pipeline parallel). Totals are
                not summed over them; errors travel over them and their ranks are checked to agree.
            labels: as in `Samples`.
            statistics: sums that a mode of one's own needs (`OwnMode.statistics`), the same on every rank.

        Raises:
            TypeError, ValueError: as `Samples`.
            ValueError: no word of a dp_group among several ranks; a dp_group that overlaps a replica group.
            BadBatchError: with groups, on every rank, naming the rank that failed and why.
        """
        dp_group = stated_dp_group(dp_group, "totals")
        samples = attempt(lambda: [Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids, labels=labels)])
        return reduce_step_totals(samples, dp_group=dp_group, replica_groups=replica_groups, statistics=statistics)


def _check_units(name: str, sums: Tensor, ids: Tensor | None, units: UnitCounts) -> None:
    """Refuse counts of the units of one kind below what samples of these mask sums have; without ids each is one."""
    if ids is not None:
        unique, unit = ids.unique(return_inverse=True)
        sums = sums.new_zeros(len(unique)).index_add_(0, unit.to(sums.device), sums)
        if isinstance(units.tokens, TokensById):
            excess = sums - units.tokens.of(f"{name}_ids", unique).to(sums.device, non_blocking=True) * _SLACK
            require(
                (excess <= 0).all(),
                lambda: f"a {name} with {float(sums[int(excess.argmax())]):g} mask tokens in these samples",
                "the totals say it has fewer in the whole step. Make the totals from all samples of the step, on all "
                "ranks.",
            )
    if units.all is not None:
        _check_fits(f"{name}s.all", sums.numel(), units.all)
    if units.active is not None:
        _check_fits(f"{name}s.active", count_active(sums), units.active)


#: Sums of fractional masks may differ in the last bit.
_SLACK = 1 + 1e-9


def _check_fits(name: str, here: float | Tensor, whole: float) -> None:
    """Refuse a count of the whole step that is below what is in hand."""
    if isinstance(here, Real) and here <= whole * _SLACK:
        return  # before any text is made
    require(
        here <= whole * _SLACK,
        lambda: f"samples whose {name} alone are {float(here):g}",
        f"the totals say {whole:g}. Make the totals from all samples of the step, on all ranks.",
    )


def reduce_step_totals(
    microbatches: Sequence[Samples] | Exception | None,
    *,
    dp_group: Group | None = None,
    replica_groups: Sequence[Group] = (),
    count_prompts: bool = True,
    masks: Sequence[str] = (),
    statistics: Mapping[str, Statistic] | None = None,
    settings: str = "",
) -> StepTotals:
    """The totals of a step from what this rank holds in it: one collective round.

    In a round: one sum over `dp_group`, one maximum over each replica group and, where units are named by ids, three
    all-to-alls and a sum over `dp_group` (each id meets on one owner rank; a rank sends and receives what it holds,
    whatever the number of ranks). `Exchange` says how many messages an all-to-all takes.

    Args:
        microbatches: one `Samples` per micro-batch, all with ids of a kind or none; None if this rank reads no data (a
            pipeline stage that needs none), which then must hold for its whole `dp_group`; or the exception that kept
            the rank from it, which becomes a `BadBatchError` on all ranks of the groups.
        count_prompts: False leaves prompt ids and their exchange aside, for modes that do not use them.
        masks: names of the further masks that are counted too, in the same collectives; the same on every rank.
        statistics: further sums by key, by name; the same names on every rank.
        settings: what else must be the same on every rank, such as the mode: a `BadBatchError` on all where it is not.

    Returns:
        The totals; on a stage without data, not those of units by id.
    """
    dp_group = if_several(dp_group)
    replicas = several(*replica_groups)
    groups = several(dp_group, *replicas)
    check_apart(dp_group, replicas)

    hold = partial(
        HeldSamples, count_prompts=count_prompts, masks=masks, statistics=statistics or {}, dp_group=dp_group,
        is_compared=bool(groups),
    )  # fmt: skip
    attempted = microbatches if isinstance(microbatches, Exception) else attempt(lambda: hold(microbatches or []))
    failure = attempted if isinstance(attempted, Exception) else None
    held = hold([]) if isinstance(attempted, Exception) else attempted
    digests = torch.zeros(size_of(dp_group), dtype=torch.float64, device="cpu")
    digests[rank_in(dp_group)] = held.digest
    mine = int.from_bytes(hashlib.blake2b(settings.encode(), digest_size=5).digest(), "little")
    own = {"errors": failure is not None, "ranks_with_data": microbatches is not None, "settings": mine}
    counts, digests = reduced(held.counts | own, digests, [dp_group])
    if all(rank_in(group) == 0 for group in groups) and counts["ranks_with_identity"] == counts["ranks_with_samples"]:
        warn_of_twins(digests)
    of_other_settings = ValueError(
        f"this rank asks for {settings}, another one for something else: all ranks must aggregate alike. Pass the same "
        "mode, divisor, units and terms on every rank."
    )
    if counts["settings"] != mine * size_of(dp_group):
        counts["errors"], failure = 1, failure or of_other_settings
    has_data = counts["ranks_with_data"] > 0
    if has_data and counts["ranks_with_data"] < size_of(dp_group):
        counts["errors"] = 1
        if microbatches is None:
            failure = ValueError(
                "this rank was given no data iterator, other DP ranks of its pipeline stage were: all must read data. "
                "Give every rank one (is_distributed = True)."
            )
    units = CountedUnits()
    ranks_with_ids = {counts["ranks_with_rollout_ids"], counts["ranks_with_prompt_ids"]}
    # Ids on some ranks only are refused below; exchanged, they would look like clashes.
    all_or_none = ranks_with_ids <= {0, counts["ranks_with_samples"]}
    if (any(ranks_with_ids) or (statistics and has_data)) and all_or_none and not counts["errors"]:
        units, clash = held.sum_units(dp_group)
        counts["errors"] = float(units.num_clashes > 0)
        if clash:
            failure = ValueError(
                "one rollout id is used under two prompt ids: rollout ids must be unique in the step, not only within "
                "a prompt. Join prompt and rollout index into one id."
            )
    # One maximum over replicas carries the errors and, as +x and -x, whether the replicas' sums differ.
    both, digests = counts | {f"-{name}": -value for name, value in counts.items()}, torch.stack([digests, -digests])
    if not has_data:
        both = dict.fromkeys(both, -torch.inf) | {"errors": counts["errors"]}
        digests.fill_(-torch.inf)
    both, digests = reduced(both, digests, replicas, dist.ReduceOp.MAX)
    if has_data and both["settings"] != -both["-settings"]:
        both["errors"], failure = 1, failure or of_other_settings
    raise_together(both["errors"] > 0, failure, groups)
    counts = {name: both[name] for name in counts}
    check_agreement(counts, {name: -both[f"-{name}"] for name in counts}, bool((digests[0] == -digests[1]).all()))
    of_loss_masks, *further = (_totals(counts, units, k) for k in range(1 + len(masks)))
    return replace(
        of_loss_masks,
        by_mask=dict(zip(masks, further, strict=True)),
        statistics=units.statistics,
        dp_size=size_of(dp_group),
        dynamic_cp=counts["ranks_with_cp_groups"] > 0,
    )


def _totals(counts: Mapping[str, float], units: CountedUnits, mask: int) -> StepTotals:
    """The counts of the loss masks (0) or of a further mask."""
    rollouts, prompts = UnitCounts(), UnitCounts()
    if not counts["ranks_with_rollout_ids"]:
        rollouts = UnitCounts(all=int(counts["samples"]), active=int(counts[f"active_samples/{mask}"]))
    elif units.rollouts:
        rollouts = units.rollouts[mask]
    if counts["ranks_with_prompt_ids"] and units.prompts:
        prompts = units.prompts[mask]
    return StepTotals(
        step_tokens=counts[f"tokens/{mask}"],
        step_active_tokens=int(counts[f"active_tokens/{mask}"]),
        step_entries=int(counts[f"entries/{mask}"]),
        rollouts=rollouts,
        prompts=prompts,
    )


def compare_totals(
    stated: StepTotals | Exception,
    microbatches: Sequence[Samples] | None,
    *,
    dp_group: Group | None,
    replica_groups: Sequence[Group],
    masks: Sequence[str] = (),
    statistics: Mapping[str, Statistic] | None = None,
) -> StepTotals:
    """The counted totals of the step, once the stated ones were found to agree with them, on every rank.

    Raises:
        BadBatchError: counts that differ, on all ranks, naming the one that saw it and both numbers.
    """
    counted = reduce_step_totals(
        stated if isinstance(stated, Exception) else microbatches,
        dp_group=dp_group,
        replica_groups=replica_groups,
        masks=masks,
        statistics=statistics,
    )
    assert not isinstance(stated, Exception)  # reduce_step_totals has raised it
    check_together(lambda: _check_same(stated, counted), several(dp_group, *replica_groups))
    return counted


#: What is compared of totals that were stated.
_STATED = "step_tokens", "step_active_tokens", "rollouts.all", "rollouts.active", "prompts.all", "prompts.active"


def _check_same(stated: StepTotals, counted: StepTotals, of: str = "") -> None:
    """Refuse a count that was stated and is another one; `of` names the further mask that it is by."""
    for mask, of_mask in stated.by_mask.items():
        _check_same(of_mask, counted.with_mask(mask), f"{mask}: ")
    for name in _STATED:
        mine, whole = (attrgetter(name)(totals) for totals in (stated, counted))
        if mine is not None and whole is not None and abs(mine - whole) > 1e-6 * whole:
            raise ValueError(
                f"{of}{name} of {mine:g} from totals_of: the masks of all ranks have {whole:g} in this step. Count "
                "the whole step, over all its micro-batches and DP ranks."
            )
