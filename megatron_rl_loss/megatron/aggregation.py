"""`LossAggregation`: what a Megatron launch makes once, and what happens at the beginning of each of its steps."""

import functools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, log_single_rank

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.megatron.flags import AggregationSettings, check_command_line, validate_loss_aggregation_args
from megatron_rl_loss.megatron.forward_pass import ForwardPass
from megatron_rl_loss.megatron.groups import groups_of
from megatron_rl_loss.megatron.handover import ForwardStep, Microbatches, checked
from megatron_rl_loss.megatron.lookahead import DataIterator, LookAhead, SamplesOf, look_ahead
from megatron_rl_loss.megatron.microbatch import Step
from megatron_rl_loss.megatron.patch import Schedule, patched_pretrain
from megatron_rl_loss.megatron.probe import check_contract, check_model
from megatron_rl_loss.megatron.summary import describe_step, summarize
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.weights import missing_counts
from megatron_rl_loss.reduction.metrics import put_in
from megatron_rl_loss.reduction.tap import asking
from megatron_rl_loss.step.collectives import agree_on, attempt
from megatron_rl_loss.step.counting import compare_totals, reduce_step_totals
from megatron_rl_loss.step.totals import StepTotals

logger = logging.getLogger(__name__)

TotalsOf = Callable[[list[Any]], StepTotals]
BeforeStep = Callable[[ForwardPass], None]


class LossAggregation:
    """Aggregates the policy loss of a Megatron launch as its flags ask.

    Before a step's first micro-batch it fetches all of the step's micro-batches from the user's iterators, makes the
    step's totals in one collective round, and hands the micro-batches on as `Microbatch` objects. All ranks do so
    together, before the pipeline schedule starts, so a bad batch on one rank raises `BadBatchError` on every rank.

    Args:
        settings: from `validate_loss_aggregation_args`.
        samples_of: describes a micro-batch of the user's iterator as `Samples`.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
        totals_of: for users who know the step's counts beforehand: a step's micro-batches of this rank (none on a
            pipeline stage that reads no data) -> `StepTotals`. Spares the collectives after the first step, which
            compares them with the exchanged ones, and with them the errors' way to other ranks.
        before_step: called with a `ForwardPass` before each step is trained on, on all ranks: recomputes log-probs.
        terms: modes of terms of the loss by name, for `Term`s that say none; a mode that groups by prompt must be
            declared here, or by flag, to be counted for.
        term_masks: names of the samples' ``term_masks`` that terms use; their counts travel with the others.
    """

    def __init__(
        self,
        settings: AggregationSettings,
        samples_of: SamplesOf,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        totals_of: TotalsOf | None = None,
        before_step: BeforeStep | None = None,
        terms: Mapping[str, str] | None = None,
        term_masks: Sequence[str] = (),
    ) -> None:
        self.settings = settings.with_terms(terms or {})
        self._term_masks = tuple(term_masks)
        self._samples_of = samples_of
        self._pg_collection = pg_collection
        self._totals_of = totals_of
        self._before_step = before_step
        self._last_step: Step | None = None
        self._audits = _interval_audits(settings.audit_interval)
        self._metric_modes: tuple[str, ...] | None = None  # not known before a first step has gone through

    @classmethod
    def from_args(
        cls,
        args: Namespace,
        samples_of: SamplesOf,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        totals_of: TotalsOf | None = None,
        before_step: BeforeStep | None = None,
        terms: Mapping[str, str] | None = None,
        term_masks: Sequence[str] = (),
    ) -> "LossAggregation":
        """Validate Megatron's parsed `args` and build.

        Raises as `validate_loss_aggregation_args`, and ValueError for a misspelt flag on the command line.
        """
        check_command_line(args, sys.argv[1:])
        settings = validate_loss_aggregation_args(args)
        for notice in settings.notices:
            log_single_rank(logger, logging.WARNING, notice)
        return cls(
            settings,
            samples_of,
            pg_collection=pg_collection,
            totals_of=totals_of,
            before_step=before_step,
            terms=terms,
            term_masks=term_masks,
        )

    def attached(self) -> AbstractContextManager[None]:
        """For the duration of a ``with``, Megatron's `pretrain` runs every schedule through `wrap_schedule`.

        See `patch.patched_pretrain`. Loops that are not `pretrain` call `wrap_schedule` instead.
        """
        return patched_pretrain(self.wrap_schedule)

    def wrap_schedule(self, forward_backward_func: Schedule) -> Schedule:
        """A Megatron schedule (`get_forward_backward_func()`) that begins each call with `begin_step`.

        It refuses a loss function that returns anything but what its micro-batch handed out (see `handover`).
        """

        @functools.wraps(forward_backward_func)
        def schedule(
            *,
            forward_step_func: ForwardStep,
            data_iterator: DataIterator,
            model: Any,
            num_microbatches: int,
            **kwargs: Any,
        ) -> Any:
            microbatches = self.begin_step(data_iterator, model=model, num_microbatches=num_microbatches)
            training = not kwargs.get("forward_only")
            if self._before_step is not None and training:
                iterators = microbatches if isinstance(microbatches, list) else [microbatches]
                chunks = [one.all if isinstance(one, Microbatches) else None for one in iterators]
                pass_ = ForwardPass(forward_backward_func, model, chunks, num_microbatches=num_microbatches, **kwargs)
                self._before_step(pass_)
            audits = self._audits if training else None
            audit = nullcontext() if audits is None else audits.step(model, self._pg_collection)
            with asking(self.settings.aggregation), audit:
                reports = forward_backward_func(
                    forward_step_func=checked(forward_step_func),
                    data_iterator=microbatches,
                    model=model,
                    num_microbatches=num_microbatches,
                    **kwargs,
                )
            self._finish_metrics(reports, model)
            return reports if audits is None else audits.reported(reports)

        return schedule

    def _finish_metrics(self, stored: Any, model: Any) -> None:
        """Reduce what no sum of shares is, where losses were computed: on all ranks of the last stage, or on none."""
        assert self._last_step is not None
        if self._last_step.parts.kinds:
            groups = groups_of(model[0] if isinstance(model, list) else model, self._pg_collection)
            put_in(stored, self._last_step.parts.finish(groups.dp_cp))

    def begin_step(
        self, data_iterator: DataIterator, *, model: Any, num_microbatches: int | None = None
    ) -> DataIterator:
        """Fetch a step's micro-batches and make its totals; all ranks must call it together, before the schedule.

        Args:
            data_iterator: the user's iterator, Megatron's rerun iterator, a list of them (virtual pipeline stages), or
                None on a pipeline stage that reads no data.
            model: the model chunk or list of chunks; says the config and, unless given, the groups.
            num_microbatches: of this step on this rank; default: `get_num_microbatches()`, read now.

        Returns:
            Iterators over `Microbatch`, shaped as `data_iterator`.

        Raises:
            BadBatchError: on every rank (the error itself where there is one), if any rank failed: an iterator that
                ended or raised, `samples_of` that raised, samples that disagree, prompt ids that the mode misses, or a
                step without an active token when that is an error. No weight was changed.
        """
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        groups = groups_of(chunks[0], self._pg_collection)
        count = get_num_microbatches() if num_microbatches is None else num_microbatches
        per_token = bool(config.calculate_per_token_loss)
        check_model(self.settings, config, chunks)
        if self._last_step is None:
            check_contract(config, chunks, groups, per_token=per_token, num_microbatches=count)

        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        looked = attempt(
            lambda: look_ahead(iterators, count, self._samples_of, self.settings, groups, self._term_masks)
        )
        totals = self._totals(looked, groups, per_token)
        assert isinstance(looked, LookAhead)  # else _totals has raised
        self._check_totals(totals, per_token)
        step = Step(
            aggregation=self.settings.aggregation,
            totals=totals,
            num_microbatches=count,
            cp_rank=groups.cp.rank(),
            cp_size=groups.cp.size(),
            dp_cp_size=groups.dp_cp.size(),
            per_token=per_token,
            cp_group=groups.cp,
            terms=self.settings.terms,
        )
        if self._last_step is None:
            self._announce(step, groups)
        self._last_step = step
        ready = looked.hand_out(step)
        return ready if isinstance(data_iterator, list) else ready[0]

    @property
    def summary(self) -> dict[str, float]:
        """The last step in numbers, for a logger: rollouts, prompts, tokens, and how many of them are active."""
        return {} if self._last_step is None else summarize(self._last_step.totals)

    def _announce(self, step: Step, groups: ProcessGroupCollection) -> None:
        """The first step, in a line on rank 0 that nobody has to ask for."""
        split = {"num_microbatches": step.num_microbatches, "dp_size": groups.dp.size(), "cp_size": step.cp_size}
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(describe_step(step.aggregation, step.totals, **split), flush=True)
        prompts = step.totals.prompts.all
        if self.settings.mode_name == "prompt_mean" and prompts and prompts == step.totals.rollouts.all:
            log_single_rank(
                logger,
                logging.WARNING,
                (
                    f"prompt_mean on {prompts} prompts of one rollout each: that is the sample mean, as nothing is "
                    "grouped. Look at the prompt ids."
                ),
            )

    def _totals(self, looked: LookAhead | Exception, groups: ProcessGroupCollection, per_token: bool) -> StepTotals:
        """The step's totals, as the user knows them or from one collective round; raises a failed look-ahead."""
        replicas = [groups.cp, groups.tp, groups.pp]
        if self._totals_of is None:
            return reduce_step_totals(
                looked if isinstance(looked, Exception) else looked.samples,
                dp_group=groups.dp,
                replica_groups=replicas,
                count_prompts=self.settings.uses_prompt_ids,
                masks=self._term_masks,
                statistics=self.settings.statistics,
            )
        if isinstance(looked, Exception):
            raise looked
        given = attempt(lambda: self._given_totals(looked, per_token))
        if self._last_step is None:  # once, what was given is compared with what all ranks hold
            return compare_totals(
                given,
                looked.samples,
                dp_group=groups.dp,
                replica_groups=replicas,
                masks=self._term_masks,
                statistics=self.settings.statistics,
            )
        if isinstance(given, Exception):
            raise given
        if self._metric_modes is None:
            self._metric_modes = agree_on(self._last_step.uses, ("sample_mean", "token_mean"), replicas)
        for mode in self._metric_modes:
            metric = resolve(mode, units=self.settings.aggregation.units)
            missing = missing_counts(metric, given, with_rollout_ids=False)
            if missing:
                raise ValueError(
                    f"totals_of returned totals without {', '.join(missing)}: a metric's {mode} needs it. Give these "
                    "counts of the whole step too."
                )
        return given

    def _given_totals(self, looked: LookAhead, per_token: bool) -> StepTotals:
        """What `totals_of` says; refuses totals that miss what the mode, the carrier or an empty step will need."""
        assert self._totals_of is not None
        given = self._totals_of(looked.batches)
        if not isinstance(given, StepTotals):
            raise TypeError(
                f"totals is {given!r}: the denominators are those of the whole step, and never guessed from a "
                "micro-batch. Pass StepTotals.from_loss_masks(...) of all the step's masks."
            )
        described = looked.samples or []
        with_rollout_ids = any(samples.rollout_ids is not None for samples in described)
        missing = missing_counts(self.settings.aggregation, given, with_rollout_ids=with_rollout_ids)
        for aggregation in self.settings.terms.values():
            for name in (None, *self._term_masks):
                missing += missing_counts(aggregation, given.with_mask(name), with_rollout_ids=with_rollout_ids)
        what = self.settings.describe()
        if given.step_active_tokens is None and (per_token or self.settings.empty_step == "error"):
            missing = [*missing, "step_active_tokens"]
            what = "per-token loss" if per_token else "--loss-aggregation-empty-step error"
        if missing and looked.samples is not None:
            raise ValueError(
                f"totals_of returned totals without {', '.join(missing)}: {what} needs it. Give these counts of the "
                "whole step too."
            )
        for samples in described:
            samples.check_masks()
            given.check_covers(samples)
        return given

    def _check_totals(self, totals: StepTotals, per_token: bool) -> None:
        tokens = totals.step_tokens if totals.step_active_tokens is None else totals.step_active_tokens
        if tokens == 0:
            if self.settings.empty_step == "error":
                raise BadBatchError(
                    "a step without one active token: --loss-aggregation-empty-step asks to stop there. Look at the "
                    "masks of the data."
                )
            log_single_rank(
                logger,
                logging.WARNING,
                ("a step without one active token: its policy gradient is zero. Look at the masks of the data."),
            )
        if per_token and tokens is not None and tokens >= 2**31:
            raise BadBatchError(
                f"{tokens} active tokens with per-token loss: Megatron sums token counts as int32. Use smaller steps."
            )


def _interval_audits(interval: int | None) -> Any:
    """The audit stands on this wing: a launch that does not ask for it never imports it."""
    if interval is None:
        return None
    from megatron_rl_loss.audit.megatron.interval import IntervalAudits

    return IntervalAudits(interval)
