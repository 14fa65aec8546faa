"""The verdict on a measured step: a list of findings, of which the worst is the outcome.

Whoever sees something adds a finding where it is seen: a severity and a sentence. Ranks join their lists by union, and
what is printed are the sentences in their order. A step is `WRONG` only on evidence that no deliberate set-up explains.
Evidence is read off a measurement, so whatever compares through a measurement that did not succeed adds none.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from megatron_rl_loss.proof.outcomes import PROOF_VARIABLE


class Severity(IntEnum):
    """What a finding means for its step; the outcome of a step is the largest."""

    GIVEN = 0  # what a proof takes as given, and says
    IN_PART = 1  # what was not decided of a step that is right in everything that was
    NOT_YET = 2  # the step has nothing to measure, and the next one may
    NOT_PROVED = 3  # why nothing could be decided
    WRONG = 4  # evidence against the step

    @property
    def word(self) -> str:
        return _WORDS[self]

    def stops(self, level: str) -> bool:
        """True if the level aborts steps of this outcome; one that is to be measured again goes on at any level."""
        if level == "strict":
            return self in (Severity.IN_PART, Severity.NOT_PROVED, Severity.WRONG)
        return level == "error" and self is Severity.WRONG


GIVEN, IN_PART, NOT_YET, NOT_PROVED, WRONG = Severity
_WORDS = {
    GIVEN: "proved",
    IN_PART: "proved in part",
    NOT_YET: "not proved yet",
    NOT_PROVED: "not proved",
    WRONG: "wrong",
}
#: The strictest level that trains on a step of this outcome.
_BELOW = {IN_PART: "error", NOT_PROVED: "error", WRONG: "warn"}


class Finding(NamedTuple):
    severity: Severity
    text: str


#: The end of each line that proves something: the page of what no proof can see.
LIMITS = "(limits: docs/proof.md)"
#: Findings of one severity beyond these say nothing new; nor does the rest of a long one.
_MOST_OF_ONE, _MOST_WORDS = 6, 600


def joined(*rank_findings: Iterable[Finding]) -> list[Finding]:
    """The union of what ranks found, in order, and of bounded size: each rank may find its own."""
    number_of = dict.fromkeys(Severity, 0)
    findings = dict[Finding, None]()
    for finding in (Finding(severity, text[:_MOST_WORDS]) for own in rank_findings for severity, text in own):
        if finding not in findings and number_of[finding.severity] < _MOST_OF_ONE:
            number_of[finding.severity] += 1
            findings[finding] = None
    return [*findings]


def outcome_of(findings: Iterable[Finding]) -> Severity:
    """The worst severity; of no finding that of a proof."""
    return max((finding.severity for finding in findings), default=GIVEN)


def texts_of(findings: Iterable[Finding], *severities: Severity) -> list[str]:
    """The sentences of these severities, the worst severity first."""
    return [text for wanted in sorted(severities, reverse=True) for severity, text in findings if severity is wanted]


class Verdict(NamedTuple):
    """What was found of a step.

    Attributes:
        aim: what was asked of which loss.
        proved: the terms whose weights are right, and the sizes of their step; empty where there are none.
        is_empty: no token had a gradient; with `NOT_YET` alone.
    """

    findings: list[Finding]
    aim: str
    proved: tuple[str, str] = ("", "")
    is_empty: bool = False

    @property
    def outcome(self) -> Severity:
        return outcome_of(self.findings)

    def line(self, level: str) -> str:
        """What the first rank prints, or all ranks raise."""
        outcome = self.outcome
        texts = texts_of(self.findings, *(severity for severity in Severity if severity > GIVEN))
        if outcome in (GIVEN, IN_PART):
            terms, sizes = self.proved
            says = "proved" if outcome is GIVEN else "PROVED IN PART"
            line = "; ".join([f"{terms}, aggregation {says} on {sizes}", *texts_of(self.findings, GIVEN), *texts])
            line += f" {LIMITS}"
        elif outcome is NOT_YET:
            line = f"{self.aim}, not proved yet: {' '.join(texts)}"
        elif outcome is NOT_PROVED:
            line = f"{self.aim}, NOT PROVED: {' '.join(texts)}"
        else:
            line = f"{self.aim} was expected, but the first training step does something else.\n" + "\n".join(texts)
        return line + _what_follows(outcome, level)


def _what_follows(outcome: Severity, level: str) -> str:
    """What becomes of a step that is decided and not proved."""
    if outcome in (GIVEN, NOT_YET):
        return ""
    if outcome.stops(level):
        return f"\nAll ranks aborted before the optimizer step; {PROOF_VARIABLE}={_BELOW[outcome]} trains on."
    return "\nTraining goes on." if outcome is WRONG else f"\nTraining goes on; {PROOF_VARIABLE}=strict aborts."


def not_proved(why: str, aim: str) -> Verdict:
    """The verdict on a step of which nothing can be known."""
    return Verdict([Finding(NOT_PROVED, why)], aim)
