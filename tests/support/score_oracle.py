"""The mean of the score under a sampler, stated a second time: over the whole vocabulary, in float64."""

from typing import Any

import torch
from torch import Tensor


def modelled(q_at_ids: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    """The sampler's distribution [tokens, V]: as it said at its ids [tokens, K], elsewhere p scaled to the rest."""
    rest = torch.ones_like(p).scatter(1, ids, 0) * p
    rho = (1 - q_at_ids.sum(1, keepdim=True)) / rest.sum(1, keepdim=True).clamp(min=1e-6)
    return (rho * rest).scatter(1, ids, q_at_ids)


def weights_of(p: Tensor, q: Tensor, gate: dict[str, Any] | None) -> Tensor:
    """The importance weight p / q of each id as the policy loss has it: 1, clamped, or 0 outside."""
    ratio = p / q
    if gate is None:
        return torch.ones_like(ratio)
    low, high = gate.get("low", 0.0), gate["high"]
    if gate.get("action") == "clamp":
        return ratio.clamp(low, high)
    return ratio.where((ratio >= low) & (ratio <= high), 0)


def mean_score(log_p: Tensor, q: Tensor, gate: dict[str, Any] | None) -> Tensor:
    """``sum_v q(v) w(v) log p(v)`` [tokens], of log-probs of the whole vocabulary; w and q are constants."""
    p = log_p.detach().exp()
    weighed = q * weights_of(p, q, gate)
    return (weighed.masked_fill(q == 0, 0) * log_p).sum(-1)
