"""StepTotals: the step-global denominators of one optimizer step, from one collective round.

A *step* is everything that goes into one optimizer update: all micro-batches of all data-parallel (DP) ranks. Masks
are replicated over context-, tensor- and pipeline-parallel ranks, so counts are summed over DP alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import BadBatchError, explain
from megatron_rl_loss.samples import Ids, Samples, as_ids

Group = dist.ProcessGroup


class UnitTokens:
    """Mask tokens of units (rollouts or prompt groups) by id: at least those of the samples this rank holds."""

    def __init__(self, ids: Tensor, tokens: Tensor) -> None:
        order = ids.argsort()
        self._ids, self._tokens = ids[order], tokens.double()[order]

    @classmethod
    def from_mapping(cls, name: str, tokens: Mapping[int | str, float]) -> "UnitTokens":
        for unit, count in tokens.items():
            _check_count(f"the token count of {name} {unit!r}", count)
        return cls(
            as_ids(name, list(tokens), len(tokens)),
            torch.tensor(list(tokens.values()), dtype=torch.float64, device="cpu"),
        )

    def of(self, name: str, ids: Tensor) -> Tensor:
        """Tokens of the unit of each id, float64; ValueError for an id that is not among them."""
        at = torch.searchsorted(self._ids, ids)
        found = self._ids[at.clamp(max=max(self._ids.numel() - 1, 0))] == ids if self._ids.numel() else ids != ids
        if not bool(found.all()):
            given = f"the {name} of sample {int((~found).nonzero()[0])} has no token count in the step's totals"
            remedy = "Make the totals from the whole step, with the same ids"
            raise ValueError(explain(given, "every unit of the micro-batch must be in them", remedy))
        return self._tokens[at]


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Denominators of one optimizer step, over all its micro-batches and DP ranks.

    Made by `from_loss_masks`, or by hand where the counts are known beforehand: give what the mode needs and leave the
    rest None; a reducer that misses a count says which.

    Attributes:
        step_tokens: sum of all mask entries (fractional weights as they are). For ``token_mean``.
        step_active_tokens: number of tokens of nonzero weight. For Megatron's per-token-loss carrier.
        num_rollouts: rollouts, fully masked ones included. For ``sample_mean`` and ``constant``.
        num_active_rollouts: rollouts with a token of nonzero weight (unit counting ``active``).
        num_prompts, num_active_prompts: the same for prompt groups. For ``prompt_mean``.
        rollout_tokens: mask sum of every rollout this rank holds a part of, by rollout id. Only for rollouts split
            over samples (with ``rollout_ids``). A mapping is accepted.
        prompt_tokens: mask sum of every prompt group this rank holds a part of, by prompt id. A mapping is accepted.
    """

    step_tokens: float | None = None
    step_active_tokens: int | None = None
    num_rollouts: int | None = None
    num_active_rollouts: int | None = None
    num_prompts: int | None = None
    num_active_prompts: int | None = None
    rollout_tokens: UnitTokens | Mapping[int | str, float] | None = None
    prompt_tokens: UnitTokens | Mapping[int | str, float] | None = None

    def __post_init__(self) -> None:
        by_id = {"rollout_tokens": "rollout_ids", "prompt_tokens": "prompt_ids"}
        for name, value in list(vars(self).items()):
            if value is None or (name in by_id and isinstance(value, UnitTokens)):
                continue
            if name not in by_id:
                _check_count(name, value)
            elif isinstance(value, Mapping):
                object.__setattr__(self, name, UnitTokens.from_mapping(by_id[name], value))
            else:
                given = f"{name} is {value!r}"
                raise TypeError(explain(given, f"it must map {by_id[name]} to token counts", "Pass a dict"))

    @classmethod
    def from_loss_masks(
        cls,
        loss_masks: Sequence[Tensor],
        *,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
        dp_group: Group | None = None,
        replica_groups: Sequence[Group] = (),
    ) -> "StepTotals":
        """Totals of a step from the full (not CP-sliced) masks of all samples this DP rank holds in it.

        Args:
            loss_masks: one 1-D tensor a sample, over all micro-batches of the step; none if the rank has no sample.
            rollout_ids, prompt_ids: as in `Samples`. Units may straddle micro-batches and DP ranks.
            dp_group: the data-parallel group *without* context parallelism; None for a single DP rank.
            replica_groups: groups whose ranks hold the same samples (context, tensor, pipeline parallel). Totals are
                not summed over them; errors travel over them and their ranks are checked to agree.

        Raises:
            TypeError, ValueError: as `Samples`.
            BadBatchError: with groups, on every rank, naming the rank that failed and why.
        """
        return reduce_step_totals(
            lambda: [Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids)],
            dp_group=dp_group,
            replica_groups=replica_groups,
        )[1]


def _check_count(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < float("inf"):
        remedy = "Pass the count of the whole step"
        raise ValueError(explain(f"{name} is {value!r}", "it must be a finite number >= 0", remedy))


# The slots of the vector that is summed over DP ranks.
_ERRORS, _RANKS_WITH_DATA, _RANKS_WITH_SAMPLES, _RANKS_WITH_ROLLOUT_IDS, _RANKS_WITH_PROMPT_IDS = range(5)
_SAMPLES, _ACTIVE_SAMPLES, _TOKENS, _ACTIVE_TOKENS, _ID_CHECKSUM, _ORDER_CHECKSUM, _HEADER_SIZE = range(5, 12)


def reduce_step_totals(
    prepare: Callable[[], list[Samples] | None],
    *,
    dp_group: Group | None = None,
    replica_groups: Sequence[Group] = (),
    count_prompts: bool = True,
) -> tuple[list[Samples], StepTotals]:
    """`prepare` this rank's micro-batches of a step and reduce their totals: one collective round.

    An exception of `prepare` on any rank becomes a `BadBatchError` on all ranks of the groups. In a round: one sum over
    `dp_group`, one maximum over each replica group and, where units are named by ids, three all-to-alls and a sum over
    `dp_group` (each id meets on one owner rank; a rank sends and receives what it holds, whatever the number of ranks).

    Args:
        prepare: returns the rank's samples, a `Samples` a micro-batch, all with ids of a kind or none; or None if this
            rank reads no data (a pipeline stage that needs none), which then must hold for its whole `dp_group`.
        count_prompts: False leaves prompt ids and their exchange aside, for modes that do not use them.

    Returns:
        What `prepare` returned ([] for None), and the totals; on a stage without data, not those of units by id.
    """
    dp_group = _if_several(dp_group)
    replicas = [group for group in replica_groups if _if_several(group) is not None]
    failure: Exception | None = None
    microbatches: list[Samples] | None = None
    local = _LocalUnits([], count_prompts)
    header = torch.zeros(_HEADER_SIZE, dtype=torch.float64, device="cpu")
    try:
        microbatches = prepare()
        local = _LocalUnits(microbatches or [], count_prompts)
        header = local.header(0 if dp_group is None else dp_group.rank())
        header[_RANKS_WITH_DATA] = microbatches is not None
    except Exception as error:
        failure = error
        header[_ERRORS] = 1
    _all_reduce(header, dp_group, dist.ReduceOp.SUM)
    has_data = bool(header[_RANKS_WITH_DATA] > 0)
    if has_data and header[_RANKS_WITH_DATA] < (1 if dp_group is None else dp_group.size()):
        header[_ERRORS] = 1
        if failure is None and microbatches is None:
            given = "this rank was given no data iterator, other DP ranks of its pipeline stage were"
            failure = ValueError(explain(given, "all must read data", "Give every rank one (is_distributed = True)"))
    units: _UnitSums | None = None
    ranks_with_ids = header[[_RANKS_WITH_ROLLOUT_IDS, _RANKS_WITH_PROMPT_IDS]]
    # Ids on some ranks only are refused below; exchanged, they would look like clashes.
    all_or_none = bool(((ranks_with_ids == 0) | (ranks_with_ids == header[_RANKS_WITH_SAMPLES])).all())
    if ranks_with_ids.any() and all_or_none and not header[_ERRORS] > 0:
        units = local.sum_units(dp_group)
        header[_ERRORS] = float(units.any_clash)
        failure = units.clash
    # One maximum over replicas carries the errors and, as +x and -x, whether the replicas' sums differ.
    highest = torch.cat([header, -header])
    if not has_data:
        highest[_ERRORS + 1 :] = -torch.inf
    for group in replicas:
        _all_reduce(highest, group, dist.ReduceOp.MAX)
    _raise_together(highest[_ERRORS] > 0, failure, dp_group, replicas)
    header = highest[:_HEADER_SIZE]
    _check_agreement(header, -highest[_HEADER_SIZE:])
    by_rollout, by_prompt = bool(header[_RANKS_WITH_ROLLOUT_IDS] > 0), bool(header[_RANKS_WITH_PROMPT_IDS] > 0)
    samples, active_samples, tokens, active_tokens = header[_SAMPLES : _ACTIVE_TOKENS + 1].tolist()
    return microbatches or [], StepTotals(
        step_tokens=tokens,
        step_active_tokens=int(active_tokens),
        num_rollouts=(units.counts[0] if units else None) if by_rollout else int(samples),
        num_active_rollouts=(units.counts[1] if units else None) if by_rollout else int(active_samples),
        num_prompts=units.counts[2] if units and by_prompt else None,
        num_active_prompts=units.counts[3] if units and by_prompt else None,
        rollout_tokens=units.rollout_tokens if units and by_rollout else None,
        prompt_tokens=units.prompt_tokens if units and by_prompt else None,
    )


def _check_agreement(highest: Tensor, lowest: Tensor) -> None:
    """Refuse what the reduced header shows, alike on every rank."""
    if not highest[_RANKS_WITH_DATA] > 0:
        remedy = "Give every rank its iterator (is_distributed = True)"
        raise BadBatchError(explain("no rank reads data for this step", "there must be micro-batches", remedy))
    # Sums over different DP groups may differ in the last bit for fractional masks, never by more.
    if not torch.allclose(highest, lowest, rtol=1e-9, atol=0):
        given = "ranks of one context, tensor or pipeline parallel group were given different samples for this step"
        raise BadBatchError(explain(given, "they must read the same data", "Shard and seed the loader by DP rank only"))
    for kind, slot in (("rollout_ids", _RANKS_WITH_ROLLOUT_IDS), ("prompt_ids", _RANKS_WITH_PROMPT_IDS)):
        if 0 < highest[slot] < highest[_RANKS_WITH_SAMPLES]:
            ranks = f"{int(highest[slot])} of the {int(highest[_RANKS_WITH_SAMPLES])} DP ranks that hold samples"
            remedy = f"Pass {kind} everywhere"
            raise BadBatchError(explain(f"{kind} on {ranks}", "they must be given on all or none", remedy))


@dataclass(frozen=True)
class _UnitSums:
    counts: list[int]  # rollouts, active rollouts, prompts, active prompts
    rollout_tokens: UnitTokens
    prompt_tokens: UnitTokens
    any_clash: bool  # on any DP rank
    clash: ValueError | None  # seen by this one


class _LocalUnits:
    """Sums and ids of the samples this rank holds in the step."""

    def __init__(self, microbatches: list[Samples], count_prompts: bool) -> None:
        filled = [samples for samples in microbatches if len(samples)]
        sums = [samples.mask_sums() for samples in filled]
        self.mask_sums = torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64, device="cpu")
        self.active_tokens = sum(float(samples.active_tokens().sum()) for samples in filled)
        self.rollout_ids = _joined("rollout_ids", [samples.rollout_ids for samples in filled])
        self.prompt_ids = _joined("prompt_ids", [samples.prompt_ids for samples in filled]) if count_prompts else None

    def header(self, dp_rank: int) -> Tensor:
        header = torch.zeros(_HEADER_SIZE, dtype=torch.float64, device="cpu")
        header[_RANKS_WITH_SAMPLES] = self.mask_sums.numel() > 0
        header[_RANKS_WITH_ROLLOUT_IDS] = self.rollout_ids is not None
        header[_RANKS_WITH_PROMPT_IDS] = self.prompt_ids is not None
        header[_SAMPLES] = self.mask_sums.numel()
        header[_ACTIVE_SAMPLES] = (self.mask_sums > 0).sum()
        header[_TOKENS] = self.mask_sums.sum()
        header[_ACTIVE_TOKENS] = self.active_tokens
        # Replicas must hold the same samples on the same DP rank, in the same order.
        places = torch.arange(1, self.mask_sums.numel() + 1, dtype=torch.float64, device="cpu") + dp_rank * 2**20
        header[_ORDER_CHECKSUM] = (places * self.mask_sums).sum()
        for ids in (self.rollout_ids, self.prompt_ids):
            header[_ID_CHECKSUM] += 0 if ids is None else _mixed(ids).remainder(2**31).sum()
        return header

    def sum_units(self, dp_group: Group | None) -> _UnitSums:
        """Mask sums of the rank's rollouts and prompt groups, and their numbers, over the DP group.

        Rollouts and prompts go together, told apart by the last bit of their key. Every key has an owner rank, which
        adds up what it is sent and answers.
        """
        no_ids = torch.zeros(0, dtype=torch.int64, device="cpu")
        kinds = [no_ids if ids is None else ids for ids in (self.rollout_ids, self.prompt_ids)]
        keys = torch.cat([ids * 2 + kind for kind, ids in enumerate(kinds)])
        sums = torch.cat([self.mask_sums if ids.numel() else self.mask_sums[:0] for ids in kinds])
        # A rollout's row also says its prompt, so that the owner sees an id that is used under two prompts.
        prompts = no_ids if self.prompt_ids is None or self.rollout_ids is None else self.prompt_ids
        prompt_of_key = torch.cat([prompts, keys[prompts.numel() :]])
        my_keys, my_sums, my_prompts, clash = _sum_by_key(keys, sums, prompt_of_key)
        exchange = _Exchange(my_keys, dp_group)
        owned = exchange.to_owners(torch.stack([my_keys, my_sums.view(torch.int64), my_prompts], 1))
        owned_keys, owned_sums, _, owner_clash = _sum_by_key(owned[:, 0], owned[:, 1].view(torch.float64), owned[:, 2])
        is_prompt = owned_keys.remainder(2) == 1
        counts = [
            (~is_prompt).sum(),
            (~is_prompt & (owned_sums > 0)).sum(),
            is_prompt.sum(),
            (is_prompt & (owned_sums > 0)).sum(),
            torch.tensor(int(clash or owner_clash), device="cpu"),
        ]
        numbers = torch.stack(counts).double()
        _all_reduce(numbers, dp_group, dist.ReduceOp.SUM)
        totals = exchange.answers(owned_sums[torch.searchsorted(owned_keys, owned[:, 0].contiguous())])
        prompts_of_mine = my_keys.remainder(2) == 1
        rollout_tokens, prompt_tokens = (
            UnitTokens(my_keys[at].div(2, rounding_mode="floor"), totals[at])
            for at in (~prompts_of_mine, prompts_of_mine)
        )
        clash_error = None
        if clash or owner_clash:
            given = "one rollout id is used under two prompt ids"
            rule = "rollout ids must be unique in the step, not only within a prompt"
            clash_error = ValueError(explain(given, rule, "Join prompt and rollout index into one id"))
        found = [int(n) for n in numbers[:4]]
        return _UnitSums(found, rollout_tokens, prompt_tokens, any_clash=bool(numbers[4] > 0), clash=clash_error)


def _joined(name: str, ids: list[Tensor | None]) -> Tensor | None:
    given = [i for i in ids if i is not None]
    if not given:
        return None
    if len(given) < len(ids):
        what = f"{name} on {len(given)} of {len(ids)} micro-batches"
        raise ValueError(explain(what, "they must be given on all or none", f"Pass {name} with every micro-batch"))
    return torch.cat(given)


def _sum_by_key(keys: Tensor, sums: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Sorted unique keys, the sum and one label of each, and whether a key came with two labels."""
    unique, at = keys.unique(return_inverse=True)
    total = torch.zeros(unique.numel(), dtype=torch.float64, device="cpu").index_add_(0, at, sums)
    label = torch.zeros_like(unique)
    label[at] = labels
    return unique, total, label, bool((label[at] != labels).any())


def _mixed(keys: Tensor) -> Tensor:
    """Keys scrambled, so that regular ids spread evenly over owner ranks."""
    keys = keys * -7046029254386353131
    return (keys ^ (keys >> 32)) & (2**62 - 1)


class _Exchange:
    """Rows to the owner rank of their key, and answers back."""

    def __init__(self, keys: Tensor, group: Group | None) -> None:
        self._group = group
        size = 1 if group is None else group.size()
        owner = _mixed(keys).remainder(size)
        self._order = owner.argsort(stable=True)
        self._sent = owner.bincount(minlength=size)
        self._received = self._all_to_all(self._sent, torch.ones_like(self._sent), torch.ones_like(self._sent))

    def to_owners(self, rows: Tensor) -> Tensor:
        return self._all_to_all(rows[self._order], self._sent, self._received)

    def answers(self, rows: Tensor) -> Tensor:
        back = self._all_to_all(rows, self._received, self._sent)
        unsorted = torch.empty_like(back)
        unsorted[self._order] = back
        return unsorted

    def _all_to_all(self, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        if self._group is None:
            return rows
        device = _device_of(self._group)
        out = torch.empty((int(received.sum()), *rows.shape[1:]), dtype=rows.dtype, device=device)
        dist.all_to_all_single(out, rows.contiguous().to(device), received.tolist(), sent.tolist(), group=self._group)
        return out.cpu()


def _if_several(group: Group | None) -> Group | None:
    return group if group is not None and group.size() > 1 else None


def _device_of(group: Group) -> torch.device:
    """Where the group's backends take tensors: the host if one of them does ("cpu:gloo,cuda:nccl")."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _all_reduce(values: Tensor, group: Group | None, op: dist.ReduceOp.RedOpType) -> None:
    if group is not None:
        moved = values.to(_device_of(group))
        dist.all_reduce(moved, op=op, group=group)
        values.copy_(moved)


def _raise_together(failed: Tensor, failure: Exception | None, dp_group: Group | None, replicas: list[Group]) -> None:
    """If any rank failed, raise on all of them, with every failing rank's reason (costs collectives only then)."""
    if not bool(failed):
        return
    if dp_group is None and not replicas:
        assert failure is not None
        raise failure
    reasons = {} if failure is None else {dist.get_rank(): f"{type(failure).__name__}: {failure}"}
    for group in [dp_group, *replicas]:
        if group is not None:
            gathered: list[dict[int, str]] = [{} for _ in range(group.size())]
            dist.all_gather_object(gathered, reasons, group=group)
            reasons = {rank: reason for part in gathered for rank, reason in part.items()}
    listed = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
    raise BadBatchError(f"The step was not started, no weight was changed. {listed}") from failure
