"""The tap of an engine's policy loss, by trials with other advantages; it also calls that of the terms beside it."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.engines.loss_trials import LossPaths, Trial, Trials, WeighedMicrobatch, first_of, tap_sum
from megatron_rl_loss.engines.places import places, swapped, value_at
from megatron_rl_loss.engines.terms_beside import largest, tap_beside
from megatron_rl_loss.extend import MORE_TERMS, Tap, follow_log_probs, is_observed, observed_taps, part_of_loss, taps_of

_EVEN = (
    f"{MORE_TERMS}: a part of its gradients does not change its sign with the advantages, as a policy loss's does. "
    "Somebody added a term of the advantages' sizes."
)
#: Each further trial has advantages that are smaller by this.
_SMALLER = 16


def tap_policy(
    row: LossPaths, stock: Callable[[], Any], arguments: dict[str, Any], describe: Callable[[], WeighedMicrobatch]
) -> Any:
    """The result of `stock()`, whose policy loss, and terms beside it, are measured while a step is observed.

    At a ratio r of 1 a policy loss has the slope -A * r by a token's log-prob. So with advantages +-f the token's
    weight in the loss is

        -(d loss(log_probs, +f) / d log_probs - d loss(log_probs, -f) / d log_probs) / 2

    where what does not depend on the advantage (KL, entropy) cancels. Where an engine clamps ratios near 1, r is e^-3,
    at which no advantage above 0 is clipped, and -f is 0. Other trials tell if the engine clamps what was changed: with
    smaller advantages slopes are then others, and proportional; at e^-4 they are others. Weights that are not those
    that were asked are then no evidence. Where r is e^-3, advantages below 0 are tried too, also at e^0.01, at which
    PPO does not clip them; if neither gives the same weights, theirs count.

    Args:
        row, stock, arguments: as in `Trials`.
        describe: called where the loss is tapped.
    """
    if not is_observed():
        return stock()
    values, keepers = {}, dict[str, list[Tensor]]()
    for path in filter(None, (row.log_probs, row.entropy)):
        for container, name in places(path, arguments)[:1]:
            values[path], keepers[path] = _kept(value_at(container, name))
    with swapped(arguments, values):
        result = stock()
    loss, seen = first_of(result), keepers[row.log_probs]
    if not seen or taps_of(loss) is None:
        return result
    measured, trials = describe(), Trials(row, stock, arguments)
    if measured.factors is not None:
        tapped = _tap_by_advantages(trials, measured, seen[0], loss)
        if tapped is not None and measured.is_followed and seen[0].requires_grad:
            tapped.at_log_probs = True
            layout = measured.samples.layout
            replicated = layout is not None and layout.is_whole
            follow_log_probs(seen[0], replicated=replicated, temperature=measured.temperature)
    if measured.beside is None:  # whatever else the loss is made of
        part_of_loss(loss)
        return result
    exchanged = [value_at(*place) for path in row.trial for place in places(path, arguments)]
    inputs = [*exchanged, *(value for kept in keepers.values() for value in kept)]
    part_of_loss(loss, [value for value in inputs if isinstance(value, Tensor) and value.requires_grad])
    tap_beside(trials, measured, seen[0], [*keepers.get(row.entropy, ())], loss)
    return result


def _kept(value: Any) -> tuple[Any, list[Tensor]]:
    """What stands for the value, and what it is: of a function, a list of all that it returns in calls to come."""
    if isinstance(value, Tensor) or not callable(value):
        return value, [] if value is None else [value]
    kept: list[Tensor] = []

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        kept.append(value(*args, **kwargs))
        return kept[-1]

    return keep, kept


def _tap_by_advantages(trials: Trials, measured: WeighedMicrobatch, log_probs: Tensor, loss: Tensor) -> Tap | None:
    """The tap of the loss, by its slopes at ratios of 1 or e^-3."""
    factors = to_device(measured.factors_of(trials.advantages), log_probs.device)
    row, leaf = trials.row, log_probs.detach().requires_grad_()

    @cache
    def slopes_of(size: float, lower: float) -> Tensor:
        """The slopes of a trial with advantages of that size, and old log-probs raised by `lower`."""
        at, reference = leaf.detach() + lower, leaf.detach()  # at which a KL penalty has no slope
        total = trials.loss(Trial(leaf, at, reference, factors * size))
        if not total.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(total, leaf, materialize_grads=True)[0]

    def weights_of(size: float, lower: float) -> Tensor:
        """The weights by trials of advantages of that size."""
        other, width = (0.0, 1) if row.clamps else (-size, 2)
        return (slopes_of(other, lower) - slopes_of(size, lower)) / (size * math.exp(-lower) * width)

    is_clamped = False
    if not log_probs.requires_grad:  # exchanged with old log-probs: no gradient goes to these
        weights = torch.zeros_like(leaf)
    elif row.clamps:
        weights = weights_of(row.size, 3.0)
        is_clamped = not _agree(weights, weights_of(row.size, 4.0))
        negative = [weights_of(-row.size, lower) for lower in (3.0, -0.01)]
        if not any(_agree(weights, others) for others in negative):
            positive, weights = weights, negative[-1]
            is_clamped |= bool(weights.abs().max() <= 2.0**-6 * positive.abs().max())
    else:
        weights, smaller = weights_of(row.size, 0.0), weights_of(row.size / _SMALLER, 0.0)
        is_clamped = not _agree(weights, smaller) and _agree(smaller, weights_of(row.size / _SMALLER**2, 0.0))
        if taps := observed_taps():
            above, below, at_zero = (slopes_of(signed * row.size, 0.0) for signed in (1, -1, 0))
            rounded = 64 * torch.finfo(leaf.dtype).eps * largest(above, below, at_zero)
            if largest(above + below - 2 * at_zero) > rounded:
                taps.added.add(_EVEN)
    tapped = tap_sum(
        loss, weights, measured.name, samples=measured.samples, coef=measured.coef, aggregation=measured.aggregation
    )
    if tapped is not None and is_clamped:
        tapped.doubt = "the engine clamps what a trial of its loss changes, so that its slopes are not its weights."
    return tapped


def _agree(weights: Tensor, others: Tensor) -> bool:
    """True if they differ by rounding alone; a clamp changes more."""
    return bool(((weights - others).abs() <= 2.0**-6 * weights.abs().max()).all())
