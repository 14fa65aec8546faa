"""Samples: what is known of a micro-batch's masks, which tokens a CP rank holds, and what is refused.

What a device does with masks is what the host does: shown on the CPU, which can do both.
"""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from placements import Place, every_layout, laid_out, padded_masks
from refusals import refusal_tests, refusals
from steps import Step, on_both, quick, steps
from torch import Tensor

from megatron_rl_loss import Gathered, Layout, Samples, ZigzagTHD
from megatron_rl_loss.step import LocalTokens, masks

NAN, INF = float("nan"), float("inf")


def ones(*lengths: int) -> list[Tensor]:
    return [torch.ones(length) for length in lengths]


# --- masks


@pytest.fixture(params=[True, False], ids=["on the host", "as on a device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(masks, "on_host", lambda values: False)


def as_view(mask: Tensor) -> Tensor:
    return mask.repeat_interleave(2)[::2]


UNUSUAL = {
    "every other entry of a longer tensor": [as_view(torch.tensor([1, 0, 1, 1])), torch.tensor([1, 0])],
    "several dtypes": [torch.tensor([1, 0, 1, 1]), torch.tensor([True, False]), torch.tensor([1.0, 0.0])],
    "fractions": [torch.tensor([1, 0.5, 0, 1]), torch.tensor([1.0, 0])],
    "floats beyond 1": [torch.tensor([1.0, 255, 0, 1]), torch.tensor([3.0, 0])],
    "floats whose last bits are 0": [torch.tensor([2.0**40, 0, 1])],
    "minus zero": [torch.tensor([-0.0, 1.0])],
    "a parameter": [torch.nn.Parameter(torch.tensor([1.0, 0, 1]))],
    "a negated view": [torch.complex(torch.zeros(3), torch.tensor([-1.0, 0, -1])).conj().imag, torch.tensor([1.0])],
    "one storage": list(torch.tensor([1, 0, 1, 1, 0, 0]).split([2, 4])),
    "the smallest and the largest": [torch.tensor([1e-30, 1e30, 0], dtype=torch.float64)],
    "all empty": [torch.tensor([], dtype=torch.int64)] * 2,
    "some empty": [torch.tensor([]), torch.tensor([1.0, 0]), torch.tensor([]), torch.tensor([1.0]), torch.tensor([])],
}


UNSOUND = {
    "negative": torch.tensor([1, -1]),
    "a negative byte": torch.tensor([1, -1], dtype=torch.int8),
    "integers beyond 1": torch.tensor([1, 2]),
    "bytes beyond 1": torch.tensor([1, 255], dtype=torch.uint8),
    "longs whose last bits are 0": torch.tensor([1, 2**40]),
    "too small": torch.tensor([1, 0.9e-30]),
    "too large": torch.tensor([1, 1.1e30]),
    "too small for float32": torch.tensor([1, 0.9e-30], dtype=torch.float64),
    "too large for float32": torch.tensor([1, 1.1e30], dtype=torch.float64),
    "NaN": torch.tensor([1.0, float("nan")]),
    "infinite": torch.tensor([1.0, float("inf")], dtype=torch.float64),
    "negative in a negated view": torch.complex(torch.zeros(2), torch.tensor([-1.0, 1.0])).conj().imag,
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("unusual", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_masks(unusual: list[Tensor]) -> None:
    samples = Samples(unusual)
    expected = torch.cat([mask.detach().double() for mask in unusual])
    assert samples.mask_lengths == [mask.numel() for mask in unusual]
    assert samples.mask_sums.tolist() == [float(mask.detach().double().sum()) for mask in unusual]
    assert samples.active_tokens.tolist() == [int((mask != 0).sum()) for mask in unusual]
    assert samples.mask_sums.dtype == samples.active_tokens.dtype == torch.float64
    assert set(map(type, samples.mask_lengths)) <= {int}
    for mask in (samples.local(0, 1).mask, samples.flat_mask):
        assert torch.equal(mask, expected.float())
        assert not mask.requires_grad


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mask", UNSOUND.values(), ids=UNSOUND)
@pytest.mark.parametrize("beside", [None, torch.float32, torch.int64], ids=["alone", "beside floats", "beside ints"])
def test_unsound_masks_are_refused_with_their_sample(mask: Tensor, beside: torch.dtype | None) -> None:
    with pytest.raises(ValueError, match=r"the loss mask of sample 1 holds .*token weights must be finite and >= 0"):
        Samples([torch.ones(3, dtype=beside or mask.dtype), mask])


def test_masks_that_change_later_change_nothing() -> None:
    """What was measured is what is weighed."""
    for mask in (torch.tensor([1, 1, 0, 1]), torch.tensor([1.0, 1, 0, 1]), torch.tensor([1.0, 1, 0, 1]).double()):
        samples = Samples([mask])
        mask.zero_()
        assert samples.local(0, 1).mask.tolist() == [1, 1, 0, 1]
        assert samples.mask_sums.tolist() == [3]


def test_no_sample() -> None:
    for layout, size in ((None, 0), (ZigzagTHD([0, 8], filler_slots=1), 8)):
        samples = Samples([], layout=layout)
        assert (len(samples), samples.total_tokens) == (0, size)
        assert samples.mask_sums.numel() == samples.active_tokens.numel() == 0
        local = samples.local(0, 1)
        assert local.mask.tolist() == local.sample_index.tolist() == [0] * size


def test_host_work_needs_no_default_device() -> None:
    with torch.device("meta"):
        samples = Samples([torch.ones(2, device="cpu"), torch.zeros(1, device="cpu")])
        assert samples.local(0, 1).sample_index.tolist() == [0, 0, 1]
    assert samples.mask_sums.tolist() == [2, 0]


def test_whether_masks_of_a_device_are_sound_is_a_tensor() -> None:
    """The meta device stands in for one: it has no values, so whatever asks for one on the host raises."""
    of_device = Samples([torch.ones(3, device="meta"), torch.ones(2, device="meta")])
    assert isinstance(of_device.sound, Tensor)
    assert of_device.sound.shape == ()
    local = of_device.local(0, 1)
    assert local.mask.device.type == local.sample_index.device.type == local.num_active.device.type == "meta"
    assert (local.mask.shape, local.sample_index.shape) == ((5,), (5,))


# --- what a CP rank holds


@every_layout
@quick
@given(step=steps())
def test_a_rank_holds_what_the_oracle_says(step: Step, place: Place, cp_size: int) -> None:
    """On the host, and as on a device."""
    masks = [one.mask for one in step.samples]
    lengths = [len(mask) for mask in masks]
    placed = laid_out(place, tuple(lengths), cp_size)
    padded = padded_masks(step.samples, placed)

    def check() -> None:
        samples = Samples(padded, layout=placed.layout)
        assert bool(samples.sound)
        # Sums of at most 13 terms: exact for flags, to float64 for weights.
        assert samples.mask_sums.tolist() == pytest.approx([float(mask.double().sum()) for mask in masks], rel=1e-14)
        assert samples.active_tokens.tolist() == [int((mask != 0).sum()) for mask in masks]
        whole = torch.arange(samples.total_tokens)
        for cp_rank, held in enumerate(placed.held):
            check_part(samples.local(cp_rank, cp_size), masks, held, whole)
        if placed.layout is None or not placed.layout.replicated_over_cp:
            tokens = [at for held in placed.held for at in held if at is not None]
            assert sorted(tokens) == [(i, t) for i, length in enumerate(lengths) for t in range(length)]

    on_both(check)


def check_part(local: LocalTokens, masks: list[Tensor], held: list[oracle.Token], whole: Tensor) -> None:
    assert len(local) == len(held)
    assert local.mask.dtype == torch.float32
    assert local.mask.tolist() == [0 if at is None else float(masks[at[0]][at[1]]) for at in held]
    assert local.sample_index.dtype == local.positions.dtype == torch.int64
    numbers, positions = local.sample_index.tolist(), local.positions.tolist()
    tokens = [(k, at) for k, at in enumerate(held) if at is not None]
    assert [positions[k] for k, _ in tokens] == [local.samples.mask_starts[i] + t for _, (i, t) in tokens]
    # Padding has the number of a sample beside it.
    assert [numbers[k] for k, _ in tokens] == [i for _, (i, _) in tokens]
    assert all(0 <= i < len(masks) for i in numbers)
    assert numbers == sorted(numbers)
    # The same positions cut whatever lies in the buffer, of any width.
    assert local.of(whole).tolist() == positions
    assert local.of(torch.stack([whole, -whole], 1)).tolist() == [[p, -p] for p in positions]
    assert int(local.num_active) == sum(bool(masks[i][t] != 0) for _, (i, t) in tokens)


def test_in_buffer_puts_values_where_the_masks_are() -> None:
    samples = Samples(ones(2, 3), layout=ZigzagTHD([0, 4, 8], [2, 3]))
    values = samples.in_buffer([torch.tensor([1.0, 2]), torch.tensor([3.0, 4, 5])])
    assert values.tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    plain = Samples(ones(2, 3))
    assert plain.in_buffer([torch.tensor([1.0, 2]), torch.tensor([3.0, 4, 5])]).tolist() == [1, 2, 3, 4, 5]


# --- refusals, each beside its nearest legal neighbour


class Misplaced(Layout):
    """A layout of one's own that says where masks and a CP rank's pieces are, right or wrong."""

    def __init__(self, mask_starts: Any, segments: list[tuple[int, int]], rest: Any = ()) -> None:
        self.starts, self.segments, self.rest = mask_starts, segments, rest

    @property
    def total_tokens(self) -> int:
        return 8

    def mask_starts(self, mask_lengths: Any) -> Any:
        return self.starts

    def local_segments(self, cp_rank: int, cp_size: int) -> Any:
        """The pieces are the last rank's; each other rank holds the rest."""
        held = self.segments if cp_rank == cp_size - 1 else self.rest
        starts, ends = torch.tensor(held, dtype=torch.int64).reshape(-1, 2).T
        return starts, ends - starts


def with_masks_at(starts: Any) -> list[float]:
    samples = Samples(ones(3, 3), layout=Misplaced(starts, [(0, 2), (3, 8)], [(2, 3)]))
    return samples.local(1, 2).mask.tolist()


def with_pieces(*segments: tuple[int, int]) -> list[float]:
    local = Samples(ones(3, 3), layout=Misplaced([0, 4], list(segments), [(2, 3), (6, 8)])).local(1, 2)
    return (local.mask * (local.sample_index + 1)).tolist()


@pytest.mark.parametrize("starts", [(0, 4), torch.tensor([0, 4]).int(), np.array([0, 4]), np.array([0, 4], np.uint8)])
def test_a_layout_of_ones_own_may_say_its_positions_in_any_ints(starts: Any) -> None:
    assert with_masks_at(starts) == [1, 1, 0, 1, 1, 1, 0]
    assert with_pieces((0, 2), (2, 2), (3, 6)) == [1, 1, 0, 2, 2]  # pieces may be empty


def of_masks(*masks: Any) -> Samples:
    return Samples(list(masks))


def cut(layout: Layout | None, cp_rank: Any, cp_size: Any) -> LocalTokens:
    return Samples(ones(4), layout=layout).local(cp_rank, cp_size)


def held(replicated: bool, *ranks: list[tuple[int, int]]) -> LocalTokens:
    """By a layout of one's own: the pieces of each of two ranks."""
    layout = Misplaced([0, 4], ranks[1], ranks[0])
    layout.replicated_over_cp = replicated
    return Samples(ones(4, 4), layout=layout).local(0, 2)


TWO = torch.ones(2)
WHOLE = [(0, 8)]

REFUSALS = {
    **refusals(
        of_masks,
        ((TWO, torch.tensor([1, -0.5])), "sample 1 holds -0.5: token weights", (TWO, torch.tensor([1, 0.5]))),
        ((torch.tensor([-1]),), "sample 0 holds -1.0", (torch.tensor([1]),)),
        ((torch.ones(0), torch.tensor([NAN])), "sample 1 holds nan", (torch.ones(0), torch.tensor([0.0]))),
        ((torch.tensor([INF]), TWO), "sample 0 holds inf", (torch.tensor([1e30]), TWO)),
        ((torch.ones(1, 2),), r"sample 0 has shape \(1, 2\): it must be 1-D", (TWO,)),
        ((TWO, torch.tensor(1)), r"sample 1 has shape \(\)", (TWO, torch.tensor([1]))),
        ((TWO, torch.ones(2, device="meta")), r"loss masks on \['cpu', 'meta'\]: they must share", (TWO, TWO)),
    ),
    **refusals(
        of_masks,
        (([1, 1],), "sample 0 is a list", (torch.tensor([1, 1]),)),
        ((TWO, TWO.cfloat()), "sample 1 is torch.complex64", (TWO, TWO.half())),
        error=TypeError,
    ),
    **refusals(
        Samples,
        ((torch.ones(2, 3),), r"one tensor of shape \(2, 3\).*list\(loss_masks\)", (list(torch.ones(2, 3)),)),
        ((None,), "loss_masks is one NoneType: it must be a list", ([],)),
        error=TypeError,
    ),
    **refusals(
        lambda further: Samples([TWO], term_masks={"correct": [further]}),
        ((torch.ones(2, device="meta"),), r"masks 'correct' on \['cpu', 'meta'\]: they must share", (TWO,)),
        ((torch.ones(3),), r"masks 'correct' of \[3\] tokens beside loss masks of \[2\]", (TWO,)),
    ),
    **refusals(
        cut,
        ((None, 1, 1), "cp_rank=1, cp_size=1", (None, 0, 1)),
        ((None, 0, 2), "cp_size is 2 and no layout.*Pass one of megatron_rl_loss's", (Gathered([0, 4]), 0, 2)),
    ),
    **refusals(
        with_masks_at,
        *(
            ((starts,), r"Misplaced puts loss masks at \[.* within the 8 tokens of its buffer", ([1, 5],))
            for starts in ([4, 0], [0, 2], [-1, 4], [0, 6])
        ),
    ),
    **refusals(
        with_pieces,
        *(
            (pieces, r"Misplaced puts what CP rank 1 of 2 holds at \[", ((0, 2), (3, 6)))
            for pieces in (((4, 8), (0, 2)), ((0, 4), (3, 8)), ((-1, 4),), ((4, 9),))
        ),
    ),
    **refusals(
        with_masks_at,
        ((torch.tensor([0.0, 4.5]),), r"mask_starts is .*float.* of shape \(2,\)", ([0, 4],)),
        ((np.array([0.0, 4.5]),), r"mask_starts is .*float64 of shape \(2,\)", ([0, 4],)),
        (([0, 4.5],), "mask_starts holds 4.5", ([0, 4],)),
        error=TypeError,
    ),
    **refusals(cut, ((None, 0.0, 1), "cp_rank=0.0, cp_size=1: both must be ints", (None, 0, 1)), error=TypeError),
    **refusals(
        held,
        (
            (False, WHOLE, [(4, 8)]),
            "position 4 of the buffer to 2 of 2 CP ranks: each token of a sample must be held by 1",
            (False, [(0, 4)], [(4, 8)]),
        ),
        ((False, [(0, 4)], [(5, 8)]), "position 4 of the buffer to 0 of 2", (False, WHOLE, [])),
        ((True, WHOLE, [(0, 4)]), "position 4 of the buffer to 1 of 2.*must be held by 2", (True, WHOLE, WHOLE)),
    ),
}


test_refusals = refusal_tests(REFUSALS)
