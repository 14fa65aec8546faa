"""Policy loss plus divergence from a teacher through the real Megatron: TP 2 with SP x CP 2 x DP 2 gives one gradient.

A tiny GPT in packed rows, ragged, with fully masked samples and packs; the teacher is a GPT of other weights, whose
likeliest ids come as a server gives them: some tokens have fewer. One model call makes the log-probs of the token and
of the K ids. The oracle is `gpt_oracle`'s model with the whole vocabulary, in float64, sample by sample.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import gpt_oracle
import oracle
import pytest
import torch
from divergence_oracle import divergence
from gpt_oracle import GptShape, Rollout
from gpt_steps import FP32_BOUNDS, Outcome, collect, output_of, place_in, prepared, run_batches, start_layout, whole
from ranks import run_ranks
from table_step import relative_error
from tiny_gpt import Case, Layout
from torch import Tensor

from megatron_rl_loss import Term, divergence_at_ids, plan_step, ppo_clip_loss

LAYOUT = Layout(tp=2, sp=True, pp=1, vp=1, cp=2, dp=2)
SHAPE, TEACHER = GptShape(2, False, False), GptShape(1, False, False)
K, COEF = 5, 0.7
#: Of the policy loss, and of the divergence: its mode, or that of the policy; the latter's own mask.
MODES = [("prompt_mean", None, None), ("token_mean", None, None), ("prompt_mean", "token_mean", "correct")]

pytestmark = pytest.mark.slow


def taught(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [length, K] of the teacher; every third token has K - 2."""
    found = gpt_oracle.distributions_of(TEACHER, gpt_oracle.weights_of(TEACHER), rollout.tokens).topk(K)
    log_probs = found.values.float()
    log_probs[::3, K - 2 :] = -torch.inf
    return found.indices, log_probs


def correct(rollouts: Any) -> list[Tensor]:
    """Masks of the divergence: every other of the tokens that count."""
    return [torch.tensor(one.mask) * (torch.arange(len(one.mask)) % 2 == 0) for one in rollouts]


def column(rollouts: list[Rollout], bounds: Tensor, part: int) -> Tensor:
    """What the teacher says about a whole pack [tokens, K], as a data loader would lay it out."""
    made = torch.zeros(int(bounds[-1]), K, dtype=(torch.int64, torch.float32)[part])
    for rollout, (begin, _) in zip(rollouts, pairwise(bounds.tolist()), strict=False):  # filler is behind
        made[begin : begin + len(rollout.tokens)] = taught(rollout)[part]
    return made


def gradients(rollouts: list[Rollout]) -> tuple[dict[str, int], list[Outcome]]:
    """On a rank: its place, and its part of the gradients of each case."""
    from megatron_rl_loss import OutputHead, Tokens

    place, found = place_in(start_layout(LAYOUT)), []
    for mode, own_mode, mask in MODES:
        case = Case(2, mode, "all", "mean", False, "plain", False, False)
        ready, batches = prepared(LAYOUT, case, rollouts, "packed")
        samples = [batch.described(correct) for batch in batches]
        plan = plan_step(samples, mode, model=ready.chunks, term_masks=["correct"])

        def forward_step(iterator: Iterator[Any], model: Any, own: Any = (own_mode, mask)) -> Any:
            batch, microbatch = next(iterator)
            columns = (column(batch._rollouts, batch.bounds.cpu(), part) for part in range(2))
            ids, teacher = (microbatch.local(one)[None].cuda() for one in columns)
            batch.labels = torch.cat([batch.labels[..., None], ids], -1)
            head = {"output_processor": OutputHead(chunk_tokens=3), "output_processor_context": Tokens(batch.mask)}
            log_probs, _ = output_of(model, batch, **head)

            def loss_func(log_probs: Tensor) -> Any:
                clip = {"clip_low": gpt_oracle.CLIP_LOW, "clip_high": gpt_oracle.CLIP_HIGH}
                of_policy = batch.old_log_probs, batch.advantages, microbatch
                policy = ppo_clip_loss(log_probs[..., 0], *of_policy, **clip).per_token_loss
                kl = divergence_at_ids(log_probs[..., 1:], teacher, microbatch, kind="reverse_kl")
                return microbatch.loss({"pg": policy, "kl": Term(kl, own[0], coef=COEF, mask=own[1])})

            return log_probs, loss_func

        run_batches(LAYOUT, ready, forward_step, list(zip(batches, plan, strict=True)))
        found.append(Outcome(collect(ready.chunks, of_gradients=True), {}, 0.0, None))
    return place, found


def expected(mode: str, own_mode: str | None, mask: str | None, tail: str = "bucket") -> dict[str, Tensor]:
    weights = {name: weight.requires_grad_() for name, weight in gpt_oracle.weights_of(SHAPE).items()}
    of_policy, of_teacher = [], []
    rollouts = gpt_oracle.rollouts_of(SHAPE)
    for one, seen in zip(rollouts, correct(rollouts), strict=True):
        of_all = gpt_oracle.distributions_of(SHAPE, weights, one.tokens)
        advantages, old = (torch.tensor(x).double() for x in (one.advantages, one.old_log_probs))
        ratios = (of_all[torch.arange(len(one.tokens)), torch.tensor(one.labels)] - old).exp()
        bounded = ratios.clamp(1 - gpt_oracle.CLIP_LOW, 1 + gpt_oracle.CLIP_HIGH)
        losses = -torch.minimum(ratios * advantages, bounded * advantages)
        ids, teacher = taught(one)
        kl = [
            divergence(p[given].exp(), q[given].double().exp(), "reverse_kl", tail)
            for p, q, given in zip(of_all.gather(1, ids), teacher, teacher > -torch.inf, strict=True)
        ]
        names = one.rollout_id, one.prompt_id
        of_policy.append(oracle.Sample(losses, torch.tensor(one.mask), *names))
        of_teacher.append(oracle.Sample(torch.stack(kl), seen if mask else torch.tensor(one.mask), *names))
    loss = oracle.step_loss(mode, of_policy) + COEF * oracle.step_loss(own_mode or mode, of_teacher)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def test_policy_and_divergence_in_8_processes_are_those_of_one(record_property: Any) -> None:
    by_rank = run_ranks(LAYOUT.world_size, gradients, gpt_oracle.rollouts_of(SHAPE))
    for k, setting in enumerate(MODES):
        right, dropped = expected(*setting), expected(*setting, tail="drop")
        parts = list(whole([(place, found[k]) for place, found in by_rank], "gradients"))
        assert {name for name, _ in parts} == set(right)
        error = max(relative_error(one, right[name]) for name, one in parts)
        record_property("relative_error_of_policy_and_divergence", error)
        assert error <= FP32_BOUNDS["gradients"], setting
        others = [*(expected(*other) for other in MODES if other != setting), dropped]  # negative control
        for other in others:
            assert max(relative_error(one, other[name]) for name, one in parts) > 100 * FP32_BOUNDS["gradients"]
