"""One optimizer step of the real Megatron in a `World`: a layout of ranks, a model in it, and the loop that trains it.

The model is a table of the losses of all tokens, so that a token's gradient is its weight, or a tiny GPT. The loop is
Megatron's schedule with `LossAggregation` around it, Megatron's `pretrain`, the schedule with a plan, or a loop without
the schedule. `train` gives what the float64 oracle is compared with, and the line that says how many tokens are proved.
"""

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import gpt_oracle
import megatron.core
import oracle
import tiny_gpt
import torch
import torch.distributed as dist
from example_run import MODEL
from gpt_oracle import Rollout
from gpt_steps import Outcome, collect, output_of, place_in, start_layout
from logged_means import logged_means
from step_samples import DIVISOR, dealt, step_samples
from steps import session_of, turns_of, weights_of
from table_step import Batch, relative_error, run_schedule, start, table_chunk, table_model
from tiny_gpt import Case, Layout, config_of, gpt_chunk, tiny_config
from torch import Tensor
from trainers import takes

from megatron_rl_loss import (
    LossAggregation,
    Samples,
    ZigzagTHD,
    add_loss_aggregation_args,
    plan_step,
    ppo_clip_loss,
    prove_first_step,
)
from megatron_rl_loss.megatron.flags import AggregationSettings
from megatron_rl_loss.plan.carriers import FORMS

STEP = step_samples(8)
TABLE = [float(loss) for one in STEP for loss in one.losses] + [0.0]
CP, DP = 2, 2
OF_SAMPLES: Any = {"ids": {"session": [session_of(one) for one in STEP], "turn": [turns_of(one) for one in STEP]}}
#: What a loss function may return to the installed Megatron or to a loop, and whether with per-token loss: without it
#: Megatron's DDP averages, else it sums.
FORM_SETTINGS = [
    (form.name, per_token)
    for form in FORMS.values()
    if form.caller != "engine"
    for per_token, carrier in form.carriers.items()
    if per_token != bool(carrier.ddp) and takes(megatron.core.__version__, form.name, per_token)
]
#: (what a loss function returns, the micro-batch, their number) -> what Megatron's schedule is given
Engine = Callable[[Any, Any, int], Any]
Loop = Literal["adapter", "pretrain", "plan", "by hand"]


class World(NamedTuple):
    """A layout, a model and a loop, with what its loss function returns to the loop."""

    layout: Layout
    model: Literal["table", "gpt"]
    loop: Loop
    mode: str
    form: str = "3-tuple"
    per_token: bool = False

    def __str__(self) -> str:
        return f"{self.layout}, {self.model}, {self.loop}, {self.form}{', per token' * self.per_token}, {self.mode}"

    @property
    def divisor(self) -> float | None:
        of_model = DIVISOR if self.model == "table" else gpt_oracle.DIVISOR
        return of_model if self.mode == "constant" else None

    @property
    def case(self) -> Case:
        """The GPT's step: four micro-batches, which make whole rounds of virtual stages."""
        scaling = "per token" if self.per_token else "mean"
        return Case(4, self.mode, "all", scaling, bf16=False, optimizer="plain", tied=False, lopsided=False)


@dataclass
class Model:
    """A model on this rank: its chunks before DDP, its micro-batches, and the losses of its output for one of them."""

    config: Any
    chunk_of: Callable[[int], Any]
    batches: list[Any]
    output_of: Callable[[Any, Any], Tensor]
    losses_of: Callable[[Tensor, Any], Tensor]


def table_in(world: World) -> Model:
    """Each pipeline stage has a table of its part of the losses, which they add up."""
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection

    layout = world.layout
    cp_rank, stages = mpu.get_context_parallel_rank(), layout.pp * layout.vp
    config = tiny_config(layout, per_token=world.per_token)
    part = [loss / stages for loss in TABLE]

    def forward(losses: Tensor, numbers: Tensor) -> Tensor:
        return losses[numbers][:, None, None]  # as hidden states travel between stages

    def chunk_of(stage: int) -> Any:
        chunk = table_chunk(part, config, forward)
        chunk.pg_collection = ProcessGroupCollection.use_mpu_process_groups()  # which `pretrain` asks it for
        return chunk

    def output(chunk: Any, batch: Batch) -> Tensor:
        losses: Tensor = chunk(batch.local_numbers(cp_rank, layout.cp).cuda())
        return losses

    batches = hands_of(mpu.get_data_parallel_rank(), layout.dp, layout.cp, 4)
    if layout.pp == 1 and world.loop in ("plan", "by hand"):  # which allow other numbers on other DP ranks
        batches = [batch for batch in batches if len(batch.samples)]
    return Model(
        config,
        chunk_of=chunk_of,
        batches=batches,
        output_of=output,
        losses_of=lambda output, batch: output.flatten(),
    )


def gpt_in(world: World, rollouts: Sequence[Rollout]) -> Model:
    from megatron.core import parallel_state as mpu

    layout, config = world.layout, config_of(world.layout, world.case)

    def losses(output: Tensor, batch: tiny_gpt.Batch) -> Tensor:
        policy = ppo_clip_loss(
            -output,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            clip_low=gpt_oracle.CLIP_LOW,
            clip_high=gpt_oracle.CLIP_HIGH,
        )
        return policy.per_token_loss

    dp_rank, cp_rank = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
    batches = tiny_gpt.batches_of(rollouts, world.case, layout.dp, dp_rank, layout.cp, cp_rank)
    return Model(
        config,
        chunk_of=lambda stage: gpt_chunk(layout, world.case, config, stage),
        batches=[batch.cuda() for batch in batches],
        output_of=output_of,
        losses_of=losses,
    )


# ---- loops


def in_ddp(world: World, model: Model) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    chunks = [model.chunk_of(stage) for stage in range(world.layout.vp)]
    return [DistributedDataParallel(model.config, DistributedDataParallelConfig(), chunk) for chunk in chunks]


def aggregation_in(world: World) -> LossAggregation:
    settings = AggregationSettings.resolve(world.mode, world.divisor, with_per_token_loss=world.per_token)
    return LossAggregation(settings, lambda batch: batch.samples)


def run_chunks(world: World, chunks: list[Any], forward_step: Any, steps: Sequence[Any], wrap: Any) -> Any:
    """Megatron's schedule over the step: what it stored."""
    virtual = world.layout.vp > 1
    data: Any = [iter(steps) for _ in chunks] if virtual else iter(steps)
    return run_schedule(forward_step, data, chunks if virtual else chunks[0], len(steps), wrap, fresh=False)


def forward_step_of(world: World, model: Model) -> Any:
    """A user's forward step, in whose iterator `LossAggregation` has put micro-batches."""

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        microbatch = next(iterator)
        output = model.output_of(chunk, microbatch.data)
        return output, lambda output: microbatch.loss(model.losses_of(output, microbatch.data), form=world.form)

    return forward_step


def by_adapter(world: World, model: Model) -> tuple[list[Any], Any]:
    chunks, wrap = in_ddp(world, model), aggregation_in(world).wrap_schedule
    return chunks, run_chunks(world, chunks, forward_step_of(world, model), model.batches, wrap)


def by_plan(world: World, model: Model) -> tuple[list[Any], Any]:
    """A plan: its shares, in the schedule whose first step is proved, or by hand where the form is a loop's."""
    from megatron.core import parallel_state as mpu

    chunks = in_ddp(world, model)
    of_form: Any = {"model": chunks}
    if FORMS[world.form].caller == "loop":
        of_form = {"dp_group": mpu.get_data_parallel_group(), "cp_group": mpu.get_context_parallel_group()}
        of_form["per_token_loss"] = world.per_token
    plan = plan_step([batch.samples for batch in model.batches], world.mode, divisor=world.divisor, **of_form)
    run = functools.partial(run_chunks, world, chunks, wrap=prove_first_step)
    shares = train_plan(model, chunks[0], plan, world.form, run, as_returned)
    if not shares:
        return chunks, []
    total = torch.stack(shares).sum()
    dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return chunks, [{"pg_loss": total}]


def as_returned(returned: Any, batch: Any, num_microbatches: int) -> Any:
    return returned


def train_plan(model: Model, chunk: Any, plan: Any, form: str, run: Any, engine: Engine) -> list[Tensor]:
    """Forward and backward of a planned step; the shares, where losses are computed. `run` runs the schedule."""
    from megatron.core.distributed import finalize_model_grads

    steps = list(zip(model.batches, plan, strict=True))
    if FORMS[form].caller == "loop":
        shares = []
        for batch, microbatch in steps:
            share = microbatch(model.losses_of(model.output_of(chunk, batch), batch))
            microbatch.scale_for_trainer(share, form=form).backward()
            shares.append(share.detach())
        finalize_model_grads([chunk], None)
        return shares

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        batch, microbatch = next(iterator)

        def loss_func(output: Tensor) -> Any:
            share = microbatch(model.losses_of(output, batch))
            return engine(microbatch.scale_for_trainer(share, {"share": share.detach()}, form=form), batch, len(plan))

        return model.output_of(chunk, batch), loss_func

    return [report["share"] for report in run(forward_step, steps)]


def by_pretrain(world: World, model: Model) -> tuple[list[Any], Any]:
    """One iteration of Megatron's `pretrain`, which wraps the model, runs the schedule and logs."""
    import on_cpu
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.core.enums import ModelType
    from megatron.training import global_vars, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    layout, chunks, logged = world.layout, list[Any](), list[dict[str, Tensor]]()
    flags = f"""{MODEL} --num-layers {layout.num_layers} --tensor-model-parallel-size {layout.tp}
        --pipeline-model-parallel-size {layout.pp} --context-parallel-size {layout.cp} --seq-length 64
        --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size {len(model.batches) * layout.dp}
        --dataloader-type external --eval-iters 0 --eval-interval 1000 --train-iters 1 --lr 1e-3 --clip-grad 0
        --lr-decay-style constant --log-interval 1 --loss-aggregation {world.mode}"""
    flags += " --sequence-parallel" * layout.sp + " --num-layers-per-virtual-pipeline-stage 1" * (layout.vp > 1)
    flags += " --calculate-per-token-loss --loss-aggregation-with-per-token-loss" * world.per_token
    flags += f" --loss-aggregation-divisor {world.divisor}" * (world.divisor is not None)

    def provide_model(*_: Any, vp_stage: int | None = None, **__: Any) -> Any:
        chunks.append(model.chunk_of(vp_stage or 0))
        return chunks[-1]

    def provide_data(*_: Any, vp_stage: int | None = None) -> Any:
        return iter(model.batches), None, None

    provide_data.is_distributed = True  # type: ignore[attr-defined]

    training_log, step = training.training_log, forward_step_of(world, model)

    def catch(losses: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        logged.append(losses)
        return training_log(losses, *args, **options)

    on_cpu.prepare()
    sys.argv = ["pretrain.py", *flags.split()]
    args = parse_and_validate_args(extra_args_provider=add_loss_aggregation_args)
    container = pretrain_cfg_container_from_args(args)
    training.training_log = catch
    try:
        with LossAggregation.from_args(args, lambda batch: batch.samples).attached():
            training.pretrain(container, provide_data, ModelType.encoder_or_decoder, step, provide_model)
    finally:
        training.training_log = training_log
        num_microbatches_calculator.unset_num_microbatches_calculator()
        rerun_state_machine.destroy_rerun_state_machine()
        global_vars.destroy_global_vars()
    return chunks, logged


LOOPS: dict[Loop, Callable[[World, Model], tuple[list[Any], Any]]] = {
    "adapter": by_adapter,
    "pretrain": by_pretrain,
    "plan": by_plan,
    "by hand": by_plan,
}


class Trained(NamedTuple):
    """The outcome of a step on one rank: its gradients, the step loss where it is logged, and what was printed."""

    gradients: Outcome
    loss: float | None
    printed: str


def train(world: World, rollouts: Sequence[Rollout]) -> Trained:
    model = table_in(world) if world.model == "table" else gpt_in(world, rollouts)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        chunks, stored = LOOPS[world.loop](world, model)
    loss = logged_means(stored)["pg_loss"] if stored and stored[0] else None
    return Trained(Outcome(collect(chunks, of_gradients=True), {}, 0.0, None), loss, out.getvalue())


def train_all(
    layout: Layout, worlds: Sequence[World], rollouts: Sequence[Rollout]
) -> tuple[dict[str, int], list[Trained]]:
    """On a rank: its place, and its part of each world's step."""
    place = place_in(start_layout(layout))
    return place, [train(world, rollouts) for world in worlds]


# ---- planned steps of the table over CP x DP, by their parts


def hands_of(dp_rank: int, dp: int, cp: int, num_microbatches: int) -> list[Batch]:
    """Micro-batches of the table; on the last of several DP ranks one less, and a filler in its place."""
    hands = dealt(STEP, dp_rank, dp, num_microbatches)
    if dp == 1 or dp_rank < dp - 1:
        return [Batch(STEP, hand, cp, **OF_SAMPLES) for hand in hands]
    filler = Batch(STEP, [], cp)
    filler.numbers = [[len(TABLE) - 1] * 2 * cp]
    filler.samples = Samples([], layout=ZigzagTHD([0, 2 * cp], filler_slots=1), rollout_ids=[], prompt_ids=[])
    merged = [*hands[:-2], hands[-2] + hands[-1]]
    return [*(Batch(STEP, hand, cp, **OF_SAMPLES) for hand in merged), filler]


def batches_of(dp_rank: int) -> list[Batch]:
    return hands_of(dp_rank, DP, CP, 3)


def start_ranks() -> tuple[int, int]:
    """On a rank: its place among the context- and among the data-parallel ranks."""
    state = start(cp=CP)
    return state.get_context_parallel_rank(), state.get_data_parallel_rank()


def gradient_of(mode: str) -> Tensor:
    """The gradient of the step loss by each entry of the table, float64."""
    if mode in oracle.BY_IDS:
        return torch.tensor([w for row in weights_of(mode, STEP, "all") for w in row] + [0.0], dtype=torch.float64)
    divisor = DIVISOR if mode == "constant" else None
    return torch.cat([*oracle.step_gradient(mode, STEP, divisor), torch.zeros(1)])


def step(model: Any, plan: Any, batches: list[Batch], cp_rank: int, form: str, engine: Engine = as_returned) -> None:
    """Forward and backward of a planned step of the table."""

    def output(chunk: Any, batch: Batch) -> Tensor:
        losses: Tensor = chunk(batch.local_numbers(cp_rank, CP).cuda())
        return losses

    def run(forward_step: Any, steps: Sequence[Any]) -> Any:
        return run_schedule(forward_step, iter(steps), model, len(steps), fresh=False)

    table = Model(model.config, lambda _: model, batches, output, lambda losses, _: losses)
    train_plan(table, model, plan, form, run, engine)


def errors_in(form: str, engine: Engine, *, per_token: bool) -> list[float]:
    """On a rank: the largest error of a token's gradient in the step of each mode, relative to the largest one."""
    cp_rank, dp_rank = start_ranks()
    batches, found = batches_of(dp_rank), []
    for mode in oracle.MODES:
        divisor = DIVISOR if mode == "constant" else None
        model = table_model(TABLE, per_token=per_token)
        plan = plan_step([batch.samples for batch in batches], mode, divisor=divisor, model=model)
        step(model, plan, batches, cp_rank, form, engine)
        found.append(relative_error(model.module.losses.main_grad.cpu(), gradient_of(mode)))
    return found
