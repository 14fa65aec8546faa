"""Steps that Megatron's schedulers pack anew, over context-parallel groups that may change."""

import functools
import itertools
import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import oracle
import pytest
import torch
import torch.distributed as dist
from dynamic_steps import LENGTHS, RANKS, STEP, TABLE, start_dynamic
from example_run import MODEL, TRAINING
from missing import has, skip_without
from ranks import run_ranks
from step_samples import DIVISOR
from table_step import relative_error, run_schedule, start, table_model
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.core import plan as plans
from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.counting import count_step

pytestmark = pytest.mark.slow
FIRSTS = list(itertools.accumulate(LENGTHS, initial=0))


class Launch(NamedTuple):
    """A step of a packing scheduler in a loop: one's own, or Megatron's schedule in a `LossAggregation`."""

    scheduler: str
    loop: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    ranks: int = RANKS

    def __str__(self) -> str:
        return f"{self.scheduler}-{self.loop}-tp{self.tp}cp{self.cp}pp{self.pp}v{self.vp}of{self.ranks}"

    def start(self) -> tuple[Any, Any]:
        """On a rank: Megatron's state, and its group of each size."""
        more = {"pp": self.pp} | ({"virtual_pipeline_model_parallel_size": self.vp} if self.vp > 1 else {})
        if self.is_dynamic:
            state, _, group_of = start_dynamic(self.tp, self.cp, **more)
            return state, group_of
        return start(self.tp, cp=self.cp, **more), lambda size: None

    @property
    def is_dynamic(self) -> bool:
        return self.scheduler == "default_dynamic_cp"

    @property
    def per_token(self) -> bool:
        return self.is_dynamic or self.loop == "own"

    def chunks(self, size: int) -> list[Any]:
        """A table for each stage, whose entries the stages add up."""
        chunks = []
        for _ in range(self.vp):
            chunks.append(
                table_model(
                    TABLE, per_token=self.per_token, forward=lambda losses, numbers: losses[numbers][:, None, None]
                )
            )
            config = chunks[-1].config
            config.sequence_packing_scheduler = self.scheduler
            config.dynamic_context_parallel = self.is_dynamic
            config.max_seqlen_per_dp_cp_rank = 64 // (size if self.is_dynamic else self.cp)
            config.min_dynamic_context_parallel_size = 1
            config.pipeline_model_parallel_size, config.pipeline_dtype = self.pp, torch.float32
            config.variable_seq_lengths = True
            if self.vp > 1:
                config.virtual_pipeline_model_parallel_size = self.vp
                config.microbatch_group_size_per_vp_stage = self.pp
                config.overlap_p2p_comm, config.batch_p2p_comm = True, False
        return chunks


#: The scheduler fills whole rounds of virtual stages, one in each step.
IN_ROUNDS = Launch("dp_balanced", "adapter", pp=2, vp=2)
SCHEDULED = [
    IN_ROUNDS,
    Launch("dp_balanced", "own", tp=2),
    Launch("dp_balanced", "own", pp=2),
    Launch("dp_balanced", "adapter", cp=2),
    Launch("dp_balanced", "adapter", tp=2, pp=2),
    Launch("default_dynamic_cp", "own", cp=2),
    Launch("default_dynamic_cp", "own", pp=2, vp=2),
    Launch("default_dynamic_cp", "adapter", tp=2),
    Launch("default_dynamic_cp", "adapter", pp=2),
    Launch("default_dynamic_cp", "adapter", pp=2, vp=2),
]


def rows_of(ids: Sequence[int], multiple: int) -> list[dict[str, Tensor]]:
    """Rows of a data set: sequences padded for the largest context-parallel group."""
    rows = []
    for i in ids:
        size = -(-LENGTHS[i] // multiple) * multiple
        numbers = torch.full((size,), len(TABLE) - 1)
        numbers[: LENGTHS[i]] = torch.arange(FIRSTS[i], FIRSTS[i + 1])
        mask = torch.zeros(size)
        mask[: LENGTHS[i]] = STEP[i].mask
        row = {"tokens": numbers, "labels": numbers, "position_ids": torch.arange(size), "loss_mask": mask}
        row |= {"original_seq_len": torch.tensor([LENGTHS[i]]), "padded_seq_len": torch.tensor([size])}
        rows.append({name: value.cuda() for name, value in row.items()})
    return rows


def packed_errors(launch: Launch, planted: bool = False) -> list[tuple[str, int, float]]:
    """On a rank: of two steps in every mode, the mode, the number of micro-batches and the error of the gradient."""
    from megatron.core.datasets.data_schedule import wrap_data_iterator

    from megatron_rl_loss import LossAggregation, plan_step
    from megatron_rl_loss.megatron.flags import AggregationSettings
    from megatron_rl_loss.megatron.lookahead import from_first_tp_rank

    state, group_of = launch.start()
    dp, dp_rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    tp_group, pp_group = state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()
    size = dp * launch.cp
    reads = tp_group.rank() == 0 and (has("default_dynamic_cp") or pp_group.rank() in (0, launch.pp - 1))
    proof = "off" if planted else "error"  # which counts anew, and so stops the plant
    if planted:
        vars(plans)["count_step"] = lambda samples, groups, **options: count_step(samples, StepGroups(), **options)

    def samples_of(batch: dict[str, Tensor]) -> Samples:
        bounds = batch["cu_seqlens_padded"].int().tolist()
        ids = [FIRSTS.index(int(batch["tokens"][start])) for start in bounds[:-1]]
        return Samples(
            [batch["loss_mask"][a:b].cpu() for a, b in itertools.pairwise(bounds)],
            layout=ZigzagTHD(bounds),
            rollout_ids=[str(STEP[i].rollout_id) for i in ids],
            prompt_ids=[str(STEP[i].prompt_id) for i in ids],
            cp_group=group_of(int(batch["local_cp_size"])) if launch.is_dynamic else None,
        )

    def forward_step(iterator: Any, model: Any) -> Any:
        drawn = next(iterator)
        batch, microbatch = drawn if launch.loop == "own" else (drawn.data, drawn)
        return model(microbatch.local(batch["tokens"]).cuda()), lambda output: microbatch.loss(output.flatten())

    errors = []
    for mode, units in oracle.COUNTINGS:
        chunks = launch.chunks(size)
        model = chunks if launch.vp > 1 else chunks[0]
        named: Any = {"mode": mode, "units": units, "divisor": oracle.divisor_of(mode, DIVISOR)}
        wrap = None
        if launch.loop == "adapter":
            settings = AggregationSettings.resolve(with_per_token_loss=launch.per_token, proof=proof, **named)
            wrap = LossAggregation(settings, samples_of).wrap_schedule
        for step in (range(len(STEP)), [0, 2, 3, 7, 8, 12]):
            mine = list(step)[dp_rank::dp]
            of_chunks = [iter(rows_of(mine, 2 * size)) if reads else None for _ in range(launch.vp)]
            data, count, *_ = wrap_data_iterator(
                of_chunks if launch.vp > 1 else of_chunks[0], chunks[0].config, len(mine)
            )
            if launch.loop == "own":
                iterators = data if launch.vp > 1 else [data]

                def whole(iterators: Any = iterators, count: int = count) -> list[Any]:
                    step_batches = ([next(chunk_data) for chunk_data in iterators] for _ in range(count))
                    return [functools.reduce(operator.or_, of_chunks) for of_chunks in step_batches]

                batches = from_first_tp_rank(whole, tp_group, pp_group)
                plan = plan_step([samples_of(rows) for rows in batches], model=model, num_microbatches=count, **named)
                data = [iter(list(zip(batches, plan, strict=True))) for _ in chunks]
                data = data if launch.vp > 1 else data[0]
            run_schedule(forward_step, data, model, count, wrap)
            right = [torch.zeros(length, dtype=torch.float64) for length in LENGTHS]
            step_slopes = oracle.step_gradient(mode, [STEP[i] for i in step], named["divisor"], units)
            for i, slope in zip(step, step_slopes, strict=True):
                right[i] = slope
            expected = torch.cat([*right, torch.zeros(1)])
            for chunk in chunks:
                errors.append((mode, count, relative_error(chunk.module.losses.main_grad.cpu(), expected)))
    return errors


@pytest.mark.parametrize("launch", SCHEDULED, ids=str)
def test_a_step_that_a_scheduler_packed(launch: Launch, record_property: Any) -> None:
    skip_without(launch.scheduler)
    for errors in run_ranks(launch.ranks, packed_errors, launch):
        assert len({count for _, count, _ in errors}) == 2 - (launch == IN_ROUNDS)  # it changes from step to step
        assert max(error for *_, error in errors) < oracle.EXACT, errors
        record_property("dynamic_cp_error", max(error for *_, error in errors))


def test_totals_of_one_rank_are_seen() -> None:
    skip_without("dp_balanced")
    for errors in run_ranks(RANKS, packed_errors, Launch("dp_balanced", "adapter", tp=2), True):
        assert min(error for mode, _, error in errors if mode == "token_mean") > 0.05, errors


# --- pretrain


def pretrained(flags: list[str]) -> list[dict[str, float]]:
    """On a rank: `pretrain` of Megatron-Core dev, whose `train_step` runs the scheduler; what it logged."""
    import megatron_on_cpu
    from megatron.core import parallel_state
    from megatron.core.transformer import transformer_config
    from megatron.training import training
    from packed_attention import layer_spec
    from pretrain_grpo import skip_building_dataset_helpers
    from pretrain_of_version import parse_args, pretrain_gpt

    from megatron_rl_loss import LossAggregation, add_loss_aggregation_args, next_microbatch, packed_seq_params

    barrier = dist.barrier
    transformer_config.is_te_min_version = lambda *_, **__: True  # a scheduler asks for Transformer Engine 2.9
    vars(dist)["barrier"] = lambda group=None, **_: barrier(group)  # it names a device: gloo refuses it
    sys.argv = ["pretrain", *MODEL.split(), *TRAINING.split(), *STEPS.split(), *flags]
    args = parse_args(add_loss_aggregation_args, {})

    def provide(*_: Any, **__: Any) -> Any:
        rows = rows_of([*range(len(STEP)), 0, 2], 8)
        for row in rows:
            row["tokens"], row["labels"] = (row["tokens"] * 7 + 3) % 32, (row["tokens"] * 5 + 1) % 32
        return rows, None, None

    def samples_of(batch: dict[str, Tensor]) -> Samples:
        bounds = batch["cu_seqlens_padded"].tolist()
        masks = [batch["loss_mask"][a:b] for a, b in itertools.pairwise(bounds)]
        return Samples(masks, layout=ZigzagTHD(bounds), cp_group=cp_group_of(batch))

    def cp_group_of(batch: dict[str, Tensor]) -> Any:
        size = int(batch.get("local_cp_size", 0))
        return parallel_state.get_dynamic_data_context_parallel_groups(group_size=size) if size else None

    def forward_step(iterator: Any, model: Any) -> Any:
        microbatch = next_microbatch(iterator)
        batch = microbatch.data
        names = ("tokens", "position_ids", "labels")
        tokens, positions, labels = (microbatch.local(batch[name])[None].cuda() for name in names)
        cp_group = cp_group_of(batch)
        group_arguments = {} if cp_group is None else {"cp_group": cp_group, "local_cp_size": cp_group.size()}
        packed = packed_seq_params(batch["cu_seqlens_padded"], model, **group_arguments)
        return model(tokens, positions, None, labels=labels, packed_seq_params=packed), microbatch.loss

    logged: list[dict[str, float]] = []
    training_log = training.training_log

    def catch(loss_dict: dict[str, Any], *args: Any, **named: Any) -> Any:
        logged.append({name: float(value) for name, value in loss_dict.items()} | {"grad_norm": float(args[6])})
        return training_log(loss_dict, *args, **named)

    training.training_log = catch
    megatron_on_cpu.prepare_training()
    skip_building_dataset_helpers()
    with LossAggregation.from_args(args, samples_of).attached():
        pretrain_gpt(args, add_loss_aggregation_args, {}, layer_spec, provide, forward_step)
    return logged


STEPS = """--dataloader-type single --num-workers 0 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1
    --global-batch-size 8 --eval-iters 0 --eval-interval 1000 --train-iters 2"""
BALANCED = ["--sequence-packing-scheduler", "dp_balanced"]
DYNAMIC = ["--dynamic-context-parallel", "--max-seqlen-per-dp-cp-rank", "32", "--loss-aggregation", "sample_mean"]
DYNAMIC += ["--calculate-per-token-loss", "--loss-aggregation-with-per-token-loss"]
TP, PP = (f"--{axis}-model-parallel-size 2".split() for axis in ("tensor", "pipeline"))


@pytest.mark.parametrize(
    ("alone", "flags"), [((), [*BALANCED, *TP]), ((), [*DYNAMIC, *TP]), (PP, [*BALANCED, *PP])], ids=str
)
def test_pretrain_that_schedules_trains_alike_on_four_ranks(alone: Sequence[str], flags: list[str]) -> None:
    skip_without("scheduling pretrain")
    expected = run_ranks(2 if alone else 1, pretrained, [*BALANCED, *alone])[-1]  # stages draw weights of their own
    assert len(expected) == 2
    for step, reference in zip(run_ranks(RANKS, pretrained, flags)[-1], expected, strict=True):
        assert step == pytest.approx(reference, rel=2 * oracle.chain_error(2, 256))
