"""A `forward_step` for `pretrain`: truncated importance weights, and score centering at the sampler's K likeliest ids.

One pass of the head makes the log-probs of the sampled token, of the K ids, and of all other ids together. The
sampler's ids and log-probs, [tokens, K], are columns of the pack, -inf where it gave fewer: `likeliest_ids` and
`ids_and_log_probs` of `megatron_rl_loss.losses.sampler_columns` make them of what vLLM and SGLang write. The sum of
both losses is the policy loss, which the mode of the launch divides. The gate is of tokens, as the weights are; IcePop
is ``Gate(low=0.5, high=5.0)``.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss import (
    AtIds,
    Gate,
    OutputHead,
    Tokens,
    importance_weights,
    next_microbatch,
    ppo_clip_loss,
    score_centering,
)

GATE = Gate(high=2.0, action="clamp")
COLUMNS = ("tokens", "positions", "labels", "old_log_probs", "advantages")
OF_SAMPLER = ("rollout_log_probs", "top_ids", "top_log_probs")


def forward_step(data_iterator: Any, model: Any) -> Any:
    microbatch = next_microbatch(data_iterator)
    pack = microbatch.data
    columns = (
        microbatch.local(pack[name])[None].cuda() for name in COLUMNS + OF_SAMPLER
    )  # of this context-parallel rank
    tokens, positions, labels, old, advantages, sampled, ids, sampler = columns
    at_ids = torch.cat([torch.zeros_like(labels, dtype=torch.bool)[..., None], sampler > -torch.inf], dim=-1)
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
        weights = importance_weights(old - sampled, GATE, microbatch)
        policy = ppo_clip_loss(log_probs[..., 0], old, advantages, microbatch, importance_weights=weights)
        trainer = AtIds(log_probs[..., 1:-1], log_probs[..., -1])
        centred = score_centering(trainer, sampler, advantages, microbatch, gate=GATE)
        return microbatch.loss(policy.per_token_loss + centred)

    return output, loss_func
