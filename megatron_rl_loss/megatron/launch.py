"""`LossAggregation`: aggregates the policy loss of a Megatron launch as its flags ask."""

import functools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_rl_loss.megatron.flags import (
    AggregationSettings,
    check_command_line,
    check_per_token,
    validate_loss_aggregation_args,
)
from megatron_rl_loss.megatron.forward_pass import ForwardPass, StepChunks
from megatron_rl_loss.megatron.groups import groups_of
from megatron_rl_loss.megatron.iterator import DataIterator, MicrobatchIterator
from megatron_rl_loss.megatron.lookahead import SamplesOf, look_ahead
from megatron_rl_loss.megatron.planning import settings_of
from megatron_rl_loss.megatron.probe import check_fresh_gradients
from megatron_rl_loss.megatron.versions import iteration_of
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.plan.checks import check_samples
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.plan.plan import Plan, make_plan
from megatron_rl_loss.plan.returned import check_returned
from megatron_rl_loss.reduction.taps import observe
from megatron_rl_loss.step.collectives import attempt, world_rank
from megatron_rl_loss.step.samples import Samples

logger = logging.getLogger(__name__)

ForwardStep = Callable[..., Any]
Schedule = Callable[..., Any]


class LossAggregation:
    """Aggregates the policy loss of a Megatron launch as its flags ask.

        aggregation = LossAggregation.from_args(get_args(), samples_of)
        with aggregation.attached():
            pretrain(...)

    Before the first micro-batch of a step, `LossAggregation` fetches all micro-batches of the step from the user's
    iterators, counts the step, and hands the micro-batches to the schedule as `Microbatch` objects. Their `data` is the
    user's batch until the loss of the next micro-batch is computed. All ranks do this together, before the pipeline
    schedule starts, so a bad batch on one rank raises `BadBatchError` on every rank. After the schedule,
    `LossAggregation` writes the step's values into the reports.

    Args:
        settings: from `validate_loss_aggregation_args`, or `AggregationSettings.resolve`.
        samples_of: describes a micro-batch of the user's iterator as `Samples`.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
        before_step: called with a `ForwardPass` on all ranks before each training step, to recompute log-probs.
        terms, term_masks: as in `plan_step`; flags can declare terms, too.

    Attributes:
        summary: counts of the last step for a logger: rollouts, prompts, tokens, and the active ones of each.
    """

    def __init__(
        self,
        settings: AggregationSettings,
        samples_of: SamplesOf,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        before_step: Callable[[ForwardPass], None] | None = None,
        terms: Mapping[str, str | Mode | ModeFunction] | None = None,
        term_masks: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self.summary: dict[str, float] = {}
        self._samples_of = samples_of
        self._pg_collection = pg_collection
        self._before_step = before_step
        self._modes = settings.modes.with_terms(terms or {})
        self._term_masks = tuple(term_masks)
        self._num_trained = 0
        self._proof, self._audits = _audits_of(settings, pg_collection)

    @classmethod
    def from_args(cls, args: Namespace, samples_of: SamplesOf, **options: Any) -> "LossAggregation":
        """Build from Megatron's parsed `args`, which are validated; `options` are the keyword arguments of the class.

        Raises as `validate_loss_aggregation_args`, and ValueError for a misspelt flag on the command line.
        """
        check_command_line(args, sys.argv[1:])
        return cls(validate_loss_aggregation_args(args), samples_of, **options)

    def attached(self) -> AbstractContextManager[None]:
        """Wrap every schedule of Megatron's `pretrain` by `wrap_schedule` inside a ``with``.

        Loops other than `pretrain` call `wrap_schedule` instead.
        """
        return patched_pretrain(self.wrap_schedule)

    def wrap_schedule(self, forward_backward_func: Schedule) -> Schedule:
        """Make a Megatron schedule (`get_forward_backward_func()`) count each step first, and report its values.

        All ranks call the schedule together, once for each training or evaluation step.

        Raises:
            BadBatchError: on every rank (on a rank with an error, that error) before a weight changes: an iterator
                ended or raised, `samples_of` raised, samples disagree, an id that the mode needs is missing, or the
                step has no active token where that is an error. After the schedule: a micro-batch left out a metric.
            ValueError, TypeError: on one rank, a loss function that does not return the result of its micro-batch's
                methods; on all ranks, a model config under which the loss would not be exact.
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
            trains = not kwargs.get("forward_only")
            options = {"num_microbatches": num_microbatches, **kwargs}
            plan, chunks = self._begin_step(data_iterator, model, num_microbatches, trains)
            if self._before_step is not None and trains:
                self._before_step(ForwardPass(forward_backward_func, model, chunks, plan, **options))
            iterators = [None if one is None else MicrobatchIterator(one) for one in chunks]
            del chunks  # a micro-batch is freed after its last use
            audits = self._audits if trains else None
            audit = nullcontext() if audits is None else audits.step(model, self._pg_collection)
            proof = self._proof.step(model, trains=trains)
            with observe(aggregation=self.settings.modes.policy), proof, audit:
                reports = forward_backward_func(
                    forward_step_func=_check_forward_step(forward_step_func, trains),
                    data_iterator=iterators if isinstance(data_iterator, list) else iterators[0],
                    model=model,
                    **options,
                )
            if plan.samples is not None and not kwargs.get("collect_non_loss_data"):
                plan.finish(reports)
            return reports if audits is None else audits.reported(reports)

        return schedule

    def _begin_step(
        self, data_iterator: DataIterator, model: Any, num_microbatches: int, trains: bool
    ) -> tuple[Plan, StepChunks]:
        """The step's plan, without samples on ranks that compute no loss, and the micro-batches of each chunk."""
        is_first = not self.summary
        chunks = model if isinstance(model, list) else [model]
        config, groups = get_model_config(chunks[0]), groups_of(chunks[0], self._pg_collection)
        step_groups, per_token_loss = settings_of(model, groups, looks_ahead=True, trains=trains, probes=is_first)
        check_per_token(self.settings, per_token_loss)
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        fetched: list[list[Any] | None] = []

        def describe() -> Sequence[Samples] | None:
            scheduled = bool(getattr(config, "sequence_packing_scheduler", None))
            ahead, samples = look_ahead(iterators, num_microbatches, self._samples_of, groups, scheduled=scheduled)
            fetched.extend(ahead)
            if trains and self._num_trained < 2:  # gradients that are never zeroed are seen in the second step
                check_fresh_gradients(chunks)
            return check_samples(samples, num_microbatches, self._modes, step_groups, self._term_masks)

        plan = make_plan(
            attempt(describe),
            self._modes,
            step_groups,
            num_microbatches,
            term_masks=self._term_masks,
            per_token_loss=per_token_loss,
            empty_step=self.settings.empty_step,
        )
        if is_first and world_rank() == 0:
            print(plan.describe(), flush=True)  # numbers that no check can verify
        self.summary = plan.summary
        self._num_trained += trains
        computes_loss = groups.pp.rank() == groups.pp.size() - 1
        of_chunks: StepChunks = []
        for number, batches in enumerate(fetched, 1):
            is_last = computes_loss and number == len(fetched)  # its micro-batches are those that the plan measures
            own = (
                list(plan) if is_last else [Microbatch(one, i, plan.facts) for i, one in enumerate(plan.samples or ())]
            )
            for microbatch, data in zip(own, batches or (), strict=batches is not None):
                microbatch.data = data
            of_chunks.append(None if batches is None else own)
        return plan if computes_loss else Plan(None, plan.facts), of_chunks


def _audits_of(settings: AggregationSettings, pg_collection: ProcessGroupCollection | None) -> tuple[Any, Any]:
    """The proof of the first step and the audits at intervals. Imported late, since the audit imports this folder."""
    from megatron_rl_loss.audit.megatron.audit import IntervalAudits
    from megatron_rl_loss.audit.megatron.first_step import FirstStep

    interval, words = settings.audit_interval, "the policy loss"
    proof = FirstStep(settings.modes.policy, words, level=settings.proof, pg_collection=pg_collection)
    return proof, None if interval is None else IntervalAudits(interval)


def _check_forward_step(forward_step: ForwardStep, trains: bool) -> ForwardStep:
    """Wrap `forward_step`: its loss function must return the result of its micro-batch's methods."""
    last: list[Microbatch] = []

    @functools.wraps(forward_step)
    def call(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if data_iterator is None:
            return forward_step(data_iterator, *args, **kwargs)  # a stage that reads no data computes no loss
        if not isinstance(data_iterator, MicrobatchIterator):
            raise TypeError(
                f"forward_step got a data_iterator of type {type(data_iterator).__name__}: the schedule must pass on "
                "its own iterator. Wrap the data before the schedule, not inside it."
            )
        position = data_iterator.position
        output, loss_func = forward_step(data_iterator, *args, **kwargs)
        if data_iterator.position != position + 1:
            raise ValueError(
                f"forward_step took {data_iterator.position - position} micro-batches from its iterator: each call "
                "computes the loss of one. Call next(data_iterator) once."
            )
        microbatch = data_iterator.last
        assert microbatch is not None

        @functools.wraps(loss_func)
        def checked_loss_func(*args: Any, **kwargs: Any) -> Any:
            returned = loss_func(*args, **kwargs)
            if not kwargs.get("non_loss_data"):
                check_returned(returned, microbatch.receipt, trains=trains)
                for earlier in last:  # its backward pass is over: the user's batch can be freed
                    earlier.data = None
                last[:] = [microbatch]
            return returned

        return output, checked_loss_func

    return call


@contextmanager
def patched_pretrain(wrap_schedule: Callable[[Schedule], Schedule]) -> Iterator[None]:
    """Make `pretrain` wrap every schedule by `wrap_schedule`, and log values below 0, inside a ``with``.

    Two functions of `megatron.training.training` are replaced. `get_forward_backward_func`: Megatron has no hook that
    all ranks run before a pipeline schedule starts. `training_log`: its progress line omits values below 0 (policy
    losses, log-probs), so they are printed in a line of their own.
    """
    from megatron.training import training

    get_schedule, training_log = training.get_forward_backward_func, training.training_log
    if hasattr(get_schedule, "wrapped_by_megatron_rl_loss"):
        raise RuntimeError(
            "attached() inside attached(): a launch has one LossAggregation. Exit the first `with` block first."
        )

    @functools.wraps(get_schedule)
    def get_wrapped_schedule(*args: Any, **kwargs: Any) -> Schedule:
        return wrap_schedule(get_schedule(*args, **kwargs))

    @functools.wraps(training_log)
    def log_all(loss_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        result = training_log(loss_dict, *args, **kwargs)
        iteration = iteration_of(training_log, loss_dict, *args, **kwargs)
        if iteration % training.get_args().log_interval == 0:
            below = {name: float(value) for name, value in loss_dict.items() if not value >= 0}
            values = "".join(f" {name}: {value:.6E} |" for name, value in below.items())
            if below:
                training.print_rank_last(f" iteration {iteration:8d}, values below 0 |{values}")
        return result

    get_wrapped_schedule.wrapped_by_megatron_rl_loss = True  # type: ignore[attr-defined]
    training.get_forward_backward_func, training.training_log = get_wrapped_schedule, log_all
    try:
        yield
    finally:
        training.get_forward_backward_func, training.training_log = get_schedule, training_log
