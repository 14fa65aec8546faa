"""Modes over sums that they declare, through the real schedule and DDP: the gradient of each token is its weight.

Samples with labels go through the look-ahead of `LossAggregation`, which counts the mode's statistics with the others.
"""

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from ranks import run_ranks
from table_step import Batch, aggregation, dealt, one_step, relative_error, start, step_samples, table_model
from torch import Tensor

from megatron_rl_loss import Samples
from megatron_rl_loss.modes.papers import adapter_token_mean, balanced, vl_norm

SAMPLES = step_samples(6)
TABLE = [0.0] * sum(len(one.mask) for one in SAMPLES)
SIGNS = [[1.0, -1.0, -2.0][i % 3] for i in range(len(SAMPLES))]
ADAPTERS = [["x", "y"][i % 5 // 3] for i in range(len(SAMPLES))]
M = [float(one.mask.double().sum()) for one in SAMPLES]
N = range(len(SAMPLES))


def of_vl_norm(i: int) -> float:
    return M[i] ** -0.75 / sum(M[j] ** -0.75 for j in N if M[j]) if M[i] else 0


def of_balanced(i: int) -> float:
    prompts = {one.prompt_id for one in SAMPLES}
    group = [j for j in N if SAMPLES[j].prompt_id == SAMPLES[i].prompt_id]
    same = [j for j in group if SIGNS[j] * SIGNS[i] > 0]
    tokens = sum(M[j] for j in same)
    return len(same) / len(group) / tokens / len(prompts) if tokens else 0


def of_adapters(i: int) -> float:
    return 1 / sum(M[j] for j in N if ADAPTERS[j] == ADAPTERS[i])


MODES: dict[str, tuple[Any, Callable[[int], float]]] = {
    "VL Norm": (vl_norm, of_vl_norm),
    "balanced": (balanced, of_balanced),
    "adapters": (adapter_token_mean, of_adapters),
}
# DP, CP, micro-batches
LAYOUTS = [(2, 2, 2), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((4, 1, 1), (1, 1, 3)))]


def gradients(dp: int, cp: int, microbatches: int) -> dict[str, Tensor]:
    """On a rank: of every mode, the gradient that Megatron arrives at; per-token loss on and off in turn."""
    from megatron.core import parallel_state

    start(cp=cp)
    found = {}
    for k, (name, (mode, _)) in enumerate(MODES.items()):
        batches = []
        for chosen in dealt(SAMPLES, parallel_state.get_data_parallel_rank(), dp, microbatches):
            batch = Batch(SAMPLES, chosen, cp)
            given = batch.samples
            labels = {"advantage": [SIGNS[i] for i in chosen], "adapter": [ADAPTERS[i] for i in chosen]}
            ids: Any = {"rollout_ids": given.rollout_ids, "prompt_ids": given.prompt_ids}
            batch.samples = Samples(given.loss_masks, layout=given.layout, labels=labels, **ids)
            batches.append(batch)
        model = table_model([*TABLE, 0.0], per_token=k % 2 == 1)
        found[name], _ = one_step(model, batches, aggregation(mode=mode, with_per_token_loss=True))
    return found


@pytest.mark.parametrize(("dp", "cp", "microbatches"), LAYOUTS)
def test_a_token_s_gradient_is_its_weight(dp: int, cp: int, microbatches: int) -> None:
    for found in run_ranks(dp * cp, gradients, dp, cp, microbatches):
        for name, (_, weight) in MODES.items():
            right = torch.cat([one.mask.double() * weight(i) for i, one in enumerate(SAMPLES)])
            assert relative_error(found[name][:-1], right) < oracle.EXACT, name
