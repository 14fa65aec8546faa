"""What a rank holds of a step: sums by sample and mask, and by id over the ranks of its data-parallel group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl_loss.step.collectives import Exchange, Group, all_reduce
from megatron_rl_loss.step.masks import check_device
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import Statistic, TokensById, UnitCounts


@dataclass(frozen=True)
class CountedUnits:
    """What the exchange of ids gave: units by mask (the loss masks, then each further mask), and statistics by name."""

    rollouts: Sequence[UnitCounts] = ()
    prompts: Sequence[UnitCounts] = ()
    statistics: Mapping[str, TokensById] = field(default_factory=dict)
    num_clashes: int = 0  # ranks that saw an id under two prompts


class HeldSamples:
    """Sums and ids of the samples this rank holds in the step; the one place that reads masks back from a device."""

    def __init__(
        self,
        microbatches: Sequence[Samples],
        count_prompts: bool,
        masks: Sequence[str],
        statistics: Mapping[str, Statistic],
    ) -> None:
        filled = [samples for samples in microbatches if len(samples)]
        by_mask = [[samples.with_mask(name) for samples in filled] for name in (None, *masks)]
        self.has_identity = any(samples.has_identity for samples in filled)
        counted = [samples.counts_here for samples in filled for _ in range(len(samples))]
        self.counted = torch.tensor(counted, dtype=torch.float64, device="cpu")
        self.has_cp_groups = any(samples.cp_group is not None for samples in microbatches)
        # Rows: the loss masks and each further mask; columns: samples.
        self.mask_sums, self.active_tokens = (table * self.counted for table in _read_back(by_mask))
        self.entries = [sum(sum(one.mask_lengths) for one in row if one.counts_here) for row in by_mask]
        self.rollout_ids = _join_ids("rollout_ids", [samples.rollout_ids for samples in filled])
        self.prompts_of_rollouts = _join_ids("prompt_ids", [samples.prompt_ids for samples in filled])
        self.prompt_ids = self.prompts_of_rollouts if count_prompts else None
        self.keys: dict[str, Tensor] = {}
        self.values: list[Tensor] = []
        for name, statistic in statistics.items():
            if not (statistic.of_rollouts and self.rollout_ids is None):
                self.keys[name] = _concatenated([statistic.keys(name, samples) for samples in filled])
                self.values += [statistic.values(samples) * samples.counts_here for samples in filled]

    def counts(self) -> dict[str, float]:
        """What is summed over DP ranks."""
        num_samples = int(self.counted.sum())
        counts: dict[str, float] = {"errors": 0, "ranks_with_data": 0, "ranks_with_samples": len(self.counted) > 0}
        counts["ranks_with_cp_groups"] = self.has_cp_groups
        counts["ranks_with_rollout_ids"] = self.rollout_ids is not None
        counts["ranks_with_prompt_ids"] = self.prompt_ids is not None
        counts |= {"samples": num_samples, "ranks_with_identity": self.has_identity}
        for k, (sums, active) in enumerate(zip(self.mask_sums, self.active_tokens, strict=True)):
            counts |= {f"active_samples/{k}": int((sums > 0).sum()), f"tokens/{k}": float(sums.sum())}
            counts |= {f"active_tokens/{k}": float(active.sum()), f"entries/{k}": self.entries[k]}
        return counts

    def sum_units(self, dp_group: Group | None) -> tuple[CountedUnits, bool]:
        """Mask sums of the rank's rollouts and prompt groups, and their numbers, over the DP group; and statistics.

        Also whether an id under two prompts was seen here. All go together, told apart by the last bits of their key.
        Every key has an owner rank, which adds up what it is sent and answers. A statistic's row has its value where
        others have the sum of the loss mask.
        """
        kinds = [_concatenated([] if ids is None else [ids]) for ids in (self.rollout_ids, self.prompt_ids)]
        kinds.append(_concatenated(list(self.keys.values())))
        keys = torch.cat([ids * 4 + kind for kind, ids in enumerate(kinds)])
        num_masks, of_samples = len(self.mask_sums), self.mask_sums.T
        of_keys = of_samples.new_zeros(len(kinds[2]), num_masks)
        of_keys[:, 0] = torch.cat([of_samples.new_zeros(0), *self.values])
        sums = torch.cat([*(of_samples if len(ids) else of_samples[:0] for ids in kinds[:2]), of_keys])
        # A rollout's row also says its prompt, so that the owner sees an id that is used under two prompts.
        prompts = keys.clone()
        if self.rollout_ids is not None and self.prompts_of_rollouts is not None:
            prompts[: len(self.rollout_ids)] = self.prompts_of_rollouts
        my_keys, my_sums, my_prompts, clash = _sum_by_key(keys, sums, prompts)
        exchange = Exchange(dp_group)
        rows = torch.cat([my_keys[:, None], my_sums.view(torch.int64), my_prompts[:, None]], 1)
        sent_keys, sent_sums, sent_prompts = exchange.to_owners(rows).split([1, num_masks, 1], 1)
        sent_keys = sent_keys.flatten().contiguous()
        owned_keys, owned_sums, _, owner_clash = _sum_by_key(
            sent_keys, sent_sums.contiguous().view(torch.float64), sent_prompts.flatten()
        )
        sums_of_step = exchange.answers(owned_sums[torch.searchsorted(owned_keys, sent_keys)])

        # Rows: rollouts and prompts; columns: all of them, and those active in each mask.
        of_kinds = [owned_sums[owned_keys.remainder(4) == kind] for kind in range(2)]
        table = [[len(of_kind), *(of_kind > 0).sum(0).tolist()] for of_kind in of_kinds]
        numbers = torch.tensor([clash or owner_clash, *table[0], *table[1]], dtype=torch.int64, device="cpu")
        all_reduce(numbers, dp_group)
        num_clashes, *table_of_step = numbers.tolist()
        my_kind, my_ids = my_keys.remainder(4), my_keys.div(4, rounding_mode="floor")

        def counts_of(kind: int) -> list[UnitCounts]:
            count, *active = table_of_step[kind * (1 + num_masks) : (kind + 1) * (1 + num_masks)]
            ids, tokens = my_ids[my_kind == kind], sums_of_step[my_kind == kind]
            return [
                UnitCounts(all=count, active=active[k], tokens=TokensById(ids, tokens[:, k])) for k in range(num_masks)
            ]

        keyed = TokensById(my_ids[my_kind == 2], sums_of_step[my_kind == 2, 0])
        statistics = {
            name: TokensById(keys.unique(), keyed.of(name, keys.unique())) for name, keys in self.keys.items()
        }
        return CountedUnits(counts_of(0), counts_of(1), statistics, num_clashes), clash or owner_clash


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


def _concatenated(ids: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *ids])


def _join_ids(name: str, ids: Sequence[Tensor | None]) -> Tensor | None:
    """The ids of all micro-batches, or None where none has any."""
    some = [one for one in ids if one is not None]
    if 0 < len(some) < len(ids):
        raise ValueError(
            f"{name} on {len(some)} of {len(ids)} micro-batches: they must be given on all or none. Pass {name} with "
            "every micro-batch."
        )
    return torch.cat(some) if some else None


def _sum_by_key(keys: Tensor, sums: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Sorted unique keys, the sums and one label of each, and whether a key came with two labels."""
    unique, at = keys.unique(return_inverse=True)
    total = sums.new_zeros(len(unique), sums.shape[1]).index_add_(0, at, sums)
    label = torch.zeros_like(unique)
    label[at] = labels
    return unique, total, label, bool((label[at] != labels).any())
