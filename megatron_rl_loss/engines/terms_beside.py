"""The tap of the terms beside an engine's policy loss, which are all that a trial with advantages of 0 has."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.engines.loss_trials import PENALTIES, Penalty, Trial, Trials, WeighedMicrobatch, tap_sum
from megatron_rl_loss.extend import MORE_TERMS, observed_taps

_ADDED = (
    f"{MORE_TERMS}: with advantages of 0, it has gradients that these do not explain. Somebody added a term, or the KL "
    "penalty has another estimator."
)


class _Draw(NamedTuple):
    """What a token of a trial has: numbers that every dtype has, at none of which a usual term has the slope 0.

    Attributes:
        log_prob: p log p has a slope at each but -1.
        above_old: log-prob less the old policy's: below 0 in one draw, above in the other.
        above_reference: log-prob less the reference's; a trial has it with both signs.
        entropy: the token's.
    """

    log_prob: float
    above_old: float
    above_reference: float
    entropy: float


def _drawn(seed: int, length: int, sign: int) -> list[_Draw]:
    rng = random.Random(seed)
    log_probs = [eighth / 8 for eighth in range(-24, -1) if eighth != -8]
    few = [eighth / 8 for eighth in range(2, 7)]
    return [
        _Draw(rng.choice(log_probs), sign * rng.choice(few), rng.choice(few), rng.choice(few)) for _ in range(length)
    ]


#: Two draws of a table, from which tokens take what they have by their numbers; prime, so that columns of rows differ.
_DRAWS = _drawn(1, 61, -1), _drawn(2, 61, 1)


class _Slopes(NamedTuple):
    """Slopes of a trial's loss by log-probs and by entropies."""

    log_probs: Tensor
    entropies: Tensor


class _Point(NamedTuple):
    """The slopes at a draw's values, with the reference at both sides."""

    distances: Tensor
    ratios: Tensor
    above: _Slopes
    below: _Slopes


def tap_beside(
    trials: Trials, measured: WeighedMicrobatch, log_probs: Tensor, entropies: list[Tensor], loss: Tensor
) -> None:
    """Tap the terms beside the policy loss, whose slopes are all that is left at advantages of 0.

    With d = log-prob - reference's, a KL penalty of the weight w has the slope w k'(d) by a log-prob, so that w is the
    difference of the slopes at d and -d / the difference of k'. An entropy bonus has its weight as its slope by an
    entropy. What is left of slopes, at either of two draws, is another term's.
    """
    assert measured.beside is not None
    points = [_at(draws, trials, measured, log_probs, entropies) for draws in _DRAWS]
    slopes = [side for point in points for side in (point.above, point.below)]
    size = largest(*(slope for side in slopes for slope in side))
    weights: dict[str, Tensor] = {}
    if (kl := measured.beside.get("kl")) is not None:
        kl_slopes = [_slopes_of(kl.estimator, point) for point in points]
        weights["kl"] = _weights_of_kl(points[0], *kl_slopes[0])
        named = [weights["kl"] * slope for pair in kl_slopes for slope in pair]
    else:
        named = [torch.zeros_like(side.log_probs) for side in slopes]
    left = [side.log_probs - kl_slope for side, kl_slope in zip(slopes, named, strict=True)]
    if (bonus := measured.beside.get("entropy")) is not None:
        weights["entropy"] = slopes[0].entropies
        if bonus.mask is not None and entropies:
            weights["entropy"] = weights["entropy"].masked_fill((entropies[0] == 0) & (bonus.mask == 0), 0)
    left += [side.entropies - (slopes[0].entropies if bonus is not None else 0.0) for side in slopes]
    for name, weight in weights.items():
        term = measured.beside[name]
        samples = term.samples or measured.samples
        tapped = tap_sum(loss, weight, name, samples=samples, coef=term.coef, aggregation=term.aggregation)
        if tapped is not None:
            tapped.at_log_probs, tapped.doubt = measured.is_followed, tapped.doubt or term.doubt
    is_explained = largest(*left) <= 64 * torch.finfo(log_probs.dtype).eps * size
    if not is_explained and not any(term.doubt for term in measured.beside.values()) and (taps := observed_taps()):
        taps.added.add(_ADDED)


def _at(
    draws: list[_Draw], trials: Trials, measured: WeighedMicrobatch, log_probs: Tensor, entropies: list[Tensor]
) -> _Point:
    """The slopes where each token has what its draw says."""

    def column(value: Callable[[_Draw], float], like: Tensor) -> Tensor:
        table = to_device(torch.tensor([value(draw) for draw in draws], dtype=like.dtype), like.device)
        return table[torch.arange(like.numel(), device=like.device) % len(draws)].view(like.shape)

    leaf = column(lambda draw: draw.log_prob, log_probs).requires_grad_()
    bonus = column(lambda draw: draw.entropy, entropies[0] if entropies else log_probs).requires_grad_()
    above_old = column(lambda draw: draw.above_old, log_probs)
    distances = trials.row.distance * column(lambda draw: draw.above_reference, log_probs)
    like = trials.advantages if measured.factors is None else measured.factors
    advantages = torch.zeros_like(like, device=log_probs.device)

    def slopes_at(distances: Tensor) -> _Slopes:
        old, reference = leaf.detach() - above_old, leaf.detach() - distances
        total = trials.loss(Trial(leaf, old, reference, advantages), bonus)
        if not total.requires_grad:
            return _Slopes(torch.zeros_like(leaf), torch.zeros_like(bonus))
        return _Slopes(*torch.autograd.grad(total, (leaf, bonus), materialize_grads=True))

    return _Point(distances, above_old.exp(), slopes_at(distances), slopes_at(-distances))


def _slopes_of(estimator: str | Penalty, point: _Point) -> tuple[Tensor, Tensor]:
    """The slopes of that KL penalty by a log-prob, at the distances of a point and at their opposites."""
    penalty = PENALTIES[estimator] if isinstance(estimator, str) else estimator
    above, below = (sign * point.distances for sign in (1, -1))
    both = torch.stack([above, below]).requires_grad_()
    (slopes,) = torch.autograd.grad(penalty(both, point.ratios).sum(), both)
    return slopes[0], slopes[1]


def _weights_of_kl(point: _Point, high: Tensor, low: Tensor) -> Tensor:
    """The weights that explain the difference of the slopes; where that of the penalty is 0, their mean."""
    first, second = point.above.log_probs, point.below.log_probs
    is_odd = high != low
    return torch.where(is_odd, (first - second) / torch.where(is_odd, high - low, 1), (first + second) / (high + low))


def largest(*values: Tensor) -> float:
    """The largest size of a number in these tensors, 0 without one."""
    return max((float(value.abs().max()) for value in values if value.numel()), default=0.0)
