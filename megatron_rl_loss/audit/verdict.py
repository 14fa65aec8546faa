"""`judge`: are a step's measured weights what was asked, and if not, of what could they be made?

It goes from the outside in: NaN, weight on other tokens than asked, signs, odd tokens. These are facts, and taken off.
The rest is one number for each cell, measured / asked, which is shown as it is and fitted (`fit.py`).
"""

import math
from dataclasses import replace
from typing import get_args

import numpy as np

from megatron_rl_loss.audit.comparison import Comparison, StepSamples
from megatron_rl_loss.audit.counts import Cells
from megatron_rl_loss.audit.fit import Fitter, Reading
from megatron_rl_loss.audit.places import (
    Kept,
    deviation,
    places_of,
    take_off_misplaced,
    take_off_odd_tokens,
    take_off_signs,
)
from megatron_rl_loss.audit.report import Verdict
from megatron_rl_loss.audit.tokens import MeasuredStep, extremes
from megatron_rl_loss.audit.words import place_reading, with_words
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import MODES, Mode, OwnMode
from megatron_rl_loss.step.totals import UnitCounting

#: What a weight that is measured and one that is asked for may differ by, relative, by the type that gradients were
#: rounded to. Of float32: some ten products on either side, and what a measurement's own residual may be. Of half
#: precision what a gradient is stored in counts alone, a few times.
TOLERANCES = {"float32": 64 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}


def judge(measured: MeasuredStep, expected: Aggregation | None = None) -> Verdict:
    """The verdict on a measured step.

    Args:
        measured: the step's tokens and what each was found to weigh.
        expected: what it should be; None takes the nearest mode that has no divisor, and says so.

    A term's coefficient (``facts["coefficient"]``) is divided out first: the rest is to be its mode.
    """
    tokens, notes, unknown = measured.tokens, measured.notes, measured.unknown
    words = "nothing" if expected is None else in_words(expected)
    coef = measured.facts.get("coefficient", 1.0)
    if coef == 0:
        unknown = (*unknown, "The term's coefficient is 0: it trains nothing.")
    if unknown:
        return Verdict(expected=words, sound=False, unknown=unknown, notes=notes)
    if coef != 1:
        places, size = measured.stray
        measured = replace(measured, weights=measured.weights / coef, stray=(places, size / abs(coef)))
        notes = (*notes, f"the term's coefficient, {coef:g}, is divided out")
    tolerance = TOLERANCES[measured.facts.get("rounding", "float32")]
    samples = StepSamples(tokens)
    unseen = int(tokens.sample.max(initial=-1)) + 1 - len(np.unique(tokens.sample))
    if unseen:
        notes = (*notes, f"{unseen} samples have no mask entry and are not seen: a mode that counts them looks off")
    if expected is None:
        expected = _nearest(measured, samples, tolerance)
        notes = (*notes, f"nothing was asked for: compared with the nearest mode, {expected.mode.name}")
    try:
        step = Comparison(measured, expected, samples.weights(expected), tolerance)
    except (ValueError, KeyError) as error:  # a mode over labels, which a measured step does not have
        if not isinstance(expected.mode, OwnMode):
            raise
        why = f"What {expected.mode.name} asks for cannot be made from masks and ids alone. {error}"
        return Verdict(expected=words, sound=False, unknown=(why,), notes=notes)
    ratio = step.ratio if step.ratio.size and np.isfinite(measured.weights).all() else np.array([math.nan])
    verdict = Verdict(
        expected=in_words(expected),
        sound=step.deviation() <= tolerance,
        deviation=step.deviation(),
        misplaced=step.misplaced(),
        low=float(ratio.min()),
        high=float(ratio.max()),
        tokens=int(step.wanted.sum()),
        total=float(measured.weights.sum() + measured.stray[1]),
        expected_total=float(step.expected.sum()),
        pieces=step.pieces(),
        notes=notes,
    )
    return verdict if verdict.sound else _explained(verdict, step)


def in_words(expected: Aggregation) -> str:
    """The mode, its divisor if it has one, and its unit counting where it has units."""
    mode = expected.mode
    divisor = "" if expected.divisor is None else f" with divisor {expected.divisor:g}"
    counting = f", unit counting {expected.units}" if isinstance(mode, Mode) and mode.unit != "step" else ""
    return f"{mode.name}{divisor}{counting}"


@np.errstate(divide="ignore", invalid="ignore")  # a count may be 0 where nothing is asked for
def _explained(verdict: Verdict, step: Comparison) -> Verdict:
    """The verdict with deviations, numbers and readings."""
    kept = take_off_misplaced(step)
    if len(kept.entries):
        take_off_signs(kept)
        cells = Cells(step.tokens, step.measured.split)
        take_off_odd_tokens(kept, cells.of_entry[kept.entries], 2 * step.tolerance)
        readings = _readings(kept, cells)
        shape, factors = places_of(kept, kept.ratio, 2 * step.tolerance)
        verdict = replace(verdict, shape=shape, factors=factors, readings=tuple(readings))
    return replace(verdict, deviations=tuple(kept.deviations))


def _readings(kept: Kept, cells: Cells) -> list[Reading]:
    """Of what was kept, with the mask as it is; or, where fractions fit no reading, with them left out or squared."""
    mask = kept.step.tokens.mask[kept.entries]
    choices = [(0, "")]
    if not ((mask == 1) | (mask == 0)).all():
        choices += [(-1, "fraction_ignored"), (1, "mask_squared")]
    found = []
    for power, name in choices:
        rest = replace(kept, weights=kept.weights / mask**power if power else kept.weights)
        if readings := _readings_of(rest, cells):
            found.append((readings[0].cost + 0.7 * abs(power), power, name, rest.weights, readings))
    if not found:
        return []
    _, power, name, weights, readings = min(found, key=lambda one: one[0])
    if name:
        kept.deviations.append(deviation(name, factors=places_of(kept, mask**power, 1e-12)[1]))
        kept.weights = weights
    if kept.deviations and len(readings) == 1 and not readings[0].counts and not readings[0].places:
        return [one for one in readings if abs(one.factor - 1) > 2 * kept.step.tolerance]
    return readings


def _readings_of(kept: Kept, cells: Cells) -> list[Reading]:
    step = kept.step
    tolerance = 2 * step.tolerance  # of a ratio of two measured weights
    at = cells.of_entry[kept.entries]
    low, high = extremes(at, kept.ratio, len(cells))
    active = np.flatnonzero((cells.tokens > 0) & (high >= low))
    if not active.size or (low[active] <= 0).any() or (high - low > tolerance * low)[active].any():
        return []
    beside = np.zeros(len(cells))  # of a mode of one's own that varies within cells any of its weights
    beside[at] = kept.expected / step.tokens.mask[kept.entries]
    of_cell = (low[active] + high[active]) / 2
    fitter = Fitter(cells, active, step.aggregation, beside[active], step.measured.facts, tolerance)
    readings = [with_words(one, fitter, of_cell) for one in fitter.readings(of_cell)]
    by_place = place_reading(*places_of(kept, kept.ratio, tolerance), fitter)
    if by_place is not None:  # one factor for each place comes before any chain of counts
        readings = [one for one in readings if fitter.num_chosen(one) <= 1]
        readings = sorted([*readings, by_place], key=lambda one: one.cost)
    return list({one.text: one for one in reversed(readings)}.values())[::-1][:3]


def _nearest(measured: MeasuredStep, samples: StepSamples, tolerance: float) -> Aggregation:
    """The mode without a divisor that misplaces least."""
    with_prompts = len(measured.tokens) > 0 and (measured.tokens.prompt >= 0).all()
    modes = [mode for mode in MODES.values() if not mode.takes_divisor and (mode.unit != "prompt" or with_prompts)]

    def distance(mode: Aggregation) -> tuple[float, float, bool]:
        step = Comparison(measured, mode, samples.weights(mode), tolerance)
        misplaced = round(step.misplaced(), 6)
        if math.isnan(misplaced):
            return math.inf, math.inf, False
        # Where nothing tells two apart (a step of one sample) the plainest is meant: token_mean.
        return misplaced, step.deviation(), mode.mode.name != "token_mean"

    return min((resolve(mode.name, units=units) for mode in modes for units in get_args(UnitCounting)), key=distance)
