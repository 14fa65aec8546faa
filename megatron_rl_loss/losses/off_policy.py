"""Corrections where another policy drew the tokens: importance weights, and masks of rejected tokens.

The log-ratio is the trainer's old log-prob less the inference engine's. The results are detached and multiply a loss
(``importance_weights=``); `to_tokens` spreads results of sequences over their tokens.

A weight of 0 rejects a token, which still counts in every denominator. If only the survivors shall count, their masks
must be known before the step is trained on: `surviving_masks` makes them from data, for `Samples`, and `Plan.keep` from
the policy in training.
"""

import logging
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice, check_float, check_one_each, check_within, require
from megatron_rl_loss.core.masks import Mask
from megatron_rl_loss.losses.ratio import at_least_float32, check_shape

logger = logging.getLogger(__name__)

#: So many log-ratios are not all above 0 by chance.
_MANY = 16
Outside = Literal["cap", "drop"]
Level = Literal["token", "sequence", "geometric"]


@torch.inference_mode(False)
def importance_weights(log_ratio: Tensor, *, high: float, low: float = 0.0, outside: Outside = "cap") -> Tensor:
    """``r = exp(log_ratio)`` within [low, high], detached; outside, the bound (``cap``) or 0 (``drop``).

    For log-ratios of tokens ``cap`` is TIS and ``drop`` IcePop or MIS. Their `segment_sum` gives weights of sequences,
    their `segment_mean` geometric weights. `log_ratio` has any shape; subtract log-probs in float32 at least. On the
    host, values that look like ratios or probabilities are warned of: all above 0, and many, or near 1 on average.

    Raises ValueError for bounds that are not ``0 <= low < 1 <= high < inf``, and an unknown `outside`.
    Source: TIS: Ionides 2008; for RL post-training, Yao et al. 2025. Sequence TIS and MIS: Liu, Li et al. 2025, "When
    Speed Kills Stability". IcePop: Ling Team 2025, arXiv:2510.18855.
    """
    _check_bounds(low, high)
    check_choice("outside", outside, get_args(Outside))
    check_float("log_ratio", log_ratio, "Pass old_log_probs - rollout_log_probs")
    log_ratio = at_least_float32(log_ratio.detach())
    _warn_of_ratios(log_ratio)
    return _within(log_ratio, low, high, outside)


def _check_bounds(low: float, high: float) -> None:
    """Bounds of the ratio itself, not widths: a token of which both policies think alike has ratio 1."""
    check_within("high", high, "[1, inf)", "2.0 is usual; 5.0 for IcePop")
    check_within("low", low, "[0, 1)", "0 is usual; 0.5 for IcePop")


def _warn_of_ratios(log_ratios: Tensor) -> None:
    """Log values that are no log-ratios; of a device they are not read.

    By Jensen's inequality the mean log-ratio of tokens that the other policy drew is below 0, if they are many. So
    not all of them are above 0, as ratios and probabilities are.
    """
    if log_ratios.is_cpu and log_ratios.numel() > 1 and not torch.compiler.is_compiling():
        least, mean = log_ratios.amin(), log_ratios.mean()
        if least > 0 and (log_ratios.numel() >= _MANY or 0.8 < mean < 1.25):
            logger.warning(
                f"log-ratios of {float(least):.3g} at least, and {float(mean):.3g} on average: these look like ratios "
                "or probabilities, of which not one is below 0. Pass old_log_probs - rollout_log_probs, without exp."
            )


def _within(log_ratio: Tensor, low: float, high: float, outside: Outside) -> Tensor:
    lowest, highest = math.log(low) if low > 0 else -math.inf, math.log(high)
    weights = log_ratio.clamp(lowest, highest).exp()
    return weights if outside == "cap" else weights.masked_fill((log_ratio < lowest) | (log_ratio > highest), 0)


@torch.inference_mode(False)
def keep_sequences(mean_kl: Tensor, *, max_kl: float, advantages: Tensor | None = None) -> Tensor:
    """1.0 where a sequence's mean KL is at most `max_kl`, else 0.0; detached, of the shape of `mean_kl`.

    ``mean_kl`` is a `segment_mean`, of samples or, by `to_tokens`, at tokens. Off-policy sequence masking takes that
    of ``old_log_probs - log_probs``. With `advantages`, which broadcast to it, sequences of A >= 0 are always kept.
    NaN stays NaN, and so is the loss that it multiplies.

    Raises ValueError for a `max_kl` that is not finite and above 0, and advantages that do not broadcast.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556; whole sequences for all signs, as trust region
    masking, arXiv:2512.23075, whose criterion is the largest token's divergence, not the mean.
    """
    check_float("mean_kl", mean_kl, "Pass segment_mean(old_log_probs - log_probs, ...)")
    check_within("max_kl", max_kl, "(0, inf)", "around 0.05 is usual")
    rejected = mean_kl.detach() > max_kl
    if advantages is not None:
        check_shape("advantages", advantages, mean_kl, broadcasts=True)
        rejected = rejected & (advantages < 0)
    return (~rejected).to(mean_kl.dtype).masked_fill(mean_kl.isnan(), math.nan)


def surviving_masks(
    loss_masks: Sequence[Mask], log_ratios: Sequence[Mask], *, high: float, low: float = 0.0, level: Level = "token"
) -> list[Tensor]:
    """Loss masks with 0 where a token is rejected: of whole samples, uncut, for `Samples`, so only survivors count.

    They are on the device of the log-ratios.

    >>> surviving_masks([torch.tensor([1, 1, 0])], [torch.tensor([0.1, 3.0, 0.0])], high=5.0)
    [tensor([1, 0, 0])]

    Args:
        loss_masks: one per sample: a 1-D tensor, array or list.
        log_ratios: per sample, ``old_log_probs - rollout_log_probs`` of its tokens, as long as its mask.
        low, high: bounds of the ratio.
        level: ``token`` judges each token. ``sequence`` judges exp of the sum over the sample's mask, ``geometric`` exp
            of the mean; both reject whole samples.

    Raises ValueError for log-ratios that require grad (those of the policy in training are not known before the step's
    first forward: give them weights of 0, or use `Plan.keep`), NaN at active tokens, lengths that differ, and as
    `importance_weights`.
    """
    check_choice("level of rejection", level, get_args(Level))
    check_one_each("log-ratios", len(log_ratios), "loss masks", len(loss_masks))
    _check_bounds(low, high)
    survivors, active = list[Tensor](), list[Tensor]()
    for i, pair in enumerate(zip(loss_masks, log_ratios, strict=True)):
        mask, log_ratio = (row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu") for row in pair)
        mask = mask.to(log_ratio.device, non_blocking=mask.is_cpu)
        check_shape(f"the log-ratios of sample {i}", log_ratio, mask)
        if log_ratio.requires_grad:
            raise ValueError(
                f"log-ratios of sample {i} that require grad: survivors must be known before the step's first forward "
                "pass, which makes these log-probs. Use old_log_probs - rollout_log_probs, or give rejected tokens "
                "importance weights of 0, which leaves them in the counts."
            )
        require(
            ~(log_ratio.isnan() & (mask != 0)).any(),
            lambda i=i: f"log-ratios of sample {i} with NaN at an active token",  # type: ignore[misc]
            "no bound can judge them, so the token would be dropped. Mask the token, or mend its log-probs.",
        )
        judged = log_ratio.double()
        if judged.is_cpu:
            active.append(judged[mask != 0])
        if level != "token":
            judged = (judged * mask).masked_fill(mask == 0, 0).sum()
            judged = judged if level == "sequence" else judged / mask.double().sum().clamp(min=1e-30)
        kept = _within(judged, low, high, "drop") > 0
        survivors.append(mask.masked_fill(~kept, 0))
    if active:
        _warn_of_ratios(torch.cat(active))
    return survivors
