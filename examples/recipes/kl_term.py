"""A KL term to a reference policy: the policy loss by the mode that was asked for, the KL by the sample mean.

Both are shares of the step, so they add up; `carry` hands their sum to Megatron. For a KL term that follows the mode,
add it to the per-token losses instead: `microbatch.loss(policy.per_token_loss + beta * kl)`.
"""

from typing import Any

from torch import Tensor

from megatron_rl_loss.losses import kl_estimate, ppo_clip_loss
from megatron_rl_loss.megatron import Microbatch


def loss_with_kl(
    microbatch: Microbatch,
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    advantages: Tensor,
    *,
    beta: float,
) -> Any:
    """What a Megatron `loss_func` returns, from values of this context-parallel rank's tokens."""
    policy = ppo_clip_loss(log_probs, old_log_probs, advantages, microbatch)
    kl = microbatch.sample_mean(kl_estimate(log_probs, ref_log_probs, microbatch))
    pg_loss = microbatch.pg_loss(policy.per_token_loss)
    return microbatch.carry(pg_loss + beta * kl, microbatch.report({"pg_loss": pg_loss, "kl": kl}))
