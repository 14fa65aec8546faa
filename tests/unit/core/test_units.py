"""Unit countings: each row of the table over parts by samples and by tokens, against the oracle's row of that name."""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from steps import divisor_of

from megatron_rl_loss import Samples, StepTotals, plan_step
from megatron_rl_loss.core.counting import COUNTINGS, Counting

MASKS = [torch.tensor([1.0, 0, 0.5]), torch.zeros(2), torch.ones(2), torch.tensor([0.0, 1])]
PROMPTS, SESSIONS, TURNS = ["a", "b", "a", "b"], ["x", "y", "x", "x"], [[0, 1, 1], [2, 2], [0, 3], [4, 3]]
IDS: dict[str, Any] = {"prompt_ids": PROMPTS, "ids": {"session": SESSIONS, "turn": TURNS}}
#: What a counting by labels reads of the samples, under any name.
VALUES = [0.0, 1.0, 0.0, 0.0]


def labels_of(counting: str) -> dict[str, Any]:
    """The label that the oracle's row reads."""
    assert counting in oracle.UNITS, f"unit counting {counting!r}: add its row to UNITS, tests/support/oracle.py"
    label = oracle.UNITS[counting].label
    assert COUNTINGS[counting].labels == (() if label is None else (label,))
    return {} if label is None else {label: VALUES}


def numbers_of(counting: str) -> dict[str, int]:
    """The number of units of each kind, by loops over parts."""
    parts: list[tuple[str, object, int, list[float]]] = []
    for i, row in enumerate(mask.tolist() for mask in MASKS):
        parts += [("rollout", i, i, row), ("prompt", PROMPTS[i], i, row), ("session", SESSIONS[i], i, row)]
        for turn in set(TURNS[i]):
            parts.append(("turn", turn, i, [m for m, of in zip(row, TURNS[i], strict=True) if of == turn]))
    labels = [{name: values[i] for name, values in labels_of(counting).items()} for i in range(len(MASKS))]
    counted = {(kind, unit) for kind, unit, i, row in parts if oracle.part_counts(counting, row, labels[i])}
    return {kind: sum(of == kind for of, _ in counted) for kind in ("rollout", "prompt", "session", "turn")}


@pytest.mark.parametrize("counting", COUNTINGS)
def test_the_number_of_units(counting: str) -> None:
    totals = StepTotals.of(Samples(MASKS, **IDS, labels=labels_of(counting)))
    numbers = numbers_of(counting)
    assert {kind: totals.units[kind].number[counting] for kind in numbers} == numbers


@pytest.mark.parametrize("mode", [*oracle.MODES, *oracle.BY_IDS])
@pytest.mark.parametrize("counting", COUNTINGS)
def test_the_weights_by_a_counting(counting: str, mode: str) -> None:
    """Of samples in two micro-batches; where they lack the labels nothing is counted, and the mode is told so."""
    labels, parts = labels_of(counting), (slice(None, 1), slice(1, None))
    ids: list[Any] = [{"prompt_ids": PROMPTS[at], "ids": {"session": SESSIONS[at], "turn": TURNS[at]}} for at in parts]
    of_parts = [{name: values[at] for name, values in labels.items()} for at in parts]
    asked: dict[str, Any] = {"divisor": divisor_of(mode), "units": counting, "dp_group": None}
    samples = [Samples(MASKS[at], **of, labels=label) for at, of, label in zip(parts, ids, of_parts, strict=True)]
    weights = torch.cat([microbatch.weights for microbatch in plan_step(samples, mode, **asked)])
    of_samples = [{name: values[i] for name, values in labels.items()} for i in range(len(MASKS))]
    if mode in oracle.BY_IDS:
        rows = oracle.weights_by_ids(mode, MASKS, SESSIONS, TURNS, counting, of_samples)
    else:
        step = [
            oracle.Sample(torch.zeros(len(mask)), mask, None, prompt, label)
            for mask, prompt, label in zip(MASKS, PROMPTS, of_samples, strict=True)
        ]
        rows = oracle.step_weights(mode, step, divisor_of(mode), counting)
    assert weights.tolist() == pytest.approx([weight for row in rows for weight in row], rel=1e-6)
    if labels and mode == "prompt_mean":
        assert counting not in StepTotals.of(Samples(MASKS, **IDS)).units["prompt"].number
        with pytest.raises(ValueError, match=f"the samples have no label '{next(iter(labels))}'"):
            plan_step([Samples(MASKS, **IDS)], mode, **asked)


def test_a_counting_by_labels_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the package does not have: every test of this file, of a row here and one in the oracle."""
    row = Counting(
        "one_label",
        "those with a sample whose label is not 0",
        lambda segments: segments.spread(np.asarray(segments.samples.label("own")) != 0),
        ("own",),
    )
    monkeypatch.setitem(COUNTINGS, row.name, row)
    monkeypatch.setitem(oracle.UNITS, row.name, oracle.Counting(lambda entries, label: label != 0, "own"))
    assert numbers_of(row.name) == {"rollout": 1, "prompt": 1, "session": 1, "turn": 1}
    test_the_number_of_units(row.name)
    for mode in (*oracle.MODES, *oracle.BY_IDS):
        test_the_weights_by_a_counting(row.name, mode)


def test_the_countings_by_hand() -> None:
    assert numbers_of("all") == {"rollout": 4, "prompt": 2, "session": 2, "turn": 5}
    assert numbers_of("active") == {"rollout": 3, "prompt": 2, "session": 1, "turn": 3}
    assert numbers_of("counted") == {"rollout": 4, "prompt": 2, "session": 2, "turn": 4}


def test_truncated_responses_count_and_dropped_prompts_do_not() -> None:
    """DAPO's two filters, over two micro-batches: 1/N of the kept prompts' responses, in any of which tokens are."""
    one, none = torch.ones(2), torch.zeros(2)
    first = Samples([one, none], prompt_ids=["a", "a"], labels={"counted": [True, True]})  # one is truncated
    other = Samples([none, none, none], prompt_ids=["b", "b", "c"], labels={"counted": torch.tensor([0, 0, 1])})
    for mode, weight in (("sample_mean", 1 / 3 / 2), ("prompt_mean", 1 / 2 / 2), ("token_mean", 1 / 2)):
        plan = plan_step([first, other], mode, units="counted", dp_group=None)
        assert plan[0].weights.tolist() == pytest.approx([weight, weight, 0, 0])
        assert "4 rollouts fully masked, left out of metric means, 3 rollouts and 2 prompts counted" in plan.describe()
    # A sample that is trained counts, whatever its label.
    plan = plan_step([Samples([one, one], labels={"counted": [False, False]})], "sample_mean", units="counted")
    assert plan[0].weights.tolist() == [0.25] * 4


@pytest.mark.parametrize(
    "label", [["yes", "no"], ["1", "0"], [1, 2], [0.5, 0.0], [float("nan"), 1], [None, True], [[1, 1], [0]], [[1], [0]]]
)
def test_a_label_that_is_no_flag_is_refused(label: Any) -> None:
    masks = [torch.ones(2), torch.zeros(2)]
    given: Any
    for given in (label, np.array(label, object)):
        with pytest.raises(ValueError, match=r"the label 'counted' of .*: it must be True or False for each sample"):
            plan_step([Samples(masks, labels={"counted": given})], "sample_mean", units="counted", dp_group=None)
    for given in ([True, np.True_], np.array([False, 1], object), torch.ones(2, dtype=torch.bfloat16)):
        plan = plan_step([Samples(masks, labels={"counted": given})], "sample_mean", units="counted", dp_group=None)
        assert plan[0].weights.tolist() == [0.25, 0.25, 0, 0]
