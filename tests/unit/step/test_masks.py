"""Masks where they are: what a device does is what the host does. Shown on the CPU, which can do both.

What a rank holds of them is compared with the oracle in test_samples.py, on both.
"""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from steps import on_both
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.step import masks


def assert_same(work: Any) -> Tensor:
    host, device = on_both(work)
    assert host.dtype == device.dtype
    assert torch.equal(host, device)
    return host


@pytest.mark.parametrize("counts", [[], [0], [3], [2, 0, 5], [0, 0], [1] * 20], ids=str)
def test_both_repeat_alike(counts: list[int]) -> None:
    values = torch.arange(len(counts)) + 0.5
    expected = [i + 0.5 for i, count in enumerate(counts) for _ in range(count)]
    assert assert_same(lambda: masks.repeat(values, counts)).tolist() == expected


def test_both_invert_alike() -> None:
    """1/0 is never used, and must be finite: it is multiplied with masks that are 0."""
    sizes = torch.tensor([4.0, 0.0, 1e-29, 3.0, 2**40], dtype=torch.float64)
    inverse = assert_same(lambda: masks.inverse(sizes, 2))
    assert inverse.dtype == torch.float32
    assert bool(inverse.isfinite().all())
    assert inverse[[0, 3, 4]].tolist() == pytest.approx([1 / 8, 1 / 6, 2**-41], rel=oracle.ROUNDING)


def test_both_count_alike() -> None:
    sums = torch.tensor([2.5, 0, 0, 4], dtype=torch.float64)
    for work, expected in ((masks.total, 6.5), (masks.count_active, 2)):
        assert [float(found) for found in on_both(lambda work=work: work(sums))] == [expected] * 2


@pytest.mark.parametrize(("inside", "outside"), [(1e-30, 0.9e-30), (1e30, 1.1e30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_both_know_how_small_and_large_a_weight_may_be(inside: float, outside: float, dtype: torch.dtype) -> None:
    rounded = np.nextafter(np.float32(inside), np.float32(1)) if dtype == torch.float32 else inside
    for weight, expected in ((float(rounded), True), (outside, False)):
        buffer = torch.tensor([1, weight, 0], dtype=dtype)
        found = on_both(lambda buffer=buffer: masks.are_sound(buffer, False))
        assert [bool(sound) for sound in found] == [expected] * 2


def test_totals_of_masks_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are where a device is waited for, and where unsound masks are named."""
    monkeypatch.setattr(masks, "on_host", lambda values: False)
    totals = StepTotals.from_loss_masks([torch.tensor([1.0, 0.5]), torch.tensor([0.0])])
    assert (totals.step_tokens, totals.step_active_tokens) == (1.5, 2)
    assert (totals.rollouts.all, totals.rollouts.active) == (2, 1)
    with pytest.raises(ValueError, match="the loss mask of sample 1 holds nan"):
        StepTotals.from_loss_masks([torch.ones(1), torch.tensor([float("nan")])])


def test_whether_masks_of_a_device_are_sound_is_a_tensor() -> None:
    """The meta device stands in for one: it has no values, so whatever asks for one on the host raises."""
    of_device = Samples([torch.ones(3, device="meta"), torch.ones(2, device="meta")])
    assert isinstance(of_device.sound, Tensor)
    assert of_device.sound.shape == ()
    local = of_device.local(0, 1)
    assert local.mask.device.type == local.sample_index.device.type == local.num_active.device.type == "meta"
    assert (local.mask.shape, local.sample_index.shape) == ((5,), (5,))
