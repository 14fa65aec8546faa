"""The faults of a loss function: `find_faults` measures random steps, and keeps the smallest one that shows a fault."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_rl_loss.audit.drawing import CUTS, PADDED, UNCUT, draw_step
from megatron_rl_loss.audit.judge import deviation_of, expected_weights
from megatron_rl_loss.audit.misplaced import take_off
from megatron_rl_loss.audit.simulation import CallFailed, DrawnStep, FaultKind, LossCall
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.masks import Array

#: The largest relative difference of sound weights: float32 over some hundred tokens, plus the small constants that
#: trainers add to denominators.
TOLERANCE = 1e-5
_PLACES = {"dp_rank": "DP rank", "microbatch": "micro-batch"}
#: Kind, text and change of the losses' seed of faults that show when an uncut step is measured again.
_REPEATED: tuple[tuple[FaultKind, str, int], ...] = (
    ("chance", "called twice with the same losses, it gives tokens different weights", 0),
    ("values", "not linear in the losses (with log-probs: or it ignores advantages), so it is no aggregation", 1),
)


class Measure(Protocol):
    """A loss function as `simulation.measure` calls it: a drawn step -> the weights of its tokens."""

    def __call__(self, step: DrawnStep, *, poisoned: bool = False) -> MeasuredStep: ...


@dataclass(frozen=True)
class Finding:
    """One fault, on the smallest drawn step that shows it."""

    cut: str  # of that step, in words
    kind: FaultKind
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


def find_faults(
    measure: Measure, call: LossCall, mode: Aggregation | None, draws: int, seed: int, cut: str
) -> list[Finding]:
    """One finding for each kind of fault that steps of a cut show, on the smallest such step."""
    shown, findings = dict[FaultKind, list[Finding]](), list[Finding]()
    for number in range(draws if call.cp or CUTS[cut] != "C" else 0):
        step = draw_step(call, CUTS[cut], f"{seed}/{cut}/{number}", is_large=number % 3 == 1)
        try:
            finding = _fault_of(measure, mode, cut, step)
        except CallFailed as failure:
            finding = Finding(cut, failure.args[0], failure.args[1], step)
        if finding is not None:
            shown.setdefault(finding.kind, []).append(finding)
    for alike in shown.values():
        low, high = np.nanmin([np.inf, *(f.low for f in alike)]), np.nanmax([-np.inf, *(f.high for f in alike)])
        apart = f"{low:.4g}" if high - low <= TOLERANCE * abs(high) else f"{low:.3g} to {high:.3g}"
        # A shift shows on all steps, or is none: the text of another fault is the surer one.
        certain = [finding for finding in alike if finding.fact != "shift"]
        first = min(certain or alike, key=lambda finding: (not finding.says, finding.length))
        times = "what they should" if cut == UNCUT else "their uncut weight"
        says = first.says or f"tokens weigh {apart} times {times}"
        findings.append(replace(first, says=says, low=float(low), high=float(high)))
    # Wrong weights are the fault; a mean over a micro-batch without a token, NaN, is one of its signs.
    return sorted(findings, key=lambda finding: finding.kind != "weights")


def _fault_of(measure: Measure, mode: Aggregation | None, cut: str, step: DrawnStep) -> Finding | None:
    """The fault of a step: an uncut step is compared with the mode's weights, a cut one with its uncut weights."""
    measured = measure(step)
    weights = measured.weights
    number = int((~np.isfinite(weights)).sum())
    if number or not np.isfinite(measured.stray[1]):
        where = f"{number} of {len(weights)} tokens" if number else "padding"
        return Finding(cut, "NaN", f"the gradient is NaN or infinite at {where}{_zero_by_zero(step, weights)}", step)
    # Without a mode the gradients of cut and uncut steps of the same losses are compared, linear in these or not.
    for kind, says, seed in _REPEATED[: 1 if mode is None else None] if cut == UNCUT else ():
        other = measure(step._replace(seed=step.seed + seed))
        if deviation_of(replace(other, stray=(0, 0.0)), weights) > TOLERANCE:
            return Finding(cut, kind, says, step)
    rows = [row._replace(dp_rank=0, microbatch=0) for row in step.rows]
    if cut == PADDED:  # beside the same rows without the masked tokens at their ends
        rows = [row._replace(mask=row.mask[: 1 + max(np.flatnonzero(row.mask), default=0)]) for row in rows]
    pairs = zip(step.rows, rows, strict=True)
    kept = np.concatenate([np.arange(len(row.mask)) < len(cut_row.mask) for row, cut_row in pairs])
    plain = np.zeros(len(weights))
    plain[kept] = weights if cut == UNCUT else measure(DrawnStep(tuple(rows), seed=step.seed)).weights
    asked = plain if mode is None else expected_weights(measured, mode)
    wanted = asked if cut == UNCUT else plain
    if deviation_of(measured, wanted) <= TOLERANCE:
        return None
    if ((weights != 0) != (wanted != 0)).any() and mode is None:
        text = (
            "trains on other tokens than uncut: it selects them, by value say, among those of a micro-batch or rank. "
            "Select before the step, or over the whole step with keep_tokens"
        )
        return Finding(cut, "weights", text, step, tuple(weights.tolist()), tuple(asked.tolist()))
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
