"""The weight that a training step gives each token, measured while the step runs under Megatron's schedule and DDP.

A token's *effective weight* is the derivative of the optimizer's loss by that token's unreduced loss l_t:

    w_t = f * g_t / s,    g_t = d(scalar that backward starts from) / d l_t    on the token's rank (`tap`)
                          f   = finalised gradient / sum over ranks of backward's gradients (`anchor`)
                          s   = the loss scale of fp16 training

The audit changes no number of the training. If f cannot be measured, the step's `unknown` has the reasons.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, log_single_rank
from torch import Tensor

from megatron_rl_loss.audit.assembly import log_prob_gap
from megatron_rl_loss.audit.log_prob_gap import LogProbGap
from megatron_rl_loss.audit.megatron.anchor import Anchor, Factor, choose
from megatron_rl_loss.audit.megatron.reports import Report, assembled
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.megatron.flags import REMAT_SIZES, has_cuda_graphs
from megatron_rl_loss.megatron.groups import gather_to_first, groups_of
from megatron_rl_loss.megatron.iterator import MicrobatchIterator
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import find_mode
from megatron_rl_loss.reduction.taps import Taps, expected_aggregation, observe, observed_taps, size_of_gradient
from megatron_rl_loss.step.collectives import agree_on, all_reduce, attempt, several
from megatron_rl_loss.step.masks import SMALLEST
from megatron_rl_loss.step.samples import Samples

logger = logging.getLogger(__name__)

#: Bound for norms over many tokens, where roundings of half precision average out.
_PATH_TOLERANCE = 1e-2
#: Name in the log of the last audit's deviation; -1 if it is unknown.
METRIC = "loss_aggregation_deviation"
NO_TAP = (
    "Nothing was tapped. Write per_token_loss = tap(per_token_loss, samples=...) in the loss function, before masks "
    "and means (from megatron_rl_loss import tap)."
)


class Audit:
    """Measures one step: a ``with`` around the call of Megatron's schedule, up to finalised gradients.

        with Audit(model, samples_of=samples_of) as audit:
            losses = forward_backward_func(data_iterator=audit.watch(data_iterator), ...)
        print(audit.measured)  # on the rank that is first in all groups; before clipping and the optimizer's step

    All ranks enter and leave it together. After an error inside, all hooks are removed and nothing is measured. If a
    model finalises gradients after the schedule, as SkyRL's does, the step is measured then.

    Args:
        model: the model chunk or list of chunks.
        samples_of: describes a micro-batch of the watched iterator; not needed if taps get samples.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
        gather: False measures `deviation` alone, without gathering the weights of tokens.
        then: called on every rank after the measurement, with None or the error that prevented it.

    Attributes:
        steps: a `MeasuredStep` for each term, on the first rank; empty elsewhere.
        log_prob_gap: the gap between the two sides' log-probs that taps got, on the first rank.
    """

    def __init__(
        self,
        model: Any,
        *,
        samples_of: Callable[[Any], Samples] | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        gather: bool = True,
        then: Callable[[Exception | None], None] | None = None,
    ) -> None:
        chunks = model if isinstance(model, list) else [model]
        self.steps: dict[str, MeasuredStep] = {}
        self.log_prob_gap: LogProbGap | None = None
        self._config, self._groups = get_model_config(chunks[0]), groups_of(chunks[0], pg_collection)
        self._samples_of, self._gather, self._then = samples_of, gather, then
        self._device = next(chunks[0].parameters()).device
        self._computes_loss = self._groups.pp.rank() == self._groups.pp.size() - 1
        self._anchors = [choose(chunk, self._config) for chunk in chunks]
        self._factors: list[Factor] = []  # without a problem
        self._faults: list[str] = []  # reasons against a verdict that are faults of the step
        self._unknown = _cannot_know(self._config)  # this rank's other reasons against a verdict
        self._taps = Taps()
        self._described: list[Samples | Exception] = []  # each micro-batch, by `samples_of`
        self._stack = ExitStack()

    @property
    def measured(self) -> MeasuredStep | None:
        """The policy loss (the term named ``pg``, or else the first), on the first rank; None elsewhere."""
        return self.steps.get("pg", next(iter(self.steps.values()), None))

    def expected_of(self, term: str) -> Aggregation | None:
        """The aggregation that a term declared, else that of the flags, for `judge`; on the first rank.

        Per-token loss asks for a token mean. None if no aggregation is known, or if the term's own mode is an
        unregistered function.
        """
        facts = self.steps[term].facts
        own = facts.get("expected")
        if own is None and self._expected is None and self._config.calculate_per_token_loss:
            return resolve("token_mean")
        if own is None or facts.get("as_policy"):
            return self._expected
        return resolve(own["mode"], divisor=own["divisor"], units=own["units"]) if find_mode(own["mode"]) else None

    def watch(self, data_iterator: Any) -> Any:
        """Wrap the iterator, or list of iterators, so that `samples_of` describes each batch that is read.

        The iterator of a `LossAggregation` is returned unchanged: its micro-batches are known.
        """
        if self._samples_of is None or isinstance(data_iterator, MicrobatchIterator | None):
            return data_iterator
        if isinstance(data_iterator, list):
            return [self.watch(one) for one in data_iterator]
        samples_of = self._samples_of
        described = self._described = []  # of several model chunks, the last one computes the loss

        def describe(batch: Any) -> Any:
            described.append(attempt(lambda: samples_of(batch)))
            return batch

        return map(describe, data_iterator)

    def __enter__(self) -> "Audit":
        self._expected = expected_aggregation()
        with ExitStack() as stack:
            for anchor in self._anchors:
                if isinstance(anchor, Anchor):
                    stack.callback(anchor.parameter.register_hook(anchor.keep).remove)
            if outer := observed_taps():  # of an audit around this one
                self._taps = outer
            else:
                stack.enter_context(observe(self._taps))
                stack.callback(setattr, schedules, "forward_step_calc_loss", schedules.forward_step_calc_loss)
                schedules.forward_step_calc_loss = _numbered(schedules.forward_step_calc_loss, self._taps)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._stack.close()
        owner: Any = getattr(self._config.finalize_model_grads_func, "__self__", None)
        finalize: Any = getattr(owner, "run_pending_grad_sync", None)

        def end() -> None:
            if finalize is not None:
                vars(owner).pop("run_pending_grad_sync", None)  # the method is there again
                finalize()
            failure = attempt(self._measure)
            if self._then is not None:
                self._then(failure)
            elif failure is not None:
                raise failure

        if kind is None and finalize is not None:
            owner.run_pending_grad_sync = end
        elif kind is None:
            end()

    def _measure(self) -> None:
        groups = self._groups
        factors = [one.factor(groups.dp_cp, groups.tp) if isinstance(one, Anchor) else one for one in self._anchors]
        self._unknown += [one.problem for one in factors if one.problem and self._computes_loss and not one.apart]
        self._faults = [one.problem for one in factors if one.apart]
        self._factors = [one for one in factors if not one.problem]
        scale = getattr(self._config, "grad_scale_func", None)
        self._loss_scale = float(scale(torch.ones((), device=self._device))) if scale else 1.0
        if not self._gather:
            return
        tapped = [one.samples for of_term in self._taps.losses.values() for one in of_term.values()]
        changes = any(isinstance(one, Samples) and one.cp_group is not None for one in [*tapped, *self._described])
        dynamic_cp = bool(agree_on(["changes"] * changes, ["changes"], [groups.dp_cp, groups.pp]))
        path = self._path() if self._computes_loss else 1.0
        has_gradient = not any(one.empty for one in factors)
        has_taps = bool(self._taps.losses)
        report = Report(groups.pp.rank(), self._factors, self._unknown, self._faults, has_gradient, has_taps)
        if self._computes_loss and groups.tp.rank() == 0:  # over TP, gradients of losses are the same
            failure = attempt(lambda: self._add_tokens(report, path, dynamic_cp))
            report.unknown += [f"A rank failed to measure. {type(failure).__name__}: {failure}"] if failure else []
        if reports := gather_to_first([report], groups):
            self.steps = assembled(reports, groups, self._config, self._loss_scale, dynamic_cp=dynamic_cp)
            self.log_prob_gap = log_prob_gap([part for one in reports for part in chain(*one.terms.values())])

    def _path(self) -> float:
        """The ratio of gradients at the model's output to the gradients that engines' losses send to log-probs.

        The backward of a gather over CP ranks sums the gradients (1) or takes a rank's own slice (1 / CP).
        """
        groups, paths = self._groups, self._taps.paths
        if not agree_on(["path"] * bool(paths), ["path"], [groups.dp_cp, groups.tp]):
            return 1.0
        cp_size = groups.cp.size()
        temperatures = [one.temperature for one in paths if one.temperature is not None]
        if len(temperatures) < len(paths):
            if cp_size > 1 and any(one.replicated for one in paths):
                self._unknown.append("The backward pass of log-probs gathered over CP ranks cannot be followed.")
            return 1.0
        sums = torch.zeros(2, dtype=torch.float64)  # sent by the loss, arrived at the output
        for one, temperature in zip(paths, temperatures, strict=True):
            gradient = torch.zeros_like(one.log_probs).double() if one.gradient is None else one.gradient.clone()
            for group in several(groups.cp) if one.replicated else ():
                all_reduce(gradient, group)
            sent = (gradient.abs() * 2 * (1 - one.log_probs.double().exp())).sum() / temperature
            sums[0] += sent.cpu() / (cp_size if one.replicated else 1) / groups.tp.size()
        sums[1] = sum(float(size) for size in self._taps.sizes_at_log_probs or self._taps.output_sizes)
        for group in several(groups.dp_cp, groups.tp):
            all_reduce(sums, group)
        path = float(sums[1] / sums[0])
        for honest in (1.0, 1 / cp_size):
            if abs(path / honest - 1) < _PATH_TOLERANCE:
                return honest
        if sums[0]:
            self._faults.append(f"Gradients of log-probs arrive {path:.6g} times at the model's output, not once.")
        return 1.0

    def _add_tokens(self, report: Report, path: float, dynamic_cp: bool) -> None:
        """Add the tokens of each micro-batch to the report."""
        losses, turns = self._taps.losses, Counter[tuple[int, int]]()
        report.num_microbatches = max([self._taps.num_microbatches, *(max(of_term) + 1 for of_term in losses.values())])
        report.unknown += [] if losses else [NO_TAP]
        for number in range(report.num_microbatches if losses else 0):
            tapped = {term: of_term.get(number) for term, of_term in losses.items()}
            told = (one.samples for one in tapped.values() if one is not None and one.samples is not None)
            samples = next(chain(told, self._described[number : number + 1]), None)
            if not isinstance(samples, Samples):
                remedy = "Give Audit samples_of, or call tap(per_token_loss, samples=...) in every micro-batch."
                report.unknown.append(f"The masks are not known ({samples!r}). {remedy}")
                continue
            dp_rank, turn, (cp_rank, cp_size) = self._groups.dp.rank(), number, samples.place_in(self._groups.cp)
            if dynamic_cp:  # the place of a group that changes: its first rank, its size, and its turn
                dp_cp, group, (cp_rank, cp_size) = self._groups.dp_cp, samples.cp_group, samples.place_in(None)
                first = dist.get_rank() if group is None else dist.get_global_rank(group, 0)
                dp_rank = dist.get_group_rank(dp_cp, first)
                turn = turns[dp_rank, cp_size] * dp_cp.size() + cp_size - 1
                turns[dp_rank, cp_size] += 1
            for term, one in tapped.items():
                if one is not None and one.at_log_probs and one.gradient is not None:
                    one.gradient *= path
                report.add(
                    term, one, samples, cp_size, self._expected, dp_rank=dp_rank, microbatch=turn, cp_rank=cp_rank
                )

    @property
    def _reasons(self) -> list[str]:
        """This rank's reasons against a verdict."""
        return self._faults + self._unknown

    def deviation(self) -> float | None:
        """The largest |w / expected - 1| over the step's tokens and the loss's terms.

        The error of a weight that should be 0 is relative to the largest expected one. NaN if unknown. All ranks of
        the last stage must call it together; None on other stages.
        """
        if not self._computes_loss:
            return None
        worst = torch.zeros(1, dtype=torch.float64)
        tapped = [(term, one) for term, of_term in self._taps.losses.items() for one in of_term.values()]
        losses = [one for term, one in tapped if one.aggregation or term == "pg"]
        if not losses or any(one.expected_weights is None for one in losses):
            self._unknown.append("A policy loss did not go through a reducer of this library.")
        for one in losses if not self._reasons else ():
            expected: Tensor = one.expected_weights()  # type: ignore[misc]
            gradient = torch.zeros_like(expected) if one.gradient is None else one.gradient.to(expected)
            off = (gradient * (self._factors[-1].value / self._loss_scale) - expected).abs()
            sizes = torch.cat([expected.abs(), expected.new_tensor([SMALLEST])])
            off /= sizes[:-1].where(expected != 0, sizes.max())
            worst[0] = torch.cat([worst.to(off), off.nan_to_num(nan=torch.inf)]).max()
        if self._reasons:
            worst[0] = torch.inf
        for group in several(self._groups.dp_cp):
            all_reduce(worst, group, dist.ReduceOp.MAX)
        return float(worst[0] if worst[0] < torch.inf else torch.nan)


class IntervalAudits:
    """Audits every `interval`-th step of a training run, the first included, and logs one number."""

    def __init__(self, interval: int) -> None:
        self._interval, self._steps = interval, 0
        self._last: float | None = None  # of the last audit; None before it and on stages that compute no loss

    @contextmanager
    def step(self, model: Any, pg_collection: ProcessGroupCollection | None) -> Iterator[None]:
        """A ``with`` around the schedule's call; measures every `interval`-th call."""
        self._steps += 1
        if (self._steps - 1) % self._interval:
            yield
            return
        with Audit(model, pg_collection=pg_collection, gather=False) as audit:
            yield
        self._last, self._device = audit.deviation(), audit._device
        if self._last is not None and math.isnan(self._last):
            self._last = -1.0
            why = " ".join(audit._reasons) or "Weights are not finite."
            log_single_rank(logger, logging.WARNING, f"{METRIC} of step {self._steps} is unknown. {why}")

    def reported(self, reports: Any) -> Any:
        """The schedule's reports, each with the last deviation, since Megatron averages values between logs."""
        if self._last is None or not isinstance(reports, list):
            return reports
        last = {METRIC: torch.tensor(self._last, device=self._device)}
        return [report | last if isinstance(report, dict) and report else report for report in reports]


def _cannot_know(config: Any) -> list[str]:
    """Reasons against a verdict in the config: hooks that do not run, and groups that the audit does not know."""
    graphs = "CUDA graphs replay a backward pass without its hooks. Audit a step without CUDA graphs."
    remat = "Weight-rematerialising TP (GTP) reduces over further groups, which the audit does not follow."
    has_remat = any((getattr(config, name, 1) or 1) > 1 for name in REMAT_SIZES)
    return [graphs] * bool(has_cuda_graphs(config)) + [remat] * has_remat


def _numbered(calculate: Any, taps: Taps) -> Any:
    """Wrap Megatron's ``forward_step_calc_loss``: each training loss begins a micro-batch of `taps`."""

    def keep_size(gradient: Tensor) -> None:
        if taps.paths:
            taps.output_sizes.append(size_of_gradient(gradient))

    def calculate_numbered(model: Any, output_tensor: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        def numbered_loss_func(output: Any, **further: Any) -> Any:
            if torch.is_grad_enabled() and getattr(output, "requires_grad", True):  # else a probe, or no training
                taps.begin_microbatch()
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(keep_size)
            return loss_func(output, **further)

        return calculate(model, output_tensor, loss_func and numbered_loss_func, *args, **kwargs)

    return calculate_numbered
