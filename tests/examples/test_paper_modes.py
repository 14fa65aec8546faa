"""Modes of papers, loaded as their flag does: weights against loops in float64, however the step is cut over ranks."""

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from repository import EXAMPLES
from torch import Tensor

from megatron_rl_loss import Mode, Samples, ZigzagTHD, plan_step, weights_column
from megatron_rl_loss.core.modes import load_function

sys.path.append(str(EXAMPLES / "recipes"))  # a launch from that folder has it first

MASKS: list[list[float]] = [
    [1, 1, 0, 1, 1, 1],
    [1, 0.5],
    [0, 0, 0],
    [1, 1, 1, 1, 0, 1, 1, 1],
    [1],
    [0.25, 1, 1],
    [0, 1],
]
PROMPTS = ["a", "a", "a", "b", "b", "a", "b"]
ROLLOUTS = [0, 1, 2, 3, 4, 1, 5]  # 1 is two samples
IDS = {
    "prompt_sign": ["a/1", "a/-1", "a/1", "b/-1", "b/1", "a/-1", "b/-1"],
    "adapter": ["x", "y", "x", "x", "y", "y", "x"],
}
LABELS: dict[str, list[Any]] = {
    "weight": [1.0, 2.0, 1.0, 0.5, 1.0, 2.0, 0.5],
    "turns": [[0, 0, 0, 1, 1, 2], [0, 1], [0, 0, 1], [0, 1, 1, 1, 2, 2, 2, 3], [0], [2, 2, 3], [0, 1]],
}
N = range(len(MASKS))
M = [sum(mask) for mask in MASKS]

Rule = Callable[[int, int], float]


def alike(ids: Sequence[Any], i: int) -> list[int]:
    return [j for j in N if ids[j] == ids[i]]


def norm(alpha: float, divisor: float = 1) -> Rule:
    return lambda i, t: M[i] ** -alpha / sum(M[j] ** -alpha for j in N if M[j]) / divisor if M[i] else 0


def balanced(i: int, t: int) -> float:
    same = alike(IDS["prompt_sign"], i)
    return len(same) / len(alike(PROMPTS, i)) / sum(M[j] for j in same) / 2 if M[i] else 0


def rollout_mean_of_turns(i: int, t: int) -> float:
    turns = LABELS["turns"]
    active = {(j, u) for j in alike(ROLLOUTS, i) for u, m in zip(turns[j], MASKS[j], strict=True) if m}
    tokens = sum(m for u, m in zip(turns[i], MASKS[i], strict=True) if u == turns[i][t])
    return 1 / tokens / len(active) / 6 if tokens else 0


def weighted_token_mean(i: int, t: int) -> float:
    return LABELS["weight"][i] / sum(v * m for v, m in zip(LABELS["weight"], M, strict=True))


def per_adapter_token_mean(i: int, t: int) -> float:
    return 1 / sum(M[j] for j in alike(IDS["adapter"], i))


RULES: dict[str, Rule] = {
    "vl_norm": norm(0.75),
    "balanced": balanced,
    "rollout_mean_of_turns": rollout_mean_of_turns,
    "weighted_token_mean": weighted_token_mean,
    "per_adapter_token_mean": per_adapter_token_mean,
}


def mode_of(name: str) -> Any:
    flag = "--custom-pg-loss-reducer-function-path"
    return load_function(f"paper_modes.{name}", flag, "it must be a mode", "Name one", Mode)


def samples_of(chosen: Sequence[int], cp: int = 1) -> Samples:
    ids: Any = {"rollout_ids": ROLLOUTS, "prompt_ids": PROMPTS}
    columns: Any = {
        **{name: [of[i] for i in chosen] for name, of in ids.items()},
        "ids": {name: [of[i] for i in chosen] for name, of in IDS.items()},
        "labels": {name: [of[i] for i in chosen] for name, of in LABELS.items()},
    }
    lengths = [len(MASKS[i]) for i in chosen]
    slots = [-(-length // (2 * cp)) * 2 * cp for length in lengths]
    layout = ZigzagTHD([0, *itertools.accumulate(slots)], total_lengths=lengths) if cp > 1 else None
    return Samples([MASKS[i] for i in chosen], layout=layout, **columns)


def expected(rule: Rule, chosen: Sequence[int] = N) -> Tensor:
    weights = [m * rule(i, t) for i in chosen for t, m in enumerate(MASKS[i])]
    return torch.tensor(weights, dtype=torch.float64)


def assert_close(weights: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(weights.double(), right, rtol=oracle.EXACT, atol=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("microbatches", [[[*N]], [[i] for i in N], [[6, 0, 3], [], [5, 2, 1], [4]]])
def test_weights_in_every_cut(name: str, microbatches: list[list[int]]) -> None:
    plan = plan_step([samples_of(chosen) for chosen in microbatches], mode_of(name))
    for microbatch, chosen in zip(plan, microbatches, strict=True):
        assert_close(microbatch.weights, expected(RULES[name], chosen))


def test_negative_control_a_micro_batch_is_not_the_step() -> None:
    for name, rule in RULES.items():
        alone = plan_step([samples_of([6, 0, 1])], mode_of(name))[0].weights
        assert not torch.allclose(alone.double(), expected(rule, [6, 0, 1]), rtol=1e-2), name


def test_alpha_and_divisor_of_vl_norm() -> None:
    """The paper's numbers: losses of 1 of samples of 1 and 4 tokens; samples of 1 and 16 tokens over L = 5."""
    for alpha, right in ((1, 1.6), (0, 2.5)):
        column = weights_column(mode_of("vl_norm_of")(alpha), [[1], [1] * 4, [0, 0]])
        assert float(torch.cat(column).sum()) == pytest.approx(right)
    column = weights_column(mode_of("vl_norm"), [[1], [1] * 16], divisor=5)
    assert torch.cat(column).tolist() == pytest.approx([8 / 45] + [1 / 45] * 16)


def weights_on_rank(hands: list[list[int]], cp: int) -> dict[str, Any]:
    """On a rank of DP x CP: its weights in each mode, whose step is counted for all ranks together."""
    start_process_group()
    rank = int(os.environ["RANK"])
    in_dp = [dist.new_group(list(range(r, len(hands) * cp, cp))) for r in range(cp)]
    in_cp = [dist.new_group(list(range(r * cp, (r + 1) * cp))) for r in range(len(hands))]
    mine = hands[rank // cp]
    held = [samples_of(part, cp) for part in (mine[:1], mine[1:])]
    groups: Any = {"dp_group": in_dp[rank % cp], "cp_group": in_cp[rank // cp]}
    parts_of = {}
    for name in RULES:
        plan = plan_step(held, mode_of(name), gradients="summed over ranks", **groups)
        parts_of[name] = [(microbatch.weights, torch.from_numpy(microbatch.tokens.positions)) for microbatch in plan]
    return parts_of


@pytest.mark.parametrize(("hands", "cp"), [([[], [6, 5, 3], [0], [4, 1, 2]], 1), ([[6, 5, 3, 0], [4, 1, 2]], 2)])
def test_over_ranks(hands: list[list[int]], cp: int) -> None:
    """Units lie on several ranks; the parts of CP ranks are put together."""
    by_rank = run_ranks(len(hands) * cp, weights_on_rank, hands, cp)
    for (r, mine), (name, rule) in itertools.product(enumerate(hands), RULES.items()):
        for number, chosen in enumerate((mine[:1], mine[1:])):
            samples = samples_of(chosen, cp)
            whole = torch.zeros(samples.total_tokens)
            for weights, positions in (of[name][number] for of in by_rank[r * cp : (r + 1) * cp]):
                whole[positions] = weights
            rows = expected(rule, chosen).split(samples.mask_lengths)
            assert_close(whole, torch.as_tensor(samples.in_buffer(list(rows))))
