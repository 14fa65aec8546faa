"""`Plan`: a step, counted before its first micro-batch, and its micro-batches with weights."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

import megatron_rl_loss
from megatron_rl_loss.core.aggregation import LossModes, weigh
from megatron_rl_loss.core.collectives import (
    LATE_CHECKS,
    StepGroups,
    attempt,
    failure_of,
    is_first_rank,
    size_of,
    warn_on_one_rank,
)
from megatron_rl_loss.core.counting import StepTotals, Sum, count_step
from megatron_rl_loss.core.errors import BadBatchError, check_int, only_if
from megatron_rl_loss.core.metrics import reduce_notes
from megatron_rl_loss.core.microbatch import Microbatch
from megatron_rl_loss.core.notebook import SHOWN_ROWS, first_numbers, html_table
from megatron_rl_loss.core.record import StepRecord, Trainer, check_finished
from megatron_rl_loss.core.samples import Samples, read_masks
from megatron_rl_loss.core.segments import segments_by

logger = logging.getLogger(__name__)

EmptyStep = Literal["warn", "error"]


def check_samples(
    samples: Sequence[Samples] | None,
    num_microbatches: int | None,
    groups: StepGroups,
) -> Sequence[Samples] | None:
    """The samples of a rank's micro-batches, validated for the layouts and the schedule."""
    if num_microbatches is not None:
        check_int("num_microbatches", num_microbatches, 1, "Pass what the schedule is called with")
    if samples is None:
        if num_microbatches is None:
            raise ValueError(
                "neither samples nor num_microbatches: a pipeline stage that reads no data must give the number of "
                "micro-batches. Pass num_microbatches."
            )
        return None
    if not isinstance(samples, Sequence):  # one Samples is none
        raise TypeError(
            f"samples is a {type(samples).__name__}: it must be a list with one Samples for each micro-batch. Pass "
            "[Samples(...), ...]."
        )
    if num_microbatches not in (None, len(samples)) or not samples:
        raise ValueError(
            f"{len(samples)} Samples for {num_microbatches or 'one or more'} micro-batches: each micro-batch must have "
            "one Samples. Pass Samples([]) for filler micro-batches, and for a rank without data."
        )
    for number, microbatch in enumerate(samples):
        if not isinstance(microbatch, Samples):
            raise TypeError(
                f"the samples of micro-batch {number} are a {type(microbatch).__name__}: they must be "
                "megatron_rl_loss.Samples. Wrap the masks in Samples."
            )
        if len(microbatch) and (first := next(k for k, other in enumerate(samples) if other is microbatch)) < number:
            raise ValueError(
                f"micro-batches {first} and {number} are one Samples object: its samples would count twice. Make a "
                "Samples of each micro-batch's own masks; Samples([]) for fillers."
            )
        if microbatch.cp_group is not None and size_of(groups.cp_group) > 1:
            raise ValueError(
                f"the samples of micro-batch {number} with a cp_group of their own, in a plan with a cp_group of "
                f"{size_of(groups.cp_group)} ranks: each of these ranks would count the samples. Pass the group over "
                "DP x CP as dp_group, and no cp_group to the plan."
            )
        microbatch.local(*microbatch.place_in(groups.cp_group))  # raises if the layout cannot be cut so
    read_masks(samples)
    return samples


def check_ids(totals: StepTotals, asked: Set[str], filled: Sequence[Samples]) -> None:
    """Warn where ids that a mode uses collide, and where every prompt group has one rollout."""
    rollouts, samples = (totals.units[key].number["all"] for key in ("rollout", "sample"))
    for key in sorted(asked & {"rollout", "session"}) if len(filled) > 1 else ():
        microbatch_ids = [set(microbatch.ids.get(key, np.arange(0)).tolist()) for microbatch in filled]
        if microbatch_ids[0] and all(ids == microbatch_ids[0] for ids in microbatch_ids):
            warn_on_one_rank(
                f"all {len(filled)} micro-batches have the same {key} ids, so the step has {len(microbatch_ids[0])} "
                f"{key}s on this rank: ids that start again in each micro-batch collide. Make {key} ids unique in the "
                "whole step."
            )
    for key in sorted(asked & {"rollout", "session", "turn"}) if totals.dp_size > 1 else ():
        part_ids = [microbatch.parts[key].ids for microbatch in filled if key in microbatch.parts]
        ids, here = np.unique(np.concatenate([np.zeros(0, np.int64), *part_ids]), return_counts=True)
        if len(ids) > 1 and (totals.units[key].at("all", ids, f"{key} id") > here).all():
            warn_on_one_rank(
                f"each of the {len(ids)} {key}s of this rank has samples on other ranks too: {key} ids that start "
                f"again on each rank collide. Make {key} ids unique in the whole step."
            )
    if rollouts == 1 < samples and "rollout" in asked:
        warn_on_one_rank(
            f"all {samples} samples of the step have one rollout id, so the step has 1 rollout: rollout ids say which "
            "samples are parts of one rollout. Give each rollout its own id, or leave rollout_ids out."
        )
    for key in sorted(asked - {"step", "sample", "rollout"}) if rollouts > 1 else ():
        units = totals.units[key]
        if units.counts["all"].max(initial=0) == samples:  # ids per token may name no unit at all
            warn_on_one_rank(
                f"one {key} has tokens of all {samples} samples of the step: {key} ids that start again in each "
                f"sample, micro-batch or rank collide. Make {key} ids unique in the whole step."
            )
        elif key == "prompt" and units.number["all"] == rollouts:
            warn_on_one_rank(
                "every prompt group of the step has one rollout: a mean over prompts is then a mean over rollouts. "
                "Check the prompt ids: all responses to a prompt must share its id."
            )
    prompts = totals.units["prompt"].number["all"] if "prompt" in totals.units else None
    if prompts == rollouts < samples and "rollout" in asked:
        warn_on_one_rank(
            f"each of the {rollouts} rollouts of the step is a whole prompt group, of {samples} samples in all: a mean "
            "over rollouts is then a mean over prompts. Check the rollout ids: responses to a prompt are rollouts of "
            "their own."
        )


def check_active_tokens(
    totals: StepTotals, *, per_token_loss: bool, empty_step: EmptyStep, speaks: bool = True
) -> None:
    """Warn of a step without an active token, or raise; raise for more tokens than Megatron can count."""
    tokens = totals.step_active_tokens
    if tokens == 0:
        if empty_step == "error":
            raise BadBatchError(
                "a step without one active token: empty_step='error', or --loss-aggregation-empty-step, aborts it. "
                "Check the loss masks."
            )
        if speaks:
            logger.warning("a step without one active token: its policy gradient is zero. Check the loss masks.")
    if per_token_loss and tokens >= 2**31:
        raise BadBatchError(
            f"{tokens} active tokens with per-token loss: Megatron sums token counts as int32. Use smaller steps."
        )


def make_plan(
    describe: Callable[[], Sequence[Samples] | None],
    modes: LossModes | Exception,
    trainer: Trainer,
    num_microbatches: int | None = None,
    *,
    term_masks: Sequence[str] = (),
    empty_step: EmptyStep = "warn",
    further_settings: str = "",
) -> "Plan":
    """Count a step over the ranks of its trainer, which call this together.

    Args:
        describe: makes this rank's samples, as `plan_step` takes them; its error is raised on all ranks.
        modes: or the error of this rank in their place, which is raised on all ranks.
        further_settings: words for settings that ranks must have alike.

    Raises:
        BadBatchError: on every rank (the error itself where there is one), if any rank failed or they do not agree.
    """

    def checked() -> tuple[Sequence[Samples] | None, set[str]]:
        if isinstance(modes, Exception):
            raise modes
        for check in LATE_CHECKS:
            check()
        samples, asked = check_samples(describe(), num_microbatches, trainer.groups), set[str]()
        for microbatch in samples or ():
            asked |= modes.rehearse(microbatch, term_masks)
        return samples, asked

    def counted() -> tuple[list[Sum], str]:
        return ([], "") if isinstance(modes, Exception) else (modes.sums, f"{modes.describe()}, {trainer.form}")

    outcome, settled = attempt(checked), attempt(counted)
    samples, asked = (outcome, set[str]()) if isinstance(outcome, Exception) else outcome
    sums, settings = ([], "") if isinstance(settled, Exception) else settled
    settings += f", per_token_loss {trainer.per_token_loss}, empty_step {empty_step!r}{further_settings}"
    samples = settled if isinstance(settled, Exception) else samples
    totals = count_step(samples, trainer.groups, masks=term_masks, sums=sums, settings=settings)
    assert isinstance(modes, LossModes)  # else the error was raised, and so with the samples
    assert not isinstance(samples, Exception)
    speaks = is_first_rank(trainer.groups.all)
    check_active_tokens(totals, per_token_loss=trainer.per_token_loss, empty_step=empty_step, speaks=speaks)
    if speaks and (filled := [microbatch for microbatch in samples or () if len(microbatch)]):
        check_ids(totals, asked, filled)
    count = len(samples or ()) if num_microbatches is None else num_microbatches
    return Plan(samples, StepRecord(modes, totals, count, trainer))


def check_plan(plan: object) -> None:
    """Raise TypeError unless this is a plan."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is a {type(plan).__name__}: it must be the plan of this step, which says what its tokens weigh. "
            "Pass what plan_step returns; reducers that were made by hand have no plan, and get no proof."
        )


class Plan:
    """A step on this rank: a sequence of its micro-batches, and what they share.

    A plan is trained on once: a second loss of a micro-batch raises ValueError until `reset`.

    Attributes:
        samples: of each micro-batch; None on a pipeline stage that reads no data.
        record: settings, totals and groups of the step, and what became of its micro-batches.
    """

    def __init__(self, samples: Sequence[Samples] | None, record: StepRecord) -> None:
        self.samples, self.record = samples, record
        record.use.samples = samples or ()

    def __len__(self) -> int:
        return self.record.num_microbatches

    def __getitem__(self, number: int) -> Microbatch:
        return self.microbatches[number]

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(self.microbatches)

    @property
    def totals(self) -> StepTotals:
        """Denominators of the whole step."""
        return self.record.totals

    @cached_property
    def microbatches(self) -> list[Microbatch]:
        """All micro-batches; ValueError on a pipeline stage that reads no data."""
        if self.samples is None:
            raise ValueError(
                "a micro-batch of a plan without samples: a pipeline stage that reads no data computes no loss. Pass "
                "this rank's samples to plan_step."
            )
        return [Microbatch(samples, number, self.record) for number, samples in enumerate(self.samples)]

    def reset(self) -> None:
        """Allow training on the same samples again: another epoch, or after an error. Drops all notes."""
        self.record.reset()

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
        record, failure = self.record, failure_of(attempt(lambda: self._check_end(reports)))
        values = reduce_notes(record.notes, record.groups.loss_groups, self._has_tokens, failure, set(record.use.forms))
        record.report_not_finite()
        for report in reports:
            if isinstance(report, dict) and (not report or report.keys() & values.keys()):
                report |= values
        return values

    def _check_end(self, reports: object) -> None:
        if isinstance(reports, Mapping):
            raise TypeError("reports is one report: each micro-batch must have one. Pass a list.")
        if not isinstance(reports, Sequence):
            raise TypeError(
                f"reports is a {type(reports).__name__}: it must be a list of what loss() returned last in its tuples. "
                "Pass [report, ...], or nothing."
            )
        if any(isinstance(report, tuple) for report in reports):
            raise TypeError(
                "reports of tuples: they must be the dicts, each the last item of a tuple that loss() returned. Pass "
                "[report, ...]."
            )
        check_finished(self.record.is_carried)
        if not any(self.record.notes) and any(self._has_tokens(number, None) for number in range(len(self))):
            raise ValueError(
                f"finish() of a plan of {len(self)} micro-batches, none of which made a loss: there is nothing to "
                "report. Call microbatch.loss(...) of each micro-batch before, or the micro-batch itself."
            )
        self.record.check_tokens()
        self._check_terms()

    def _check_terms(self) -> None:
        """Raise ValueError for a mode without a term, where micro-batches with tokens were trained on."""
        record = self.record
        trained = [notes for n, notes in enumerate(record.notes) if record.is_carried[n] and self._has_tokens(n, None)]
        names = {name for notes in trained for name in notes}
        # Modes that declare sums may serve metrics alone.
        terms = record.modes.terms.items()
        declared = sorted(name for name, aggregation in terms if not aggregation.mode.sums and name not in names)
        if declared and names:
            raise ValueError(
                f"a mode for the term {declared[0]!r}, and a loss of {sorted(names)}: a term that has a mode in "
                "terms= or in a flag such as --kl-loss-aggregation must be in the loss. Pass the term, with coef=0 to "
                "switch it off, or drop the mode."
            )

    def _has_tokens(self, number: int, mask: str | None) -> bool:
        if self.samples is None:
            return False
        return self.microbatches[number].tokens_of(mask).num_active > 0

    @property
    def summary(self) -> dict[str, float]:
        """The step in numbers that a logger can take; on a rank without data, those of tokens alone."""
        totals = self.totals
        counts: dict[str, float] = {"tokens": totals.step_entries, "active_tokens": totals.step_active_tokens}
        for key, units in totals.units.items():
            if key not in ("step", "sample"):
                counts |= {f"{key}s": units.number["all"], f"active_{key}s": units.number["active"]}
        return counts

    def plot(self, path: str | Path, *, title: str = "") -> None:
        """Draw the weight that the mode gives each token of this rank into a file; as `Audit.plot`."""
        megatron_rl_loss.plot_plan(self, path, title)

    def __repr__(self) -> str:
        return f"Plan({self.describe()})"

    def _repr_html_(self) -> str:
        """A notebook's table: of each micro-batch of this rank its samples, units, tokens and first weights."""
        keys, rows = [key for key in self.totals.units if key not in ("step", "sample")], list[list[object]]()
        head = ["micro-batch", "samples", *(f"{key}s" for key in keys), "tokens", "active", "first weights"]
        for microbatch in self.microbatches[:SHOWN_ROWS] if self.samples is not None else ():
            samples, local = microbatch.samples, microbatch.tokens_of(None)
            units = [segments_by(key, samples, "a plan").num_units for key in keys]
            weights = weigh(self.record.modes.policy, local, self.totals).tolist()
            active = first_numbers(weight for weight in weights if weight)
            rows.append([len(rows), len(samples), *units, f"{len(local):,}", f"{local.num_active:,}", active])
        return html_table(self.describe(), head, rows, len(self.samples or ()))

    def describe(self) -> str:
        """The step in a line of the log, where wrong ids, masks or numbers of ranks show that no check can find."""
        record, counts = self.record, self.summary
        parts = ["counts not known on this rank"]
        if (rollouts := counts.get("rollouts")) is not None:
            parts = [f"{rollouts:,.0f} rollouts"]
            for key in record.totals.units:
                if key not in ("step", "sample", "rollout"):
                    each = rollouts / counts[f"{key}s"] if counts[f"{key}s"] else 0
                    often = f"{1 / each:.1f} per rollout" if 0 < each < 1 else f"{each:.1f} each"
                    parts.append(f"{counts[f'{key}s']:,.0f} {key}s ({often})")
            parts.append(f"{counts['active_tokens']:,.0f} of {counts['tokens']:,.0f} tokens active")
            masked = rollouts - counts["active_rollouts"]
            parts.append(f"{masked:,.0f} rollouts fully masked" + only_if(masked > 0, ", left out of metric means"))
            if record.modes.policy.units == "counted":
                numbers = {f"{key}s": units.number["counted"] for key, units in record.totals.units.items()}
                counted = [f"{number:,.0f} {name}" for name, number in numbers.items() if name in counts]
                parts.append(f"{' and '.join(counted)} counted")
        split = f"{record.num_microbatches} micro-batches x DP {record.dp_size}, CP {record.cp_size}"
        return " | ".join([record.modes.policy.describe(), ", ".join(parts), split])
