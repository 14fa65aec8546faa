"""`LossAggregation`: what a Megatron launch makes once, what happens at the beginning of each step, the step's line."""

import functools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, log_single_rank
from torch import Tensor

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.megatron.carriers import Carrier, carrier_for, check_returned
from megatron_rl_loss.megatron.flags import AggregationSettings, check_command_line, validate_loss_aggregation_args
from megatron_rl_loss.megatron.forward_pass import ForwardPass
from megatron_rl_loss.megatron.groups import groups_of
from megatron_rl_loss.megatron.lookahead import DataIterator, LookAhead, SamplesOf, look_ahead
from megatron_rl_loss.megatron.microbatch import MicrobatchIterator, Step
from megatron_rl_loss.megatron.probe import check_contract, check_model
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.weights import missing_counts
from megatron_rl_loss.reduction.metrics import put_in
from megatron_rl_loss.reduction.tap import observe
from megatron_rl_loss.step.collectives import agree_on, attempt
from megatron_rl_loss.step.counting import compare_totals, reduce_step_totals
from megatron_rl_loss.step.totals import StepTotals

if TYPE_CHECKING:
    from megatron_rl_loss.audit.megatron.interval import IntervalAudits

logger = logging.getLogger(__name__)

ForwardStep = Callable[..., Any]
Schedule = Callable[..., Any]
TotalsOf = Callable[[list[Any]], StepTotals]
BeforeStep = Callable[[ForwardPass], None]


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
        self.settings = settings.with_terms(terms or {})
        self._term_masks = tuple(term_masks)
        self._samples_of = samples_of
        self._pg_collection = pg_collection
        self._totals_of = totals_of
        self._before_step = before_step
        self._last_step: Step | None = None
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
            microbatches = self.begin_step(data_iterator, model=model, num_microbatches=num_microbatches)
            training = not kwargs.get("forward_only")
            if self._before_step is not None and training:
                iterators = microbatches if isinstance(microbatches, list) else [microbatches]
                chunks = [it.microbatches if isinstance(it, MicrobatchIterator) else None for it in iterators]
                options = {"num_microbatches": num_microbatches, **kwargs}
                self._before_step(ForwardPass(forward_backward_func, model, chunks, **options))
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
        config, groups = get_model_config(chunks[0]), groups_of(chunks[0], self._pg_collection)
        carrier = carrier_for(config.calculate_per_token_loss)
        count = get_num_microbatches() if num_microbatches is None else num_microbatches
        check_model(self.settings, config, chunks)
        if self._last_step is None:
            check_contract(carrier, config, chunks, groups, num_microbatches=count)

        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        data = attempt(lambda: look_ahead(iterators, count, self._samples_of, self.settings, groups, self._term_masks))
        totals = self._totals(data, groups, carrier)
        assert isinstance(data, LookAhead)  # else _totals has raised
        self._check_tokens(totals, carrier)
        step = Step(
            aggregation=self.settings.aggregation,
            totals=totals,
            num_microbatches=count,
            cp_rank=groups.cp.rank(),
            cp_size=groups.cp.size(),
            dp_cp_size=groups.dp_cp.size(),
            carrier=carrier,
            cp_group=groups.cp,
            terms=self.settings.terms,
        )
        if self._last_step is None:
            self._announce(step, groups)
        self._last_step = step
        microbatches = data.iterators(step)
        return list(microbatches) if isinstance(data_iterator, list) else microbatches[0]

    @property
    def summary(self) -> dict[str, float]:
        """The last step in numbers, for a logger: rollouts, prompts, tokens, and how many of them are active."""
        return {} if self._last_step is None else summarize(self._last_step.totals)

    def _announce(self, step: Step, groups: ProcessGroupCollection) -> None:
        """The first step, in a line on rank 0 that nobody has to ask for."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(describe_step(step, dp_size=groups.dp.size()), flush=True)
        prompts = step.totals.prompts.all
        if self.settings.mode_name == "prompt_mean" and prompts and prompts == step.totals.rollouts.all:
            notice = (
                f"prompt_mean on {prompts} prompts of one rollout each: that is the sample mean, as nothing is "
                "grouped. Look at the prompt ids."
            )
            log_single_rank(logger, logging.WARNING, notice)

    def _totals(self, data: LookAhead | Exception, groups: ProcessGroupCollection, carrier: Carrier) -> StepTotals:
        """The step's totals, as the user knows them or from one collective round; raises a failed look-ahead."""
        replicas = [groups.cp, groups.tp, groups.pp]
        exchange: dict[str, Any] = {
            "dp_group": groups.dp,
            "replica_groups": replicas,
            "masks": self._term_masks,
            "statistics": self.settings.statistics,
        }
        if self._totals_of is None:
            samples = data if isinstance(data, Exception) else data.samples
            return reduce_step_totals(samples, count_prompts=self.settings.uses_prompt_ids, **exchange)
        if isinstance(data, Exception):
            raise data
        totals = attempt(lambda: self._users_totals(data, carrier))
        if self._last_step is None:  # those of the first step are compared with what all ranks hold
            return compare_totals(totals, data.samples, **exchange)
        if isinstance(totals, Exception):
            raise totals
        if self._metric_modes is None:
            self._metric_modes = agree_on(self._last_step.metric_modes, ("sample_mean", "token_mean"), replicas)
        for mode in self._metric_modes:
            metric = resolve(mode, units=self.settings.aggregation.units)
            _check_counts(missing_counts(metric, totals, with_rollout_ids=False), f"a metric's {mode}")
        return totals

    def _users_totals(self, data: LookAhead, carrier: Carrier) -> StepTotals:
        """What `totals_of` says; refuses totals that miss what the mode, the carrier or an empty step will need."""
        assert self._totals_of is not None
        totals = self._totals_of(data.batches)
        if not isinstance(totals, StepTotals):
            raise TypeError(
                f"totals is {totals!r}: the denominators are those of the whole step, and never guessed from a "
                "micro-batch. Pass StepTotals.from_loss_masks(...) of all the step's masks."
            )
        samples = data.samples or []
        with_rollout_ids = any(one.rollout_ids is not None for one in samples)
        missing = missing_counts(self.settings.aggregation, totals, with_rollout_ids=with_rollout_ids)
        for aggregation in self.settings.terms.values():
            for name in (None, *self._term_masks):
                missing += missing_counts(aggregation, totals.with_mask(name), with_rollout_ids=with_rollout_ids)
        user = self.settings.describe()
        if totals.step_active_tokens is None and (carrier.per_token or self.settings.empty_step == "error"):
            missing = [*missing, "step_active_tokens"]
            user = "per-token loss" if carrier.per_token else "--loss-aggregation-empty-step error"
        if data.samples is not None:
            _check_counts(missing, user)
        for one in samples:
            one.check_masks()
            totals.check_covers(one)
        return totals

    def _check_tokens(self, totals: StepTotals, carrier: Carrier) -> None:
        """Warn of a step without an active token, or refuse it; refuse more tokens than Megatron can count."""
        tokens = totals.step_tokens if totals.step_active_tokens is None else totals.step_active_tokens
        if tokens == 0:
            if self.settings.empty_step == "error":
                raise BadBatchError(
                    "a step without one active token: --loss-aggregation-empty-step asks to stop there. Look at the "
                    "masks of the data."
                )
            notice = "a step without one active token: its policy gradient is zero. Look at the masks of the data."
            log_single_rank(logger, logging.WARNING, notice)
        if carrier.per_token and tokens is not None and tokens >= 2**31:
            raise BadBatchError(
                f"{tokens} active tokens with per-token loss: Megatron sums token counts as int32. Use smaller steps."
            )


def _check_counts(missing: Sequence[str], user: str) -> None:
    if missing:
        raise ValueError(
            f"totals_of returned totals without {', '.join(missing)}: {user} needs it. Give these counts of the whole "
            "step too."
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
        if not isinstance(data_iterator, MicrobatchIterator):
            return forward_step(data_iterator, *args, **kwargs)  # a stage that reads no data computes no loss
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
        iteration = args[2] if len(args) > 2 else kwargs["iteration"]
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


# --- a step in numbers


def summarize(totals: StepTotals) -> dict[str, float]:
    """The step in numbers that a logger can take; counts that are not known on this rank are left out."""
    counts: dict[str, float | None] = {
        "rollouts": totals.rollouts.all,
        "active_rollouts": totals.rollouts.active,
        "prompts": totals.prompts.all,
        "tokens": totals.step_entries,
        "active_tokens": totals.step_active_tokens,
    }
    return {name: value for name, value in counts.items() if value is not None}


def describe_step(step: Step, *, dp_size: int) -> str:
    """A step in a line of the log that shows what no check can: wrong ids, masks or numbers of ranks."""
    counts = summarize(step.totals)
    parts = []
    if "rollouts" in counts:
        parts.append(f"{counts['rollouts']:,.0f} rollouts")
    if counts.get("prompts"):
        parts.append(f"{counts['prompts']:,.0f} prompts ({counts['rollouts'] / counts['prompts']:.1f} each)")
    if {"tokens", "active_tokens"} <= counts.keys():
        parts.append(f"{counts['active_tokens']:,.0f} of {counts['tokens']:,.0f} tokens active")
    if {"rollouts", "active_rollouts"} <= counts.keys():
        parts.append(f"{counts['rollouts'] - counts['active_rollouts']:,.0f} rollouts fully masked")
    split = f"{step.num_microbatches} micro-batches x DP {dp_size}, CP {step.cp_size}"
    return " | ".join([step.aggregation.describe(), ", ".join(parts) or "counts not known on this rank", split])
