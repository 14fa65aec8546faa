"""`check_loss`: measures the weights of a loss function or a mode on random steps, cut in all ways. PyTorch alone."""

import contextlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit import simulation
from megatron_rl_loss.audit.causes import HINTS, OF_MEGATRON
from megatron_rl_loss.audit.judge import deviation_of, expected_weights, explain
from megatron_rl_loss.audit.misplaced import take_off
from megatron_rl_loss.audit.simulation import (
    CALLS,
    LAYOUTS,
    PARAMETERS,
    CallFailed,
    Described,
    DrawnRow,
    DrawnStep,
    Kind,
    LossCall,
    OfRow,
)
from megatron_rl_loss.errors import check_callable, check_choice, check_int, check_mapping
from megatron_rl_loss.modes.aggregation import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.weights import rehearse, weigh
from megatron_rl_loss.step.collectives import StepGroups
from megatron_rl_loss.step.counting import count_step
from megatron_rl_loss.step.masks import Array
from megatron_rl_loss.step.samples import LocalTokens
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import UnitCounting

#: The largest relative difference of sound weights: float32 over some hundred tokens, plus the small constants that
#: trainers add to denominators.
TOLERANCE = 1e-5
UNCUT, TOGETHER = "in one micro-batch on one rank", "over all of these together"
PADDED = "with masked tokens behind rows"
_PLAIN_ROWS = (DrawnRow((1, 1, 1)), DrawnRow((1, 1), 1, 1))
_PLACES = {"dp_rank": "DP rank", "microbatch": "micro-batch"}
#: Ways of cutting a step: over micro-batches (K), data-parallel (D) and context-parallel ranks (C).
CUTS = {
    **{"over micro-batches": "K", "over data-parallel ranks": "D", "over context-parallel ranks": "C"},
    **{UNCUT: "", PADDED: "", TOGETHER: "KDC"},
}
#: Kind, text and change of the losses' seed of faults that show when an uncut step is measured again.
_REPEATED: tuple[tuple[Kind, str, int], ...] = (
    ("chance", "called twice with the same losses, it gives tokens different weights", 0),
    ("values", "not linear in the losses (with log-probs: or it ignores advantages), so it is no aggregation", 1),
)


@dataclass(frozen=True)
class Finding:
    """One fault, on the smallest drawn step that shows it."""

    cut: str  # of that step, in words
    kind: Kind
    says: str
    step: DrawnStep  # `measure(loss_fn, call, step)` gives `weights` again
    weights: tuple[float, ...] = ()  # of each mask entry of the step; empty if none were measured
    expected: tuple[float, ...] = ()  # by the asked mode; without a mode, of the same step uncut
    low: float = np.nan  # over all draws of the cut: the smallest weight / expected or uncut weight
    high: float = np.nan  # the largest
    fact: str = ""  # name of the fact about weight in the wrong places

    @property
    def length(self) -> float:
        """The effort of reading the step: masked rows explain little, and weights that are as expected nothing."""
        rows = [10 + len(row.mask) + 20 * (not any(row.mask)) for row in self.step.rows]
        return sum(rows) + 1000 * np.allclose(self.weights, self.expected, rtol=TOLERANCE)

    def rows(self, units: list[str], should: str) -> list[str]:
        """The step as text, a line for each row of data: place, units, tokens and weights."""
        names = ["dp_rank"] * (self.step.dp_size > 1) + ["microbatch"] * (self.step.num_microbatches > 1) + units
        lines, begin = list[str](), 0
        for row in self.step.rows:
            words = [f"{_PLACES.get(name, name)} {getattr(row, name)}" for name in names]
            line = ", ".join([*words, "".join(".x"[entry] for entry in row.mask)])
            end = begin + len(row.mask)
            if self.weights:
                line += f"  weighs {_shown(self.weights[begin:end], row.mask)}"
                line += f"{should} {_shown(self.expected[begin:end], row.mask)}"
            lines.append(line)
            begin = end
        return lines


def _shown(weights: Sequence[float], mask: Sequence[int]) -> str:
    """One number if all active tokens have the same weight and masked ones none, else a number for each token."""
    texts = [f"{weight:.4g}" for weight in weights]
    active = {text for text, entry in zip(texts, mask, strict=True) if entry}
    masked = {text for text, entry in zip(texts, mask, strict=True) if not entry}
    if len(active) < 2 and masked <= {"0"}:
        return active.pop() if active else "0"
    return " ".join(texts[:6] + ["..."] * (len(texts) > 6))


@dataclass(frozen=True)
class LossReport:
    """The findings of `check_loss`."""

    name: str  # of the loss function, or of the mode
    expected: Aggregation | None  # the mode that was asked
    call: str  # the assumed trainer, in words
    draws: int  # random steps of each cut
    seed: int  # of the random steps
    findings: tuple[Finding, ...]  # faults; empty if there are none
    causes: tuple[str, ...] = ()  # each fits all of some larger steps, the simplest first
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """True without findings: weights are invariant, and those of the mode if one was asked."""
        return not self.findings

    @property
    def invariant(self) -> bool:
        """True if tokens weigh the same in every cut of the step, by the right mode or another."""
        return all(finding.kind == "weights" and finding.cut == UNCUT for finding in self.findings)

    def __str__(self) -> str:
        mode = "" if self.expected is None or self.expected.mode.name == self.name else str(self.expected)
        if self.sound:
            lines = [f"SOUND: {self.name} is {mode or 'invariant'}, however the step is cut"]
        elif self.invariant:
            lines = [f"NOT SOUND: {self.name} is invariant, but not {mode}"]
        else:
            fails = any(finding.kind != "weights" for finding in self.findings)
            how = "fails, or is no aggregation of losses" if fails else "is not invariant"
            lines = [f"NOT SOUND: {self.name} {how}" + f"; expected {mode}" * bool(mode)]
        lines += [f"  {finding.cut}: {finding.says}" for finding in self.findings]
        lines += [f"  fits: {cause}" for cause in self.causes[:1]]
        for first in self.findings[:1]:
            said = f"{self.name} {mode} {self.call} {self.causes}"
            should = ", should weigh" if self.expected and mode else ", uncut"
            rows = first.rows([unit for unit in ("rollout", "prompt") if unit in said], should)
            cp = f", each row cut over {first.step.cp_size} CP ranks" * (first.step.cp_size > 1)
            lines += [f"  the smallest step {first.cut} that shows it (x trained, . masked{cp}):"]
            room = max(1, 10 - len(self.findings) - len(self.notes))  # of 15 lines
            lines += [f"    {row}" for row in rows[:room]] + [f"    and {len(rows) - room} more"] * (len(rows) > room)
        lines.append(f"  assumed: {self.call}; {self.draws} draws of each cut, seed {self.seed}")
        if not self.findings:
            lines += ["  covers rows of at most 11 tokens, 5 micro-batches, 4 DP and 4 CP ranks; not checked: the real"]
            lines += ["  calls and divisions of your loop, the losses of tokens, other terms (KL, entropy), clipping"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; unknown values of a finding are left out."""
        known = [{name: value for name, value in vars(finding).items() if value == value} for finding in self.findings]
        findings = [fields | {"step": repr(fields["step"])} for fields in known]
        expected = None if self.expected is None else str(self.expected)
        said = {"sound": self.sound, "invariant": self.invariant, "expected": expected, "findings": findings}
        return {**vars(self), **said}


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
        mode, divisor, units: the intended aggregation, as in `make_pg_loss_reducer`; None checks invariance alone.
        call: the trainer's call of the function and its later divisions: a `LossCall`, or a name in `CALLS`.
        draws: number of random steps for each way of cutting.
        ids, labels: that a mode of your own reads, by name: a function of a `DrawnRow` (its `mask`, `rollout` and
            `prompt`), such as ``ids={"task": lambda row: row.prompt // 2}``. Rows have ``session`` and ``turn`` ids.

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
    if not isinstance(call, LossCall):
        check_choice("call", call, CALLS)
        call = CALLS[call]
    check_int("draws", draws, 1, "Give a number such as 20, the default")
    check_int("seed", seed, 0, "Give a number such as 0, the default")
    if mode is None and (loss_fn is None or (divisor, units) != (None, None)):
        raise ValueError(
            f"loss_fn {loss_fn!r}, divisor {divisor!r} and units {units!r} without a mode: only a function can be "
            "checked without a mode, and divisor and units belong to one. Name a mode."
        )
    expected = None if mode is None else resolve(mode, divisor=divisor, units=units)
    for what, by_name in (("ids", ids), ("labels", labels)):
        check_mapping(what, by_name or {}, 'Pass functions of a row: {"task": lambda row: row.prompt // 2}')
        for key, of_row in (by_name or {}).items():
            check_callable(f"{what}[{key!r}]", of_row, "it must be a function of a row", "Pass lambda row: row.prompt")
    described = Described(ids or {}, labels or {})
    if expected is not None:
        _check_keys(expected, described)
    if loss_fn is None and expected is not None:
        return _check_mode(expected, draws, seed, described)
    run = partial(simulation.measure, loss_fn, call, described=described)
    plain: Any = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    name = getattr(plain, "__name__", None) or type(plain).__name__
    try:
        run(DrawnStep(_PLAIN_ROWS))
    except CallFailed as failure:
        remedy = "Describe its call in LossCall(rows=..., takes=..., names=...), or wrap the function."
        if "missing" in failure.args[1]:
            remedy = f"Parameters named {', '.join(PARAMETERS)} get values. {remedy}"
        if "returns a tuple" in failure.args[1]:
            remedy = (
                'Megatron scales a tuple such as (loss, num_tokens, report): pass call="megatron", or '
                '"megatron_per_token" with calculate_per_token_loss.'
            )
        tuples = "(loss, num_tokens, report) or (loss, report) to Megatron's schedule, the loss"
        result = "one number" if call.returns == "loss" else f"{tuples} one number"
        raise ValueError(
            f"{name} with a step of two full rows: {failure.args[1]}; it must return {result} with a gradient, given "
            f"{call.takes}, the mask and the parameters that help(LossCall) lists. {remedy}"
        ) from failure.__cause__
    parameters = list(inspect.signature(run.args[0]).parameters.values())[2:]
    filled = {*simulation.asked_for(loss_fn, call), *getattr(loss_fn, "keywords", ())}
    optional = [parameter.name for parameter in parameters if parameter.default is not parameter.empty]
    left = [parameter for parameter in optional if parameter not in filled]
    notes = [f"parameter {parameter} was left at its default" for parameter in left]
    look = partial(_findings, run, call, expected, draws, seed)
    findings, causes = look(UNCUT), tuple[str, ...]()
    if failures := [finding for finding in findings if finding.kind != "weights"]:
        findings = failures
    else:
        one_cut = [finding for cut, over in CUTS.items() if len(over) == 1 for finding in look(cut)]
        findings += (one_cut or look(TOGETHER)) + look(PADDED)
    with contextlib.suppress(CallFailed):
        if expected is not None and {finding.kind for finding in findings} == {"weights"}:
            steps = [run(_draw(call, "KDC", f"{seed}/causes/{i}", telling=True)) for i in range(8)]
            fitting_causes = explain(steps, expected, tolerance=TOLERANCE)
            hints = HINTS if call.returns == "loss" else HINTS | OF_MEGATRON
            causes = tuple(cause.describe(hints).replace(f"x {cause.factor:.6g} = ", "x ") for cause in fitting_causes)
        holed = DrawnStep((DrawnRow((1, 0, 1)), DrawnRow((1, 1), 1, 1)))
        if not np.isfinite(run(holed, poisoned=True).weights).all():
            notes.append("a NaN at a masked token spoils the loss; select by the mask (torch.where) before multiplying")
    return LossReport(name, expected, call.describe(), draws, seed, tuple(findings), causes, tuple(notes))


def _check_keys(expected: Aggregation, described: Described) -> None:
    """Raise ValueError for a mode that reads ids or labels which drawn rows do not have."""
    samples = simulation.samples_of(_PLAIN_ROWS, LossCall(), 1, described)
    try:
        rehearse(expected, samples)
    except ValueError as error:
        rule = f"{error}".partition(". Pass Samples(")[0]
        raise ValueError(
            f"{rule}. Drawn rows have rollout, prompt, session and turn ids: give check_loss the others as functions "
            'of a row, ids={"task": lambda row: row.prompt // 2}, or labels={...}.'
        ) from error


def _check_mode(expected: Aggregation, draws: int, seed: int, described: Described) -> LossReport:
    """Check a mode as a loss function in every layout."""
    plain = simulation.samples_of(_PLAIN_ROWS, LossCall(), 1, described)
    of_mode = count_step([plain], StepGroups(), sums=list(expected.mode.sums.values()))
    weigh(expected, plain.local(0, 1), of_mode)  # a mode's own error is not one of a loss function's

    def loss(losses: Tensor, mask: Tensor, local: LocalTokens, totals: StepTotals) -> Tensor:
        weights = weigh(expected, local, totals)
        return (torch.where(weights != 0, losses, 0) * weights).sum()

    loss.sums, loss.__name__ = list(expected.mode.sums.values()), expected.mode.name  # type: ignore[attr-defined]
    findings: dict[str, Finding] = {}
    for number, layout in enumerate(LAYOUTS):  # every second one with rollouts over several rows
        call = LossCall(rows="packed", dp="sum", cp="sum", cp_cut=layout, split_rollouts=number % 2 == 1)
        report = check_loss(loss, call=call, draws=draws, seed=seed, ids=described.ids, labels=described.labels)
        for finding in report.findings:
            cut = f"{finding.cut}, {layout}" if CUTS.get(finding.cut) == "C" else finding.cut
            findings.setdefault(cut, replace(finding, cut=cut))
    assumed = "its own weights, in every layout"
    notes = (
        "this compares cuts of a step; whether the formula is the one that you mean, compare with your own numbers",
    )
    return LossReport(expected.mode.name, expected, assumed, draws, seed, tuple(findings.values()), notes=notes)


def _findings(run: Any, call: LossCall, mode: Aggregation | None, draws: int, seed: int, cut: str) -> list[Finding]:
    """One finding for each kind of fault that steps of a cut show, on the smallest such step."""
    shown, findings = dict[Kind, list[Finding]](), list[Finding]()
    for number in range(draws if call.cp or CUTS[cut] != "C" else 0):
        step = _draw(call, CUTS[cut], f"{seed}/{cut}/{number}", telling=number % 3 == 1)
        try:
            finding = _look(run, mode, cut, step)
        except CallFailed as failure:
            finding = Finding(cut, failure.args[0], failure.args[1], step)
        if finding is not None:
            shown.setdefault(finding.kind, []).append(finding)
    for alike in shown.values():
        low, high = min(finding.low for finding in alike), max(finding.high for finding in alike)
        apart = f"{low:.4g}" if high - low <= TOLERANCE * abs(high) else f"{low:.3g} to {high:.3g}"
        certain = [
            finding for finding in alike if finding.fact != "shift"
        ] or alike  # a shift shows on all steps, or is none
        first = min(certain, key=lambda finding: (not finding.says, finding.length))
        times = "what they should" if cut == UNCUT else "their uncut weight"
        says = first.says or f"tokens weigh {apart} times {times}"
        findings.append(replace(first, says=says, low=low, high=high))
    return findings


def _look(run: Any, mode: Aggregation | None, cut: str, step: DrawnStep) -> Finding | None:
    """The fault of a step: an uncut step is compared with the mode's weights, a cut one with its uncut weights."""
    measured = run(step)
    weights = measured.weights
    number = int((~np.isfinite(weights)).sum())
    if number or not np.isfinite(measured.stray[1]):
        where = f"{number} of {len(weights)} tokens" if number else "padding"
        return Finding(cut, "NaN", f"the gradient is NaN or infinite at {where}{_zero_by_zero(step, weights)}", step)
    for kind, says, seed in _REPEATED if cut == UNCUT else ():
        other = run(step._replace(seed=step.seed + seed))
        if deviation_of(replace(other, stray=(0, 0.0)), weights) > TOLERANCE:
            return Finding(cut, kind, says, step)
    rows = [row._replace(dp_rank=0, microbatch=0) for row in step.rows]
    if cut == PADDED:  # beside the same rows without the masked tokens at their ends
        rows = [row._replace(mask=row.mask[: 1 + max(np.flatnonzero(row.mask), default=0)]) for row in rows]
    pairs = zip(step.rows, rows, strict=True)
    kept = np.concatenate([np.arange(len(row.mask)) < len(cut_row.mask) for row, cut_row in pairs])
    plain = np.zeros(len(weights))
    plain[kept] = weights if cut == UNCUT else run(DrawnStep(tuple(rows), seed=step.seed)).weights
    asked = plain if mode is None else expected_weights(measured, mode)
    wanted = asked if cut == UNCUT else plain
    if deviation_of(measured, wanted) <= TOLERANCE:
        return None
    of_mask = ((wanted != 0) == (measured.tokens.mask != 0)).all()  # else its own zeros would be read as the mask
    facts = take_off(measured, wanted, TOLERANCE).misplaced[-1:] if of_mask else []  # the last says most
    ratio = weights[wanted != 0] / wanted[wanted != 0]
    low, high = float(ratio.min(initial=np.inf)), float(ratio.max(initial=-np.inf))
    name, says = (facts[0].name, facts[0].text) if facts else ("", "")
    return Finding(cut, "weights", says, step, tuple(weights.tolist()), tuple(asked.tolist()), low, high, name)


def _zero_by_zero(step: DrawnStep, weights: Array) -> str:
    """The likely reason of a gradient that is NaN: a mean over no token."""
    ends = np.cumsum([len(row.mask) for row in step.rows])[:-1]
    is_lost = [not np.isfinite(of_row).all() for of_row in np.split(weights, ends)]
    lost = {row[3:] for row, lost_here in zip(step.rows, is_lost, strict=True) if lost_here}
    beside = [row for row in step.rows if row[3:] in lost]  # in the same micro-batches
    if not any(any(row.mask) for row in beside) and beside:
        return ", perhaps by a masked mean of 0/0 in a micro-batch without an active token"
    is_of_rows = not all(any(row.mask) for row in beside)
    return ", perhaps by a masked mean of 0/0 over a row without an active token" * is_of_rows


def _draw(call: LossCall, over: str, seed: str, telling: bool) -> DrawnStep:
    """A random step with an active token; large if telling, else small."""
    rng = random.Random(seed)
    most, longest = (3, 11) if telling else (2, 3)
    ends = {"K": (3, 5), "D": (2, 4), "C": (2, 4)}
    K, D, C = ((rng.randint(*ends[size]) if telling else 2) if size in over else 1 for size in ends)
    least, most = (1, most) if K * D > 1 else (most - 1, most**2)  # rows of a micro-batch
    even = rng.randint(least, most)
    numbers = {
        place: even if call.even_microbatches else rng.randint(least, most) for place in product(range(D), range(K))
    }
    places = [place for place, number in numbers.items() for _ in range(number)]
    rows = list[DrawnRow]()
    for i in range(len(places)):
        rollout, prompt = i, rng.randint(0, len(places) // 3)
        if i in (0, len(places) - 1):
            prompt = int(i > 0)  # two prompts at least
        if call.split_rollouts and (i == 1 or (i and rng.random() < 0.4)):
            rollout, prompt = rows[-1].rollout, rows[-1].prompt
        share = rng.choice([0.0, 0.5, 1.0]) if i else 1.0  # of a fully masked step nothing is trained
        mask = tuple(int(rng.random() < share) for _ in range(rng.randint(1, longest)))
        rows.append(DrawnRow(mask if any(mask) or call.masked_samples else (1, *mask[1:]), rollout, prompt))
    rng.shuffle(rows)
    placed = tuple(row._replace(dp_rank=d, microbatch=k) for row, (d, k) in zip(rows, places, strict=True))
    return DrawnStep(placed, K, D, C if call.cp else 1, rng.randrange(2**31))
