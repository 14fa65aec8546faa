"""Advantages against Python's statistics, and by hand."""

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks, start_process_group
from refusals import Call, check_refusal, each_of, refusals

from megatron_rl_loss import BadBatchError, Gathered, Samples, ZigzagTHD
from megatron_rl_loss.losses import distillation_advantages, gae, group_relative_advantages, rloo_advantages, whiten
from megatron_rl_loss.plan import plan_step

pytestmark = pytest.mark.filterwarnings("ignore:all rewards are equal")
NAN, INF = float("nan"), float("inf")


def advantages_of(rewards: Sequence[float], groups: Sequence[Any], by_std: bool, epsilon: float) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        std = statistics.stdev(members) if len(members) > 1 else 0.0
        result.append((reward - statistics.fmean(members)) / (std + epsilon if by_std else 1))
    return result


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(-4, 4).map(lambda r: r / 2), st.integers(0, 3)), max_size=12),
    st.booleans(),
    st.sampled_from([1e-6, 1e-4, 0.5]),
    st.sampled_from([int, str, lambda i: -i * 2**50]),
)
def test_group_relative_advantages(
    batch: list[tuple[float, int]], by_std: bool, epsilon: float, rename: Callable[[int], Any]
) -> None:
    rewards, groups = [reward for reward, _ in batch], [rename(group) for _, group in batch]
    got = group_relative_advantages(torch.tensor(rewards), groups, normalize_by_std=by_std, epsilon=epsilon)
    assert got.dtype == torch.float32
    # Computed in float64, then rounded once.
    assert got.tolist() == pytest.approx(advantages_of(rewards, groups, by_std, epsilon), rel=2 * oracle.ROUNDING)


@pytest.mark.parametrize(
    ("rewards", "ids", "by_std", "expected"),
    [
        pytest.param([7, 1, 1], [0, 1, 1], True, [0, 0, 0], id="group of one, and equal rewards"),
        pytest.param([0.1] * 7, [0] * 7, True, [0] * 7, id="equal rewards that binary cannot hold"),
        pytest.param([2.0**24, 2.0**24 + 2], [0, 0], False, [-1, 1], id="differences that float32 sums lose"),
    ],
)
def test_by_hand(rewards: list[float], ids: list[Any], by_std: bool, expected: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        got = group_relative_advantages(torch.tensor(rewards, dtype=dtype), ids, normalize_by_std=by_std)
        assert got.tolist() == pytest.approx(expected, abs=1e-4)


def test_distillation_advantages() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = distillation_advantages(log_probs, torch.tensor([-0.5, -4.0]))
    assert advantages.tolist() == [0.5, -2.0]
    assert not advantages.requires_grad


def test_a_split_rollout_counts_once_in_its_group() -> None:
    rewards, prompts = torch.tensor([1.0, 1.0, 1.0, 0.0, 5.0]), [0, 0, 0, 0, 1]
    rollouts = ["a", "a", "a", "b", "c"]
    whole = group_relative_advantages(torch.tensor([1.0, 0.0, 5.0]), [0, 0, 1])
    split = group_relative_advantages(rewards, prompts, rollout_ids=rollouts)
    assert split.tolist() == pytest.approx(whole[[0, 0, 0, 1, 2]].tolist(), rel=oracle.EXACT)
    plain = group_relative_advantages(rewards, prompts)
    assert plain.tolist() != pytest.approx(split.tolist(), rel=1e-3)  # negative control


@pytest.mark.filterwarnings("default")
def test_rewards_that_teach_nothing_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="all rewards are equal within their prompt groups"):
        group_relative_advantages(torch.tensor([1.0, 1, 3, 3]), [0, 0, 1, 1])


# --- leave-one-out, a critic's, and whitening, on one rank and over DP 2, CP 2

REWARDS, GROUPS, ROLLOUTS = [1.0, 0.0, 5.0, 2.0, 2.0, 7.0], [0, 0, 1, 0, 0, 2], [0, 1, 2, 3, 3, 4]
MASKS = [[1, 1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0], [0.5, 1, 1, 1, 1, 1, 0, 1]]
STARTS = [0, 8, 12, 16, 24]
GAMMA, LAM = 0.9, 0.8


def of_tokens(seed: int) -> torch.Tensor:
    drawn = torch.randn(STARTS[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.masked_fill(torch.tensor([m for mask in MASKS for m in mask]) == 0, NAN)


def leave_one_out(rewards: Sequence[float], groups: Sequence[Any], rollouts: Sequence[Any]) -> list[float]:
    found = []
    for reward, group, rollout in zip(rewards, groups, rollouts, strict=True):
        of_group = {o: r for r, g, o in zip(rewards, groups, rollouts, strict=True) if g == group}
        others = [r for o, r in of_group.items() if o != rollout]
        found.append(reward - statistics.fmean(others) if others else 0.0)
    return found


def generalised(rewards: list[float], values: list[float], masks: list[list[float]]) -> list[tuple[float, float]]:
    """The definition, a sum over all later tokens, for the active tokens of each sample."""
    found, begin = [], 0
    for mask in masks:
        row = [(0.0, 0.0)] * len(mask)
        active = [begin + t for t, m in enumerate(mask) if m]
        following = [values[t] for t in active[1:]] + [0.0]
        deltas = [rewards[t] + GAMMA * v - values[t] for t, v in zip(active, following, strict=True)]
        for k, t in enumerate(active):
            advantage = sum((GAMMA * LAM) ** j * d for j, d in enumerate(deltas[k:]))
            row[t - begin] = (advantage, advantage + values[t])
        found += row
        begin += len(mask)
    return found


def samples_of(chosen: Sequence[int], layout: Any = None) -> Samples:
    return Samples([torch.tensor(MASKS[i]) for i in chosen], layout=layout)


def whitened(shift: bool = True) -> list[float]:
    active = [x for x in of_tokens(3).tolist() if x == x]
    mean, scale = statistics.fmean(active), (statistics.variance(active) + 1e-8) ** -0.5
    return [(x - mean * shift) * scale if x == x else 0.0 for x in of_tokens(3).tolist()]


def test_whitening_of_a_step_of_two_micro_batches() -> None:
    plan = plan_step([samples_of([0, 1]), samples_of([2, 3])], "token_mean", dp_group=None)
    for shift in (True, False):
        found = whiten(list(of_tokens(3).split(12)), list(plan), dp_group=None, shift_mean=shift)
        assert torch.cat(found).tolist() == pytest.approx(whitened(shift), rel=oracle.EXACT)
    assert whiten([], [], dp_group=None) == []
    copies = samples_of(range(4), Gathered(STARTS)).local(0, 2)  # this rank has all tokens, and no group to ask
    assert whiten([of_tokens(3)], [copies], dp_group=None)[0].tolist() == pytest.approx(whitened(), rel=oracle.EXACT)


def on_rank() -> dict[str, Any]:
    """Rank r is DP rank r // 2, with two samples, and CP rank r % 2."""
    start_process_group()
    rank = int(os.environ["RANK"])
    dp_rank, cp_rank = divmod(rank, 2)
    cp_group, dp_group = (
        [dist.new_group(ranks) for ranks in of_kind][at]
        for of_kind, at in (([[0, 1], [2, 3]], dp_rank), ([[0, 2], [1, 3]], cp_rank))
    )
    mine, few = slice(12 * dp_rank, 12 * (dp_rank + 1)), slice(3 * dp_rank, 3 * (dp_rank + 1))
    starts = [start - 12 * dp_rank for start in STARTS[2 * dp_rank : 2 * dp_rank + 3]]
    found: dict[str, Any] = {"refused": ""}
    ids: dict[str, Any] = {"rollout_ids": ROLLOUTS[few], "dp_group": dp_group}
    for function in (rloo_advantages, group_relative_advantages):
        found[function.__name__] = function(torch.tensor(REWARDS[few]), GROUPS[few], **ids).tolist()
    for layout in (ZigzagTHD(starts), Gathered(starts)):
        samples = samples_of([2 * dp_rank, 2 * dp_rank + 1], layout)
        local = samples.local(cp_rank, 2)
        r, v, x = (local.of(of_tokens(seed)[mine]) for seed in (1, 2, 3))
        advantages, returns = gae(r, v, local, cp_group, gamma=GAMMA, lam=LAM)
        (white,) = whiten([x], [local], dp_group=dp_group, cp_group=cp_group)
        plan = plan_step([samples], "token_mean", dp_group=dp_group, cp_group=cp_group)
        assert torch.equal(whiten([x], list(plan), dp_group=dp_group)[0], white)  # a micro-batch knows its CP group
        places = [12 * dp_rank + place for place in local.positions.tolist()]
        rows = zip(advantages.tolist(), returns.tolist(), white.tolist(), strict=True)
        found[type(layout).__name__] = dict(zip(places, rows, strict=True))
    try:
        whiten([x[rank:]], [local], dp_group=dp_group, cp_group=cp_group)
    except (BadBatchError, ValueError) as error:
        found["refused"] = str(error)
    return found


def test_over_ranks() -> None:
    by_rank = run_ranks(4, on_rank, timeout_s=600)
    alone = {
        function: function(torch.tensor(REWARDS), GROUPS, rollout_ids=ROLLOUTS).tolist()
        for function in (rloo_advantages, group_relative_advantages)
    }
    assert alone[rloo_advantages] == pytest.approx(leave_one_out(REWARDS, GROUPS, ROLLOUTS), rel=oracle.EXACT)
    pairs = generalised(of_tokens(1).tolist(), of_tokens(2).tolist(), MASKS)
    expected = [(*pair, white) for pair, white in zip(pairs, whitened(), strict=True)]
    for name, values in ((function.__name__, values) for function, values in alone.items()):
        assert by_rank[0][name] + by_rank[2][name] == by_rank[1][name] + by_rank[3][name] == values
    for layout in ("ZigzagTHD", "Gathered"):
        held = {place: row for rank in by_rank for place, row in rank[layout].items()}
        assert sorted(held) == list(range(24))
        for place, row in held.items():
            assert row == pytest.approx(expected[place], rel=oracle.EXACT), (layout, place)
    assert all("rank 1: ValueError: values of shape" in rank["refused"] for rank in by_rank)


def advantages_from(rewards: Any, ids: Any, rollout_ids: Any = None) -> torch.Tensor:
    return group_relative_advantages(torch.tensor(rewards), ids, rollout_ids=rollout_ids)


PAIR = ([1.0, 2.0], [0, 0])
REFUSALS = {
    **refusals(
        advantages_from,
        (([[1.0, 2.0]], [0, 0]), r"shape \(1, 2\): they must be 1-D and finite", PAIR),
        (([1.0, NAN], [0, 0]), "1-D and finite", ([1.0, -1e30], [0, 0])),
        (([INF], [0]), "1-D and finite", ([1], [0])),
        (([1.0, 2.0], [0]), "1 prompt_ids for 2", PAIR),
        (
            ([1.0, 0, 1], [0, 0, 0], ["a", "a", "b"]),
            "rewards that differ within the rollout of sample",
            ([1.0, 1, 0], [0, 0, 0], ["a", "a", "b"]),
        ),
        (([1.0, 1], [0, 1], [2, 2]), "share its reward and its prompt", ([1.0, 1], [0, 0], [2, 2])),
    ),
    **refusals(advantages_from, (([1.0], [0.5]), "prompt_ids holds 0.5", ([1.0], ["0.5"])), error=TypeError),
}


REFUSALS |= refusals(
    lambda **more: gae(torch.zeros(12), torch.zeros(12), samples_of([0, 1]).local(0, 1), **more),
    ({"gamma": 1.1}, r"gamma is 1.1: it must be a number in \[0, 1\]", {"gamma": 1.0}),
    ({"lam": -0.1}, "lam is -0.1", {"lam": 0}),
    ({"lam": "0.95"}, "lam is '0.95'", {"lam": 0.95}),
)


CUT = samples_of([0, 1], ZigzagTHD([0, 8, 12]))
REFUSALS |= refusals(
    lambda values=(1.0,) * 12, local=samples_of([0, 1]).local(0, 1), **more: whiten(  # noqa: B008
        [torch.tensor(values)], [local], dp_group=None, **more
    ),
    ({"epsilon": 0}, r"epsilon is 0: it must be a number in \(0, inf\)", {"epsilon": 1e-9}),
    ({"values": (NAN,) * 12}, "values with NaN or Inf at 9 active tokens", {"values": (1.0, 1, NAN) + (1.0,) * 9}),
    ({"values": (0.0,) * 6, "local": CUT.local(0, 2)}, "no cp_group: .+ on 2 ranks", {"local": CUT.local(0, 1)}),
)


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
