"""The C functions against what NumPy and torch make of the same masks and losses."""

import importlib.machinery
import itertools
from collections.abc import Sequence
from pathlib import Path

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import run_code
from torch import Tensor

from megatron_rl_loss import (
    Contiguous,
    Gathered,
    Layout,
    Samples,
    StepTotals,
    ZigzagBSHD,
    ZigzagResponse,
    ZigzagTHD,
    host_kernels,
    make_pg_loss_reducer,
)

compiled = pytest.mark.skipif(
    not host_kernels.available(),
    reason="the host kernels were not compiled (no C compiler with OpenMP) or are switched off",
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
    torch.float16, torch.bfloat16,
]  # fmt: skip
LAYOUTS = ("none", "thd", "bshd", "response", "contiguous", "per_slot", "gathered")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(host_kernels, "_num_threads", lambda num_tokens: request.param)
    return int(request.param)


def without_kernels(make: object, *arguments: object, **keywords: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_kernels, "_library", None)
        assert not host_kernels.available()
        return make(*arguments, **keywords)  # type: ignore[operator]


def layout_of(name: str, lengths: list[int], cp_size: int) -> Layout | None:
    slots = [-(-n // (2 * cp_size)) * 2 * cp_size for n in lengths]
    bounds = list(itertools.accumulate(slots, initial=0))
    match name:
        case "thd":
            return ZigzagTHD(bounds, total_lengths=lengths)
        case "bshd":
            return ZigzagBSHD(len(lengths), max([*slots, 2 * cp_size]), total_lengths=lengths)
        case "response":
            return ZigzagResponse([n + 1 + i % 3 for i, n in enumerate(lengths)], lengths)
        case "contiguous" | "per_slot":
            return Contiguous(bounds, total_lengths=lengths, per_slot=name == "per_slot")
        case "gathered":
            return Gathered(bounds, total_lengths=lengths)
    return None


@st.composite
def microbatches(draw: st.DrawFn) -> tuple[list[Tensor], str, int]:
    name = draw(st.sampled_from(LAYOUTS))
    shortest = 1 if name in ("thd", "contiguous", "per_slot", "gathered") else 0
    lengths = draw(st.lists(st.integers(shortest, 40), min_size=1, max_size=6))
    dtype = draw(st.sampled_from(DTYPES))
    entries = [draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    return [torch.tensor(entry).to(dtype) for entry in entries], name, draw(st.sampled_from((1, 2, 4)))


@compiled
@settings(max_examples=200, deadline=None)
@given(microbatches())
def test_the_same_samples_and_weights(microbatch: tuple[list[Tensor], str, int]) -> None:
    masks, name, cp_size = microbatch
    cp_size = 1 if name == "none" else cp_size
    layout = layout_of(name, [mask.numel() for mask in masks], cp_size)
    for num_threads in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_kernels, "_num_threads", lambda num_tokens, n=num_threads: n)
            ours = Samples(masks, layout=layout)
            assert (ours._buffer.dtype == torch.uint8) == (
                masks[0].dtype.itemsize != 2 or masks[0].dtype == torch.int16
            )
            theirs = without_kernels(Samples, masks, layout=layout)
            assert isinstance(theirs, Samples)
            assert torch.equal(ours.flat_mask, theirs.flat_mask)
            assert torch.equal(ours.mask_sums(), theirs.mask_sums())
            assert torch.equal(ours.active_tokens(), theirs.active_tokens())
            weights = torch.rand(len(masks), dtype=torch.float64)
            for cp_rank in range(cp_size):
                place = cp_rank, cp_size
                assert torch.equal(ours.weighted_mask(weights, *place), theirs.weighted_mask(weights, *place))
                assert torch.equal(ours.local_mask(*place), theirs.local_mask(*place))
                assert ours.local_active_tokens(*place) == theirs.local_active_tokens(*place)


def as_view(mask: Tensor) -> Tensor:
    return mask.repeat_interleave(2)[::2]


UNUSUAL = {
    "every other entry of a longer tensor": [as_view(torch.tensor([1, 0, 1, 1])), torch.tensor([1, 0])],
    "several dtypes": [torch.tensor([1, 0, 1, 1]), torch.tensor([True, False]), torch.tensor([1.0, 0.0])],
    "fractions": [torch.tensor([1, 0.5, 0, 1]), torch.tensor([1.0, 0])],
    "integers beyond 1": [torch.tensor([1, 2, 0, 1]), torch.tensor([3, 0])],
    "bytes beyond 1": [torch.tensor([1, 255, 0, 1], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)],
    "longs whose last bits are 0": [torch.tensor([2**40, 0, 1])],
    "minus zero": [torch.tensor([-0.0, 1.0])],
    "a parameter": [torch.nn.Parameter(torch.tensor([1.0, 0, 1]))],
    "a negated view": [torch.complex(torch.zeros(3), torch.tensor([-1.0, 0, -1])).conj().imag, torch.tensor([1.0])],
    "one storage": list(torch.tensor([1, 0, 1, 1, 0, 0]).split([2, 4])),
    "all empty": [torch.tensor([], dtype=torch.int64)] * 2,
    "some empty": [torch.tensor([]), torch.tensor([1.0, 0]), torch.tensor([]), torch.tensor([1.0]), torch.tensor([])],
}


@pytest.mark.parametrize("masks", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_masks(masks: list[Tensor]) -> None:
    samples = Samples(masks)
    expected = torch.cat([mask.detach().double() for mask in masks])
    assert torch.equal(samples.flat_mask.double(), expected)
    assert samples.mask_sums().tolist() == [float(mask.detach().double().sum()) for mask in masks]
    assert samples.active_tokens().tolist() == [int((mask != 0).sum()) for mask in masks]
    weights = torch.arange(1, len(masks) + 1).double()
    tokens = weights.repeat_interleave(torch.tensor([mask.numel() for mask in masks]))
    assert torch.equal(samples.weighted_mask(weights, 0, 1).double(), tokens * expected)


UNSOUND = {
    "negative": torch.tensor([1, -1]),
    "a negative byte": torch.tensor([1, -1], dtype=torch.int8),
    "NaN": torch.tensor([1.0, float("nan")]),
    "infinite": torch.tensor([1.0, float("inf")], dtype=torch.float64),
    "negative in a negated view": torch.complex(torch.zeros(2), torch.tensor([-1.0, 1.0])).conj().imag,
}


@pytest.mark.parametrize("mask", UNSOUND.values(), ids=UNSOUND)
def test_unsound_masks_are_refused_with_their_sample(mask: Tensor) -> None:
    with pytest.raises(ValueError, match="the loss mask of sample 1 holds"):
        Samples([torch.ones(3, dtype=mask.dtype), mask])


def test_masks_that_change_later_change_nothing() -> None:
    """What was measured is what is weighed."""
    mask = torch.tensor([1, 1, 0, 1])
    samples = Samples([mask])
    mask.zero_()
    assert samples.weighted_mask(torch.ones(1), 0, 1).tolist() == [1, 1, 0, 1]


# ---- weighted sums

SIZES = (0, 1, 31, 32, 33, 5000, 32767, 32768, 32769, 120_000)


@compiled
@pytest.mark.parametrize("num_tokens", SIZES)
def test_weighted_sums(num_tokens: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    rows = [torch.randn(num_tokens, generator=generator) for _ in range(4)]
    weights = torch.rand(num_tokens, generator=generator)
    weights[::3] = 0
    sums = host_kernels.weighted_sums(rows, weights)
    expected = torch.stack([(row.double() * weights.double()).sum() for row in rows]).float()
    assert sums.dtype == torch.float32
    size = sum(float((row.abs() * weights).sum()) for row in rows)  # the sums themselves may be near 0
    assert torch.allclose(sums, expected, rtol=0, atol=1e-7 * size)


@compiled
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 32, 32767, 32768, 69_999])
def test_what_does_not_count_is_ignored_and_what_counts_comes_through(value: float, at: int, threads: int) -> None:
    weights = torch.ones(70_000)
    row, clean = torch.ones(70_000), torch.full((70_000,), 2.0)
    row[at] = value
    assert torch.allclose(
        host_kernels.weighted_sums([row, clean], weights), torch.tensor([value, 140_000.0]), equal_nan=True
    )
    weights[at] = 0
    assert host_kernels.weighted_sums([row, clean], weights).tolist() == [69_999.0, 139_998.0]


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
def test_losses_and_metrics_of_several_kinds(mode: str, dtype: torch.dtype) -> None:
    """Strided, two-dimensional, with a graph of their own; against the float64 oracle."""
    lengths, generator = [5, 3, 4], torch.Generator().manual_seed(0)
    masks = [(torch.rand(n, generator=generator) < 0.7).int() for n in lengths]
    rows = torch.randn(12, 3, generator=generator).to(dtype)
    totals = StepTotals.from_loss_masks(masks)
    reducer = make_pg_loss_reducer(mode, masks, totals=totals)
    losses = rows[:, 0].clone().requires_grad_()
    metrics = [rows[:, 1], rows[:, 2].contiguous().view(1, 12), rows[:, 1].clone().requires_grad_()]
    total, found = reducer.with_metrics(losses, metrics, reducer)  # type: ignore[attr-defined]
    for value, values in zip([total, *found], [losses, *metrics], strict=True):
        parts = values.detach().double().reshape(-1).split(lengths)
        samples = [oracle.sample(loss.tolist(), mask.tolist()) for loss, mask in zip(parts, masks, strict=True)]
        assert float(value.detach()) == pytest.approx(float(oracle.step_loss(mode, samples)), rel=1e-6)
    assert total.requires_grad
    assert not any(value.requires_grad for value in found)


class Own(Tensor):
    """A subclass, whose memory may not hold its values."""


def test_what_cannot_be_read() -> None:
    row = torch.ones(4)
    assert host_kernels.are_readable([row, torch.nn.Parameter(row)])
    complex_values = torch.complex(row, row)
    others: Sequence[Tensor] = [
        row.as_subclass(Own), torch.empty(4, device="meta"), torch.ones(8)[::2], complex_values.conj().imag,
    ]  # fmt: skip
    for other in others:
        assert not host_kernels.are_readable([other])
        assert not host_kernels.are_readable([row, other])


# ---- with and without the library


WITHOUT = """
import torch
from megatron_rl_loss import Samples, host_kernels
assert Samples([torch.tensor([1, 0, 1])]).weighted_mask(torch.ones(1), 0, 1).tolist() == [1, 0, 1]
print(host_kernels.available())
"""


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RL_LOSS_HOST_KERNELS", "0")
    done = run_code(WITHOUT)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


@compiled
def test_they_are_there_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_RL_LOSS_HOST_KERNELS", raising=False)
    done = run_code(WITHOUT)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def found_at(path: Path | None) -> object:
    if path is None:
        return None
    return importlib.machinery.ModuleSpec("megatron_rl_loss._host_kernels", None, origin=str(path))


def test_a_library_that_was_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found_at(None))
    assert host_kernels._load() is None


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEGATRON_RL_LOSS_HOST_KERNELS", raising=False)
    broken = tmp_path / "_host_kernels.so"
    broken.write_text("not a library")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found_at(broken))
    with pytest.warns(UserWarning, match=r"goes without its host kernels, NumPy takes over: .*_host_kernels\.so"):
        assert host_kernels._load() is None


@compiled
def test_a_library_of_an_older_source_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_kernels._load() is not None
    monkeypatch.setattr(host_kernels, "_INTERFACE", host_kernels._INTERFACE + 1)
    with pytest.warns(UserWarning, match="compiled from another version: install megatron_rl_loss again"):
        assert host_kernels._load() is None
