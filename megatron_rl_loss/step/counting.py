"""The totals of a step, counted over its ranks: one round of collectives, checked on every rank."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.step.collectives import (
    Group,
    all_reduce,
    attempt,
    check_together,
    if_several,
    raise_together,
    rank_in,
    several,
    size_of,
)
from megatron_rl_loss.step.held import CountedUnits, HeldSamples
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import Statistic, StepTotals, UnitCounts


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
    _check_apart(dp_group, replicas)

    def count(part: Sequence[Samples]) -> tuple[HeldSamples, dict[str, float], Tensor]:
        local = HeldSamples(part, count_prompts, masks, statistics or {})
        digests = torch.zeros(size_of(dp_group) if groups else 0, dtype=torch.float64, device="cpu")
        counted = [samples for samples in part if samples.counts_here]
        if groups and any(map(len, counted)):
            digests[rank_in(dp_group)] = _digest(counted)
        return local, local.counts() | {"unlike_in_cp_groups": _unlike_in_cp_groups(part, dp_group)}, digests

    counted = microbatches if isinstance(microbatches, Exception) else attempt(lambda: count(microbatches or []))
    failure = counted if isinstance(counted, Exception) else None
    local, counts, digests = count([]) if isinstance(counted, Exception) else counted
    mine = int.from_bytes(hashlib.blake2b(settings.encode(), digest_size=5).digest(), "little")
    own = {"errors": failure is not None, "ranks_with_data": microbatches is not None, "settings": mine}
    counts, digests = _reduced(counts | own, digests, [dp_group])
    if all(rank_in(group) == 0 for group in groups) and counts["ranks_with_identity"] == counts["ranks_with_samples"]:
        _warn_of_twins(digests)
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
        units, clash = local.sum_units(dp_group)
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
    both, digests = _reduced(both, digests, replicas, dist.ReduceOp.MAX)
    if has_data and both["settings"] != -both["-settings"]:
        both["errors"], failure = 1, failure or of_other_settings
    raise_together(both["errors"] > 0, failure, groups)
    counts = {name: both[name] for name in counts}
    _check_agreement(counts, {name: -both[f"-{name}"] for name in counts}, bool((digests[0] == -digests[1]).all()))
    loss_masks, *further = (_totals(counts, units, k) for k in range(1 + len(masks)))
    by_mask = dict(zip(masks, further, strict=True))
    return replace(
        loss_masks,
        by_mask=by_mask,
        statistics=units.statistics,
        dp_size=size_of(dp_group),
        dynamic_cp=counts["ranks_with_cp_groups"] > 0,
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


def _check_same(stated: StepTotals, counted: StepTotals, of: str = "") -> None:
    """Refuse a count that was stated and is another one; `of` names the further mask that it is by."""
    for mask, of_mask in stated.by_mask.items():
        _check_same(of_mask, counted.with_mask(mask), f"{mask}: ")
    for kind, field_name in (
        ("", "step_tokens"), ("", "step_active_tokens"),
        ("rollouts", "all"), ("rollouts", "active"), ("prompts", "all"), ("prompts", "active"),
    ):  # fmt: skip
        mine, whole = (getattr(getattr(totals, kind) if kind else totals, field_name) for totals in (stated, counted))
        if mine is not None and whole is not None and abs(mine - whole) > 1e-6 * whole:
            name = f"{kind}.{field_name}" if kind else field_name
            raise ValueError(
                f"{of}{name} of {mine:g} from totals_of: the masks of all ranks have {whole:g} in this step. Count "
                "the whole step, over all its micro-batches and DP ranks."
            )


def _warn_of_twins(digests: Tensor) -> None:
    """Warn of data-parallel ranks that hold the same samples."""
    rank_of: dict[float, int] = {}
    for rank, digest in enumerate(digests.tolist()):
        if digest and digest in rank_of:
            warnings.warn(
                f"DP ranks {rank_of[digest]} and {rank} hold samples with the same masks, ids and tokens: they "
                "count twice. Shard the loader by DP rank, and leave context-parallel ranks out of the dp_group.",
                stacklevel=2,
            )
            return
        rank_of[digest] = rank


def _check_apart(dp_group: Group | None, replicas: list[Group]) -> None:
    """Refuse a data-parallel group that has ranks in common with a group of replicas, but for this rank itself."""
    for group in replicas if dp_group is not None else []:
        shared = set(dist.get_process_group_ranks(dp_group)) & set(dist.get_process_group_ranks(group))
        if len(shared) > 1:
            raise ValueError(
                f"a dp_group that shares the ranks {sorted(shared)} with a replica group: replicas hold the same "
                "samples, which would be counted more than once. Pass the data-parallel group without context "
                "parallelism."
            )


def _reduced(
    counts: Mapping[str, float],
    digests: Tensor,
    groups: Sequence[Group | None],
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> tuple[dict[str, float], Tensor]:
    """The counts and the digests, reduced over one group after the other."""
    values = torch.tensor(list(counts.values()), dtype=torch.float64, device="cpu")
    values = torch.cat([values, digests.flatten()])
    for group in groups:
        all_reduce(values, group, op)
    return dict(zip(counts, values.tolist(), strict=False)), values[len(counts) :].view(digests.shape)


def _check_agreement(highest: Mapping[str, float], lowest: Mapping[str, float], same_samples: bool) -> None:
    """Refuse what the reduced counts show, alike on every rank."""
    if not highest["ranks_with_data"] > 0:
        raise BadBatchError(
            "no rank reads data for this step: there must be micro-batches. Give every rank its iterator "
            "(is_distributed = True)."
        )
    # Sums over different DP groups may differ in the last bit for fractional masks, never by more.
    alike = all(most - lowest[name] <= 1e-9 * abs(lowest[name]) for name, most in highest.items())
    if not (alike and same_samples):
        raise BadBatchError(
            "ranks of one context, tensor or pipeline parallel group were given different samples for this step: they "
            "must read the same data. Shard and seed the loader by DP rank only."
        )
    if highest["unlike_in_cp_groups"]:
        raise BadBatchError(
            "ranks of a micro-batch's cp_group were given different samples for it, or in another order: each of them "
            "must have all of its samples. Make the same Samples on every rank of the group."
        )
    for kind in ("rollout_ids", "prompt_ids"):
        ranks, ranks_with_samples = int(highest[f"ranks_with_{kind}"]), int(highest["ranks_with_samples"])
        if 0 < ranks < ranks_with_samples:
            raise BadBatchError(
                f"{kind} on {ranks} of the {ranks_with_samples} DP ranks that hold samples: they must be given on all "
                f"or none. Pass {kind} everywhere."
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


def _digest(microbatches: Sequence[Samples]) -> float:
    """Of what this rank holds, its order and its cut into micro-batches: an integer that a float64 holds."""
    digest = hashlib.blake2b(digest_size=8)
    for samples in microbatches:
        digest.update(samples.digest())
    return float(int.from_bytes(digest.digest(), "little") >> 11)


def _unlike_in_cp_groups(microbatches: Sequence[Samples], dp_group: Group | None) -> float:
    """What adds up to 0 over the ranks if all ranks of each micro-batch's own cp_group hold the same micro-batches.

    The first rank of n adds n - 1 times what the others subtract: 32 bits of a digest, so that sums are exact.
    """
    numbers: Counter[tuple[int, ...]] = Counter()
    unlike = 0
    for samples in microbatches:
        if (group := if_several(samples.cp_group)) is None:
            continue
        ranks = tuple(dist.get_process_group_ranks(group))
        known = {dist.get_rank()} if dp_group is None else set(dist.get_process_group_ranks(dp_group))
        if not known.issuperset(ranks):
            raise ValueError(
                f"a micro-batch with a cp_group of the ranks {list(ranks)}, and a dp_group of {sorted(known)}: where "
                "groups change between micro-batches, counts are summed over all ranks. Pass the group over DP x CP as "
                "dp_group, and no cp_group to the plan."
            )
        numbers[ranks] += 1
        digest = hashlib.blake2b(repr((ranks, numbers[ranks])).encode() + samples.digest(), digest_size=4).digest()
        unlike += int.from_bytes(digest, "little") * (len(ranks) - 1 if group.rank() == 0 else -1)
    return float(unlike)
