"""A KL term to a reference policy: the policy loss has the launch's mode, the KL the sample mean.

The loss, ``pg_loss`` and ``kl`` (without its coefficient) are reported for the whole step. For a KL term that follows
the mode, leave the Term's mode out.
"""

from typing import Any

from torch import Tensor

from megatron_rl_loss import Microbatch, Term, kl_estimate, ppo_clip_loss


def loss_with_kl(
    microbatch: Microbatch,
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    advantages: Tensor,
    *,
    beta: float,
) -> Any:
    """The return value of a Megatron `loss_func`, from values of this context-parallel rank's tokens."""
    policy = ppo_clip_loss(log_probs, old_log_probs, advantages, microbatch)
    kl = kl_estimate(log_probs, ref_log_probs, microbatch)
    return microbatch.loss({"pg_loss": policy.per_token_loss, "kl": Term(kl, "sample_mean", coef=beta)})
