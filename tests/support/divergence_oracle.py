"""Divergences of a student p from a teacher q, stated a second time: from probabilities, in float64."""

import torch
from torch import Tensor


def divergence(p: Tensor, q: Tensor, kind: str, tail: str = "drop", beta: float = 0.5) -> Tensor:
    """Divergence per token of probabilities [..., ids], all above 0, differentiable; tails are equal with all ids."""
    if tail == "bucket":
        p, q = (torch.cat([probs, 1 - probs.sum(-1, keepdim=True)], -1) for probs in (p, q))
    if tail == "renormalise":
        p, q = (probs / probs.sum(-1, keepdim=True) for probs in (p, q))
    mixture = beta * q + (1 - beta) * p
    forward, reverse = q * (q / p).log(), p * (p / q).log()
    jsd = beta * q * (q / mixture).log() + (1 - beta) * p * (p / mixture).log()
    return {"forward_kl": forward, "reverse_kl": reverse, "jsd": jsd}[kind].sum(-1)


def logits_of(tokens: int, vocabulary: int, spread: float = 2.0, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits of student and teacher, exact in float32; the student is the teacher with noise."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(tokens, vocabulary, generator=generator) for _ in range(2))
    teacher, noises = (unit * scale for unit, scale in zip(drawn, (spread, noise), strict=True))
    return (teacher + noises).float(), teacher
