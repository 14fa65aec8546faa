"""`Plan`: a step, counted before its first micro-batch, and its micro-batches with weights."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.plan.checks import EmptyStep, check_active_tokens, check_ids
from megatron_rl_loss.plan.facts import StepFacts, check_finished
from megatron_rl_loss.plan.measure import Measurement, TokenFunction, keep
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.reduction.metrics import reduce_notes
from megatron_rl_loss.step.collectives import StepGroups, attempt, failure_of
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals, count_step


def make_plan(
    samples: Sequence[Samples] | Exception | None,
    modes: LossModes,
    groups: StepGroups,
    num_microbatches: int | None = None,
    *,
    term_masks: Sequence[str] = (),
    per_token_loss: bool = False,
    empty_step: EmptyStep = "warn",
) -> "Plan":
    """The plan of samples that `check_samples` has passed; an exception in their place is raised on all ranks.

    Raises:
        BadBatchError: on every rank (the error itself where there is one), if any rank failed or they do not agree.
    """
    settings = f"{modes.describe()}, per_token_loss {per_token_loss}, empty_step {empty_step!r}"
    totals = count_step(samples, groups, masks=term_masks, sums=modes.sums, settings=settings)
    assert not isinstance(samples, Exception)  # else it was raised
    check_active_tokens(totals, per_token_loss=per_token_loss, empty_step=empty_step)
    filled = next((one for one in samples or () if len(one)), None)
    if filled is not None:
        check_ids(totals, modes.rehearse(filled))
    count = len(samples or ()) if num_microbatches is None else num_microbatches
    return Plan(samples, StepFacts(modes, totals, count, groups, per_token_loss))


class Plan:
    """A step on this rank: a sequence of its micro-batches, and the facts that they share.

    A plan is trained on once: a second loss of a micro-batch raises ValueError until `restart`.

    Attributes:
        samples: of each micro-batch; None on a pipeline stage that reads no data.
        facts: modes, totals, groups and settings of the step.
    """

    def __init__(self, samples: Sequence[Samples] | None, facts: StepFacts) -> None:
        self.samples, self.facts = samples, facts

    def __len__(self) -> int:
        return self.facts.num_microbatches

    def __getitem__(self, number: int) -> Microbatch:
        return self.microbatches[number]

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self.microbatches)

    @property
    def totals(self) -> StepTotals:
        """Denominators of the whole step."""
        return self.facts.totals

    @cached_property
    def microbatches(self) -> list[Microbatch]:
        """All micro-batches; ValueError on a pipeline stage that reads no data."""
        if self.samples is None:
            raise ValueError(
                "a micro-batch of a plan without samples: a pipeline stage that reads no data computes no loss. Pass "
                "this rank's samples to plan_step."
            )
        return [Microbatch(samples, number, self.facts) for number, samples in enumerate(self.samples)]

    def measure(self, values: TokenFunction | None, *, mask: str | None = None) -> Measurement:
        """Sums, mean and thresholds of one value per token, over the whole step; all ranks call it together.

        Args:
            values: a micro-batch -> a finite float, rounded to float32, for each token of this rank, shaped as losses.
                None on a pipeline stage that computes no loss: the stage receives the results.
            mask: one of the samples' further masks in place of the loss mask.

        One round of 32 bytes over the data-, context-, tensor- and pipeline-parallel groups. Raises BadBatchError on
        every rank (the error itself where there is one) if `values` raises or gives anything else on any, and
        ValueError if it is None on a part of a stage. Under context parallelism an error of `values` is raised on its
        own rank at once, because other ranks may wait in a collective of `values`: the launcher ends these.
        """
        return Measurement(self.facts, self._given(values), values, mask)

    def keep(self, name: str, flags: TokenFunction | None) -> None:
        """Count the step anew by the tokens for which `flags` gives true; all ranks call it together.

        Every micro-batch then has a further mask `name`, for `Term` and `Metric`: the loss mask at tokens that are
        kept, else 0. In evaluation, which no `before_step` precedes, there is none. Costs a byte per token over the
        context-parallel group, in one collective (one per micro-batch where groups change), and the round of
        `plan_step`. `flags` and errors as in `measure`.
        """
        keep(self.facts, self._given(flags), name, flags)

    def _given(self, function: TokenFunction | None) -> list[Microbatch] | None:
        return None if function is None or self.samples is None else self.microbatches

    def restart(self) -> None:
        """Allow training on the same samples again: another epoch, or after an error. Drops all notes."""
        self.facts.restart()

    def finish(self, reports: Sequence[Any] = ()) -> dict[str, Tensor]:
        """The step's values by name, after its last micro-batch; filled into the reports of `Microbatch.loss`.

        Call it on all ranks that computed losses (of the last pipeline stage), before the optimizer's step. Values are
        0-dim float32, the same on every rank. Two collectives over the data- and context-parallel groups, three with
        extremes.

        Raises:
            BadBatchError: on all of these ranks (the error itself where there is one): micro-batches that were not
                trained on, while others were; a mode that was declared for a term, and a loss without that term; a
                micro-batch that leaves out a metric of tokens that it has; local tokens that are not the plan's cut
                (`Microbatch.check_tokens`).
        """
        facts, failure = self.facts, failure_of(attempt(lambda: self._check_end(reports)))
        values = reduce_notes(facts.notes, facts.groups.of_loss, self._has_tokens, failure)
        facts.report_not_finite()
        for report in reports:
            if isinstance(report, dict) and (not report or report.keys() & values.keys()):
                report |= values
        return values

    def _check_end(self, reports: object) -> None:
        if isinstance(reports, Mapping):
            raise TypeError("reports is one report: each micro-batch must have one. Pass a list.")
        check_finished(self.facts.is_carried)
        self.facts.check_tokens()
        self._check_terms()

    def _check_terms(self) -> None:
        """Raise ValueError for a mode without a term, where micro-batches with tokens were trained on."""
        facts = self.facts
        trained = [notes for n, notes in enumerate(facts.notes) if facts.is_carried[n] and self._has_tokens(n, None)]
        names = {name for notes in trained for name in notes}
        # Modes that declare sums may serve metrics alone.
        declared = sorted(name for name, one in facts.modes.terms.items() if not one.mode.sums and name not in names)
        if declared and names:
            raise ValueError(
                f"a mode for the term {declared[0]!r}, and a loss of {sorted(names)}: a mode of terms= or of a flag "
                "such as --kl-loss-aggregation must have its term. Pass the term, with coef=0 to switch it off, or "
                "drop the mode."
            )

    def _has_tokens(self, number: int, mask: str | None) -> bool:
        if self.samples is None:
            return False
        return self[number].tokens_of(mask).num_active > 0

    @property
    def summary(self) -> dict[str, float]:
        """The step in numbers that a logger can take; counts that are not known on this rank are left out."""
        totals = self.totals
        counts: dict[str, float | None] = {"tokens": totals.step_entries, "active_tokens": totals.step_active_tokens}
        for key, units in totals.units.items():
            if key not in ("step", "sample"):
                counts |= {f"{key}s": units.all, f"active_{key}s": units.active}
        return {name: value for name, value in counts.items() if value is not None}

    def describe(self) -> str:
        """The step in a line of the log, where wrong ids, masks or numbers of ranks show that no check can find."""
        facts, counts = self.facts, self.summary
        parts = ["counts not known on this rank"]
        if rollouts := counts.get("rollouts"):
            parts = [f"{rollouts:,.0f} rollouts"]
            for key in facts.totals.units:
                if key not in ("step", "sample", "rollout"):
                    each = rollouts / counts[f"{key}s"] if counts[f"{key}s"] else 0
                    often = f"{1 / each:.1f} per rollout" if 0 < each < 1 else f"{each:.1f} each"
                    parts.append(f"{counts[f'{key}s']:,.0f} {key}s ({often})")
            parts.append(f"{counts['active_tokens']:,.0f} of {counts['tokens']:,.0f} tokens active")
            parts.append(f"{rollouts - counts['active_rollouts']:,.0f} rollouts fully masked")
        split = f"{facts.num_microbatches} micro-batches x DP {facts.dp_size}, CP {facts.cp_size}"
        return " | ".join([facts.modes.policy.describe(), ", ".join(parts), split])
