"""Masks where they are: what a device does is what the host does, in every layout. Shown on the CPU, which has both."""

import itertools
import random
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placements import Place, every_layout, laid_out
from steps import Step, assert_equals_oracle, quick, quicker, random_mask, run_step, steps, totals_of
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.step import samples
from megatron_rl_loss.step.masks import DeviceMasks, HostMasks, join

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
    torch.float16, torch.bfloat16,
]  # fmt: skip


@st.composite
def microbatches(draw: st.DrawFn) -> list[Tensor]:
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(["ones", "binary", "fractional", "zeros"]), max_size=6))
    dtype = draw(st.sampled_from(DTYPES))
    return [random_mask(kind, rng.choice([0, 1, 2, rng.randrange(3, 40)]), rng, dtype) for kind in kinds]


def as_array(values: Any) -> Any:
    return values.numpy() if isinstance(values, Tensor) else np.asarray(values)


def assert_same(host: Any, device: Any) -> None:
    """Values and dtypes; whether sums are of float32 or float64 terms inside is each one's own affair."""
    one, other = as_array(host), as_array(device)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert np.array_equal(one, other)


@every_layout
@quick
@given(masks=microbatches())
def test_both_do_the_same(masks: list[Tensor], place: Place, cp_size: int) -> None:
    if place.__name__ == "bshd" and not masks:
        return  # a batch has rows
    placed = laid_out(place, tuple(len(mask) for mask in masks), cp_size)
    lengths = placed.mask_lengths or [len(mask) for mask in masks]
    masks = [torch.cat([mask, mask.new_zeros(n - len(mask))]) for mask, n in zip(masks, lengths, strict=True)]
    sizes = list(lengths)
    if placed.layout is None:
        starts, total = [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)
    else:
        starts, total = placed.layout.mask_starts(sizes), placed.layout.total_tokens
    buffer = join(masks, starts, sizes, total)
    assert len(buffer) == total
    host, device = HostMasks(buffer), DeviceMasks(buffer)
    assert host.holds_flags == device.holds_flags
    assert bool(host.sound()) is bool(device.sound()) is True
    # Sums of at most 40 terms: exact for flags, to float64 for weights.
    np.testing.assert_allclose(as_array(host.sums(starts, sizes)), as_array(device.sums(starts, sizes)), rtol=1e-14)
    assert_same(host.active(starts, sizes), device.active(starts, sizes))
    for cp_rank in range(cp_size):
        pieces = (starts, sizes) if placed.layout is None else placed.layout.local_segments(cp_rank, cp_size)
        assert_same(host.positions(*pieces), device.positions(*pieces))
        assert_same(host.cut(*pieces), device.cut(*pieces))
        assert host.tensor(host.cut(*pieces)).dtype == torch.float32


@pytest.mark.parametrize("counts", [[], [0], [3], [2, 0, 5], [0, 0], [1] * 20], ids=str)
def test_both_repeat_alike(counts: list[int]) -> None:
    values = torch.arange(len(counts)) + 0.5
    host, device = HostMasks(torch.ones(1)), DeviceMasks(torch.ones(1))
    expected = list(itertools.chain(*([i + 0.5] * count for i, count in enumerate(counts))))
    for masks in (host, device):
        assert masks.tensor(masks.repeat(masks.from_host(values), counts)).tolist() == expected


def test_both_invert_alike() -> None:
    """1/0 is never used, and must be finite: it is multiplied with masks that are 0."""
    denominators = torch.tensor([4.0, 0.0, 1e-29, 3.0, 2**40], dtype=torch.float64)
    found = []
    for masks in (HostMasks(torch.ones(1)), DeviceMasks(torch.ones(1))):
        inverse = masks.tensor(masks.inverse(masks.from_host(denominators), 1))
        assert inverse.dtype == torch.float32
        assert bool(inverse.isfinite().all())
        found.append(inverse)
    assert torch.equal(*found)
    assert found[0][[0, 3, 4]].tolist() == pytest.approx([1 / 4, 1 / 3, 2**-40], rel=oracle.ROUNDING)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([1, 2]), torch.tensor([1, -1]), torch.tensor([255], dtype=torch.uint8), torch.tensor([1.0, -1]),
        torch.tensor([1, float("nan")]), torch.tensor([float("inf")]), torch.tensor([1e-31], dtype=torch.float64),
        torch.tensor([1e31], dtype=torch.float64),
    ],
    ids=str,
)  # fmt: skip
def test_both_see_what_is_unsound(mask: Tensor) -> None:
    assert not bool(HostMasks(mask).sound())
    assert not bool(DeviceMasks(mask).sound())


@pytest.mark.parametrize(("inside", "outside"), [(1e-30, 0.9e-30), (1e30, 1.1e30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_both_know_how_small_and_large_a_weight_may_be(inside: float, outside: float, dtype: torch.dtype) -> None:
    rounded = np.nextafter(np.float32(inside), np.float32(1)) if dtype == torch.float32 else inside
    for masks in (HostMasks, DeviceMasks):
        assert bool(masks(torch.tensor([1, float(rounded), 0], dtype=dtype)).sound())
        assert not bool(masks(torch.tensor([1, outside, 0], dtype=dtype)).sound())


# --- whole weights as on a device


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the CPU are treated as those of a device are."""
    monkeypatch.setattr(samples, "HostMasks", DeviceMasks)


@pytest.mark.usefixtures("as_on_a_device")
@every_layout
def test_steps_on_a_device(place: Place, cp_size: int) -> None:
    step = [one.poisoned() for one in oracle.WORKED]
    for mode, units in oracle.COUNTINGS:
        outcome = run_step(step, [[2, 0], [1, 3]], mode, units, place=place, cp_size=cp_size)
        assert_equals_oracle(outcome, oracle.WORKED, mode, units)


@pytest.mark.slow
@every_layout
@quicker
@given(step=steps(), units=st.sampled_from(["all", "active"]))
def test_random_steps_on_a_device(step: Step, units: str, place: Place, cp_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "HostMasks", DeviceMasks)
        totals = totals_of(step.samples)
        for mode in oracle.MODES:
            given = {"place": place, "cp_size": cp_size, "totals": totals}
            outcome = run_step(step.samples, step.microbatches, mode, units, **given)  # type: ignore[arg-type]
            assert_equals_oracle(outcome, step.samples, mode, units)


@pytest.mark.usefixtures("as_on_a_device")
def test_totals_of_masks_on_a_device() -> None:
    """They are where a device is waited for, and where unsound masks are named."""
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
