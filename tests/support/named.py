"""The rule by which a verdict names a planted bug, for the museum's test and for its count.

A cause is right if it fits other random steps too: there the table's row and constant give what the bug's own formula
does, times one number where the constant has no name. Of several causes, which are equally simple, one must be right.
A verdict with causes of which none is right is *wrong*; one without a cause says the numbers alone, and is neither.
"""

from typing import Literal

import numpy as np
from counted_steps import Step, measured
from published import Bug

from megatron_rl_loss.audit.causes import Cause, Fits, fits
from megatron_rl_loss.audit.judge import expected_weights, judge, ratios_of
from megatron_rl_loss.audit.misplaced import take_off, without_copies
from megatron_rl_loss.audit.verdict import Verdict
from megatron_rl_loss.core.aggregation import resolve

CLOSE = 2e-5  # of float32 weights
Outcome = Literal["named", "numbers", "wrong", "not shown"]


class Named:
    """The outcomes of one bug. `seeds` make the other steps that a cause is tried on."""

    def __init__(self, bug: Bug, seeds: range = range(10_000, 10_003)) -> None:
        self.bug = bug
        self.asked = resolve(bug.asked, divisor=bug.divisor)
        self._others = [self._fits(bug.step(seed)) for seed in seeds]

    @np.errstate(divide="ignore", invalid="ignore")
    def _fits(self, step: Step) -> Fits:
        step_of_bug = measured(step, self.bug.weights)
        wanted = expected_weights(step_of_bug, self.asked)
        kept = take_off(step_of_bug, wanted, 1e-5)
        if "copies" in self.bug.deviations:
            kept = without_copies(kept, step_of_bug.tokens, wanted, CLOSE)
        ratios = ratios_of(step_of_bug, wanted, kept, 1e-5)
        return {} if ratios is None else fits(ratios, self.bug.divisor, CLOSE)

    def outcome(self, step: Step) -> tuple[Outcome, Verdict]:
        """The worth of the verdict on a step."""
        with np.errstate(invalid="ignore"):
            verdict = judge(measured(step, self.bug.weights), self.asked)
        if verdict.sound:
            return "not shown", verdict
        names = [fact.name for fact in verdict.misplaced]
        if bool(names) != bool(self.bug.deviations) or any(name not in self.bug.deviations for name in names):
            return "wrong", verdict
        if not verdict.causes:
            return ("named" if names else "numbers"), verdict
        return ("named" if any(map(self.holds, verdict.causes)) else "wrong"), verdict

    def holds(self, cause: Cause) -> bool:
        """True if it fits the other steps."""
        key = cause.row, cause.constant if cause.named else "?"
        return all(key in other for other in self._others)
