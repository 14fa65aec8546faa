"""Group sizes and counts that an engine names, against those that came."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.proof.promises import Promises, other_count, other_data

MASKS = [[1, 1], [1], [1, 0, 1], [0, 1]]
SHARED, APART = "prompts share an id", "ids differ within a group, or the mini-batch was shuffled"


@pytest.mark.parametrize(
    ("ids", "promised", "mode", "says"),
    [
        ("aabb", 2, "prompt_mean", ""),
        ("aaab", 2, "prompt_mean", SHARED),  # unequal
        ("aaaa", 2, "prompt_mean", SHARED),  # merged
        ("abcd", 2, "prompt_mean", APART),  # split
        ("aabc", 2, "prompt_mean", ""),  # as a filter leaves them
        ("abcd", 1, "prompt_mean", ""),
        ("aaaa", 2, "sample_mean", ""),
        ("aaaa", None, "prompt_mean", ""),
        ("aaaa", 2, "session_mean", ""),
    ],
)
@pytest.mark.parametrize("is_sure", [True, False])
def test_groups(ids: str, promised: int | None, mode: str, says: str, is_sure: bool) -> None:
    totals = StepTotals.of(Samples(MASKS, prompt_ids=list(ids), ids={"session": list(ids)}))
    findings = Promises(promised, is_group_size_sure=is_sure).misgrouped(totals, resolve(mode))
    assert any(says in finding for finding in [*findings.faults, *findings.doubts]) == (says != "")
    assert len(findings.faults) == (says == SHARED and is_sure), "only a number that is sure is evidence"


@pytest.mark.parametrize(
    ("ids", "doubt", "given"),
    [
        ("aaaa", "All 4 samples have one prompt id. Say it.", ""),
        ("abcd", "Each of 4 prompts has one sample. Say it.", ""),
        ("aabb", "", "groups of prompts are as given: Say it."),
        ("aaab", "", "groups of prompts are as given: Say it."),
    ],
)
@pytest.mark.parametrize("mode", ["prompt_mean", "sample_mean"])
def test_groups_of_which_nobody_said_the_size(ids: str, doubt: str, given: str, mode: str) -> None:
    totals = StepTotals.of(Samples(MASKS, prompt_ids=list(ids)))
    findings = Promises(ask_size="Say it.").misgrouped(totals, resolve(mode))
    is_by_prompt = mode == "prompt_mean"
    assert findings == ([], [doubt] * bool(doubt and is_by_prompt), [given] * bool(given and is_by_prompt))
    alone = StepTotals.of(Samples([[1, 1]], prompt_ids=["a"]))
    assert Promises(ask_size="Say it.").misgrouped(alone, resolve(mode)) == ([], [], [])


@pytest.mark.parametrize(
    ("rollouts", "masks", "units", "says"),
    [
        ("rstu", MASKS, "all", SHARED),
        ("rrst", MASKS, "all", ""),  # two turns of a rollout
        ("rstu", [[0, 0], [0], [0, 0, 0], [0, 1]], "active", ""),  # rows that fill a batch up
        ("rstu", [[0, 0], [1], [0, 0, 0], [0, 1]], "active", SHARED),
    ],
)
def test_turns_and_rows_that_fill_a_batch_up(rollouts: str, masks: Any, units: str, says: str) -> None:
    totals = StepTotals.of(Samples(masks, prompt_ids=list("aaab"), rollout_ids=list(rollouts)))
    findings = Promises(2, group_remedy="Give ids.").misgrouped(totals, resolve("prompt_mean", units=units))
    assert [says in doubt and doubt.endswith(". Give ids.") for doubt in findings.doubts] == [True] * bool(says)


@pytest.mark.parametrize(
    ("count", "low", "high", "is_reason"),
    [
        (8.0, 0.5, 0.5, True),
        (8.0, 0.4, 0.4, False),
        (8.0, 0.5, 0.6, False),
        (4.0, 1.0, 1.0, False),
        (None, 0.5, 0.5, False),
    ],
)
def test_the_samples_by_which_an_engine_divides(count: float | None, low: float, high: float, is_reason: bool) -> None:
    compared: Any = SimpleNamespace(totals=StepTotals.of(MASKS), low=low, high=high)
    compared.totals.units["sample"] = SimpleNamespace(number={"all": 4})
    says = other_count(count, compared)
    assert says.startswith("the engine divides by 8 samples, and the step has 4") == is_reason == (says != "")


@pytest.mark.parametrize(
    ("data", "is_fault"),
    [(None, False), ((6.0, 4), False), ((6.0 + 1e-6, 4), False), ((7.0, 4), True), ((6.0, 5), True)],
)
def test_the_data_of_which_losses_came(data: tuple[float, int] | None, is_fault: bool) -> None:
    totals = StepTotals.of(MASKS)
    vars(totals)["units"] = {"sample": SimpleNamespace(number={"all": 4})}
    assert len(other_data(data, totals)) == is_fault
