"""Steps that Megatron's schedulers pack anew, and a GPT, over context-parallel groups that may change."""

import itertools
from typing import Any

import gpt_oracle
import oracle
import pytest
import torch
import torch.distributed as dist
from dynamic_steps import HYBRID, LENGTHS, RANKS, STEP, TABLE, balanced, hands_of, has, run_loop, start_dynamic
from gpt_steps import FP32_BOUNDS, collect, mode_of, output_of
from ranks import run_ranks
from step_samples import DIVISOR
from table_step import relative_error, run_schedule, start, table_model
from tiny_gpt import Batch, Case, Layout, build
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.losses import ppo_clip_loss

pytestmark = pytest.mark.slow

SCHEDULED = [("dp_balanced", 2, 1), ("dp_balanced", 1, 2), ("default_dynamic_cp", 2, 1), ("default_dynamic_cp", 1, 2)]


def packed_errors(scheduler: str, tp: int, cp: int) -> list[tuple[int, float]]:
    """On a rank: of two steps in every mode, the number of micro-batches and the error of the gradient."""
    from megatron.core.datasets.data_schedule import wrap_data_iterator

    from megatron_rl_loss.megatron import from_first_tp_rank, plan_step

    dynamic = scheduler == "default_dynamic_cp"
    if dynamic:
        state, dp_cp, group_of = start_dynamic(tp)
    else:
        state = start(tp=tp, cp=cp)
        dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    dp, dp_rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    multiple, tp_group = 2 * dp_cp.size(), state.get_tensor_model_parallel_group()
    firsts = list(itertools.accumulate(LENGTHS, initial=0))
    found = []
    for (mode, units), step in itertools.product(oracle.COUNTINGS, [range(len(STEP)), [0, 2, 3, 7]]):
        model = table_model(TABLE, per_token=True)
        model.config.sequence_packing_scheduler = scheduler
        model.config.max_seqlen_per_dp_cp_rank = 64 // (dp_cp.size() if dynamic else cp)
        model.config.min_dynamic_context_parallel_size = 1
        mine = list(step)[dp_rank::dp]
        rows = []
        for i in mine:
            size = -(-LENGTHS[i] // multiple) * multiple
            numbers = torch.full((size,), len(TABLE) - 1)
            numbers[: LENGTHS[i]] = torch.arange(firsts[i], firsts[i + 1])
            mask = torch.zeros(size)
            mask[: LENGTHS[i]] = STEP[i].mask
            row = {"tokens": numbers, "labels": numbers, "position_ids": torch.arange(size), "loss_mask": mask}
            row |= {"original_seq_len": torch.tensor([LENGTHS[i]]), "padded_seq_len": torch.tensor([size])}
            rows.append({name: value.cuda() for name, value in row.items()})
        given = iter(rows) if tp_group.rank() == 0 else None
        iterator, count, *_ = wrap_data_iterator(given, model.config, len(mine))
        assert (iterator is None) == (tp_group.rank() > 0)
        batches: list[Any] = []

        def describe(batches: Any = batches, iterator: Any = iterator, count: int = count) -> list[Samples]:
            batches += from_first_tp_rank(lambda: [next(iterator) for _ in range(count)], tp_group)
            samples = []
            for batch in batches:
                bounds = batch["cu_seqlens_padded"].tolist()
                ids = [firsts.index(int(batch["tokens"][start])) for start in bounds[:-1]]
                size = int(batch["local_cp_size"]) if dynamic else 1
                samples.append(
                    Samples(
                        [batch["loss_mask"][a:b].cpu() for a, b in itertools.pairwise(bounds)],
                        layout=ZigzagTHD(bounds),
                        rollout_ids=[str(STEP[i].rollout_id) for i in ids],
                        prompt_ids=[str(STEP[i].prompt_id) for i in ids],
                        cp_group=group_of(size) if dynamic else None,
                    )
                )
            return samples

        divisor = DIVISOR if mode == "constant" else None
        plan = plan_step(
            describe, mode, units=units, divisor=divisor, model=model, dynamic_cp=dynamic, num_microbatches=count
        )
        turns = iter(zip(batches, plan, strict=True))

        def forward_step(_: Any, model: Any, turns: Any = turns) -> Any:
            batch, microbatch = next(turns)
            return model(microbatch.local(batch["tokens"]).cuda()), microbatch.loss

        run_schedule(forward_step, None, model, count)
        chosen = [STEP[i] for i in step]
        right = [torch.zeros(length, dtype=torch.float64) for length in LENGTHS]
        for i, slope in zip(step, oracle.step_gradient(mode, chosen, divisor, units), strict=True):
            right[i] = slope
        gradient = model.module.losses.main_grad.cpu()
        found.append((count, relative_error(gradient, torch.cat([*right, torch.zeros(1)]))))
    return found


@pytest.mark.parametrize(("scheduler", "tp", "cp"), SCHEDULED)
def test_a_step_that_a_scheduler_packed(scheduler: str, tp: int, cp: int, record_property: Any) -> None:
    if not has("datasets/data_schedule.py", f'"{scheduler}"'):
        pytest.skip("not in this Megatron-Core: see tools/test_versions.sh")
    for found in run_ranks(RANKS, packed_errors, scheduler, tp, cp):
        assert len({count for count, _ in found}) == 2  # it changes from step to step
        assert max(error for _, error in found) < oracle.EXACT, found
        record_property("dynamic_cp_error", max(error for _, error in found))


# --- a GPT


GPT_CASES = [
    Case(1, mode, "all", "per token", bf16=False, optimizer="plain", tied=False, lopsided=False)
    for mode in oracle.MODES
]
LAYOUT = Layout(1, False, 1, 1, 2, 2)


def gpt_errors(rollouts: list[gpt_oracle.Rollout]) -> list[dict[str, Any]]:
    """On a rank: the gradients of PPO in each mode, sequences dealt by Megatron's scheduler."""
    from megatron_rl_loss.megatron import plan_step

    _, dp_cp, group_of = start_dynamic()
    groups = balanced(dp_cp, [len(one.tokens) for one in rollouts])
    hands = hands_of(groups, dp_cp.rank(), one_by_one=True)
    found = []
    for case in GPT_CASES:
        ready = build(LAYOUT, case, "packed")
        (model,) = ready.chunks
        places = [(0 if size == 1 else group_of(size).rank(), size, group_of(size)) for _, size in hands]
        batches = [
            Batch([rollouts[i] for i in ids], cp_rank, size, filler=False, cp_group=group)
            for (ids, _), (cp_rank, size, group) in zip(hands, places, strict=True)
        ]
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        plan = plan_step([one.samples for one in batches], model=model, dynamic_cp=True, **mode_of(case))
        turns = iter(zip(batches, plan, strict=True))

        def forward_step(iterator: Any, model: Any, turns: Any = turns, alone: Any = alone) -> Any:
            next(iterator)
            batch, microbatch = next(turns)
            batch.cp_group = batch.cp_group or alone
            for layer in model.module.decoder.layers:  # Megatron-Core dev does so itself, for RoPE
                layer.self_attention.pg_collection.cp = batch.cp_group

            def loss_func(output: Tensor) -> Any:
                clip = {"clip_low": gpt_oracle.CLIP_LOW, "clip_high": gpt_oracle.CLIP_HIGH}
                return microbatch.loss(
                    ppo_clip_loss(-output, batch.old_log_probs, batch.advantages, **clip).per_token_loss
                )

            return output_of(model, batch.cuda()), loss_func

        run_loop(has(*HYBRID), model, groups, hands, forward_step)
        found.append(
            {name: torch.from_numpy(value) for name, (value, _) in collect([model], of_gradients=True).items()}
        )
    return found


def test_a_gpt_trains_on_the_step_of_one_process(record_property: Any) -> None:
    shape = GPT_CASES[0].shape(LAYOUT)
    for found in run_ranks(RANKS, gpt_errors, gpt_oracle.rollouts_of(shape)):
        for case, gradients in zip(GPT_CASES, found, strict=True):
            right = gpt_oracle.step_of(shape, case.mode, case.units).gradients
            assert gradients.keys() == right.keys()
            worst = max(relative_error(gradients[name], right[name]) for name in right)
            record_property("dynamic_cp_gpt_error", worst)
            assert worst < FP32_BOUNDS["gradients"], (case.mode, worst)
