"""What does any loss do to each token? Measured in a training step as it runs, under Megatron's schedule and DDP.

A token's *effective weight* is the derivative of what the optimizer gets by that token's unreduced loss l_t:

    w_t = f * g_t / s,    g_t = d(what backward starts from) / d l_t    on the rank that holds the token (`tap`)
                          f   = finalised gradient / sum over ranks of what backward gave (`anchor`)
                          s   = the loss scale of fp16 training

Nothing in the model changes and no number that is trained on is touched. Where f cannot be read (other wrappers than
Megatron's DDP, CUDA graphs, no usable parameter, ranks that were scaled apart) the step says why it is `unknown`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_rl_loss.aliases import Aggregation
from megatron_rl_loss.audit.assembly import Part, Rows, measured_step, union
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep, Split
from megatron_rl_loss.errors import refused
from megatron_rl_loss.exchange import device_of, if_several
from megatron_rl_loss.layouts import ZigzagBSHD
from megatron_rl_loss.megatron.anchor import Anchor, Factor, choose, watching
from megatron_rl_loss.megatron.groups import gather_to_first, groups_of, spread_from_first
from megatron_rl_loss.megatron.handover import Microbatches
from megatron_rl_loss.samples import Samples
from megatron_rl_loss.tap import Tapped, Taps, asked_for, listening, tap
from megatron_rl_loss.totals import attempt

__all__ = ["Audit", "audited", "samples_of_known_batch", "tap"]

#: The term that is measured where nothing was tapped: what the model returned to the loss function.
OUTPUT = "output"
_NO_TAP = (
    "Nothing was tapped: measured is the derivative by what the model returned for a token, taken as its negative "
    "log-prob. It is the token's weight where the loss is a weighted sum of them. Under PPO it is the weight times "
    "advantage * ratio: clipped tokens read 0, and a token without advantage says nothing. "
    "Call tap(per_token_loss) in the loss function to measure the weight alone."
)


@dataclass
class _Report:
    """What a rank has to say of a step; sent to the first rank."""

    stage: int
    factors: list[Factor] = field(default_factory=list)
    loss_scale: float = 1.0
    num_microbatches: int = 0
    terms: dict[str, list[Part]] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)  # terms that a gradient came by
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Audit:
    """Measures one step: a ``with`` around the call of Megatron's schedule, until gradients are finalised.

        with Audit(model, samples_of=samples_of) as audit:
            losses = forward_backward_func(data_iterator=audit.watch(data_iterator), ...)
        print(audit.measured)  # on the rank that is first in all groups; before clipping and the optimizer's step

    All ranks must enter and leave it together. An error inside leaves nothing behind and measures nothing.

    Args:
        model: the model chunk or list of chunks.
        samples_of: describes a micro-batch of the watched iterator as `Samples`; not needed where taps or the reducers
            of this package say what they were given.
        pg_collection: the process groups; default: the model's, else Megatron's parallel state.
        gather: False measures `deviation` alone, and sends no token's weight anywhere.

    Attributes:
        steps: a `MeasuredStep` for each term, on the first rank; empty elsewhere.
        asked: the aggregation that the flags ask for, where a `LossAggregation` began the step.
    """

    def __init__(
        self,
        model: Any,
        *,
        samples_of: Callable[[Any], Samples] | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        gather: bool = True,
    ) -> None:
        self.steps: dict[str, MeasuredStep] = {}
        self.asked: Aggregation | None = None
        self._samples_of = samples_of
        self._gather = gather
        self._chunks = model if isinstance(model, list) else [model]
        self._config = get_model_config(self._chunks[0])
        self._groups = groups_of(self._chunks[0], pg_collection)
        self._taps = Taps()
        self._outputs: dict[int, Tapped] = {}
        self._described: list[Samples | Exception] = []
        self._returned: set[str] = set()
        self._factors: list[Factor] = []
        chosen = [choose(chunk, self._config) for chunk in self._chunks]
        self._anchors = [one for one in chosen if isinstance(one, Anchor)]
        self._without_anchor = [one for one in chosen if isinstance(one, str)]
        self._stack = ExitStack()

    @property
    def measured(self) -> MeasuredStep | None:
        """The policy loss (the term named ``pg``, or else the first), on the first rank; None elsewhere."""
        return self.steps.get("pg", next(iter(self.steps.values()), None))

    def agree(self, value: Any) -> Any:
        """What the first rank gave, on all ranks; all must call it together."""
        return spread_from_first(value, self._groups)

    @property
    def is_first_rank(self) -> bool:
        groups = self._groups
        return not any(group.rank() for group in (groups.tp, groups.pp, groups.cp, groups.dp))

    def watch(self, data_iterator: Any) -> Any:
        """The iterator, or list of iterators, that notes what `samples_of` says of each batch that is taken.

        That of a `LossAggregation` stays as it is: its micro-batches are known.
        """
        if self._samples_of is None or isinstance(data_iterator, Microbatches):
            return data_iterator
        if not isinstance(data_iterator, list):
            return None if data_iterator is None else _Watched(data_iterator, self._describe)
        last = max((i for i, one in enumerate(data_iterator) if one is not None), default=-1)
        return [self.watch(one) if i == last else one for i, one in enumerate(data_iterator)]

    def _describe(self, batch: Any) -> None:
        assert self._samples_of is not None
        describe = self._samples_of
        self._described.append(attempt(lambda: describe(batch)))

    def __enter__(self) -> "Audit":
        self.asked = asked_for()
        scale = getattr(self._config, "grad_scale_func", None)
        device = self._anchors[0].parameter.device if self._anchors else "cpu"
        self._loss_scale = torch.ones((), device=device)
        if scale is not None:
            with torch.no_grad():
                self._loss_scale = scale(self._loss_scale)
        with ExitStack() as stack:
            stack.enter_context(watching(self._anchors))
            stack.enter_context(listening(self._taps))
            stack.enter_context(_heard_schedule(self._begin_microbatch, self._returned))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._stack.close()
        if kind is None:
            self._measure()

    def _begin_microbatch(self, output: Any) -> None:
        if isinstance(output, Tensor) and not output.requires_grad:
            return  # a probe, nothing to train on
        self._taps.begin_microbatch()
        number = self._taps.num_microbatches - 1
        if not isinstance(output, Tensor) or number >= len(self._described):
            return
        samples = self._described[number]
        if isinstance(samples, Samples) and output.numel() == self._num_local(samples):
            self._outputs[number] = Tapped(tuple(output.shape), output.dtype, samples)
            output.register_hook(self._outputs[number].keep)

    def _num_local(self, samples: Samples) -> int | None:
        local = attempt(lambda: len(samples.local(self._groups.cp.rank(), self._groups.cp.size())))
        return None if isinstance(local, Exception) else local

    # ---- after the step

    def _measure(self) -> None:
        groups = self._groups
        self._factors = [anchor.factor(groups.dp_cp, groups.tp) for anchor in self._anchors]
        if not self._gather:
            return
        report = attempt(self._report)
        if isinstance(report, Exception):
            report = _Report(groups.pp.rank(), unknown=[f"a rank could not measure: {report}"])
        reports: list[_Report] = gather_to_first([report], groups)
        if reports:
            self.steps = _assembled(reports, self._split(max(one.num_microbatches for one in reports)))

    @property
    def computes_loss(self) -> bool:
        """Whether this rank is on the last pipeline stage."""
        return self._groups.pp.rank() == self._groups.pp.size() - 1

    def _split(self, num_microbatches: int) -> Split:
        groups = self._groups
        return Split(
            num_microbatches=num_microbatches,
            dp_size=groups.dp.size(),
            cp_size=groups.cp.size(),
            tp_size=groups.tp.size(),
            pp_size=groups.pp.size(),
            per_token=bool(self._config.calculate_per_token_loss),
        )

    def _report(self) -> _Report:
        report = _Report(self._groups.pp.rank(), self._factors, float(self._loss_scale))
        report.unknown += _cannot_know(self._config)
        without = [f"The factor of gradients cannot be read: {why}." for why in self._without_anchor]
        (report.unknown if self.computes_loss and not self._factors else report.notes).extend(without)
        if self.computes_loss and self._groups.tp.rank() == 0:  # over TP, a token's gradient is everywhere the same
            self._add_terms(report)
        return report

    def _add_terms(self, report: _Report) -> None:
        heard = self._taps.heard
        if not heard and self._outputs:
            heard = {OUTPUT: self._outputs}
            report.notes.append(_NO_TAP)
        elif not heard:
            report.unknown.append(
                "No loss was heard: nothing was tapped, and what the model returned is no loss a token of samples that "
                "are known. Call tap(per_token_loss, samples=...) in the loss function, or give samples_of."
            )
        taken = [max(of_term, default=-1) + 1 for of_term in heard.values()]
        report.num_microbatches = max([self._taps.num_microbatches, *taken])
        if self._returned:
            report.facts["returned"] = " and ".join(sorted(self._returned))
        dtypes = {tapped.dtype for of_term in heard.values() for tapped in of_term.values()}
        if dtypes:
            report.facts["loss_dtypes"] = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        for number in range(report.num_microbatches):
            samples = self._samples(number)
            if samples is None:
                report.unknown.append(
                    "The masks are not known. Give samples_of, or say tap(per_token_loss, samples=...) each time."
                )
            elif isinstance(samples, Exception):
                report.unknown.append(f"samples_of failed: {type(samples).__name__}: {samples}")
            else:
                self._add_parts(report, heard, number, samples)

    def _samples(self, number: int) -> Samples | Exception | None:
        """Of a micro-batch: as a tap was told, else as the iterator was described."""
        tapped = [of_term[number] for of_term in self._taps.heard.values() if number in of_term]
        told = next((one.samples for one in tapped if one.samples is not None), None)
        if told is not None:
            return told
        return self._described[number] if number < len(self._described) else None

    def _add_parts(self, report: _Report, heard: dict[str, dict[int, Tapped]], number: int, samples: Samples) -> None:
        groups = self._groups
        positions = samples.local(groups.cp.rank(), groups.cp.size()).positions.cpu().numpy()
        rows = Rows.of(samples, groups.cp.size()) if groups.cp.rank() == 0 else None
        for term, of_term in heard.items():
            gradients: Floats = np.zeros(len(positions))
            tapped = of_term.get(number)
            if tapped is not None and tapped.gradient is not None:
                report.reached.add(term)
                if tapped.gradient.numel() == len(positions):
                    gradients = tapped.gradient.cpu().numpy()
                else:
                    report.unknown.append(
                        f"In micro-batch {number} losses of shape {tapped.shape} were tapped as {term!r}, but by its "
                        f"samples and layout a rank holds {len(positions)} tokens. Tap one loss a token, in the "
                        "layout's order, or correct the layout."
                    )
            part = Part(
                dp_rank=groups.dp.rank(), cp_rank=groups.cp.rank(), microbatch=number, rows=rows,
                positions=positions, gradients=gradients,
            )  # fmt: skip
            report.terms.setdefault(term, []).append(part)

    @property
    def why(self) -> str:
        """Why `deviation` is not known, as far as this rank can tell."""
        reasons = [*_cannot_know(self._config), *self._without_anchor]
        reasons += [f"The factor of gradients cannot be read: {one.problem}." for one in self._factors if one.problem]
        return " ".join(reasons) or "No policy loss went through a tap, or its weights are not finite."

    def deviation(self) -> float | None:
        """The largest |w / asked - 1| over the step's tokens, or the largest weight where none was asked for, in units
        of the largest asked one; None where it cannot be known. All ranks of the last stage must call it together; None
        on other stages.
        """
        if not self.computes_loss:
            return None
        factors = [factor for factor in self._factors if not factor.problem]
        known = bool(factors) and not _cannot_know(self._config) and "pg" in self._taps.heard
        worst = torch.tensor([0.0 if known else torch.inf], dtype=torch.float64)
        if known:
            scale = factors[-1].value / float(self._loss_scale)
            off = attempt(lambda: max(_deviation(one, scale) for one in self._taps.heard["pg"].values()))
            worst[0] = torch.inf if isinstance(off, Exception) else torch.nan_to_num(torch.tensor(off), nan=torch.inf)
        group = self._groups.dp_cp
        if if_several(group) is not None:
            moved = worst.to(device_of(group))
            dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=group)
            worst = moved.cpu()
        return None if torch.isinf(worst[0]) else float(worst[0])


def _deviation(tapped: Tapped, scale: float) -> float:
    """Of one micro-batch's tokens on this rank."""
    assert tapped.asked is not None
    asked = tapped.asked().double()
    if tapped.gradient is None:
        return float(bool((asked != 0).any()))
    if not asked.numel():
        return 0.0
    weights = (tapped.gradient.double() * scale).to(asked.device)
    off = torch.where(asked != 0, (weights / asked - 1).abs(), weights.abs() / asked.abs().max().clamp(min=1e-30))
    return float(off.max())


def _cannot_know(config: Any) -> list[str]:
    """Model configurations under which hooks see nothing or groups change."""
    reasons = []
    if getattr(config, "cuda_graph_impl", None) not in (None, "none") or getattr(config, "enable_cuda_graph", False):
        reasons.append("CUDA graphs replay a backward pass without its hooks. Audit a step without them.")
    if any(getattr(config, name, False) for name in ("hybrid_context_parallel", "dynamic_context_parallel")):
        reasons.append("The context-parallel group changes between micro-batches: a token's place is not known.")
    if any((getattr(config, name, 1) or 1) > 1 for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")):
        reasons.append("Weight-rematerialising TP reduces over further groups, which the audit does not follow.")
    return reasons


def _assembled(reports: Sequence[_Report], split: Split) -> dict[str, MeasuredStep]:
    """What all ranks said, by term."""
    last = max(report.stage for report in reports)
    factors = [(report.stage, factor) for report in reports for factor in report.factors]
    factor, problems, notes = _agreed(factors, last)
    heard = [report for report in reports if report.num_microbatches]
    unknown = union(text for part in ([one for r in reports for one in r.unknown], problems) for text in part)
    notes = [*union(note for report in reports for note in report.notes), *notes]
    facts = {name: value for report in reversed(heard) for name, value in report.facts.items()}
    scale = heard[0].loss_scale if heard else 1.0
    if factor is not None:
        facts |= {
            "factor": factor.value,
            "anchor": factor.name,
            "residual": factor.residual,
            "residual_by_rounding": factor.rounding,
            "uncertainty": factor.uncertainty,
            "loss_scale": scale,
        }
    facts["rounding"] = _coarsest(facts.get("loss_dtypes", ()), facts.get("uncertainty", 0.0))
    if unknown:
        notes.append("Weights are up to one factor that is not known.")
    value = 1.0 if factor is None or unknown else factor.value / scale
    terms = list(dict.fromkeys(term for report in reports for term in report.terms))
    reached = [term for term in terms if any(term in report.reached for report in reports)]
    if len(heard) < split.dp_size * split.cp_size and not unknown:
        unknown = ("Some ranks of the last pipeline stage computed no loss.",)
    described = _all_described(reports)
    return {
        term: measured_step(
            [part for report in reports for part in report.terms.get(term, []) if described(part)],
            value,
            split,
            unknown=unknown,
            notes=notes,
            facts=facts,
        )
        for term in reached or terms or ["pg"]
    }


def _coarsest(dtypes: Sequence[str], uncertainty: float) -> str:
    """The floating-point type whose rounding the weights have."""
    by_type = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18}
    of_factor = next((name for name in ("float32", "float16") if uncertainty <= by_type[name]), "bfloat16")
    return next((name for name in by_type if name in (*dtypes, of_factor)), "float32")


def _all_described(reports: Sequence[_Report]) -> Callable[[Part], bool]:
    """Whether some rank described a part's micro-batch."""
    places = {
        (part.dp_rank, part.microbatch)
        for report in reports
        for parts in report.terms.values()
        for part in parts
        if part.rows is not None
    }
    return lambda part: (part.dp_rank, part.microbatch) in places


def _agreed(factors: Sequence[tuple[int, Factor]], last: int) -> tuple[Factor | None, list[str], list[str]]:
    """The factor of the stage that computes the loss, what is wrong with it, and what to know of the others."""
    of_loss = [factor for stage, factor in factors if stage == last]
    if not of_loss:
        return None, [], []
    sound = [factor for factor in of_loss if not factor.problem]
    if not sound:
        return of_loss[-1], [f"The factor of gradients cannot be read: {of_loss[-1].problem}."], []
    reference = sound[-1]
    problems, notes = [], []
    for stage, factor in factors:
        if factor.problem and factor.residual > factor.rounding:
            problems.append(f"The factor of gradients cannot be read: {factor.problem}.")
        elif factor.problem:
            notes.append(f"Of pipeline stage {stage} no factor could be read: {factor.problem}.")
        elif abs(factor.value / reference.value - 1) > factor.rounding + reference.rounding:
            problems.append(
                f"Gradients of {factor.name} on pipeline stage {stage} are multiplied by {factor.value:.6g}, those of "
                f"{reference.name} on stage {last} by {reference.value:.6g}: no weight holds for all parameters."
            )
    return reference, list(union(iter(problems))), list(union(iter(notes)))


class _Watched(Iterator[Any]):
    """An iterator that shows every batch to somebody; whatever else it can do, it still can."""

    def __init__(self, iterator: Any, show: Callable[[Any], None]) -> None:
        self._iterator = iterator
        self._show = show

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._show(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


@contextmanager
def _heard_schedule(begin: Callable[[Any], None], returned: set[str]) -> Iterator[None]:
    """For the duration of a ``with``, say when the schedule computes a micro-batch's loss, and what that returned."""
    original = schedules.forward_step_calc_loss
    signature = inspect.signature(original)

    @functools.wraps(original)
    def heard(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        loss_func = given.arguments.get("loss_func")
        if callable(loss_func) and torch.is_grad_enabled() and not given.arguments.get("collect_non_loss_data"):
            given.arguments["loss_func"] = functools.partial(_heard_loss, loss_func, begin, returned)
        return original(*given.args, **given.kwargs)

    schedules.forward_step_calc_loss = heard
    try:
        yield
    finally:
        schedules.forward_step_calc_loss = original


def _heard_loss(
    loss_func: Callable[..., Any], begin: Callable[[Any], None], returned: set[str], output: Any, **kwargs: Any
) -> Any:
    begin(output)
    result = loss_func(output, **kwargs)
    if isinstance(result, tuple):
        returned.add(f"{len(result)}-tuple")
    return result


def samples_of_known_batch(batch: Any) -> Samples:
    """The samples of a batch that says so itself, or of Megatron's own scripts.

    Known are whatever has them as ``.samples``; rows of Megatron's GPT data sets, by their ``loss_mask``; and what
    `train_rl.py` iterates over (with the losses of all context-parallel ranks gathered, as main has them).

    Raises ValueError for any other.
    """
    samples = getattr(batch, "samples", None)
    if isinstance(samples, Samples):
        return samples
    if isinstance(batch, Mapping) and isinstance(batch.get("loss_mask"), Tensor) and batch["loss_mask"].dim() == 2:
        return Samples(list(batch["loss_mask"]), layout=ZigzagBSHD(*batch["loss_mask"].shape))
    if isinstance(batch, Sequence) and "megatron.rl.rl_utils" in sys.modules:
        from megatron_rl_loss.frameworks import megatron_rl

        return megatron_rl.samples_of(batch)
    raise refused("batch_not_known", type=type(batch).__name__)


def audited(
    forward_backward_func: Callable[..., Any],
    report: Callable[[Audit], None],
    *,
    samples_of: Callable[[Any], Samples] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Callable[..., Any]:
    """A Megatron schedule that measures every training step, and hands the `Audit` to `report` on every rank."""

    @functools.wraps(forward_backward_func)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only"):
            return forward_backward_func(*args, **kwargs)
        with Audit(kwargs["model"], samples_of=samples_of, pg_collection=pg_collection) as audit:
            kwargs["data_iterator"] = audit.watch(kwargs.get("data_iterator"))
            result = forward_backward_func(*args, **kwargs)
        report(audit)
        return result

    return schedule
