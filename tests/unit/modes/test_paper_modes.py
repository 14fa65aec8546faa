"""Modes over statistics that they declare: weights against loops in float64, however the step is cut over ranks."""

import functools
import itertools
import math
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_process_group
from refusals import Call, refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import Samples, Statistic, StepTotals, ZigzagTHD, token_weights, with_statistics
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.papers import (
    adapter_token_mean,
    balanced,
    length_to_the_minus,
    turn_mean,
    vl_norm,
    vl_norm_undivided,
    weighted_token_mean,
)
from megatron_rl_loss.modes.table import OwnMode
from megatron_rl_loss.step.collectives import attempt
from megatron_rl_loss.step.totals import reduce_step_totals

MASKS = [
    torch.tensor(mask, dtype=torch.float32)
    for mask in ([1, 1, 0, 1, 1, 1], [1, 0.5], [0, 0, 0], [1, 1, 1, 1, 0, 1, 1, 1], [1], [0.25, 1, 1], [0, 1])
]
PROMPTS = ["a", "a", "a", "b", "b", "a", "b"]
ROLLOUTS = [0, 1, 2, 3, 4, 1, 5]  # 1 is two samples
LABELS: dict[str, list[Any]] = {
    "advantage": [1.0, -1.0, 1.0, -0.5, 2.0, -3.0, -0.5],
    "weight": [1.0, 2.0, 1.0, 0.5, 1.0, 2.0, 0.5],
    "adapter": ["x", "y", "x", "x", "y", "y", "x"],
    "turns": [
        torch.tensor(turns)
        for turns in ([0, 0, 0, 1, 1, 2], [0, 1], [0, 0, 1], [0, 1, 1, 1, 2, 2, 2, 3], [0], [2, 2, 3], [0, 1])
    ],
}
N = range(len(MASKS))
M = [float(mask.double().sum()) for mask in MASKS]

Rule = Callable[[int, int], float]


def norm(alpha: float) -> Rule:
    return lambda i, t: M[i] ** -alpha / sum(M[j] ** -alpha for j in N if M[j]) if M[i] else 0


def balanced_rule(i: int, t: int) -> float:
    group = [j for j in N if PROMPTS[j] == PROMPTS[i]]
    same = [j for j in group if (LABELS["advantage"][j] > 0) == (LABELS["advantage"][i] > 0)]
    tokens = sum(M[j] for j in same)
    return len(same) / len(group) / tokens / 2 if tokens else 0


def turn_rule(i: int, t: int) -> float:
    def turns_of(j: int) -> list[int]:
        return sorted({int(u) for u, m in zip(LABELS["turns"][j], MASKS[j], strict=True) if m > 0})

    of_rollout = sum(len(turns_of(j)) for j in N if ROLLOUTS[j] == ROLLOUTS[i])
    turn = LABELS["turns"][i][t]
    tokens = sum(float(m) for u, m in zip(LABELS["turns"][i], MASKS[i], strict=True) if u == turn)
    return 1 / tokens / of_rollout / 6 if tokens else 0


def weighted_rule(i: int, t: int) -> float:
    return LABELS["weight"][i] / sum(LABELS["weight"][j] * M[j] for j in N)


def adapter_rule(i: int, t: int) -> float:
    return 1 / sum(M[j] for j in N if LABELS["adapter"][j] == LABELS["adapter"][i])


half = length_to_the_minus(0.5)
MODES: dict[str, tuple[Any, Rule]] = {
    "VL Norm": (vl_norm_undivided, norm(0.75)),
    "VL Norm, 0.5": (half, norm(0.5)),
    "balanced": (balanced, balanced_rule),
    "turn mean": (turn_mean, turn_rule),
    "task weights": (weighted_token_mean, weighted_rule),
    "adapters": (adapter_token_mean, adapter_rule),
}


def own_mode(mode: Any) -> OwnMode:
    found = resolve(mode).mode
    assert isinstance(found, OwnMode)
    return found


def ids_of(chosen: Any) -> dict[str, Any]:
    return {"rollout_ids": [ROLLOUTS[i] for i in chosen], "prompt_ids": [PROMPTS[i] for i in chosen]}


def labels_of(chosen: Any) -> dict[str, Any]:
    return {name: [entries[i] for i in chosen] for name, entries in LABELS.items()}


def samples_of(chosen: Any, layout: Any = None) -> Samples:
    return Samples([MASKS[i] for i in chosen], layout=layout, labels=labels_of(chosen), **ids_of(chosen))


def expected(rule: Rule) -> list[Tensor]:
    return [torch.tensor([float(m) * rule(i, t) for t, m in enumerate(MASKS[i])], dtype=torch.float64) for i in N]


@pytest.mark.parametrize(("mode", "rule"), MODES.values(), ids=MODES.keys())
def test_weights_in_every_cut(mode: Any, rule: Rule) -> None:
    totals = StepTotals.from_loss_masks(MASKS, labels=LABELS, statistics=own_mode(mode).statistics, **ids_of(N))
    right = expected(rule)
    for microbatches in ([[*N]], [[i] for i in N], [[6, 0, 3], [], [5, 2, 1], [4]]):
        for chosen in microbatches:
            found = token_weights(mode, samples_of(chosen), totals)
            whole = torch.cat([torch.zeros(0, dtype=torch.float64), *(right[i] for i in chosen)])
            torch.testing.assert_close(found.double(), whole, rtol=oracle.EXACT, atol=0)
    # Cut over CP ranks, the parts put together.
    sizes = [-(-len(mask) // 4) * 4 for mask in MASKS]
    layout = ZigzagTHD([0, *itertools.accumulate(sizes)], total_lengths=[len(mask) for mask in MASKS])
    samples = samples_of(N, layout)
    buffer = torch.zeros(samples.total_tokens)
    for rank in range(2):
        buffer[samples.local(rank, 2).positions] = token_weights(mode, samples, totals, cp_rank=rank, cp_size=2)
    assert torch.equal(buffer, samples.in_buffer([token_weights(mode, samples_of([i]), totals) for i in N]))


def test_vl_norm_is_the_papers_with_its_divisor() -> None:
    masks = [torch.ones(1), torch.ones(16)]
    totals = StepTotals.from_loss_masks(masks, statistics=resolve(vl_norm, divisor=5).mode.statistics)  # type: ignore[union-attr]
    found = token_weights(vl_norm, Samples(masks), totals, divisor=5)
    assert found.tolist() == pytest.approx([8 / 45] + [1 / 45] * 16)
    with pytest.raises(ValueError, match="vl_norm_0_75' without a divisor: it divides"):
        resolve(vl_norm)


def test_alpha_1_and_0() -> None:
    """Sums of the losses 1 of samples of 1 and 4 tokens."""
    masks = [torch.ones(1), torch.ones(4), torch.zeros(2)]
    for alpha, expected in ((1, 1.6), (0, 2.5)):
        mode = length_to_the_minus(alpha)
        totals = StepTotals.from_loss_masks(masks, statistics=own_mode(mode).statistics)
        assert float(token_weights(mode, Samples(masks), totals).sum()) == pytest.approx(expected)


def test_turns_where_a_sample_is_a_rollout() -> None:
    """Without rollout ids nothing is exchanged for it."""
    masks = [torch.ones(3), torch.ones(2)]
    turns = {"turns": [torch.tensor([0, 0, 1]), torch.tensor([0, 0])]}
    totals = StepTotals.from_loss_masks(masks, labels=turns, statistics=own_mode(turn_mean).statistics)
    assert totals.statistics == {}
    found = token_weights(turn_mean, Samples(masks, labels=turns), totals)
    assert found.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 4])


# --- over ranks


def all_statistics() -> dict[str, Statistic]:
    return {name: one for mode, _ in MODES.values() for name, one in own_mode(mode).statistics.items()}


def weights_on_rank(hands: list[list[int]]) -> dict[str, Any]:
    """Of this rank's samples, from totals made together in one round; and how many collectives that took."""
    start_process_group()
    mine = hands[int(os.environ["RANK"])]
    names = ("all_reduce", "all_to_all_single")
    held, found = attempt(lambda: [samples_of(mine[:1]), samples_of(mine[1:])]), {}
    for statistics in ({}, all_statistics()):
        counted = {name: Mock(wraps=getattr(dist, name)) for name in names}
        with patch.multiple(dist, **counted):
            totals = reduce_step_totals(held, dp_group=dist.group.WORLD, statistics=statistics)
        found[f"calls {bool(statistics)}"] = [mock.call_count for mock in counted.values()]
    for name, (mode, _) in MODES.items():
        found[name] = token_weights(mode, samples_of(mine), totals).tolist()
    dist.barrier()
    return found


def test_over_ranks() -> None:
    hands: list[list[int]] = [[], [6, 5, 3], [0], [4, 1, 2]]
    for mine, found in zip(hands, run_ranks(4, weights_on_rank, hands), strict=True):
        assert found["calls True"] == found["calls False"], "they travel in the collectives that count ids"
        for name, (_, rule) in MODES.items():
            right = [float(x) for i in mine for x in expected(rule)[i]]
            assert found[name] == pytest.approx(right, rel=oracle.EXACT, abs=0)


# --- refusals, each beside its nearest legal neighbour


def mode_over(of: Any, by: Any = "step") -> Any:
    @with_statistics(x=Statistic(of=of, by=by))
    def mode(inputs: Any) -> Tensor:
        return inputs.statistic("x")

    return mode


def counted(mode: Any, **ids: Any) -> Call:
    return lambda: StepTotals.from_loss_masks(MASKS, statistics=own_mode(mode).statistics, **ids)


def used(mode: Any, labels: Any = LABELS, **statistics: Any) -> Call:
    totals = functools.partial(StepTotals.from_loss_masks, MASKS, **statistics)
    return lambda: token_weights(mode, Samples(MASKS, labels=labels), totals(labels=labels))


ONES = mode_over(lambda samples: torch.ones(len(samples)))
BY_PROMPT = mode_over(lambda samples: torch.ones(len(samples)), "prompt")
INVERSE = mode_over(lambda samples: 1 / samples.mask_sums)


def by_key(key: Any) -> Any:
    return counted(mode_over(lambda samples: torch.ones(len(samples)), lambda samples: [key] * len(samples)))


def with_labels(number: int) -> Samples:
    return Samples(MASKS, labels={"task": [1] * number})


test_refusals = refusal_tests(
    {
        **refusals(
            lambda use: use(),
            (
                (counted(mode_over(lambda samples: torch.ones(2))),),
                r"that returned \(2,\) for 7 samples",
                (counted(ONES),),
            ),
            ((counted(INVERSE),), "a statistic that is NaN or infinite for sample 2", (counted(ONES),)),
            (
                (counted(BY_PROMPT),),
                "by prompt of samples without prompt_ids",
                (counted(BY_PROMPT, prompt_ids=PROMPTS),),
            ),
            (
                (used(ONES),),
                "totals without the statistic 'x' of the mode",
                (used(ONES, statistics=own_mode(ONES).statistics),),
            ),
            (
                (used(weighted_token_mean, {}),),
                "a label 'weight' of samples whose labels are: none",
                (used(weighted_token_mean, statistics=own_mode(weighted_token_mean).statistics),),
            ),
        ),
        **refusals(lambda use: use(), ((by_key(math.nan),), "holds nan", (by_key("a"),)), error=TypeError),
        **refusals(length_to_the_minus, (("1",), r"alpha is '1': it must be a number in \(-inf, inf\)", (1,))),
        **refusals(with_labels, ((2,), "2 labels 'task' for 7 loss masks", (7,))),
    }
)
