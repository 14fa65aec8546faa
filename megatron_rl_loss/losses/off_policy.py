"""Corrections where tokens were drawn by another policy: importance weights, masks, and what a rejected token counts.

The log-ratio is that of the trainer's old log-probs to those the inference engine sampled with, of a token or, summed
or averaged by `segment_sum` or `segment_mean`, of a sequence. What comes out is detached and multiplies a loss
(``importance_weights=``); back to tokens by `to_tokens`.

A weight of 0 rejects a token, which then still counts in every denominator. If survivors alone shall count, their masks
must be known before the step's first forward: `surviving_masks` makes them, for `Samples`, from data.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_choice, check_one_each, check_within

Outside = Literal["cap", "drop"]
Level = Literal["token", "sequence", "geometric"]


def importance_weights(log_ratio: Tensor, *, high: float, low: float = 0.0, outside: Outside = "cap") -> Tensor:
    """``r = exp(log_ratio)`` within [low, high], detached; outside, the bound (``cap``) or 0 (``drop``).

    | correction | log_ratio | outside |
    |---|---|---|
    | TIS | of tokens | cap |
    | IcePop, MIS of tokens | of tokens | drop |
    | sequence TIS | `segment_sum` of the tokens' | cap |
    | sequence MIS | `segment_sum` of the tokens' | drop |
    | geometric: the same with the mean | `segment_mean` of the tokens' | either |

    Args:
        log_ratio: of any shape: of tokens, or of samples, whose weights go to tokens by `to_tokens`.
        low, high: bounds of the ratio.

    Raises ValueError for bounds that are not ``0 <= low < high < inf``, and an unknown `outside`.
    Source: TIS: Ionides 2008; for RL post-training, Yao et al. 2025. Sequence TIS and MIS: Liu, Li et al. 2025, "When
    Speed Kills Stability". IcePop: Ling Team 2025, arXiv:2510.18855.
    """
    check_within("high", high, 0 < high < math.inf, "finite and above 0", "2.0 is usual; 5.0 for IcePop")
    check_within("low", low, 0 <= low < high, f"at least 0 and below high, {high:g}", "0 is usual; 0.5 for IcePop")
    check_choice("way with what is outside", outside, get_args(Outside))
    log_ratio = log_ratio.detach()
    lowest, highest = math.log(low) if low > 0 else -math.inf, math.log(high)
    within = log_ratio.clamp(lowest, highest).exp()
    return within if outside == "cap" else within.masked_fill((log_ratio < lowest) | (log_ratio > highest), 0)


def truncated_importance_weights(log_probs: Tensor, behavior_log_probs: Tensor, *, cap: float = 2.0) -> Tensor:
    """``min(exp(log_probs - behavior_log_probs), cap)``, detached: corrects for samples drawn by another policy.

    Typically `log_probs` are the trainer's recomputed old log-probs and `behavior_log_probs` those the inference engine
    sampled with. Raises ValueError for shapes that differ and for a cap that is not finite and above 0.
    Source: truncated importance sampling, Ionides 2008; for RL post-training, Yao et al. 2025 ("Your efficient RL
    framework secretly brings you off-policy RL training").
    """
    if log_probs.shape != behavior_log_probs.shape:
        raise ValueError(
            f"log-probs of shapes {tuple(log_probs.shape)} and {tuple(behavior_log_probs.shape)}: they must be equal. "
            "Cut both for the same rank, in the same order."
        )
    check_within("cap", cap, 0 < cap < math.inf, "finite and above 0", "2.0 is usual")
    return (log_probs - behavior_log_probs).detach().exp().clamp(max=cap)


def keep_sequences(mean_kl: Tensor, *, max_kl: float, advantages: Tensor | None = None) -> Tensor:
    """1.0 where a sequence's mean KL is at most `max_kl`, else 0.0; detached, of the shape of `mean_kl`.

    ``mean_kl`` is a `segment_mean`, at samples or, by `to_tokens`, at tokens: of ``old_log_probs - log_probs`` for
    off-policy sequence masking. With `advantages`, which broadcast to it, sequences of A >= 0 are always kept.

    Raises ValueError for a `max_kl` that is not finite and above 0, and advantages that do not broadcast.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556; whole sequences for all signs, as trust region
    masking, arXiv:2512.23075, whose criterion is the largest token's divergence, not the mean.
    """
    check_within("max_kl", max_kl, 0 < max_kl < math.inf, "finite and above 0", "around 0.05 is usual")
    far = mean_kl.detach() > max_kl
    if advantages is not None:
        if torch.broadcast_shapes(advantages.shape, far.shape) != far.shape:
            raise ValueError(
                f"advantages of shape {tuple(advantages.shape)} for log-probs of shape {tuple(far.shape)}: they must "
                "have that shape or broadcast to it. Give one a token."
            )
        far = far & (advantages < 0)
    return (~far).to(mean_kl.dtype)


def surviving_masks(
    loss_masks: Sequence[Tensor],
    log_ratios: Sequence[Tensor],
    *,
    high: float,
    low: float = 0.0,
    level: Level = "token",
) -> list[Tensor]:
    """Loss masks without what is rejected: of whole samples, uncut, for `Samples`, so that survivors alone count.

    >>> masks, log_ratios = [torch.tensor([1, 1, 0])], [torch.tensor([0.1, 3.0, 0.0])]
    >>> surviving_masks(masks, log_ratios, high=5.0)
    [tensor([1, 0, 0])]

    Every denominator is then that of what is left: tokens of rejected ones, and with ``--loss-aggregation-units
    active`` rollouts and prompt groups without a survivor, are not counted.

    Args:
        loss_masks: one 1-D tensor a sample.
        log_ratios: of each sample's tokens, ``old_log_probs - rollout_log_probs``, as long as its mask.
        low, high: bounds of the ratio.
        level: ``token`` looks at each token; ``sequence`` at exp of the sum over the sample's mask, ``geometric`` at
            exp of the mean, and rejects whole samples.

    Raises:
        ValueError: log-ratios that require grad (those of the policy in training are not known before the step's first
            forward: give them weights of 0 instead); lengths that differ; bounds as in `importance_weights`.
    """
    check_choice("level of rejection", level, get_args(Level))
    check_one_each("log-ratios", len(log_ratios), "loss masks", len(loss_masks))
    survivors = []
    for i, (mask, log_ratio) in enumerate(zip(loss_masks, log_ratios, strict=True)):
        if log_ratio.requires_grad:
            raise ValueError(
                f"log-ratios of sample {i} that require grad: who survives must be known before the step's first "
                "forward, when the policy's log-probs are not. Reject by old_log_probs - rollout_log_probs, or let "
                "rejected tokens count: give them importance weights of 0."
            )
        if log_ratio.shape != mask.shape:
            raise ValueError(
                f"mask and log-ratios of sample {i} of shapes {tuple(mask.shape)} and {tuple(log_ratio.shape)}: they "
                "must be equal. Cut both for the same rank, in the same order."
            )
        looked_at = log_ratio.double()
        if level != "token":
            total = torch.where(mask != 0, looked_at * mask, 0).sum()
            looked_at = total if level == "sequence" else total / mask.double().sum().clamp(min=1e-30)
        kept = importance_weights(looked_at, low=low, high=high, outside="drop") > 0
        survivors.append(torch.where(kept, mask, torch.zeros_like(mask)))
    return survivors
