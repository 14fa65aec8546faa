"""The Megatron-Core adapter: looks ahead over a step's data, and hands Megatron a loss it cannot rescale.

How Megatron scales a loss (0.19; `core/pipeline_parallel/schedules.py` `forward_step_calc_loss`,
`core/distributed/distributed_data_parallel.py`, `finalize_model_grads.py`), and how a rank's share of the step loss is
returned so that the gradient is exactly that of the sum of all shares:

| carrier | per-token loss | returned (loss, num_tokens)                     | Megatron divides the gradient by |
|---------|----------------|-------------------------------------------------|----------------------------------|
| A       | off            | share * num_microbatches * dp_cp size, 1        | num_microbatches * dp_cp size    |
| C       | on             | share * step_active_tokens, local active tokens | the sum of num_tokens over dp_cp |

Carrier C counts real tokens, so auxiliary losses that Megatron divides by them keep their scale.
"""

import functools
import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.arguments import (
    AggregationSettings,
    check_command_line,
    check_parallel_settings,
    check_per_token,
    validate_loss_aggregation_args,
)
from megatron_rl_loss.errors import BadBatchError, explain
from megatron_rl_loss.reducers import Reducer, ReducerInputs, WeightedSum, build_reducer
from megatron_rl_loss.samples import Samples
from megatron_rl_loss.totals import StepTotals, reduce_step_totals

try:
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config, log_single_rank, unwrap_model

    from megatron_rl_loss.contract import check_contract
except ImportError as error:
    raise ImportError(
        f"megatron_rl_loss.megatron needs Megatron-Core: {error}. pip install 'megatron-rl-loss[megatron]', "
        "or put your own checkout on PYTHONPATH; the rest of megatron_rl_loss works without it."
    ) from error

logger = logging.getLogger(__name__)

SamplesOf = Callable[[Any], Samples]
TotalsOf = Callable[[list[Any]], StepTotals]
DataIterator = Iterator[Any] | list[Iterator[Any] | None] | None


@dataclass(frozen=True)
class _Step:
    """One optimizer step on this rank: what its micro-batches share."""

    settings: AggregationSettings
    totals: StepTotals
    num_microbatches: int
    cp_rank: int
    cp_size: int
    dp_cp_size: int
    per_token: bool
    report_keys: list[str] = field(default_factory=list)
    _constants: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def constants_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A token count of 1, and the denominator of a reported share; made once a step."""
        if device not in self._constants:
            share = 1 / (self.num_microbatches * self.dp_cp_size)
            self._constants[device] = (
                torch.ones((), dtype=torch.int32, device=device),
                torch.tensor(share, dtype=torch.float32, device=device),
            )
        return self._constants[device]


class Microbatch:
    """A micro-batch of the user's iterator, with what it takes to reduce its losses.

    Attributes:
        data: what the user's iterator gave.
        samples: what `samples_of` said of it.
        totals: denominators of the whole step.
    """

    def __init__(self, data: Any, samples: Samples, step: _Step) -> None:
        self.data = data
        self.samples = samples
        self.totals = step.totals
        self._step = step

    @functools.cached_property
    def pg_loss(self) -> Reducer:
        """Per-token policy loss -> this rank's share of the step loss, by the asked mode."""
        return build_reducer(self._step.settings.mode, self._inputs)

    @functools.cached_property
    def sample_mean(self) -> Reducer:
        """Per-token values -> this rank's share of their sample mean: for metrics, whatever the mode."""
        if self._step.settings.mode == "sample_mean":
            return self.pg_loss  # one vector of weights for both
        return build_reducer("sample_mean", replace(self._inputs, divisor=None))

    @functools.cached_property
    def token_mean(self) -> Reducer:
        """Per-token values -> this rank's share of their token mean: for metrics, whatever the mode."""
        return build_reducer("token_mean", replace(self._inputs, divisor=None))

    @property
    def _inputs(self) -> ReducerInputs:
        step = self._step
        return ReducerInputs(
            samples=self.samples,
            totals=step.totals,
            divisor=step.settings.divisor,
            units=step.settings.units,
            cp_rank=step.cp_rank,
            cp_size=step.cp_size,
        )

    def loss(
        self, per_token_loss: Tensor, metrics: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What a Megatron ``loss_func`` returns: the aggregated loss, a token count, and the report.

        Args:
            per_token_loss: this CP rank's unreduced policy losses, in the layout's order.
            metrics: further per-token values of the same shape, reported as their sample mean, not differentiated.

        Raises:
            ValueError: losses or metrics that are not this rank's part of the layout; a metric named ``pg_loss``;
                metrics whose names differ from those of the step's first micro-batch (Megatron would miss them).
        """
        if metrics and "pg_loss" in metrics:
            given = "a metric named 'pg_loss'"
            raise ValueError(explain(given, "the loss itself is reported by that name", "Choose another name"))
        metrics = metrics or {}
        pg_loss, sample_mean = self.pg_loss, self.sample_mean
        if isinstance(pg_loss, WeightedSum) and isinstance(sample_mean, WeightedSum):
            share, sums = pg_loss.with_metrics(per_token_loss, list(metrics.values()), sample_mean)
        else:  # a user's own reducer
            share = pg_loss(per_token_loss)
            with torch.no_grad():
                sums = [sample_mean(values.detach()) for values in metrics.values()]
        return self.carry(share, {"pg_loss": share, **dict(zip(metrics, sums, strict=True))})

    def carry(self, share: Tensor, report: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Hand Megatron a share of the step loss that was put together by hand (a sum of `pg_loss` and a KL term, say).

        Args:
            share: 0-dim, connected to the graph; shares of all ranks and micro-batches add up to the step loss.
            report: shares by name; Megatron logs each one's sum over all ranks and micro-batches.

        Raises:
            ValueError: values that are not 0-dim tensors, a share without a graph, names that differ from those of the
                step's first micro-batch.
        """
        for name, value in {"the loss": share, **report}.items():
            if not isinstance(value, Tensor) or value.dim() != 0:
                given = f"{name} is {f'of shape {tuple(value.shape)}' if isinstance(value, Tensor) else repr(value)}"
                raise ValueError(explain(given, "it must be a 0-dim tensor", "Reduce it (pg_loss or sample_mean)"))
        if torch.is_grad_enabled() and not share.requires_grad:
            rule = "Megatron would skip the backward pass, or hang in it with pipeline stages"
            raise ValueError(explain("a loss without a graph", rule, "Do not detach the model's output"))
        step = self._step
        if not step.report_keys:
            step.report_keys.extend(report)
        elif set(step.report_keys) != set(report):
            given = f"a micro-batch that reports {list(report)} after one that reported {step.report_keys}"
            rule = "Megatron takes the names from a step's first micro-batch"
            raise ValueError(explain(given, rule, "Report the same names every time"))
        num_shares = step.num_microbatches * step.dp_cp_size
        # Megatron sums [numerator, denominator] over micro-batches and dp_cp ranks, then divides: here by 1.
        one, denominator = step.constants_on(share.device)
        halves = [half for value in report.values() for half in (value.detach().to(denominator), denominator)]
        pairs = dict(zip(report, torch.stack(halves).view(-1, 2), strict=True)) if report else {}
        if not step.per_token:
            return share * num_shares, one, pairs
        scale = _known_count(step.totals, "step_active_tokens", "per-token loss")
        return share * scale, self._local_active_tokens().to(share.device), pairs

    def _local_active_tokens(self) -> Tensor:
        step = self._step
        count = 0
        if self._inputs.copies == 1 or step.cp_rank == 0:  # else counted on the first of the ranks that all hold them
            count = self.samples.local_active_tokens(step.cp_rank, step.cp_size)
        return torch.tensor(count, dtype=torch.int32, device="cpu")


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
            pipeline stage that reads no data) -> `StepTotals`. Spares the collectives, and with them the errors' way to
            other ranks.
    """

    def __init__(
        self,
        settings: AggregationSettings,
        samples_of: SamplesOf,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        totals_of: TotalsOf | None = None,
    ) -> None:
        self.settings = settings
        self._samples_of = samples_of
        self._pg_collection = pg_collection
        self._totals_of = totals_of
        self._contract_checked = False

    @classmethod
    def from_args(
        cls,
        args: Namespace,
        samples_of: SamplesOf,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        totals_of: TotalsOf | None = None,
    ) -> "LossAggregation":
        """Validate Megatron's parsed `args` and build.

        Raises as `validate_loss_aggregation_args`, and ValueError for a misspelt flag on the command line.
        """
        check_command_line(args, sys.argv[1:])
        settings = validate_loss_aggregation_args(args)
        if settings.notice:
            log_single_rank(logger, logging.WARNING, settings.notice)
        return cls(settings, samples_of, pg_collection=pg_collection, totals_of=totals_of)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """For the duration of a ``with``, Megatron's `pretrain` runs every schedule through `wrap_schedule`.

        Replaces two names in `megatron.training.training`: `get_forward_backward_func`, since `pretrain` has no hook
        that all ranks pass before a pipeline schedule starts; and `training_log`, which leaves values below 0 (policy
        losses, log-probs) out of its progress line, to print them in a line of their own. Loops that are not
        `pretrain` call `wrap_schedule` instead.
        """
        from megatron.training import training

        get_schedule, training_log = training.get_forward_backward_func, training.training_log
        if getattr(get_schedule, "wraps_schedules_of", None) is not None:
            given = "attached() inside attached()"
            raise RuntimeError(explain(given, "a launch has one LossAggregation", "Leave the first `with` before"))

        @functools.wraps(get_schedule)
        def get_wrapped_schedule(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return self.wrap_schedule(get_schedule(*args, **kwargs))

        @functools.wraps(training_log)
        def log_all(loss_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            result = training_log(loss_dict, *args, **kwargs)
            iteration = args[2] if len(args) > 2 else kwargs["iteration"]
            if iteration % training.get_args().log_interval == 0:
                values = " | ".join(f"{name}: {float(value):.6E}" for name, value in loss_dict.items())
                training.print_rank_last(f"   of iteration {iteration:8d} alone | {values} |")
            return result

        get_wrapped_schedule.wraps_schedules_of = self  # type: ignore[attr-defined]
        training.get_forward_backward_func, training.training_log = get_wrapped_schedule, log_all
        try:
            yield
        finally:
            training.get_forward_backward_func, training.training_log = get_schedule, training_log

    def wrap_schedule(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """A Megatron schedule (`get_forward_backward_func()`) that begins each call with `begin_step`."""

        @functools.wraps(forward_backward_func)
        def schedule(*, data_iterator: DataIterator, model: Any, num_microbatches: int, **kwargs: Any) -> Any:
            microbatches = self.begin_step(data_iterator, model=model, num_microbatches=num_microbatches)
            return forward_backward_func(
                data_iterator=microbatches, model=model, num_microbatches=num_microbatches, **kwargs
            )

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
            BadBatchError: on every rank, if any rank failed: an iterator that ended or raised, `samples_of` that
                raised, samples that disagree, prompt ids that ``prompt_mean`` misses, or a step without an active token
                when that is an error. No weight was changed.
        """
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        per_token = bool(config.calculate_per_token_loss)
        self._check_config(config, chunks, per_token)
        groups = self._groups(chunks[0])
        count = get_num_microbatches() if num_microbatches is None else num_microbatches
        cp_size, dp_cp_size = groups.cp.size(), groups.dp_cp.size()
        if not self._contract_checked:
            scaling = {"per_token": per_token, "num_microbatches": count, "cp_size": cp_size, "dp_cp_size": dp_cp_size}
            check_contract(config, chunks, **scaling)
            self._contract_checked = True
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        fetched: list[list[Any] | None] = []

        def prepare() -> list[Samples] | None:
            fetched.extend(None if iterator is None else _fetch(iterator, count) for iterator in iterators)
            # The last chunk's: with virtual stages, that one computes the loss.
            batches = next((batches for batches in reversed(fetched) if batches is not None), None)
            if batches is None:
                if groups.pp.rank() == groups.pp.size() - 1:
                    given = "no data iterator on a rank of the last pipeline stage"
                    raise ValueError(
                        explain(given, "it computes the loss", "Set is_distributed = True on the provider")
                    )
                return None
            return [self._described(batch, groups) for batch in batches]

        if self._totals_of is not None:
            described = prepare() or []
            totals = self._totals_of(
                [batch for batches in fetched if batches is not None for batch in batches][-count:]
            )
        else:
            described, totals = reduce_step_totals(
                prepare,
                dp_group=groups.dp,
                replica_groups=[groups.cp, groups.tp, groups.pp],
                count_prompts=self.settings.uses_prompt_ids,
            )
        self._check_totals(totals, per_token)
        step = _Step(
            settings=self.settings,
            totals=totals,
            num_microbatches=count,
            cp_rank=groups.cp.rank(),
            cp_size=cp_size,
            dp_cp_size=dp_cp_size,
            per_token=per_token,
        )
        ready = [
            None
            if batches is None
            else iter([Microbatch(*pair, step) for pair in zip(batches, described, strict=True)])
            for batches in fetched
        ]
        return ready if isinstance(data_iterator, list) else ready[0]

    def _described(self, batch: Any, groups: ProcessGroupCollection) -> Samples:
        samples = self._samples_of(batch)
        if not isinstance(samples, Samples):
            given = f"samples_of returned a {type(samples).__name__}"
            raise TypeError(explain(given, "it must return megatron_rl_loss.Samples", "Wrap the masks in Samples"))
        if self.settings.mode == "prompt_mean" and samples.prompt_ids is None and len(samples):
            given = "loss aggregation 'prompt_mean' and samples without prompt_ids"
            raise ValueError(explain(given, "it averages inside each prompt group", "Give samples_of prompt_ids"))
        samples.local_segments(groups.cp.rank(), groups.cp.size())  # raises if the layout cannot be cut so
        return samples

    def _check_config(self, config: Any, chunks: Sequence[Any], per_token: bool) -> None:
        check_parallel_settings(config, per_token)
        check_per_token(self.settings, per_token)
        for chunk in chunks:
            if per_token and isinstance(chunk, _BaseDataParallel):
                if type(chunk).scale_gradients is _BaseDataParallel.scale_gradients:
                    given = f"per-token loss with {type(chunk).__name__}"
                    rule = "it never divides gradients by the token count, so they would be too large by it"
                    raise ValueError(explain(given, rule, "Turn calculate_per_token_loss off"))
                check_parallel_settings(
                    Namespace(ddp_average_in_collective=chunk.ddp_config.average_in_collective), True
                )

    def _check_totals(self, totals: StepTotals, per_token: bool) -> None:
        tokens = totals.step_active_tokens
        if tokens == 0:
            given, remedy = "a step without one active token", "Look at the masks of the data"
            if self.settings.empty_step == "error":
                raise BadBatchError(explain(given, "--loss-aggregation-empty-step asks to stop there", remedy))
            log_single_rank(logger, logging.WARNING, explain(given, "its policy gradient is zero", remedy))
        if per_token and tokens is not None and tokens >= 2**31:
            rule = "Megatron sums token counts as int32"
            raise BadBatchError(explain(f"{tokens} active tokens with per-token loss", rule, "Use smaller steps"))

    def _groups(self, chunk: Any) -> ProcessGroupCollection:
        needed = ("tp", "pp", "cp", "dp", "dp_cp")
        groups = self._pg_collection
        if groups is None:
            groups = getattr(unwrap_model(chunk), "pg_collection", None)
            if groups is None or any(getattr(groups, name, None) is None for name in needed):
                groups = ProcessGroupCollection.use_mpu_process_groups(list(needed))
        missing = [name for name in needed if getattr(groups, name, None) is None]
        if missing:
            given = f"a ProcessGroupCollection without {', '.join(missing)}"
            raise ValueError(explain(given, "the step's totals need them", "Set those groups"))
        return groups


def _fetch(iterator: Iterator[Any], count: int) -> list[Any]:
    batches = []
    for i in range(count):
        try:
            batches.append(next(iterator))
        except StopIteration:
            given = f"the data iterator ended after {i} of the step's {count} micro-batches"
            raise ValueError(
                explain(given, "a step must be whole", "Give it more data, or train fewer steps")
            ) from None
    return batches


def _known_count(totals: StepTotals, name: str, what: str) -> int:
    value: int | None = getattr(totals, name)
    if value is None:
        raise ValueError(explain(f"totals without {name}", f"{what} needs it", "Give the count of the whole step"))
    return value
