"""Optimizer steps of `tiny_gpt` on ranks, and their errors against the step that `gpt_oracle` states."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import gpt_oracle
import oracle
import torch
from gpt_oracle import GptShape, Rollout, Step
from logged_means import logged_means
from ranks import run_ranks
from table_step import relative_error, run_schedule, start
from tiny_gpt import Batch, Case, Layout, Ready, batches_of, build, cut_dim, full_name, gather_sharded_gradients
from torch import Tensor

from megatron_rl_loss import ppo_clip_loss
from megatron_rl_loss.megatron.flags import AggregationSettings

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


class Outcome(NamedTuple):
    """One rank's shards by full name, with the dimension in which each is cut (None: whole)."""

    gradients: dict[str, tuple[Any, int | None]]
    weights: dict[str, tuple[Any, int | None]]
    grad_norm: float
    metrics: dict[str, float] | None  # on the last pipeline stage


def collect(chunks: list[Any], of_gradients: bool) -> dict[str, tuple[Any, int | None]]:
    from megatron.core.utils import unwrap_model

    found = {}
    for chunk in chunks:
        model = unwrap_model(chunk)
        for name, parameter in model.named_parameters():
            value = parameter.main_grad if of_gradients else parameter.detach()
            key = full_name(name, model)
            # Both copies of a tied embedding must agree with the oracle: neither may hide the other.
            while key in found:
                key += "'"
            found[key] = (value.double().cpu().numpy().copy(), cut_dim(parameter))
    return found


def start_layout(layout: Layout) -> Any:
    """Megatron's groups on this rank: its parallel state."""
    virtual = {"virtual_pipeline_model_parallel_size": layout.vp} if layout.vp > 1 else {}
    return start(layout.tp, layout.pp, layout.cp, **virtual)


def place_in(mpu: Any) -> dict[str, int]:
    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "cp": mpu.get_context_parallel_rank(),
        "dp": mpu.get_data_parallel_rank(),
    }


def prepared(layout: Layout, case: Case, rollouts: Sequence[Rollout], attention: str) -> tuple[Ready, list[Batch]]:
    """A fresh model, and this rank's micro-batches."""
    from megatron.core import parallel_state as mpu

    dp_rank, cp_rank = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
    batches = batches_of(rollouts, case, layout.dp, dp_rank, layout.cp, cp_rank)
    return build(layout, case, attention), [batch.cuda() for batch in batches]


def mode_of(case: Case) -> dict[str, Any]:
    divisor = gpt_oracle.DIVISOR if case.mode == "constant" else None
    return {"mode": case.mode, "divisor": divisor, "units": case.units}


def settings_of(case: Case, **options: Any) -> AggregationSettings:
    return AggregationSettings.resolve(with_per_token_loss=case.scaling == "per token", **mode_of(case), **options)


def output_of(model: Any, batch: Batch, **options: Any) -> Any:
    params = batch.packed_seq_params()
    return model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=params, **options)


def run_batches(
    layout: Layout,
    ready: Ready,
    forward_step: Any,
    batches: list[Any],
    wrap: Any = None,
    watch: Any = None,
    **options: Any,
) -> Any:
    """Megatron's schedule over the step, with virtual stages where the layout has them: what it stored."""
    ready.optimizer.zero_grad()
    data: Any = [iter(batches) for _ in range(layout.vp)] if layout.vp > 1 else iter(batches)
    model = ready.chunks if layout.vp > 1 else ready.chunks[0]
    return run_schedule(forward_step, data if watch is None else watch(data), model, len(batches), wrap, **options)


def run_case(layout: Layout, case: Case, rollouts: Sequence[Rollout], attention: str) -> Outcome:
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import unwrap_model

    from megatron_rl_loss import Folded, LossAggregation, OutputHead, Tokens, plan_step

    head = case.head
    ready, batches = prepared(layout, case, rollouts, attention)
    for chunk in map(unwrap_model, ready.chunks):
        if "main grad" in head and hasattr(chunk, "output_layer"):
            chunk.output_layer.gradient_accumulation_fusion = True
    processor = {"output_processor": OutputHead(chunk_tokens=3, entropy=True)} if head else {}

    def losses_of(log_probs: Tensor, _: Any, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        clip: Any = {"clip_low": gpt_oracle.CLIP_LOW, "clip_high": gpt_oracle.CLIP_HIGH}
        policy = ppo_clip_loss(log_probs, old_log_probs, advantages, mask, **clip)
        return policy.per_token_loss, {"clip_fraction": policy.clipped, "ppo_kl": policy.ppo_kl}

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        given = next(iterator)
        microbatch = given[1] if planned else given
        batch: Batch = given[0] if planned else given.data
        inputs = {"old_log_probs": batch.old_log_probs, "advantages": batch.advantages, "mask": batch.mask}
        context: Any = {}
        if "one pass" in head:
            folded = Folded(microbatch, losses_of, inputs, mask=batch.mask)
            context = {"output_processor_context": folded}
        elif head:
            context = {"output_processor_context": Tokens(batch.mask)}
        output = output_of(model, batch, **processor, **context)

        def loss_func(output: Any) -> Any:
            if "one pass" in head:
                share, values = output
                means = {name: microbatch.sample_mean(values[name]) for name in ("clip_fraction", "ppo_kl")}
                return microbatch.scale_for_trainer(share, microbatch.report({"pg_loss": share, **means}))
            losses, metrics = losses_of(output[0] if head else -output, None, **inputs)
            return microbatch.loss(losses, metrics)

        return output, loss_func

    planned = case.loop == "plan"
    step: list[Any] = batches
    wrap = None
    if planned:
        plan = plan_step([batch.samples for batch in batches], model=ready.chunks, **mode_of(case))
        step = list(zip(batches, plan, strict=True))
    else:
        wrap = LossAggregation(settings_of(case), Batch.described).wrap_schedule
    metrics, evaluated, is_last = None, None, mpu.is_pipeline_last_stage(ignore_virtual=True)
    with torch.no_grad():
        stored: Any = run_batches(layout, ready, forward_step, step, forward_only=True) if planned else None
    if planned and is_last:
        plan.finish(stored)
        evaluated = logged_means(stored)
    stored = run_batches(layout, ready, forward_step, step, wrap)
    if is_last:
        if planned:
            plan.finish(stored)
        metrics = logged_means(stored)
        assert evaluated in (None, metrics)
    if "distributed" in case.optimizer:
        gather_sharded_gradients(ready.chunks)
    gradients = collect(ready.chunks, of_gradients=True)
    succeeded, grad_norm, _ = ready.optimizer.step()
    assert succeeded
    return Outcome(gradients, collect(ready.chunks, of_gradients=False), float(grad_norm), metrics)


def run_layout(
    layout: Layout, cases: list[Case], rollouts: dict[GptShape, list[Rollout]], attention: str
) -> tuple[dict[str, int], list[Outcome]]:
    """On one rank: its place, and its part of what each case gave; `attention` as in `gpt_chunk`."""
    place = place_in(start_layout(layout))
    return place, [run_case(layout, case, rollouts[case.shape(layout)], attention) for case in cases]


# ---- the errors


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


def errors_of(outcomes: list[tuple[dict[str, int], Outcome]], expected: Step) -> dict[str, float]:
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


def outcomes_in(
    layout: Layout, cases: list[Case], attention: str = "packed"
) -> Iterator[tuple[Case, list[tuple[dict[str, int], Outcome]]]]:
    rollouts = {shape: gpt_oracle.rollouts_of(shape) for shape in {case.shape(layout) for case in cases}}
    by_rank = run_ranks(layout.world_size, run_layout, layout, cases, rollouts, attention)
    for k, case in enumerate(cases):
        yield case, [(place, found[k]) for place, found in by_rank]


def beyond_bounds(case: Case, errors: dict[str, float]) -> list[str]:
    """Names of errors that exceed their bounds."""
    bounds = BF16_BOUNDS if case.bf16 else FP32_BOUNDS
    return [what for what, bound in bounds.items() if not errors[what] <= bound]
