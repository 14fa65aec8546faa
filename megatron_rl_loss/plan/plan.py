"""`plan_step`: the totals of a step, made before its first micro-batch, and what its micro-batches share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import EllipsisType
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_choice
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.plan.carriers import Carrier, Count, product
from megatron_rl_loss.plan.checks import (
    EmptyStep,
    StepGroups,
    check_samples,
    check_tokens,
    check_totals,
    look_at_prompts,
)
from megatron_rl_loss.plan.measure import Measurement, SampleFunction, TokenFunction, keep, sum_by
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.reduction.metrics import Parts, put_in
from megatron_rl_loss.step.collectives import Group, attempt, size_of, stated_dp_group
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import By, StepTotals, UnitCounting, reduce_step_totals


def plan_step(
    samples: Sequence[Samples] | Callable[[], Sequence[Samples]] | None,
    mode: str | ModeFunction,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    terms: Mapping[str, str | None] | None = None,
    term_masks: Sequence[str] = (),
    totals: StepTotals | None = None,
    dp_group: Group | EllipsisType | None = ...,
    cp_group: Group | None = None,
    replica_groups: Sequence[Group] = (),
    per_token_loss: bool = False,
    num_microbatches: int | None = None,
    empty_step: EmptyStep = "warn",
) -> "Plan":
    """Count a step over all ranks, in one round of collectives; all ranks call it together, before any is trained on.

    >>> plan = plan_step([Samples([torch.ones(2)]), Samples([torch.ones(3)])], "token_mean", dp_group=None)
    >>> plan[0].weights, plan[1](torch.ones(3))
    (tensor([0.2000, 0.2000]), tensor(0.6000))

    Args:
        samples: one `Samples` for each micro-batch of this rank, in order; empty ones for filler micro-batches. Or a
            function that makes them: then an error of a mask or of your loader raises on every rank too. None on a
            pipeline stage that reads no data.
        mode, divisor, units: as in `make_pg_loss_reducer`; the same on every rank, which is checked.
        terms: modes of terms of the loss by name, for `Term`s that say none. A term that needs other counts than the
            policy loss must be declared here.
        term_masks: names of the samples' ``term_masks`` that terms use; their counts travel with the others.
        totals: the step's denominators, where you know them: spares the collectives, and with them the errors' way to
            other ranks.
        dp_group: the data-parallel group *without* context parallelism, or with it where `Samples` have a `cp_group`
            of their own; None where this rank holds the whole step, which must be said where `torch.distributed` has
            several ranks.
        cp_group: the context-parallel group; None where tokens are not cut.
        replica_groups: further groups whose ranks hold the same samples (tensor, pipeline parallel).
        per_token_loss: whether Megatron's `calculate_per_token_loss` is on.
        num_microbatches: what the schedule is called with; by default the number of `samples`. It may differ between DP
            ranks where the schedule allows that.
        empty_step: of a step without one active token: ``warn`` and go on with zero gradients, or ``error``.

    Raises:
        BadBatchError: on every rank (the error itself where there is one), if any rank's samples are unusable, do not
            agree with those of its replicas or miss the ids that a mode needs.
        ValueError, TypeError: settings that are unusable; no word of a `dp_group` among several ranks; `totals` that
            miss a count or are smaller than the samples.
    """
    modes = LossModes.resolve(mode, divisor=divisor, units=units, terms=terms)
    check_choice("empty step handling", empty_step, get_args(EmptyStep))
    dp_group = stated_dp_group(dp_group, "a plan")
    groups = StepGroups(dp_group=dp_group, cp_group=cp_group, replica_groups=replica_groups)

    def describe() -> Sequence[Samples] | None:
        made = samples() if callable(samples) else samples
        return check_samples(made, num_microbatches, modes, groups, term_masks)

    described = attempt(describe)
    if totals is not None:
        if isinstance(described, Exception):
            raise described
        check_totals(totals, described, modes, term_masks, per_token=per_token_loss, empty_step=empty_step)
        totals.check_apart(size_of(cp_group))
    return make_plan(
        described,
        modes,
        groups,
        num_microbatches,
        totals,
        term_masks=term_masks,
        per_token=per_token_loss,
        empty_step=empty_step,
    )


def make_plan(
    samples: Sequence[Samples] | Exception | None,
    modes: LossModes,
    groups: StepGroups,
    num_microbatches: int | None,
    totals: StepTotals | None = None,
    *,
    term_masks: Sequence[str] = (),
    per_token: bool = False,
    empty_step: EmptyStep = "warn",
) -> "Plan":
    """`plan_step` of parts that are checked already; an exception in the place of samples is raised on all ranks."""
    if totals is None:
        totals = reduce_step_totals(
            samples,
            dp_group=groups.dp_group,
            replica_groups=groups.replicas,
            count_prompts=modes.uses_prompt_ids,
            masks=term_masks,
            statistics=modes.statistics,
            settings=modes.describe(),
        )
    assert not isinstance(samples, Exception)  # else it was raised
    check_tokens(totals, per_token=per_token, empty_step=empty_step)
    if modes.needs_prompt_ids:
        look_at_prompts(totals)
    return Plan(
        samples=samples,
        modes=modes,
        totals=totals,
        num_microbatches=len(samples or ()) if num_microbatches is None else num_microbatches,
        per_token_loss=per_token,
        **groups.of_plan,
        dynamic_cp=totals.dynamic_cp or any(one.cp_group is not None for one in samples or ()),
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A step on this rank: a sequence of its micro-batches, and what they share.

    Attributes:
        samples: of each micro-batch; None on a pipeline stage that reads no data.
        modes: of the policy loss and of further terms.
        totals: denominators of the whole step.
        num_microbatches: of this step on this rank.
        cp_rank, cp_size, dp_size: this rank's place in its context-parallel group, and the sizes of the groups.
        per_token_loss: whether Megatron's `calculate_per_token_loss` is on.
        cp_group, dp_group, replica_groups: for what is reduced after the plan was made: whole sequences, metrics, and
            what `measure` and `keep` find.
        dynamic_cp: whether context-parallel groups change between micro-batches.
        reads_device: whether NaN losses at active tokens are looked for on a device too, which the host waits for.
        aligns_reports: whether the names of reports are compared at the step's end, not in each report.
    """

    samples: Sequence[Samples] | None
    modes: LossModes
    totals: StepTotals
    num_microbatches: int
    microbatch_class: ClassVar[type[Microbatch]] = Microbatch
    cp_rank: int = 0
    cp_size: int = 1
    dp_size: int = 1
    per_token_loss: bool = False
    cp_group: Group | None = None
    dp_group: Group | None = None
    replica_groups: Sequence[Group] = ()
    dynamic_cp: bool = False
    reads_device: bool = False
    parts: Parts = field(default_factory=Parts)
    report_names: list[str] = field(default_factory=list)
    report_masks: dict[str, str] = field(default_factory=dict)
    aligns_reports: bool = False
    metric_modes: set[str] = field(default_factory=set)
    _constants: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_microbatches

    def __getitem__(self, number: int) -> Microbatch:
        return self._microbatches[number]

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self._microbatches)

    @cached_property
    def _microbatches(self) -> list[Microbatch]:
        if self.samples is None:
            raise ValueError(
                "a micro-batch of a plan without samples: a pipeline stage that reads no data computes no loss. Pass "
                "this rank's samples to plan_step."
            )
        shared = self.without_samples()
        return [self.microbatch_class(samples, shared) for samples in self.samples]

    def without_samples(self) -> "Plan":
        """What the micro-batches share: it holds none of them, so that they are freed with the last use of the plan."""
        return replace(self, samples=None)

    def with_microbatches(self, microbatches: list[Microbatch]) -> "Plan":
        """The plan of these micro-batches, where others than its own are trained on."""
        plan = replace(self, samples=[one.samples for one in microbatches])
        plan.__dict__["_microbatches"] = microbatches
        return plan

    def measure(self, values: TokenFunction | None, *, mask: str | None = None) -> Measurement:
        """Sums, mean and thresholds of one value per token, over the whole step; all ranks call it together.

        Args:
            values: a micro-batch -> a finite float, rounded to float32, for each token of this rank, shaped as losses.
                None on a pipeline stage that computes no loss: it is told the results.
            mask: one of the samples' further masks in place of the loss mask.

        One round of 32 bytes over the data-, context-, tensor- and pipeline-parallel groups. Raises BadBatchError on
        every rank (the error itself where there is one) if `values` raises or gives anything else on any, and
        ValueError if it is None on a part of a stage.
        """
        return Measurement(self, values, mask)

    def keep(self, name: str, flags: TokenFunction | None) -> None:
        """Count the step anew by the tokens for which `flags` gives true; all ranks call it together.

        Every micro-batch then has a further mask `name`, for `Term` and `Metric`: the loss mask at tokens that are
        kept, else 0. In evaluation, which no `before_step` precedes, there is none. Costs a byte per token over the
        context-parallel group, in one collective (one per micro-batch where groups change), and 16 bytes and the round
        of `plan_step` over all. `flags` and errors as in `measure`.
        """
        keep(self, name, flags)

    def sum_by(self, by: By, values: SampleFunction | None) -> list[Tensor]:
        """At each sample of each micro-batch the sum over its unit in the step; all ranks call it together.

            sums = plan.sum_by("prompt", lambda one: segment_sum(one.log_probs["now"], one))  # [i]: of plan[i]

        Args:
            by: ``prompt``, ``rollout``, ``step``, or a function that gives the `Samples` of a micro-batch ids.
            values: a micro-batch -> a finite number for each of its samples, not differentiated, the same on all CP
                ranks. None as in `measure`; such a stage gets an empty list.

        One round of collectives, as of `plan_step` with ids. Errors as in `measure`.
        """
        return sum_by(self, by, values)

    def factor(self, carrier: Carrier) -> float:
        """What a share is multiplied by as it is returned by that row of the table."""
        counts: dict[Count, float | None] = {
            "num_microbatches": self.num_microbatches,
            "dp_size": 1 if self.dynamic_cp else self.dp_size,  # as verl says there
            "cp_size": self.cp_size,
            "step_active_tokens": self.totals.step_active_tokens,
            "rollouts": self.totals.rollouts.all,
        }
        return product(carrier.returned, counts)

    def constants_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A token count of 1, and what a reported share is divided by: they add up to 1 over the step. Made once."""
        if device not in self._constants:
            one = torch.ones((), dtype=torch.int32, device=device)
            shares = self.num_microbatches * self.dp_size * self.cp_size
            self._constants[device] = one, torch.tensor(1 / shares, dtype=torch.float32, device=device)
        return self._constants[device]

    def finish_metrics(self, reports: Sequence[dict[str, Any]]) -> None:
        """Put the metrics that no sum of shares is (extremes, variances) into the reports of `Microbatch.report`.

        Call it after the step's last micro-batch, on all ranks that computed losses (of the last pipeline stage).
        """
        if self.parts.kinds:
            put_in(reports, self.parts.finish([self.dp_group, self.cp_group]))
            self.parts.clear()  # another pass over the same plan begins anew

    @property
    def summary(self) -> dict[str, float]:
        """The step in numbers that a logger can take; counts that are not known on this rank are left out."""
        counts: dict[str, float | None] = {
            "rollouts": self.totals.rollouts.all,
            "active_rollouts": self.totals.rollouts.active,
            "prompts": self.totals.prompts.all,
            "tokens": self.totals.step_entries,
            "active_tokens": self.totals.step_active_tokens,
        }
        return {name: value for name, value in counts.items() if value is not None}

    def describe(self) -> str:
        """The step in a line of the log that shows what no check can: wrong ids, masks or numbers of ranks."""
        counts = self.summary
        parts = []
        if "rollouts" in counts:
            parts.append(f"{counts['rollouts']:,.0f} rollouts")
        if counts.get("prompts"):
            parts.append(f"{counts['prompts']:,.0f} prompts ({counts['rollouts'] / counts['prompts']:.1f} each)")
        if {"tokens", "active_tokens"} <= counts.keys():
            parts.append(f"{counts['active_tokens']:,.0f} of {counts['tokens']:,.0f} tokens active")
        if {"rollouts", "active_rollouts"} <= counts.keys():
            parts.append(f"{counts['rollouts'] - counts['active_rollouts']:,.0f} rollouts fully masked")
        split = f"{self.num_microbatches} micro-batches x DP {self.dp_size}, CP {self.cp_size}"
        return " | ".join([self.modes.policy.describe(), ", ".join(parts) or "counts not known on this rank", split])
