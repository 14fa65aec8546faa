"""`check_reducer` calls sound modes sound and names what an unsound one depends on."""

import doctest
import math
from typing import Any

import pytest
import torch

from megatron_rl_loss.audit import check_reducer, invariance
from megatron_rl_loss.modes import MODES
from megatron_rl_loss.modes.table import ModeInputs


def test_docstring_examples() -> None:
    result = doctest.testmod(invariance)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("units", ["all", "active"])
@pytest.mark.parametrize("mode", MODES)
def test_built_in_modes_are_invariant(mode: str, units: Any) -> None:
    report = check_reducer(mode, divisor=8 if MODES[mode].takes_divisor else None, units=units)
    assert report.invariant, str(report)
    assert not report.negative
    if mode == "token_mean" or (mode in ("sample_mean", "prompt_mean") and units == "active"):
        assert report.lowest_sum == pytest.approx(1)
        assert report.highest_sum == pytest.approx(1)
    if mode in ("sample_mean", "prompt_mean") and units == "all":
        assert 0 < report.lowest_sum < report.highest_sum <= 1 + 1e-6


def mean_of_the_micro_batch(inputs: ModeInputs) -> float:
    return 1 / max(1.0, float(inputs.samples.mask_sums.sum()))


def by_padded_length(inputs: ModeInputs) -> list[torch.Tensor]:
    return [torch.full((int(n),), 1 / int(n)) for n in inputs.samples.mask_lengths]


def by_samples_here(inputs: ModeInputs) -> torch.Tensor:
    return torch.full((len(inputs.samples),), 1 / max(1, len(inputs.samples)))


def raising(inputs: ModeInputs) -> float:
    if len(inputs.samples) < 2:
        raise RuntimeError("needs two samples")
    return 1.0


def sound(inputs: ModeInputs) -> torch.Tensor:
    """The mean over prompts of token sums."""
    assert inputs.totals.prompts.all is not None
    return torch.full((len(inputs.samples),), 1 / inputs.totals.prompts.all)


def contrast(inputs: ModeInputs) -> list[torch.Tensor]:
    """A sound mode of weights of both signs."""
    return [torch.where(torch.arange(int(n)) % 2 == 0, 1.0, -1.0) for n in inputs.samples.mask_lengths]


@pytest.mark.parametrize(
    ("mode", "cut"),
    [
        (mean_of_the_micro_batch, "micro-batches of 1 sample"),
        (by_samples_here, "micro-batches of 2 samples"),
        (by_padded_length, "padded masks"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_a_mode_depends_on_is_named(mode: Any, cut: str) -> None:
    report = check_reducer(mode)
    assert not report.invariant
    breach = next(breach for breach in report.breaches if breach.cut == cut)
    assert math.isfinite(breach.found)
    assert breach.found != pytest.approx(breach.expected)
    assert "NOT invariant" in str(report)
    assert f"{cut}: a token weighs {breach.found:.6g} where it should weigh {breach.expected:.6g}" in str(report)


def test_weights_by_the_padded_length_are_right_wherever_nothing_is_padded() -> None:
    assert {breach.cut for breach in check_reducer(by_padded_length).breaches} == {
        "padded masks",
        "zigzag, CP 2, padded masks",
    }


def test_the_smallest_step_that_shows_it_is_told() -> None:
    breaches = check_reducer(by_samples_here, draws=40).breaches
    assert min(breach.samples for breach in breaches) == 2  # of one sample there is one micro-batch


def test_a_mode_that_raises_is_told() -> None:
    with pytest.raises(RuntimeError, match="needs two samples"):  # in the uncut step
        check_reducer(raising)
    report = check_reducer(sound, draws=6)
    assert report.invariant
    assert not report.negative
    assert check_reducer(contrast).invariant
    assert check_reducer(contrast).negative
