"""`check_loss` of modes, ours and one's own; and of functions, for invariance alone."""

from typing import Any

import published
import pytest
import torch
from published import MICROBATCHES, masked_mean, share, total

from megatron_rl_loss import ModeInputs, check_loss
from megatron_rl_loss.audit.mode_table import MODE_TABLE
from megatron_rl_loss.audit.simulation import LossCall

pytestmark = pytest.mark.slow  # hundreds of random steps

ADDED, PADDED = LossCall(dp="sum"), "with masks as long as padded slots"


@pytest.mark.parametrize("units", ["all", "active"])
@pytest.mark.parametrize("mode", MODE_TABLE)
def test_built_in_modes_are_invariant(mode: str, units: Any) -> None:
    report = check_loss(mode=mode, divisor=8 if MODE_TABLE[mode].takes_divisor else None, units=units, draws=4)
    assert (report.sound, report.negative) == (True, False), str(report)
    if mode == "token_mean" or (mode in ("sample_mean", "prompt_mean") and units == "active"):
        assert (report.lowest_sum, report.highest_sum) == pytest.approx((1, 1))
    elif mode in ("sample_mean", "prompt_mean"):
        assert 0 < report.lowest_sum < report.highest_sum <= 1 + 1e-6


def sum_by_prompts(step: ModeInputs) -> float:
    return 1 / step.units("prompt")


@pytest.mark.parametrize(
    ("mode", "cut", "most"),
    [
        (lambda of: 1 / max(1.0, float(of.batch.mask_sums.sum())), MICROBATCHES, 2),
        (lambda of: 1 / max(1, len(of.batch)), MICROBATCHES, 3),
        (lambda of: [torch.full((int(n),), 1 / int(n)) for n in of.batch.mask_lengths], PADDED, 2),
    ],
    ids=["tokens here", "samples here", "padded lengths"],
)
def test_what_a_mode_depends_on_is_found(mode: Any, cut: str, most: int) -> None:
    report = check_loss(mode=mode, draws=8)
    (finding,) = report.findings
    assert finding.cut == cut
    assert not report.invariant
    assert "NOT invariant" in str(report)
    assert len(finding.case.samples) <= most
    assert finding.weights != pytest.approx(finding.expected)


def test_modes_of_ones_own_and_functions_beside_them() -> None:
    report = check_loss(mode=lambda of: [torch.arange(-1.0, int(n) - 1) for n in of.batch.mask_lengths], draws=6)
    assert (report.sound, report.negative) == (True, True)
    assert check_loss(mode=sum_by_prompts, draws=6).sound
    assert check_loss(lambda x, m, step_prompts: total(x, m) / step_prompts, sum_by_prompts, call=ADDED, draws=6).sound
    report = check_loss(share, sum_by_prompts, draws=6)
    assert not report.sound
    assert "sum_by_prompts" in str(report)


def test_without_a_mode_invariance_is_all_that_is_asked() -> None:
    assert check_loss(lambda losses, mask: total(losses, mask) / 8, call=ADDED, draws=4).sound
    assert check_loss(published.lists_by_smaller, call="prime_rl", draws=4).sound
    assert not check_loss(masked_mean, call=ADDED, draws=4).invariant
