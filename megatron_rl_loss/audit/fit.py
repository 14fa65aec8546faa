"""Which counts of the step is measured / asked made of? One sparse fit of whole numbers, in logs.

    log(measured / asked)[cell] = c + sum_k a_k * log(count_k[cell]),    a_k in {-1, 0, 1}, at most three not 0

The constant c is fitted in the same way: sizes of the split to small powers, and at most one amount of the step. A fit
is a `Reading`: it says of what the measured weights could be made, not why.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_rl_loss.audit.counts import COUNTINGS, WIDTHS, Cells, Count
from megatron_rl_loss.audit.mode_table import row_of
from megatron_rl_loss.audit.tokens import Floats, Ints
from megatron_rl_loss.modes.names import Aggregation

Powers = tuple[tuple[str, int], ...]
Counts = tuple[tuple[Count, int], ...]
#: In what a reading's counts are expressed: in what a part has on average ("mean of means" is then the constant 1), the
#: same against a mean over tokens instead of what was asked, or as they are.
Baseline = Literal["average", "mean", "plain"]

_UNDO = 0.2  # cost of not dividing by what the asked mode divides by
_UNNAMED = 3.2  # cost of a constant without a name
_LIKELY = 0.9  # readings that cost so much more than the first are left out
_SHOWN = 3
#: Sizes of the split: letter, field of `Split`, largest power, cost of a power.
_SIZES = (
    ("DP", "dp_size", 2, 1.0),
    ("CP", "cp_size", 2, 1.0),
    ("K", "num_microbatches", 2, 1.0),
    ("TP", "tp_size", 1, 1.5),
    ("PP", "pp_size", 1, 1.5),
)
_SQUARED = 0.5  # what a second power costs more
_DEAREST = 4.0  # of a product of sizes
#: Products of an amount and sizes that a trainer makes by itself: a gradient that nothing divides by its tokens.
_MADE = {(("CP", 1), ("K", -1), ("T", 1)): 3.0, (("DP", -1), ("T", 1)): 3.0}


@dataclass(frozen=True)
class Reading:
    """One way in which the measured weights could have come about, which fits all tokens of the step."""

    counts: tuple[tuple[Count, int], ...] = ()  # what a weight is multiplied by (power 1) or divided by (-1)
    baseline: Baseline = "average"  # in what the counts are expressed
    constant: Powers = ()  # sizes and amounts that the rest is made of; empty where it is 1 or has no name
    factor: float = 1.0  # the rest as a number
    named: bool = True  # whether `constant` is that number
    places: tuple[tuple[str, float], ...] = ()  # places that weigh apart from all others, where that says it
    cost: float = 0.0  # how far-fetched it is
    text: str = ""  # in words

    @property
    def formula(self) -> str:
        """The constant by name, such as ``CP·T/K``; empty where there is none."""
        above = [name + "²" * (power == 2) for name, power in self.constant if power > 0]
        below = [name + "²" * (power == -2) for name, power in self.constant if power < 0]
        bottom = f"({'·'.join(below)})" if len(below) > 1 else "".join(below)
        return ("·".join(above) or "1" * bool(below)) + (f"/{bottom}" if below else "")


class Fitter:
    """Fits measured / asked of cells."""

    def __init__(
        self, cells: Cells, active: Ints, aggregation: Aggregation, expected_weight: Floats, facts: Mapping[str, Any],
        tolerance: float,
    ) -> None:  # fmt: skip
        # `active`: numbers of the cells that are judged on. Ratios, and `expected_weight` (what is asked beside the
        # mask), go over these, [num_active].
        self.cells, self.active, self.tolerance = cells, active, tolerance
        self.aggregation, self.expected_weight = aggregation, expected_weight
        self.mode = row_of(aggregation.mode)
        self.own_size: Count | None = None  # what the asked mode divides by, which differs from cell to cell
        if self.mode is not None and self.mode.unit != "step" and not self.mode.takes_divisor:
            self.own_size = Count("tokens", unit=self.mode.unit)
        self.scalars = _scalars(cells, aggregation.divisor, facts)
        self._constants = sorted(self._named_constants(), key=lambda one: one[0])
        self._logs = np.array([log for log, *_ in self._constants])

    def readings(self, ratio: Floats) -> list[Reading]:
        """Of positive measured / asked, [num_active]: what fits, the simplest first, at most three."""
        logs = np.log(ratio)
        found: list[Reading] = []
        combinations = list(self._combinations(logs))
        filled, number = Count("microbatch", "dp_rank", "active"), self.scalars["K"]
        if self.value(filled).min() == self.value(filled).max() < number:  # as many on all ranks, so no column
            combinations += [(cost + 0.5, (*counts, (filled, -1))) for cost, counts in combinations if counts]
        for cost, counts in combinations:
            found += [one for one in self._with_constants(logs, counts, cost) if self._is_evident(logs, one)]
        found.sort(key=lambda one: one.cost)
        if found and not found[0].named:
            return found[:1]
        found = [one for one in found if one.named]
        return [one for one in found if one.cost <= found[0].cost + _LIKELY][:_SHOWN]

    def num_chosen(self, reading: Reading) -> int:
        """How many counts it takes that differ from cell to cell, beside what the asked mode divides by."""
        counts = [one for one, power in reading.counts if (one, power) != (self.own_size, 1)]
        return sum(bool(np.ptp(self.value(count)) > 0) for count in counts)

    def value(self, count: Count) -> Floats:
        """A count, of active cells."""
        return self.cells.values(count)[self.active]

    def _is_evident(self, logs: Floats, reading: Reading) -> bool:
        """Whether more numbers of the step are explained than were chosen to explain them."""
        distinct = 1 + int((np.diff(np.sort(logs)) > self.tolerance).sum())
        return distinct - 1 + reading.named >= 2 * self.num_chosen(reading)

    def _columns(self) -> Iterator[tuple[float, Count, Floats]]:
        """Logs of counts that differ from cell to cell; of those that are the same in this step the plainest."""
        seen: set[bytes] = set()
        for cost, count in sorted(self.cells.features(), key=lambda one: one[0]):
            values = self.value(count)
            if not (values > 0).all():
                continue
            logs = np.log(values)
            key = values.tobytes() + np.float64(self.cells.average(count)).tobytes()
            if np.ptp(logs) > 1e-9 and key not in seen:
                seen.add(key)
                yield cost, count, logs

    def _combinations(self, logs: Floats) -> Iterator[tuple[float, Counts]]:
        """All that leave one number for all cells: none, one, two and, where none of these does, three counts."""

        def fits(values: Floats) -> bool:
            return bool(np.ptp(logs - values) <= self.tolerance)

        if fits(np.zeros(1)):
            yield 0.0, ()
            return
        columns = list(self._columns())
        if not columns:
            return
        number = len(columns)
        zero = np.zeros((1, len(logs)))  # row 0: a count less
        signed = np.concatenate([zero, *([sign * column] for sign in (1, -1) for *_, column in columns)])
        # Sums are looked up by a projection on one random direction, and compared entry by entry where they agree.
        direction = np.random.default_rng(0).standard_normal(len(logs))
        direction -= direction.mean()
        wanted, at = float(logs @ direction), signed @ direction
        close = float(np.abs(direction).sum()) * self.tolerance + 1e-9 * float(np.abs(at).max())

        one, other = np.triu_indices(2 * number + 1, 1)
        differ = other != one + number * (one > 0)
        one, other = one[differ], other[differ]
        order = np.argsort(at[one] + at[other])
        sums = (at[one] + at[other])[order]
        fitted = False
        for third in range(2 * number + 1):
            if third == 1 and fitted:
                return
            low, high = np.searchsorted(sums, [wanted - at[third] - close, wanted - at[third] + close])
            for pair in (order[low:high] if third else np.sort(order[low:high])).tolist():
                rows = [int(one[pair]), int(other[pair]), third]
                apart = third == 0 or (third > rows[1] and len({row % number for row in rows}) == 3)
                if not apart or not fits(signed[rows].sum(0)):
                    continue
                fitted = True
                chosen = [(columns[(row - 1) % number], 1 if row <= number else -1) for row in rows if row]
                counts = tuple((count, sign) for (_, count, _), sign in chosen)
                undone = (self.own_size, 1)
                yield sum(_UNDO if (count, sign) == undone else 1 + cost for (cost, count, _), sign in chosen), counts

    # ---- the constant

    def _with_constants(self, logs: Floats, counts: Counts, cost: float) -> Iterator[Reading]:
        """The combination with every name of the number that it leaves."""
        plain = logs - sum(power * np.log(self.value(count)) for count, power in counts)
        numbers: dict[Baseline, tuple[float, float]] = {}
        by_width = any(count.counting in WIDTHS for count, _ in counts)
        average = float(np.median(plain)) + sum(power * math.log(self.cells.average(count)) for count, power in counts)
        if not by_width:
            numbers["average"] = (average, 0.0)
        if self.mode is not None and self.mode.takes_divisor and counts and not by_width:
            numbers["mean"] = (average + math.log(float(self.expected_weight[0]) * self.scalars["T"]), 0.1)
        if counts:
            numbers["plain"] = (float(np.median(plain)), 0.4)
        for baseline, (number, extra) in numbers.items():
            low, high = np.searchsorted(self._logs, [number - self.tolerance, number + self.tolerance])
            for _, constant, cost_of_constant in self._constants[low:high]:
                yield Reading(counts, baseline, constant, math.exp(number), True, cost=cost + extra + cost_of_constant)
        baseline, (number, extra) = next(iter(numbers.items()))
        yield Reading(counts, baseline, (), math.exp(number), False, cost=cost + extra + _UNNAMED)

    def _amounts(self) -> Iterator[tuple[Powers, float]]:
        """Counts of the whole step that a wrong denominator leaves over."""
        scalars = self.scalars
        own = "P" if self.mode is not None and self.mode.unit == "prompt" else "N"
        for name in ("T", "N", "rows", "P", "N_active", "rows_active", "P_active"):
            if name in scalars:
                cost = 2.0 if name == "T" else 2.1 + 0.1 * name.endswith("_active") + 0.5 * (name[0] != own)
                yield from ((((name, power),), cost) for power in (1, -1))
        for counting in COUNTINGS:
            if f"T_{counting}" in scalars:
                yield (("T", 1), (f"T_{counting}", -1)), 1.5
        units = itertools.permutations(("N", "N_active", "rows", "rows_active"), 2)
        for one, other in (*units, ("P", "P_active"), ("P_active", "P")):
            if one in scalars and other in scalars:
                yield ((one, 1), (other, -1)), 1.0
        if "steps_per_generation" in scalars:
            yield (("K", 1), ("steps_per_generation", -1)), 0.5
        if "L" in scalars:
            yield (("L", 1),), 0.5

    def _named_constants(self) -> Iterator[tuple[float, Powers, float]]:
        """The log of each product of sizes and at most one amount, with its powers and its cost."""
        sizes = [(letter, most, cost) for letter, _, most, cost in _SIZES if self.scalars.get(letter, 1) > 1]
        for powers in itertools.product(*(range(-most, most + 1) for _, most, _ in sizes)):
            chosen = [(letter, power, each) for (letter, _, each), power in zip(sizes, powers, strict=True) if power]
            cost = sum(each * abs(power) + _SQUARED * (abs(power) > 1) for _, power, each in chosen)
            if cost > _DEAREST:
                continue
            named = tuple((letter, power) for letter, power, _ in chosen)
            yield self._log(named), named, cost
            for amount, more in self._amounts():
                # A ratio of counts beside sizes is nearly always chance.
                if abs(self._log(amount)) > self.tolerance and (not named or (len(amount) == 1 and cost <= 2)):
                    both = (*named, *amount)
                    yield self._log(both), both, _MADE.get(both, cost + more + bool(named))

    def _log(self, powers: Powers) -> float:
        return sum(power * math.log(self.scalars[name]) for name, power in powers)


def _scalars(cells: Cells, divisor: float | None, facts: Mapping[str, Any]) -> dict[str, float]:
    """Sizes and counts of the whole step, by the letters that formulas use."""
    scalars = {letter: float(getattr(cells.split, field)) for letter, field, *_ in _SIZES}
    scalars["T"] = cells.total("mask")
    for counting in COUNTINGS:
        known = counting not in ("response", "total") or counting in cells.lengths_known
        if counting not in ("mask", *WIDTHS) and known:
            scalars[f"T_{counting}"] = cells.total(counting)
    units = {"N": "rollout", "rows": "sample", "P": "prompt"}
    for letter, unit in units.items():
        if unit in cells.units:
            for counting in ("all", "active"):
                name = letter if counting == "all" else f"{letter}_active"
                scalars[name] = float(cells.values(Count(unit, counting=counting))[0])
    if divisor is not None:
        scalars["L"] = divisor
    if "steps_per_generation" in facts:
        scalars["steps_per_generation"] = float(facts["steps_per_generation"])
    return {name: value for name, value in scalars.items() if value > 0}
