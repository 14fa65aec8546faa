"""`judge`: are a step's measured weights what was asked, and if not, of what could they be made?

It goes from the outside in: NaN, weight on other tokens than asked, signs, odd tokens. These are facts, and taken off.
The rest is one number for each cell, measured / asked, which is shown as it is and fitted (`fit.py`).
"""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from megatron_rl_loss.audit.comparison import Comparison, Piece, StepSamples
from megatron_rl_loss.audit.counts import Cells
from megatron_rl_loss.audit.fit import Fitter, Reading
from megatron_rl_loss.audit.mode_table import MODE_TABLE, row_of
from megatron_rl_loss.audit.places import Deviation, Kept, Places, Shape, deviation, places_of, take_off
from megatron_rl_loss.audit.tokens import MeasuredStep, extremes
from megatron_rl_loss.audit.words import place_reading, with_words
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.step.units import UnitCounting

#: What a weight that is measured and one that is asked for may differ by, relative, by the type that gradients were
#: rounded to. Of float32: some ten products on either side, and what a measurement's own residual may be. Of half
#: precision what a gradient is stored in counts alone, a few times.
TOLERANCES = {"float32": 64 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a loss does to the tokens of a step, against what was asked."""

    expected: str  # what was asked for, in words
    sound: bool  # every weight is what was asked, within rounding; False where there is no verdict
    deviation: float = math.nan  # the largest relative difference of a weight
    misplaced: float = math.nan  # share of the gradient's weight on the wrong tokens, 0 to 1; of a factor 0
    low: float = math.nan  # the smallest measured / asked of an active token
    high: float = math.nan  # the largest
    deviations: tuple[Deviation, ...] = ()  # weight in the wrong places; what follows is about the rest
    shape: Shape = "factor"  # the coarsest parts of the step over which measured / asked is one number
    factors: Places = ()  # that number at each place; the smallest and the largest where tokens of a sample differ
    readings: tuple[Reading, ...] = ()  # what these numbers could be, the simplest first; none if nothing fits
    unknown: tuple[str, ...] = ()  # why there is no verdict; empty if there is one
    notes: tuple[str, ...] = ()  # what the measurement can and cannot tell
    tokens: int = 0  # active tokens of the step
    total: float = math.nan  # the sum of all measured weights
    expected_total: float = math.nan  # of those asked
    pieces: tuple[Piece, ...] = ()  # a row for each micro-batch and CP rank

    def to_dict(self, **more: Any) -> dict[str, Any]:
        """Everything, and more, as plain data; numbers that are not finite are None."""
        plain: dict[str, Any] = _finite(asdict(self) | more)
        return plain

    def to_json(self, **more: Any) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(**more), indent=1)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.unknown:
            return f"NO VERDICT: {self.unknown[0]}"
        if self.sound:
            return f"SOUND: {self.expected}, every token within {self.deviation:.1e} of its weight"
        return f"NOT SOUND: asked {self.expected}; {self.extent}"

    @property
    def uniform(self) -> bool:
        """Whether all tokens weigh the same multiple of what was asked."""
        return self.high - self.low <= 1e-5 * abs(self.high)

    @property
    def extent(self) -> str:
        """How far off, in words."""
        if math.isnan(self.low):
            return "weights are not finite"
        apart = f"{self.low:.4g}" if self.uniform else f"{self.low:.3g} to {self.high:.3g}"
        of_asked = f"tokens weigh {apart} of what was asked"
        return f"{of_asked}, {100 * self.misplaced:.1f} % of the gradient's weight is on the wrong tokens"

    def __str__(self) -> str:
        lines = _wrapped(self.headline, 2)
        lines += [line for reason in self.unknown[1:] for line in _wrapped(f"  also: {reason}", 4)]
        if not self.sound and not self.unknown:
            lines += self._numbers()
            for number, one in enumerate(self.deviations, 1):
                lines += _wrapped(f"{number}. {one.text}", 3)
            beside = " the rest" if self.deviations else ""
            for reading in self.readings:
                lines += _wrapped(f"A reading that fits{beside}: {reading.text}", 2)
            if not self.readings and self.factors:
                lines.append("No reading fits: the numbers above are what is known.")
        lines += [line for note in self.notes for line in _wrapped(f"note: {note}", 6)]
        return "\n".join(lines)

    def _numbers(self) -> list[str]:
        """measured / asked, by micro-batch and CP rank, and place by place where that table does not show it."""
        lines = []
        if not self.uniform and not math.isnan(self.low):
            lines += ["measured / asked, by micro-batch and CP rank:", *_table(self.pieces)]
        if self.shape in ("sample", "rollout", "prompt"):
            (least, low), *_, (most, high) = sorted(self.factors, key=lambda one: one[1])
            one_each = f"one number for each {self.shape}"
            lines += _wrapped(f"{one_each}: {low:.4g} ({least}) to {high:.4g} ({most}), {len(self.factors)} in all", 2)
        return lines


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
    if unseen := int(tokens.sample.max(initial=-1)) + 1 - len(np.unique(tokens.sample)):
        notes = (*notes, f"{unseen} samples have no mask entry and are not seen: a mode that counts them looks off")
    if expected is None:
        expected = _nearest(measured, samples, tolerance)
        notes = (*notes, f"nothing was asked for: compared with the nearest mode, {expected.mode.name}")
    try:
        step = Comparison(measured, expected, samples.weights(expected), tolerance)
    except (ValueError, KeyError) as error:  # a mode over labels, which a measured step does not have
        if row_of(expected.mode) is not None:
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
    row = row_of(expected.mode)
    divisor = "" if expected.divisor is None else f" with divisor {expected.divisor:g}"
    counting = f", unit counting {expected.units}" if row is not None and row.unit != "step" else ""
    return f"{expected.mode.name}{divisor}{counting}"


@np.errstate(divide="ignore", invalid="ignore")  # a count may be 0 where nothing is asked for
def _explained(verdict: Verdict, step: Comparison) -> Verdict:
    """The verdict with deviations, numbers and readings."""
    kept = take_off(step)
    if len(kept.entries):
        readings = _readings(kept, Cells(step.tokens, step.measured.split))
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
    rows = MODE_TABLE.items()
    modes = [name for name, row in rows if not row.takes_divisor and (row.unit != "prompt" or with_prompts)]

    def distance(mode: Aggregation) -> tuple[float, float, bool]:
        step = Comparison(measured, mode, samples.weights(mode), tolerance)
        misplaced = round(step.misplaced(), 6)
        if math.isnan(misplaced):
            return math.inf, math.inf, False
        # Where nothing tells two apart (a step of one sample) the plainest is meant: token_mean.
        return misplaced, step.deviation(), mode.mode.name != "token_mean"

    return min((resolve(name, units=units) for name in modes for units in get_args(UnitCounting)), key=distance)


# ---- the report

_WIDTH = 112


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _table(pieces: Sequence[Piece]) -> list[str]:
    ranks = sorted({(piece.dp_rank, piece.cp_rank) for piece in pieces})
    rows = sorted({piece.microbatch for piece in pieces})
    if len(ranks) > 8 or len(rows) > 16:
        return [f"  ({len(pieces)} pieces; they are in the JSON)"]
    several = len({cp for _, cp in ranks}) > 1
    table = [["micro-batch", *(f"DP {dp}" + f", CP {cp}" * (several and cp >= 0) for dp, cp in ranks)]]
    at = {(piece.dp_rank, piece.cp_rank, piece.microbatch): piece for piece in pieces}
    for row in rows:
        cells = [f"{row}"]
        for rank in ranks:
            piece = at.get((*rank, row))
            ends = [] if piece is None or not piece.tokens else [f"{piece.low:.3g}", f"{piece.high:.3g}"]
            cells.append("..".join(dict.fromkeys(ends)) or "-")
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in table]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
