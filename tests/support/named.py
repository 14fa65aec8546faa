"""Is a planted bug named by what the audit says of a step? One rule, for the museum's test and for its count.

The first reading is right if, on other random steps, it says what the bug does there: measured / asked as the bug's own
formula has it, times one number where the reading leaves a number without a name. It is *wrong* if it does not; of
readings that are equally simple any may be right. A step with one factor for each place, or without a reading, says the
numbers alone, and is neither.
"""

import math
from typing import Literal

import numpy as np
from counted_steps import Array, Step, measured
from published import Bug

from megatron_rl_loss.audit.comparison import StepSamples
from megatron_rl_loss.audit.counts import Cells
from megatron_rl_loss.audit.fit import Fitter, Reading
from megatron_rl_loss.audit.verdict import Verdict, judge
from megatron_rl_loss.modes.names import resolve

CLOSE = 2e-5  # of float32 weights
AS_SIMPLE = 0.15  # costs that far apart
Outcome = Literal["named", "numbers", "wrong", "not shown"]


class Named:
    """The outcomes of one bug. `seeds` make the other steps that a reading is tried on."""

    def __init__(self, bug: Bug, seeds: range = range(10_000, 10_003)) -> None:
        self.bug = bug
        self.asked = resolve(bug.asked, divisor=bug.divisor)
        with np.errstate(invalid="ignore"):
            self._others = [self._other(bug.step(seed)) for seed in seeds]

    def _other(self, step: Step) -> tuple[Fitter, Array]:
        """A step to evaluate readings on, and what the bug does to it: measured / asked by cell."""
        found = measured(step, self.bug.weights)
        cells = Cells(found.tokens, found.split)
        on = found.tokens.mask != 0
        at, expected = cells.of_entry[on], StepSamples(found.tokens).weights(self.asked)[on]
        beside, ratio = np.zeros(len(cells)), np.zeros(len(cells))
        beside[at], ratio[at] = expected / found.tokens.mask[on], found.weights[on] / expected
        active = np.flatnonzero(cells.tokens > 0)
        return Fitter(cells, active, self.asked, beside[active], {}, 1e-5), ratio[active]

    def outcome(self, step: Step) -> tuple[Outcome, Verdict]:
        """What the verdict on a step is worth."""
        verdict = judge(measured(step, self.bug.weights), self.asked)
        if verdict.sound:
            return "not shown", verdict
        names = [deviation.name for deviation in verdict.deviations]
        if bool(names) != bool(self.bug.deviations) or any(name not in self.bug.deviations for name in names):
            return "wrong", verdict
        if not verdict.readings:
            return ("named" if names else "numbers"), verdict
        first = verdict.readings[0]
        if first.places:
            return ("named" if self.bug.twice and self._are_copies(first, step) else "numbers"), verdict
        simplest = [one for one in verdict.readings if one.cost <= first.cost + AS_SIMPLE and not one.places]
        return ("named" if any(map(self._holds, simplest)) else "wrong"), verdict

    def _are_copies(self, reading: Reading, step: Step) -> bool:
        there = {f"sample {i}" for i in self.bug.twice if any(step.counted.samples[i].mask)}
        return {place for place, _ in reading.places} == there and all(abs(x - 2) < CLOSE for _, x in reading.places)

    def _holds(self, reading: Reading) -> bool:
        """Whether it says of the other steps what the bug does to them."""
        for fitter, ratio in self._others:
            rest = ratio / ratio_of(fitter, reading)
            rest = rest if reading.named else rest / rest[0]
            if np.abs(rest - 1).max() > CLOSE:
                return False
        return True


def ratio_of(fitter: Fitter, reading: Reading) -> Array:
    """measured / asked that a reading without places says, in this step; a constant without a name is 1."""
    ratio = np.ones(len(fitter.active))
    for count, power in reading.counts:
        values = fitter.value(count)
        ratio *= (values if reading.baseline == "plain" else values / fitter.cells.average(count)) ** power
    if reading.baseline == "mean":
        ratio /= fitter.expected_weight * fitter.scalars["T"]
    return ratio * math.prod(fitter.scalars.get(name, 1.0) ** power for name, power in reading.constant)
