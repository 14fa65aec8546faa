"""Policy loss plus divergence from a teacher through the real Megatron: TP 2 with SP x CP 2 x DP 2 gives one gradient.

The recipe `distill.py` trains a tiny GPT in packed rows, ragged, with masked samples and packs.
The teacher is a GPT of other weights, whose likeliest ids come as a server gives them: some tokens have fewer. With
hidden states it is an output layer on random ones. The oracle is `gpt_oracle`'s model with the whole vocabulary, in
float64, sample by sample.
"""

from collections.abc import Callable, Iterator
from typing import Any

import gpt_oracle
import oracle
import pytest
import torch
from divergence_oracle import divergence
from gpt_oracle import GptShape, Rollout
from ranks import run_ranks
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

from megatron_rl_loss import LossAggregation, Samples, Teacher, Term, Tokens, next_microbatch, ppo_clip_loss

LAYOUT = Layout(tp=2, sp=True, pp=1, vp=1, cp=2, dp=2)
SHAPE, TEACHER = GptShape(2, False, False), GptShape(1, False, False)
K, COEF, WIDTH = 5, 0.7, 12
Setting = tuple[str, str, bool]
#: The modes of policy loss and divergence; whether the teacher gives hidden states.
SETTINGS: list[Setting] = [
    ("prompt_mean", "token_mean", False),
    ("token_mean", "prompt_mean", False),
    ("prompt_mean", "prompt_mean", True),
]

pytestmark = pytest.mark.slow


def likeliest(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [length, K] of the teacher; every third token has K - 2."""
    top = gpt_oracle.distributions_of(TEACHER, gpt_oracle.weights_of(TEACHER), rollout.tokens).topk(K)
    log_probs = top.values.float()
    log_probs[::3, K - 2 :] = -torch.inf
    return top.indices, log_probs


def hidden_states(rollout: Rollout) -> Tensor:
    """The teacher's last hidden states, [length, WIDTH], the same for the same tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(gpt_oracle.VOCAB, WIDTH, generator=generator)[torch.tensor(rollout.tokens)]


def teacher_weight() -> Tensor:
    return torch.randn(gpt_oracle.VOCAB, WIDTH, generator=torch.Generator().manual_seed(2))


def taught(rollout: Rollout) -> Tensor:
    """The mask of the divergence: every other of the tokens that count."""
    return torch.tensor(rollout.mask) * (torch.arange(len(rollout.mask)) % 2 == 0)


def pack_of(batch: Batch, rollouts: list[Rollout]) -> dict[str, Any]:
    """A whole pack, as a data loader lays it out: columns of all tokens, and the samples."""
    further: dict[str, Callable[[Rollout], Tensor]] = {
        "teacher_ids": lambda rollout: likeliest(rollout)[0],
        "teacher_log_probs": lambda rollout: likeliest(rollout)[1],
        "teacher_hidden": hidden_states,
    }
    pack = columns_of(batch, rollouts or gpt_oracle.rollouts_of(SHAPE)[:1], further)  # without samples too
    samples = Samples(
        [torch.tensor(rollout.mask) for rollout in rollouts],
        layout=batch.samples.layout,
        rollout_ids=[rollout.rollout_id for rollout in rollouts],
        prompt_ids=[rollout.prompt_id for rollout in rollouts],
        term_masks={"taught": [taught(rollout) for rollout in rollouts]},
    )
    return pack | {"packed": batch.packed_seq_params(), "samples": samples}


def from_hidden_states(data_iterator: Iterator[Any], model: Any) -> Any:
    """The recipe's `forward_step`, with the teacher's output layer."""
    from megatron.core import parallel_state as mpu

    from megatron_rl_loss import OutputHead

    microbatch = next_microbatch(data_iterator)
    batch = microbatch.data
    names = ("tokens", "positions", "labels", "old_log_probs", "advantages", "teacher_hidden")
    columns = (microbatch.local(batch[name])[None].cuda() for name in names)
    tokens, positions, labels, old, advantages, hidden = columns
    shard = teacher_weight().chunk(LAYOUT.tp)[mpu.get_tensor_model_parallel_rank()].cuda()
    context = Tokens(microbatch.tokens.mask, teacher=Teacher(hidden=hidden, weight=shard, kind="reverse_kl"))
    head = OutputHead(chunk_tokens=3)
    output = head(model, tokens, positions, None, labels=labels, context=context, packed_seq_params=batch["packed"])

    def loss_func(output: Any) -> Any:
        log_probs, _, kl = output
        policy = ppo_clip_loss(log_probs, old, advantages, microbatch).per_token_loss
        return microbatch.loss({"pg": policy, "kl": Term(kl, coef=COEF, mask="taught")})

    return output, loss_func


def gradients(rollouts: list[Rollout]) -> tuple[dict[str, int], list[Outcome]]:
    """On a rank: its place, and its part of the gradients in each setting."""
    from recipes.distill import forward_step

    place, outcomes = place_in(start_layout(LAYOUT)), []
    for mode, kl_mode, is_hidden in SETTINGS:
        case = Case(2, mode, "all", "mean", False, "plain", False, False)
        ready, batches = prepared(LAYOUT, case, rollouts, "packed")
        packs = [pack_of(batch, list(batch._rollouts)) for batch in batches]
        aggregation = LossAggregation(
            settings_of(case), lambda pack: pack["samples"], terms={"kl": kl_mode}, term_masks=["taught"]
        )
        step = from_hidden_states if is_hidden else forward_step
        run_batches(LAYOUT, ready, step, packs, aggregation.wrap_schedule)
        outcomes.append(Outcome(collect(ready.chunks, of_gradients=True), {}, 0.0, None))
    return place, outcomes


def expected(setting: Setting, tail: str = "bucket") -> dict[str, Tensor]:
    mode, kl_mode, is_hidden = setting
    weights = {name: weight.requires_grad_() for name, weight in gpt_oracle.weights_of(SHAPE).items()}
    policy_samples, teacher_samples = [], []
    for rollout in gpt_oracle.rollouts_of(SHAPE):
        all_log_probs = gpt_oracle.distributions_of(SHAPE, weights, rollout.tokens)
        advantages, old = (torch.tensor(values).double() for values in (rollout.advantages, rollout.old_log_probs))
        ratios = (all_log_probs[torch.arange(len(rollout.tokens)), torch.tensor(rollout.labels)] - old).exp()
        losses = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        if is_hidden:
            q = (hidden_states(rollout).double() @ teacher_weight().double().T).softmax(-1)
            kl = divergence(all_log_probs.exp(), q, "reverse_kl")
        else:
            ids, log_probs = likeliest(rollout)
            parts = zip(all_log_probs.gather(1, ids).exp(), log_probs.double().exp(), strict=True)
            kl = torch.stack([divergence(p[q > 0], q[q > 0], "reverse_kl", tail) for p, q in parts])
        policy_samples.append(oracle.Sample(losses, torch.tensor(rollout.mask), rollout.rollout_id, rollout.prompt_id))
        teacher_samples.append(oracle.Sample(kl, taught(rollout), rollout.rollout_id, rollout.prompt_id))
    loss = oracle.step_loss(mode, policy_samples) + COEF * oracle.step_loss(kl_mode, teacher_samples)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def test_policy_and_divergence_in_8_processes_are_those_of_one(record_property: Any) -> None:
    by_rank = run_ranks(LAYOUT.world_size, gradients, gpt_oracle.rollouts_of(SHAPE))
    right = {setting: expected(setting) for setting in SETTINGS}
    for k, setting in enumerate(SETTINGS):
        parts = list(whole([(place, outcomes[k]) for place, outcomes in by_rank], "gradients"))
        assert {name for name, _ in parts} == set(right[setting])

        def error(to: dict[str, Tensor], parts: list[tuple[str, Tensor]] = parts) -> float:
            return max(relative_error(gradient, to[name]) for name, gradient in parts)

        record_property("relative_error_of_policy_and_divergence", error(right[setting]))
        assert error(right[setting]) <= FP32_BOUNDS["gradients"], setting
        others = [to for other, to in right.items() if other != setting]  # negative control
        others += [] if setting[2] else [expected(setting, tail="drop")]
        assert min(map(error, others)) > 100 * FP32_BOUNDS["gradients"]
