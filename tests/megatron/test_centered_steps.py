"""The recipe `score_centering.py` through the real Megatron: PP 2 x TP 2 with SP x CP 2 gives one gradient.

A tiny GPT in packed rows, ragged, with masked samples. The sampler is the same GPT of other weights; some tokens have
fewer ids. So it is with the same lines in the loss of a chunk (`Folded`), in one pass from hidden states. The oracle is
`gpt_oracle`'s model with the whole vocabulary, in float64, sample by sample.
"""

from collections.abc import Callable
from typing import Any

import gpt_oracle
import oracle
import pytest
import torch
from gpt_oracle import GptShape, Rollout
from ranks import run_ranks
from score_oracle import mean_score, modelled
from table_step import relative_error
from tiny_gpt import (
    Batch,
    Case,
    Layout,
    Outcome,
    collect,
    columns_of,
    place_in,
    prepared,
    run_batches,
    settings_of,
    start_layout,
)
from torch import Tensor
from world import FP32_BOUNDS, whole

from megatron_rl_loss import LossAggregation

LAYOUT = Layout(tp=2, sp=True, pp=2, vp=1, cp=2, dp=1)
SHAPE, SAMPLER = GptShape(2, False, False), GptShape(1, False, False)
K, HIGH = 5, 2.0
#: How the loss is made, and the mode that divides it.
STEPS = [("recipe", "token_mean"), ("recipe", "prompt_mean"), ("folded", "prompt_mean")]

pytestmark = pytest.mark.slow


def sampler_of(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the sampled tokens, [length]; ids and log-probs [length, K], of every third token K - 2."""
    all_log_probs = gpt_oracle.distributions_of(SAMPLER, gpt_oracle.weights_of(SAMPLER), rollout.tokens)
    top = all_log_probs.topk(K)
    log_probs = top.values.float()
    log_probs[::3, K - 2 :] = -torch.inf
    sampled = all_log_probs[torch.arange(len(rollout.tokens)), torch.tensor(rollout.labels)].float()
    return sampled, top.indices, log_probs


def pack_of(batch: Batch, rollouts: list[Rollout]) -> dict[str, Any]:
    further: dict[str, Callable[[Rollout], Tensor]] = {
        "rollout_log_probs": lambda rollout: sampler_of(rollout)[0],
        "top_ids": lambda rollout: sampler_of(rollout)[1],
        "top_log_probs": lambda rollout: sampler_of(rollout)[2],
    }
    pack = columns_of(batch, rollouts or gpt_oracle.rollouts_of(SHAPE)[:1], further)  # without samples too
    return pack | {"packed": batch.packed_seq_params(), "samples": batch.samples}


def folded_step(data_iterator: Any, model: Any) -> Any:
    """The recipe in one pass: the losses are made of each chunk's log-probs."""
    from recipes.score_centering import COLUMNS, GATE, OF_SAMPLER

    from megatron_rl_loss import (
        AtIds,
        Folded,
        OutputHead,
        importance_weights,
        next_microbatch,
        ppo_clip_loss,
        score_centering,
    )

    microbatch = next_microbatch(data_iterator)
    pack = microbatch.data
    columns = [microbatch.local(pack[name])[None] for name in COLUMNS + OF_SAMPLER]
    tokens, positions, labels, old, advantages, sampled, ids, sampler = columns

    def per_token(log_probs: Tensor, _: Any, **of: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ones = torch.ones(len(log_probs))  # masked tokens are in no chunk
        weights = importance_weights(of["old"] - of["sampled"], GATE)
        policy = ppo_clip_loss(log_probs[:, 0], of["old"], of["advantages"], ones, importance_weights=weights)
        trainer = AtIds(log_probs[:, 1:-1], log_probs[:, -1])
        centred = score_centering(trainer, of["sampler"], of["advantages"], ones, gate=GATE)
        return policy.per_token_loss + centred, {}

    inputs = {"old": old, "advantages": advantages, "sampled": sampled, "sampler": sampler}
    at_ids = torch.cat([torch.zeros_like(labels, dtype=torch.bool)[..., None], sampler > -torch.inf], dim=-1)
    output = OutputHead(chunk_tokens=3)(
        model,
        tokens,
        positions,
        None,
        labels=torch.cat([labels[..., None], ids], dim=-1),
        context=Folded(microbatch, per_token, inputs, rest_without=at_ids),
        packed_seq_params=pack["packed"],
    )
    return output, lambda output: microbatch.loss(output[0])  # log-probs of several ids are no metric


def gradients(rollouts: list[Rollout]) -> tuple[dict[str, int], list[Outcome]]:
    """On a rank: its place, and its part of the gradients of each step."""
    from recipes.score_centering import forward_step

    place, outcomes = place_in(start_layout(LAYOUT)), []
    for way, mode in STEPS:
        case = Case(2, mode, "all", "mean", False, "plain", False, False)
        ready, batches = prepared(LAYOUT, case, rollouts, "packed")
        packs = [pack_of(batch, list(batch._rollouts)) for batch in batches]
        aggregation = LossAggregation(settings_of(case), lambda pack: pack["samples"])
        step = folded_step if way == "folded" else forward_step
        run_batches(LAYOUT, ready, step, packs, aggregation.wrap_schedule)
        outcomes.append(Outcome(collect(ready.chunks, of_gradients=True), {}, 0.0, None))
    return place, outcomes


def expected(mode: str, *, centred: bool = True) -> dict[str, Tensor]:
    gate = {"high": HIGH, "action": "clamp"}
    weights = {name: weight.requires_grad_() for name, weight in gpt_oracle.weights_of(SHAPE).items()}
    samples = list[oracle.Sample]()
    for rollout in gpt_oracle.rollouts_of(SHAPE):
        all_log_probs = gpt_oracle.distributions_of(SHAPE, weights, rollout.tokens)
        advantages, old = (torch.tensor(values).double() for values in (rollout.advantages, rollout.old_log_probs))
        sampled, ids, log_q = sampler_of(rollout)
        ratios = (all_log_probs[torch.arange(len(rollout.tokens)), torch.tensor(rollout.labels)] - old).exp()
        truncated = (torch.tensor(rollout.old_log_probs) - sampled).double().exp().clamp(max=HIGH)
        losses = -truncated * torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        rows = list[Tensor]()
        for t in range(len(rollout.tokens)):
            there, log_p = log_q[t] > -torch.inf, all_log_probs[t : t + 1]
            q = modelled(log_q[t, there].double().exp()[None], ids[t, there][None], log_p.detach().exp())
            rows.append(mean_score(log_p, q, gate)[0])
        losses = losses + advantages * torch.stack(rows) * centred
        samples.append(oracle.Sample(losses, torch.tensor(rollout.mask), rollout.rollout_id, rollout.prompt_id))
    return dict(zip(weights, torch.autograd.grad(oracle.step_loss(mode, samples), list(weights.values())), strict=True))


def test_a_centred_policy_loss_in_8_processes_is_that_of_one(record_property: Any) -> None:
    by_rank = run_ranks(LAYOUT.world_size, gradients, gpt_oracle.rollouts_of(SHAPE))
    for k, (way, mode) in enumerate(STEPS):
        parts = list(whole([(place, outcomes[k]) for place, outcomes in by_rank], "gradients"))
        right, uncentred = expected(mode), expected(mode, centred=False)
        assert {name for name, _ in parts} == set(right)
        error = max(relative_error(gradient, right[name]) for name, gradient in parts)
        record_property("relative_error_of_score_centering", error)
        assert error <= FP32_BOUNDS["gradients"], (way, mode)
        off = max(relative_error(gradient, uncentred[name]) for name, gradient in parts)
        assert off > 100 * FP32_BOUNDS["gradients"]  # negative control
