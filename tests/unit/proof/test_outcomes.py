"""Findings and what becomes of them: the outcome, the line, and what a level stops."""

import contextlib
from typing import Any

import pytest
import torch

from megatron_rl_loss import Samples, plan_step, ppo_clip_loss, prove_step
from megatron_rl_loss.proof.findings import (
    GIVEN,
    IN_PART,
    NOT_PROVED,
    NOT_YET,
    WRONG,
    Finding,
    Severity,
    Verdict,
    joined,
    outcome_of,
)


@pytest.mark.parametrize("worst", Severity)
def test_the_outcome_is_the_worst_finding(worst: Severity) -> None:
    findings = [Finding(severity, severity.word) for severity in Severity if severity <= worst]
    assert outcome_of(findings) is outcome_of(reversed(findings)) is worst
    assert outcome_of([]) is GIVEN


def test_only_a_plain_proof_passes_at_strict_and_only_evidence_stops_by_default() -> None:
    assert [severity for severity in Severity if severity.stops("strict")] == [IN_PART, NOT_PROVED, WRONG]
    assert [severity for severity in Severity if severity.stops("error")] == [WRONG]
    assert not any(severity.stops(level) for severity in Severity for level in ("warn", "off"))


def test_ranks_join_findings_by_union_in_order_and_bounded() -> None:
    first, second = Finding(WRONG, "first"), Finding(IN_PART, "second")
    assert joined([first], [second, first], []) == [first, second]
    joined_findings = joined(*([Finding(NOT_PROVED, f"rank {rank}"), first] for rank in range(1000)))
    assert len(joined_findings) < 10
    assert first in joined_findings


@pytest.mark.parametrize(
    ("severity", "line"),
    [
        (GIVEN, "mode on loss, aggregation proved on 4 tokens; text (limits: docs/proof.md)"),
        (
            IN_PART,
            "mode on loss, aggregation PROVED IN PART on 4 tokens; text (limits: docs/proof.md)\nTraining goes on; ",
        ),
        (NOT_YET, "aim, not proved yet: text"),
        (NOT_PROVED, "aim, NOT PROVED: text\nTraining goes on; "),
        (WRONG, "aim was expected, but the first training step does something else.\ntext\nAll ranks aborted before"),
    ],
)
def test_lines(severity: Severity, line: str) -> None:
    verdict = Verdict([Finding(severity, "text")], "aim", ("mode on loss", "4 tokens"))
    assert verdict.line("error").startswith(line)
    assert ("All ranks aborted" in verdict.line("strict")) == severity.stops("strict")


@pytest.mark.parametrize("misplaced", ["before the step", "on another model"])
def test_gradients_outside_the_measured_step_are_spoken_of(misplaced: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, measured = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    for _ in range(3):
        plan = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
        if misplaced == "before the step":
            plan[0].loss(measured.weight[0]).backward()
        with prove_step(measured, plan):
            if misplaced == "on another model":
                plan[0].loss(model.weight[0]).backward()
        measured.zero_grad()
    printed = capsys.readouterr().out
    if misplaced == "on another model":
        assert "no loss reaches a parameter of the model that was given. Pass the one that is trained" in printed
        assert printed.count("NOT PROVED") == 1
    else:
        assert "NOT PROVED: No token of 3 steps had a gradient." in printed
        assert "inside the measured step, on the model that it measures.\nTraining goes on" in printed


def test_a_step_that_trains_on_something_else_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    for is_right in (False, False, True):
        plan, model.weight.grad = plan_step([Samples([[1, 1]])], "token_mean", dp_group=None), None
        says = contextlib.nullcontext() if is_right else pytest.raises(ValueError, match=r"its loss\(\) was not called")
        with says, prove_step(model, plan):
            (plan[0].loss(model.weight[0]) if is_right else model.weight.square().sum()).backward()
    assert "aggregation proved on 2 tokens" in capsys.readouterr().out


def test_a_loss_of_another_plan_is_not_proved(capsys: pytest.CaptureFixture[str]) -> None:
    model, samples = torch.nn.Linear(2, 1, bias=False), [Samples([[1, 1]])]
    plan, other = (plan_step(samples, mode, dp_group=None) for mode in ("token_mean", "token_sum"))
    with prove_step(model, plan):
        other[0].loss(model.weight[0]).backward()
    says = "NOT PROVED: The step trained on micro-batches of another plan than the one that the proof was given."
    assert says in capsys.readouterr().out


def test_weights_of_a_plan_by_hand_are_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = torch.nn.Linear(2, 1, bias=False), plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
    with prove_step(model, plan):
        (model.weight[0] * plan[0].weights).sum().backward()
    says = (
        "NOT PROVED: No loss of the plan's micro-batches has a gradient that can be seen: microbatch.loss(...) was not"
    )
    assert says in capsys.readouterr().out


def loss(weights: torch.Tensor, microbatch: Any) -> torch.Tensor:
    """Losses whose slope by each of the model's weights is 1, by a loss function of this package."""
    log_probs = weights - 5
    return ppo_clip_loss(log_probs, log_probs.detach(), torch.full_like(weights, -1.0), microbatch).per_token_loss


@pytest.mark.parametrize("mode", ["constant", "token_mean"])
@pytest.mark.parametrize("divides", [False, True])
def test_a_division_by_a_count_of_the_micro_batch_is_wrong_in_any_mode(mode: str, divides: bool) -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    samples = [Samples([[1, 1, 1], [1]]), Samples([[1, 0, 0], [1]])]
    plan = plan_step(samples, mode, divisor=8 if mode == "constant" else None, dp_group=None)
    is_told = pytest.raises(ValueError, match="divided by the sum of the mask over the micro-batch between ppo_clip")
    with is_told if divides else contextlib.nullcontext(), prove_step(model, plan):
        for microbatch in plan:
            losses = loss(model.weight[0], microbatch)
            count = microbatch.mask.sum() if divides else 1
            microbatch.loss(losses / count).backward()


@pytest.mark.parametrize("is_ours", [False, True])
def test_losses_of_ones_own_are_taken_as_given(is_ours: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = torch.nn.Linear(2, 1, bias=False), plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
    with prove_step(model, plan, level="strict"):
        losses = loss(model.weight[0], plan[0]) if is_ours else model.weight[0]
        plan[0].loss(losses).backward()
    assert ("; losses as given (limits: " in capsys.readouterr().out) != is_ours


@pytest.mark.parametrize("active", [0, 1])
def test_a_micro_batch_of_the_plan_left_out_is_wrong_unless_it_has_no_token(active: int) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    plan = plan_step([Samples([[1, 1]]), Samples([[active, 0]])], "token_mean", dp_group=None)
    says = pytest.raises(ValueError, match=r"Of 2 micro-batches of the plan, \[1\] were not trained on")
    with says if active else contextlib.nullcontext(), prove_step(model, plan):
        plan[0].loss(model.weight[0]).backward()


@pytest.mark.parametrize("level", ["error", "strict"])
def test_gradients_from_before_are_wrong(level: Any) -> None:
    model, plan = torch.nn.Linear(2, 1, bias=False), plan_step([Samples([[1, 1]])], "token_mean", dp_group=None)
    model.weight.grad = torch.tensor([[1.0, -2.0]])
    with (
        pytest.raises(ValueError, match="Gradients were not 0 before the step, which added to them"),
        prove_step(model, plan, level=level),
    ):
        plan[0].loss(model.weight[0]).backward()
