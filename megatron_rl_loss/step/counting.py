"""What a rank holds of a step, and the rounds of collectives that add it up over ranks, checked on every rank."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.step.collectives import Exchange, Group, all_reduce, if_several
from megatron_rl_loss.step.masks import check_device
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import Statistic, TokensById, UnitCounts


@dataclass(frozen=True)
class CountedUnits:
    """What the exchange of ids gave: units by mask (the loss masks, then each further mask), and statistics by name."""

    rollouts: Sequence[UnitCounts] = ()
    prompts: Sequence[UnitCounts] = ()
    statistics: Mapping[str, TokensById] = field(default_factory=dict)
    num_clashes: int = 0  # ranks that saw an id under two prompts


#: The last two bits of a key tell these apart; a statistic's keys hold its name already.
_ROLLOUTS, _PROMPTS, _STATISTICS = range(3)


class HeldSamples:
    """Sums and ids of the samples this rank holds in the step; the one place that reads masks back from a device.

    Attributes:
        counts: what is summed over DP ranks.
        digest: of the samples that this rank counts, their order and their cut: an integer that a float64 holds; or 0.
    """

    def __init__(
        self,
        microbatches: Sequence[Samples],
        *,
        count_prompts: bool,
        masks: Sequence[str],
        statistics: Mapping[str, Statistic],
        dp_group: Group | None,
        is_compared: bool,
    ) -> None:
        filled = [samples for samples in microbatches if len(samples)]
        self._by_mask = [[samples.with_mask(name) for samples in filled] for name in (None, *masks)]
        counted = [samples.counts_here for samples in filled for _ in range(len(samples))]
        counts_here = torch.tensor(counted, dtype=torch.float64, device="cpu")
        # Rows: the loss masks and each further mask; columns: samples.
        mask_sums, active_tokens = (table * counts_here for table in _read_back(self._by_mask))
        rollout_ids, prompt_ids = (_join_ids(name, filled) for name in ("rollout_ids", "prompt_ids"))
        self._prompts_of_rollouts = None if rollout_ids is None else prompt_ids
        prompt_ids = prompt_ids if count_prompts else None
        #: By name: the kind of its keys, a key of each sample, and what is summed by these, [num_samples, num_masks].
        self._columns: dict[str, tuple[int, Tensor, Tensor]] = {}
        for name, kind, ids in (("rollouts", _ROLLOUTS, rollout_ids), ("prompts", _PROMPTS, prompt_ids)):
            if ids is not None:
                self._columns[name] = kind, ids, mask_sums.T
        for name, statistic in statistics.items():
            if not (statistic.of_rollouts and rollout_ids is None):
                values = torch.zeros_like(mask_sums.T)
                values[:, 0] = _joined([statistic.values(samples) for samples in filled], torch.float64) * counts_here
                self._columns[name] = _STATISTICS, _joined([statistic.keys(name, one) for one in filled]), values
        self.counts: dict[str, float] = {
            "errors": 0,
            "ranks_with_data": 0,
            "ranks_with_samples": bool(filled),
            "ranks_with_cp_groups": any(samples.cp_group is not None for samples in microbatches),
            "ranks_with_rollout_ids": rollout_ids is not None,
            "ranks_with_prompt_ids": prompt_ids is not None,
            "ranks_with_identity": any(samples.has_identity for samples in filled),
            "unlike_in_cp_groups": _unlike_in_cp_groups(microbatches, dp_group),
            "samples": float(counts_here.sum()),
        }
        for k, (sums, active, row) in enumerate(zip(mask_sums, active_tokens, self._by_mask, strict=True)):
            self.counts[f"tokens/{k}"] = float(sums.sum())
            self.counts[f"active_tokens/{k}"] = float(active.sum())
            self.counts[f"active_samples/{k}"] = float((sums > 0).sum())
            self.counts[f"entries/{k}"] = sum(sum(one.mask_lengths) for one in row if one.counts_here)
        self.digest = 0.0
        if is_compared and any(counted):
            digest = hashlib.blake2b(digest_size=8)
            for samples in microbatches:
                if samples.counts_here:
                    digest.update(samples.digest())
            self.digest = float(int.from_bytes(digest.digest(), "little") >> 11)

    def sum_units(self, dp_group: Group | None) -> tuple[CountedUnits, bool]:
        """Sums over the DP group by the keys that this rank holds, and how many rollouts and prompt groups there are.

        Also whether an id under two prompts was seen here. Every key has an owner rank, which adds up what it is sent
        and answers.
        """
        num_masks = len(self._by_mask)
        keys = _joined([ids * 4 + kind for kind, ids, _ in self._columns.values()])
        sums = _joined([values.flatten() for _, _, values in self._columns.values()], torch.float64)
        # A rollout's row also says its prompt, so that the owner sees an id that is used under two prompts.
        prompts = keys.clone()
        if self._prompts_of_rollouts is not None:  # rollouts come first
            prompts[: len(self._prompts_of_rollouts)] = self._prompts_of_rollouts
        my_keys, my_sums, my_prompts, clash = _sum_by_key(keys, sums.view(-1, num_masks), prompts)
        exchange = Exchange(dp_group)
        rows = exchange.to_owners(torch.cat([my_keys[:, None], my_prompts[:, None], my_sums.view(torch.int64)], 1))
        sent_sums = rows[:, 2:].contiguous().view(torch.float64)
        owned_keys, owned_sums, _, owner_clash = _sum_by_key(rows[:, 0].contiguous(), sent_sums, rows[:, 1])
        sums_of_step = exchange.answers(owned_sums[torch.searchsorted(owned_keys, rows[:, 0].contiguous())])

        numbers = [int(clash or owner_clash)]
        for kind in (_ROLLOUTS, _PROMPTS):  # of each how many there are, and how many are active by each mask
            of_kind = owned_sums[owned_keys.remainder(4) == kind]
            numbers += len(of_kind), *(of_kind > 0).sum(0).tolist()
        of_step = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        all_reduce(of_step, dp_group)
        num_clashes, *table = of_step.tolist()

        def of_column(name: str, mask: int = 0) -> TokensById:
            kind, ids, _ = self._columns.get(name, (0, keys[:0], sums))
            unique = ids.unique()
            return TokensById(unique, sums_of_step[torch.searchsorted(my_keys, unique * 4 + kind), mask])

        def of_units(name: str, count: int, *active: int) -> list[UnitCounts]:
            return [UnitCounts(all=count, active=active[k], tokens=of_column(name, k)) for k in range(num_masks)]

        units = CountedUnits(
            rollouts=of_units("rollouts", *table[: 1 + num_masks]),
            prompts=of_units("prompts", *table[1 + num_masks :]),
            statistics={name: of_column(name) for name, (kind, _, _) in self._columns.items() if kind == _STATISTICS},
            num_clashes=num_clashes,
        )
        return units, clash or owner_clash


def _read_back(by_mask: Sequence[Sequence[Samples]]) -> tuple[Tensor, Tensor]:
    """Mask sums and active tokens on the host, float64 [num_masks, num_samples]; refuses masks that are not sound."""
    described = [samples for row in by_mask for samples in row]
    if not described:
        empty = torch.zeros(len(by_mask), 0, dtype=torch.float64, device="cpu")
        return empty, empty
    check_device("the loss masks of a step's micro-batches", [samples.flat_mask for samples in described])
    tables = []
    for samples in described:
        sums = samples.mask_sums
        tables.append(torch.stack([sums, samples.active_tokens, torch.zeros_like(sums) + samples.sound]))
    mask_sums, active_tokens, sound = torch.cat(tables, 1).cpu().view(3, len(by_mask), -1)
    if not sound.all():
        for samples in described:
            samples.check_masks(wait=True)
    return mask_sums, active_tokens


def _joined(parts: Sequence[Tensor], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype, device="cpu"), *parts])


def _join_ids(name: str, filled: Sequence[Samples]) -> Tensor | None:
    """The ids of all micro-batches, or None where none has any."""
    some = [ids for samples in filled if (ids := getattr(samples, name)) is not None]
    if 0 < len(some) < len(filled):
        raise ValueError(
            f"{name} on {len(some)} of {len(filled)} micro-batches: they must be given on all or none. Pass {name} "
            "with every micro-batch."
        )
    return torch.cat(some) if some else None


def _sum_by_key(keys: Tensor, sums: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Sorted unique keys, the sums and one label of each, and whether a key came with two labels."""
    unique, at = keys.unique(return_inverse=True)
    total = sums.new_zeros(len(unique), sums.shape[1]).index_add_(0, at, sums)
    label = torch.zeros_like(unique)
    label[at] = labels
    return unique, total, label, bool((label[at] != labels).any())


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


def reduced(
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


def warn_of_twins(digests: Tensor) -> None:
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


def check_apart(dp_group: Group | None, replicas: list[Group]) -> None:
    """Refuse a data-parallel group that has ranks in common with a group of replicas, but for this rank itself."""
    for group in replicas if dp_group is not None else []:
        shared = set(dist.get_process_group_ranks(dp_group)) & set(dist.get_process_group_ranks(group))
        if len(shared) > 1:
            raise ValueError(
                f"a dp_group that shares the ranks {sorted(shared)} with a replica group: replicas hold the same "
                "samples, which would be counted more than once. Pass the data-parallel group without context "
                "parallelism."
            )


def check_agreement(highest: Mapping[str, float], lowest: Mapping[str, float], same_samples: bool) -> None:
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
