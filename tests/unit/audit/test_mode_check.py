"""`check_loss` of modes, ours and one's own; and of functions, for invariance alone."""

from collections.abc import Sequence
from typing import Any

import published
import pytest
import torch
from published import BOTH, masked_mean, share, total

from megatron_rl_loss import ModeInputs, check_loss
from megatron_rl_loss.audit.loss_check import PADDED
from megatron_rl_loss.audit.simulation import LossCall

pytestmark = pytest.mark.slow  # hundreds of random steps

ADDED = LossCall(dp="sum")
BUILT_IN = {"sample_mean": None, "prompt_mean": None, "token_mean": None, "constant": 8.0, "token_sum": 8.0}


@pytest.mark.parametrize("units", ["all", "active"])
@pytest.mark.parametrize("mode", BUILT_IN)
def test_built_in_modes_are_invariant(mode: str, units: Any) -> None:
    report = check_loss(mode=mode, divisor=BUILT_IN[mode], units=units, draws=4)
    assert report.sound, str(report)


def sum_by_prompts(step: ModeInputs) -> float:
    return 1 / step.units("prompt")


@pytest.mark.parametrize(
    ("mode", "cuts", "most"),
    [
        (lambda of: 1 / max(1.0, float(of.batch.mask_sums.sum())), BOTH, 2),
        (lambda of: 1 / max(1, len(of.batch)), BOTH, 3),
        (lambda of: [torch.full((int(n),), 1 / int(n)) for n in of.batch.mask_lengths], [PADDED], 3),
    ],
    ids=["tokens here", "samples here", "padded lengths"],
)
def test_what_a_mode_depends_on_is_found(mode: Any, cuts: Sequence[str], most: int) -> None:
    report = check_loss(mode=mode, draws=8)
    finding = report.findings[0]
    assert {one.cut for one in report.findings} == set(cuts)
    assert not report.invariant
    assert f"  {cuts[0]}: " in str(report)
    assert len(finding.step.rows) <= most
    assert finding.weights != pytest.approx(finding.expected)


def test_modes_of_ones_own_and_functions_beside_them() -> None:
    report = check_loss(mode=lambda of: [torch.arange(-1.0, int(n) - 1) for n in of.batch.mask_lengths], draws=6)
    assert report.sound
    assert check_loss(mode=sum_by_prompts, draws=6).sound
    assert check_loss(lambda x, m, step_prompts: total(x, m) / step_prompts, sum_by_prompts, call=ADDED, draws=6).sound
    report = check_loss(share, sum_by_prompts, draws=6)
    assert not report.sound
    assert "sum_by_prompts" in str(report)


def test_without_a_mode_invariance_is_all_that_is_asked() -> None:
    assert check_loss(lambda losses, mask: total(losses, mask) / 8, call=ADDED, draws=4).sound
    assert check_loss(published.lists_by_smaller, call="prime_rl", draws=4).sound
    assert not check_loss(masked_mean, call=ADDED, draws=4).invariant
