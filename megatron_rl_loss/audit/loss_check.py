"""`check_loss`: is a loss function, or a mode, invariant, and is it what it is meant to be? PyTorch alone."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_rl_loss.audit.search import CP, MICROBATCHES, PADDED, UNCUT, Cut, Finding, Search, two_rows
from megatron_rl_loss.audit.simulation import CALLS, CallFailed, LossCall, LossFunction, asked_for, measure
from megatron_rl_loss.audit.verdict import in_words
from megatron_rl_loss.errors import check_choice, check_int
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.samples import LocalTokens
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import UnitCounting


@dataclass(frozen=True)
class LossReport:
    """What `check_loss` found."""

    name: str  # of the loss function, or of the mode
    expected: Aggregation | None  # the mode it was said to be
    call: str  # what was assumed of the trainer
    draws: int  # random steps tried of each cut
    seed: int  # of these
    findings: tuple[Finding, ...]  # what is wrong; none if nothing is
    lowest_sum: float  # of all weights of an uncut step, over the draws: 1 for a mean
    highest_sum: float
    negative: bool  # whether a weight was below 0
    notes: tuple[str, ...] = ()  # what is worth knowing beside that

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: invariant and, if a mode was said, that mode."""
        return not self.findings

    @property
    def invariant(self) -> bool:
        """Whether tokens weigh the same however the step is cut, be it the right mode or another."""
        return all(finding.kind == "weights" and finding.cut == UNCUT.name for finding in self.findings)

    def __str__(self) -> str:
        mode = "" if self.expected is None or self.name == self.expected.mode.name else f"{in_words(self.expected)}: "
        verdict = "sound" if self.sound else "invariant, but NOT that" if self.invariant else "NOT invariant"
        below = ", some weights are below 0" if self.negative else ""
        lines = [
            f"{self.name}: {mode}{verdict}",
            f"  assumed: {self.call}; {self.draws} random steps per cut, seed {self.seed}",
            f"  weights of a step sum to {self.lowest_sum:.6g} to {self.highest_sum:.6g}{below}",
        ]
        return "\n".join([*lines, *map(str, self.findings), *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        expected = None if self.expected is None else in_words(self.expected)
        said = {"expected": expected, "sound": self.sound, "invariant": self.invariant, "notes": list(self.notes)}
        return {**vars(self), **said, "findings": [one.to_json() for one in self.findings]}


def check_loss(
    loss_fn: LossFunction | None = None,
    mode: str | ModeFunction | None = None,
    *,
    call: LossCall | str = "pytorch",
    divisor: float | None = None,
    units: UnitCounting | None = None,
    draws: int = 20,
    seed: int = 0,
) -> LossReport:
    """Does a loss function give every token the weight that a mode says, however its trainer cuts the step?

    >>> def my_loss(losses, mask, num_items_in_batch):
    ...     return (losses * mask).sum() / num_items_in_batch
    >>> check_loss(my_loss, "token_mean", call="transformers").sound
    True

    Without a function the mode itself is checked, one of your own above all, in every layout:

    >>> check_loss(mode="sample_mean", draws=3).sound
    True

    Ragged random steps are cut into micro-batches, data-parallel and context-parallel ranks. The function is called as
    the trainer would, and each token's weight is the derivative of what the optimizer gets by that token's loss.

    Args:
        loss_fn: ``loss_fn(losses, mask, ...)`` returns a loss. Its other parameters are given by name what they ask
            for (`GIVEN` in docs/audit.md, and the trainer's own words).
        mode, divisor, units: what it is meant to be, as in `make_pg_loss_reducer`; None asks for invariance alone.
        call: how a trainer calls the function and divides afterwards: a `LossCall`, or the name of one of `CALLS`.
        draws: random steps for each way of cutting.
        seed: of the random steps.

    Raises:
        TypeError, ValueError: a function that cannot be called so, or that fails on a plain step of two full rows (with
            its own error as the cause); a mode, divisor or call that there is not.
    """
    if isinstance(call, str):
        check_choice("call", call, CALLS)
        call = CALLS[call]
    elif not isinstance(call, LossCall):
        raise TypeError(
            f"call is a {type(call).__name__}: it must be a LossCall, or the name of a trainer. Choose one of "
            f"{', '.join(CALLS)}, or say what your loop does with LossCall(...)."
        )
    check_int("draws", draws, 1, "Draw some steps")
    check_int("seed", seed, 0, "Any number will do")
    if mode is None and (divisor, units) != (None, None):
        raise ValueError(
            f"divisor {divisor!r} and units {units!r} without a mode: without one, only invariance is asked for. Name "
            "the mode that they belong to."
        )
    expected = None if mode is None else resolve(mode, divisor=divisor, units=units)
    if loss_fn is None:
        if expected is None:
            raise TypeError("check_loss of nothing: it checks a function, a mode, or both. Give loss_fn or mode.")
        return _check_mode(expected, draws, seed)
    _, left_alone = asked_for(loss_fn, call)
    plain = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    name = getattr(plain, "__name__", None) or type(plain).__name__
    try:
        measure(loss_fn, call, two_rows(call))
    except CallFailed as failure:
        raise ValueError(
            f"{name} with a step of two full rows: {failure}: it must return one number that gradients flow from. Give "
            "it what it takes by LossCall(rows=..., takes=..., names=...), or wrap it."
        ) from failure.__cause__
    search = Search(loss_fn, call, expected, draws, seed)
    findings = tuple(search.findings())
    notes = [f"parameter {parameter} was left at its default" for parameter in left_alone] + search.notes()
    return LossReport(name, expected, call.describe(), draws, seed, findings, *search.sums(), tuple(notes))


_CUTS_OF_MODES: dict[Literal["zigzag", "contiguous", "gathered", "responses"], tuple[Cut, ...]] = {
    "zigzag": (UNCUT, MICROBATCHES, PADDED, CP),
    "contiguous": (MICROBATCHES, CP),
    "gathered": (CP,),
    "responses": (CP,),
}


def _mode_loss(aggregation: Aggregation) -> LossFunction:
    """A mode as a loss function: the weighted sum of what a rank holds."""

    def loss(losses: Tensor, mask: Tensor, local: LocalTokens, totals: StepTotals) -> Tensor:
        weights = weigh(aggregation, local, totals)
        return (torch.where(weights != 0, losses, 0) * weights).sum()

    loss.sums = list(aggregation.mode.sums.values())  # type: ignore[attr-defined]  # `measure` counts them too
    return loss


def _check_mode(expected: Aggregation, draws: int, seed: int) -> LossReport:
    """In every layout. Cutting over data-parallel ranks is cutting into micro-batches: totals are the whole step's."""
    findings: dict[str, Finding] = {}
    sums = math.nan, math.nan, False
    for layout, cuts in _CUTS_OF_MODES.items():
        split = layout in ("contiguous", "responses")  # rollouts over several samples
        call = LossCall(rows="packed", dp="sum", cp="sum", cp_cut=layout, split_rollouts=split)
        search = Search(_mode_loss(expected), call, expected, draws, seed)
        for cut in cuts:
            name = f"{cut.name}, {layout}" if cut.cp else cut.name
            for found in search.of_cut(cut):
                findings.setdefault(name, replace(found, cut=name))
        if UNCUT in cuts:
            sums = search.sums()
    assumed = "its own weights, in every layout"
    return LossReport(expected.mode.name, expected, assumed, draws, seed, tuple(findings.values()), *sums)
