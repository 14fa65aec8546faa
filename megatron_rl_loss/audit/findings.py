"""The faults of a loss function: `find_faults` measures random steps, and keeps the smallest one that shows a fault."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_rl_loss.audit.drawing import CUTS, PADDED, UNCUT, draw_step
from megatron_rl_loss.audit.judge import deviation_of, expected_weights
from megatron_rl_loss.audit.misplaced import FACTS_OF_ALL_STEPS, RANKED, take_off, trained_instead
from megatron_rl_loss.audit.simulation import (
    CallFailed,
    DrawnStep,
    FaultKind,
    LossCall,
    advantages_of_entries,
    for_labels,
)
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.core.masks import Array

#: The largest relative difference of sound weights: float32 over some hundred tokens, plus the small constants that
#: trainers add to denominators.
TOLERANCE = 1e-5
#: Large steps on which an experiment is tried: in small ones a micro-batch may have one row alone.
_TRIED = 4
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
    def is_fractional(self) -> bool:
        """True where a mask of the step holds weights, not only zeros and ones."""
        return not {entry for row in self.step.rows for entry in row.mask} <= {0, 1}

    @property
    def length(self) -> float:
        """The effort of reading the step: masked rows explain little, and weights that are as expected nothing."""
        rows = [10 + len(row.mask) + 20 * (not any(row.mask)) for row in self.step.rows]
        return sum(rows) + 500 * self.is_fractional + 1000 * np.allclose(self.weights, self.expected, rtol=TOLERANCE)

    def rows(self, units: list[str], should: str) -> list[str]:
        """The step as text, a line for each row of data: place, units, tokens and weights."""
        names = (
            only_if(self.step.dp_size > 1, ["dp_rank"])
            + only_if(self.step.num_microbatches > 1, ["microbatch"])
            + units
        )
        lines, begin = list[str](), 0
        for row in self.step.rows:
            words = [f"{_PLACES.get(name, name)} {getattr(row, name)}" for name in names]
            line = ", ".join([*words, _mask_in_words(row.mask)])
            end = begin + len(row.mask)
            if self.weights:
                line += f"  weighs {_shown(self.weights[begin:end], row.mask)}"
                line += f"{should} {_shown(self.expected[begin:end], row.mask)}"
            lines.append(line)
            begin = end
        return lines


def _mask_in_words(mask: Sequence[float]) -> str:
    if set(mask) <= {0, 1}:
        return "".join(".x"[int(entry)] for entry in mask)
    return " ".join(f"{entry:g}" if entry else "." for entry in mask)


def _shown(weights: Sequence[float], mask: Sequence[float]) -> str:
    """One number if all active tokens have the same weight and masked ones none, else a number for each token."""
    texts = [f"{weight:.4g}" for weight in weights]
    active = {text for text, entry in zip(texts, mask, strict=True) if entry}
    masked = {text for text, entry in zip(texts, mask, strict=True) if not entry}
    if len(active) < 2 and masked <= {"0"}:
        return active.pop() if active else "0"
    return " ".join(texts[:6] + only_if(len(texts) > 6, ["..."]))


def find_faults(
    measure: Measure, call: LossCall, mode: Aggregation | None, draws: int, seed: int, cut: str
) -> list[Finding]:
    """One finding for each kind of fault that steps of a cut show, on the smallest such step."""
    shown, findings, compared = dict[FaultKind, list[Finding]](), list[Finding](), list[Compared]()
    fractional_draws = -(-draws // 3) if call.fractional_masks else 0  # a quarter of all
    for number in range(draws + fractional_draws if call.cp or CUTS[cut] != "C" else 0):
        large, fractional = number % 3 == 1, number >= draws
        step = draw_step(call, CUTS[cut], f"{seed}/{cut}/{number}", is_large=large, is_fractional=fractional)
        try:
            finding = _fault_of(measure, call, mode, cut, step, compared)
        except CallFailed as failure:
            finding = Finding(cut, failure.args[0], failure.args[1], step)
        if finding is not None:
            shown.setdefault(finding.kind, []).append(finding)
    instead = None if mode is None else trained_instead(compared, TOLERANCE)
    for kind, alike in shown.items():
        first = min(alike, key=lambda finding: (_rank(finding, instead), not finding.says, finding.length))
        says = first.says
        if kind == "weights":
            says = _text_of_weights(first, alike, instead, cut)
            if first.is_fractional:  # the plainest steps are shown, so no other shows it
                says = f"where masks hold weights, {says}"
        if (kind == "weights" and mode is None) or kind == "values":
            trained = replace(call, masked_samples=False)
            steps = [draw_step(trained, CUTS[cut], f"{seed}/moved/{i}", is_large=True) for i in range(_TRIED)]
            says = next(filter(None, (_by_advantages(measure, call, step) for step in steps)), says)
        low, high = _extremes(alike)
        findings.append(replace(first, says=says, low=low, high=high))
    # Wrong weights are the fault; a mean over a micro-batch without a token, NaN, is one of its signs.
    return sorted(findings, key=lambda finding: finding.kind != "weights")


#: A step and the weights that it should have, by the mode or by the same step uncut.
Compared = tuple[MeasuredStep, Array]


def _extremes(alike: Sequence[Finding]) -> tuple[float, float]:
    low, high = np.nanmin([np.inf, *(f.low for f in alike)]), np.nanmax([-np.inf, *(f.high for f in alike)])
    return float(low), float(high)


def _rank(finding: Finding, instead: tuple[str, str] | None) -> int:
    """What a finding's fact explains, 0 for the most; one of all steps that does not hold in all explains nothing."""
    if instead is not None:
        return int(finding.fact != instead[0])
    if finding.fact in FACTS_OF_ALL_STEPS or finding.fact not in RANKED:
        return len(RANKED)
    return RANKED.index(finding.fact)


def _text_of_weights(first: Finding, alike: Sequence[Finding], instead: tuple[str, str] | None, cut: str) -> str:
    """What is wrong with the weights of some steps; no ratio where all that should have weight has the right one."""
    if instead is not None:
        return instead[1]
    says = "" if first.fact in FACTS_OF_ALL_STEPS else first.says
    low, high = _extremes([finding for finding in alike if finding.is_fractional == first.is_fractional])
    if says or not first.weights:
        return says
    weights, asked = np.array(first.weights), np.array(first.expected)
    extra, lost = int(((weights != 0) & (asked == 0)).sum()), int(((weights == 0) & (asked != 0)).sum())
    if cut != UNCUT and np.allclose(weights, asked, rtol=TOLERANCE, atol=0):
        where = "the padding decides" if cut == PADDED else "the cut decides"
        return f"{where} which tokens have a weight: in this step they have the right one, and uncut another"
    if first.fact in FACTS_OF_ALL_STEPS or max(abs(low - 1), abs(high - 1)) <= TOLERANCE:
        return f"weights lie on the wrong tokens: {extra} that should have none have some, {lost} have none that should"
    apart = f"{low:.4g}" if high - low <= TOLERANCE * abs(high) else f"{low:.3g} to {high:.3g}"
    return f"tokens weigh {apart} times {'what they should' if cut == UNCUT else 'their uncut weight'}"


def _by_advantages(measure: Measure, call: LossCall, step: DrawnStep) -> str:
    """What a function does with the advantages, by moving all of them; empty where it is neither of these."""

    def gradient(factor: float, constant: float) -> Array:
        moved = step._replace(advantages=(factor, constant))
        weights = measure(moved).weights
        return weights * advantages_of_entries(moved) if call.takes == "log_probs" else weights

    try:
        own, opposite, shifted, doubled = (gradient(*by) for by in ((1, 0), (-1, 0), (1, 0.7), (2, 0)))
    except CallFailed:
        return ""

    # Of one row alone a deviation from the mean is rounding, divided by another.
    active = Counter(row[3:5] for row in step.rows if any(row.mask))
    beside = np.repeat([active[row[3:5]] > 1 for row in step.rows], [len(row.mask) for row in step.rows])

    def alike(first: Array, second: Array) -> bool:
        return bool(np.abs(first - second)[beside].max(initial=0) <= 1e-3 * np.abs(own[beside]).max(initial=0) > 0)

    if not alike(opposite, -own):  # it does not use them, or not as factors
        return ""
    if alike(shifted, own) and alike(doubled, own):
        what, remedy = "whitens advantages", "whiten_advantages"
        why = "neither a constant added to all of them nor a factor changes its gradient"
    elif alike(shifted, own):
        what, remedy, why = "centres advantages", "whiten_advantages", "a constant added to all of them changes nothing"
    elif alike(doubled, own):
        what, remedy, why = "scales advantages", "whiten_advantages", "a factor of all of them changes nothing"
    else:
        return ""
    return (
        f"it {what} itself: {why}, so each micro-batch and rank has a mean or a deviation of its own. Do so before the "
        f"step is cut, over the whole step, with {remedy}"
    )


def _fault_of(
    measure: Measure, call: LossCall, mode: Aggregation | None, cut: str, step: DrawnStep, compared: list[Compared]
) -> Finding | None:
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
        rows = [*for_labels(step._replace(rows=tuple(rows)), call).rows]
    pairs = zip(step.rows, rows, strict=True)
    kept = np.concatenate([np.arange(len(row.mask)) < len(cut_row.mask) for row, cut_row in pairs])
    plain = np.zeros(len(weights))
    plain[kept] = weights if cut == UNCUT else measure(DrawnStep(tuple(rows), seed=step.seed)).weights
    asked = plain if mode is None else expected_weights(measured, mode)
    wanted = asked if cut == UNCUT else plain
    fits_mask = bool(
        ((wanted != 0) == (measured.tokens.mask != 0)).all()
    )  # else its own zeros would be read as the mask
    if fits_mask:
        compared.append((measured, wanted))
    if deviation_of(measured, wanted) <= TOLERANCE:
        return None
    if ((weights != 0) != (wanted != 0)).any() and mode is None:
        text = (
            "trains on other tokens than uncut: it selects them, by value say, among those of a micro-batch or rank. "
            "Select before the step, or over the whole step with keep_tokens"
        )
        return Finding(cut, "weights", text, step, tuple(weights.tolist()), tuple(asked.tolist()), fact="selected")
    facts = take_off(measured, wanted, TOLERANCE).misplaced
    facts = sorted(
        [fact for fact in facts if (fits_mask or fact.name == "stray") and fact.name in RANKED],
        key=lambda fact: RANKED.index(fact.name),
    )
    ratio = weights[wanted != 0] / wanted[wanted != 0]
    low, high = float(ratio.min(initial=np.inf)), float(ratio.max(initial=-np.inf))
    name, says = (facts[0].name, facts[0].text) if facts else ("", "")
    return Finding(cut, "weights", says, step, tuple(weights.tolist()), tuple(asked.tolist()), low, high, name)


def _zero_by_zero(step: DrawnStep, weights: Array) -> str:
    """The likely reason of a gradient that is NaN: a mean over no token."""
    ends = np.cumsum([len(row.mask) for row in step.rows])[:-1]
    is_lost = [not np.isfinite(row_weights).all() for row_weights in np.split(weights, ends)]
    lost = {row[3:] for row, lost_here in zip(step.rows, is_lost, strict=True) if lost_here}
    beside = [row for row in step.rows if row[3:] in lost]  # in the same micro-batches
    if not any(any(row.mask) for row in beside) and beside:
        return ", perhaps by a masked mean of 0/0 in a micro-batch without an active token"
    is_of_rows = not all(any(row.mask) for row in beside)
    return only_if(is_of_rows, ", perhaps by a masked mean of 0/0 over a row without an active token")
