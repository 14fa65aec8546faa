"""`LossAggregation`: what a Megatron launch makes once, what happens at the beginning of each step, the step's line."""

import functools
import itertools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, log_single_rank
from torch import Tensor

from megatron_rl_loss.megatron.ending import ending_together
from megatron_rl_loss.megatron.flags import (
    AggregationSettings,
    check_command_line,
    check_per_token,
    validate_loss_aggregation_args,
)
from megatron_rl_loss.megatron.forward_pass import ForwardPass
from megatron_rl_loss.megatron.groups import groups_of
from megatron_rl_loss.megatron.iterator import MicrobatchIterator
from megatron_rl_loss.megatron.lookahead import DataIterator, LookAhead, SamplesOf, look_ahead
from megatron_rl_loss.megatron.planning import find_step_groups
from megatron_rl_loss.megatron.probe import check_contract, check_finalizing, check_fresh_gradients, check_model
from megatron_rl_loss.megatron.report_names import ReportNames
from megatron_rl_loss.megatron.versions import iteration_of
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.weights import missing_counts
from megatron_rl_loss.plan.checks import StepGroups, check_samples, check_totals
from megatron_rl_loss.plan.plan import Plan, make_plan
from megatron_rl_loss.plan.returned import check_returned
from megatron_rl_loss.reduction.tap import observe
from megatron_rl_loss.step.collectives import agree_on, attempt, world_rank
from megatron_rl_loss.step.totals import StepTotals, compare_totals

if TYPE_CHECKING:
    from megatron_rl_loss.audit.megatron.interval import IntervalAudits

logger = logging.getLogger(__name__)

ForwardStep = Callable[..., Any]
Schedule = Callable[..., Any]
TotalsOf = Callable[[list[Any]], StepTotals]
BeforeStep = Callable[[ForwardPass], None]
#: All ranks of a job make theirs in the same order, so that a number names the same one on each.
_LAUNCHES = itertools.count()


class LossAggregation:
    """Aggregates the policy loss of a Megatron launch as its flags ask.

        aggregation = LossAggregation.from_args(get_args(), samples_of)
        with aggregation.attached():
            pretrain(...)

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
        self.settings = settings
        self._modes = settings.modes.with_terms(terms or {})
        self._term_masks = tuple(term_masks)
        self._samples_of = samples_of
        self._pg_collection = pg_collection
        self._totals_of = totals_of
        self._before_step = before_step
        self._last_plan: Plan | None = None
        self._launch_number, self._num_called, self._num_trained = next(_LAUNCHES), 0, 0
        self._names = ReportNames()
        self._audits = _interval_audits(settings.audit_interval)
        self._metric_modes: tuple[str, ...] | None = None  # not known before the first step has run

    @classmethod
    def from_args(cls, args: Namespace, samples_of: SamplesOf, **options: Any) -> "LossAggregation":
        """Validate Megatron's parsed `args` and build; `options` are the keyword arguments of the class.

        Raises as `validate_loss_aggregation_args`, and ValueError for a misspelt flag on the command line.
        """
        check_command_line(args, sys.argv[1:])
        settings = validate_loss_aggregation_args(args)
        for notice in settings.notices:
            log_single_rank(logger, logging.WARNING, notice)
        return cls(settings, samples_of, **options)

    def attached(self) -> AbstractContextManager[None]:
        """For the duration of a ``with``, Megatron's `pretrain` runs every schedule through `wrap_schedule`.

        See `patched_pretrain`. Loops that are not `pretrain` call `wrap_schedule` instead.
        """
        return patched_pretrain(self.wrap_schedule)

    def wrap_schedule(self, forward_backward_func: Schedule) -> Schedule:
        """A Megatron schedule (`get_forward_backward_func()`) that begins each call with `begin_step`.

        It refuses a loss function that returns anything but what its micro-batch handed out (`check_returned`).
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
            self._num_called += 1
            with ending_together(f"megatron_rl_loss/{self._launch_number}/{self._num_called}"):
                training = not kwargs.get("forward_only")
                microbatches = self._begin_step(data_iterator, model, num_microbatches, training=training)
                iterators = microbatches if isinstance(microbatches, list) else [microbatches]
                by_chunk = [it.microbatches if isinstance(it, MicrobatchIterator) else None for it in iterators]
                assert self._last_plan is not None
                if self._before_step is not None and training:
                    options = {"num_microbatches": num_microbatches, **kwargs}
                    pp = groups_of(model[0] if isinstance(model, list) else model, self._pg_collection).pp
                    computes_loss = pp.rank() == pp.size() - 1
                    plan = self._last_plan.with_microbatches(by_chunk[-1] or []) if computes_loss else self._last_plan
                    self._before_step(ForwardPass(forward_backward_func, model, by_chunk, plan, **options))
                audits = self._audits if training else None
                audit = nullcontext() if audits is None else audits.step(model, self._pg_collection)
                with observe(aggregation=self.settings.aggregation), audit:
                    reports = forward_backward_func(
                        forward_step_func=check_forward_step(forward_step_func),
                        data_iterator=microbatches,
                        model=model,
                        num_microbatches=num_microbatches,
                        **kwargs,
                    )
                if not kwargs.get("collect_non_loss_data"):
                    of_loss = next((chunk for chunk in reversed(by_chunk) if chunk), [])
                    self._names.align(reports, of_loss, self._last_plan, training=training)
                self._last_plan.finish_metrics(reports)
                return reports if audits is None else audits.reported(reports)

        return schedule

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
        return self._begin_step(data_iterator, model, num_microbatches)

    def _begin_step(
        self, data_iterator: DataIterator, model: Any, num_microbatches: int | None, *, training: bool | None = None
    ) -> DataIterator:
        """`begin_step`; the wrapped schedule knows whether the step trains or evaluates, a direct call does not."""
        chunks = model if isinstance(model, list) else [model]
        config, groups = get_model_config(chunks[0]), groups_of(chunks[0], self._pg_collection)
        per_token = bool(config.calculate_per_token_loss)
        count = get_num_microbatches() if num_microbatches is None else num_microbatches
        check_model(config, chunks)
        check_per_token(self.settings, per_token)
        if training:
            check_finalizing(config, chunks, groups)
        if self._last_plan is None:
            check_contract(config, chunks, groups, num_microbatches=count)

        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        step_groups = find_step_groups(config, groups)
        if self._totals_of is not None and self._last_plan is not None and self._metric_modes is None:
            # Ranks that computed losses know them from the first step. Here, before one rank alone can fail.
            names = ("sample_mean", "token_mean")
            self._metric_modes = agree_on(self._last_plan.metric_modes, names, step_groups.replicas)

        def describe() -> LookAhead:
            scheduled = bool(getattr(config, "sequence_packing_scheduler", None))
            ahead = look_ahead(iterators, count, self._samples_of, groups, scheduled=scheduled)
            if training and self._num_trained < 2:  # what is never zeroed is seen in the second step
                check_fresh_gradients(chunks)
            check_samples(ahead.samples, count, self._modes, step_groups, self._term_masks)
            return ahead

        data = attempt(describe)
        plan = make_plan(
            data if isinstance(data, Exception) else data.samples,
            self._modes,
            step_groups,
            count,
            None if self._totals_of is None else self._stated_totals(data, step_groups, per_token),
            term_masks=self._term_masks,
            per_token=per_token,
            empty_step=self.settings.empty_step,
        )
        assert isinstance(data, LookAhead)  # else make_plan has raised
        is_first = self._last_plan is None
        plan = replace(plan.without_samples(), reads_device=is_first, aligns_reports=training is not None)
        if is_first and world_rank() == 0:
            print(plan.describe(), flush=True)  # what no check can see, without being asked
        self._last_plan = plan
        self._num_trained += bool(training)
        microbatches = data.iterators(plan)
        return list(microbatches) if isinstance(data_iterator, list) else microbatches[0]

    @property
    def summary(self) -> dict[str, float]:
        """The last step in numbers, for a logger: rollouts, prompts, tokens, and how many of them are active."""
        return {} if self._last_plan is None else self._last_plan.summary

    def _stated_totals(self, data: LookAhead | Exception, step_groups: StepGroups, per_token: bool) -> StepTotals:
        """What `totals_of` says of the step, once compared in the first; raises a failed look-ahead."""
        totals = data if isinstance(data, Exception) else attempt(lambda: self._call_totals_of(data, per_token))
        if self._last_plan is None:  # those of the first step are compared with what all ranks hold
            return compare_totals(
                totals,
                None if isinstance(data, Exception) else data.samples,
                dp_group=step_groups.dp_group,
                replica_groups=step_groups.replicas,
                masks=self._term_masks,
                statistics=self._modes.statistics,
            )
        if isinstance(totals, Exception):
            raise totals
        for mode in self._metric_modes or ():
            metric = resolve(mode, units=self.settings.aggregation.units)
            if missing := missing_counts(metric, totals, with_rollout_ids=False):
                raise ValueError(
                    f"totals_of returned totals without {', '.join(missing)}: a metric's {mode} needs it. Give these "
                    "counts of the whole step too."
                )
        return totals

    def _call_totals_of(self, data: LookAhead, per_token: bool) -> StepTotals:
        assert self._totals_of is not None
        totals, empty_step = self._totals_of(data.batches), self.settings.empty_step
        return check_totals(
            totals, data.samples, self._modes, self._term_masks, per_token=per_token, empty_step=empty_step
        )


def _interval_audits(interval: int | None) -> "IntervalAudits | None":
    """Imported only where a launch asks for it: the audit imports this folder."""
    if interval is None:
        return None
    from megatron_rl_loss.audit.megatron.interval import IntervalAudits

    return IntervalAudits(interval)


def check_forward_step(forward_step: ForwardStep) -> ForwardStep:
    """`forward_step` with a loss function that must return what its micro-batch handed out."""

    @functools.wraps(forward_step)
    def call(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if data_iterator is None:
            return forward_step(data_iterator, *args, **kwargs)  # a stage that reads no data computes no loss
        if not isinstance(data_iterator, MicrobatchIterator):
            raise TypeError(
                f"forward_step was handed a {type(data_iterator).__name__}: the schedule must hand on the iterator of "
                "begin_step. Wrap the data before the schedule, not inside it."
            )
        position = data_iterator.position
        output, loss_func = forward_step(data_iterator, *args, **kwargs)
        if data_iterator.position != position + 1:
            raise ValueError(
                f"forward_step took {data_iterator.position - position} micro-batches from its iterator: each call "
                "computes the loss of one. Call next(data_iterator) once."
            )
        microbatch = data_iterator.microbatches[position]

        @functools.wraps(loss_func)
        def checked_loss_func(*args: Any, **kwargs: Any) -> Any:
            returned = loss_func(*args, **kwargs)
            if not kwargs.get("non_loss_data"):
                check_returned(returned, microbatch.receipt)
            return returned

        return output, checked_loss_func

    return call


# --- `pretrain`


@contextmanager
def patched_pretrain(wrap_schedule: Callable[[Schedule], Schedule]) -> Iterator[None]:
    """For the duration of a ``with``, `pretrain` runs every schedule through `wrap_schedule` and logs all values.

    Two functions of `megatron.training.training` are replaced: `get_forward_backward_func`, since no hook is passed by
    all ranks before a pipeline schedule starts, and `training_log`, which leaves values below 0 (policy losses,
    log-probs) out of its progress line.
    """
    from megatron.training import training

    get_schedule, training_log = training.get_forward_backward_func, training.training_log
    if hasattr(get_schedule, "wrapped_by_megatron_rl_loss"):
        raise RuntimeError(
            "attached() inside attached(): a launch has one LossAggregation. Leave the first `with` before."
        )

    @functools.wraps(get_schedule)
    def get_wrapped_schedule(*args: Any, **kwargs: Any) -> Schedule:
        return wrap_schedule(get_schedule(*args, **kwargs))

    @functools.wraps(training_log)
    def log_all(loss_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        result = training_log(loss_dict, *args, **kwargs)
        iteration = iteration_of(training_log, loss_dict, *args, **kwargs)
        if iteration % training.get_args().log_interval == 0:
            values = " | ".join(f"{name}: {float(value):.6E}" for name, value in loss_dict.items())
            training.print_rank_last(f"   of iteration {iteration:8d} alone | {values} |")
        return result

    get_wrapped_schedule.wrapped_by_megatron_rl_loss = True  # type: ignore[attr-defined]
    training.get_forward_backward_func, training.training_log = get_wrapped_schedule, log_all
    try:
        yield
    finally:
        training.get_forward_backward_func, training.training_log = get_schedule, training_log
