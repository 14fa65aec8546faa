"""A `forward_step` for `pretrain`: the clipped policy loss, and the divergence from a teacher at its K likeliest ids.

One pass of the head makes the log-probs of the token and of the K ids. The teacher's ids and log-probs, [tokens, K],
are columns of the pack, -inf where the server gave fewer. Modes and masks of the terms:

    LossAggregation.from_args(args, samples_of, terms={"kl": "token_mean"}, term_masks=["taught"])

where ``samples_of(pack)`` is ``Samples(..., term_masks={"taught": masks})``. For a teacher's hidden states take the
context ``Tokens(mask, teacher=Teacher(microbatch.local(hidden)[None], its_weight, kind="reverse_kl"))``; the model then
gives ``(log_probs, entropy, divergence)``.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss import AtIds, OutputHead, Term, Tokens, divergence_at_ids, next_microbatch, ppo_clip_loss

COLUMNS = ("tokens", "positions", "labels", "old_log_probs", "advantages", "teacher_ids", "teacher_log_probs")


def forward_step(data_iterator: Any, model: Any) -> Any:
    microbatch = next_microbatch(data_iterator)
    pack = microbatch.data
    columns = (microbatch.local(pack[name])[None].cuda() for name in COLUMNS)  # of this context-parallel rank
    tokens, positions, labels, old, advantages, ids, teacher = columns
    at_ids = torch.cat([torch.zeros_like(labels, dtype=torch.bool)[..., None], teacher > -torch.inf], dim=-1)
    output = OutputHead(chunk_tokens=1024)(
        model,
        tokens,
        positions,
        None,
        labels=torch.cat([labels[..., None], ids], dim=-1),
        context=Tokens(microbatch.tokens.mask, rest_without=at_ids),
        packed_seq_params=pack["packed"],
    )

    def loss_func(output: tuple[Tensor, None]) -> Any:
        log_probs, _ = output
        policy = ppo_clip_loss(log_probs[..., 0], old, advantages, microbatch).per_token_loss
        student = AtIds(log_probs[..., 1:-1], log_probs[..., -1])
        kl = divergence_at_ids(student, teacher, microbatch, kind="reverse_kl")
        return microbatch.loss({"pg": policy, "kl": Term(kl, coef=0.7, mask="taught")})

    return output, loss_func
