"""Advantages whitened over a whole step, and MaxRL's, against plain Python over all tokens of all ranks."""

import math
import os
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from refusals import refusal_tests, refusals

from megatron_rl_loss import Samples, ZigzagTHD, plan_step, whiten_advantages
from megatron_rl_loss.losses.advantages import maxrl_advantages

#: Of each of two data-parallel ranks the samples' masks, advantages and prompts; the second has the longest alone.
MASKS: list[list[list[float]]] = [[[1, 1, 0.5], [0, 1]], [[1, 0, 1, 1, 1, 0, 1]], [[1, 1]], []]
ADVANTAGES: list[list[list[float]]] = [
    [[1.0, -2.0, 4.0], [9.0, 3.0]],
    [[0.5, 9.0, 1.5, -3.0, 2.0, 9.0, 7.0]],
    [[2.0, -1.0]],
    [],
]
PROMPTS: list[list[Any]] = [["a", "b"], ["a"], ["b"], []]
SIZES = [8, 8, 8, 8]  # slots; of the third some CP ranks have padding alone


def stated(per: str) -> list[list[list[float]]]:
    """Each hand's whitened rows, by `math.fsum` over all active tokens of the unit."""
    every = [
        (prompt, m, a)
        for masks, rows, prompts in zip(MASKS, ADVANTAGES, PROMPTS, strict=True)
        for mask, row, prompt in zip(masks, rows, prompts, strict=True)
        for m, a in zip(mask, row, strict=True)
        if m
    ]

    def whitened(a: float, m: float, prompt: Any) -> float:
        of = [(w, x) for other, w, x in every if per == "step" or other == prompt]
        total = math.fsum(w for w, _ in of)
        mean = math.fsum(w * x for w, x in of) / total
        std = math.sqrt(math.fsum(w * (x - mean) ** 2 for w, x in of) / total)
        return (a - mean) / (std + 1e-8) if m else 0.0

    return [
        [[whitened(a, m, p) for a, m in zip(row, mask, strict=True)] for row, mask, p in zip(*hand, strict=True)]
        for hand in zip(ADVANTAGES, MASKS, PROMPTS, strict=True)
    ]


def on_rank(cp_size: int) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Each hand's positions on this rank and its whitened values; hands 0, 1 on the first half of ranks."""
    start_process_group()
    dp_rank, cp_rank = divmod(int(os.environ["RANK"]), cp_size)
    hands = [0, 1, 2, 3] if cp_size == 4 else [[0, 1], [2, 3]][dp_rank]
    found: dict[str, list[tuple[list[int], list[float]]]] = {}
    for per in ("step", "prompt"):
        places, values = [], []
        for hand in hands:
            bounds = [SIZES[hand] * k for k in range(len(MASKS[hand]) + 1)]
            lengths = list(map(len, MASKS[hand]))
            layout = ZigzagTHD(bounds, total_lengths=lengths) if lengths else None
            samples = Samples(MASKS[hand], layout=layout, prompt_ids=PROMPTS[hand])
            places.append(samples.local(cp_rank, cp_size))
            whole = samples.in_buffer([torch.tensor(row).double() for row in ADVANTAGES[hand]] or torch.zeros(0))
            values.append(places[-1].of(whole) + (places[-1].mask == 0))  # anything where masked
        rows = whiten_advantages(values, places, per=per, dp_cp_group=dist.group.WORLD)
        found[per] = [(place.positions.tolist(), row.tolist()) for place, row in zip(places, rows, strict=True)]
    return found


@pytest.mark.parametrize("cp_size", [2, 4])
def test_whitening_over_ranks_some_of_which_hold_no_token(cp_size: int) -> None:
    by_rank = run_ranks(4, on_rank, cp_size)
    for per in ("step", "prompt"):
        seen = set[tuple[int, int]]()
        for rank, found in enumerate(by_rank):
            hands = [0, 1, 2, 3] if cp_size == 4 else [[0, 1], [2, 3]][rank // cp_size]
            for hand, (positions, values) in zip(hands, found[per], strict=True):
                right = {SIZES[hand] * i + t: x for i, row in enumerate(stated(per)[hand]) for t, x in enumerate(row)}
                for at, value in zip(positions, values, strict=True):
                    assert value == pytest.approx(right.get(at, 0.0), rel=1e-12, abs=1e-12)
                    seen.add((hand, at))
        assert len(seen) == 2 * 8 + 8 + 8
    assert stated("step") != stated("prompt")


def test_in_one_process_and_without_a_token() -> None:
    local = Samples([[1, 1, 0], [1]], prompt_ids=[0, 1]).local(0, 1)
    (row,) = whiten_advantages([torch.tensor([[1.0, 3.0, math.nan, 5.0]])], [local], dp_cp_group=None)
    assert row.shape == (1, 4)
    spread = statistics.pstdev([1, 3, 5])
    assert row[0].tolist() == pytest.approx([-2 / spread, 0, 0, 2 / spread])
    assert row.dtype == torch.float32
    masked = Samples([[0, 0]]).local(0, 1)
    (row,) = whiten_advantages([torch.ones(2)], [masked], dp_cp_group=None)
    assert row.tolist() == [0, 0]
    assert whiten_advantages([], [], dp_cp_group=None) == []
    large = torch.tensor([1e6, 1e6 + 1, 1e6 + 2]).double()  # float64 squares would lose the variance
    (row,) = whiten_advantages([large], [Samples([[1, 1, 1]]).local(0, 1)], dp_cp_group=None)
    assert row.tolist() == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)], rel=1e-7)


def test_maxrl_advantages() -> None:
    """By SkyRL's formula; a rollout of two samples counts once, and a group of one has none."""
    rewards, prompts = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.5], [0, 0, 0, 0, 1, 1, 2, 2]
    right = [*((r - 0.5) / (0.5 + 1e-6) for r in rewards[:4]), 1 / (1 + 2e-6), -1 / (1 + 2e-6), 0, 0]
    assert maxrl_advantages(rewards, prompts, dp_group=None).tolist() == pytest.approx(right)
    split = maxrl_advantages([1.0, 1.0, 0.0, 0.0], [0] * 4, rollout_ids=[0, 0, 1, 2], dp_group=None)
    assert split.tolist() == pytest.approx([2, 2, -1, -1], rel=1e-5)
    assert maxrl_advantages([3.0, 0.0, 1.0], [0, 1, 1], dp_group=None).tolist() == pytest.approx([0, -1, 1], rel=1e-5)
    with pytest.warns(UserWarning, match="all rewards are equal"):
        assert maxrl_advantages([0.0, 0.0], [0, 0], dp_group=None).tolist() == [0, 0]


LOCAL = Samples([[1, 1]], prompt_ids=[0]).local(0, 1)
ROW = torch.tensor([1.0, 2.0])


def whitened(*rows: Any, **more: Any) -> Any:
    return whiten_advantages(list(rows), [LOCAL], **{"dp_cp_group": None} | more)


test_refusals = refusal_tests(
    {
        **refusals(
            whitened,
            ((ROW, ROW), "2 advantages for 1 micro-batches", (ROW,)),
            ((torch.ones(3),), r"advantages of shape \(3,\)", (ROW,)),
            ((torch.tensor([1.0, math.nan]),), "NaN or infinity at active tokens", (ROW,)),
        ),
        **refusals(
            lambda advantages, local: whiten_advantages(advantages, local, dp_cp_group=None),
            (([ROW], LOCAL), r"local is one LocalTokens: .* Pass \[local\]", ([ROW], [LOCAL])),
            (
                ([ROW], plan_step([LOCAL.samples], "token_mean", dp_group=None)[0]),
                "local is one Microbatch",
                ([ROW], [LOCAL]),
            ),
            ((None, [LOCAL]), "advantages is a NoneType", ([ROW], [LOCAL])),
            error=TypeError,
        ),
        **refusals(
            lambda **more: whitened(ROW, **more),
            (
                {"per": "session"},
                r"per='session' and samples without ids\['session'\] \(they have prompt\)",
                {"per": "prompt"},
            ),
            ({"epsilon": 0}, r"epsilon is 0: it must be a number in \(0, inf\)", {"epsilon": 1e-6}),
        ),
        **refusals(
            lambda rewards: maxrl_advantages(rewards, [0, 0], dp_group=None),
            (([1.0, -1.0],), "rewards down to -1: divided by their group's mean", ([1.0, 0.0],)),
        ),
    }
)
