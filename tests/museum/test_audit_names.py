"""The audit names the shape of the bugs that public projects really had, and names nothing wrongly.

It sees the measured weights alone. `tools/count_museum.py` counts the same over 200 random steps of each bug.
"""

import pytest
from counted_steps import measured
from named import Named
from published import BUGS, WHERE, WITHOUT_WEIGHTS, Bug, exact

from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.core.aggregation import resolve

STEPS = 3


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.id) for bug in BUGS])
@pytest.mark.slow
def test_the_bug_is_named_by_its_shape_in_random_steps(bug: Bug) -> None:
    names = Named(bug)
    outcomes = [names.outcome(bug.step(seed)) for seed in range(STEPS)]
    for seed, (outcome, verdict) in enumerate(outcomes):
        assert outcome != "wrong", f"step {seed}\n{verdict}"
    assert sum(outcome == "named" for outcome, _ in outcomes) >= STEPS - 1


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.asked == "token_mean"][::9], ids=lambda bug: bug.id)
def test_another_bug_is_not_taken_for_it(bug: Bug) -> None:
    """Negative control: on weights of another formula the rule says that the reading is wrong."""
    names = Named(bug)
    other = next(another for another in BUGS if another.row == (9 if bug.row == 1 else 1))
    step = other.step(1)
    verdict = judge(measured(step, other.weights), resolve("token_mean"))
    assert verdict.causes
    assert not names.holds(verdict.causes[0]) or bug.weight is other.weight


def test_without_a_bug_the_same_steps_are_sound() -> None:
    """Negative control."""
    for bug in BUGS:
        verdict = judge(measured(bug.step(3), exact), resolve("token_mean"))
        assert verdict.sound, f"{bug.id}\n{verdict}"


def test_the_museum_is_complete() -> None:
    rows = {bug.row for bug in BUGS}
    assert rows | WITHOUT_WEIGHTS == set(WHERE) == set(range(59))
