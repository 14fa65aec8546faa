"""What does any loss do to each token? Measured in a training step as it runs, under Megatron's schedule and DDP.

A token's *effective weight* is the derivative of what the optimizer gets by that token's unreduced loss l_t:

    w_t = f * g_t / s,    g_t = d(what backward starts from) / d l_t    on the rank that holds the token (`tap`)
                          f   = finalised gradient / sum over ranks of what backward gave (`anchor`)
                          s   = the loss scale of fp16 training

No number that is trained on is touched. Where f cannot be read the step says why it is `unknown`.
"""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_rl_loss.audit.assembly import Part, Rows, log_prob_gap
from megatron_rl_loss.audit.log_prob_gap import LogProbGap
from megatron_rl_loss.audit.megatron.anchor import Anchor, Factor, choose
from megatron_rl_loss.audit.megatron.observation import Watched, observe_schedule
from megatron_rl_loss.audit.megatron.reports import NO_TAP, OUTPUT, Report, assembled, declared, shown, unreadable
from megatron_rl_loss.audit.tokens import MeasuredStep, Split
from megatron_rl_loss.megatron.flags import CHANGING_CP, REMAT_SIZES, has_cuda_graphs
from megatron_rl_loss.megatron.groups import gather_to_first, groups_of, spread_from_first
from megatron_rl_loss.megatron.iterator import MicrobatchIterator
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import find_mode
from megatron_rl_loss.reduction.taps import TappedLosses, Taps, expected_aggregation, observe
from megatron_rl_loss.step.collectives import agree_on, all_reduce, attempt, several
from megatron_rl_loss.step.masks import SMALLEST
from megatron_rl_loss.step.samples import Samples

#: By what Megatron scales the backward pass of an auxiliary loss, by the setting that turns it on.
_SCALERS: dict[str, Any] = {
    "moe_aux_loss_coeff": MoEAuxLossAutoScaler,
    "moe_z_loss_coeff": MoEAuxLossAutoScaler,
    "mtp_num_layers": MTPLossAutoScaler,
}


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
        expected: the aggregation that the flags ask for, where a `LossAggregation` began the step.
        log_prob_gap: between the two sides' log-probs that taps of the policy loss were given, on the first rank.
        finalized_later: set it inside the ``with`` where the schedule leaves gradients as backward made them; whoever
            finalises them then calls `measure`, on all ranks.
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
        self.expected: Aggregation | None = None
        self.log_prob_gap: LogProbGap | None = None
        self.finalized_later = False
        self._samples_of = samples_of
        self._gather = gather
        self._chunks = model if isinstance(model, list) else [model]
        self._config = get_model_config(self._chunks[0])
        self._groups = groups_of(self._chunks[0], pg_collection)
        self._taps = Taps()
        self._outputs: dict[int, TappedLosses] = {}
        self._described: list[Samples | Exception] = []
        self._factors: list[Factor] = []
        self._auxiliary: dict[str, list[Tensor]] = {}  # what _SCALERS held, by setting
        self._dynamic_cp = False  # whether micro-batches have cp_groups of their own
        self._turns: Counter[tuple[int, int]] = Counter()
        chosen = [choose(chunk, self._config) for chunk in self._chunks]
        self._anchors = [one for one in chosen if isinstance(one, Anchor)]
        self._without_anchor = [unreadable(why) for why in chosen if isinstance(why, str)]
        self._stack = ExitStack()

    @property
    def measured(self) -> MeasuredStep | None:
        """The policy loss (the term named ``pg``, or else the first), on the first rank; None elsewhere."""
        return self.steps.get("pg", next(iter(self.steps.values()), None))

    def expected_of(self, term: str) -> Aggregation | None:
        """What a term should be, for `judge`: as it was declared, else as the policy loss; on the first rank.

        None where nobody said so, and for an unregistered function as the term's own mode.
        """
        declared = self.steps[term].facts.get("expected") if term in self.steps else None
        if declared is None or (self.expected is not None and shown(self.expected) == declared):
            return self.expected
        known = find_mode(declared["mode"]) is not None
        return resolve(declared["mode"], divisor=declared["divisor"], units=declared["units"]) if known else None

    @property
    def is_first_rank(self) -> bool:
        groups = self._groups
        return not any(group.rank() for group in (groups.tp, groups.pp, groups.cp, groups.dp))

    @property
    def computes_loss(self) -> bool:
        """Whether this rank is on the last pipeline stage."""
        return self._groups.pp.rank() == self._groups.pp.size() - 1

    def agree(self, value: Any) -> Any:
        """What the first rank gave, on all ranks; all must call it together."""
        return spread_from_first(value, self._groups)

    def watch(self, data_iterator: Any) -> Any:
        """The iterator, or list of iterators, that notes what `samples_of` says of each batch that is taken.

        That of a `LossAggregation` stays as it is: its micro-batches are known.
        """
        if self._samples_of is None or isinstance(data_iterator, MicrobatchIterator):
            return data_iterator
        if isinstance(data_iterator, list):
            last = max((i for i, one in enumerate(data_iterator) if one is not None), default=-1)
            return [self.watch(one) if i == last else one for i, one in enumerate(data_iterator)]
        return None if data_iterator is None else Watched(data_iterator, self._samples_of, self._described)

    def __enter__(self) -> "Audit":
        self.expected = expected_aggregation()
        one = torch.ones((), device=self._anchors[0].parameter.device if self._anchors else "cpu")
        with torch.no_grad():
            self._loss_scale = (getattr(self._config, "grad_scale_func", None) or torch.clone)(one)
        with ExitStack() as stack:
            for anchor in self._anchors:
                stack.callback(anchor.parameter.register_hook(anchor.keep).remove)
            stack.enter_context(observe(self._taps))
            stack.enter_context(observe_schedule(self._begin_microbatch, self._end_microbatch))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._stack.close()
        if kind is None and not self.finalized_later:
            self.measure()

    def _begin_microbatch(self, output: Any) -> None:
        if isinstance(output, Tensor) and not output.requires_grad:
            return  # a probe, nothing to train on
        number = self._taps.num_microbatches
        self._taps.begin_microbatch()
        samples = next(iter(self._described[number:]), None)
        if not isinstance(output, Tensor) or not isinstance(samples, Samples):
            return
        if output.numel() == attempt(lambda: len(samples.local(*samples.place_in(self._groups.cp)))):
            self._outputs[number] = TappedLosses(tuple(output.shape), output.dtype, samples)
            output.register_hook(self._outputs[number].add_gradient)

    def _end_microbatch(self) -> None:
        for name, scaler in _SCALERS.items():
            coefs = getattr(self._config, name, None)
            is_on = any(coefs if isinstance(coefs, list) else [coefs])
            if is_on and (self._config.num_moe_experts or not name.startswith("moe_")):
                scale = scaler.main_loss_backward_scale
                if scale is not None:
                    self._auxiliary.setdefault(name, []).append(scale.detach().clone().reshape(()))

    # ---- after the step

    def measure(self) -> None:
        """Reads finalised gradients and makes `steps`; leaving the ``with`` has done so, unless `finalized_later`."""
        groups = self._groups
        self._factors = [anchor.factor(groups.dp_cp, groups.tp) for anchor in self._anchors]
        if not self._gather:
            return
        known = [*(one.samples for one in chain(*map(dict.values, self._taps.losses.values()))), *self._described]
        changes = any(isinstance(one, Samples) and one.cp_group is not None for one in known)
        self._dynamic_cp = bool(agree_on(["changes"] * changes, ["changes"], [groups.dp_cp, groups.pp]))
        report = attempt(self._report)
        if isinstance(report, Exception):
            report = Report(groups.pp.rank(), unknown=[f"a rank could not measure: {report}"])
        reports: list[Report] = gather_to_first([report], groups)
        if reports:
            sizes = {f"{name}_size": getattr(groups, name).size() for name in ("dp", "cp", "tp", "pp")}
            if self._dynamic_cp:
                sizes |= {"dp_size": groups.dp_cp.size(), "cp_size": 1}
            number = max(one.num_microbatches for one in reports)
            per_token = bool(self._config.calculate_per_token_loss)
            self.steps = assembled(reports, Split(num_microbatches=number, per_token=per_token, **sizes))
            self.log_prob_gap = log_prob_gap([part for one in reports for part in chain(*one.terms.values())])

    def _report(self) -> Report:
        report = Report(self._groups.pp.rank(), self._factors, float(self._loss_scale))
        report.unknown += _cannot_know(self._config)
        if self._dynamic_cp:
            report.notes.append(
                "Context-parallel groups change: a DP rank is a group's first, a micro-batch its size and turn."
            )
        elif any(getattr(self._config, name, False) for name in CHANGING_CP):
            report.unknown.append(
                "The context-parallel group changes between micro-batches: a token's place is not known. Say each "
                "one's group, Samples(..., cp_group=...)."
            )
        (report.unknown if self.computes_loss and not self._factors else report.notes).extend(self._without_anchor)
        if self.computes_loss and self._groups.tp.rank() == 0:  # over TP, a token's gradient is everywhere the same
            self._add_terms(report)
        return report

    def _add_terms(self, report: Report) -> None:
        terms = self._taps.losses or ({OUTPUT: self._outputs} if self._outputs else {})
        if not terms:
            report.unknown.append(NO_TAP)
        dtypes = {tapped.dtype for of_term in terms.values() for tapped in of_term.values()}
        report.loss_dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        numbers = (number + 1 for of_term in terms.values() for number in of_term)
        report.num_microbatches = max([self._taps.num_microbatches, *numbers])
        if all(one.num_terms == report.num_microbatches for one in self._anchors[-1:]):
            report.auxiliary = {name: self._of_one_call(name, scales) for name, scales in self._auxiliary.items()}
        for number in range(report.num_microbatches):
            tapped = {term: of_term.get(number) for term, of_term in terms.items()}
            told = [one.samples for one in tapped.values() if one is not None and one.samples is not None]
            described = [*told, *self._described[number : number + 1]]
            if not described:
                report.unknown.append(
                    "The masks are not known. Give samples_of, or say tap(per_token_loss, samples=...) each time."
                )
            elif isinstance(described[0], Exception):
                report.unknown.append(f"samples_of failed: {type(described[0]).__name__}: {described[0]}")
            else:
                self._add_parts(report, number, tapped, described[0])

    def _add_parts(self, report: Report, number: int, tapped: dict[str, TappedLosses | None], samples: Samples) -> None:
        """A part for each term; one may have a mask of its own, over the same tokens."""
        dp_rank, (cp_rank, cp_size) = self._groups.dp.rank(), samples.place_in(self._groups.cp)
        if self._dynamic_cp:  # the place of a group: its first rank, its size, and its turn
            dp_cp, (cp_rank, cp_size) = self._groups.dp_cp, samples.place_in(None)
            dp_rank = dp_cp.rank()
            if samples.cp_group is not None:
                dp_rank = dist.get_group_rank(dp_cp, dist.get_global_rank(samples.cp_group, 0))
            number = self._turns[dp_rank, cp_size] * dp_cp.size() + cp_size - 1
            self._turns[dp_rank, cp_size] += 1
        positions = samples.local(cp_rank, cp_size).positions
        rows: dict[int, Rows] = {}  # once for terms of the same masks
        for term, of_term in tapped.items():
            losses = of_term or TappedLosses((0,), torch.float32, samples)
            own = samples if losses.samples is None else losses.samples
            gradient, term_of = losses.gradient, losses.term
            if gradient is not None and gradient.numel() != len(positions):
                report.unknown.append(
                    f"In micro-batch {number} losses of shape {losses.shape} were tapped as {term!r}, but by its "
                    f"samples and layout a rank holds {len(positions)} tokens. Tap one loss per token, in the "
                    "layout's order, or correct the layout."
                )
                gradient = torch.zeros(len(positions))
            if cp_rank == 0 and id(own) not in rows:
                rows[id(own)] = Rows.of(own.local(0, cp_size))
            log_probs = [one.cpu().numpy() for one in losses.log_probs]
            if any(len(one) != len(positions) for one in log_probs):
                counts = " and ".join(str(len(one)) for one in log_probs)
                report.notes.append(f"log-probs of {counts} tokens were tapped where a rank holds {len(positions)}")
                log_probs = []
            part = Part(
                dp_rank=dp_rank,
                cp_rank=cp_rank,
                microbatch=number,
                rows=rows.get(id(own)),
                positions=positions,
                gradients=np.zeros(len(positions)) if gradient is None else gradient.cpu().numpy(),
                reached=gradient is not None,
                declared=None if term_of is None else declared(term_of),
                log_probs=np.stack(log_probs) if log_probs else None,
            )
            report.terms.setdefault(term, []).append(part)

    def _of_one_call(self, name: str, scales: list[Tensor]) -> list[float]:
        """The scales of micro-batches over those of Megatron's schedule in one call: 1, with the loss scale."""
        by_cp = self._groups.cp.size() if _SCALERS[name] is MoEAuxLossAutoScaler else 1
        usual = 1 if self._config.calculate_per_token_loss else by_cp / self._taps.num_microbatches
        return [scale / usual for scale in torch.stack(scales).tolist()]

    @property
    def why(self) -> str:
        """Why `deviation` is not known, as far as this rank can tell."""
        reasons = [*_cannot_know(self._config), *self._without_anchor]
        reasons += [unreadable(factor.problem) for factor in self._factors if factor.problem]
        return (
            " ".join(reasons) or "A policy loss went through no reducer of this package, or its weights are not finite."
        )

    def deviation(self) -> float | None:
        """The largest |w / expected - 1| over the step's tokens, of a loss of several terms the worst term's.

        A weight that should be 0 counts in units of the largest expected one. None where it cannot be known. All ranks
        of the last stage must call it together; None on other stages.
        """
        if not self.computes_loss:
            return None
        factors = [factor.value for factor in self._factors if not factor.problem]
        terms = self._taps.losses.items()
        losses = [one for term, of_term in terms for one in of_term.values() if one.term or term == "pg"]
        worst = torch.tensor([torch.inf], dtype=torch.float64)
        if factors and losses and not _cannot_know(self._config):
            scale = factors[-1] / float(self._loss_scale)
            off = attempt(lambda: torch.stack([_deviation(one, scale) for one in losses]))
            if not isinstance(off, Exception):
                worst[0] = off.nan_to_num(nan=torch.inf).max()
        for group in several(self._groups.dp_cp):
            all_reduce(worst, group, dist.ReduceOp.MAX)
        return None if torch.isinf(worst[0]) else float(worst[0])


def _deviation(tapped: TappedLosses, scale: float) -> Tensor:
    """Of one micro-batch's tokens on this rank, 0-dim."""
    assert tapped.expected_weights is not None
    expected = tapped.expected_weights()
    if not expected.numel():
        return expected.sum()
    weights = expected.new_zeros(()) if tapped.gradient is None else tapped.gradient.to(expected) * scale
    sizes = expected.abs()
    beside = torch.where(expected == 0, sizes.max().clamp(min=SMALLEST), sizes)
    return ((weights - expected).abs_() / beside).max()


def _cannot_know(config: Any) -> list[str]:
    """Model configurations under which hooks see nothing or groups change."""
    reasons = []
    if has_cuda_graphs(config):
        reasons.append("CUDA graphs replay a backward pass without its hooks. Audit a step without them.")
    if any((getattr(config, name, 1) or 1) > 1 for name in REMAT_SIZES):
        reasons.append("Weight-rematerialising TP reduces over further groups, which the audit does not follow.")
    return reasons


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
