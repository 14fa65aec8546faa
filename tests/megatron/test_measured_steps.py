"""Losses with thresholds or survivors of the policy in training, over the whole step, in real Megatron.

A `ForwardPass` measures a small GPT before it is trained on; the gradient is compared with a float64 statement.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpt_oracle
import oracle
import pytest
import torch
from gpt_oracle import GptShape, Rollout
from logged_means import logged_means
from ranks import run_ranks
from table_step import relative_error
from tiny_gpt import (
    Batch,
    Case,
    Layout,
    Outcome,
    collect,
    output_of,
    place_in,
    prepared,
    run_batches,
    settings_of,
    start_layout,
)
from torch import Tensor
from world import FP32_BOUNDS, whole

from megatron_rl_loss import LossAggregation, OutputHead, Term, Tokens, keep_tokens, measure_tokens, pass_gap
from megatron_rl_loss.core.plan import Plan
from megatron_rl_loss.core.record import StepRecord, Trainer

pytestmark = pytest.mark.slow

ALONE = Layout(tp=1, sp=False, pp=1, vp=1, cp=1, dp=1)
DP_CP = Layout(tp=1, sp=False, pp=1, vp=1, cp=2, dp=2)
TP_PP = Layout(tp=2, sp=False, pp=2, vp=1, cp=1, dp=1)
SHAPE = GptShape(num_layers=2, tied=False, bf16=False)
LOW, HIGH, TOP = 0.8, 1.28, 0.8

# --- a user's code: what is kept of a plan's tokens


def keep_survivors(plan: Any) -> None:
    def ratio(microbatch: Any) -> Tensor:
        return (microbatch.log_probs["now"] - microbatch.data.old_log_probs).exp()

    keep_tokens(plan, "kept", lambda microbatch: (ratio(microbatch) > LOW) & (ratio(microbatch) < HIGH))


def keep_top(plan: Any) -> None:
    bound = measure_tokens(plan, lambda microbatch: microbatch.log_probs["entropy"]).quantile(TOP)
    keep_tokens(plan, "kept", lambda microbatch: microbatch.log_probs["entropy"] > bound)


# --- the same stated for all tokens of the step: mask entries, and how near a threshold a number is


class StepTokens(NamedTuple):
    mask: Tensor
    log_ratios: Tensor
    entropies: Tensor


Stated = tuple[Tensor, float]


def state_survivors(step: StepTokens) -> Stated:
    r = step.log_ratios.exp()
    margin = torch.minimum((r - LOW).abs(), (r - HIGH).abs())[step.mask > 0].min()
    return step.mask * ((r > LOW) & (r < HIGH)), float(margin)


def state_entropy(step: StepTokens) -> Stated:
    order = [int(i) for i in step.entropies.argsort() if step.mask[i] > 0]
    upto = step.mask[order].cumsum(0) - TOP * step.mask.sum()
    at = int((upto >= 0).nonzero()[0])
    kept = torch.zeros_like(step.mask).index_fill(0, torch.tensor(order[at + 1 :]), 1)
    beside = float(step.entropies[order[at + 1]] - step.entropies[order[at]])
    return step.mask * kept, min(beside, float(upto.abs().min()))


class Example(NamedTuple):
    mode: str
    keep: Callable[[Any], None]
    stated: Callable[[StepTokens], Stated]


EXAMPLES = {
    "survivors": Example("token_mean", keep_survivors, state_survivors),
    "entropy": Example("prompt_mean", keep_top, state_entropy),
}


@functools.cache
def expected(name: str) -> tuple[float, dict[str, Tensor], float]:
    """The step loss, its gradient, and the margin."""
    example, rollouts = EXAMPLES[name], gpt_oracle.rollouts_of(SHAPE)
    weights = {key: weight.requires_grad_() for key, weight in gpt_oracle.weights_of(SHAPE).items()}
    log_probs = [gpt_oracle.distributions_of(SHAPE, weights, rollout.tokens) for rollout in rollouts]
    sizes = [len(rollout.tokens) for rollout in rollouts]

    def joined(field: str) -> Tensor:
        return torch.tensor([value for rollout in rollouts for value in getattr(rollout, field)]).double()

    spread = torch.cat(log_probs)
    log_ratios = spread[torch.arange(len(spread)), joined("labels").long()] - joined("old_log_probs")
    tokens = StepTokens(joined("mask"), log_ratios.detach(), -(spread.exp() * spread).sum(-1).detach())
    masks, margin = example.stated(tokens)
    losses = -log_ratios.exp() * joined("advantages")
    samples = [
        oracle.Sample(loss, mask, rollout.rollout_id, rollout.prompt_id)
        for rollout, loss, mask in zip(rollouts, losses.split(sizes), masks.split(sizes), strict=True)
    ]
    step_loss = oracle.step_loss(example.mode, samples)
    gradients = torch.autograd.grad(step_loss, list(weights.values()))
    return float(step_loss.detach()), dict(zip(weights, gradients, strict=True)), margin


# --- on ranks


def keep_over(plan: Any, over: str, keep: Callable[[Any], None]) -> None:
    """Over the step, as it must be, or as a planted fault over what this rank holds of it."""
    if over == "step" or plan.samples is None:
        keep(plan)
        return
    trainer = Trainer(per_token_loss=plan.record.trainer.per_token_loss)
    record = StepRecord(plan.record.modes, plan.totals, len(plan), trainer)
    alone = Plan(plan.samples, record)
    alone.microbatches = plan.microbatches
    keep(alone)
    plan.record.totals = alone.totals


def trained(layout: Layout, runs: list[tuple[str, str]], rollouts: list[Rollout], dropout: float = 0.0) -> list[Any]:
    """On a rank: its place, and of each run its gradients, the logged loss, the gap of the passes, and warnings."""
    mpu = start_layout(layout)
    place = place_in(mpu)
    head, results = OutputHead(chunk_tokens=3, entropy=True), []
    for name, over in runs:
        example = EXAMPLES[name]
        scaling = "per token" if layout.tp > 1 else "mean"
        case = Case(3, example.mode, "all", scaling, False, "plain", tied=False, lopsided=False)
        ready, batches = prepared(layout, case, rollouts, "packed")
        for module in ready.chunks[0].modules() if dropout else ():
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = dropout
        ready.config.hidden_dropout = dropout
        gaps = [0.0]

        def call_model(microbatch: Any, model: Any) -> Any:
            return output_of(model, microbatch.data, head, Tokens(microbatch.data.mask))

        def before_step(forward: Any, example: Example = example, over: str = over) -> None:
            forward.log_probs(("now", "entropy"), call_model)
            if dropout:  # the pass itself has none
                forward.log_probs("again", call_model)
                assert all(
                    torch.equal(microbatch.log_probs["now"], microbatch.log_probs["again"])
                    for microbatch in forward.plan
                )
            keep_over(forward.plan, over, example.keep)

        def forward_step(iterator: Iterator[Any], model: Any, gaps: Any = gaps) -> Any:
            microbatch = next(iterator)

            def loss_func(output: Any) -> Any:
                gaps.append(float(pass_gap(microbatch, "now", output[0])))
                losses = -(output[0] - microbatch.data.old_log_probs).exp() * microbatch.data.advantages
                return microbatch.loss({"pg": Term(losses, mask="kept")})

            return call_model(microbatch, model), loss_func

        settings = settings_of(case, proof="error" if over == "step" else "off")
        wrap = LossAggregation(settings, Batch.described, before_step=before_step).wrap_schedule
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stored = run_batches(layout, ready, forward_step, batches, wrap)
        last = mpu.is_pipeline_last_stage(ignore_virtual=True)
        outcome = Outcome(collect(ready.chunks, of_gradients=True), {}, 0.0, logged_means(stored) if last else None)
        results.append((place, outcome, max(gaps), [str(warning.message) for warning in caught]))
    return results


def errors_of(by_rank: list[Any], number: int, name: str) -> tuple[float, float]:
    """The worst relative error of a gradient, and that of the logged loss."""
    loss, gradients, _ = expected(name)
    outcomes = [results[number][:2] for results in by_rank]
    errors = [relative_error(gradient, gradients[key]) for key, gradient in whole(outcomes, "gradients")]
    logged = [outcome.metrics["pg"] for _, outcome in outcomes if outcome.metrics is not None]
    return oracle.worst_of(*errors), oracle.worst_of(*(abs(value - loss) for value in logged))


@pytest.mark.parametrize("layout", [DP_CP, TP_PP], ids=str)
def test_the_gradient_is_that_of_the_step(layout: Layout) -> None:
    """Thresholds of a part of the step, which are planted in one layout, give another gradient."""
    planted = [(name, "rank") for name in EXAMPLES] if layout is DP_CP else []
    runs = [*((name, "step") for name in EXAMPLES), *planted]
    by_rank = run_ranks(4, trained, layout, runs, gpt_oracle.rollouts_of(SHAPE))
    for number, (name, over) in enumerate(runs):
        assert expected(name)[2] > 1e-5, name  # rounding to float32 moves no token across a threshold
        in_gradient, in_loss = errors_of(by_rank, number, name)
        if over != "step":
            assert in_gradient > 100 * FP32_BOUNDS["gradients"], (name, over)
            continue
        assert in_gradient < FP32_BOUNDS["gradients"], name
        assert in_loss < FP32_BOUNDS["metrics"], name
        for results in by_rank:
            _, _, gap, warned = results[number]
            assert gap == 0
            assert not [text for text in warned if "forward pass" in text]


def test_dropout_is_warned_of() -> None:
    (results,) = run_ranks(1, trained, ALONE, [("survivors", "step")], gpt_oracle.rollouts_of(SHAPE), 0.3)
    _, _, gap, warned = results[0]
    assert gap > 0.01
    assert any("a forward pass without dropout, of a model that trains with dropout 0.3" in text for text in warned)
    assert any("now of the training pass and of the forward pass before it differ by up to" in text for text in warned)
