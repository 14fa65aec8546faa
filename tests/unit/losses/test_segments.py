"""Sums, extremes and scans: collectives over gloo, and by hand on one rank. Layouts: test_losses_over_cp.py."""

import functools
import itertools
import math
import os
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import bytes_reduced, run_ranks, start_process_group
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import Gathered, Samples, StepTotals, UnitCounts, ZigzagTHD
from megatron_rl_loss.losses import segment_extreme, segment_mean, segment_scan, segment_sum, to_tokens, unit_reduce

INF, NAN, NUM_SAMPLES = math.inf, math.nan, 6
CHUNKS = 4 * NUM_SAMPLES  # zigzag, of two ranks
#: Bytes forward and backward, of so many rows, of which so many need a gradient.
BYTES: list[tuple[Any, Any]] = [
    (segment_sum, lambda n, g: (8 * n * NUM_SAMPLES, 8 * g * NUM_SAMPLES)),
    (segment_extreme, lambda n, g: (8 * n * NUM_SAMPLES, 16 * g * NUM_SAMPLES)),
    (segment_scan, lambda n, g: (8 * (n + 1) * CHUNKS, 8 * (n + 1) * CHUNKS)),
    (functools.partial(segment_scan, kind="max"), lambda n, g: (16 * n * CHUNKS, 16 * n * CHUNKS)),
]


def count_on_rank() -> list[float]:
    """Holds each call of `all_reduce` against these; the largest of two samples, where one rank has a NaN in one."""
    start_process_group()
    rank, sent = int(os.environ["RANK"]), bytes_reduced()
    for length in (4, 64):
        cu_seqlens = [length * i for i in range(NUM_SAMPLES + 1)]
        for layout, cp_size in ((ZigzagTHD(cu_seqlens), 2), (Gathered(cu_seqlens), 2), (Gathered(cu_seqlens), 1)):
            local = Samples([torch.ones(length)] * NUM_SAMPLES, layout=layout).local(rank % cp_size, cp_size)
            group = dist.group.WORLD if cp_size > 1 else None
            for (trained, data), (function, sizes) in itertools.product([(1, 0), (4, 0), (0, 2), (1, 2)], BYTES):
                rows = [torch.randn(len(local), requires_grad=k < trained) for k in range(trained + data)]
                found = function(rows[::-1], local, group)
                forward, sent[:] = [*sent], []
                if trained:
                    found.square().sum().backward()
                expected = [[size] for size in sizes(trained + data, trained)]
                expected = [expected[0], expected[1] if trained else []] if isinstance(layout, ZigzagTHD) else [[], []]
                assert [forward, sent] == expected, (layout, length, trained, data, function)
                sent.clear()
    local = Samples([torch.ones(8)] * 2, layout=ZigzagTHD([0, 8, 16])).local(rank, 2)
    values = torch.tensor([NAN if rank else 1.0, *[2.0] * 7])
    return segment_extreme(values, local, dist.group.WORLD).tolist()


def test_one_collective_whose_bytes_do_not_depend_on_lengths() -> None:
    for largest in run_ranks(2, count_on_rank, timeout_s=600):
        assert math.isnan(largest[0]), "a maximum over ranks has lost a NaN"
        assert largest[1] == 2


# --- on one rank


MASKS = [torch.tensor([1, 1, 0]), torch.tensor([0, 0]), torch.tensor([1])]


def local_of(masks: list[Tensor], **ids: Any) -> Any:
    return Samples(masks, **ids).local(0, 1)


VALUES = [1.0, 2.0, NAN, INF, -INF, 2.0]
SCANNED = {"per": "rollout", "gamma": 0.5, "reverse": True, "exclusive": True, "empty": 7}
#: What is found of them, and the gradient where the n-th result has the slope n, from 1 on.
BY_HAND: list[tuple[Any, dict[str, Any], list[float], list[float]]] = [
    (segment_sum, {}, [3, 0, 2], [1, 1, 0, 0, 0, 3]),
    (segment_mean, {}, [1.5, 0, 2], [0.5, 0.5, 0, 0, 0, 3]),
    (segment_extreme, {"kind": "min"}, [1, 0, 2], [1, 0, 0, 0, 0, 3]),
    (lambda x, at: to_tokens(segment_mean(x, at), at), {}, [1.5, 1.5, 1.5, 0, 0, 2], [3, 3, 0, 0, 0, 6]),
    (segment_scan, {"kind": "max", "exclusive": True, "empty": -1}, [-1, 1, -1, -1, -1, -1], [2, 0, 0, 0, 0, 0]),
    # of rollouts and prompts that need not be neighbours
    (segment_sum, {"per": "rollout"}, [5, 0, 5], [4, 4, 0, 0, 0, 4]),
    (segment_mean, {"per": "rollout"}, [5 / 3, 0, 5 / 3], [4 / 3, 4 / 3, 0, 0, 0, 4 / 3]),
    (segment_sum, {"per": "prompt"}, [5, 0, 5], [4, 4, 0, 0, 0, 4]),
    (segment_extreme, {"per": "prompt"}, [2, 0, 2], [0, 2, 0, 0, 0, 2]),
    (segment_scan, {"per": "rollout"}, [1, 3, 0, 0, 0, 5], [9, 8, 0, 0, 0, 6]),
    (segment_scan, SCANNED, [3, 2, 7, 7, 7, 0], [0, 1, 0, 0, 0, 2.5]),
]


@pytest.mark.parametrize(("function", "how", "expected", "gradient"), BY_HAND)
def test_by_hand(function: Any, how: dict[str, Any], expected: list[float], gradient: list[float]) -> None:
    values = torch.tensor(VALUES, requires_grad=True)
    found = function(values, local_of(MASKS, rollout_ids=["b", "a", "b"], prompt_ids=["q", "p", "q"]), **how)
    assert found.tolist() == pytest.approx(expected)
    (found * torch.arange(1, len(found) + 1)).sum().backward()
    assert values.grad.tolist() == pytest.approx(gradient)


def test_dtypes_and_none() -> None:
    local = local_of(MASKS)
    for given, found in [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)]:
        values = torch.ones(6, dtype=given, requires_grad=True)
        total = segment_sum(values, local)
        assert total.dtype == found
        total.sum().backward()
        assert values.grad.dtype == given
    assert segment_sum([], local).shape == (0, 3)
    empty = torch.zeros(0, requires_grad=True)
    of_none = segment_mean(empty, local_of([]))
    assert of_none.shape == (0,)
    to_tokens(of_none, local_of([])).sum().backward()
    assert empty.grad.shape == (0,)


def test_a_long_sum_is_exact() -> None:
    """Four million float32 tokens, added in float64: only the result is rounded."""
    values = torch.full((2**22,), 0.1)
    local = local_of([torch.ones(2**22, dtype=torch.bool)])
    assert float(segment_sum(values, local)) == pytest.approx(float(values[0]) * 2**22, rel=oracle.ROUNDING)
    assert float(segment_mean(values, local)) == pytest.approx(float(values[0]), rel=oracle.ROUNDING)


def test_log_sums_of_prompts() -> None:
    local = local_of([torch.ones(1), torch.zeros(1), torch.ones(1), torch.zeros(1)], prompt_ids=["b", "a", "b", "c"])
    logs = torch.tensor([1.0, 700, 2, 700], dtype=torch.float64, requires_grad=True)
    found = unit_reduce(logs, local, kind="logsumexp")
    assert found.tolist() == pytest.approx([math.log(math.e + math.e**2), 0] * 2)
    found[0].backward()
    assert logs.grad.tolist() == pytest.approx([1 / (1 + math.e), 0, math.e / (1 + math.e), 0])
    assert unit_reduce(logs.detach() * 1e5 - 1e9, local, kind="logsumexp")[0] == pytest.approx(-1e9 + 2e5)
    of_nothing = torch.tensor([-INF, 0, -INF, 0], requires_grad=True)
    unit_reduce(of_nothing, local, kind="logsumexp").exp().sum().backward()
    assert of_nothing.grad.tolist() == [0] * 4


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_what_is_not_finite_stays_in_its_sequence(kind: Any) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.tensor([1.0, bad, 2, 3, 4, bad, 5])
        local = local_of([torch.ones(4), torch.ones(1), torch.tensor([0, 1])])
        found = segment_scan(values, local, kind=kind)
        assert found.isnan().tolist() == [False, *[math.isnan(bad)] * 3, False, False, False]
        assert found[[0, 4, 5, 6]].tolist() == [1, 4, 0, 5]
        if kind != "sum":
            highest = segment_extreme(values, local, kind=kind)
            expected = torch.stack([getattr(values[:4], f"a{kind}")(), *values[[4, 6]]])
            torch.testing.assert_close(highest, expected, rtol=0, atol=0, equal_nan=True)


def test_a_long_discount_neither_overflows_nor_vanishes() -> None:
    """0.9 ** 100,000 is 0 in float64, and what is divided by it no number."""
    local = local_of([torch.ones(100_000)])
    found = segment_scan(torch.ones(100_000), local, gamma=0.9, reverse=True)
    assert found[[0, 50_000, -2, -1]].tolist() == pytest.approx([10, 10, 1.9, 1], rel=oracle.ROUNDING)


def test_nothing_is_read_back_from_a_device() -> None:
    """The meta device has nothing to read."""
    samples = Samples(
        [torch.ones(9, device="meta"), torch.ones(4, device="meta")], rollout_ids=[0, 0], layout=Gathered([0, 9, 13])
    )
    values = torch.ones(13, device="meta", requires_grad=True)
    for per in ("sample", "rollout"):
        for kind in ("sum", "max", "min"):
            found = segment_scan(values, samples.local(0, 1), kind=kind, per=per, reverse=True)
            found.sum().backward()
        for kind in ("max", "min"):
            found = segment_extreme(values, samples.local(0, 1), kind=kind, per=per)
            unit_reduce(found, samples.local(0, 1), kind="logsumexp", per=per).sum().backward()
    assert values.grad.shape == (13,)


# --- refusals, each beside its nearest legal neighbour


class GroupOf:
    """As much of a process group as is looked at before anything is exchanged."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


WHOLE, MASKED = torch.ones(6), local_of(MASKS)
AT_CP_2 = Samples(MASKS, layout=Gathered([0, 3, 5, 6])).local(0, 2)  # where all tokens are on every rank
CUT = Samples(MASKS, layout=ZigzagTHD([0, 4, 8, 12], total_lengths=[3, 2, 1])).local(0, 2)


def sums(values: Any = WHOLE, local: Any = MASKED, **more: Any) -> Tensor:
    return segment_sum(values, local, **more)


def of_units(per: str, tokens: dict[int | str, float] | None) -> Tensor:
    """Of a step in which rollouts and prompts have so many tokens."""
    totals = StepTotals(**{f"{per}s": UnitCounts(all=9, tokens=tokens)})
    local = local_of(MASKS, **{f"{per}_ids": ["a", "a", "b"]})
    return segment_sum(WHOLE, local, per=per, totals=totals)


TWO_RANKS, FOUR_RANKS = ({"local": AT_CP_2, "cp_group": GroupOf(size)} for size in (2, 4))
REFUSALS = {
    **refusals(
        sums,
        ((torch.ones(5),), r"of shape \(5,\): this rank's part of the layout is \(6,\)", (torch.ones(1, 6),)),
        (([WHOLE, torch.ones(4)],), r"a segment sum's values of shape \(4,\)", ([WHOLE, WHOLE],)),
        ({"per": "step"}, "no such unit of a segment sum. Choose one of sample, rollout", {"per": "rollout"}),
        ({"per": "prompt"}, "per='prompt' of samples without prompt_ids", {"per": "rollout"}),
        (FOUR_RANKS, "a cp_group of 4 ranks: the micro-batch is cut for 2", TWO_RANKS),
        ({"local": CUT}, "no cp_group: a sample's tokens lie on 2 ranks", {"local": AT_CP_2}),
    ),
    **refusals(
        of_units,
        (
            ("rollout", {"a": 2.125, "b": 1}),
            "the rollout of sample 0, 2 of whose 2.125 mask tokens are in this micro-batch",
            ("rollout", {"a": 2, "b": 1}),
        ),
        (
            ("prompt", {"a": 2, "b": 2}),
            "the prompt of sample 2, 1 .+ Keep a prompt's samples together",
            ("prompt", {"a": 2, "b": 1}),
        ),
        (("prompt", None), "in a step whose totals count no prompts", ("rollout", None)),
    ),
    **refusals(
        functools.partial(segment_scan, WHOLE, MASKED),
        ({"kind": "mean"}, "no such kind of a scan", {"kind": "min"}),
        ({"per": "prompt"}, "no such unit of a scan", {"per": "rollout"}),
        ({"gamma": 1.1}, r"gamma is 1.1: it must be a number in \[0, 1\]", {"gamma": 0}),
        ({"kind": "max", "gamma": 0.5}, "only sums are discounted", {"kind": "max"}),
        ({"kind": "max", "exclusive": True}, "nothing before it", {"kind": "max", "exclusive": True, "empty": 0.0}),
    ),
    **refusals(
        lambda *shape: to_tokens(torch.ones(shape), MASKED),
        ((6,), r"a statistic of shape \(6,\): it must have one number for each of the micro-batch's 3", (3,)),
    ),
    **refusals(
        sums,
        ((WHOLE.int(),), "it must be a float tensor", (WHOLE.double(),)),
        ({"cp_group": WHOLE}, "a process group of type Tensor: it must be a ProcessGroup", {"cp_group": None}),
        error=TypeError,
    ),
}

test_refusals = refusal_tests(REFUSALS)
