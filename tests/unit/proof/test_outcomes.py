"""The table of a proof's outcomes: every combination has one outcome, and only evidence is wrong."""

import contextlib
import itertools
from pathlib import Path
from typing import get_args

import pytest
import torch

from megatron_rl_loss import Samples, plan_step, prove_step
from megatron_rl_loss.proof.outcomes import (
    ORDER,
    OUTCOMES,
    FactorState,
    Gradient,
    Losses,
    Outcome,
    Parameters,
    Seen,
    Weights,
    outcome_of,
)

FIELDS = (Gradient, FactorState, Losses, Weights, Parameters)
EVERYTHING = [Seen(*values) for values in itertools.product(*map(get_args, FIELDS))]


def test_every_combination_has_one_outcome() -> None:
    rows = {seen: outcome_of(seen) for seen in EVERYTHING}
    assert set(rows.values()) == set(get_args(Outcome)) == set(ORDER)
    for row in OUTCOMES:  # no row is unreachable
        assert any(all(field in (None, value) for field, value in zip(row, seen, strict=True)) for seen in EVERYTHING)


@pytest.mark.parametrize("seen", EVERYTHING, ids=str)
def test_only_evidence_is_wrong_and_only_a_measurement_proves(seen: Seen) -> None:
    measured = seen.gradient == "finite" and seen.factor == "certified" and seen.losses == "seen"
    untrained = seen.gradient == "finite" and seen.losses == "untrained"
    assert (outcome_of(seen) == "wrong") == (untrained or (measured and seen.weights == "other"))
    as_asked = measured and seen.weights == "as asked"
    assert (outcome_of(seen) == "proved") == (as_asked and seen.parameters == "alike")
    assert (outcome_of(seen) == "unlike") == (as_asked and seen.parameters == "unlike")
    assert (outcome_of(seen) in ("wait", "overflow")) == (
        seen.gradient in ("zero", "overflow") or (measured and seen.weights == "none")
    )


@pytest.mark.parametrize("misplaced", ["before the step", "on another model"])
def test_gradients_outside_the_measured_step_are_spoken_of(misplaced: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, measured = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    for _ in range(3):
        plan = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
        if misplaced == "before the step":
            plan[0].loss(measured.weight[0], form="sum").backward()
        with prove_step(measured, plan):
            if misplaced == "on another model":
                plan[0].loss(model.weight[0], form="sum").backward()
        measured.zero_grad()
    printed = capsys.readouterr().out
    assert "NOT PROVED: No token of 3 steps had a gradient." in printed
    assert printed.rstrip().endswith("inside the measured step, on the model that it measures.")


def test_a_step_that_trains_on_something_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    for is_right in (False, False, True):
        plan, model.weight.grad = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None), None
        says = contextlib.nullcontext() if is_right else pytest.raises(ValueError, match=r"its loss\(\) was not called")
        with says, prove_step(model, plan):
            (plan[0].loss(model.weight[0], form="sum") if is_right else model.weight.square().sum()).backward()
    assert "aggregation proved on 2 tokens" in capsys.readouterr().out


def test_a_loss_of_another_plan_is_not_proved(capsys: pytest.CaptureFixture[str]) -> None:
    model, samples = torch.nn.Linear(2, 1, bias=False), [Samples([[1, 1]])]
    plan, other = (plan_step(samples, mode, dp_group=None) for mode in ("token_mean", "token_sum"))
    with prove_step(model, plan):
        other[0].loss(model.weight[0], form="sum").backward()
    says = "NOT PROVED: The step trained on micro-batches of another plan. Pass the plan of this step."
    assert says in capsys.readouterr().out


def test_weights_of_a_plan_by_hand_are_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = torch.nn.Linear(2, 1, bias=False), plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
    with prove_step(model, plan):
        (model.weight[0] * plan[0].weights).sum().backward()
    assert capsys.readouterr().out.endswith("a reducer or a tap of this library outside of compiled graphs.\n")
