"""One optimizer step of the real Megatron in a `World`: a layout of ranks, a model in it, and the loop that trains it.

The model is a table of the losses of all tokens, so that a token's gradient is its weight, or a tiny GPT. The loop is
Megatron's schedule with `LossAggregation` around it, Megatron's `pretrain`, the schedule with a plan, or a loop without
the schedule. `train` gives what the float64 oracle is compared with, and the line that says how many tokens are proved.

A step of the table whose loss function a test writes is `table_step.run_step`. Steps that neither can run have files of
their own, which say why: `cp_steps`, `dynamic_steps`, `logit_table`, `bigram_step`, `train_rl_in_small`.
"""

import contextlib
import functools
import io
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import gpt_oracle
import megatron.core
import oracle
import tiny_gpt
import torch
from example_run import MODEL
from gpt_oracle import GptShape, Rollout
from logged_means import logged_means
from ranks import run_ranks
from step_samples import DIVISOR, dealt, step_samples
from steps import session_of, turns_of, weights_of
from table_step import Batch, relative_error, run_schedule, run_step, start, table_chunk, table_model
from tiny_gpt import (
    Case,
    Layout,
    Outcome,
    Ready,
    build,
    collect,
    config_of,
    gather_sharded_gradients,
    gpt_chunk,
    output_of,
    place_in,
    start_layout,
    tiny_config,
)
from torch import Tensor
from trainers import takes

from megatron_rl_loss import (
    Folded,
    LossAggregation,
    OutputHead,
    Samples,
    Tokens,
    ZigzagTHD,
    add_loss_aggregation_args,
    plan_step,
    ppo_clip_loss,
    prove_step,
)
from megatron_rl_loss.core.carriers import FORMS, IN_A_LOOP
from megatron_rl_loss.megatron.flags import AggregationSettings

STEP = step_samples(8)
TABLE = [float(loss) for sample in STEP for loss in sample.losses] + [0.0]
CP, DP = 2, 2
OF_SAMPLES: Any = {
    "ids": {"session": [session_of(sample) for sample in STEP], "turn": [turns_of(sample) for sample in STEP]}
}
#: What a loss function may return to the installed Megatron or to a loop, and whether with per-token loss: without it
#: Megatron's DDP averages, else it sums.
FORM_SETTINGS = [
    (form.name, per_token)
    for form in (*FORMS.values(), *IN_A_LOOP.values())
    if form.caller != "engine"
    for per_token, carrier in form.carriers.items()
    if per_token != bool(carrier.ddp) and takes(megatron.core.__version__, form.name, per_token)
]
#: (what a loss function returns, the micro-batch, their number) -> what Megatron's schedule is given
Engine = Callable[[Any, Any, int], Any]


class World(NamedTuple):
    """A layout, a model and a loop, with what its loss function returns to the loop; `settings` of a GPT's step."""

    layout: Layout
    model: Literal["table", "gpt"]
    loop: str  # of LOOPS
    mode: str
    form: str = "3-tuple"
    per_token: bool = False
    settings: Case | None = None

    @staticmethod
    def of(layout: Layout, case: Case) -> "World":
        per_token = case.scaling == "per token"
        return World(layout, "gpt", case.loop, case.mode, per_token=per_token, settings=case)

    @property
    def asked(self) -> str | None:
        """What its loss function passes as ``form=``; of a loop the plan knows it."""
        return None if self.form in IN_A_LOOP else self.form

    def __str__(self) -> str:
        return f"{self.layout}, {self.model}, {self.loop}, {self.form}{', per token' * self.per_token}, {self.mode}"

    @property
    def divisor(self) -> float | None:
        of_model = DIVISOR if self.model == "table" else gpt_oracle.DIVISOR
        return oracle.divisor_of(self.mode, of_model)

    @property
    def named(self) -> dict[str, Any]:
        return {"mode": self.mode, "divisor": self.divisor, "units": self.case.units}

    @property
    def case(self) -> Case:
        """The GPT's step: if not set, four micro-batches, which make whole rounds of virtual stages."""
        scaling = "per token" if self.per_token else "mean"
        return self.settings or Case(
            4, self.mode, "all", scaling, bf16=False, optimizer="plain", tied=False, lopsided=False
        )


@dataclass
class Model:
    """A model on this rank.

    Attributes:
        config: of its chunks.
        chunk_of: its part of a virtual stage, before DDP.
        in_ddp: all its chunks in DDP, with an optimizer or without.
        batches: its micro-batches.
        forward: what it gives for one of them, and the loss function of that, as of a user's forward step.
    """

    config: Any
    chunk_of: Callable[[int], Any]
    in_ddp: Callable[[], Ready]
    batches: list[Any]
    forward: Callable[[Any, Any, Any], tuple[Any, Callable[[Any], Any]]]


def table_in(world: World) -> Model:
    """Each pipeline stage has a table of its part of the losses, which they add up."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    layout = world.layout
    cp_rank, stages = mpu.get_context_parallel_rank(), layout.pp * layout.vp
    config = tiny_config(layout, per_token=world.per_token)
    part = [loss / stages for loss in TABLE]

    def as_hidden_states(losses: Tensor, numbers: Tensor) -> Tensor:
        return losses[numbers][:, None, None]  # as they travel between stages

    def chunk_of(stage: int) -> Any:
        chunk = table_chunk(part, config, as_hidden_states)
        chunk.pg_collection = ProcessGroupCollection.use_mpu_process_groups()  # which `pretrain` asks it for
        return chunk

    def in_ddp() -> Ready:
        options = DistributedDataParallelConfig()
        chunks = [DistributedDataParallel(config, options, chunk_of(stage)) for stage in range(layout.vp)]
        return Ready(config, chunks, None)

    def forward(chunk: Any, batch: Batch, microbatch: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        losses = chunk(batch.local_numbers(cp_rank, layout.cp).cuda())
        return losses, lambda losses: microbatch.loss(losses.flatten(), form=world.asked)

    batches = hands_of(mpu.get_data_parallel_rank(), layout.dp, layout.cp, 4)
    if layout.pp == 1 and world.loop in ("plan", "by hand"):  # which allow other numbers on other DP ranks
        batches = [batch for batch in batches if len(batch.samples)]
    return Model(config, chunk_of, in_ddp, batches, forward)


def gpt_in(world: World, rollouts: Sequence[Rollout], attention: str) -> Model:
    """The loss is PPO's, with two metrics."""
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import unwrap_model

    layout, case = world.layout, world.case
    config, head = config_of(layout, case, attention), case.head
    output_head = OutputHead(chunk_tokens=3, entropy=True) if head else None

    def in_ddp() -> Ready:
        ready = build(layout, case, attention)
        for chunk in map(unwrap_model, ready.chunks):
            if "main grad" in head and hasattr(chunk, "output_layer"):
                chunk.output_layer.gradient_accumulation_fusion = True
        return ready

    def losses_of(log_probs: Tensor, _: Any, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        clip: Any = {"clip_low": gpt_oracle.CLIP_LOW, "clip_high": gpt_oracle.CLIP_HIGH}
        policy = ppo_clip_loss(log_probs, old_log_probs, advantages, mask, **clip)
        return policy.per_token_loss, {"clip_fraction": policy.clipped, "ppo_kl": policy.ppo_kl}

    def forward(chunk: Any, batch: tiny_gpt.Batch, microbatch: Any) -> tuple[Any, Callable[[Any], Any]]:
        inputs = {"old_log_probs": batch.old_log_probs, "advantages": batch.advantages, "mask": batch.mask}
        context: Any = None
        if "one pass" in head:
            context = Folded(microbatch, losses_of, inputs, mask=batch.mask)
        elif head:
            context = Tokens(batch.mask)

        def loss_func(output: Any) -> Any:
            if "one pass" in head:
                summed, values = output
                metrics = {name: values[name] for name in ("clip_fraction", "ppo_kl")}
                return microbatch.loss(summed, metrics, form=world.asked)
            losses, metrics = losses_of(output[0] if head else -output, None, **inputs)
            return microbatch.loss(losses, metrics, form=world.asked)

        return output_of(chunk, batch, output_head, context), loss_func

    dp_rank, cp_rank = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
    batches = tiny_gpt.batches_of(rollouts, case, layout.dp, dp_rank, layout.cp, cp_rank)
    chunk_of = functools.partial(gpt_chunk, layout, case, config, attention=attention)
    return Model(config, chunk_of, in_ddp, [batch.cuda() for batch in batches], forward)


# ---- loops: they give the chunks, and the reports of the micro-batches


def run_chunks(world: World, ready: Ready, forward_step: Any, steps: Sequence[Any], wrap: Any, **options: Any) -> Any:
    """Megatron's schedule over the step: what it stored."""
    virtual = world.layout.vp > 1
    data: Any = [iter(steps) for _ in ready.chunks] if virtual else iter(steps)
    model = ready.chunks if virtual else ready.chunks[0]
    return run_schedule(forward_step, data, model, len(steps), wrap, **options)


def handed(model: Model) -> Any:
    """A user's forward step, in whose iterator `LossAggregation` has put micro-batches."""

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        microbatch = next(iterator)
        return model.forward(chunk, microbatch.data, microbatch)

    return forward_step


def by_adapter(world: World, model: Model) -> tuple[Ready, Any]:
    settings = AggregationSettings.resolve(with_per_token_loss=world.per_token, **world.named)
    ready, wrap = model.in_ddp(), LossAggregation(settings, lambda batch: batch.samples).wrap_schedule
    return ready, run_chunks(world, ready, handed(model), model.batches, wrap)


def by_plan(world: World, model: Model) -> tuple[Ready, Any]:
    """A plan: evaluated, then trained on in the schedule, whose first step is proved."""
    ready = model.in_ddp()
    plan = plan_step([batch.samples for batch in model.batches], model=ready.chunks, **world.named)
    steps, reports = list(zip(model.batches, plan, strict=True)), []

    def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
        return model.forward(chunk, *next(iterator))

    for evaluates in (True, False):
        with torch.set_grad_enabled(not evaluates):
            proves = contextlib.nullcontext() if evaluates else prove_step(ready.chunks, plan)
            with proves:
                stored = run_chunks(world, ready, forward_step, steps, None, forward_only=evaluates)
        if stored:
            plan.finish(stored)
            reports.append(logged_means(stored))
    assert reports[1:] == reports[:1]
    return ready, stored


def by_hand(world: World, model: Model) -> tuple[Ready, Any]:
    """A plan in a loop without the schedule, for which nobody knows Megatron."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import finalize_model_grads

    ready = model.in_ddp()
    groups = {"dp_group": mpu.get_data_parallel_group(), "cp_group": mpu.get_context_parallel_group()}
    samples = [batch.samples for batch in model.batches]
    gradients: Any = world.form
    plan = plan_step(samples, gradients=gradients, **groups, **world.named)
    for batch, microbatch in zip(model.batches, plan, strict=True):
        output, loss_func = model.forward(ready.chunks[0], batch, microbatch)
        loss_func(output).backward()
    finalize_model_grads(ready.chunks, None)
    return ready, [plan.finish()]


def by_pretrain(world: World, model: Model) -> tuple[Ready, Any]:
    """One iteration of Megatron's `pretrain`, which wraps the model, runs the schedule and logs."""
    import megatron_on_cpu
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.core.datasets import utils as dataset_utils
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

    training_log, step = training.training_log, handed(model)

    def catch(losses: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        logged.append(losses)
        return training_log(losses, *args, **options)

    megatron_on_cpu.prepare_training()
    vars(dataset_utils)["compile_helpers"] = lambda: None  # the wheel lacks its Makefile
    sys.argv = ["pretrain.py", *flags.split()]
    args = parse_and_validate_args(extra_args_provider=add_loss_aggregation_args)
    container = pretrain_cfg_container_from_args(args)
    training.training_log = catch
    try:
        with LossAggregation.from_args(args, lambda batch: batch.samples).attached():
            training.pretrain(  # by name, since 0.18 has them in another order
                container,
                train_valid_test_dataset_provider=provide_data,
                model_type=ModelType.encoder_or_decoder,
                forward_step_func=step,
                model_provider=provide_model,
            )
    finally:
        training.training_log = training_log
        num_microbatches_calculator.unset_num_microbatches_calculator()
        rerun_state_machine.destroy_rerun_state_machine()
        global_vars.destroy_global_vars()
    return Ready(model.config, chunks, None), logged


LOOPS: dict[str, Callable[[World, Model], tuple[Ready, Any]]] = {
    "adapter": by_adapter,
    "pretrain": by_pretrain,
    "plan": by_plan,
    "by hand": by_hand,
}


class Trained(NamedTuple):
    """The outcome of a step on one rank, and what was printed."""

    outcome: Outcome
    printed: str


def train(world: World, rollouts: Sequence[Rollout], attention: str = "packed") -> Trained:
    model = table_in(world) if world.model == "table" else gpt_in(world, rollouts, attention)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        ready, stored = LOOPS[world.loop](world, model)
    if ready.optimizer is not None and "distributed" in world.case.optimizer:
        gather_sharded_gradients(ready.chunks)
    gradients, weights, grad_norm = collect(ready.chunks, of_gradients=True), {}, 0.0
    if ready.optimizer is not None:
        succeeded, grad_norm, _ = ready.optimizer.step()
        assert succeeded
        weights = collect(ready.chunks, of_gradients=False)
    metrics = logged_means(stored) if stored and stored[0] else None
    return Trained(Outcome(gradients, weights, float(grad_norm), metrics), out.getvalue())


def train_all(
    layout: Layout, worlds: Sequence[World], rollouts: dict[GptShape, list[Rollout]], attention: str
) -> tuple[dict[str, int], list[Trained]]:
    """On a rank: its place, and its part of each world's step; `attention` as in `gpt_chunk`."""
    place = place_in(start_layout(layout))
    return place, [train(world, rollouts[world.case.shape(layout)], attention) for world in worlds]


def trained_in(
    layout: Layout, worlds: Sequence[World], attention: str = "packed"
) -> Iterator[tuple[World, list[tuple[dict[str, int], Outcome]], str]]:
    """One launch of a layout: of each world the places of ranks with their outcomes, and what the first printed."""
    rollouts = {shape: gpt_oracle.rollouts_of(shape) for shape in {world.case.shape(layout) for world in worlds}}
    by_rank = run_ranks(layout.world_size, train_all, layout, worlds, rollouts, attention)
    for k, world in enumerate(worlds):
        yield world, [(place, trained[k].outcome) for place, trained in by_rank], by_rank[0][1][k].printed


# ---- the errors of a GPT's step

# gradients, weights: the worst tensor's largest error, relative to its largest entry. updates: the same of what Adam's
# step added to the weights. overall: the norm of the error of all gradients, relative to the norm. grad_norm: relative.
# metrics: relative to the same metric of absolute values.
# Four layers at most, whose longest sums are over 32 channels or entries of the vocabulary.
FP32_BOUNDS = dict.fromkeys(("gradients", "overall", "grad_norm", "metrics", "weights"), oracle.chain_error(4, 32))
# Of a step that clipping and Adam's square root may make steeper in the gradient.
FP32_BOUNDS["updates"] = 5 * FP32_BOUNDS["gradients"]
# Results of products are rounded to 2^-9, some 2 * 4 * 6 in a chain forward and backward: sqrt(48) * 2^-9 = 0.014, and
# for an entry many times that. What the bounds tell apart nevertheless: test_bf16_bounds_would_see_another_mode.
# No bound for updates: storing a weight in bfloat16 rounds it by as much as a step of Adam moves it.
BF16_BOUNDS = {"gradients": 0.25, "overall": 0.1, "grad_norm": 0.05, "metrics": 0.02, "weights": 0.02}


def whole(outcomes: list[tuple[dict[str, int], Outcome]], of: str) -> Iterator[tuple[str, Tensor]]:
    """Every copy of every parameter's gradient or weight, put together over TP ranks: one a stage, CP and DP rank."""
    shards: dict[tuple[str, int, int, int], dict[int, tuple[Any, int | None]]] = defaultdict(dict)
    for place, outcome in outcomes:
        for name, shard in getattr(outcome, of).items():
            shards[name, place["pp"], place["cp"], place["dp"]][place["tp"]] = shard
    for (name, *_), by_rank in shards.items():
        parts = [torch.from_numpy(by_rank[rank][0]) for rank in sorted(by_rank)]
        dim = by_rank[0][1]
        for tensor in parts if dim is None else [torch.cat(parts, dim)]:
            yield name.rstrip("'"), tensor


def errors_of(outcomes: list[tuple[dict[str, int], Outcome]], expected: gpt_oracle.Step) -> dict[str, float]:
    """The worst relative errors over all ranks and tensors."""
    errors: dict[str, float] = dict.fromkeys(FP32_BOUNDS, 0.0)
    seen: dict[str, set[str]] = {"gradients": set(), "weights": set()}

    def note(what: str, error: float) -> None:
        errors[what] = max(errors[what], error if error == error else float("inf"))  # NaN must not pass

    squares: dict[str, list[float]] = defaultdict(list)
    for name, gradient in whole(outcomes, "gradients"):
        seen["gradients"].add(name)
        note("gradients", relative_error(gradient, expected.gradients[name]))
        squares[name].append(float((gradient - expected.gradients[name]).square().sum()))
    note("overall", sum(max(copies) for copies in squares.values()) ** 0.5 / expected.grad_norm)
    for name, weight in whole(outcomes, "weights"):
        seen["weights"].add(name)
        first = expected.first_weights[name]
        note("weights", relative_error(weight, expected.weights[name]))
        note("updates", relative_error(weight - first, expected.weights[name] - first))
    assert seen["gradients"] == seen["weights"] == set(expected.gradients)
    assert any(outcome.metrics is not None for _, outcome in outcomes)
    for _, outcome in outcomes:
        note("grad_norm", abs(outcome.grad_norm - expected.grad_norm) / expected.grad_norm)
        if outcome.metrics is not None:
            assert set(outcome.metrics) == set(expected.metrics)
            for name, value in outcome.metrics.items():
                note("metrics", abs(value - expected.metrics[name]) / expected.scales[name])
    return errors


def beyond_bounds(case: Case, errors: dict[str, float]) -> list[str]:
    """Names of errors that exceed their bounds."""
    bounds = BF16_BOUNDS if case.bf16 else FP32_BOUNDS
    return [what for what, bound in bounds.items() if not errors[what] <= bound]


# ---- planned steps of the table over CP x DP, by their parts


def hands_of(dp_rank: int, dp: int, cp: int, num_microbatches: int) -> list[Batch]:
    """Micro-batches of the table; on the last of several DP ranks one less, and a filler in its place."""
    hands = dealt(STEP, dp_rank, dp, num_microbatches)
    if dp == 1 or dp_rank < dp - 1 or len(hands) == 1:
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
    divisor = oracle.divisor_of(mode, DIVISOR)
    return torch.cat([*oracle.step_gradient(mode, STEP, divisor), torch.zeros(1)])


def as_returned(returned: Any, batch: Any, num_microbatches: int) -> Any:
    return returned


def planned_step(model: Any, plan: Any, batches: list[Batch], form: str, engine: Engine = as_returned) -> None:
    in_turn = iter(batches)

    def loss(microbatch: Any, losses: Tensor) -> Any:
        return engine(microbatch.loss(losses, form=form), next(in_turn), len(plan))

    run_step(model, list(zip(batches, plan, strict=True)), loss, fresh=False)


def errors_in(form: str, engine: Engine, *, per_token: bool) -> list[float]:
    """On a rank: the largest error of a token's gradient in the step of each mode, relative to the largest one."""
    _, dp_rank = start_ranks()
    batches, errors = batches_of(dp_rank), []
    for mode in oracle.MODES:
        divisor = oracle.divisor_of(mode, DIVISOR)
        model = table_model(TABLE, per_token=per_token)
        plan = plan_step([batch.samples for batch in batches], mode, divisor=divisor, model=model)
        planned_step(model, plan, batches, form, engine)
        errors.append(relative_error(model.module.losses.main_grad.cpu(), gradient_of(mode)))
    return errors
