"""StepTotals: the step-global denominators of one optimizer step, from one collective round.

A *step* is everything that goes into one optimizer update: all micro-batches of all data-parallel (DP) ranks. Masks
are replicated over context-, tensor- and pipeline-parallel ranks, so counts are summed over DP alone.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import BadBatchError, check_count, require
from megatron_rl_loss.step.counting import (
    Exchange,
    Group,
    all_reduce,
    check_apart,
    if_several,
    raise_together,
    rank_in,
    size_of,
    world_size,
)
from megatron_rl_loss.step.ids import Ids, as_ids
from megatron_rl_loss.step.masks import HostMasks
from megatron_rl_loss.step.samples import Samples

UnitCounting = Literal["all", "active"]


class Unsaid(Enum):
    """A group that was not spoken of: not the same as none."""

    UNSAID = "unsaid"


UNSAID = Unsaid.UNSAID


class TokensById:
    """Mask tokens of units (rollouts or prompt groups) by id: at least those of the samples this rank holds."""

    def __init__(self, ids: Tensor, tokens: Tensor) -> None:
        order = ids.argsort()
        self._ids, self._tokens = ids[order], tokens.double()[order]

    @classmethod
    def from_mapping(cls, tokens: Mapping[int | str, float]) -> "TokensById":
        for unit, count in tokens.items():
            check_count(f"the token count of id {unit!r}", count)
        counts = torch.tensor(list(tokens.values()), dtype=torch.float64, device="cpu")
        return cls(as_ids("the ids of token counts", list(tokens), len(tokens)), counts)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<tokens of {len(self)} ids, {float(self.total):g} in all>"

    @property
    def total(self) -> float:
        """Mask tokens of all these units."""
        return float(self._tokens.sum())

    def of(self, name: str, ids: Tensor) -> Tensor:
        """Tokens of the unit of each id, float64; ValueError for an id that is not among them."""
        at = torch.searchsorted(self._ids, ids)
        found = self._ids[at.clamp(max=max(self._ids.numel() - 1, 0))] == ids if self._ids.numel() else ids != ids
        if not bool(found.all()):
            raise ValueError(
                f"the {name} of sample {int((~found).nonzero()[0])} has no token count in the step's totals: every "
                "unit of the micro-batch must be in them. Make the totals from the whole step, with the same ids."
            )
        return self._tokens[at]


Keys = Literal["step", "rollout", "prompt"]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A sum over the step, by key, that a mode of one's own asks for; it travels with the step's counts.

    Attributes:
        of: a number a sample, [num_samples]; of the samples with their loss masks.
        by: over what is summed: the ``step``, each ``rollout``, each ``prompt``; or a function that gives each sample
            an id (int or str): those of one id are summed.
    """

    of: Callable[[Samples], Tensor]
    by: Keys | Callable[[Samples], Ids] = "step"

    def values(self, samples: Samples) -> Tensor:
        """Of each sample, float64 on the host."""
        values = self.of(samples)
        if not isinstance(values, Tensor) or values.shape != (len(samples),):
            shown = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"a statistic that returned {shown} for {len(samples)} samples: it must return a tensor with one "
                "number a sample. Return a tensor of shape [num_samples]."
            )
        values = values.detach().double().cpu()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(
                f"a statistic that is NaN or infinite for sample {int((~torch.isfinite(values)).nonzero()[0])}: it "
                "must be finite, for fully masked samples too. Return 0 where there is nothing to add."
            )
        return values

    @property
    def of_rollouts(self) -> bool:
        """Whether it is a sum over rollouts, which are samples where these have no rollout ids."""
        return self.by == "rollout"

    def keys(self, name: str, samples: Samples) -> Tensor:
        """The key of each sample, the same on every rank, int64."""
        if callable(self.by):
            ids: Any = self.by(samples)
        elif self.by == "step":
            ids = [0] * len(samples)
        else:
            ids = samples.rollout_ids if self.by == "rollout" else samples.prompt_ids
            if ids is None:
                raise ValueError(
                    f"the statistic {name} by {self.by} of samples without {self.by}_ids: it is summed over those of "
                    f"one id. Give Samples {self.by}_ids."
                )
        given = as_ids(f"keys of {name}", ids, len(samples)).tolist()
        return as_ids(f"keys of {name}", [f"{name}/{key}" for key in given], len(samples))


@dataclass(frozen=True, kw_only=True)
class UnitCounts:
    """The step's units of one kind, rollouts or prompt groups. Give what the mode needs, leave the rest None.

    Attributes:
        all: how many there are, fully masked ones included.
        active: how many have a token of nonzero weight.
        tokens: mask tokens of each unit that this rank holds a part of, by id (a mapping is accepted). Needed by
            ``prompt_mean``, and by ``sample_mean`` for rollouts that are split over samples.
    """

    all: int | None = None
    active: int | None = None
    tokens: TokensById | Mapping[int | str, float] | None = None

    def __post_init__(self) -> None:
        for name in ("all", "active"):
            if (count := getattr(self, name)) is not None:
                check_count(f"UnitCounts.{name}", count)
        if None not in (self.all, self.active) and self.active > self.all:  # type: ignore[operator]
            raise ValueError(
                f"{self.active} active units of {self.all}: active ones are among all of them. Count the whole step "
                "for both."
            )
        if isinstance(self.tokens, Mapping):
            object.__setattr__(self, "tokens", TokensById.from_mapping(self.tokens))
        elif self.tokens is not None and not isinstance(self.tokens, TokensById):
            raise TypeError(f"UnitCounts.tokens is {self.tokens!r}: it must map ids to token counts. Pass a dict.")

    def counted(self, units: UnitCounting) -> int | None:
        """How many units count."""
        return self.all if units == "all" else self.active


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
    """

    step_tokens: float | None = None
    step_active_tokens: int | None = None
    step_entries: int | None = None
    rollouts: UnitCounts = UnitCounts()
    prompts: UnitCounts = UnitCounts()
    by_mask: Mapping[str, "StepTotals"] = field(default_factory=dict, hash=False)
    statistics: Mapping[str, TokensById] = field(default_factory=dict, hash=False)

    def with_mask(self, name: str | None) -> "StepTotals":
        """These totals by one of the further masks, or for None as they are; ValueError for an unknown one."""
        if name is not None and name not in self.by_mask:
            raise ValueError(
                f"totals of the masks: {', '.join(self.by_mask) or 'none'}; a term by the mask {name!r}: its tokens "
                "and units must be counted over the step too. Declare it: LossAggregation(..., term_masks=[its name]), "
                "or reduce_step_totals(..., masks=[its name])."
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
            _check_fits("step_tokens", samples.masks.total(samples.sums), self.step_tokens)
        self._check_units("rollout", samples, samples.rollout_ids, self.rollouts)
        if samples.prompt_ids is not None:
            self._check_units("prompt", samples, samples.prompt_ids, self.prompts)

    @staticmethod
    def _check_units(name: str, samples: Samples, ids: Tensor | None, units: "UnitCounts") -> None:
        """`check_covers` of one kind of units; without ids a sample is one."""
        sums = samples.sums
        if ids is not None:
            unique, unit = ids.unique(return_inverse=True)
            sums = samples.masks.grouped(sums, unit, len(unique))
            if isinstance(units.tokens, TokensById):
                whole = samples.masks.from_host(units.tokens.of(f"{name}_ids", unique)) * _SLACK
                excess = sums - whole
                require((excess <= 0).all(), partial(_unit_in_excess, name, sums, excess), _FEWER_THAN_HERE)
        if units.all is not None:
            _check_fits(f"{name}s.all", len(sums), units.all)
        if units.active is not None:
            _check_fits(f"{name}s.active", samples.masks.num_filled(sums), units.active)

    @classmethod
    def from_loss_masks(
        cls,
        loss_masks: Sequence[Tensor],
        *,
        rollout_ids: Ids | None = None,
        prompt_ids: Ids | None = None,
        dp_group: Group | Unsaid | None = UNSAID,
        replica_groups: Sequence[Group] = (),
        labels: Mapping[str, Sequence[Any] | Tensor] | None = None,
        statistics: Mapping[str, Statistic] | None = None,
    ) -> "StepTotals":
        """Totals of a step from the full (not CP-sliced) masks of all samples this DP rank holds in it.

        Args:
            loss_masks: one 1-D tensor a sample, over all micro-batches of the step; none if the rank has no sample.
            rollout_ids, prompt_ids: as in `Samples`. Units may straddle micro-batches and DP ranks.
            dp_group: the data-parallel group *without* context parallelism. None where this rank alone holds the whole
                step; that must be said where `torch.distributed` has several ranks.
            replica_groups: groups whose ranks hold the same samples (context, tensor, pipeline parallel). Totals are
                not summed over them; errors travel over them and their ranks are checked to agree.
            labels: as in `Samples`.
            statistics: sums that a mode of one's own needs (`OwnMode.statistics`), the same on every rank.

        Raises:
            TypeError, ValueError: as `Samples`.
            ValueError: no word of a dp_group among several ranks; a dp_group that overlaps a replica group.
            BadBatchError: with groups, on every rank, naming the rank that failed and why.
        """
        if dp_group is UNSAID and world_size() > 1:
            raise ValueError(
                f"totals of {world_size()} ranks without a dp_group: counts must be summed over the ranks that hold "
                "other samples. Pass dp_group=..., or dp_group=None if this rank alone has the whole step."
            )
        dp_group = None if isinstance(dp_group, Unsaid) else dp_group
        held = attempt(lambda: [Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids, labels=labels)])
        return reduce_step_totals(held, dp_group=dp_group, replica_groups=replica_groups, statistics=statistics)


#: Sums of fractional masks may differ in the last bit.
_SLACK = 1 + 1e-9


def _check_fits(name: str, here: Any, whole: float) -> None:
    """Refuse a count of the whole step that is below what is in hand."""
    fits = here <= whole * _SLACK
    if fits is not True:
        require(
            fits,
            lambda: f"samples whose {name} alone are {float(here):g}",
            f"the totals say {whole:g}. Make the totals from all samples of the step, on all ranks.",
        )


_FEWER_THAN_HERE = (
    "the totals say it has fewer in the whole step. Make the totals from all samples of the step, on all ranks."
)


def _unit_in_excess(unit: str, sums: Any, excess: Any) -> str:
    return f"a {unit} with {float(sums[int(excess.argmax())]):g} mask tokens in these samples"


Held = TypeVar("Held")


def attempt(prepare: Callable[[], Held]) -> Held | Exception:
    """What `prepare` returns, or raises: a failure that is to travel to the other ranks first."""
    try:
        return prepare()
    except Exception as error:
        return error


def compare_totals(
    given: StepTotals | Exception,
    held: Sequence[Samples] | None,
    *,
    dp_group: Group | None,
    replica_groups: Sequence[Group],
    masks: Sequence[str] = (),
    statistics: Mapping[str, Statistic] | None = None,
) -> StepTotals:
    """The exchanged totals of the step, once the given ones were found to agree with them, on every rank.

    Raises:
        BadBatchError: counts that differ, on all ranks, naming the one that saw it and both numbers.
    """
    exchanged = reduce_step_totals(
        given if isinstance(given, Exception) else held,
        dp_group=dp_group,
        replica_groups=replica_groups,
        masks=masks,
        statistics=statistics,
    )
    assert not isinstance(given, Exception)  # the exchange has raised it
    failure = attempt(lambda: _check_same(given, exchanged))
    groups = [group for group in (dp_group, *replica_groups) if if_several(group) is not None and group is not None]
    failed = torch.tensor(float(isinstance(failure, Exception)), dtype=torch.float64, device="cpu")
    for group in groups:
        all_reduce(failed, group, dist.ReduceOp.MAX)
    raise_together(bool(failed > 0), failure, groups)
    return exchanged


def _check_same(given: StepTotals, exchanged: StepTotals) -> None:
    """Refuse a count that was given and is another one."""
    for name, of_mask in given.by_mask.items():
        _check_same(of_mask, exchanged.with_mask(name))
    counts = {
        "step_tokens": (given.step_tokens, exchanged.step_tokens),
        "step_active_tokens": (given.step_active_tokens, exchanged.step_active_tokens),
        "rollouts.all": (given.rollouts.all, exchanged.rollouts.all),
        "rollouts.active": (given.rollouts.active, exchanged.rollouts.active),
        "prompts.all": (given.prompts.all, exchanged.prompts.all),
        "prompts.active": (given.prompts.active, exchanged.prompts.active),
    }
    for name, (mine, found) in counts.items():
        if mine is not None and found is not None and abs(mine - found) > 1e-6 * found:
            raise ValueError(
                f"{name} of {mine:g} from totals_of: the masks of all ranks have {found:g} in this step. Count the "
                "whole step, over all its micro-batches and DP ranks."
            )


# The slots of the vector that is summed over DP ranks.
_ERRORS, _RANKS_WITH_DATA, _RANKS_WITH_SAMPLES, _RANKS_WITH_ROLLOUT_IDS, _RANKS_WITH_PROMPT_IDS = range(5)
_SAMPLES, _DIGEST, _DIGEST_REST, _HEADER_SIZE = range(5, 9)
#: Behind them, for the loss masks and for each further mask.
_ACTIVE_SAMPLES, _TOKENS, _ACTIVE_TOKENS, _ENTRIES, _SLOTS_OF_MASK = range(5)


def reduce_step_totals(
    held: Sequence[Samples] | Exception | None,
    *,
    dp_group: Group | None = None,
    replica_groups: Sequence[Group] = (),
    count_prompts: bool = True,
    masks: Sequence[str] = (),
    statistics: Mapping[str, Statistic] | None = None,
) -> StepTotals:
    """The totals of a step from what this rank holds in it: one collective round.

    In a round: one sum over `dp_group`, one maximum over each replica group and, where units are named by ids, three
    all-to-alls and a sum over `dp_group` (each id meets on one owner rank; a rank sends and receives what it holds,
    whatever the number of ranks).

    Args:
        held: a `Samples` a micro-batch, all with ids of a kind or none; None if this rank reads no data (a pipeline
            stage that needs none), which then must hold for its whole `dp_group`; or the exception that kept the rank
            from it, which becomes a `BadBatchError` on all ranks of the groups.
        count_prompts: False leaves prompt ids and their exchange aside, for modes that do not use them.
        masks: names of the further masks that are counted too, in the same collectives; the same on every rank.
        statistics: further sums by key, by name; the same names on every rank.

    Returns:
        The totals; on a stage without data, not those of units by id.
    """
    dp_group = if_several(dp_group)
    replicas = [group for group in replica_groups if if_several(group) is not None]
    groups = [group for group in (dp_group, *replicas) if group is not None]
    check_apart(dp_group, replicas)
    asked = (count_prompts, masks, statistics or {})
    counted = held if isinstance(held, Exception) else attempt(lambda: _LocalCounts(held or [], *asked))
    failure = counted if isinstance(counted, Exception) else None
    local = _LocalCounts([], *asked) if isinstance(counted, Exception) else counted

    header = local.header()
    if replicas and failure is None:
        header[[_DIGEST, _DIGEST_REST]] = _digest_of(held or [], rank_in(dp_group))  # type: ignore[arg-type]
    header[_ERRORS] = failure is not None
    header[_RANKS_WITH_DATA] = held is not None
    all_reduce(header, dp_group)
    has_data = bool(header[_RANKS_WITH_DATA] > 0)
    if has_data and header[_RANKS_WITH_DATA] < size_of(dp_group):
        header[_ERRORS] = 1
        if held is None:
            failure = ValueError(
                "this rank was given no data iterator, other DP ranks of its pipeline stage were: all must read data. "
                "Give every rank one (is_distributed = True)."
            )
    units: _UnitSums | None = None
    ranks_with_ids = header[[_RANKS_WITH_ROLLOUT_IDS, _RANKS_WITH_PROMPT_IDS]]
    # Ids on some ranks only are refused below; exchanged, they would look like clashes.
    all_or_none = bool(((ranks_with_ids == 0) | (ranks_with_ids == header[_RANKS_WITH_SAMPLES])).all())
    if (ranks_with_ids.any() or (statistics and has_data)) and all_or_none and not header[_ERRORS] > 0:
        units = local.sum_units(dp_group)
        header[_ERRORS] = float(units.any_clash)
        if units.clash:
            failure = ValueError(
                "one rollout id is used under two prompt ids: rollout ids must be unique in the step, not only within "
                "a prompt. Join prompt and rollout index into one id."
            )

    # One maximum over replicas carries the errors and, as +x and -x, whether the replicas' sums differ.
    highest = torch.cat([header, -header])
    if not has_data:
        highest[_ERRORS + 1 :] = -torch.inf
    for group in replicas:
        all_reduce(highest, group, dist.ReduceOp.MAX)
    raise_together(bool(highest[_ERRORS] > 0), failure, groups)
    header, lowest = highest.view(2, -1)
    _check_agreement(header, -lowest)
    loss_masks, *further = (_totals(header, units, k) for k in range(1 + len(masks)))
    sums = units.statistics if units else {}
    return replace(loss_masks, by_mask=dict(zip(masks, further, strict=True)), statistics=sums)


def _totals(header: Tensor, units: "_UnitSums | None", mask: int) -> StepTotals:
    """The counts of the loss masks (0) or of a further mask."""
    active_samples, tokens, active_tokens, entries = header[_HEADER_SIZE:].view(-1, _SLOTS_OF_MASK)[mask].tolist()
    rollouts, prompts = UnitCounts(all=int(header[_SAMPLES]), active=int(active_samples)), UnitCounts()
    if header[_RANKS_WITH_ROLLOUT_IDS] > 0:
        rollouts = units.rollouts[mask] if units else UnitCounts()
    if header[_RANKS_WITH_PROMPT_IDS] > 0 and units:
        prompts = units.prompts[mask]
    return StepTotals(
        step_tokens=tokens,
        step_active_tokens=int(active_tokens),
        step_entries=int(entries),
        rollouts=rollouts,
        prompts=prompts,
    )


def _check_agreement(highest: Tensor, lowest: Tensor) -> None:
    """Refuse what the reduced header shows, alike on every rank."""
    if not highest[_RANKS_WITH_DATA] > 0:
        raise BadBatchError(
            "no rank reads data for this step: there must be micro-batches. Give every rank its iterator "
            "(is_distributed = True)."
        )
    # Sums over different DP groups may differ in the last bit for fractional masks, never by more.
    digests = [_DIGEST, _DIGEST_REST]
    if not torch.equal(highest[digests], lowest[digests]) or not torch.allclose(highest, lowest, rtol=1e-9, atol=0):
        raise BadBatchError(
            "ranks of one context, tensor or pipeline parallel group were given different samples for this step: they "
            "must read the same data. Shard and seed the loader by DP rank only."
        )
    for kind, slot in (("rollout_ids", _RANKS_WITH_ROLLOUT_IDS), ("prompt_ids", _RANKS_WITH_PROMPT_IDS)):
        if 0 < highest[slot] < highest[_RANKS_WITH_SAMPLES]:
            raise BadBatchError(
                f"{kind} on {int(highest[slot])} of the {int(highest[_RANKS_WITH_SAMPLES])} DP ranks that hold "
                f"samples: they must be given on all or none. Pass {kind} everywhere."
            )


@dataclass(frozen=True)
class _UnitSums:
    """What the exchange of ids gave, for the loss masks and each further mask.

    `clash`: an id under two prompts was seen here, `any_clash`: on any DP rank.
    """

    rollouts: list[UnitCounts]
    prompts: list[UnitCounts]
    statistics: dict[str, TokensById]
    clash: bool
    any_clash: bool


def _digest_of(held: Sequence[Samples], dp_rank: int) -> Tensor:
    """Of what this rank holds, its order and its cut into micro-batches, in two numbers that add up exactly."""
    digest = hashlib.blake2b(str(dp_rank).encode(), digest_size=8)
    for samples in held:
        digest.update(samples.digest())
    halves = divmod(int.from_bytes(digest.digest(), "little"), 2**32)
    return torch.tensor(halves, dtype=torch.float64, device="cpu")


class _LocalCounts:
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
        # Rows: the loss masks and each further mask; columns: samples.
        self.mask_sums, active_tokens = _read_back([samples for row in by_mask for samples in row], len(by_mask))
        self.active_tokens = active_tokens.sum(1)
        self.entries = [sum(sum(samples.mask_lengths) for samples in row) for row in by_mask]
        self.num_samples = self.mask_sums.shape[1]
        self.rollout_ids = _join_ids("rollout_ids", [samples.rollout_ids for samples in filled])
        self.prompts_of_rollouts = _join_ids("prompt_ids", [samples.prompt_ids for samples in filled])
        self.prompt_ids = self.prompts_of_rollouts if count_prompts else None
        self.statistics = {
            name: _keyed(name, statistic, filled)
            for name, statistic in statistics.items()
            if not (statistic.of_rollouts and self.rollout_ids is None)
        }

    def header(self) -> Tensor:
        header = torch.zeros(_HEADER_SIZE, dtype=torch.float64, device="cpu")
        header[_RANKS_WITH_SAMPLES] = self.num_samples > 0
        header[_RANKS_WITH_ROLLOUT_IDS] = self.rollout_ids is not None
        header[_RANKS_WITH_PROMPT_IDS] = self.prompt_ids is not None
        header[_SAMPLES] = self.num_samples
        of_masks = torch.zeros(len(self.mask_sums), _SLOTS_OF_MASK, dtype=torch.float64, device="cpu")
        of_masks[:, _ACTIVE_SAMPLES] = (self.mask_sums > 0).sum(1)
        of_masks[:, _TOKENS] = self.mask_sums.sum(1)
        of_masks[:, _ACTIVE_TOKENS] = self.active_tokens
        of_masks[:, _ENTRIES] = torch.tensor(self.entries, device="cpu")
        return torch.cat([header, of_masks.flatten()])

    def sum_units(self, dp_group: Group | None) -> _UnitSums:
        """Mask sums of the rank's rollouts and prompt groups, and their numbers, over the DP group; and statistics.

        All go together, told apart by the last bits of their key. Every key has an owner rank, which adds up what it is
        sent and answers. A statistic's row has its value where others have the sum of the loss mask.
        """
        no_ids = torch.zeros(0, dtype=torch.int64, device="cpu")
        kinds = [no_ids if ids is None else ids for ids in (self.rollout_ids, self.prompt_ids)]
        kinds.append(torch.cat([no_ids, *(keys for keys, _ in self.statistics.values())]))
        keys = torch.cat([ids * 4 + kind for kind, ids in enumerate(kinds)])
        of_samples = self.mask_sums.T
        values = torch.cat([of_samples.new_zeros(0), *(values for _, values in self.statistics.values())])
        of_keys = torch.nn.functional.pad(values[:, None], (0, of_samples.shape[1] - 1))
        sums = torch.cat([*(of_samples if ids.numel() else of_samples[:0] for ids in kinds[:2]), of_keys])
        # A rollout's row also says its prompt, so that the owner sees an id that is used under two prompts.
        prompts = no_ids
        if self.rollout_ids is not None and self.prompts_of_rollouts is not None:
            prompts = self.prompts_of_rollouts
        prompt_of_key = torch.cat([prompts, keys[prompts.numel() :]])
        my_keys, my_sums, my_prompts, clash = _sum_by_key(keys, sums, prompt_of_key)
        exchange = Exchange(my_keys, dp_group)
        rows = torch.cat([my_keys[:, None], my_sums.view(torch.int64), my_prompts[:, None]], 1)
        sent_keys, sent_sums, sent_prompts = exchange.to_owners(rows).split([1, my_sums.shape[1], 1], 1)
        sent_keys = sent_keys.flatten().contiguous()
        owned_keys, owned_sums, _, owner_clash = _sum_by_key(
            sent_keys, sent_sums.contiguous().view(torch.float64), sent_prompts.flatten()
        )
        totals = exchange.answers(owned_sums[torch.searchsorted(owned_keys, sent_keys)])

        owned_kind, is_active = owned_keys.remainder(4), owned_sums > 0
        of_kinds = (owned_kind == 0, owned_kind == 1)
        clashes = torch.tensor([clash or owner_clash], dtype=torch.int64, device="cpu")
        alls = torch.stack([of_kind.sum() for of_kind in of_kinds])
        actives = torch.stack([is_active[of_kind].sum(0) for of_kind in of_kinds])
        numbers = torch.cat([clashes, alls, actives.flatten()])
        all_reduce(numbers, dp_group)
        actives = numbers[3:].view_as(actives)
        my_kind, my_ids = my_keys.remainder(4), my_keys.div(4, rounding_mode="floor")
        counts_of_rollouts, counts_of_prompts = (
            [
                UnitCounts(
                    all=int(numbers[1 + kind]),
                    active=int(actives[kind, mask]),
                    tokens=TokensById(my_ids[my_kind == kind], totals[my_kind == kind, mask]),
                )
                for mask in range(len(self.mask_sums))
            ]
            for kind in range(2)
        )
        keyed = TokensById(my_ids[my_kind == 2], totals[my_kind == 2, 0])
        found = {}
        for name, (of_name, _) in self.statistics.items():
            unique = of_name.unique()
            found[name] = TokensById(unique, keyed.of(name, unique))
        return _UnitSums(
            counts_of_rollouts, counts_of_prompts, found, clash=clash or owner_clash, any_clash=bool(numbers[0] > 0)
        )


def _read_back(described: Sequence[Samples], num_masks: int) -> tuple[Tensor, Tensor]:
    """Mask sums and active tokens on the host, float64 [num_masks, num_samples]; refuses masks that are not sound.

    `described`: the micro-batches with their loss masks, then those with each further mask.
    """
    if all(isinstance(samples.masks, HostMasks) for samples in described):  # their masks were looked at
        tables = [torch.stack([samples.mask_sums, samples.active_tokens]) for samples in described]
        sums, active = torch.cat([torch.zeros(2, 0, dtype=torch.float64, device="cpu"), *tables], 1)
        return sums.view(num_masks, -1), active.view(num_masks, -1)
    tables = [
        torch.stack([s.mask_sums, s.active_tokens, torch.as_tensor(s.sound).double().expand(len(s))]) for s in described
    ]
    sums, active, sound = torch.cat(tables, 1).cpu()
    if not sound.all():
        for samples in described:
            samples.check_masks(wait=True)
    return sums.view(num_masks, -1), active.view(num_masks, -1)


def _keyed(name: str, statistic: Statistic, microbatches: Sequence[Samples]) -> tuple[Tensor, Tensor]:
    """The keys and values of all samples."""
    keys = [statistic.keys(name, samples) for samples in microbatches]
    values = [statistic.values(samples) for samples in microbatches]
    no_keys = torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.cat([no_keys, *keys]), torch.cat([no_keys.double(), *values])


def _join_ids(name: str, ids: list[Tensor | None]) -> Tensor | None:
    given: list[Any] = [i for i in ids if i is not None]
    if 0 < len(given) < len(ids):
        raise ValueError(
            f"{name} on {len(given)} of {len(ids)} micro-batches: they must be given on all or none. Pass {name} with "
            "every micro-batch."
        )
    return torch.cat(given) if given else None


def _sum_by_key(keys: Tensor, sums: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Sorted unique keys, the sums and one label of each, and whether a key came with two labels."""
    unique, at = keys.unique(return_inverse=True)
    total = torch.zeros(unique.numel(), sums.shape[1], dtype=torch.float64, device="cpu").index_add_(0, at, sums)
    label = torch.zeros_like(unique)
    label[at] = labels
    return unique, total, label, bool((label[at] != labels).any())
