"""Which hypothesis are the weights, and by which factors do they differ from what was asked?

Every hypothesis is compared with the weights beside the mask, v. Where v / shape is one number for all tokens, that is
a *reading*: the shape, and a number to be named. The simplest reading is told, in steps from what was asked to what was
measured: another mode, counts of a part, a further count, and a factor. All steps multiplied are measured/asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rl_loss.audit.causes import FACTORS, OTHERS, PARTS, Cause
from megatron_rl_loss.audit.comparison import Comparison
from megatron_rl_loss.audit.counts import COUNTINGS, Cells, Count
from megatron_rl_loss.audit.hypotheses import (
    Hypothesis,
    averages_of_parts,
    countable,
    divided_again,
    hypothesis_of,
    is_close,
    library,
)
from megatron_rl_loss.audit.numbers import Amount, Named, amounts_of, name_number
from megatron_rl_loss.audit.places import PARTITIONS, Placed, found
from megatron_rl_loss.audit.report import Deviation, Shape
from megatron_rl_loss.audit.tokens import Floats, Ints
from megatron_rl_loss.modes import MODES

_TOLD = 5  # readings
_BY_CHANCE = 3.0  # cost of a name from which on a divisor of one's own is as likely
_UNNAMED = 4.0  # cost of a number without a name
_AS_LIKELY = 1.5  # costs that far apart are both told


@dataclass
class Reading:
    """A hypothesis that fits.

    Attributes:
        hypothesis: None for a mode of one's own that was asked for.
        factor: what is left of measured/asked for the number to explain.
        steps: deviations but for that number.
        names: of the number; none if it is 1, or if nothing explains it.
    """

    hypothesis: Hypothesis | None
    factor: float
    names: list[Named]
    steps: list[Deviation] = field(default_factory=list)
    cost: float = 0.0


class Namer:
    """Names what is left of a step after misplaced weight was taken off."""

    def __init__(self, step: Comparison, placed: Placed, sound: bool) -> None:
        self.step, self.placed, self.sound = step, placed, sound
        self.deviations: list[Deviation] = []
        self.what_it_is: list[str] = []
        self.cells = Cells(step.tokens, step.measured.split)
        self._values: dict[Count, Floats] = {}
        self.tolerance = 2 * step.tolerance  # of a ratio of two measured weights
        self.asked = hypothesis_of(step.asked)
        # Of the cells that are judged on, [num_active]: numbers, measured/asked, the asked weight beside the mask.
        self.active: Ints = np.zeros(0, np.int64)
        self.ratio: Floats = np.zeros(0)
        self.asked_of_cell: Floats = np.zeros(0)

    @np.errstate(divide="ignore", invalid="ignore")  # a count may be 0 where nothing is asked for
    def name(self) -> None:
        """Fills `deviations` and `what_it_is`."""
        kept, of_entry = self.placed.kept, self.cells.of_entry
        if not kept.any():
            return
        weights = self.step.weights[kept]
        if (weights < 0).all() and (self.step.expected[kept] >= 0).all():
            weights = -weights
            text = FACTORS["sign"].text
            self.deviations.append(Deviation(shape="factor", causes=("sign",), factors=(("all", -1.0),), text=text))
        mask = self.placed.mask[kept]
        at = of_entry[kept]
        asked = self._beside_asked()[kept]
        counted = self.cells.tokens > 0  # a cell without a token that is asked for has no denominators
        self.active = np.flatnonzero(counted & (np.bincount(at, minlength=len(self.cells)) > 0))
        if not self.active.size:
            return
        ratio = weights / (mask * asked)
        if not (ratio > 0).all():
            self._within(ratio)
            return
        low, high = self._range_in_cells(at, asked)
        self.asked_of_cell = self._middle(low, high)
        asked_varies = not self._alike(high, low)  # within a cell: a mode of one's own
        ratio = self._without_other_masks(at, weights, mask, asked, ratio)
        ratio = self._take_off_copies(at, ratio)
        low, high = self._range_in_cells(at, ratio)
        if not self._alike(high, low):
            self._within(ratio)
            return
        self.ratio = self._middle(low, high)
        self._read(None if asked_varies else self.ratio * self.asked_of_cell)

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

    def _without_other_masks(self, at: Ints, weights: Floats, mask: Floats, asked: Floats, ratio: Floats) -> Floats:
        """Measured/asked, less fractional masks that were left out or multiplied twice, if a hypothesis fits then."""
        if ((mask == 1) | (mask == 0)).all():
            return ratio
        for power, cause in ((1, ""), (0, "fraction_ignored"), (2, "mask_squared")):
            other = weights / (mask**power * asked)
            low, high = self._range_in_cells(at, other)
            self.ratio = self._middle(low, high)
            if self._alike(high, low) and self._readings(self.ratio * self.asked_of_cell):
                if cause:
                    factors = self._factors_of_entries(at, mask ** (power - 1))
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

    def _factors_of_entries(self, at: Ints, factor: Floats) -> tuple[tuple[str, float], ...]:
        low, high = self._range_in_cells(at, factor)
        if self._alike(high, low):
            return self._places(self._middle(low, high))[1]
        return (("the smallest", float(factor.min())), ("the largest", float(factor.max())))

    def _value(self, count: Count) -> Floats:
        if count not in self._values:
            self._values[count] = self.cells.values(count)
        return self._values[count]

    def _shape(self, hypothesis: Hypothesis | None) -> Floats:
        """Of active cells; of a mode of one's own what it asks for."""
        if hypothesis is None:
            return self.asked_of_cell
        return hypothesis.shape(self.cells, self._value)[self.active]

    # ---- readings

    def _read(self, beside: Floats | None) -> None:
        """Finds the simplest reading of the weights beside the mask, or else the partition that they follow."""
        readings = self._readings(beside)
        if not readings:
            readings = self._with_copies(beside) or self._with_ranks_apart(beside)
        self._say_what_it_is(readings)
        if not readings:
            self._by_partition()
            return
        best = readings[0]
        self.deviations += best.steps
        if abs(best.factor - 1) > self.tolerance:
            self.deviations.append(_one_factor(best))

    def _candidates(self) -> Iterator[Hypothesis | None]:
        if self.asked is None:
            yield None
        else:
            yield self.asked
        modes = library(self.cells, self.step.asked.units)
        yield from (one for one in modes if not self.sound or not one.local)  # then modes of the table are told alone
        if self.sound:
            return
        if self.asked is not None:
            yield from divided_again(self.asked, self.cells)

    def _readings(self, beside: Floats | None) -> list[Reading]:
        """Of everything that fits, the simplest first."""
        readings: list[Reading] = []
        seen: set[Hypothesis | None] = set()
        kinds: set[tuple[str, ...]] = set()  # that fit already, counted more plainly
        for hypothesis in self._candidates():
            if hypothesis in seen or (hypothesis and not self._says_something(hypothesis)):
                continue
            seen.add(hypothesis)
            if hypothesis is None:
                left = self.ratio
            elif beside is None:
                continue
            else:
                left = beside / self._shape(hypothesis)
            kind = () if hypothesis is None else hypothesis.kind
            if kind not in kinds and is_close(left, self.tolerance):
                kinds.add(kind)
                readings.append(self._explained(hypothesis))
        readings.sort(key=lambda reading: reading.cost)
        return readings

    def _says_something(self, hypothesis: Hypothesis) -> bool:
        """Its counts are known, and what it multiplies by differs from place to place."""
        if not countable(hypothesis, self.cells):
            return False
        counts = (hypothesis.times, hypothesis.again, hypothesis.units)
        further = [
            one for one in counts if one is not None and (one is not hypothesis.units or one.what == "microbatch")
        ]
        return not any(is_close(self._value(count)[self.active], self.tolerance) for count in further)

    def _explained(self, hypothesis: Hypothesis | None) -> Reading:
        """A reading in steps, with its number named."""
        steps, left = self._steps(hypothesis)
        factor = float(np.median(left))
        names = name_number(factor, self.cells.split, self._amounts(hypothesis, factor), self.tolerance)
        cost = hypothesis.cost if hypothesis else 0.0
        cost += 2.0 * any(step.cause == "other_mode" for step in steps)
        if abs(factor - 1) > self.tolerance:
            cost += names[0].cost if names else _UNNAMED
        return Reading(hypothesis, factor, names, steps, cost)

    def _steps(self, hypothesis: Hypothesis | None) -> tuple[list[Deviation], Floats]:
        """Deviations from asked to measured but for one number, and measured/asked that they leave."""
        steps: list[Deviation] = []
        left = self.ratio
        if hypothesis is None or self.asked is None:
            if hypothesis is not None:  # a mode of one's own was asked for, and it is another
                change = self._shape(hypothesis) / self.asked_of_cell
                left = self._step(steps, left, change / change[0], OTHERS["other_mode"], "other_mode")
            return steps, left
        base = hypothesis.of_the_step()
        change = self._shape(base) / self._shape(self.asked)
        name = "other_mode"
        if base.mode == self.asked.mode and hypothesis.again is None:
            name = "rows_as_rollouts"
        row = OTHERS[name]
        cause = Cause(f"{row.text}: {base.words(self.cells)}", row.rows)
        left = self._step(steps, left, change, cause, name)
        if hypothesis.again is not None:
            change = self._value(hypothesis.again)[self.active] ** hypothesis.again_power
            left = self._step(steps, left, change, *_cause_again(hypothesis))
            return steps, left
        plain = hypothesis.counted_plainly()
        change = self._shape(plain) / self._shape(base) / plain.natural(self.cells)
        left = self._step(steps, left, change, *_cause_of_part(hypothesis))
        change = self._shape(hypothesis) / self._shape(plain)
        if hypothesis.size is not None:
            row = OTHERS["counted_otherwise"]
            unit = "part" if hypothesis.size.unit == "scope" else hypothesis.size.unit
            text = row.text.format(unit=unit, counting=COUNTINGS.get(hypothesis.size.counting, ""))
            left = self._step(steps, left, change, Cause(text, row.rows), "counted_otherwise")
        return steps, left

    def _step(
        self,
        steps: list[Deviation],
        left: Floats,
        change: Floats,
        cause: Cause,
        name: str,
    ) -> Floats:
        """One step that is more than a number; returns what it leaves."""
        if is_close(change, self.tolerance):
            return left
        shape, factors = self._places(change)
        steps.append(Deviation(shape=shape, causes=(name,), factors=factors, text=cause.text, rows=cause.rows))
        return left / change

    def _places(self, values: Floats) -> tuple[Shape, tuple[tuple[str, float], ...]]:
        """The coarsest partition over which values of active cells are constant, and the value at each place."""
        for shape, names, pattern in PARTITIONS:
            if names == ("rollout",) and self.cells.rollouts_are_samples:
                continue
            if names == ("microbatch",) and self.cells.groups(("dp_rank",))[1] == 1:
                continue
            group = self.cells.groups(names)[0][self.active]
            unique, first, inverse = np.unique(group, return_index=True, return_inverse=True)
            low, high = np.full(len(unique), np.inf), np.full(len(unique), -np.inf)
            np.minimum.at(low, inverse.reshape(-1), values)
            np.maximum.at(high, inverse.reshape(-1), values)
            if (high - low <= self.tolerance * np.abs(low)).all():
                ids = np.stack([self.cells.ids[name][self.active][first] for name in names], 1).tolist()
                middle = ((low + high) / 2).tolist()
                return shape, tuple((pattern.format(*one), value) for one, value in zip(ids, middle, strict=True))
        raise AssertionError("a cell is one place")

    def _amounts(self, hypothesis: Hypothesis | None, factor: float) -> list[Amount]:
        """Numbers that a wrong count leaves over, besides sizes."""
        cells, facts, aggregation = self.cells, self.step.measured.facts, self.step.asked
        base = hypothesis or Hypothesis("token_mean", Count("tokens"))
        unit = MODES[base.mode].unit
        amounts = amounts_of(cells, facts, unit)
        tokens = cells.total("mask")
        if base.size is not None and base.size.unit == "scope" and base.size.scope == "step":
            for counting, words in COUNTINGS.items():
                known = counting not in ("response", "total") or counting in cells.lengths_known
                if known and (other := cells.total(counting)) != tokens:
                    amounts.append(Amount(counting, f"{tokens:g}/{other:g} ({words})", tokens / other, 1.5))
            amounts += _other_count("T", tokens, factor, self.tolerance)
        if base.units is not None and not base.local:
            mine = float(self._value(base.units)[0])
            rows = () if self.cells.rollouts_are_samples or unit != "rollout" else ("sample",)
            for what in dict.fromkeys((base.units.what, unit, *rows)):
                for counting in ("all", "active"):
                    other = float(self._value(Count(what, counting=counting))[0])
                    cause = "unit_counting" if what == base.units.what else "rows_for_rollouts"
                    if other and other != mine:
                        formula = f"{mine:g}/{other:g} ({counting} {what}s)"
                        amounts.append(Amount(cause, formula, mine / other, 1.0))
            amounts += _other_count("U", mine, factor, self.tolerance)
        if aggregation.divisor is not None:
            other = aggregation.divisor / factor
            if abs(other - round(other)) <= min(0.05, self.tolerance * other) and round(other) >= 1:
                formula = f"{aggregation.divisor:g}/{round(other)} (divisors)"
                amounts.append(Amount("divisor", formula, aggregation.divisor / round(other), 2.3))
        if hypothesis is not None and hypothesis.local and hypothesis.times is None:
            every, filled = (averages_of_parts(hypothesis, cells, counting) for counting in ("all", "active"))
            if every > 1:
                amounts.append(Amount("parts_summed", f"{every:g} parts", every, 0.85))
            if every != filled:
                formula = f"{every:g}/{filled:g} (parts, to those with a token)"
                amounts.append(Amount("empty_parts", formula, every / filled, 0.5))
        return amounts

    # ---- what fits no hypothesis at once

    def _with_copies(self, beside: Floats | None) -> list[Reading]:
        """Samples that weigh a whole number of times what a hypothesis says are counted several times."""
        whole_ratio = self.ratio
        for hypothesis in self._simple(beside):
            shape = self._shape(hypothesis)
            left = whole_ratio if hypothesis is None else beside / shape  # type: ignore[operator]
            base = float(np.median(left))
            times = left / base
            whole = np.round(times)
            close = (np.abs(times - whole) <= self.tolerance * np.maximum(whole, 1)).all()
            if close and whole.min() == 1 and 1 < whole.max() <= 8 and (whole > 1).mean() < 0.5:
                self.ratio = whole_ratio / whole
                shape_of, factors = self._places(whole)
                factors = tuple((place, factor) for place, factor in factors if factor > 1)
                concerned = int(self.cells.active[self.active][whole > 1].sum())
                text = f": a {shape_of} or more of them"
                self.deviations.append(found("twice", "twice", text, factors=factors, tokens=concerned))
                return self._readings(None if beside is None else beside / whole)
        return []

    def _with_ranks_apart(self, beside: Floats | None) -> list[Reading]:
        """A hypothesis over counts of a part, and beside it a factor a CP place or DP rank that follows nothing."""
        if beside is None:
            return []
        for shape, names, pattern in PARTITIONS[:2]:
            group = self.cells.groups(names)[0][self.active]
            unique, first, position = np.unique(group, return_index=True, return_inverse=True)
            number = np.bincount(position.reshape(-1))
            if len(unique) < 2 or number.min() < 2 or self._apart(self.ratio, first, position):
                continue  # a plain partition, if anything
            for hypothesis in self._simple(beside):
                left = beside / self._shape(hypothesis)
                if hypothesis is None or not hypothesis.local or not self._apart(left, first, position):
                    continue
                # The rank whose number has the simplest name is the one that is right.
                choices = [(self._named(hypothesis, left[at] / left[first[0]]), left[at]) for at in first]
                scale = left[first] / min(choices, key=lambda choice: choice[0])[1]
                self.ratio = self.ratio / scale[position.reshape(-1)]
                ids = self.cells.ids[names[0]][self.active][first].tolist()
                factors = tuple((pattern.format(one), float(value)) for one, value in zip(ids, scale, strict=True))
                text = f"{OTHERS['no_law'].text}: ranks are scaled apart"
                self.deviations.append(Deviation(shape=shape, causes=("no_law",), factors=factors, text=text))
                return self._readings(beside / scale[position.reshape(-1)])
        return []

    def _apart(self, values: Floats, first: Ints, position: Ints) -> bool:
        """Whether values are one number a group."""
        return is_close(values / values[first][position.reshape(-1)], self.tolerance)

    def _named(self, hypothesis: Hypothesis, scale: float) -> float:
        """How far-fetched the factor is if the ranks' scale is that of one of them."""
        _, left = self._steps(hypothesis)
        factor = float(left[0]) * scale
        if abs(factor - 1) <= self.tolerance:
            return 0.0
        names = name_number(factor, self.cells.split, self._amounts(hypothesis, factor), self.tolerance)
        return names[0].cost if names else _UNNAMED

    def _simple(self, beside: Floats | None) -> Iterator[Hypothesis | None]:
        yield self.asked
        if beside is not None:
            yield from (
                one
                for one in library(self.cells, self.step.asked.units)
                if one.cost <= 2 and countable(one, self.cells)
            )

    def _within(self, ratio: Floats) -> None:
        """Tokens of one cell weigh differently."""
        ends = (("the smallest", float(ratio.min())), ("the largest", float(ratio.max())))
        self.deviations.append(found("within", "token", factors=ends))

    def _by_partition(self) -> None:
        """No hypothesis: the partition that measured/asked follows, and its law."""
        shape, factors = self._places(self.ratio)
        law = self._law(self.ratio)
        if law is None:
            self.deviations.append(found("no_law", shape, factors=factors))
            return
        words, power, length = law
        cause = "power_of_length" if length else "law"
        text = f": ({words})^{power:.4g}"
        formulas = (f"({words})^{power:.4g}",)
        self.deviations.append(found(cause, shape, text, factors=factors, formulas=formulas))

    def _law(self, ratio: Floats) -> tuple[str, float, bool] | None:
        """The count whose power measured/asked is, and the power."""
        logs = np.log(ratio)
        counts = [
            Count("tokens", scope, counting, unit)
            for scope in self.cells.scopes()
            for unit in ("scope", "prompt", "sample", "rollout")
            for counting in ("mask", "length", "response", "total")
        ]
        counts += [
            Count(what, scope, counting, unit)
            for scope in self.cells.scopes()
            for unit in ("scope", "prompt")
            for what in ("rollout", "sample", "prompt")
            for counting in ("all", "active")
            if not (what == unit == "prompt")
        ]
        for count in counts:
            if (count.counting in ("response", "total") and count.counting not in self.cells.lengths_known) or (
                "prompt" in (count.unit, count.what) and not self.cells.has_prompts
            ):
                continue
            values = np.log(self._value(count)[self.active])
            if len(np.unique(values)) < 3:  # two points are on every line
                continue
            power = float(np.cov(values, logs)[0, 1] / values.var(ddof=1))
            left = logs - power * values
            if power and float(np.ptp(left)) <= 2 * self.tolerance:
                return count.words, power, count.what == "tokens" and count.unit == "sample"
        return None

    # ---- in words

    def _say_what_it_is(self, readings: list[Reading]) -> None:
        """The readings in words; modes of the table that these very weights are come first."""
        told = [(reading, *self._words(reading)) for reading in readings]
        exact = [
            words for reading, words, is_it in told if is_it and not (reading.hypothesis and reading.hypothesis.local)
        ]
        near = [words for reading, words, _ in told if words and reading.cost <= readings[0].cost + _AS_LIKELY]
        beside = "otherwise " if self.deviations or self.placed.deviations else ""
        self.what_it_is = [f"{beside}{words}" for words in dict.fromkeys(exact or near)][:_TOLD]

    def _words(self, reading: Reading) -> tuple[str, bool]:
        """A reading in words, and whether it is just that; no words for a divisor that nobody would give."""
        hypothesis = reading.hypothesis
        if hypothesis is None:
            name, times = f"{self.step.asked.mode.name}, a mode of your own", reading.factor
        else:
            beside = self.ratio * self.asked_of_cell
            times = float(np.median(beside / self._shape(hypothesis))) * hypothesis.natural(self.cells)
            name = hypothesis.words(self.cells)
            if MODES[hypothesis.mode].takes_divisor:
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


def _other_count(letter: str, count: float, factor: float, tolerance: float) -> list[Amount]:
    """A whole number in the place of a count."""
    other = count / factor
    whole = round(other)
    if whole < 1 or whole > 1e15 or other * tolerance > 0.05 or abs(other - whole) > tolerance * other:
        return []
    return [Amount("other_count", f"{letter}/{whole}, {letter} = {count:g}", count / whole, 3.4)]


def _cause_of_part(hypothesis: Hypothesis) -> tuple[Cause, str]:
    """A denominator of a part of the step."""
    size, units = hypothesis.size, hypothesis.units
    part = hypothesis.part
    if units is not None and units.what == "microbatch":
        return PARTS["real", "microbatch"], "own_tokens_real_microbatches"
    if hypothesis.times is not None:
        row = PARTS.get(("by_rows", part), PARTS["by_rows", "microbatch"])
        return row, f"own_tokens_by_rows_{part}"
    if units is not None and units.unit == "prompt":
        return OTHERS["samples_of_prompt"], "samples_of_prompt"
    if size is not None and size.scope != "step" and size.unit == "scope":
        return PARTS["tokens", size.scope], f"own_tokens_{size.scope}"
    if units is not None and units.scope != "step":
        row = PARTS["units", units.scope]
        return replace(row, text=row.text.format(unit=units.what)), f"own_units_{units.scope}"
    unit = "unit" if size is None else size.unit
    row = OTHERS["own_tokens_of_part"]
    return replace(row, text=row.text.format(unit=unit)), f"own_tokens_of_{unit}"


def _cause_again(hypothesis: Hypothesis) -> tuple[Cause, str]:
    count, divided = hypothesis.again, hypothesis.again_power < 0
    assert count is not None
    verb = "divided" if divided else "multiplied"
    name = f"{verb}_again_{count.what}_{count.unit if count.unit != 'scope' else count.scope}"
    rows = PARTS["divided_again", "microbatch"].rows if divided and count == Count("tokens", "microbatch") else ()
    if divided and count.what == "tokens" and count.unit in ("sample", "rollout"):
        rows = OTHERS["other_mode"].rows
    return Cause(f"{verb} once more by {count.words}", rows), name


def _one_factor(reading: Reading) -> Deviation:
    names = reading.names
    if not names:
        return Deviation(
            shape="factor",
            causes=("factor",),
            factors=(("all", reading.factor),),
            text=FACTORS["factor"].text,
        )
    causes = dict.fromkeys((named.formula, named.text) for named in names)
    if len(causes) == 1:
        text = names[0].text or "these sizes are in it once too often, or too seldom"
    else:
        text = "; or ".join(f"{formula}: {words}" if words else formula for formula, words in causes)
    return Deviation(
        shape="factor",
        causes=tuple(dict.fromkeys(named.cause for named in names)),
        factors=(("all", reading.factor),),
        formulas=tuple(dict.fromkeys(named.formula for named in names)),
        text=text,
        rows=tuple(sorted({row for named in names for row in named.rows})),
    )
