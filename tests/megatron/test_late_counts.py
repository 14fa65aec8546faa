"""examples/recipes/late_counts.py: calls of the real schedule whose gradients are reduced and scaled at the step's end.

Over CP 2 x DP 2 with every way that DDP reduces, and over two pipeline stages; each model goes on to a second step.
"""

import functools
from typing import Any

import oracle
import pytest
import torch
from ranks import run_ranks
from recipes.late_counts import late_counts, rollout_sum
from refusals import outcome_of
from table_step import Batch, relative_error, run_step, start, table_model
from torch import Tensor
from world import CP, DP, STEP, TABLE, gradient_of, planned_step, start_ranks

from megatron_rl_loss import plan_step

pytestmark = pytest.mark.slow

DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap_grad_reduce": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    {"average_in_collective": True},
]


def calls_of(dp_rank: int, cp: int) -> list[list[Batch]]:
    """Whole rollouts in each of two calls, of two micro-batches and of one."""
    rollouts = oracle.units_of("sample_mean", STEP)[dp_rank::DP]
    hands = [sorted(i for unit in rollouts[k::3] for i in unit) for k in range(3)]
    batches = [Batch(STEP, chosen, cp) for chosen in hands]
    return [batches[:2], batches[2:]]


def trained(model: Any, dp_rank: int, cp: int, run: Any, *, halved: bool = False) -> Tensor:
    model.zero_grad_buffer()
    with late_counts(model) as counts:
        for batches in calls_of(dp_rank, cp):
            plan = plan_step([batch.samples for batch in batches], rollout_sum, model=model)
            run(model, plan, batches)
            counts.append(plan.totals.units["rollout"].number["all"] / (2 if halved else 1))
    gradient: Tensor = model.module.losses.main_grad.clone().cpu()
    return gradient


def over_data_and_context() -> tuple[list[Tensor], Tensor, str]:
    from tiny_gpt import gather_sharded_gradients

    _, dp_rank = start_ranks()
    run = functools.partial(planned_step, form="3-tuple")
    gradients = []
    for options in DDP_OPTIONS:
        model = table_model(TABLE, **options)
        for _ in range(2):
            gradient = trained(model, dp_rank, CP, run)
            if "use_distributed_optimizer" in options:
                gather_sharded_gradients([model])
                gradient = model.module.losses.main_grad.clone().cpu()
            gradients.append(gradient)
    wrong = trained(table_model(TABLE), dp_rank, CP, run, halved=True)
    per_token = table_model(TABLE, per_token=True)
    return gradients, wrong, outcome_of(lambda: trained(per_token, dp_rank, CP, run))


def over_stages() -> list[Tensor]:
    """Two stages of a table each, which they add up."""
    state = start(pp=2)
    model = table_model(TABLE, forward=lambda losses, numbers: losses[numbers][:, None, None])
    model.config.pipeline_model_parallel_size, model.config.pipeline_dtype = 2, torch.float32
    model.config.variable_seq_lengths = True

    def loss(microbatch: Any, output: Tensor) -> Any:
        return microbatch.loss(output.flatten())

    def run(model: Any, plan: Any, batches: list[Batch]) -> None:
        run_step(model, list(zip(batches, plan, strict=True)), loss, fresh=False)

    return [trained(model, state.get_data_parallel_rank(), 1, run) for _ in range(2)]


def test_calls_add_up_to_the_step() -> None:
    expected = gradient_of("sample_mean")
    for gradients, wrong, refused in run_ranks(DP * CP, over_data_and_context):
        assert [relative_error(gradient, expected) < oracle.EXACT for gradient in gradients] == [True] * 2 * len(
            DDP_OPTIONS
        )
        assert relative_error(wrong, expected) > 0.5  # negative control
        assert "late counts with calculate_per_token_loss" in refused


def test_calls_over_pipeline_stages_add_up_to_the_step() -> None:
    for gradients in run_ranks(2 * DP, over_stages):
        assert [relative_error(gradient, gradient_of("sample_mean")) < oracle.EXACT for gradient in gradients] == [
            True
        ] * 2
