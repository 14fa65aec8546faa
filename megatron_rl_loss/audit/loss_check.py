"""`check_loss`: measures the weights of a loss function or a mode on random steps, cut in all ways. PyTorch alone.

A way through: `check_loss` checks the arguments, `simulation.measure` plays a trainer on one step of `drawing.py`,
`findings.py` compares the weights, `loss_report.py` shows what was found.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit.causes import HINTS, MEGATRON_HINTS
from megatron_rl_loss.audit.drawing import CUTS, PADDED, TOGETHER, UNCUT, draw_step
from megatron_rl_loss.audit.findings import TOLERANCE, Finding, Measure, find_faults
from megatron_rl_loss.audit.judge import deviation_of, expected_weights, explain, nearest_mode
from megatron_rl_loss.audit.loss_report import LossReport
from megatron_rl_loss.audit.misplaced import FACTS_OF_ALL_STEPS
from megatron_rl_loss.audit.picture import Panel
from megatron_rl_loss.audit.progress import Progress
from megatron_rl_loss.audit.simulation import (
    CALLS,
    DRAWN_LAYOUTS,
    LOG_PROB_PARAMETERS,
    PARAMETERS,
    CallFailed,
    Described,
    DrawnRow,
    DrawnStep,
    LossCall,
    OfRow,
    asked_for,
    for_labels,
    measure,
    samples_of,
)
from megatron_rl_loss.core.aggregation import Aggregation, rehearse, resolve, weigh
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import StepTotals, UnitCounting, count_step
from megatron_rl_loss.core.errors import check_callable, check_choice, check_int, check_mapping
from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.proof.own_losses import OwnLosses, judge_backward

#: A step on which every sound function works, and one with a masked token between trained ones.
_PLAIN = DrawnStep((DrawnRow((1, 1, 1)), DrawnRow((1, 1), 1, 1)))
_HOLED = DrawnStep((DrawnRow((1, 0, 1)), DrawnRow((1, 1), 1, 1)))


def check_loss(
    loss_fn: Callable[..., Tensor] | None = None,
    mode: str | Mode | ModeFunction | None = None,
    *,
    call: LossCall | str = "pytorch",
    divisor: float | None = None,
    units: UnitCounting | None = None,
    draws: int = 20,
    seed: int = 0,
    ids: Mapping[str, OfRow] | None = None,
    labels: Mapping[str, OfRow] | None = None,
    own_losses: OwnLosses | None = None,
) -> LossReport:
    """Check that a loss function gives every token the weight of a mode, in every cut of the step by its trainer.

    >>> def my_loss(losses, mask, num_items_in_batch):
    ...     return (losses * mask).sum() / num_items_in_batch
    >>> check_loss(my_loss, "token_mean", call="transformers").sound
    True

    ``check_loss(mode=my_mode)``, without a function, checks a mode of your own. Random ragged steps are cut into
    micro-batches, data-parallel and context-parallel ranks. The function is called as the trainer would call it. Each
    token's weight is the derivative of the optimizer's loss by that token's loss.

    Args:
        loss_fn: ``loss_fn(losses, mask, ...)`` returns a loss. Its other parameters get values by their names (see
            `LossCall`, and the trainer's own names).
        mode, divisor, units: the intended aggregation, as in `make_pg_loss_reducer`; None checks invariance alone: the
            gradient of cut and uncut steps of the same losses, which need not be linear in them.
        call: the trainer's call of the function and its later divisions: a `LossCall`, or a name in `CALLS`.
        draws: number of random steps for each way of cutting.
        ids, labels: that a mode of your own reads, by name: a function of a `DrawnRow` (its `mask`, `rollout` and
            `prompt`), such as ``ids={"task": lambda row: row.prompt // 2}``. Rows have ``session`` and ``turn`` ids.
        own_losses: where losses are made by code of your own, a fused kernel for instance: their backward is judged
            too, which no weight shows (see `OwnLosses`).

    Raises:
        TypeError, ValueError: a mode that lacks an id or a label; a function that cannot be called this way, or that
            fails on a plain step of two full rows (with its own error as the cause); an unknown mode or call; a wrong
            divisor.
    """
    if isinstance(loss_fn, Mode):
        raise TypeError(
            f"loss_fn is the mode {loss_fn.name!r}: it must be a function of losses and masks. Check a mode alone by "
            "check_loss(mode=...)."
        )
    if isinstance(loss_fn, str):
        raise TypeError(
            f"loss_fn is {loss_fn!r}: it must be a function of losses and masks, and the mode comes second. Pass "
            f"check_loss(my_loss, {loss_fn!r}), or check_loss(mode={loss_fn!r}) for a mode alone."
        )
    if not isinstance(call, LossCall):
        check_choice("call", call, CALLS, "or describe your trainer in a LossCall(...)")
        call = CALLS[call]
    check_int("draws", draws, 1, "Give a number such as 20, the default")
    check_int("seed", seed, 0, "Give a number such as 0, the default")
    if mode is None and (loss_fn is None or (divisor, units) != (None, None)):
        raise ValueError(
            f"loss_fn {loss_fn!r}, divisor {divisor!r} and units {units!r} without a mode: only a function can be "
            "checked without a mode, and divisor and units belong to one. Name a mode."
        )
    for what, by_name in (("ids", ids), ("labels", labels)):
        check_mapping(what, by_name or {}, 'Pass functions of a row: {"task": lambda row: row.prompt // 2}')
        for name, read in (by_name or {}).items():
            check_callable(f"{what}[{name!r}]", read, "it must be a function of a row", "Pass lambda row: row.prompt")
    described = Described(ids or {}, labels or {})
    expected = None if mode is None else resolve(mode, divisor=divisor, units=units)
    if expected is not None:
        _check_mode_runs(expected, described)
    if loss_fn is None:
        assert expected is not None
        report = _check_mode(expected, draws, seed, described)
    else:
        report = _check_function(loss_fn, expected, call, draws, seed, described)
    if own_losses is not None and (wrong := judge_backward(own_losses, seed=seed)):
        report = replace(
            report, findings=(Finding("in the losses themselves", "backward", wrong, _PLAIN), *report.findings)
        )
    return report


def _check_mode_runs(expected: Aggregation, described: Described) -> None:
    """Raise a mode's own error on a plain step; ValueError where it reads ids or labels that drawn rows do not have."""
    samples = samples_of(_PLAIN.rows, LossCall(), 1, described)
    try:
        rehearse(expected, samples)
    except ValueError as error:
        raise ValueError(
            "check_loss draws rows with rollout, prompt, session and turn ids: give it the others as functions of a "
            f'row, ids={{"task": lambda row: row.prompt // 2}}, or labels={{...}}. In a step of your own: {error}'
        ) from error
    totals = count_step([samples], StepGroups(), sums=list(expected.mode.sums.values()))
    weigh(expected, samples.local(0, 1), totals)


def _check_mode(expected: Aggregation, draws: int, seed: int, described: Described) -> LossReport:
    """Check a mode as a loss function in every layout."""

    def loss(losses: Tensor, mask: Tensor, local: LocalTokens, totals: StepTotals) -> Tensor:
        weights = weigh(expected, local, totals)
        return (torch.where(weights != 0, losses, 0) * weights).sum()

    loss.sums, loss.__name__ = list(expected.mode.sums.values()), expected.mode.name  # type: ignore[attr-defined]
    calls = [  # every second one with rollouts over several rows
        LossCall(rows="packed", dp="sum", cp="sum", cp_cut=layout, split_rollouts=number % 2 == 1)
        for number, layout in enumerate(DRAWN_LAYOUTS)
    ]
    findings: dict[str, Finding] = {}
    with Progress(f"check_loss of {expected.mode.name}", len(calls) * _NUM_LOOKS) as progress:
        for call in calls:
            for finding in _findings(_measure_of(loss, call, described), call, None, draws, seed, progress):
                cut = f"{finding.cut}, {call.cp_cut}" if CUTS.get(finding.cut) == "C" else finding.cut
                findings.setdefault(cut, replace(finding, cut=cut))
    panel = _panel(_measure_of(loss, calls[0], described), calls[0], expected, seed)
    assumed = "its own weights, in every layout"
    notes = (
        "this compares cuts of a step; whether the formula is the one that you mean, compare with your own numbers",
    )
    return LossReport(expected.mode.name, expected, assumed, draws, seed, tuple(findings.values()), (), notes, panel)


def _check_function(
    loss_fn: Any, expected: Aggregation | None, call: LossCall, draws: int, seed: int, described: Described
) -> LossReport:
    """Check a loss function; ValueError for one that fails on a plain step."""
    run = _measure_of(loss_fn, call, described)
    with Progress(f"check_loss of {_name_of(loss_fn)}", _NUM_LOOKS) as progress:
        findings, causes = _findings(run, call, expected, draws, seed, progress), tuple[str, ...]()
    notes = [f"parameter {parameter} was left at its default" for parameter in _left_at_default(loss_fn, call)]
    # A function that fails in some draws only, which the findings report, has no causes to look for.
    with contextlib.suppress(CallFailed):
        kinds, wanted = {finding.kind for finding in findings}, expected or _mode_of_uncut_steps(run, call, seed)
        if wanted is not expected:
            notes.append(f"in uncut steps its weights are those of {wanted}")
        if wanted is not None and "weights" in kinds <= {"weights", "NaN"}:
            causes = _causes(run, call, wanted, seed)
            if not causes and not any(finding.fact for finding in findings):
                notes.append("the cause cannot be told: no row of the table of causes gives these weights")
        if not np.isfinite(run(for_labels(_HOLED, call), poisoned=True).weights).all():
            notes.append("a NaN at a masked token spoils the loss; select by the mask (torch.where) before multiplying")
    name, assumed, panel = _name_of(loss_fn), call.describe(), _panel(run, call, expected, seed)
    return LossReport(name, expected, assumed, draws, seed, tuple(findings), causes, tuple(notes), panel, call.cuts)


def _panel(run: Measure, call: LossCall, expected: Aggregation | None, seed: int) -> Panel | None:
    """The weights of a large step in all cuts at once, beside those of the mode, or else of the same step uncut."""
    step = draw_step(call, CUTS[TOGETHER], f"{seed}/picture", is_large=True)
    try:
        measured = run(step)
        rows = tuple(row._replace(dp_rank=0, microbatch=0) for row in step.rows)
        uncut = step._replace(rows=rows, num_microbatches=1, dp_size=1, cp_size=1)
        asked = run(uncut).weights if expected is None else expected_weights(measured, expected)
    except CallFailed:
        return None
    beside = "the same step uncut" if expected is None else str(expected)
    cut = f"{step.num_microbatches} micro-batches x DP {step.dp_size}, CP {step.cp_size}"
    return Panel.from_weights(measured, asked, title="", says=f"a random step, {cut}; lines: {beside}")


def _measure_of(loss_fn: Any, call: LossCall, described: Described) -> Measure:
    """What measures the function's weights in a step; ValueError for a function that fails on a plain one."""
    run = partial(measure, loss_fn, call, described=described)
    try:
        run(for_labels(_PLAIN, call))
    except CallFailed as failure:
        raise _refusal(_name_of(loss_fn), call, failure.args[1]) from failure.__cause__
    return run


def _name_of(loss_fn: Any) -> str:
    plain: Any = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return getattr(plain, "__name__", None) or type(plain).__name__


#: Ways of cutting that `_findings` looks at, at most; it looks at all cuts together where no single one has a fault.
_NUM_LOOKS = len(CUTS)


def _findings(
    run: Measure, call: LossCall, expected: Aggregation | None, draws: int, seed: int, progress: Progress
) -> list[Finding]:
    """The faults of uncut steps. If these have no other faults than wrong weights, the faults of the cuts too."""

    def look(cut: str) -> list[Finding]:
        findings = find_faults(run, call, expected, draws, seed, cut)
        progress.advance()
        return findings

    findings = look(UNCUT)
    if failures := [finding for finding in findings if finding.kind != "weights"]:
        return failures
    if any(finding.fact in FACTS_OF_ALL_STEPS for finding in findings):  # behind rows they train on others by that fact
        return findings + [finding for cut, over in CUTS.items() if len(over) == 1 for finding in look(cut)]
    cut_findings = [finding for cut, over in CUTS.items() if len(over) == 1 for finding in look(cut)]
    return findings + (cut_findings or look(TOGETHER)) + look(PADDED)


def _mode_of_uncut_steps(run: Measure, call: LossCall, seed: int) -> Aggregation | None:
    """The mode without a divisor whose weights the function gives in some large uncut steps."""
    steps = [run(draw_step(call, CUTS[UNCUT], f"{seed}/uncut/{i}", is_large=True)) for i in range(8)]
    mode = nearest_mode(steps[0])
    fits = all(deviation_of(step, expected_weights(step, mode)) < TOLERANCE for step in steps)
    return mode if fits else None


def _causes(run: Measure, call: LossCall, expected: Aggregation, seed: int) -> tuple[str, ...]:
    """What explains the weights of some large steps, in words; the simplest first.

    Steps of zeros and ones first; where their weights are right, steps whose masks hold weights.
    """
    hints = HINTS if call.returns == "loss" else HINTS | MEGATRON_HINTS
    for is_fractional in (False, True)[: 1 + call.fractional_masks]:
        steps = [
            run(draw_step(call, CUTS[TOGETHER], f"{seed}/causes/{i}", is_large=True, is_fractional=is_fractional))
            for i in range(8)
        ]
        steps = [step for step in steps if np.isfinite(step.weights).all()]
        if all(deviation_of(step, expected_weights(step, expected)) <= TOLERANCE for step in steps):
            continue
        causes = explain(steps, expected, tolerance=TOLERANCE)
        return tuple(cause.describe(hints).replace(f"x {cause.factor:.6g} = ", "x ") for cause in causes)
    return ()


def _left_at_default(loss_fn: Any, call: LossCall) -> list[str]:
    """Parameters of the function that no trainer's value fills."""
    filled = {*asked_for(loss_fn, call), *getattr(loss_fn, "keywords", ())}
    beside = list(inspect.signature(loss_fn).parameters.values())[2:]
    return [
        parameter.name
        for parameter in beside
        if parameter.default is not parameter.empty and parameter.name not in filled
    ]


def _elsewhere(failure: str, call: LossCall) -> str:
    """The trainers that give a value to a parameter which is missing in this call."""
    for name in dict.fromkeys(name for other in CALLS.values() for name in other.names if name not in call.names):
        if f"'{name}'" in failure:
            trainers = [f"call={trainer!r}" for trainer, other in CALLS.items() if name in other.names]
            return f"{name} gets one with {' or '.join(trainers)}. "
    if call.takes == "losses":
        for name in (name for name in LOG_PROB_PARAMETERS if f"'{name}'" in failure):
            return f'{name} gets one with LossCall(takes="log_probs"), for a function of log-probs and the mask. '
    return ""


def _refusal(name: str, call: LossCall, failure: str) -> ValueError:
    """The error of a function that cannot be called, or returns nothing to measure."""
    result = "one number"
    if call.returns != "loss":
        result = "(loss, num_tokens, report) or (loss, report) to Megatron's schedule, the loss one number"
    remedy = "Describe its call in LossCall(rows=..., takes=..., names=...), or wrap the function."
    arguments = f"{call.takes} as the first argument, the mask as the second"
    if call.rows == "lists":
        arguments = f"{call.takes} and masks as the first two arguments, which are lists of one tensor per row"
    if "missing" in failure:
        others = [name for name in PARAMETERS if call.takes != "losses" or name not in LOG_PROB_PARAMETERS]
        remedy = f"Parameters named {', '.join([*call.names, *others])} get values. {_elsewhere(failure, call)}{remedy}"
    if "returns a tuple" in failure:
        remedy = (
            'Megatron scales a tuple such as (loss, num_tokens, report): pass call="megatron", or '
            '"megatron_per_token" with calculate_per_token_loss.'
        )
    return ValueError(
        f"{name} with a step of two full rows: {failure}; it must return {result} with a gradient, given {arguments}, "
        f"and the parameters that help(LossCall) lists. {remedy}"
    )
