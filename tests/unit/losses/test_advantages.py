"""Advantages against Python's statistics, and by hand."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import Call, check_refusal, each_of, refusals

from megatron_rl_loss.losses import distillation_advantages, group_relative_advantages

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
        pytest.param([1, 0], [0, 0], True, [0.7071, -0.7071], id="Bessel's correction"),
        pytest.param([1, 0, 5, 3, 1], [0, 0, 1, 1, 1], False, [0.5, -0.5, 2, 0, -2], id="uneven groups"),
        pytest.param([1, 5, 0, 3, 1], ["a", "b", "a", "b", "b"], True, [0.7071, 1, -0.7071, 0, -1], id="interleaved"),
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
    ),
    **refusals(advantages_from, (([1.0], [0.5]), "prompt_ids holds 0.5", ([1.0], ["0.5"])), error=TypeError),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
