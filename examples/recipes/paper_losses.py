"""Policy losses of papers, from sums over a sequence's tokens: copy one, or take it as a pattern for your own.

Each returns one loss per token that this rank holds; give it to ``microbatch.loss``. A scan of ones is a token's
position among those of its sequence that count, from 1. All ranks of a context-parallel group call it together.
"""

import torch
from torch import Tensor

from megatron_rl_loss import Microbatch, ppo_clip_loss, segment_quantile, segment_scan, segment_sum, to_tokens

#: Of CPPO: a token's largest divergence, the budget of a prefix's mean, and the weight of the last token.
WIDTH, BUDGET, LEAST = 0.2, 0.02, 0.8


def future_kl(log_probs: Tensor, old: Tensor, advantages: Tensor, microbatch: Microbatch) -> Tensor:
    """FIPO, arXiv:2603.19835: the sum of later log-ratios, discounted by position, weighs a token's advantage."""
    future = segment_scan((log_probs - old).detach(), microbatch, gamma=0.9, steps="all", reverse=True)
    return ppo_clip_loss(log_probs, old, advantages * future.exp().clamp(0.8, 1.2), microbatch).per_token_loss


def prefix_ratio(log_probs: Tensor, old: Tensor, advantages: Tensor, microbatch: Microbatch) -> Tensor:
    """CTPO, arXiv:2605.07331: the product of ratios up to the token, clipped by its position."""
    up_to, position = segment_scan([log_probs - old, torch.ones_like(old)], microbatch)
    width = 0.2 * position.sqrt()
    clipped = torch.minimum(torch.maximum(up_to, -width), width)
    return torch.maximum(-advantages * up_to.exp(), -advantages * clipped.exp())


def prefix_budget(log_probs: Tensor, old: Tensor, advantages: Tensor, microbatch: Microbatch) -> Tensor:
    """CPPO, arXiv:2606.10968 eq. 8 to 11: a token's weighted divergence within its bound and what its prefix has left.

    The weight falls from 1 to `LEAST` along the sequence. A token that A pulls back to the old policy stays.
    """
    change, ones = log_probs.detach().exp() - old.exp(), torch.ones_like(old)
    divergence, position = change.abs(), segment_scan(ones, microbatch)
    length = to_tokens(segment_sum(ones, microbatch), microbatch).view(old.shape)
    weight = 1 - (1 - LEAST) * (position - 1) / (length - 1).clamp(min=1)
    spent, weights = segment_scan([weight * divergence, weight], microbatch, exclusive=True)
    usual = segment_quantile(divergence, microbatch, q=0.9, interpolates=True).clamp(BUDGET, 2 * BUDGET)
    left = WIDTH + to_tokens(usual, microbatch).view(old.shape) * weights - spent
    keep = (advantages * change <= 0) | (weight * divergence <= left.clamp(max=WIDTH))
    return torch.where(keep, -advantages * (log_probs - old).exp(), 0)
