"""Sums over sequences: collectives over gloo, and by hand on one rank; test_losses_over_cp.py has layouts over CP."""

import math
import os
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from refusals import Call, check_refusal, each_of, refusals
from torch import Tensor

from megatron_rl_loss import Gathered, Samples, StepTotals, UnitCounts, ZigzagTHD
from megatron_rl_loss.losses import segment_mean, segment_sum, to_tokens

NUM_SAMPLES = 6
ROWS: dict[str, tuple[int, int]] = {"one": (1, 0), "four": (4, 0), "two of data": (0, 2), "one and two of data": (1, 2)}


def count_on_rank(lengths: tuple[int, ...]) -> dict[tuple[str, int, str], tuple[list[int], list[int]]]:
    """Bytes of each call of `all_reduce`, forward and backward, by layout, length of the samples, and rows."""
    start_process_group()
    rank, found, all_reduce = int(os.environ["RANK"]), {}, dist.all_reduce
    sent: list[int] = []

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting  # in a process of its own
    for length in lengths:
        cu_seqlens = [length * i for i in range(NUM_SAMPLES + 1)]
        for layout, cp_size in ((ZigzagTHD(cu_seqlens), 2), (Gathered(cu_seqlens), 2), (Gathered(cu_seqlens), 1)):
            samples = Samples([torch.ones(length)] * NUM_SAMPLES, layout=layout)
            local = samples.local(rank % cp_size, cp_size)
            for name, (with_gradient, data) in ROWS.items():
                rows = [torch.randn(len(local), requires_grad=k < with_gradient) for k in range(with_gradient + data)]
                sums = segment_sum(rows[::-1], local, dist.group.WORLD if cp_size > 1 else None)
                forward, sent[:] = [*sent], []
                if sums.requires_grad:
                    sums.square().sum().backward()
                found[type(layout).__name__, length * cp_size, name] = forward, [*sent]
                sent.clear()
    return found


def test_one_collective_whose_bytes_do_not_depend_on_lengths() -> None:
    for found in run_ranks(2, count_on_rank, (4, 64), timeout_s=600):
        for (layout, _, name), collectives in found.items():
            with_gradient, data = ROWS[name]
            one = 8 * NUM_SAMPLES
            forward, backward = [one * (with_gradient + data)], [one * with_gradient] if with_gradient else []
            assert collectives == ((forward, backward) if layout == "ZigzagTHD" else ([], [])), (layout, name)
        assert len(found) == 3 * 2 * len(ROWS)


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


def sums(values: Any = WHOLE, *, cp_size: int = 1, **keywords: Any) -> Tensor:
    """At CP 2 all tokens are on every rank, so that the accepted neighbours exchange nothing."""
    layout = Gathered([0, 3, 5, 6]) if cp_size > 1 else None
    return segment_sum(values, Samples(MASKS, layout=layout).local(0, cp_size), **keywords)


def of_four(layout: Any) -> Tensor:
    local = Samples([torch.ones(4)], layout=layout).local(0, 2)
    return segment_sum(torch.ones(len(local)), local)


def per_rollout(tokens: float) -> Tensor:
    totals = StepTotals(rollouts=UnitCounts(all=9, tokens={"a": tokens, "b": 1}))
    local = local_of(MASKS, rollout_ids=["a", "a", "b"])
    return segment_sum(WHOLE, local, per="rollout", totals=totals)


def spread_of(*shape: int) -> Tensor:
    return to_tokens(torch.ones(shape), local_of(MASKS))


TWO_RANKS, FOUR_RANKS = ({"cp_size": 2, "cp_group": GroupOf(size)} for size in (2, 4))
REFUSALS = {
    **refusals(
        sums,
        ((torch.ones(5),), r"of shape \(5,\): this rank's part of the layout is \(6,\)", (torch.ones(1, 6),)),
        (([WHOLE, torch.ones(4)],), r"a segment sum's values of shape \(4,\)", ([WHOLE, WHOLE],)),
        ({"per": "prompt"}, "no such unit of a segment sum. Choose one of sample, rollout", {"per": "rollout"}),
        (FOUR_RANKS, "a cp_group of 4 ranks: the micro-batch is cut for 2", TWO_RANKS),
    ),
    **refusals(
        of_four,
        ((ZigzagTHD([0, 4]),), "no cp_group: a sample's tokens lie on 2 ranks", (Gathered([0, 4]),)),
    ),
    **refusals(
        per_rollout,
        ((3.0,), "the rollout of sample 0, 2 of whose 3 mask tokens are in this micro-batch", (2.0,)),
    ),
    **refusals(
        spread_of,
        ((6,), r"a statistic of shape \(6,\): it must have one number for each of the micro-batch's 3", (3,)),
    ),
    **refusals(
        sums,
        ((WHOLE.int(),), "it must be a float tensor", (WHOLE.double(),)),
        ({"cp_group": WHOLE}, "a process group of type Tensor: it must be a ProcessGroup", {"cp_group": None}),
        error=TypeError,
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
