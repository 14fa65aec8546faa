"""Sums over sequences that lie on several ranks: value, gradient and collectives, on real groups over gloo.

All losses of a launch are computed in every layout at CP 1, 2 and 4, in whole steps (`cp_steps`), and compared with
float64 sums over whole sequences.
"""

import math
import os
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from refusals import Call, Refusal, check_refusal, each_of
from torch import Tensor

from megatron_rl_loss import Gathered, Samples, StepTotals, UnitCounts, ZigzagTHD
from megatron_rl_loss.losses import segment_mean, segment_sum, to_tokens

# --- collectives


class Counted:
    """What went through `all_reduce`: bytes of each call."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self._all_reduce = dist.all_reduce

    def __enter__(self) -> "Counted":
        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes.append(tensor.nbytes)
            return self._all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = counting
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._all_reduce

    def taken(self) -> list[int]:
        found, self.bytes = self.bytes, []
        return found


NUM_SAMPLES = 6


def count_on_rank(lengths: tuple[int, ...]) -> dict[str, list[int]]:
    """Forward and backward bytes of every call, by case and length of the samples."""
    start_process_group()
    rank, cp_size = int(os.environ["RANK"]), 2
    found = {}
    for length in lengths:
        cu_seqlens = [length * i for i in range(NUM_SAMPLES + 1)]
        masks = [torch.ones(length)] * NUM_SAMPLES
        for layout in (ZigzagTHD(cu_seqlens), Gathered(cu_seqlens)):
            local = Samples(masks, layout=layout).local(rank, cp_size)
            values = torch.randn(4, len(local), requires_grad=True)
            data = [torch.randn(len(local)) for _ in range(2)]
            with Counted() as counted:
                for what, rows in {
                    "one": [values[0]],
                    "four": list(values),
                    "two of data": data,
                    "one, and two of data": [data[0], values[0], data[1]],
                }.items():
                    sums = segment_sum(rows, local, dist.group.WORLD)
                    name = f"{type(layout).__name__}, {what}, {length}"
                    found[f"{name}, forward"] = counted.taken()
                    if sums.requires_grad:
                        sums.square().sum().backward()
                    found[f"{name}, backward"] = counted.taken()
    alone = Samples(masks).local(0, 1)
    with Counted() as counted:
        values = torch.randn(len(alone), requires_grad=True)
        segment_mean(values, alone).sum().backward()
        found["CP 1"] = counted.taken()
    dist.barrier()
    return found


def test_one_collective_whose_bytes_do_not_depend_on_lengths() -> None:
    one = 8 * NUM_SAMPLES
    lengths = (4, 64)
    for found in run_ranks(2, count_on_rank, lengths):
        for length in lengths:
            for what, forward, backward in [
                ("one", [one], [one]),
                ("four", [4 * one], [4 * one]),
                ("two of data", [2 * one], []),
                ("one, and two of data", [3 * one], [one]),
            ]:
                assert found[f"ZigzagTHD, {what}, {length}, forward"] == forward
                assert found[f"ZigzagTHD, {what}, {length}, backward"] == backward
                assert found[f"Gathered, {what}, {length}, forward"] == []
                assert found[f"Gathered, {what}, {length}, backward"] == []
        assert found["CP 1"] == []


# --- on one rank


MASKS = [torch.tensor([1, 1, 0]), torch.tensor([0, 0]), torch.tensor([1])]


def local_of(masks: list[Tensor], **ids: Any) -> Any:
    return Samples(masks, **ids).local(0, 1)


def test_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, math.nan, math.inf, -math.inf, 6.0], requires_grad=True)
    local = local_of(MASKS)
    assert segment_sum(values, local).tolist() == [3, 0, 6]
    means = segment_mean(values, local)
    assert means.tolist() == [1.5, 0, 6]
    tokens = to_tokens(means, local)
    assert tokens.tolist() == [1.5, 1.5, 1.5, 0, 0, 6]
    (tokens * torch.arange(6)).sum().backward()
    assert values.grad.tolist() == [1.5, 1.5, 0, 0, 0, 5]


def test_fractional_masks_weigh() -> None:
    values = torch.tensor([1.0, 5.0], requires_grad=True)
    found = segment_mean(values, local_of([torch.tensor([1.0, 0.25])]))
    assert found.tolist() == pytest.approx([2.25 / 1.25])
    found.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.8, 0.2])


def test_rollouts_share_a_sum() -> None:
    ids = {"rollout_ids": ["b", "a", "b"]}
    values = torch.tensor([1.0, 2.0, 9.0, 9.0, 9.0, 6.0], requires_grad=True)
    local = local_of(MASKS, **ids)
    assert segment_sum(values, local, per="rollout").tolist() == [9, 0, 9]
    assert segment_mean(values, local, per="rollout").tolist() == [3, 0, 3]
    assert segment_mean(values, local).tolist() == [1.5, 0, 6]
    segment_mean(values, local, per="rollout")[2].backward()
    assert values.grad.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 0, 1 / 3])


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


# --- refusals, each beside its nearest legal neighbour


class GroupOf:
    """As much of a process group as is looked at before anything is exchanged."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


WHOLE = torch.ones(6)


def sums(values: Any = WHOLE, *, cp_size: int = 1, **keywords: Any) -> Call:
    """At CP 2 all tokens are on every rank, so that the accepted neighbours exchange nothing."""
    layout = Gathered([0, 3, 5, 6]) if cp_size > 1 else None
    return lambda: segment_sum(values, Samples(MASKS, layout=layout).local(0, cp_size), **keywords)


def cut(**keywords: Any) -> Call:
    local = Samples([torch.ones(4)], layout=ZigzagTHD([0, 4])).local(0, 2)
    return lambda: segment_sum(torch.ones(2), local, **keywords)


def per_rollout(tokens: float) -> Call:
    totals = StepTotals(rollouts=UnitCounts(all=9, tokens={"a": tokens, "b": 1}))
    local = local_of(MASKS, rollout_ids=["a", "a", "b"])
    return lambda: segment_sum(WHOLE, local, per="rollout", totals=totals)


def spread_of(shape: tuple[int, ...]) -> Call:
    return lambda: to_tokens(torch.ones(shape), local_of(MASKS))


REFUSALS: dict[str, Refusal] = {
    "values of another number of tokens": (
        sums(torch.ones(5)),
        ValueError,
        r"a segment sum's values of shape \(5,\): this rank's part of the layout is \(6,\)",
        sums(torch.ones(1, 6)),
    ),
    "one of several that fits not": (
        sums([WHOLE, torch.ones(4)]),
        ValueError,
        r"of shape \(4,\)",
        sums([WHOLE, WHOLE]),
    ),
    "values that are ints": (sums(WHOLE.int()), TypeError, "it must be a float tensor", sums(WHOLE.double())),
    "an unknown unit": (
        sums(per="prompt"),
        ValueError,
        "there is no such unit of a segment sum. Choose one of sample, rollout",
        sums(per="rollout"),
    ),
    "no group for a sum over several ranks": (
        cut(),
        ValueError,
        "no cp_group: a sample's tokens lie on 2 ranks",
        sums(cp_size=2),
    ),
    "a group of another size": (
        sums(cp_size=2, cp_group=GroupOf(4)),
        ValueError,
        "a cp_group of 4 ranks: the micro-batch is cut for 2",
        sums(cp_size=2, cp_group=GroupOf(2)),
    ),
    "a rollout in several micro-batches": (
        per_rollout(3.0),
        ValueError,
        "the rollout of sample 0, 2 of whose 3 mask tokens are in this micro-batch",
        per_rollout(2.0),
    ),
    "a statistic of another number of samples": (
        spread_of((6,)),
        ValueError,
        r"a statistic of shape \(6,\): it must have one number for each of the micro-batch's 3 samples",
        spread_of((3,)),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
