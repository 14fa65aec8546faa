"""`check_loss`: is a loss function, or a mode, invariant, and is it what it is meant to be? PyTorch alone."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit.mode_table import row_of
from megatron_rl_loss.audit.simulation import (
    CALLS, CallFailed, DrawnSample, DrawnStep, LossCall, LossFunction, asked_for, measure,
)  # fmt: skip
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep
from megatron_rl_loss.audit.verdict import explain, in_words
from megatron_rl_loss.errors import check_choice, check_int
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.samples import LocalTokens
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import UnitCounting

#: What weights may be off by, relatively: float32 over some hundred tokens, and the small constants that trainers add
#: to a denominator.
TOLERANCE = 1e-5
#: Weights are wrong, or depend on the losses' values or on chance; a call raises, or returns no loss, a loss without a
#: graph, or NaN.
Kind = Literal["weights", "values", "chance", "raises", "no loss", "no graph", "NaN"]
UNCUT, TOGETHER = "in one micro-batch on one rank", "over all of these together"
#: Over what a step is cut: micro-batches (K), data-parallel (D) and context-parallel ranks (C); or rows are padded (P).
CUTS = {
    UNCUT: "", "over micro-batches": "K", "over data-parallel ranks": "D", "over context-parallel ranks": "C",
    TOGETHER: "KDC", "with masks as long as padded slots": "P",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, on the smallest drawn step that shows it."""

    cut: str  # how that step is cut, in words
    kind: Kind
    says: str  # what it is, over all draws
    step: DrawnStep  # `measure` of the function, its call and this gives `weights` again
    weights: tuple[float, ...] = ()  # of each mask entry of it; empty where there is none
    expected: tuple[float, ...] = ()  # of the mode that was asked; without one, of the same step uncut

    def rows(self, units: Sequence[str]) -> list[str]:
        """The step, a line per row: where it is, its units and tokens, and what they weigh and should weigh."""
        lines, at, split = list[str](), 0, (len(self.step.ranks) > 1, len(self.step.ranks[0]) > 1)
        for d, k, row in [(d, k, row) for d, rank in enumerate(self.step.ranks) for k, mb in enumerate(rank) for row in mb]:
            places = [f"DP rank {d}"] * split[0] + [f"micro-batch {k}"] * split[1]
            here = slice(at, at := at + len(row.mask))
            numbers = [_shown(values[here], row.mask) for values in (self.weights, self.expected)]
            line = ", ".join([*places, *(f"{unit} {getattr(row, unit)}" for unit in units), "".join(".x"[m] for m in row.mask)])
            lines.append(line + "  weighs {}, should weigh {}".format(*numbers) * bool(self.weights))
        return lines


def _shown(weights: Sequence[float], mask: Sequence[int]) -> str:
    """Weights of a row, beside its mask: one number where that tells all."""
    shown = [f"{weight:.4g}" for weight in weights]
    alike = {one for one, entry in zip(shown, mask, strict=False) if entry or one != "0"} or {"0"}
    return alike.pop() if len(alike) == 1 else " ".join(shown[:6] + ["..."] * (len(shown) > 6))


@dataclass(frozen=True)
class LossReport:
    """What `check_loss` found."""

    name: str  # of the loss function, or of the mode
    expected: Aggregation | None  # the mode it was said to be
    call: str  # what was assumed of the trainer
    draws: int  # random steps tried of each cut
    seed: int  # of these
    findings: tuple[Finding, ...]  # what is wrong; none if nothing is
    causes: tuple[str, ...] = ()  # each fits all steps of all cuts, the simplest first; none where nothing does
    notes: tuple[str, ...] = ()  # what is worth knowing beside that

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: invariant and, if a mode was said, that mode."""
        return not self.findings

    @property
    def invariant(self) -> bool:
        """Whether tokens weigh the same however the step is cut, be it the right mode or another."""
        return all(finding.kind == "weights" and finding.cut == UNCUT for finding in self.findings)

    def __str__(self) -> str:
        mode = in_words(self.expected) if self.expected and self.expected.mode.name != self.name else ""
        said = f"is {mode or 'invariant'}, however the step is cut"
        if self.findings:
            weighs = all(finding.kind == "weights" for finding in self.findings)
            said = "is not invariant" if weighs else "is no aggregation of its losses, or fails"
            said = f"is invariant, but not {mode}" if self.invariant else said + f"; asked {mode}" * bool(mode)
        lines = [f"{'NOT ' * bool(self.findings)}SOUND: {self.name} {said}"]
        lines += [f"  {finding.cut}: {finding.says}" for finding in self.findings]
        lines += [f"  a cause that fits every step: {cause}" for cause in self.causes[:2]]
        for finding in self.findings[:1]:
            rows, own = finding.step.rows, self.expected is not None and row_of(self.expected.mode)
            units = ["rollout"] * (len({row.rollout for row in rows}) < len(rows))
            units += ["prompt"] * (own is None or (own is not False and own.unit == "prompt"))
            cut = f", every row cut over {finding.step.cp_size} CP ranks" * (finding.step.cp_size > 1)
            shown = finding.rows(units)
            lines += [f"  the smallest of the steps that show it (x trained, . masked{cut}):"]
            lines += [f"    {line}" for line in shown[:5]] + [f"    and {len(rows) - 5} rows more"] * (len(rows) > 5)
        lines.append(f"  assumed: {self.call}; {self.draws} random steps per cut, seed {self.seed}")
        if self.sound:
            lines += ["  covers rows of at most 11 tokens, 5 micro-batches, 4 DP and 4 CP ranks; cannot see how your loop"]
            lines += ["  really calls and divides, what makes the losses, other terms (KL, entropy) and clipping"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        findings = [{**vars(finding), "step": repr(finding.step)} for finding in self.findings]
        expected = None if self.expected is None else in_words(self.expected)
        said = {"sound": self.sound, "invariant": self.invariant, "expected": expected, "findings": findings}
        return {**vars(self), **said}


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
    notes = [f"parameter {parameter} was left at its default" for parameter in asked_for(loss_fn, call)[1]]
    plain = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    name = getattr(plain, "__name__", None) or type(plain).__name__
    run = partial(measure, loss_fn, call)
    full, holed = (DrawnStep((((DrawnSample((1, m, 1), 0, 0), DrawnSample((1, 1), 1, 1)),),)) for m in (1, 0))
    try:
        run(full)
    except CallFailed as failure:
        raise ValueError(
            f"{name} with a step of two full rows: {failure.args[1]}: it must return one number that gradients flow "
            "from. Give it what it takes by LossCall(rows=..., takes=..., names=...), or wrap it."
        ) from failure.__cause__
    cuts = [cut for cut, over in CUTS.items() if over != "P" and (call.cp or over != "C")]
    findings, steps = _search(run, call, expected, cuts, draws, seed)
    if not np.isfinite(run(holed, poisoned=True).weights).all():
        notes.append("a NaN at a masked token spoils the loss; select by the mask (torch.where) before multiplying")
    weigh_alone = expected is not None and {finding.kind for finding in findings} == {"weights"}
    causes = explain(steps, expected) if expected is not None and weigh_alone else ()
    return LossReport(name, expected, call.describe(), draws, seed, tuple(findings), causes, tuple(notes))


def _check_mode(expected: Aggregation, draws: int, seed: int) -> LossReport:
    """A mode as a loss function, in every layout; DP ranks are as micro-batches to it: totals are the whole step's."""

    def loss(losses: Tensor, mask: Tensor, local: LocalTokens, totals: StepTotals) -> Tensor:
        weights = weigh(expected, local, totals)
        return (torch.where(weights != 0, losses, 0) * weights).sum()

    findings: dict[str, Finding] = {}
    cut_over = {"zigzag": "KCP", "contiguous": "KC", "gathered": "C", "responses": "C"}
    for layout, over in cut_over.items():
        call = LossCall(rows="packed", dp="sum", cp="sum", cp_cut=layout, split_rollouts=layout[0] in "cr")  # type: ignore[arg-type]
        run = partial(measure, loss, call, sums=list(expected.mode.sums.values()))
        for found in _search(run, call, None, [cut for cut in CUTS if CUTS[cut] in (*over, "")], draws, seed)[0]:
            cut = f"{found.cut}, {layout}" if CUTS[found.cut] == "C" else found.cut
            findings.setdefault(cut, replace(found, cut=cut))
    assumed = "its own weights, in every layout"
    return LossReport(expected.mode.name, expected, assumed, draws, seed, tuple(findings.values()))


def _search(
    run: Callable[..., MeasuredStep], call: LossCall, mode: Aggregation | None, cuts: Sequence[str], draws: int, seed: int
) -> tuple[list[Finding], list[MeasuredStep]]:
    """One finding for each kind and cut, on the smallest step that shows it; and measured steps of all cuts.

    An uncut step is compared with the mode; one that is cut with itself uncut, so that each cut shows its own fault.
    """
    findings, steps = list[Finding](), list[MeasuredStep]()
    for cut in cuts:
        found: dict[Kind, list[Finding]] = {}
        for draw in range(draws):
            step, uncut = _draw(random.Random(f"{seed}/{cut}/{draw}"), call, CUTS[cut], bool(draw % 2), seed + draw)
            try:
                measured = run(step)
                plain = measured.weights if cut == UNCUT else run(uncut).weights
                if CUTS[cut] == "P":  # nothing is asked of padding
                    pieces = zip(np.split(plain, np.cumsum([len(row.mask) for row in uncut.rows])), step.rows, strict=False)
                    plain = np.concatenate([np.pad(piece, (0, len(row.mask) - len(piece))) for piece, row in pieces])
                asked = plain if mode is None else weigh(mode, step.samples().local(0, 1), step.totals(list(mode.mode.sums.values()))).double().numpy()
                kind, says = _fault(measured, asked if cut == UNCUT else plain)
                if cut == UNCUT and kind != "NaN" and _fault(run(step._replace(seed=step.seed + 1000)), measured.weights)[0]:
                    kind, says = "values", "not linear in the losses: a token's weight depends on their values, so no aggregation describes it"
                    if _fault(run(step), measured.weights):
                        kind, says = "chance", "called twice with the same losses, it gives tokens other weights"
            except CallFailed as failure:
                kind, says = failure.args
                found.setdefault(kind, []).append(Finding(cut, kind, says, step))
                continue
            steps += [measured] * (draw < 4)
            if kind:
                numbers = () if kind == "NaN" else (tuple(measured.weights.tolist()), tuple(asked.tolist()))
                found.setdefault(kind, []).append(Finding(cut, kind, says, step, *numbers))
        for kind, shown in found.items():
            special = [one for one in shown if one.says] or shown
            findings.append(min(shown, key=lambda one: len(one.weights)))
        if cut == UNCUT and found.keys() - {"weights"}:
            break
    return findings, steps
