"""`judge`: are a step's measured weights what was asked, and if not, what are they and why?

It goes from the outside in: NaN; weight on other tokens than asked; tokens counted several times; then the weights
beside the mask, which are compared with every hypothesis that `hypotheses.py` knows. What is found is taken off, and
the rest is judged on; so several bugs at once are all said, and the factors of all multiply to measured/asked.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_rl_loss.audit.comparison import Comparison
from megatron_rl_loss.audit.hypotheses import StepSamples
from megatron_rl_loss.audit.naming import Namer
from megatron_rl_loss.audit.places import Placed, take_off_misplaced
from megatron_rl_loss.audit.report import Deviation, Verdict
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import MODES, Mode, OwnMode

__all__ = ["Deviation", "Verdict", "in_words", "judge"]

#: What a weight that is measured and one that is asked for may differ by, relative, by the type that gradients were
#: rounded to. Of float32: some ten products on either side, and what a measurement's own residual may be. Of half
#: precision what a gradient is stored in counts alone, a few times.
TOLERANCES = {"float32": 64 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}


def judge(measured: MeasuredStep, asked: Aggregation | None = None) -> Verdict:
    """The verdict on a measured step.

    Args:
        measured: the step's tokens and what each was found to weigh.
        asked: what it should be; None takes a mode without a divisor, that which the plainest reading begins
            with or else the nearest, and says so.

    A term's coefficient (``facts["coefficient"]``) is divided out first: the rest is to be its mode.
    """
    tokens = measured.tokens
    coef = measured.facts.get("coefficient", 1.0)
    if coef == 0:
        measured = replace(measured, unknown=(*measured.unknown, "The term's coefficient is 0: it trains nothing."))
    words = "nothing" if asked is None else in_words(asked)
    if measured.unknown:
        return Verdict(asked=words, sound=False, unknown=measured.unknown, notes=measured.notes)
    if coef != 1:
        places, size = measured.stray
        stray = places, size / abs(coef)
        notes = (*measured.notes, f"the term's coefficient, {coef:g}, is divided out")
        measured = replace(measured, weights=measured.weights / coef, stray=stray, notes=notes)
    tolerance = TOLERANCES[measured.facts.get("rounding", "float32")]
    notes = measured.notes
    samples = StepSamples(tokens)
    unseen = int(tokens.sample.max(initial=-1)) + 1 - len(np.unique(tokens.sample))
    if unseen:
        notes = (*notes, f"{unseen} samples have no mask entry and are not seen: a mode that counts them looks off")
    if asked is None:
        asked = _meant(measured, samples, tolerance)
        notes = (*notes, f"nothing was asked for: compared with the nearest mode, {asked.mode.name}")
    if isinstance(asked.mode, OwnMode):
        try:
            samples.weights(asked)
        except ValueError as error:  # labels, which a measured step does not have
            why = f"What {asked.mode.name} asks for cannot be made from masks and ids alone. {error}"
            return Verdict(asked=words, sound=False, unknown=(why,), notes=notes)
    step, placed, namer = _named(measured, samples, asked, tolerance)
    ratio = step.ratio
    finite = bool(np.isfinite(measured.weights).all())
    sound = namer.sound
    common: dict[str, Any] = {
        "asked": in_words(asked),
        "sound": sound,
        "deviation": step.deviation(),
        "misplaced": step.misplaced() if finite else math.nan,
        "low": float(ratio.min()) if finite and ratio.size else math.nan,
        "high": float(ratio.max()) if finite and ratio.size else math.nan,
        "tokens": int(step.wanted.sum()),
        "total": float(measured.weights.sum() + measured.stray[1]),
        "asked_total": float(step.expected.sum()),
        "pieces": step.pieces(),
        "notes": notes,
    }
    deviations = () if sound else (*placed.deviations, *namer.deviations)
    return Verdict(**common, what_it_is=tuple(namer.what_it_is), deviations=deviations)


def in_words(asked: Aggregation) -> str:
    """The mode, its divisor if it has one, and its unit counting where it has units."""
    divisor = "" if asked.divisor is None else f" with divisor {asked.divisor:g}"
    counting = f", unit counting {asked.units}" if isinstance(asked.mode, Mode) and asked.mode.unit != "step" else ""
    return f"{asked.mode.name}{divisor}{counting}"


def _named(
    measured: MeasuredStep, samples: StepSamples, asked: Aggregation, tolerance: float
) -> tuple[Comparison, Placed, Namer]:
    """The step beside what was asked, what was misplaced, and names for the rest."""
    step = Comparison(measured, asked, samples.weights(asked), tolerance)
    placed = take_off_misplaced(step)
    namer = Namer(step, placed, sound=step.deviation() <= tolerance)
    namer.name()
    return step, placed, namer


def _meant(measured: MeasuredStep, samples: StepSamples, tolerance: float) -> Aggregation:
    """The mode that the simplest reading begins with, or else the nearest."""
    nearest = _nearest(measured, samples, tolerance)
    namer = _named(measured, samples, nearest, tolerance)[2]
    hypothesis = namer.hypothesis
    if namer.sound or hypothesis is None or hypothesis.mode == nearest.mode.name:
        return nearest
    if MODES[hypothesis.mode].takes_divisor:  # by which nobody can tell: all tokens weigh alike
        return resolve("token_mean")
    base = hypothesis.of_the_step()
    return resolve(base.mode, units="active" if base.units is not None and base.units.counting == "active" else "all")


def _nearest(measured: MeasuredStep, samples: StepSamples, tolerance: float) -> Aggregation:
    """The mode without a divisor that misplaces least."""
    names = [mode.name for mode in MODES.values() if not mode.takes_divisor]
    if not (measured.tokens.prompt >= 0).all() or not len(measured.tokens):
        names.remove("prompt_mean")
    choices = [resolve(name, units=units) for name in names for units in ("all", "active")]
    steps = [Comparison(measured, one, samples.weights(one), tolerance) for one in choices]
    keys = [(round(step.misplaced(), 6), step.deviation()) for step in steps]
    best = min(range(len(keys)), key=lambda i: (math.inf if math.isnan(keys[i][0]) else keys[i][0], keys[i][1]))
    # Where nothing tells two apart (a step of one sample) the plainest is meant: token_mean.
    plain = [i for i, one in enumerate(choices) if one.mode.name == "token_mean" and keys[i] == keys[best]]
    return choices[plain[0] if plain else best]
