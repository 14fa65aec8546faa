"""Counting a step: one gather of every rank's rows over the data-parallel group, and sums by key on every rank.

A rank's header has its number of rows, a flag for failure, and digests of its data and settings. Rows follow, one for
each key that the rank holds. Every rank then makes the same sums of the same rows, to the bit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.step.collectives import (
    Group,
    StepGroups,
    all_reduce,
    attempt,
    failure_of,
    gather_rows,
    raise_together,
    ranks_of,
    several,
    size_of,
    warn_on_one_rank,
    world_rank,
)
from megatron_rl_loss.step.ids import Keys, hashed, join_kinds, types_per_token, without_types
from megatron_rl_loss.step.masks import Floats
from megatron_rl_loss.step.samples import Samples, read_masks
from megatron_rl_loss.step.units import ByKey, Sum, Units

#: Columns of a row, after the number of samples, for each mask; the declared sums follow.
_OF_MASK = ("tokens", "active_tokens", "entries", "active_samples")
#: Units that every rank knows by name, with samples or without; there is one step.
_KNOWN = ("step", "rollout", "prompt")


@dataclass
class Counts:
    """A step's counts by the loss masks, or by one of the samples' further masks; fields as of `StepTotals`."""

    units: Mapping[str, Units]
    step_active_tokens: int | None = None
    step_tokens: float | None = None
    step_entries: int | None = None
    dynamic_cp: bool = False


def gather_counts(
    microbatches: Sequence[Samples] | Exception | None,
    groups: StepGroups,
    *,
    masks: Sequence[str],
    sums: Sequence[Sum],
    settings: str,
) -> list[Counts]:
    """The counts of a step from this rank's micro-batches, by the loss masks and by each further mask.

    Over the data-parallel group an all-gather of ten numbers per rank, and where these agree another of the rows; then
    a maximum over each group of replicas.

    Args:
        microbatches: one `Samples` per micro-batch; None if this rank, and so its whole data-parallel group, reads no
            data (a pipeline stage that needs none); or the exception that this rank raised.
        masks: names of the further masks that are counted too; the same on every rank.
        sums: further sums by key; the same on every rank, in the same order.
        settings: further settings that must be the same on every rank, such as the mode.

    Returns:
        The counts; on a stage without data, the number of active tokens by the loss masks alone.

    Raises:
        BadBatchError: on all ranks of the groups, if any failed or they do not agree, with each failing rank's reason.
    """
    over_dp = next(iter(several(groups.dp_group)), None)
    _check_disjoint(over_dp, groups.replicas)
    settings = "; ".join([settings, *(f"mask {name}" for name in masks), *(f"sum by {one.by}" for one in sums)])

    def hold() -> _Held:
        if isinstance(microbatches, Exception):
            raise microbatches
        return _Held(microbatches, masks, sums, groups)

    attempted = attempt(hold)
    failure = failure_of(attempted)
    held = attempted if isinstance(attempted, _Held) else _Held(None, masks, sums, StepGroups())
    mine = hashed(settings, 48)
    header = {"failed": failure is not None, "settings": mine, **held.header}
    numbers = np.array([list(header.values())], np.float64).view(np.int64)
    of_ranks = dict(zip(header, gather_rows(numbers, over_dp, 1).view(np.float64).T, strict=True))
    failed, rows = bool(of_ranks["failed"].any()), held.rows
    if not failed:
        failure, failed = _disagreement(of_ranks, held, settings)
    if not failed and of_ranks["num_rows"].any():
        rows = gather_rows(rows, over_dp, int(of_ranks["num_rows"].max()))
    counts, has_clash = _sum_rows(rows, held.kinds, 1 + len(masks), sums)
    if has_clash and not failed:
        failed, failure = True, _two_prompts()
    # Rows are made of the data, but for what the functions of declared sums return.
    data = np.concatenate([of_ranks["data"], of_ranks["kinds"]]).tobytes() + (rows.tobytes() if sums else b"")
    digest, has_data = hashed(data, 48), bool(of_ranks["has_data"].any())
    here = {
        "failed": failed,
        "has_data": has_data,
        "dynamic_cp": of_ranks["has_cp_groups"].max(),
        "active_tokens": counts[0].step_active_tokens if has_data else -np.inf,
        **_bounds("settings", mine),
        **_bounds("data", digest if has_data else None),
    }
    maxima = torch.tensor(list(here.values()), dtype=torch.float64, device="cpu")
    for group in groups.replicas:
        all_reduce(maxima, group, dist.ReduceOp.MAX)
    agreed = dict(zip(here, maxima.tolist(), strict=True))
    if agreed["settings"] != -agreed["-settings"]:
        agreed["failed"], failure = 1, failure or _other_settings(settings)
    raise_together(agreed["failed"] > 0, failure, groups.all)
    if not agreed["has_data"]:
        raise BadBatchError(
            "no rank reads data for this step: a step needs micro-batches. Give every rank a data iterator "
            "(is_distributed = True)."
        )
    if agreed["data"] != -agreed["-data"]:
        raise BadBatchError(
            "ranks of one context, tensor or pipeline parallel group were given different samples for this step, or "
            "layouts that differ: these ranks must read the same data and cut it alike. Shard and seed the loader by "
            "DP rank only, and pass masks uncut: whole rows on every CP rank, not 0 where another rank holds the token."
        )
    if not has_data:
        counts = [Counts(units={}) for _ in counts]
        counts[0].step_active_tokens = int(agreed["active_tokens"])
    counts[0].dynamic_cp = bool(agreed["dynamic_cp"])
    if world_rank() == 0 and (text := _twins(of_ranks, identity=1)) is not None:
        warn_on_one_rank(text)
    return counts


def _bounds(name: str, digest: int | None) -> dict[str, float]:
    """Numbers whose maxima over ranks are opposite where all ranks have one digest; None has no say."""
    return {name: -np.inf, f"-{name}": -np.inf} if digest is None else {name: digest, f"-{name}": -digest}


class _Held:
    """The part of a step that this rank holds.

    Attributes:
        header: a number by each name, the same names on every rank.
        kinds: names of the samples' ids.
        rows: int64 [num_keys, ...]: hash of the kind, key, prompt of a rollout; then as float64 the number of samples,
            and for each mask what `_OF_MASK` says and the declared sums.
    """

    def __init__(
        self,
        microbatches: Sequence[Samples] | None,
        masks: Sequence[str],
        sums: Sequence[Sum],
        groups: StepGroups,
    ) -> None:
        read_masks(microbatches or ())
        filled = [samples for samples in microbatches or () if len(samples)]
        of_ids = join_kinds(samples.kinds_of_ids for samples in filled)
        if of_ids is None:
            shown = " and of ".join(str(dict(one)) for one in sorted({samples.kinds_of_ids for samples in filled}))
            raise ValueError(
                f"micro-batches with ids of {shown}: each kind of id must be given on all or none, as ints on all or "
                "as strings on all, per sample or per token. Pass the same ids with every micro-batch."
            )
        self.kinds = tuple(of_ids)
        counted = [samples for samples in filled if samples.counts_here]
        of_samples = _columns(counted, masks, sums, "sample")
        ids = {name: np.concatenate([one.parts[name].keys for one in counted]) for name in self.kinds if counted}
        rows = [np.zeros((0, 3 + of_samples.shape[1]), np.int64)]
        for name, keys in {"step": np.zeros(len(of_samples), np.int64), **ids}.items():
            labels = ids.get("prompt", keys) if name == "rollout" else keys
            is_per_token = name in ids and name not in counted[0].ids
            columns = _columns(counted, masks, sums, name) if is_per_token else of_samples
            unique, label, table, has_clash = sum_by_key(keys, columns, labels)
            if has_clash:
                raise _two_prompts()
            kind = np.full(len(unique), hashed(name))
            rows.append(np.concatenate([np.stack([kind, unique, label], 1), table.view(np.int64)], 1))
        self.rows = np.concatenate(rows)
        is_compared = bool(counted and groups.all)
        # Equal masks alone may be chance; engines fill up ranks with copies of one row that is fully masked.
        has_own = bool(self.kinds) or any(samples.tokens is not None for samples in counted)
        is_active = any(samples.mask_sums.any() for samples in counted)
        self.header: dict[str, float] = {
            "has_data": microbatches is not None,
            "kinds": hashed(str(without_types(of_ids)), 48) if filled else 0,
            "types": types_per_token(of_ids),
            "data": hashed(b"".join(samples.digest() for samples in counted), 48) if is_compared else 0,
            "identity": (2 if "rollout" in of_ids else int(has_own)) * is_active,
            "unlike": _unlike_in_cp_groups(microbatches or (), groups.dp_group),
            "has_cp_groups": any(samples.cp_group is not None for samples in microbatches or ()),
            "num_rows": len(self.rows),
        }


def _columns(counted: Sequence[Samples], masks: Sequence[str], sums: Sequence[Sum], key: str) -> Floats:
    """The number 1, and for each mask what `_OF_MASK` says and the declared sums, of each part by that key."""
    parts = [np.zeros((1 + (1 + len(masks)) * (len(_OF_MASK) + len(sums)), 0))]
    for samples in counted:
        at = samples.parts[key].sample if key in samples.parts else slice(None)
        entries = np.array(samples.mask_lengths, np.float64)
        columns = list[Floats]()
        for name in (None, *masks):
            of_mask = samples.with_mask(name)
            tokens = of_mask.mask_sums_by(key)
            # active tokens and entries are of whole samples: they are read of the step alone
            columns += [tokens, of_mask.active_tokens[at], entries[at], (tokens > 0).astype(np.float64)]
            columns += [one.values(of_mask)[at] for one in sums]
        parts.append(np.stack([np.ones(len(columns[0])), *columns]))
    return np.concatenate(parts, 1).T


def sum_by_key(keys: Keys, values: Floats, labels: Keys) -> tuple[Keys, Keys, Floats, bool]:
    """Sorted unique keys, a label of each and the sums [num_keys, num_columns]; whether a key came with two labels."""
    unique, at = np.unique(keys, return_inverse=True)
    sums, label = np.stack([np.bincount(at, column, len(unique)) for column in values.T], 1), np.zeros_like(unique)
    label[at] = labels
    return unique, label, sums, bool((label[at] != labels).any())


def _sum_rows(
    rows: npt.NDArray[np.int64], kinds: Sequence[str], num_masks: int, sums: Sequence[Sum]
) -> tuple[list[Counts], bool]:
    """The counts by each mask, and True where a rollout came under two prompts."""
    units, step = [dict[str, Units]() for _ in range(num_masks)], np.zeros((num_masks, len(_OF_MASK)))
    width, num_samples, has_clash = len(_OF_MASK) + len(sums), 0, False
    for name in dict.fromkeys((*_KNOWN, *kinds)):
        part = rows[rows[:, 0] == hashed(name)]
        if not len(part) and name not in kinds:
            continue
        keys, _, table, clashes = sum_by_key(part[:, 1], part[:, 3:].copy().view(np.float64), part[:, 2])
        has_clash |= clashes
        for k, of_mask in enumerate(units):
            columns = table[:, 1 + k * width :].T[:width]
            of_sums = zip(sums, columns[len(_OF_MASK) :], strict=True)
            of_mask[name] = Units(
                all=len(keys),
                active=int((columns[0] > 0).sum()),
                tokens=ByKey(keys, columns[0]),
                samples=ByKey(keys, table[:, 0]),
                active_samples=ByKey(keys, columns[3]),
                sums={one: ByKey(keys, values) for one, values in of_sums if one.by == name},
            )
            if name == "step":
                step[k], num_samples = columns[: len(_OF_MASK), 0], int(table[0, 0])
    counts = []
    for (tokens, *numbers), of_mask in zip(step.tolist(), units, strict=True):
        active_tokens, entries, active = map(int, numbers)
        samples = Units(all=num_samples, active=active)
        counts.append(Counts({"sample": samples, "rollout": samples, **of_mask}, active_tokens, tokens, entries))
    return counts, has_clash


def _two_prompts() -> ValueError:
    return ValueError(
        "one rollout id is used under two prompt ids: rollout ids must be unique in the step, not only within a "
        "prompt. Join prompt and rollout index into one id."
    )


def _other_settings(settings: str) -> ValueError:
    return ValueError(
        f"this rank asks for {settings}, another rank for something else: all ranks must aggregate alike. Pass the "
        "same mode, divisor, units, terms, per_token_loss and empty_step on every rank."
    )


def _disagreement(of_ranks: Mapping[str, Floats], held: _Held, settings: str) -> tuple[ValueError | None, bool]:
    """This rank's error about headers that do not agree, and True if they do not."""
    has_data, kinds = of_ranks["has_data"], of_ranks["kinds"]
    if len(set(of_ranks["settings"])) > 1:
        return _other_settings(settings), True
    if 0 < has_data.sum() < len(has_data):
        if held.header["has_data"]:
            return None, True  # the ranks without data give the reason
        return ValueError(
            "this rank has no data iterator, while other DP ranks of its pipeline stage have one: all must read data. "
            "Give every rank a data iterator (is_distributed = True)."
        ), True
    types = int(np.bitwise_or.reduce(of_ranks["types"].astype(np.int64)))
    if len(set(kinds[kinds != 0])) > 1 or types & types >> 1 & 0x5555555555555:  # ints on one rank, strings on another
        return ValueError(
            f"samples with ids of {list(held.kinds)}, and other ids on other ranks: each kind of id must be given on "
            "all DP ranks or none, as ints on all or as strings on all. Pass the same ids on every rank."
        ), True
    if of_ranks["unlike"].astype(np.int64).sum():  # exact, over any number of ranks
        return ValueError(
            "ranks of a micro-batch's cp_group were given different samples, or the same in another order: each rank "
            "of the group must have all samples of the micro-batch. Make the same Samples on every rank of the group."
        ), True
    if (text := _twins(of_ranks, identity=2)) is not None:  # a rollout's id is its own
        return ValueError(text), True
    return None, False


def _twins(of_ranks: Mapping[str, Floats], identity: int) -> str | None:
    """The first two DP ranks that hold the same samples, told apart by ids or tokens (1) or by rollout ids (2)."""
    data = of_ranks["data"]
    _, first, of_digest = np.unique(data, return_index=True, return_inverse=True)
    is_twin = (data != 0) & (of_ranks["identity"] >= identity) & (first[of_digest] != np.arange(len(data)))
    for twin in np.flatnonzero(is_twin)[:1]:
        return (
            f"DP ranks {first[of_digest][twin]} and {twin} hold samples with the same masks, ids and tokens: these "
            "samples count twice. Shard the loader by DP rank, and leave CP ranks out of the dp_group."
        )
    return None


def _unlike_in_cp_groups(microbatches: Sequence[Samples], dp_group: Group | None) -> int:
    """Numbers that add up to 0 over the ranks if all ranks of each micro-batch's own cp_group hold the same ones.

    The first rank of n adds n - 1 times what the others subtract: 32 bits of a digest, so that sums are exact.
    """
    numbers, unlike = Counter[tuple[int, ...]](), 0
    for samples in microbatches:
        if samples.cp_group is None or size_of(samples.cp_group) == 1:
            continue
        ranks = tuple(ranks_of(samples.cp_group))
        if not set(ranks) <= set(ranks_of(dp_group)):
            raise ValueError(
                f"a micro-batch with a cp_group of the ranks {list(ranks)}, and a dp_group of {ranks_of(dp_group)}: "
                "the dp_group must contain the cp_groups of all micro-batches. Pass the group over DP x CP as "
                "dp_group, and no cp_group to the plan."
            )
        numbers[ranks] += 1
        digest = hashed(repr((ranks, numbers[ranks])).encode() + samples.digest(), 32)
        unlike += digest * (len(ranks) - 1 if samples.counts_here else -1)
    return unlike


def _check_disjoint(dp_group: Group | None, replicas: Sequence[Group]) -> None:
    """Raise ValueError for a data-parallel group that shares ranks with a group of replicas, beside this rank."""
    for group in replicas if dp_group is not None else []:
        if len(shared := set(ranks_of(dp_group)) & set(ranks_of(group))) > 1:
            raise ValueError(
                f"a dp_group that shares the ranks {sorted(shared)} with a cp_group or replica group: ranks of those "
                "hold the same samples, which would count more than once. Pass the data-parallel group without context "
                "parallelism."
            )
