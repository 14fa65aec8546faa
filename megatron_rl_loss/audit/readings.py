"""Which hypotheses are the weights, and by which steps do they differ from what was asked?

Every hypothesis is compared with the weights beside the mask, v. Where v / shape is one number for all tokens, that is
a *reading*: the shape, and a number to be named, in steps from what was asked to what was measured: another mode,
counts of a part, a further count, and a factor. All steps multiplied are measured/asked.
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
from megatron_rl_loss.audit.places import PARTITIONS
from megatron_rl_loss.audit.report import Deviation, Shape
from megatron_rl_loss.audit.tokens import Floats, Ints
from megatron_rl_loss.modes.table import MODES

UNNAMED = 4.0  # cost of a number without a name


@dataclass(frozen=True)
class Step:
    """One step from asked to measured: a factor a cell, [num_active], and the name of its cause."""

    change: Floats
    cause: Cause
    name: str


@dataclass
class Reading:
    """A hypothesis that fits.

    Attributes:
        hypothesis: None for a mode of one's own that was asked for.
        factor: what is left of measured/asked for the number to explain.
        steps: from asked to measured, but for that number.
        names: of the number; none if it is 1, or if nothing explains it.
    """

    hypothesis: Hypothesis | None
    factor: float
    names: list[Named]
    steps: list[Step] = field(default_factory=list)
    cost: float = 0.0


class Reader:
    """Reads the weights of cells.

    Attributes:
        active: numbers of the cells that are judged on, [num_active]; arrays of ratios go over these.
        asked: what was asked for; None for a mode of one's own.
        asked_of_cell: its weight beside the mask, [num_active].
        asked_varies: it is not one number a cell, which only a mode of one's own can be.
        sound: nothing is wrong: modes of the table alone are tried.
    """

    def __init__(
        self, step: Comparison, cells: Cells, active: Ints, asked_of_cell: Floats, asked_varies: bool, sound: bool
    ) -> None:
        self.step, self.cells, self.sound = step, cells, sound
        self.active, self.asked_of_cell, self.asked_varies = active, asked_of_cell, asked_varies
        self.asked = hypothesis_of(step.asked)
        self.tolerance = 2 * step.tolerance  # of a ratio of two measured weights
        self._values: dict[Count, Floats] = {}

    def value(self, count: Count) -> Floats:
        """The quantity, of active cells."""
        if count not in self._values:
            self._values[count] = self.cells.values(count)[self.active]
        return self._values[count]

    def shape_of(self, hypothesis: Hypothesis | None) -> Floats:
        """Of active cells; of a mode of one's own what it asks for."""
        if hypothesis is None:
            return self.asked_of_cell
        return hypothesis.shape(len(self.active), self.value)

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

    def readings(self, ratio: Floats) -> list[Reading]:
        """Of measured/asked, everything that fits, the simplest first."""
        beside = None if self.asked_varies else ratio * self.asked_of_cell
        readings: list[Reading] = []
        seen: set[Hypothesis | None] = set()
        kinds: set[tuple[str, ...]] = set()  # that fit already, counted more plainly
        for hypothesis in self._candidates():
            if hypothesis in seen or (hypothesis and not self._says_something(hypothesis)):
                continue
            seen.add(hypothesis)
            if hypothesis is None:
                left = ratio
            elif beside is None:
                continue
            else:
                left = beside / self.shape_of(hypothesis)
            kind = () if hypothesis is None else hypothesis.kind
            if kind not in kinds and is_close(left, self.tolerance):
                kinds.add(kind)
                readings.append(self._explained(hypothesis, ratio))
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
        return not any(is_close(self.value(count), self.tolerance) for count in further)

    def _explained(self, hypothesis: Hypothesis | None, ratio: Floats) -> Reading:
        """A reading in steps, with its number named."""
        steps, left = self._steps(hypothesis, ratio)
        factor = float(np.median(left))
        names = self._names(hypothesis, factor)
        cost = hypothesis.cost if hypothesis else 0.0
        cost += 2.0 * any(step.name == "other_mode" for step in steps)
        if abs(factor - 1) > self.tolerance:
            cost += names[0].cost if names else UNNAMED
        return Reading(hypothesis, factor, names, steps, cost)

    def cost_of_factor(self, hypothesis: Hypothesis, ratio: Floats, scale: float) -> float:
        """How far-fetched the factor is that is left of a ratio, times a scale."""
        _, left = self._steps(hypothesis, ratio)
        factor = float(left[0]) * scale
        if abs(factor - 1) <= self.tolerance:
            return 0.0
        names = self._names(hypothesis, factor)
        return names[0].cost if names else UNNAMED

    def _names(self, hypothesis: Hypothesis | None, factor: float) -> list[Named]:
        return name_number(factor, self.cells.split, self._amounts(hypothesis, factor), self.tolerance)

    def _steps(self, hypothesis: Hypothesis | None, ratio: Floats) -> tuple[list[Step], Floats]:
        """Steps from asked to measured but for one number, and measured/asked that they leave."""
        steps: list[Step] = []
        left = ratio
        if hypothesis is None or self.asked is None:
            if hypothesis is not None:  # a mode of one's own was asked for, and it is another
                change = self.shape_of(hypothesis) / self.asked_of_cell
                left = self._step(steps, left, change / change[0], OTHERS["other_mode"], "other_mode")
            return steps, left
        base = hypothesis.of_the_step()
        change = self.shape_of(base) / self.shape_of(self.asked)
        name = "other_mode"
        if base.mode == self.asked.mode and hypothesis.again is None:
            name = "rows_as_rollouts"
        row = OTHERS[name]
        cause = Cause(f"{row.text}: {base.words(self.cells)}", row.rows)
        left = self._step(steps, left, change, cause, name)
        if hypothesis.again is not None:
            change = self.value(hypothesis.again) ** hypothesis.again_power
            left = self._step(steps, left, change, *_cause_again(hypothesis))
            return steps, left
        plain = hypothesis.counted_plainly()
        change = self.shape_of(plain) / self.shape_of(base) / plain.natural(self.cells)
        if hypothesis.by_width:  # in the place of the divisor; where none was asked for the number says nothing
            change *= self.step.asked.divisor or float(np.median(left / change))
        left = self._step(steps, left, change, *_cause_of_part(hypothesis))
        change = self.shape_of(hypothesis) / self.shape_of(plain)
        if hypothesis.size is not None:
            row = OTHERS["counted_otherwise"]
            unit = "part" if hypothesis.size.unit == "scope" else hypothesis.size.unit
            text = row.text.format(unit=unit, counting=COUNTINGS.get(hypothesis.size.counting, ""))
            left = self._step(steps, left, change, Cause(text, row.rows), "counted_otherwise")
        return steps, left

    def _step(self, steps: list[Step], left: Floats, change: Floats, cause: Cause, name: str) -> Floats:
        """One step that is more than a number; returns what it leaves."""
        if is_close(change, self.tolerance):
            return left
        steps.append(Step(change, cause, name))
        return left / change

    def deviations(self, reading: Reading) -> list[Deviation]:
        """The steps of a reading, place by place, and its number."""
        told = []
        for step in reading.steps:
            shape, factors = self.places(step.change)
            text, rows = step.cause.text, step.cause.rows
            told.append(Deviation(shape=shape, causes=(step.name,), factors=factors, text=text, rows=rows))
        return [*told, _one_factor(reading)] if abs(reading.factor - 1) > self.tolerance else told

    def places(self, values: Floats) -> tuple[Shape, tuple[tuple[str, float], ...]]:
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
                known = counting in FACTORS and (
                    counting not in ("response", "total") or counting in cells.lengths_known
                )
                if known and (other := cells.total(counting)) != tokens:
                    amounts.append(Amount(counting, f"{tokens:g}/{other:g} ({words})", tokens / other, 1.5))
            amounts += _other_count("T", tokens, factor, self.tolerance)
        if base.units is not None and not base.local:
            mine = float(self.value(base.units)[0])
            rows = () if self.cells.rollouts_are_samples or unit != "rollout" else ("sample",)
            for what in dict.fromkeys((base.units.what, unit, *rows)):
                for counting in ("all", "active"):
                    other = float(self.value(Count(what, counting=counting))[0])
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
            every = averages_of_parts(hypothesis, cells, "all")
            if every > 1:
                amounts.append(Amount("parts_summed", f"{every:g} parts", every, 0.85))
            for counting, words in (("active", "a token"), ("filled", "an entry")):
                some = averages_of_parts(hypothesis, cells, counting)
                if every != some:
                    formula = f"{every:g}/{some:g} (parts, to those with {words})"
                    amounts.append(Amount("empty_parts", formula, every / some, 0.5))
        return amounts


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
    if hypothesis.by_width:
        return OTHERS["own_width"], f"own_width_{part}"
    if units is not None and units.what == "microbatch":
        return PARTS["real", "microbatch"], "own_tokens_real_microbatches"
    if hypothesis.times is not None:
        row = PARTS.get(("by_rows", part), PARTS["by_rows", "microbatch"])
        return row, f"own_tokens_by_rows_{part}"
    if units is not None and units.unit == "prompt":
        return OTHERS["samples_of_prompt"], "samples_of_prompt"
    if size is not None and size.scope != "step" and size.unit == "scope":
        return PARTS["tokens", size.scope], f"own_tokens_{size.scope}"
    tokens_too = size is not None and size.scope != "step"
    if units is not None and units.scope != "step" and not tokens_too:
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
