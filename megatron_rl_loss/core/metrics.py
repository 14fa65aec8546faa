"""Metrics of a step: averaged over samples, tokens, prompts or any key, and reduced once, after its last micro-batch.

A mean is over the units that have a token of nonzero weight, whatever the loss counts: a fully masked rollout has no
value, and as 0 it would pull the mean of the others down.

A micro-batch notes its values (`Note`). `reduce_notes` reduces the notes of all micro-batches and ranks to the step's
values. Names travel along, so a rank or micro-batch without a metric adds nothing to that metric.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation, resolve
from megatron_rl_loss.core.collectives import (
    Group,
    all_reduce,
    attempt,
    device_of,
    failure_of,
    gather_objects,
    raise_together,
)
from megatron_rl_loss.core.counting import StepTotals, UnitCounting
from megatron_rl_loss.core.errors import check_choice, did_you_mean
from megatron_rl_loss.core.ids import hashed
from megatron_rl_loss.core.modes import available_modes, find_mode, unit_mean
from megatron_rl_loss.core.reducers import WeightedSum

MetricKind = Literal["mean", "min", "max", "variance", "ess"]

_EXTREMES, _MOMENTS = ("min", "max"), ("variance", "ess")
#: The mode whose weights make a mean over it; ``none`` is a plain sum by the mask. Other names are modes, or keys.
MODE_OF: dict[str, str] = {
    "samples": "sample_mean",
    "tokens": "token_mean",
    "prompts": "prompt_mean",
    "none": "token_sum",
}


@dataclass(frozen=True)
class Metric:
    """A metric of the step, not differentiated; with the weights w of its mode, E[x] = sum w x / sum w.

    Attributes:
        values: one for each token this rank holds, in the layout's order; NaN where masked is ignored.
        over: ``samples``, ``tokens`` or ``prompts`` for a mean over those of them that have an active token; ``none``
            for the plain sum of m * values; the name of ids for the mean over their active units of token means, each
            unit's tokens pooled; or a mode's name (``sample_mean``), which counts units as the policy loss does.
        kind: ``mean`` (with ``none`` the sum); ``min`` and ``max`` of the tokens of nonzero weight; ``variance``,
            E[v^2] - E[v]^2 of sums in float32, so to about 1e-6 of E[v^2];
            ``ess``, the effective sample size as a share, E[v]^2 / E[v^2].
        mask: one of the samples' ``term_masks`` in place of the loss mask.
    """

    values: Tensor
    over: str = "samples"
    _: KW_ONLY
    kind: MetricKind = "mean"
    mask: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.over, str):
            raise TypeError(f"a metric over {self.over!r}: over must be the name of a mode or of ids. Pass 'samples'.")
        check_choice("kind of metric", self.kind, get_args(MetricKind))

    def rows(self) -> list[Tensor]:
        """The rows to sum by the weights: the values, or for moments 1, v and v^2."""
        values = self.values.detach()
        if self.kind not in _MOMENTS:
            return [values]
        return [torch.ones_like(values), values, values.square()]

    def note(self, sums: Sequence[Tensor], reducer: WeightedSum) -> "Note":
        """The note of this rank's part, of the sums of its rows."""
        if self.kind not in _EXTREMES:
            return Note(self.kind, sums[0][None] if len(sums) == 1 else torch.stack(list(sums)), self.mask, reducer.by)
        values = self.values.detach().reshape(-1).float() * (-1 if self.kind == "min" else 1)
        active = values.masked_fill(reducer.weights_on(values.device) == 0, -torch.inf)
        return Note(self.kind, torch.cat([active, values.new_full((1,), -torch.inf)]).amax()[None], self.mask)


def aggregation_over(over: str, loss_units: UnitCounting, totals: StepTotals) -> Aggregation:
    """The aggregation of a metric that is a mean over it.

    In a step without a fully masked unit it counts as the loss does: the weights are then the same, and shared.
    """
    name, mode = MODE_OF.get(over), find_mode(over)
    if name is None and mode is None and over not in totals.units:
        if not totals.units["sample"].number["all"]:  # without a sample there are no ids: 0 of 0 units, as any mean
            return resolve("sample_mean", units="active")
        known = dict.fromkeys([*MODE_OF, *available_modes(), *totals.units])
        raise ValueError(
            f"a metric over {over!r}: there are no such units or ids in the step. "
            + (f"Pass kind={over!r}." if over in get_args(MetricKind) else f"{did_you_mean(over, list(known))}.")
        )
    if mode is not None and mode.divisor == "required":
        raise ValueError(f"a metric over {over!r}: a metric has no divisor. Pass 'none' for the plain sum.")
    alike = all(units.number.get(loss_units) == units.number["active"] for units in totals.units.values())
    by_loss = alike or (name is None and mode is not None) or name in ("token_mean", "token_sum")
    return resolve(name or mode or unit_mean(over), units=loss_units if by_loss else "active")


class Note(NamedTuple):
    """A part of a step's value, from one micro-batch: float32 [1], of moments [3]; by a mask and an aggregation."""

    kind: MetricKind
    part: Tensor
    mask: str | None = None
    by: str = ""


def reduce_notes(
    microbatch_notes: Sequence[Mapping[str, Note]],
    groups: Sequence[Group],
    has_tokens: Callable[[int, str | None], bool],
    failure: Exception | None,
    forms: Iterable[str] = (),
) -> dict[str, Tensor]:
    """The step's value of each metric, 0-dim float32, the same on all ranks of the groups, which call it together.

    One collective compares names, one adds up sums, one takes maxima, each over every group. Extremes and variances
    are NaN without an active token.

    Args:
        has_tokens: (micro-batch, mask) -> True where this rank holds active tokens of it.
        failure: an error of this rank that all ranks are to raise.
        forms: in which this rank returned its shares.

    Raises:
        BadBatchError: on all ranks (the error itself where there is one), for a failure of any; for a micro-batch that
            has active tokens and lacks a metric; ValueError for a name of two kinds, and for shares in two forms.
    """

    def described() -> tuple[_Reported, list[str], float]:
        mine = {(name, note.kind, note.mask, note.by) for notes in microbatch_notes for name, note in notes.items()}
        reported, in_forms = sorted(mine, key=repr), sorted(forms)
        return reported, in_forms, float(hashed(repr((reported, in_forms)), 48))

    mine = attempt(described)
    failure = failure or failure_of(mine)
    known = _agree_on(*(([], [], -1.0) if isinstance(mine, Exception) else mine), groups)
    summed = attempt(lambda: _summed(microbatch_notes, known, groups, has_tokens, failure))
    failure = failure or failure_of(summed)
    if isinstance(summed, Exception):
        summed = _summed([], known, groups, has_tokens, failure)  # nothing, of the same sizes
    sums, maxima = summed
    for values, op in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        for group in groups if len(values) else []:
            all_reduce(values, group, op)
    raise_together(float(sums[0]) > 0, failure, groups)
    sizes = [3 if kind in _MOMENTS else 1 for _, kind, *_ in known if kind not in _EXTREMES]
    parts = dict(zip([name for name, kind, *_ in known if kind not in _EXTREMES], sums[1:].split(sizes), strict=True))
    parts |= dict(zip([name for name, kind, *_ in known if kind in _EXTREMES], maxima[:, None], strict=True))
    return {name: _value(kind, parts[name]).float() for name, kind, *_ in known}


def _summed(
    microbatch_notes: Sequence[Mapping[str, Note]],
    known: "_Reported",
    groups: Sequence[Group],
    has_tokens: Callable[[int, str | None], bool],
    failure: Exception | None,
) -> tuple[Tensor, Tensor]:
    """This rank's sums, behind a flag for a failure, and its maxima; of the known metrics in their order."""
    device = next((note.part.device for notes in microbatch_notes for note in notes.values()), None)
    device = device or (device_of(groups[0]) if groups else torch.device("cpu"))
    missing: ValueError | None = None
    for name, _, mask, _ in known if failure is None else []:
        for number, notes in enumerate(microbatch_notes):
            if name not in notes and has_tokens(number, mask):
                missing = ValueError(
                    f"micro-batch {number} reports {list(notes)}, while another, maybe of another rank, reports "
                    f"{name!r}: the tokens of micro-batch {number} would count as 0 in {name!r}. Report {name!r} in "
                    "every micro-batch that has active tokens of it."
                )
    if missing is not None:
        raise missing
    sums, maxima = dict[str, Tensor](), dict[str, Tensor]()
    for name, kind, *_ in known:
        size, least = (3 if kind in _MOMENTS else 1), (-torch.inf if kind in _EXTREMES else 0.0)
        # float64, for float32 parts of thousands of micro-batches and ranks are added up.
        nothing = torch.full((size,), least, dtype=torch.float64, device=device)
        parts = torch.stack([nothing, *(notes[name].part for notes in microbatch_notes if name in notes)])
        if kind in _EXTREMES:
            maxima[name] = parts.amax(0)
        else:
            sums[name] = parts.sum(0)
    # An error travels with the sums, so that a step without one needs no collective for it.
    failed = torch.full((1,), float(failure is not None), dtype=torch.float64, device=device)
    # Torch cannot join no tensors at all: without extremes there is still an empty one, which is not exchanged.
    return torch.cat([failed, *sums.values()]), torch.cat([failed[:0], *maxima.values()])


def _value(kind: MetricKind, part: Tensor) -> Tensor:
    if kind == "mean":
        return part[0]
    if kind in _EXTREMES:
        value = part[0].masked_fill(part[0] == -torch.inf, torch.nan)
        return -value if kind == "min" else value
    mean, square = part[1] / part[0], part[2] / part[0]
    # float32 sums: rounding may leave a variance below 0
    return mean.square() / square if kind == "ess" else (square - mean.square()).clamp(min=0)


#: Name, kind, mask and aggregation of each metric.
_Reported = list[tuple[str, MetricKind, str | None, str]]


def _agree_on(mine: _Reported, forms: list[str], digest: float, groups: Sequence[Group]) -> _Reported:
    """Name, kind, mask and aggregation of each metric that some rank reports, in one order on all ranks."""
    if groups:
        # The largest digest and, of the negated one, the smallest: one reduction tells whether all ranks report alike,
        # and only if not do they exchange names. A float64 holds 48 bits exactly.
        agreed = torch.tensor([digest, -digest], dtype=torch.float64, device="cpu")
        for group in groups:
            all_reduce(agreed, group, dist.ReduceOp.MAX)
        if float(agreed[0]) != -float(agreed[1]):
            known, all_forms = set(mine), set(forms)
            for group in groups:
                gathered = gather_objects((known, all_forms), group)
                known, all_forms = (set[Any]().union(*parts) for parts in zip(*gathered, strict=True))
            mine, forms = sorted(known, key=repr), sorted(all_forms)
    if len(forms) > 1:
        raise ValueError(
            f"losses of a step in the forms {forms}: gradients of all ranks are scaled alike, so all losses must have "
            "one form. Pass the same form on every rank, or none."
        )
    names = [name for name, *_ in mine]
    if twice := [entry for entry in mine if names.count(entry[0]) > 1]:
        raise ValueError(
            f"metrics {twice}: a name must have one kind, mask, aggregation and coefficient in a step. Report a "
            "metric, or a term of the loss, alike in every micro-batch and on every rank."
        )
    return mine
