"""Per-token policy losses, and their parts: KL, advantages, importance weights, sums over sequences.

Each is a function of tensors, by formula or by name, for use in loss functions. None of them aggregates: that is
`megatron_rl_loss.reduction`.
"""

from megatron_rl_loss import refuse_names
from megatron_rl_loss.losses.advantages import (
    gae,
    group_relative_advantages,
    rloo_advantages,
)
from megatron_rl_loss.losses.by_name import POLICY_LOSSES, check_goes_with, policy_loss
from megatron_rl_loss.losses.off_policy import importance_weights, keep_sequences, surviving_masks
from megatron_rl_loss.losses.scans import segment_scan
from megatron_rl_loss.losses.segments import segment_mean, segment_sum, to_tokens
from megatron_rl_loss.losses.sequence import gmpo_loss, gspo_loss
from megatron_rl_loss.losses.token import cispo_loss, dppo_loss, kl_estimate, ppo_clip_loss, sapo_loss, value_loss

__all__ = [
    "POLICY_LOSSES",
    "check_goes_with",
    "cispo_loss",
    "dppo_loss",
    "gae",
    "gmpo_loss",
    "group_relative_advantages",
    "gspo_loss",
    "importance_weights",
    "keep_sequences",
    "kl_estimate",
    "policy_loss",
    "ppo_clip_loss",
    "rloo_advantages",
    "sapo_loss",
    "segment_mean",
    "segment_scan",
    "segment_sum",
    "surviving_masks",
    "to_tokens",
    "value_loss",
]

__getattr__ = refuse_names(__name__)
