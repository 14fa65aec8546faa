"""Policy losses of papers, from sums over a sequence's tokens: copy one, or take it as a pattern for your own.

Each returns one loss per token that this rank holds; give it to ``microbatch.loss``. A scan of ones is a token's
position among those of its sequence that count, from 1. All ranks of a context-parallel group call it together.
"""

import torch
from torch import Tensor

from megatron_rl_loss import Microbatch, ppo_clip_loss, segment_scan


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
    """CPPO, arXiv:2606.10968: no loss from where the mean divergence of the tokens up to here is above a budget."""
    spent, position = segment_scan([(log_probs - old).detach().abs(), torch.ones_like(old)], microbatch)
    return torch.where(spent <= 0.1 * position, -advantages * (log_probs - old).exp(), 0)
