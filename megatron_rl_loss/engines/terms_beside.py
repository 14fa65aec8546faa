"""The tap of the terms beside an engine's policy loss, which are all that a trial with advantages of 0 has."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.engines.loss_trials import Trials, Value, WeighedMicrobatch, given, made_by, tap_sum
from megatron_rl_loss.engines.places import places, value_at
from megatron_rl_loss.extend import observed_taps

#: A trial of the terms beside the policy loss has this log-prob, and the reference's lower and higher by half of 1:
#: numbers that every dtype has.
_LOG_PROB, _ABOVE_REFERENCE = -1.0, (0.5, -0.5)
#: Slopes of KL penalties by the log-prob at these.
_SLOPES_OF_KL = {
    "k1": (1.0, 1.0), "abs": (1.0, -1.0), "k2": _ABOVE_REFERENCE,
    "k3": (1 - math.exp(-0.5), 1 - math.exp(0.5)),
}  # fmt: skip
_ADDED = (
    "The loss has more than the terms that the config names: with advantages of 0, it has gradients that these do not "
    "explain. Somebody added a term, or the KL penalty has another estimator."
)


def tap_beside(
    trials: Trials, measured: WeighedMicrobatch, log_probs: Tensor, entropies: list[Tensor], loss: Tensor
) -> None:
    """Tap the terms beside the policy loss, whose slopes are all that is left at advantages of 0.

    With d = log-prob - reference's, a KL penalty of the weight w has the slope w k'(d) by a log-prob, so that w is the
    difference of two slopes / the difference of k'. An entropy bonus has its weight as its slope by an entropy. What is
    left of slopes is another term's.
    """
    assert measured.beside is not None
    leaf = torch.full_like(log_probs, _LOG_PROB).requires_grad_()
    bonus = torch.zeros_like(entropies[0] if entropies else leaf).requires_grad_()
    inputs, row = [leaf, bonus], trials.row
    for container, name in places(row.output, trials.arguments) if row.output else ():
        inputs += [value_at(container, name)] * bool(value_at(container, name).requires_grad)
    like = trials.advantages if measured.factors is None else measured.factors
    advantages = torch.zeros_like(like, device=log_probs.device)

    def slopes_at(above_reference: float) -> list[Tensor]:
        def reference(make: str | Value, *of_trial: Tensor) -> Any:
            return made_by(make)(*of_trial) - above_reference

        others: dict[str, Any] = {path: partial(reference, make) for path, make in row.reference.items()}
        others |= {row.entropy: given(bonus)} if row.entropy else {}
        total = trials.loss(leaf, advantages, others)
        slopes = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
        nothing = [torch.zeros_like(of) for of in inputs[:2]] + [leaf.new_zeros(())] * (len(inputs) - 2)  # no logits
        return [none if slope is None else slope for none, slope in zip(nothing, slopes, strict=True)]

    (first, of_entropy, *further), (second, *_) = (slopes_at(distance) for distance in _ABOVE_REFERENCE)
    size = _largest(first, second, of_entropy, *further)
    weights = {}
    if (kl := measured.beside.get("kl")) is not None:
        high, low = _SLOPES_OF_KL[kl.estimator]
        weights["kl"] = (first - second) / (high - low) if high != low else (first + second) / 2
        first, second = first - high * weights["kl"], second - low * weights["kl"]
    if (of_bonus := measured.beside.get("entropy")) is not None:
        weights["entropy"] = of_entropy
        if of_bonus.mask is not None and entropies:
            weights["entropy"] = of_entropy.masked_fill((entropies[0] == 0) & (of_bonus.mask == 0), 0)
        of_entropy = torch.zeros_like(of_entropy)
    for name, of_term in weights.items():
        term = measured.beside[name]
        tapped = tap_sum(
            loss, of_term, name, samples=term.samples or measured.samples, coef=term.coef, aggregation=term.aggregation
        )
        if tapped is not None:
            tapped.at_log_probs = measured.is_followed
    left = _largest(first, second, of_entropy, *further)
    if left > 64 * torch.finfo(leaf.dtype).eps * size and (taps := observed_taps()):
        for known in [known for of_name in taps.losses.values() for known in of_name.values()]:
            known.added = _ADDED


def _largest(*values: Tensor) -> float:
    return max((float(of_input.abs().max()) for of_input in values if of_input.numel()), default=0.0)
