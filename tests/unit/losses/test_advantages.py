"""Advantages and whitening against Python's statistics, on one rank and over DP 2, CP 2."""

import os
import random
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
from refusals import refusal_tests, refusals

from megatron_rl_loss import BadBatchError, Gathered, Samples, ZigzagTHD
from megatron_rl_loss.losses import distillation_advantages, gae, group_relative_advantages, rloo_advantages, whiten
from megatron_rl_loss.plan import plan_step

pytestmark = pytest.mark.filterwarnings("ignore:all rewards are equal")
NAN, INF = float("nan"), float("inf")


def stated(batch: Sequence[tuple[float, Any, Any]], kind: str, epsilon: float = 1e-6) -> list[float]:
    """Of each sample's (reward, prompt, rollout); a rollout counts once in its group."""
    found = []
    for reward, group, rollout in batch:
        of_group = {o: r for r, g, o in batch if g == group}
        mean = statistics.fmean(of_group.values())
        std = statistics.stdev(of_group.values()) if len(of_group) > 1 else 0.0
        others = [r for o, r in of_group.items() if o != rollout]
        found.append({
            "centred": reward - mean,
            "by std": (reward - mean) / (std + epsilon),
            "leave one out": reward - statistics.fmean(others) if others else 0.0,
        }[kind])  # fmt: skip
    return found


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    # Binary cannot hold 0.1, nor float32 the last; a rollout's reward, its prompt, and its parts.
    st.lists(st.tuples(st.sampled_from([-2, -0.5, 0, 0.1, 0.1, 1, 2.0**24, 2.0**24 + 1]), st.integers(0, 3),
                       st.integers(1, 3)), max_size=8),
    st.sampled_from([1e-6, 1e-4, 0.5]),
    st.sampled_from([int, str, lambda i: -i * 2**50]),
    st.booleans(),
)  # fmt: skip
def test_advantages_of_samples(
    drawn: list[tuple[float, int, int]], epsilon: float, rename: Callable[[int], Any], split: bool
) -> None:
    batch = [(r, rename(g), rename(i)) for i, (r, g, parts) in enumerate(drawn) for _ in range(parts if split else 1)]
    random.Random(7).shuffle(batch)
    rewards, prompts, rollouts = (list(column) for column in zip(*batch, strict=True)) if batch else ([], [], [])
    given = torch.tensor(rewards, dtype=torch.float64), prompts
    ids = {"rollout_ids": rollouts if split else None}
    for kind, found in {
        "centred": group_relative_advantages(*given, **ids, normalize_by_std=False),
        "by std": group_relative_advantages(*given, **ids, epsilon=epsilon),
        "leave one out": rloo_advantages(*given, **ids),
    }.items():
        assert found.dtype == torch.float32
        # Computed in float64, then rounded once.
        assert found.tolist() == pytest.approx(stated(batch, kind, epsilon), rel=2 * oracle.ROUNDING, abs=1e-6)


def test_distillation_advantages() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = distillation_advantages(log_probs, torch.tensor([-0.5, -4.0]))
    assert (advantages.tolist(), advantages.requires_grad) == ([0.5, -2.0], False)


@pytest.mark.filterwarnings("default")
def test_rewards_that_teach_nothing_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="all rewards are equal within their prompt groups"):
        group_relative_advantages(torch.tensor([1.0, 1, 3, 3]), [0, 0, 1, 1])


# --- of samples whose groups lie on several ranks; whitening

BATCH = [(1.0, 0, 0), (0.0, 0, 1), (5.0, 1, 2), (2.0, 0, 3), (2.0, 0, 3), (7.0, 2, 4)]
MASKS = [[1, 1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0], [0.5, 1, 1, 1, 1, 1, 0, 1]]
STARTS = [0, 8, 12, 16, 24]


def of_tokens() -> torch.Tensor:
    drawn = torch.randn(STARTS[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return drawn.masked_fill(torch.tensor([m for mask in MASKS for m in mask]) == 0, NAN)


def samples_of(chosen: Sequence[int], layout: Any = None) -> Samples:
    return Samples([torch.tensor(MASKS[i]) for i in chosen], layout=layout)


def whitened(shift: bool = True) -> list[float]:
    active = [x for x in of_tokens().tolist() if x == x]
    mean, scale = statistics.fmean(active), (statistics.variance(active) + 1e-8) ** -0.5
    return [(x - mean * shift) * scale if x == x else 0.0 for x in of_tokens().tolist()]


def test_whitening_of_a_step_of_two_micro_batches() -> None:
    plan = plan_step([samples_of([0, 1]), samples_of([2, 3])], "token_mean", dp_group=None)
    for shift in (True, False):
        found = whiten(list(of_tokens().split(12)), list(plan), dp_group=None, shift_mean=shift)
        assert torch.cat(found).tolist() == pytest.approx(whitened(shift), rel=oracle.EXACT)
    assert whiten([], [], dp_group=None) == []
    copies = samples_of(range(4), Gathered(STARTS)).local(0, 2)  # this rank has all tokens, and no group to ask
    assert whiten([of_tokens()], [copies], dp_group=None)[0].tolist() == pytest.approx(whitened(), rel=oracle.EXACT)


def on_rank() -> dict[str, Any]:
    """Rank r is DP rank r // 2, with two samples, and CP rank r % 2."""
    start_process_group()
    rank = int(os.environ["RANK"])
    dp_rank, cp_rank = divmod(rank, 2)
    cp_group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dp_rank]
    dp_group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][cp_rank]
    mine = slice(12 * dp_rank, 12 * (dp_rank + 1))
    starts = [start - 12 * dp_rank for start in STARTS[2 * dp_rank : 2 * dp_rank + 3]]
    found: dict[str, Any] = {"refused": ""}
    rewards, prompts, rollouts = map(list, zip(*BATCH[3 * dp_rank : 3 * dp_rank + 3], strict=True))
    for kind, function in {"by std": group_relative_advantages, "leave one out": rloo_advantages}.items():
        found[kind] = function(torch.tensor(rewards), prompts, rollout_ids=rollouts, dp_group=dp_group).tolist()
    for layout in (ZigzagTHD(starts), Gathered(starts)):
        samples = samples_of([2 * dp_rank, 2 * dp_rank + 1], layout)
        local = samples.local(cp_rank, 2)
        x = local.of(of_tokens()[mine])
        (white,) = whiten([x], [local], dp_group=dp_group, cp_group=cp_group)
        plan = plan_step([samples], "token_mean", dp_group=dp_group, cp_group=cp_group)
        assert torch.equal(whiten([x], list(plan), dp_group=dp_group)[0], white)  # a micro-batch knows its CP group
        places = [12 * dp_rank + place for place in local.positions.tolist()]
        found[type(layout).__name__] = dict(zip(places, white.tolist(), strict=True))
    try:
        whiten([x[rank:]], [local], dp_group=dp_group, cp_group=cp_group)
    except (BadBatchError, ValueError) as error:
        found["refused"] = str(error)
    return found


def test_over_ranks() -> None:
    by_rank = run_ranks(4, on_rank, timeout_s=600)
    for kind in ("by std", "leave one out"):
        found = [by_rank[rank][kind] + by_rank[rank + 2][kind] for rank in (0, 1)]
        assert found[0] == found[1] == pytest.approx(stated(BATCH, kind), rel=oracle.EXACT)
    for layout in ("ZigzagTHD", "Gathered"):
        held = {place: white for rank in by_rank for place, white in rank[layout].items()}
        assert [held[place] for place in range(24)] == pytest.approx(whitened(), rel=oracle.EXACT)
    assert all("rank 1: ValueError: values of shape" in rank["refused"] for rank in by_rank)


def advantages_from(rewards: Any = (1.0, 2.0), ids: Any = (0, 0), rollout_ids: Any = None) -> torch.Tensor:
    return group_relative_advantages(torch.tensor(rewards), list(ids), rollout_ids=rollout_ids)


WHOLE, CUT = samples_of([0, 1]).local(0, 1), samples_of([0, 1], ZigzagTHD([0, 8, 12]))
ONES = (1.0,) * 12
REFUSALS = {
    **refusals(
        advantages_from,
        (([[1.0, 2.0]],), r"shape \(1, 2\): they must be 1-D and finite", ()),
        (([1.0, NAN],), "1-D and finite", ([1.0, -1e30],)),
        (([INF], [0]), "1-D and finite", ([1], [0])),
        (([1.0, 2.0], [0]), "1 prompt_ids for 2", ()),
        (([1.0, 0], [0, 0], ["a", "a"]), "differ within the rollout of sample", ([1.0, 1], [0, 0], ["a", "a"])),
        (([1.0, 1], [0, 1], [2, 2]), "share its reward and its prompt", ([1.0, 1], [0, 0], [2, 2])),
    ),
    **refusals(advantages_from, (([1.0], [0.5]), "prompt_ids holds 0.5", ([1.0], ["0.5"])), error=TypeError),
    **refusals(
        lambda **more: gae(torch.zeros(12), torch.zeros(12), WHOLE, **more),
        ({"gamma": 1.1}, r"gamma is 1.1: it must be a number in \[0, 1\]", {"gamma": 1.0}),
        ({"lam": -0.1}, "lam is -0.1", {"lam": 0}),
        ({"lam": "0.95"}, "lam is '0.95'", {"lam": 0.95}),
    ),
    **refusals(
        lambda x=ONES, at=WHOLE, **more: whiten([torch.tensor(x)], [at], dp_group=None, **more),
        ({"epsilon": 0}, r"epsilon is 0: it must be a number in \(0, inf\)", {"epsilon": 1e-9}),
        ({"x": (NAN,) * 12}, "values with NaN or Inf at 9 active tokens", {"x": (1.0, 1, NAN) + (1.0,) * 9}),
        ({"x": ONES[:6], "at": CUT.local(0, 2)}, "no cp_group: .+ on 2 ranks", {"at": WHOLE}),
    ),
}

test_refusals = refusal_tests(REFUSALS)
