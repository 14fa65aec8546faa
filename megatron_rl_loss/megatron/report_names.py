"""The names that reports have: Megatron sums reports name by name, so all ranks must have the same, in one order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.plan.plan import Plan
from megatron_rl_loss.reduction.metrics import Kind
from megatron_rl_loss.step.collectives import gather_objects, several


class _Reported(NamedTuple):
    by_share: bool  # through `Microbatch.report`, so that no token makes a share of 0
    kind: Kind | None  # of a metric that no sum of shares is
    mask: str | None  # of the tokens that it is about


_Names = Mapping[str, _Reported]


class ReportNames:
    """Compared over the ranks in the first step, trained on or evaluated; later each rank keeps to them by itself.

    What a micro-batch leaves out because it has none of its tokens is put in as 0: that is its share.
    """

    def __init__(self) -> None:
        self._agreed: dict[bool, _Names] = {}

    def align(self, reports: Sequence[Any], microbatches: Sequence[Microbatch], plan: Plan, *, training: bool) -> None:
        """Give all reports of a step the same names. All ranks that computed losses call it at the step's end.

        Raises ValueError where a micro-batch leaves out a name and has tokens; in the first step on all ranks.
        """
        if not reports or len(reports) != len(microbatches) or not all(isinstance(one, dict) for one in reports):
            return
        names = [_names(report, plan) for report in reports]
        mine = _union(names)
        if training not in self._agreed:
            masks = [None, *microbatches[0].samples.by_mask]
            with_tokens_of = [[mask for mask in masks if microbatch.has_tokens(mask)] for microbatch in microbatches]
            self._agreed[training] = _agreed(list(zip(names, with_tokens_of, strict=True)), plan)
        absent = {name: one for name, one in self._agreed[training].items() if name not in mine}
        if not all(one.by_share and not any(m.has_tokens(one.mask) for m in microbatches) for one in absent.values()):
            self._agreed[training] = absent = {}  # names change from step to step: nothing is known of other ranks'
        names_of_step = {**self._agreed[training], **mine}
        for report, there, microbatch in zip(reports, names, microbatches, strict=True):
            left_out = {name: one for name, one in names_of_step.items() if name not in there}
            with_tokens = [one.mask for one in left_out.values() if microbatch.has_tokens(one.mask)]
            _check(left_out, there, names_of_step, with_tokens)
            device = next(iter(report.values())).device if report else microbatch.tokens.mask.device
            _, denominator = plan.constants_on(device)
            report |= {name: torch.stack([torch.zeros_like(denominator), denominator]) for name in left_out}
            _reorder(report, names_of_step)
        for name, one in absent.items():
            if one.kind is not None:
                of_nothing = torch.full((), -torch.inf) if one.kind in ("min", "max") else torch.zeros(3)
                plan.parts.add(name, one.kind, of_nothing.double().to(device))
        _reorder(plan.parts.kinds, names_of_step)


def _names(report: Mapping[str, Any], plan: Plan) -> _Names:
    """Of what Megatron sums over the ranks: pairs."""
    kinds, masks, ours = plan.parts.kinds, plan.report_masks, plan.report_names
    pairs = [name for name, value in report.items() if isinstance(value, Tensor) and value.numel() == 2]
    return {name: _Reported(name in ours, kinds.get(name), masks.get(name)) for name in pairs}


def _union(names: Iterable[_Names]) -> _Names:
    return {name: one for there in names for name, one in there.items()}


def _reorder(values: dict[str, Any], names: _Names) -> None:
    ordered = {name: values[name] for name in names if name in values} | values
    values.clear()
    values |= ordered


def _agreed(mine: list[tuple[_Names, list[str | None]]], plan: Plan) -> _Names:
    """What any rank reports, from each micro-batch's names and the masks that it has tokens of."""
    for group in several(plan.dp_group, plan.cp_group):
        mine = [one for part in gather_objects(mine, group) for one in part]
    union = _union(names for names, _ in mine)
    for names, masks in mine:
        _check({name: one for name, one in union.items() if name not in names}, names, union, masks)
    return union


def _check(left_out: _Names, there: _Names, names: _Names, masks: Sequence[str | None]) -> None:
    """Refuse a micro-batch that leaves out what it has tokens of."""
    if any(not one.by_share or one.mask in masks for one in left_out.values()):
        raise ValueError(
            f"a micro-batch that reports {list(there)}, while another one, maybe of another rank, reports "
            f"{list(names)}: Megatron sums them name by name. Report the same names every time, on every rank; only a "
            "metric of tokens that a micro-batch has none of may be left out there."
        )
