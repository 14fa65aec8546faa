"""StepTotals: the step-global denominators of one optimizer step, as data; counting.py makes them.

A *step* is everything that goes into one optimizer update: all micro-batches of all data-parallel (DP) ranks. Masks
are replicated over context-, tensor- and pipeline-parallel ranks, so counts are summed over DP alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import EllipsisType
from typing import Literal

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_count, require
from megatron_rl_loss.step.collectives import Group, attempt, stated_dp_group, world_size
from megatron_rl_loss.step.ids import Ids, as_ids
from megatron_rl_loss.step.masks import count_active, total
from megatron_rl_loss.step.samples import Labels, Samples

UnitCounting = Literal["all", "active"]
#: Over what a sum is taken: samples of one id are summed.
By = Literal["step", "rollout", "prompt"] | Callable[[Samples], Ids]


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

    def among(self, name: str, ids: Tensor) -> "TokensById":
        """Those of these ids alone."""
        return TokensById(ids.unique(), self.of(name, ids.unique()))

    def of(self, name: str, ids: Tensor) -> Tensor:
        """Tokens of the unit of each id, float64; ValueError for an id that is not among them."""
        unknown = ~torch.isin(ids, self._ids)
        if bool(unknown.any()):
            raise ValueError(
                f"the {name} of sample {int(unknown.nonzero()[0])} has no token count in the step's totals: every "
                "unit of the micro-batch must be in them. Make the totals from the whole step, with the same ids."
            )
        return self._tokens[torch.searchsorted(self._ids, ids)]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A sum over the step, by key, that a mode of one's own asks for; it travels with the step's counts.

    Attributes:
        of: one number per sample, [num_samples]; of the samples with their loss masks.
        by: over what is summed: the ``step``, each ``rollout``, each ``prompt``; or a function that gives each sample
            an id (int or str): those of one id are summed.
    """

    of: Callable[[Samples], Tensor]
    by: By = "step"

    def values(self, samples: Samples) -> Tensor:
        """Of each sample, float64 on the host."""
        values = self.of(samples)
        if not isinstance(values, Tensor) or values.shape != (len(samples),):
            shown = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"a statistic that returned {shown} for {len(samples)} samples: it must return a tensor with one "
                "number per sample. Return a tensor of shape [num_samples]."
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
            ids: Ids | None = self.by(samples)
        elif self.by == "step":
            ids = [0] * len(samples)
        else:
            ids = samples.rollout_ids if self.by == "rollout" else samples.prompt_ids
        if ids is None:
            raise ValueError(
                f"the statistic {name} by {self.by} of samples without {self.by}_ids: it is summed over those of one "
                f"id. Give Samples {self.by}_ids."
            )
        numbers = as_ids(f"keys of {name}", ids, len(samples)).tolist()
        return as_ids(f"keys of {name}", [f"{name}/{number}" for number in numbers], len(samples))


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
        dp_size: ranks of the data-parallel group that they were summed over; None where they were given by hand.
        dynamic_cp: whether some micro-batches of the step have a context-parallel group of their own.
    """

    step_tokens: float | None = None
    step_active_tokens: int | None = None
    step_entries: int | None = None
    rollouts: UnitCounts = UnitCounts()
    prompts: UnitCounts = UnitCounts()
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
        self._check_units("rollout", samples, samples.rollout_ids, self.rollouts)
        if samples.prompt_ids is not None:
            self._check_units("prompt", samples, samples.prompt_ids, self.prompts)

    @staticmethod
    def _check_units(name: str, samples: Samples, ids: Tensor | None, units: "UnitCounts") -> None:
        """`check_covers` of one kind of units; without ids a sample is one."""
        sums = samples.mask_sums
        if ids is not None:
            unique, unit = ids.unique(return_inverse=True)
            sums = sums.new_zeros(len(unique)).index_add_(0, unit.to(sums.device), sums)
            if isinstance(units.tokens, TokensById):
                whole = units.tokens.of(f"{name}_ids", unique).to(sums.device, non_blocking=True) * _SLACK
                excess = sums - whole
                require(
                    (excess <= 0).all(),
                    lambda: f"a {name} with {float(sums[int(excess.argmax())]):g} mask tokens in these samples",
                    "the totals say it has fewer in the whole step. Make the totals from all samples of the step, on "
                    "all ranks.",
                )
        if units.all is not None:
            _check_fits(f"{name}s.all", sums.numel(), units.all)
        if units.active is not None:
            _check_fits(f"{name}s.active", count_active(sums), units.active)

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
        from megatron_rl_loss.step.counting import reduce_step_totals

        dp_group = stated_dp_group(dp_group, "totals")
        samples = attempt(lambda: [Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids, labels=labels)])
        return reduce_step_totals(samples, dp_group=dp_group, replica_groups=replica_groups, statistics=statistics)


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
