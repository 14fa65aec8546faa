"""Policy losses of sequences: one ratio for all tokens of a sequence, which may lie on several context-parallel ranks.

Each token gets its sequence's loss, so a mode that averages within the sequence (``sample_mean``) returns that loss.
Each takes one collective forward, and one backward where its ratio has a gradient. Importance weights multiply the loss
alone: a rejected token counts in its sequence's ratio, unless its own is infinite.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, warn_on_one_rank
from megatron_rl_loss.core.errors import check_choice, check_within
from megatron_rl_loss.core.taps import reports_output
from megatron_rl_loss.losses.place import Place
from megatron_rl_loss.losses.ratio import PolicyInputs, PolicyLoss, RatioBounds
from megatron_rl_loss.losses.segments import segment_mean, segment_sum, to_tokens

#: The usual width of a clip range of single tokens is 0.2.
_WIDTH_OF_TOKENS = 0.1
Level = Literal["sequence", "token"]


@reports_output
def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Place,
    cp_group: Group | None = None,
    *,
    level: Level = "sequence",
    clip_low: float = 3e-4,
    clip_high: float | None = 4e-4,
    importance_weights: Tensor | None = None,
    mean_log_ratio: Tensor | None = None,
    per: str = "sample",
) -> PolicyLoss:
    """``max(-A s_i, -A clip(s_i))`` at each token of sequence i, ``s_i = exp(1/M_i sum_t m_t log r_t)``.

    By ``sample_mean`` this is GSPO; by ``constant`` with divisor 1, where a sequence counts as often as it has tokens,
    LUSPO.

    Args:
        log_probs, old_log_probs, advantages, clip_low, clip_high, importance_weights: as in `ppo_clip_loss`; the clip
            range is that of s_i, much narrower than a token's.
        local, cp_group, per: as in `segment_mean`; ``per="turn"`` for a ratio of each turn, by ids per token.
        level: ``token`` for GSPO-token, ``s_it = sg(s_i) * pi_t / sg(pi_t)``: the same value, and a gradient that stays
            with the token, which takes no collective. Advantages may then differ by token; with one per sequence the
            gradient under ``sample_mean`` is GSPO's.
        mean_log_ratio: `segment_mean` of ``log_probs - old_log_probs``, [num_samples], if you have computed it together
            with other statistics in one collective.

    Raises ValueError as `ppo_clip_loss` and `segment_mean`, and for an unknown level.
    Source: GSPO, arXiv:2507.18071 eq. 5 to 7, 13 and 14; LUSPO, arXiv:2602.05261 eq. 7; turns: arXiv:2511.20718.
    """
    check_choice("level of GSPO", level, get_args(Level))
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    bounds = RatioBounds.around_1(clip_low, clip_high)
    if min(clip_low, clip_low if clip_high is None else clip_high) >= _WIDTH_OF_TOKENS:
        warn_on_one_rank(
            f"clip_low={clip_low!r}, clip_high={clip_high!r} of GSPO: these are widths of a token's ratio. The mean "
            "ratio of a sequence stays far closer to 1, so next to nothing is clipped. Pass 3e-4 and 4e-4, the paper's."
        )
    if mean_log_ratio is None:
        mean_log_ratio = segment_mean(inputs.log_ratio, local, cp_group, per=per)
    sequence_log_ratio = to_tokens(mean_log_ratio, local, per=per).view(log_probs.shape)
    if level == "token":
        sequence_log_ratio = sequence_log_ratio.detach() + (inputs.log_probs - inputs.log_probs.detach())
    return bounds.surrogate(inputs, sequence_log_ratio)


@reports_output
def gmpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Place,
    cp_group: Group | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    importance_weights: Tensor | None = None,
    per: str = "sample",
) -> PolicyLoss:
    """``-A exp(1/M_i sum_t m_t c_t)``, the geometric mean of ratios that are clipped per token, *before* the mean.

    c_t is the log-ratio clipped on the side that A pushes to: below ``-clip_low`` where A < 0, above ``clip_high``
    elsewhere.

    Args:
        advantages: one per sequence in the paper; each token's sign decides its own clip.
        clip_low, clip_high: of the *log*-ratio: 0.4 bounds the ratio by exp(-0.4) and exp(0.4).
        log_probs, old_log_probs, importance_weights: as in `ppo_clip_loss`.
        local, cp_group, per: as in `segment_mean`.

    Raises ValueError as `ppo_clip_loss` and `segment_mean`. Source: GMPO, arXiv:2507.20673 eq. 4.
    """
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        check_within(name, clip, "(0, inf)", "0.4, of the log-ratio, is usual")
    bounds = RatioBounds(low=-clip_low, dual=math.inf, high=clip_high)
    bounded, clipped = bounds.clip(inputs.log_ratio, inputs.advantages)
    mean = to_tokens(segment_mean(bounded, local, cp_group, per=per), local, per=per).view(log_probs.shape)
    return inputs.policy_loss(-inputs.advantages * inputs.before_exp(mean).exp(), clipped)


@reports_output
def vespo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Place,
    cp_group: Group | None = None,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    importance_weights: Tensor | None = None,
    per: str = "sample",
) -> PolicyLoss:
    """``-sg(phi(w_i)) A log_probs``, ``phi(w) = w^k exp(lambda (1 - w))``, ``w_i = exp(sum_t m_t log r_t)``.

    A sequence's whole ratio, not its mean, weighs its tokens: 1 at ``w = 1``, towards 0 on both sides.
    `PolicyLoss.clipped` is 0 everywhere.

    Args:
        old_log_probs: of the policy that drew the tokens. To put capped ratios of tokens into w, as TRL does, take
            ``old_log_probs - importance_weights(old_log_probs - rollout_log_probs, high=2.0).log()``.
        k_positive, lambda_positive, k_negative, lambda_negative: of phi where A >= 0, and where A < 0.
        log_probs, advantages, importance_weights: as in `ppo_clip_loss`; each token's sign decides its own phi.
        local, cp_group, per: as in `segment_sum`.

    Raises ValueError as `ppo_clip_loss` and `segment_sum`, for a k outside (0, 100] and a lambda outside [1e-4, 1e4].
    Source: VESPO, arXiv:2602.10693 section 3.4.
    """
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    for name, power in (("k_positive", k_positive), ("k_negative", k_negative)):
        check_within(name, power, "(0, 100]", "2.0 and 3.0 are usual")
    for name, decay in (("lambda_positive", lambda_positive), ("lambda_negative", lambda_negative)):
        check_within(name, decay, "[1e-4, 1e4]", "3.0 and 2.0 are usual")
    sequence_log_ratio = segment_sum(inputs.log_ratio.detach(), local, cp_group, per=per)
    log_w = to_tokens(sequence_log_ratio, local, per=per).view(log_probs.shape)
    log_w = log_w.clamp(max=20)  # beyond, phi is 0 to the last bit
    negative = inputs.advantages < 0
    k = torch.full_like(log_w, k_positive).masked_fill(negative, k_negative)
    rate = torch.full_like(log_w, lambda_positive).masked_fill(negative, lambda_negative)
    phi = (k * log_w - rate * log_w.expm1()).exp()
    return inputs.policy_loss(-phi * inputs.advantages * inputs.log_probs)
