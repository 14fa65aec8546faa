"""Unit countings: each row of the table over parts by samples and by tokens, and one that reads labels."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl_loss import Samples, StepTotals, plan_step
from megatron_rl_loss.step.units import COUNTINGS, Counting

MASKS = [torch.tensor([1.0, 0, 0.5]), torch.zeros(2), torch.ones(2), torch.tensor([0.0, 1])]
IDS: dict[str, Any] = {
    "prompt_ids": ["a", "b", "a", "b"],
    "ids": {"session": ["x", "y", "x", "x"], "turn": [[0, 1, 1], [2, 2], [0, 3], [4, 3]]},
}
ADVANTAGES = [0.0, 0.0, 0.5, 0.0]
#: By counting and kind of units: how many there are, by hand.
NUMBERS = {
    "all": {"rollout": 4, "prompt": 2, "session": 2, "turn": 5},
    "active": {"rollout": 3, "prompt": 2, "session": 1, "turn": 3},
}


@pytest.mark.parametrize("counting", COUNTINGS)
def test_the_number_of_units(counting: str) -> None:
    totals = StepTotals.from_loss_masks(MASKS, **IDS)
    assert {kind: totals.units[kind].number[counting] for kind in NUMBERS[counting]} == NUMBERS[counting]


def test_a_counting_by_labels_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where some samples lack the labels nothing is counted by them, and a mode that asks for them is told so."""
    row = Counting(
        "nonzero_advantage",
        "those with a sample whose advantage is not 0",
        lambda samples, key: samples.at_parts(key, np.asarray(samples.label("advantages")) != 0),
        ("advantages",),
    )
    monkeypatch.setitem(COUNTINGS, row.name, row)
    labels = {"advantages": ADVANTAGES}
    totals = StepTotals.from_loss_masks(MASKS, **IDS, labels=labels)
    kinds = ("rollout", "prompt", "session", "turn")
    assert {kind: totals.units[kind].number[row.name] for kind in kinds} == dict(zip(kinds, (1, 1, 1, 2), strict=True))
    (microbatch,) = plan_step([Samples(MASKS, **IDS, labels=labels)], "prompt_mean", units=row.name, dp_group=None)
    sums = {"a": 1.5 + 2, "b": 1}  # over the one prompt with an advantage
    expected = [m / sums[prompt] for mask, prompt in zip(MASKS, "abab", strict=True) for m in mask.tolist()]
    assert microbatch.weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert row.name not in StepTotals.from_loss_masks(MASKS, **IDS).units["prompt"].number
    with pytest.raises(ValueError, match="the samples have no label 'advantages'"):
        plan_step([Samples(MASKS, **IDS)], "prompt_mean", units=row.name, dp_group=None)
