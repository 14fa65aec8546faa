"""`judge`: the verdict on a step's measured weights w, given the weights w* that a mode asks for.

`misplaced` removes weight in the wrong places first; `causes` compares the rest with a table of causes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megatron_rl_loss.audit.causes import Cause, Counts, Ratios, fitting
from megatron_rl_loss.audit.misplaced import Kept, Misplaced, take_off, without_copies
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep, extremes, slots_of
from megatron_rl_loss.audit.verdict import Verdict, places_of
from megatron_rl_loss.core.aggregation import Aggregation, resolve, weigh
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import COUNTINGS, count_step
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.proof.outcomes import TOLERANCES

#: What a loss may do with fractional mask values: the power of the mask that its weights have too much.
FRACTIONS = {
    -1: "fractional mask values are ignored",
    1: "fractional mask values are squared: the mask is applied twice",
}


@np.errstate(divide="ignore", invalid="ignore", over="ignore")  # counts of parts may be 0
def judge(measured: MeasuredStep, expected: Aggregation | str | None = None) -> Verdict:
    """The verdict on a measured step.

    Without `expected`, the verdict names and uses the nearest mode without a divisor. A term's coefficient
    (``facts["coefficient"]``) is divided out first.
    """
    expected = resolve(expected) if isinstance(expected, str) else expected
    tolerance = TOLERANCES[measured.facts.get("rounding", "float32")]
    notes, unknown = measured.notes, measured.unknown
    coef = measured.facts.get("coefficient", 1.0)
    if coef == 0:
        unknown = (*unknown, "The term's coefficient is 0, so the term trains nothing.")
    elif coef != 1:
        measured = _scaled(measured, 1 / coef)
        notes = (*notes, f"the term's coefficient, {coef:g}, is divided out")
    named = "nothing" if expected is None else str(expected)
    if unknown:
        return Verdict(expected=named, sound=False, unknown=unknown, notes=notes)
    try:
        asked = expected or nearest_mode(measured)
        wanted = expected_weights(measured, asked)
    except (ValueError, KeyError) as error:  # a mode over ids or labels that the samples do not have
        why = f"The weights of {named} cannot be computed from the samples. {error}"
        return Verdict(expected=named, sound=False, unknown=(why,), notes=notes)
    if not wanted.any() and not measured.weights.any() and not measured.stray[1]:
        why = "The step has no token with an expected or measured weight."
        return Verdict(expected=str(asked), sound=False, unknown=(why,), notes=notes)
    weights, on = measured.weights, wanted != 0
    ratio = weights[on] / wanted[on]
    factor = float(np.median(ratio)) if len(ratio) and measured.facts.get("undeclared_term") else math.nan
    if factor > 0 and tolerance < abs(factor - 1) and np.abs(ratio / factor - 1).max() <= 2 * tolerance:
        notes = (
            *notes,
            f"all weights share the factor {factor:.6g}, taken as the term's coefficient; declare it: tap(coef=...)",
        )
        measured = _scaled(measured, 1 / factor)
        weights, ratio = measured.weights, ratio / factor
    deviation = deviation_of(measured, wanted)
    finite = _is_finite(measured) and len(ratio) > 0
    verdict = Verdict(
        expected=str(asked),
        is_nearest=expected is None,
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
    if doubt := measured.facts.get("doubt"):
        verdict = replace(verdict, notes=(*notes, f"the difference may be no fault: {doubt}"))
    kept, causes = _explained(measured, wanted, asked, tolerance)
    misplaced, rest_is_asked = tuple(kept.misplaced), causes == ()
    common = float(np.median(ratio)) if finite else 1.0
    if not 0 < common < math.inf or 0.5 <= common <= 2:  # bars show up to twice the expected weight
        common = 1.0
    places = places_of(_scaled(measured, 1 / common), wanted)
    return replace(
        verdict, misplaced=misplaced, causes=causes or (), rest_is_asked=rest_is_asked, places=places, common=common
    )


def _explained(
    measured: MeasuredStep, wanted: Floats, asked: Aggregation, tolerance: float
) -> tuple[Kept, tuple[Cause, ...] | None]:
    """The weights in the right places and their causes; tried as they are, with masks undone, and without copies."""
    kept = take_off(measured, wanted, tolerance)
    mask = measured.tokens.mask[kept.entries]
    causes = _causes([(measured, wanted, kept)], asked, tolerance)
    if causes is None and not np.isin(mask, (0, 1)).all():
        for power, words in FRACTIONS.items():
            rest = replace(kept, weights=kept.weights / mask**power)
            causes = _causes([(measured, wanted, rest)], asked, tolerance)
            if causes is not None:
                kept.misplaced.append(Misplaced("fractions", words, len(mask)))
                return kept, causes
    if causes is None and (rest := without_copies(kept, measured.tokens, wanted, 2 * tolerance)) is not kept:
        kept, causes = rest, _causes([(measured, wanted, rest)], asked, tolerance)
    if kept.misplaced and _is_finite(measured) and (causes is None or (causes and not causes[0].named)):
        causes = _causes_by_trained_tokens(measured, asked, tolerance) or causes
    return kept, causes


def _causes_by_trained_tokens(measured: MeasuredStep, asked: Aggregation, tolerance: float) -> tuple[Cause, ...] | None:
    """The causes, with the tokens that have weight as the mask; None where some of these are in no unit."""
    mask = np.where(measured.weights != 0, np.where(measured.tokens.mask != 0, measured.tokens.mask, 1.0), 0.0)
    try:
        trained = _with_mask(measured, mask)
        wanted = expected_weights(trained, asked)
    except ValueError:
        return None
    entries = np.flatnonzero(mask)
    causes = _causes([(trained, wanted, Kept(entries, measured.weights[entries], []))], asked, tolerance)
    if causes == ():
        causes = (Cause("as expected", "", 1.0, 0.0),)
    named = [cause for cause in causes or () if cause.named]
    by = "counted over the tokens that are trained"
    return tuple(replace(cause, row=f"{cause.row or 'as expected'}, {by}") for cause in named) or None


def _with_mask(measured: MeasuredStep, mask: Floats) -> MeasuredStep:
    """The step with another mask, [num_entries]."""
    microbatches, end = [], 0
    for placed in measured.microbatches:
        ends = end + np.cumsum([0, *placed.samples.mask_lengths])
        masks = [mask[begin:until] for begin, until in pairwise(ends)]
        microbatches.append(replace(placed, samples=placed.samples.masked_by("trained tokens", masks)))
        end = int(ends[-1])
    return replace(measured, microbatches=tuple(microbatches))


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def explain(steps: Sequence[MeasuredStep], expected: Aggregation, *, tolerance: float) -> tuple[Cause, ...]:
    """The causes that fit all of these steps at once, the simplest first."""
    wanted = [expected_weights(step, expected) for step in steps]
    kept = [take_off(step, step_weights, tolerance) for step, step_weights in zip(steps, wanted, strict=True)]
    causes = _causes(list(zip(steps, wanted, kept, strict=True)), expected, tolerance)
    if causes is not None:
        return causes
    for power, words in FRACTIONS.items():
        masks = [step.tokens.mask[step_kept.entries] for step, step_kept in zip(steps, kept, strict=True)]
        if all(np.isin(mask, (0, 1)).all() for mask in masks):
            break
        rest = [
            replace(step_kept, weights=step_kept.weights / mask**power)
            for step_kept, mask in zip(kept, masks, strict=True)
        ]
        causes = _causes(list(zip(steps, wanted, rest, strict=True)), expected, tolerance)
        if causes is not None:
            named = [cause for cause in causes if cause.named]
            return tuple(replace(cause, row=f"{words}; {cause.row or 'as expected'}") for cause in named) or (
                Cause(words, "", 1.0, 0.0),
            )
    return ()


def expected_weights(measured: MeasuredStep, aggregation: Aggregation) -> Floats:
    """The weight that an aggregation asks for at every entry, mask included, [num_entries].

    Raises ValueError for a mode over ids or labels that the samples do not have.
    """
    microbatches = [placed.samples for placed in measured.microbatches]
    totals = count_step(microbatches, StepGroups(), sums=list(aggregation.mode.sums.values()))
    entry_weights = [np.zeros(0)]
    for samples in microbatches:
        local, weights = samples.local(0, 1), np.zeros(samples.total_tokens)  # of the layout's buffer
        weights[local.positions] = weigh(aggregation, local, totals).double().numpy()
        entry_weights.append(weights[slots_of(samples)])
    return np.concatenate(entry_weights)


def _scaled(measured: MeasuredStep, factor: float) -> MeasuredStep:
    places, size = measured.stray
    return replace(measured, weights=measured.weights * factor, stray=(places, size * abs(factor)))


def nearest_mode(measured: MeasuredStep) -> Aggregation:
    """The mode without a divisor that puts least weight on the wrong tokens."""
    names = ["token_mean", "sample_mean", *only_if("prompt" in measured.tokens.ids, ["prompt_mean"])]
    filled = [placed.samples for placed in measured.microbatches if len(placed.samples)]
    known = [row.name for row in COUNTINGS.values() if all(row.can_count(samples) for samples in filled)]
    choices = [resolve(name, units=units) for name in names for units in known]
    if not _is_finite(measured):
        return choices[0]

    def distance(mode: Aggregation) -> tuple[float, float]:
        wanted = expected_weights(measured, mode)
        return round(_wrong_share(measured, wanted), 6), round(deviation_of(measured, wanted), 6)

    return min(choices, key=distance)


def _is_finite(measured: MeasuredStep) -> bool:
    return bool(np.isfinite(measured.weights).all()) and math.isfinite(measured.stray[1])


def deviation_of(measured: MeasuredStep, wanted: Floats) -> float:
    """The largest relative error of a weight; a weight that should be 0 is relative to the mean of the others."""
    if not _is_finite(measured):
        return math.inf
    on = wanted != 0
    off = np.abs(measured.weights[on] / wanted[on] - 1).max(initial=0.0)
    beside = np.abs(measured.weights[~on]).max(initial=0.0) + measured.stray[1]
    return float(max(off, beside / (np.abs(wanted[on]).mean() if on.any() else 1.0)))


def _wrong_share(measured: MeasuredStep, wanted: Floats) -> float:
    """The total-variation distance between measured and expected shares of the weight."""
    if not _is_finite(measured):
        return math.nan
    stray, asked = measured.stray[1], np.abs(wanted).sum()
    total = float(np.abs(measured.weights).sum()) + stray
    if total == 0 or asked == 0:
        return 0.0 if total == asked else 1.0
    sign = np.sign((measured.weights * wanted).sum()) or 1.0  # a share with the wrong sign is on the wrong side
    apart = np.abs(measured.weights * sign / total - wanted / asked).sum()
    return min(1.0, float(apart + stray / total) / 2)


def _causes(
    steps: Sequence[tuple[MeasuredStep, Floats, Kept]], expected: Aggregation, tolerance: float
) -> tuple[Cause, ...] | None:
    """The causes of the kept weights: () if these are as asked, None if no cause fits."""
    ratios = [ratios_of(*step, tolerance) for step in steps]
    cells = [step_ratios for step_ratios in ratios if step_ratios is not None]
    causes = fitting(cells, expected.divisor, 2 * tolerance) if 0 < len(cells) == len(steps) else []
    if causes and not causes[0].row and abs(causes[0].factor - 1) <= 2 * tolerance:
        return ()
    return tuple(causes) or None


def ratios_of(measured: MeasuredStep, wanted: Floats, kept: Kept, tolerance: float) -> Ratios | None:
    """One number for each cell; None if tokens of a cell differ, or none is left."""
    counts, mask = Counts(measured.tokens, measured.split), measured.tokens.mask[kept.entries]
    cell, number = counts.entry_cells[kept.entries], len(counts.num_tokens)
    asked = wanted[kept.entries] / mask  # without the mask
    lowest, highest = extremes(cell, asked, number)
    by_token = bool(((highest - lowest)[cell] > tolerance * asked).any())
    low, high = extremes(cell, kept.weights / (wanted[kept.entries] if by_token else mask), number)
    active = np.flatnonzero(high >= low)
    if not active.size or (low[active] <= 0).any() or (high - low > 2 * tolerance * low)[active].any():
        return None
    beside = np.ones(number)
    if not by_token:
        beside[cell] = asked
    return Ratios(counts, active, (low[active] + high[active]) / 2, beside[active], by_token)


def _scope(measured: MeasuredStep) -> str:
    """The last note of a sound verdict."""
    covers = "covers the step from the tap to the finalised gradient, with the masks and layout given"
    unseen = "factors before the tap, clipping, the optimizer"
    if (compared := measured.facts.get("tokens_compared")) is None:
        return f"{covers}; not checked: that masks and layout are those of the model's batch, {unseen}"
    return f"{covers}; {compared} input ids agree with the samples; not checked: {unseen}"
