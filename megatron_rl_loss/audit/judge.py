"""`judge`: are a step's measured weights those that a mode asks for? If not: by how much, where, and as if what.

Weight in the wrong places is taken off first (`misplaced`); the rest is compared with a table of causes (`causes`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from megatron_rl_loss.audit.causes import Cause, Counts, Ratios, fitting
from megatron_rl_loss.audit.misplaced import Kept, Misplaced, take_off, without_copies
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep, StepTokens, extremes
from megatron_rl_loss.audit.verdict import Verdict, places_of
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.collectives import StepGroups
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import count_step
from megatron_rl_loss.step.units import UnitCounting

#: The largest relative difference of sound weights, by the type that gradients were rounded to. Of float32: some ten
#: products on either side and a measurement's residual; of half precision a few roundings of a stored gradient.
TOLERANCES = {"float32": 64 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}


@np.errstate(divide="ignore", invalid="ignore", over="ignore")  # counts of parts may be 0
def judge(measured: MeasuredStep, expected: Aggregation | None = None, *, tolerance: float | None = None) -> Verdict:
    """The verdict on a measured step.

    Args:
        expected: the weights it should have; None takes the nearest mode that has no divisor, and says so.
        tolerance: the largest relative difference that is rounding; None for that of ``facts["rounding"]``.

    A term's coefficient (``facts["coefficient"]``) is divided out first.
    """
    tolerance = tolerance or TOLERANCES[measured.facts.get("rounding", "float32")]
    asked, notes, unknown = expected, measured.notes, measured.unknown
    coef = measured.facts.get("coefficient", 1.0)
    if coef == 0:
        unknown = (*unknown, "The term's coefficient is 0: it trains nothing.")
    elif coef != 1:
        measured = scaled(measured, 1 / coef)
        notes = (*notes, f"the term's coefficient, {coef:g}, is divided out")
    if not unknown:
        try:
            asked = expected or _nearest(measured)
            wanted = expected_weights(measured.tokens, asked)
        except (ValueError, KeyError) as error:  # a mode over labels, which a measured step does not have
            unknown = (f"The weights of {in_words(expected)} cannot be made from masks and ids alone. {error}",)
    words = in_words(asked) + " (nothing was asked: this is the nearest mode)" * (
        expected is None and asked is not None
    )
    if unknown:
        return Verdict(expected=words, sound=False, unknown=unknown, notes=notes)
    tokens, weights, on = measured.tokens, measured.weights, wanted != 0
    ratio = weights[on] / wanted[on]
    factor = float(np.median(ratio)) if len(ratio) and measured.facts.get("undeclared_term") else math.nan
    if factor > 0 and tolerance < abs(factor - 1) and np.abs(ratio / factor - 1).max() <= 2 * tolerance:
        notes = (*notes, f"one factor, {factor:.6g}, is taken as this term's coefficient; declare it: tap(coef=...)")
        measured = scaled(measured, 1 / factor)
        weights, ratio = measured.weights, ratio / factor
    if unseen := int(tokens.sample.max(initial=-1)) + 1 - len(np.unique(tokens.sample)):
        notes = (*notes, f"{unseen} samples have no mask entry and are not seen: a mode that counts them looks off")
    deviation = deviation_of(measured, wanted)
    finite = bool(np.isfinite(weights).all()) and len(ratio) > 0
    verdict = Verdict(
        expected=words,
        sound=deviation <= tolerance,
        deviation=deviation,
        wrong_share=_wrong_share(measured, wanted),
        low=float(ratio.min()) if finite else math.nan,
        high=float(ratio.max()) if finite else math.nan,
        tokens=int(on.sum()),
        notes=notes,
    )
    if verdict.sound:
        return replace(verdict, notes=(*notes, _scope(measured)))
    assert asked is not None
    kept = take_off(measured, wanted, tolerance)
    causes = _causes([(measured, wanted, kept)], asked, tolerance)
    mask = tokens.mask[kept.entries]
    for power, words in ((-1, "ignored"), (1, "squared")) if causes is None and not {*mask.tolist()} <= {0, 1} else ():
        rest = replace(kept, weights=kept.weights / mask**power)
        if (causes := _causes([(measured, wanted, rest)], asked, tolerance)) is not None:
            kept.misplaced.append(Misplaced("fractions", f"fractions of masks are {words}", len(mask)))
            break
    if causes is None:
        kept = without_copies(kept, tokens, wanted, 2 * tolerance)
        causes = _causes([(measured, wanted, kept)], asked, tolerance)
    misplaced, places = tuple(kept.misplaced), places_of(measured, wanted)
    return replace(verdict, misplaced=misplaced, causes=causes or (), places=places)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def explain(steps: Sequence[MeasuredStep], expected: Aggregation, *, tolerance: float) -> tuple[Cause, ...]:
    """The causes that fit all of these steps at once, the simplest first."""
    wanted = [expected_weights(step.tokens, expected) for step in steps]
    kept = [take_off(step, of_step, tolerance) for step, of_step in zip(steps, wanted, strict=True)]
    return _causes(list(zip(steps, wanted, kept, strict=True)), expected, tolerance) or ()


def expected_weights(tokens: StepTokens, aggregation: Aggregation) -> Floats:
    """The weight of every entry that an aggregation asks for, mask included, [num_entries].

    Raises ValueError for a mode of one's own that looks at what masks and ids do not say (labels).
    """
    starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
    masks = np.split(tokens.mask, starts[1:]) if len(starts) else []
    samples = Samples(masks, ids={name: column[starts].tolist() for name, column in tokens.ids.items()})
    totals = count_step([samples], StepGroups(), sums=list(aggregation.mode.sums.values()))
    return weigh(aggregation, samples.local(0, 1), totals).double().numpy()


def in_words(expected: Aggregation | None) -> str:
    """The mode, its divisor if it has one, and its unit counting where that is not the usual one."""
    if expected is None:
        return "nothing"
    divisor = "" if expected.divisor is None else f" with divisor {expected.divisor:g}"
    return f"{expected.mode.name}{divisor}" + f", unit counting {expected.units}" * (expected.units != "all")


def scaled(measured: MeasuredStep, factor: float) -> MeasuredStep:
    places, size = measured.stray
    return replace(measured, weights=measured.weights * factor, stray=(places, size * abs(factor)))


def _nearest(measured: MeasuredStep) -> Aggregation:
    """The mode without a divisor that puts least weight on the wrong tokens."""
    names = ["token_mean", "sample_mean", *["prompt_mean"] * ("prompt" in measured.tokens.ids)]
    choices = [resolve(name, units=units) for name in names for units in get_args(UnitCounting)]

    def distance(mode: Aggregation) -> tuple[float, float]:
        wanted = expected_weights(measured.tokens, mode)
        share = round(_wrong_share(measured, wanted), 6)
        return (math.inf, math.inf) if math.isnan(share) else (share, round(deviation_of(measured, wanted), 6))

    return min(choices, key=distance)


def deviation_of(measured: MeasuredStep, wanted: Floats) -> float:
    """The largest relative difference of a weight; of one that should be 0, relative to the mean of the others."""
    if not np.isfinite(measured.weights).all():
        return math.inf
    on = wanted != 0
    off = np.abs(measured.weights[on] / wanted[on] - 1).max(initial=0.0)
    beside = np.abs(measured.weights[~on]).max(initial=0.0) + abs(measured.stray[1])
    return float(max(off, beside / (np.abs(wanted[on]).mean() if on.any() else 1.0)))


def _wrong_share(measured: MeasuredStep, wanted: Floats) -> float:
    """The total-variation distance between measured and expected shares of the weight."""
    stray, asked = abs(measured.stray[1]), np.abs(wanted).sum()
    total = float(np.abs(measured.weights).sum()) + stray
    if not math.isfinite(total):
        return math.nan
    if total == 0 or asked == 0:
        return 0.0 if total == asked else 1.0
    sign = np.sign((measured.weights * wanted).sum()) or 1.0  # a share with the wrong sign is on the wrong side
    apart = np.abs(measured.weights * sign / total - wanted / asked).sum()
    return min(1.0, float(apart + stray / total) / 2)


def _causes(
    steps: Sequence[tuple[MeasuredStep, Floats, Kept]], expected: Aggregation, tolerance: float
) -> tuple[Cause, ...] | None:
    """The causes of the weights that were kept, () where these are what was asked, None where nothing fits."""
    ratios = [ratios_of(*step, tolerance) for step in steps]
    cells = [one for one in ratios if one is not None]
    found = fitting(cells, expected.divisor, 2 * tolerance) if 0 < len(cells) == len(steps) else []
    if found and not found[0].row and abs(found[0].factor - 1) <= 2 * tolerance:
        return ()
    return tuple(found) or None


def ratios_of(measured: MeasuredStep, wanted: Floats, kept: Kept, tolerance: float) -> Ratios | None:
    """One number for each cell; None where tokens of a cell differ, or nothing is left."""
    counts, mask = Counts(measured.tokens, measured.split), measured.tokens.mask[kept.entries]
    at, asked, number = counts.of_entry[kept.entries], wanted[kept.entries] / mask, len(counts.num_tokens)
    spread = np.subtract(*extremes(at, asked, number)[::-1])[at]
    by_token = bool((spread > tolerance * asked).any())
    low, high = extremes(at, kept.weights / (wanted[kept.entries] if by_token else mask), number)
    active = np.flatnonzero(high >= low)
    if not active.size or (low[active] <= 0).any() or (high - low > 2 * tolerance * low)[active].any():
        return None
    beside = np.ones(number)
    if not by_token:
        beside[at] = asked
    return Ratios(counts, active, (low[active] + high[active]) / 2, beside[active], by_token)


def _scope(measured: MeasuredStep) -> str:
    compared = measured.facts.get("tokens_compared")
    whose = "" if compared is None else f"; {compared} input ids are those of the samples"
    unseen = "" if compared is not None else "whether masks and layout are those of the model's batch, "
    return (
        f"covers the step from the tap to the finalised gradient, by the masks and layout given{whose}; does not see "
        f"{unseen}factors before the tap, clipping or the optimizer"
    )
