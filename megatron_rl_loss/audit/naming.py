"""What the weights are and how they differ from what was asked: from the tokens' weights to a reading of the cells'.

Weights are divided by the mask and by what was asked. What differs inside a cell, where nothing that a loss counts
does, is taken off first: other values of the mask, copies, a few odd tokens. Then every cell has one number.
"""

import numpy as np

from megatron_rl_loss.audit.causes import FACTORS
from megatron_rl_loss.audit.comparison import Comparison, Flags
from megatron_rl_loss.audit.counts import Cells
from megatron_rl_loss.audit.hypotheses import Hypothesis
from megatron_rl_loss.audit.misfits import explain, odd_tokens, say_odd
from megatron_rl_loss.audit.places import Placed, found
from megatron_rl_loss.audit.readings import Reader, Reading
from megatron_rl_loss.audit.report import Deviation
from megatron_rl_loss.audit.tokens import Floats, Ints
from megatron_rl_loss.modes.table import MODES

_TOLD = 5  # readings
_BY_CHANCE = 3.0  # cost of a name from which on a divisor of one's own is as likely
_AS_LIKELY = 1.5  # costs that far apart are both told


class Namer:
    """Names what is left of a step after misplaced weight was taken off.

    Attributes:
        deviations, what_it_is: what `name` fills.
        hypothesis: the simplest that fits, if one does.
    """

    def __init__(self, step: Comparison, placed: Placed, sound: bool) -> None:
        self.step, self.placed, self.sound = step, placed, sound
        self.deviations: list[Deviation] = []
        self.what_it_is: list[str] = []
        self.hypothesis: Hypothesis | None = None
        self.cells = Cells(step.tokens, step.measured.split)
        self.tolerance = 2 * step.tolerance  # of a ratio of two measured weights
        self.active: Ints = np.zeros(0, np.int64)  # numbers of the cells that are judged on, [num_active]

    @np.errstate(divide="ignore", invalid="ignore")  # a count may be 0 where nothing is asked for
    def name(self) -> None:
        """Fills `deviations` and `what_it_is`."""
        kept = self.placed.kept
        if not kept.any():
            return
        weights = self.step.weights
        if (weights[kept] < 0).all() and (self.step.expected[kept] >= 0).all():
            weights = -weights
            text = FACTORS["sign"].text
            self.deviations.append(Deviation(shape="factor", causes=("sign",), factors=(("all", -1.0),), text=text))
        self._name(kept, weights)

    def _name(self, kept: Flags, weights: Floats, again: bool = False) -> None:
        entries = np.flatnonzero(kept)
        at, mask, asked = self.cells.of_entry[entries], self.placed.mask[entries], self._beside_asked()[entries]
        counted = self.cells.tokens > 0  # a cell without a token that is asked for has no denominators
        self.active = np.flatnonzero(counted & (np.bincount(at, minlength=len(self.cells)) > 0))
        if not self.active.size:
            return
        ratio = weights[entries] / (mask * asked)
        if (ratio > 0).all():
            low, high = self._range_in_cells(at, asked)
            asked_varies = not self._alike(high, low)  # within a cell: a mode of one's own
            reader = Reader(self.step, self.cells, self.active, self._middle(low, high), asked_varies, self.sound)
            ratio = self._without_other_masks(reader, at, weights[entries], mask, asked, ratio)
            ratio = self._take_off_copies(at, ratio)
            low, high = self._range_in_cells(at, ratio)
            if self._alike(high, low):
                self._read(reader, self._middle(low, high))
                return
        odd, factor = odd_tokens(at, ratio, self.tolerance)
        if odd.any() and not again:
            self.deviations.append(say_odd(self.step.tokens, entries, odd, factor, self.tolerance))
            self._name(kept & ~np.isin(np.arange(len(kept)), entries[odd]), weights, again=True)
            return
        ends = (("the smallest", float(ratio.min())), ("the largest", float(ratio.max())))
        self.deviations.append(found("within", "token", factors=ends))

    def _read(self, reader: Reader, ratio: Floats) -> None:
        """Tells the simplest explanation of measured/asked, [num_active]."""
        explained = explain(reader, ratio)
        self.deviations += explained.deviations
        readings = explained.readings
        self._say_what_it_is(reader, explained.ratio, readings)
        if not readings:
            return
        self.hypothesis = readings[0].hypothesis
        self.deviations += reader.deviations(readings[0])

    # ---- weights beside the mask, in cells

    def _beside_asked(self) -> Floats:
        """Asked weights beside the mask, for every entry: of masked ones, what others of their cell have."""
        step = self.step
        with np.errstate(divide="ignore", invalid="ignore"):
            beside = np.where(step.wanted, step.expected / step.tokens.mask, 0.0)
        if (self.placed.kept & ~step.wanted).any():  # masks were shifted
            sample = step.tokens.sample
            number = np.bincount(sample, weights=step.wanted)
            mean = np.bincount(sample, weights=beside) / np.maximum(number, 1)
            everywhere = float(beside[step.wanted].mean())
            filled = np.where(number > 0, mean, everywhere)
            beside = np.where(step.wanted, beside, filled[sample])
        return beside

    def _range_in_cells(self, at: Ints, values: Floats) -> tuple[Floats, Floats]:
        low, high = np.full(len(self.cells), np.inf), np.full(len(self.cells), -np.inf)
        np.minimum.at(low, at, values)
        np.maximum.at(high, at, values)
        return low, high

    def _middle(self, low: Floats, high: Floats) -> Floats:
        return (low[self.active] + high[self.active]) / 2

    def _alike(self, high: Floats, low: Floats) -> bool:
        return bool((high[self.active] - low[self.active] <= self.tolerance * low[self.active]).all())

    def _without_other_masks(
        self, reader: Reader, at: Ints, weights: Floats, mask: Floats, asked: Floats, ratio: Floats
    ) -> Floats:
        """Measured/asked, less fractional masks that were left out or multiplied twice, if a hypothesis fits then."""
        if ((mask == 1) | (mask == 0)).all():
            return ratio
        for power, cause in ((1, ""), (0, "fraction_ignored"), (2, "mask_squared")):
            other = weights / (mask**power * asked)
            low, high = self._range_in_cells(at, other)
            if self._alike(high, low) and reader.readings(self._middle(low, high)):
                if cause:
                    factors = self._factors_of_entries(reader, at, mask ** (power - 1))
                    self.deviations.append(found(cause, "mask", factors=factors))
                return other
        return ratio

    def _take_off_copies(self, at: Ints, ratio: Floats) -> Floats:
        """Tokens that weigh a whole number of times what others of their cell do are counted several times."""
        low, high = self._range_in_cells(at, ratio)
        if self._alike(high, low):
            return ratio
        times = ratio / low[at]
        whole = np.round(times)
        several = whole > 1
        if not (np.abs(times - whole) <= self.tolerance * whole).all() or whole.max() > 8 or several.mean() >= 0.5:
            return ratio
        factors = tuple((f"{int((whole == n).sum())} tokens", float(n)) for n in np.unique(whole[several]))
        self.deviations.append(found("twice", "twice", factors=factors, tokens=int(several.sum())))
        return ratio / whole

    def _factors_of_entries(self, reader: Reader, at: Ints, factor: Floats) -> tuple[tuple[str, float], ...]:
        low, high = self._range_in_cells(at, factor)
        if self._alike(high, low):
            return reader.places(self._middle(low, high))[1]
        return (("the smallest", float(factor.min())), ("the largest", float(factor.max())))

    # ---- in words

    def _say_what_it_is(self, reader: Reader, ratio: Floats, readings: list[Reading]) -> None:
        """The readings in words; modes of the table that these very weights are come first."""
        told = [(reading, *self._words(reader, ratio, reading)) for reading in readings]
        exact = [
            words for reading, words, is_it in told if is_it and not (reading.hypothesis and reading.hypothesis.local)
        ]
        near = [words for reading, words, _ in told if words and reading.cost <= readings[0].cost + _AS_LIKELY]
        beside = "otherwise " if self.deviations or self.placed.deviations else ""
        self.what_it_is = [f"{beside}{words}" for words in dict.fromkeys(exact or near)][:_TOLD]

    def _words(self, reader: Reader, ratio: Floats, reading: Reading) -> tuple[str, bool]:
        """A reading in words, and whether it is just that; no words for a divisor that nobody would give."""
        hypothesis = reading.hypothesis
        if hypothesis is None:
            name, times = f"{self.step.asked.mode.name}, a mode of your own", reading.factor
        else:
            beside = ratio * reader.asked_of_cell
            times = float(np.median(beside / reader.shape_of(hypothesis))) * hypothesis.natural(self.cells)
            name = hypothesis.words(self.cells)
            if MODES[hypothesis.mode].takes_divisor and not hypothesis.by_width:
                given, divisor = self.step.asked.divisor, 1 / times
                whole = abs(divisor - round(divisor)) <= self.tolerance * divisor < 0.05
                likely = bool(reading.names) and reading.names[0].cost < _BY_CHANCE
                if given is None and (likely or not whole or abs(divisor - self.cells.total("mask")) < 0.5):
                    return "", False
                if hypothesis.again is None:
                    return hypothesis.words(self.cells, float(f"{divisor:.6g}")), given is not None
                times *= given or 1.0
        if abs(times - 1) <= self.tolerance:
            return name, True
        named = reading.names and abs(times / reading.factor - 1) <= self.tolerance
        return f"{name}, times {times:.6g}{f' = {reading.names[0].formula}' if named else ''}", False
