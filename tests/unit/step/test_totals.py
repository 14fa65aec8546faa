"""The totals of a step that one rank holds; over ranks: test_groups.py."""

from typing import Any

import pytest
import torch
from oracle import WORKED, Sample, sample
from refusals import Call, check_refusal, each_of, refusals
from step_counts import COUNTS, all_totals, expected_of, kinds_of, said_of

from megatron_rl_loss import BadBatchError, Samples, StepTotals, UnitCounts
from megatron_rl_loss.step.totals import compare_totals, reduce_step_totals

STEPS: dict[str, list[Sample]] = {
    "worked batch": WORKED,
    "no ids": [sample([0] * 3, [1, 0, 0.5], prompt_id=None), sample([0] * 2, [0, 0], prompt_id=None)],
    "rollouts split": [
        sample([0] * 3, [1, 1, 0], 7, -1),
        sample([0] * 2, [0, 0], 8, -1),
        sample([0] * 3, [0.25, 1, 0], 7, -1),
        sample([0] * 1, [0], 9, 4),
    ],
    "string ids": [sample([0] * 2, [1, 1], "p0/r0", "p0"), sample([0] * 2, [1, 0], "p0/r1", "p0")],
    "rollout and prompt ids overlap": [sample([0], [1], 0, 0), sample([0], [1], 1, 0), sample([0], [1], 2, 1)],
    "empty mask": [sample([], [], 0, 0), sample([0], [1], 1, 1)],
    "no sample": [],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_alone(step: list[Sample]) -> None:
    said = said_of(all_totals(step), step)
    assert said == expected_of(step, step, kinds_of(step))
    assert all(isinstance(said[name], int | None) for name in COUNTS[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_fractional_masks_are_summed_in_float64(dtype: torch.dtype) -> None:
    mask = torch.full((1_000_003,), 0.1, dtype=dtype)
    # In float64 a sum of a million terms is off by 2^-53 a million times at most.
    assert StepTotals.from_loss_masks([mask]).step_tokens == pytest.approx(1_000_003 * float(mask[0]), rel=1e-9)


def test_errors_alone_are_plain() -> None:
    with pytest.raises(ValueError, match="sample 0 holds nan") as caught:
        StepTotals.from_loss_masks([torch.tensor([float("nan")])])
    assert caught.type is ValueError
    with pytest.raises(BadBatchError, match="no rank reads data"):
        reduce_step_totals(None)
    with pytest.raises(RuntimeError, match="the disk is full"):
        reduce_step_totals(RuntimeError("the disk is full"))
    assert reduce_step_totals([]).rollouts.all == 0


# --- refusals, each beside its nearest legal neighbour

NAN, INF = float("nan"), float("inf")
COUNT = {"all": 4}
ONE, BOTH = Samples([torch.ones(1)]), Samples([torch.ones(1)], rollout_ids=[0], prompt_ids=[0])
BY_PROMPT, NOTHING = Samples([torch.ones(1)], prompt_ids=[0]), Samples([])


def of_two(**ids: Any) -> StepTotals:
    """Anywhere in the step: ids that repeat from prompt to prompt would join rollouts that have nothing in common."""
    return StepTotals.from_loss_masks([torch.ones(1), torch.ones(2)], **ids)


REFUSALS = {
    **refusals(
        UnitCounts,
        ({"all": -1}, "all is -1: it must be a finite number >= 0", {"all": 0}),
        ({"active": INF}, "active is inf", {"active": 10**9}),
        ({"all": True}, "all is True", {"all": 1}),
        ({"all": {0: 1}}, "all is {0: 1}", {"tokens": {0: 1}}),
        ({"all": 2, "active": 3}, "3 active units of 2", {"all": 3, "active": 3}),
        ({"tokens": {0: -1.0}}, "the token count of .*0 is -1.0", {"tokens": {0: 0.0}}),
        ({"tokens": {"a": NAN}}, "the token count of .*'a' is nan", {"tokens": {"a": 0.5}}),
        ({"tokens": {0: True}}, "is True", {"tokens": {0: 1}}),
    ),
    **refusals(
        UnitCounts,
        ({"tokens": 4.0}, "tokens is 4.0.*Pass a dict", {"tokens": {}}),
        ({"tokens": {0.5: 1}}, r"holds 0.5 \(float\)", {"tokens": {5: 1}}),
        error=TypeError,
    ),
    **refusals(
        StepTotals,
        ({"step_tokens": NAN}, "step_tokens is nan", {"step_tokens": 0.5}),
        ({"step_active_tokens": "9"}, "is '9'.*Pass the count of the whole step", {"step_active_tokens": 9}),
        (
            {"step_tokens": 4, "step_active_tokens": 0},
            "step_tokens of 4 and step_active_tokens of 0",
            {"step_tokens": 0, "step_active_tokens": 0},
        ),
        (
            {"step_tokens": 4, "prompts": UnitCounts(tokens={0: 5})},
            "step_tokens alone are 5: the totals say 4",
            {"step_tokens": 5, "prompts": UnitCounts(tokens={0: 5})},
        ),
    ),
    **refusals(
        StepTotals,
        ({"rollouts": 4}, "rollouts is 4: it must be UnitCounts", {"rollouts": UnitCounts(all=4)}),
        ({"prompts": COUNT}, "prompts is {'all': 4}: it must be UnitCounts", {"prompts": UnitCounts(all=4)}),
        error=TypeError,
    ),
    **refusals(
        of_two,
        (
            {"rollout_ids": [0, 0], "prompt_ids": [0, 1]},
            "one rollout id is used under two prompt ids.*Join prompt and rollout index into one id",
            {"rollout_ids": [0, 0], "prompt_ids": [1, 1]},
        ),
        (
            {"rollout_ids": ["0", "0"], "prompt_ids": ["a", "b"]},
            "one rollout id is used under two prompt ids",
            {"rollout_ids": ["a/0", "b/0"], "prompt_ids": ["a", "b"]},
        ),
    ),
    **refusals(
        reduce_step_totals,
        (([ONE, Samples([torch.ones(2, device="meta")])],), r"micro-batches on \['cpu', 'meta'\]: they", ([ONE, ONE],)),
        (([BOTH, BY_PROMPT],), "rollout_ids on 1 of 2 micro-batches: they must be given on", ([BOTH, NOTHING],)),
        (([ONE, BY_PROMPT],), "prompt_ids on 1 of 2 micro-batches", ([NOTHING, BY_PROMPT],)),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)


def test_a_stated_count_that_is_wrong_is_named_with_its_mask() -> None:
    samples = Samples([torch.ones(3)], term_masks={"correct": [torch.tensor([1.0, 0, 0])]})
    for tokens, correct, text in ((9, 1, "^step_tokens of 9"), (3, 2, "^correct: step_tokens of 2")):
        stated = StepTotals(step_tokens=tokens, by_mask={"correct": StepTotals(step_tokens=correct)})
        with pytest.raises(ValueError, match=text):
            compare_totals(stated, [samples], dp_group=None, replica_groups=[], masks=["correct"])
