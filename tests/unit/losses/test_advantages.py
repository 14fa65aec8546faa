"""Advantages against Python's statistics, on one rank and over DP 2; importance weights and rejection."""

import math
import os
import random
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import run_ranks, start_process_group
from refusals import outcome_of, refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import (
    Gate,
    Samples,
    gae,
    group_relative_advantages,
    importance_weights,
    surviving_masks,
    weights_column,
)
from megatron_rl_loss.losses.advantages import gdpo_advantages, rloo_advantages
from megatron_rl_loss.losses.off_policy import keep_sequences

pytestmark = pytest.mark.filterwarnings("ignore:all rewards are equal", "ignore:every prompt group has one sample")
NAN = float("nan")


def stated(batch: Sequence[tuple[float, Any, Any]], kind: str, epsilon: float = 1e-6) -> list[float]:
    """Advantages from each sample's (reward, prompt, rollout); a rollout counts once in its group."""
    advantages = []
    for reward, group, rollout in batch:
        group_rewards = {o: r for r, g, o in batch if g == group}
        mean = statistics.fmean(group_rewards.values())
        std = statistics.stdev(group_rewards.values()) if len(group_rewards) > 1 else 0.0
        others = [r for o, r in group_rewards.items() if o != rollout]
        advantages.append({
            "centred": reward - mean,
            "by std": (reward - mean) / (std + epsilon),
            "leave one out": reward - statistics.fmean(others) if others else 0.0,
        }[kind])  # fmt: skip
    return advantages


def stated_together(batches: Sequence[Any], weights: Sequence[float], epsilon: float = 1e-6) -> list[float]:
    """GDPO, of a batch as above for each reward."""
    parts = [stated(batch, "by std", epsilon) for batch in batches]
    sums = [sum(w * advantage for w, advantage in zip(weights, ones, strict=True)) for ones in zip(*parts, strict=True)]
    rollout_totals = list({rollout: total for total, (_, _, rollout) in zip(sums, batches[0], strict=True)}.values())
    mean, std = (
        (statistics.fmean(rollout_totals), statistics.stdev(rollout_totals)) if len(rollout_totals) > 1 else (0, 0)
    )
    return [(total - mean) / (std + epsilon) for total in sums]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    # Binary cannot hold 0.1, nor float32 the last; a rollout's reward, its prompt, and its parts.
    st.lists(st.tuples(st.sampled_from([-2, -0.5, 0, 0.1, 0.1, 1, 2.0**24, 2.0**24 + 1]), st.integers(0, 3),
                       st.integers(1, 3)), max_size=8),
    st.sampled_from([1e-6, 1e-4, 0.5]),
    st.sampled_from([int, str, lambda i: -i * 2**50]),
    st.booleans(),
)  # fmt: skip
@example([(2.0**24 + 1, 0, 1), (2.0**24 + 1, 0, 3)], 1e-6, int, True)  # a mean that is rounded is not their reward
def test_advantages_of_samples(
    drawn: list[tuple[float, int, int]], epsilon: float, rename: Callable[[int], Any], split: bool
) -> None:
    batch = [(r, rename(g), rename(i)) for i, (r, g, parts) in enumerate(drawn) for _ in range(parts if split else 1)]
    random.Random(7).shuffle(batch)
    rewards, prompts, rollouts = (list(column) for column in zip(*batch, strict=True)) if batch else ([], [], [])
    rewards_by_prompt = torch.tensor(rewards, dtype=torch.float64), prompts
    ids: Any = {"rollout_ids": rollouts if split else None}
    for kind, advantages in {
        "centred": group_relative_advantages(*rewards_by_prompt, **ids, normalize_by_std=False),
        "by std": group_relative_advantages(*rewards_by_prompt, **ids, epsilon=epsilon),
        "leave one out": rloo_advantages(*rewards_by_prompt, **ids),
    }.items():
        assert advantages.dtype == torch.float32
        # Computed in float64, then rounded once.
        assert advantages.tolist() == pytest.approx(stated(batch, kind, epsilon), rel=2 * oracle.ROUNDING, abs=1e-6)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    # Two rewards of a rollout, its prompt, and its parts.
    st.lists(st.tuples(st.sampled_from([0, 0.1, 1]), st.sampled_from([-3, 0.5, 2.0**24]), st.integers(0, 2),
                       st.integers(1, 3)), min_size=1, max_size=8),
    st.sampled_from([None, (1.0, 0.5), (0.0, -2.0)]),
    st.booleans(),
)  # fmt: skip
def test_advantages_of_several_rewards(drawn: list[Any], weights: Any, split: bool) -> None:
    """Each reward is normalised in its group, then all by their spread over the step."""
    rows = [(reward, i) for i, reward in enumerate(drawn) for _ in range(reward[3] if split else 1)]
    random.Random(7).shuffle(rows)
    batches = [[(row[k], row[2], i) for row, i in rows] for k in range(2)]
    rewards = [torch.tensor([r for r, _, _ in batch], dtype=torch.float64) for batch in batches]
    prompts, rollouts = ([row[k] for row in batches[0]] for k in (1, 2))
    advantages = gdpo_advantages(rewards, prompts, weights=weights, rollout_ids=rollouts if split else None)
    expected = stated_together(batches, weights or (1, 1))
    assert advantages.tolist() == pytest.approx(expected, rel=2 * oracle.ROUNDING, abs=1e-6)


def test_scales_of_rewards_do_not_matter_to_gdpo() -> None:
    """The large one of two rewards does not hide the other, as it does where both are added first."""
    small, large, prompts = torch.tensor([0.0, 1, 1, 0]), torch.tensor([0.0, 0, 900, 900]), [0] * 4
    apart = gdpo_advantages([small, large], prompts)
    assert apart.tolist() == pytest.approx(gdpo_advantages([small, large / 900], prompts).tolist(), abs=1e-5)
    assert float(apart[1] - apart[0]) > 1 > 0.1 > float(group_relative_advantages(small + large, prompts).diff()[0])


@pytest.mark.filterwarnings("default")
def test_rewards_that_teach_nothing_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="all rewards are equal within their prompt groups") as caught:
        group_relative_advantages(torch.tensor([1.0, 1, 3, 3]), [0, 0, 1, 1])
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="every prompt group has one sample.* Pass dp_group="):
        group_relative_advantages(torch.tensor([1.0, 3]), [0, 1])


BATCH = [(1.0, 0, 0), (0.0, 0, 1), (5.0, 1, 2), (2.0, 0, 3), (2.0, 0, 3), (7.0, 2, 4)]


def on_rank() -> dict[str, Any]:
    start_process_group()
    rank = int(os.environ["RANK"])
    rewards, prompts, rollouts = map(list, zip(*BATCH[3 * rank : 3 * rank + 3], strict=True))
    outcomes: dict[str, Any] = {}
    for kind, function in {"by std": group_relative_advantages, "leave one out": rloo_advantages}.items():
        how: dict[str, Any] = {"rollout_ids": rollouts, "dp_group": dist.group.WORLD}
        outcomes[kind] = function(torch.tensor(rewards), prompts, **how).tolist()
        outcomes["refused"] = outcome_of(lambda: function(torch.tensor(rewards), prompts[rank:], **how))  # noqa: B023
        how["rollout_ids"] = rollouts if rank else None
        outcomes["unlike"] = outcome_of(lambda: function(torch.tensor(rewards), prompts, **how))  # noqa: B023
        several = [torch.tensor(rewards), torch.arange(3.0) * (rank + 1)]
        outcomes["gdpo"] = gdpo_advantages(several, prompts, weights=(1, 3), dp_group=dist.group.WORLD).tolist()
        masks = [[1.0]] * (1 + rank)
        outcomes["weights"] = [
            float(column) for column in weights_column("token_mean", masks, dp_group=dist.group.WORLD)
        ]
        outcomes["weights alone"] = [float(column) for column in weights_column("token_mean", masks, dp_group=None)]
        outcomes["weights, unstated"] = outcome_of(lambda: weights_column("token_mean", masks))  # noqa: B023
        outcomes["unstated"] = outcome_of(lambda: function(torch.tensor(rewards), prompts))  # noqa: B023
        outcomes["gdpo, unstated"] = outcome_of(lambda: gdpo_advantages(several, prompts))  # noqa: B023
        outcomes["alone"] = function(torch.tensor(rewards), prompts, dp_group=None).tolist()
        outcomes["fewer"] = outcome_of(lambda: gdpo_advantages(several[rank:], prompts, dp_group=dist.group.WORLD))  # noqa: B023
        ids = ["1", "1", "2"] if rank else [1, 1, 2]
        outcomes["of two kinds"] = outcome_of(lambda: function(torch.tensor(rewards), ids, dp_group=dist.group.WORLD))  # noqa: B023
    return outcomes


def test_over_ranks() -> None:
    by_rank = run_ranks(2, on_rank, timeout_s=600)
    for kind in ("by std", "leave one out"):
        assert by_rank[0][kind] + by_rank[1][kind] == pytest.approx(stated(BATCH, kind), rel=oracle.EXACT)
    alone = [(r, prompt, i) for i, (r, prompt, _) in enumerate(BATCH)]
    second = [(float(i % 3 * (i // 3 + 1)), prompt, i) for i, (_, prompt, _) in enumerate(BATCH)]
    expected = stated_together([alone, second], (1, 3))
    assert by_rank[0]["gdpo"] + by_rank[1]["gdpo"] == pytest.approx(expected, rel=oracle.EXACT, abs=1e-7)
    assert [rank["weights"] for rank in by_rank] == [[pytest.approx(1 / 3)], [pytest.approx(1 / 3)] * 2]
    assert [rank["weights alone"] for rank in by_rank] == [[1.0], [0.5, 0.5]]
    for rank in by_rank:
        assert rank["weights, unstated"].startswith("ValueError: weights in a job of 2 ranks without a dp_group")
        for name in ("unstated", "gdpo, unstated"):
            assert rank[name].startswith("ValueError: advantages in a job of 2 ranks without a dp_group: a prompt's")
    halves = [*stated(alone[:3], "leave one out"), *stated(alone[3:], "leave one out")]
    assert by_rank[0]["alone"] + by_rank[1]["alone"] == pytest.approx(halves, rel=oracle.EXACT)
    assert all(rank["fewer"].startswith("ValueError: 1 rewards on one rank and 2 on another") for rank in by_rank)
    assert all("rank 1: ValueError: 2 prompt_ids for 3" in rank["refused"] for rank in by_rank)
    assert all("ids of other kinds on other ranks" in rank["unlike"] for rank in by_rank)
    assert all(rank["of two kinds"].startswith("ValueError: ids of other kinds on other ranks") for rank in by_rank)


def test_a_reward_at_a_masked_token_is_warned_of() -> None:
    """At the end of the row, say, where the mask of an end token is 0."""
    local, values = Samples([[0, 1, 0], [1, 1]]).local(0, 1), torch.zeros(5)
    with pytest.warns(
        UserWarning, match="sample 0 has rewards at masked tokens alone: .*last token whose mask"
    ) as caught:
        gae(torch.tensor([0, 0, 1.0, 0, 1]), values, local)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gae(torch.tensor([2.0, -1, NAN, 0, 1]), values, local)
        gae(torch.tensor([NAN, 0, 0, 0, 0]), values, local)


def test_a_reward_behind_the_last_active_token_is_warned_of() -> None:
    """It vanishes beside rewards that count; one before, as a penalty for each prompt token, is usual."""
    local = Samples([[0, 1, 0, 1, 0], [1, 1]]).local(0, 1)
    with pytest.warns(UserWarning, match="sample 0 has a reward behind its last active token"):
        gae(torch.tensor([0, 0.5, 0, 0.5, 1.0, 0, 1]), torch.zeros(7), local)


def test_values_in_the_place_of_rewards_are_warned_of() -> None:
    local, dense = Samples([[1] * 5, [0, 1, 1, 1, 1]]).local(0, 1), torch.linspace(0.1, 1, 10)
    sparse = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    with pytest.warns(UserWarning, match="the two may be swapped"):
        gae(dense, sparse, local)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gae(sparse, dense, local)
        gae(dense, dense, local)
        gae(dense, torch.zeros(10), local)  # a critic that starts at 0


# --- off-policy corrections

LOG_RATIOS = torch.tensor([-9.0, math.log(0.5), -0.1, 0.0, 0.4, math.log(2.0), 3.0, 200.0], dtype=torch.float64)
INSIDE = [math.exp(-0.1), 1, math.exp(0.4), 2]


@pytest.mark.parametrize(
    ("low", "action", "expected"),
    [
        (0.0, "clamp", [math.exp(-9), 0.5, *INSIDE, 2, 2]),
        (0.0, "mask", [math.exp(-9), 0.5, *INSIDE, 0, 0]),
        (0.5, "clamp", [0.5, 0.5, *INSIDE, 2, 2]),
        (0.5, "mask", [0, 0.5, *INSIDE, 0, 0]),
    ],
)
def test_importance_weights(low: float, action: Any, expected: list[float]) -> None:
    weights = importance_weights(LOG_RATIOS.clone(), Gate(low=low, high=2.0, action=action))
    assert weights.tolist() == pytest.approx(expected)
    assert not weights.requires_grad
    half = torch.tensor([-15.5, 2.0]).bfloat16()
    assert torch.equal(importance_weights(half, Gate(high=9.0)), importance_weights(half.float(), Gate(high=9.0)))


def test_ratios_in_the_place_of_log_ratios_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """exp of them is near e, and a cap of 2 would bind everywhere; rejection would judge all alike."""
    near = torch.tensor([0.1, -0.2, 0.05, -0.01])
    log_ratios = [near, near.abs(), near + 5, -near.exp(), near.exp() * 0.5, near.exp() * 1.6, torch.ones(1), near[:0]]
    log_ratios += torch.tensor([0.0, 1.9, 1.1]), torch.tensor([-0.1, 1.9, 1.1])  # no ratio is 0 or below
    few, many = torch.full((15,), 0.01), torch.full((16,), 0.01)
    log_ratios += few, torch.cat([many, torch.zeros(1)])  # which may be above 0 by chance, or are those of one policy
    for sound in log_ratios:
        importance_weights(sound, Gate(high=1e3, action="clamp"))
        surviving_masks([torch.ones(len(sound))], [sound], Gate(high=2.0))
    surviving_masks([[1, 0], [1, 1]], [[1.0, 1.0], [1.1, -0.1]], Gate(high=2.0))  # masked, or of some samples alone
    assert not caplog.records
    importance_weights(near.exp(), Gate(high=1e3))
    surviving_masks([[1, 0], [1, 1]], [[1.0, -9.0], [1.1, 0.9]], Gate(high=2.0))
    importance_weights(many, Gate(high=2.0))  # small probabilities
    for record in caplog.records:
        assert "these look like ratios or probabilities" in record.message
        assert "Pass old_log_probs - rollout_log_probs" in record.message
    assert [record.message.split(" at least")[0] for record in caplog.records] == [
        "log-ratios of 0.819", "log-ratios of 0.9", "log-ratios of 0.01"
    ]  # fmt: skip
    importance_weights(near.exp().to("meta"), Gate(high=2.0))  # of a device nothing is read


def test_keep_sequences() -> None:
    mean_kl = torch.tensor([0.01, 0.2, 0.2, 0.05], requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 0.0])
    assert keep_sequences(mean_kl, max_kl=0.02, advantages=advantages).tolist() == [1, 0, 1, 1]
    assert keep_sequences(mean_kl, max_kl=0.05).tolist() == [1, 0, 0, 1]  # at the bound it stays
    assert not keep_sequences(mean_kl, max_kl=0.1).requires_grad


MASKS = [torch.tensor([1, 1, 0, 1]), torch.tensor([1, 1]), torch.tensor([0, 1, 1]), torch.tensor([0.5, 0.25, 1.0])]
RATIOS = [
    torch.tensor([0.1, 3.0, 9.0, -0.2]),  # its masked 9.0 must not matter
    torch.tensor([1.0, -1.2]),
    torch.tensor([math.nan, 1.0, 1.0]),
    torch.tensor([0.0, 1.0, 0.0]),  # a weighted mean of 0.25 / 1.75, not 1 / 3
]
FRACTIONS, NONE = [0.5, 0.25, 1.0], [0, 0, 0]


@pytest.mark.gpus
@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("token", {"high": 5.0}, [[1, 0, 0, 1], [1, 1], [0, 1, 1], FRACTIONS]),
        ("token", {"low": 0.5, "high": 2.0}, [[1, 0, 0, 1], [0, 0], NONE, [0.5, 0, 1]]),
        ("sum", {"high": 5.0}, [[0, 0, 0, 0], [1, 1], NONE, FRACTIONS]),  # sums 2.9, -0.2, 2.0, 0.25
        ("mean", {"high": 2.7}, [[1, 1, 0, 1], [1, 1], NONE, FRACTIONS]),  # means 0.97, -0.1, 1.0, 0.14
        ("mean", {"low": 0.95, "high": 3.0}, [[1, 1, 0, 1], [0, 0], [0, 1, 1], FRACTIONS]),
        ("mean", {"high": 1.2}, [[0, 0, 0, 0], [1, 1], NONE, FRACTIONS]),
    ],
)
def test_surviving_masks(level: Any, bounds: dict[str, Any], expected: list[list[float]]) -> None:
    before = [mask.clone() for mask in MASKS]
    sequence_settings: dict[str, Any] = {} if level == "token" else {"level": "sequence", "aggregate": level}
    gate = Gate(**bounds, **sequence_settings)
    survivors = surviving_masks(MASKS, [row.to(DEVICE) for row in RATIOS], gate)
    assert [mask.tolist() for mask in survivors] == expected
    assert [mask.dtype for mask in survivors] == [mask.dtype for mask in MASKS]
    assert all(map(torch.equal, MASKS, before))
    assert surviving_masks([[0.25]], [[1.0]], Gate(high=2.0, level="sequence"))[0].tolist() == [0]
    assert surviving_masks(MASKS, [row.to("meta") for row in RATIOS], gate)[0].is_meta


# --- refusals


def advantages_from(rewards: Any = (1.0, 2.0), ids: Any = (0, 0), rollout_ids: Any = None) -> Tensor:
    return group_relative_advantages(rewards, list(ids), rollout_ids=rollout_ids)


LOCAL = Samples([[1, 1, 0]]).local(0, 1)
THREE = Samples([[1], [1], [0]]).local(0, 1)
BETWEEN = r"it must be in \[0, 1\]"


def by_turns(turns: list[int], mask: list[int]) -> Any:
    local = Samples([mask], ids={"turn": [turns]}).local(0, 1)
    return gae(torch.zeros(len(mask)), torch.zeros(len(mask)), local, steps="turn")


TWO, WITH_GRAPH, IN = torch.zeros(2), torch.zeros(2, requires_grad=True), "it must be a number in"
OF_CRITIC = torch.zeros(3, requires_grad=True)


def survive(*log_ratios: Any, **more: Any) -> list[Tensor]:
    return surviving_masks([torch.ones(2)], log_ratios or [TWO], **{"gate": Gate(high=2.0)} | more)


REFUSALS = {
    **refusals(
        advantages_from,
        (([[1.0, 2.0]],), r"shape \(1, 2\): they must be 1-D and finite", ()),
        (([1.0, NAN],), "1-D and finite", ([1.0, -1e30],)),
        (([1.0, 0], [0, 0], ["a", "a"]), "differ within the rollout of sample", ([1.0, 1], [0, 0], ["a", "a"])),
    ),
    **refusals(
        lambda rewards=((1.0, 2.0), (3.0, 1.0)), **more: gdpo_advantages(rewards, [0, 0], **more),
        (((),), "rewards of shape none: they must be 1-D and finite", ()),
        ((((1.0, 2.0), (1.0,)),), r"rewards of shape \(1,\) and \(2,\): they", ()),
        (([1.0, 2.0],), r"rewards of shape \(\): they must", ([[1.0, 2.0]],)),
        ({"weights": [1.0]}, r"weights \[1.0\] for 2 rewards", {"weights": [1.0, 0.0]}),
        ({"weights": [1.0, NAN]}, "each must have a finite number", {"weights": [1.0, -1.0]}),
        ({"epsilon": 0.0}, r"epsilon is 0.0: it must be a number in \(0, inf\)", {"epsilon": 1e-8}),
    ),
    **refusals(
        lambda rewards: gdpo_advantages(rewards, [0, 0]),  # a square one could be either way round
        ((torch.eye(2),), r"rewards of shape \(2, 2\): they must be a list.* list\(rewards.T\)", (list(torch.eye(2)),)),
        ((({"a": 1}, {"b": 2}),), "rewards of dtype 'O': they must be real numbers", ([[1, 2]],)),
        (({"a": [1, 2]},), "rewards is a dict: there must be one entry per reward, in order", ([[1, 2]],)),
        error=TypeError,
    ),
    **refusals(
        lambda weights: gdpo_advantages([[1.0, 2.0], [3.0, 1.0]], [0, 0], weights=weights),
        (({"a": 1.0, "b": 2.0},), "weights is a dict: there must be one entry per reward, in order", ([1.0, 2.0],)),
        (({1.0, 2.0},), "weights is a set", (torch.tensor([1.0, 2.0]),)),
        ((1.0,), "weights is a float", (torch.tensor([1.0, 2.0]).numpy(),)),
        error=TypeError,
    ),
    **refusals(
        lambda mean_kl, **more: keep_sequences(mean_kl, max_kl=0.1, **more),
        ((3,), "mean_kl is a int: it must be a float tensor. Pass segment_mean", (TWO,)),
        ((torch.zeros(2).int(),), "mean_kl is torch.int32", (TWO.double(),)),
        (
            {"mean_kl": TWO, "advantages": TWO * 1j},
            "advantages is torch.complex64: it must hold real numbers",
            {"mean_kl": TWO, "advantages": TWO.int()},
        ),
        error=TypeError,
    ),
    **refusals(
        lambda prompt_ids: advantages_from([1.0, 0.0], prompt_ids),
        (([0],), "1 prompt_ids for 2 rewards", ([0, 0],)),
    ),
    **refusals(
        lambda log_ratio=TWO, gate=Gate(high=2.0): importance_weights(log_ratio, gate),  # noqa: B008
        (([0.0, 0.1],), "log_ratio is a list: it must be a float tensor", (TWO,)),
        ({"gate": 2.0}, "gate is 2.0: it must be a Gate", {}),
        error=TypeError,
    ),
    **refusals(advantages_from, (([1.0], [0.5]), "prompt_ids holds 0.5", ([1.0], ["0.5"])), error=TypeError),
    **refusals(
        lambda **more: gae(torch.zeros(3), torch.zeros(3), THREE, **more),
        ({"gamma": 1.1}, r"gamma is 1.1: it must be a number in \[0, 1\]", {"gamma": 1.0}),
        ({"lam": "0.95"}, "lam is '0.95'", {"lam": 0.95}),
        *(
            ({"lam": make([0.9, 1.5, 0])}, f"lam from 0 to 1.5: {BETWEEN}", {"lam": make([0.9, 1, 0])})
            for make in (list, np.array, torch.tensor)
        ),
        ({"lam": torch.tensor([1.5] * 3), "gamma": 0.5}, f"lam from 1.5 to 1.5: {BETWEEN}", {"lam": torch.tensor(1.0)}),
        ({"lam": [0.9, 0.5]}, r"lam of shape \(2,\) for 3 samples", {"lam": [0.9, 0.5, 1]}),
        ({"lam": torch.tensor([[0.9] * 3])}, r"lam of shape \(1, 3\)", {"lam": torch.tensor([0.9] * 3)}),
        ({"lam": [math.nan, 0, 0]}, "lam from nan to nan", {"lam": [0, 0, 0]}),
        ({"steps": "turn"}, r"steps='turn' and samples without ids\['turn'\] \(they have none\)", {"steps": "token"}),
    ),
    **refusals(
        by_turns,
        (([0, 1, 0, -1], [1, 1, 1, 0]), "sample 0 comes back to a turn", ([0, 1, 0, -1], [1, 0, 1, 0])),
    ),
    **refusals(
        lambda *shape: gae(torch.zeros(1, 3), torch.zeros(shape), LOCAL),
        ((3,), r"rewards of shape \(1, 3\) and values of shape \(3,\)", (1, 3)),
    ),
    **refusals(
        lambda rewards, values: gae(rewards, values, LOCAL),
        (
            (OF_CRITIC, OF_CRITIC.detach()),
            "rewards with a graph, and values without one",
            (OF_CRITIC.detach(), OF_CRITIC),
        ),
    ),
    **refusals(
        lambda asked: group_relative_advantages([1.0, 0.0], [0, 0], normalize_by_std=asked),
        (("False",), "normalize_by_std is 'False': it must be True or False", (False,)),
        ((0,), "normalize_by_std is 0: it must be", (True,)),
        error=TypeError,
    ),
    **refusals(
        lambda log_ratio: importance_weights(log_ratio, Gate(high=2.0)),
        ((WITH_GRAPH,), "log-ratios that require grad: a weight is a constant", (TWO,)),
    ),
    **refusals(
        lambda **more: importance_weights(TWO, Gate(**{"high": 2.0} | more)),
        ({"high": 0.2}, rf"high is 0.2: {IN} \[1, inf\)", {"high": 1}),  # a width, where a bound is asked for
        ({"low": 1.0}, rf"low is 1.0: {IN} \[0, 1\)", {"low": 0.99}),
        ({"low": -0.1}, rf"low is -0.1: {IN} \[0, 1\)", {"low": 0}),
        ({"action": "drop"}, "there is no such action of a gate", {"action": "mask"}),
        ({"metric": "k4"}, "no such metric of a gate", {"metric": "k3"}),
        ({"metric": "k3", "action": "clamp"}, "a clamp of the k3", {"metric": "k3"}),
        ({"metric": "k3", "high": 0.0}, rf"high is 0.0: {IN} \(0, inf\)", {"metric": "k3", "high": 0.1}),
        ({"metric": "k1", "low": 3.0}, "low must be a number below high", {"metric": "k1", "low": -3.0}),
        ({"aggregate": "sum"}, "a token has nothing to aggregate", {}),
        ({"level": "sequence"}, "a gate of a sequence without local", {}),
        ({"metric": "tv", "high": 0.1}, "a gate of tv without log_probs", {"metric": "k2", "high": 0.1}),
        ({"level": "prompt"}, "no such level of a gate", {"level": "token"}),
    ),
    **refusals(
        lambda **more: keep_sequences(TWO, **{"max_kl": 1} | more),
        ({"max_kl": 0.0}, rf"max_kl is 0.0: {IN} \(0, inf\)", {"max_kl": 1e-3}),
        ({"advantages": torch.zeros(3, 2)}, r"advantages of shape \(3, 2\)", {}),
    ),
    **refusals(
        survive,
        ((WITH_GRAPH,), "log-ratios of sample 0 that require grad: survivors must be known before", ()),
        ((torch.zeros(3),), r"the log-ratios of sample 0 of shape \(3,\) for values of shape \(2,\)", ([0.0, 0.0],)),
        ((TWO, TWO), "2 log-ratios for 1 loss masks", ()),
        ((torch.tensor([0.0, NAN]),), "log-ratios of sample 0 with NaN at an active token: no bound", ()),
        ({"gate": Gate(high=2.0, action="clamp")}, "a gate that clamps: it rejects nothing", {}),
        ({"gate": Gate(high=2.0, level="rollout")}, "rollout_ids=None with a gate of a rollout", {}),
    ),
}

test_refusals = refusal_tests(REFUSALS)


def test_an_unknown_divergence_is_neither_kept_nor_dropped_in_silence() -> None:
    """NaN keeps the loss from being a number; where a masked token has one, its log-ratio is ignored."""
    assert keep_sequences(torch.tensor([NAN, 0.1, 0.0]), max_kl=0.05).isnan().tolist() == [True, False, False]
    assert surviving_masks([torch.tensor([1, 0])], [torch.tensor([0.0, NAN])], Gate(high=2.0))[0].tolist() == [1, 0]
