"""The judge of one's own losses: whether their backward weighs tokens as it is told, before any aggregation.

A wrong backward of per-token losses, of a fused kernel for instance, is seen by no check of weights, which begin behind
it. Two experiments find it: gradients of two random weightings of the losses must add up to the gradient of their sum,
and the slope of the weighted losses along a random direction must be the gradient's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.transfers import to_device

#: So many directions, of which half must show a wrong backward: along some its error is small by chance.
_DRAWS = 4
#: A difference of slopes within so many times their own uncertainty is none.
_SURE = 8.0
#: The least relative difference of slopes, whatever their uncertainty.
_LEAST = 0.02


class OwnLosses(NamedTuple):
    """One's own losses and what they are differentiated by.

    Attributes:
        losses: called without arguments, it gives the loss of each token, not reduced, with a graph; the same in every
            call, so without dropout.
        parameters: tensors that require grad, a weight or the hidden states that the losses are made of. They are moved
            by the check, and put back.
    """

    losses: Callable[[], Tensor]
    parameters: Sequence[Tensor]


def judge_backward(own: OwnLosses, *, seed: int = 0) -> str:
    """What is wrong with the backward of the losses, in words; "" where both experiments agree with it.

    Costs three forward and backward passes, and 20 forward passes. Raises ValueError for losses without a graph or that
    change from call to call, and for no parameter that requires grad.
    """
    losses = own.losses()
    parameters = [parameter for parameter in own.parameters if parameter.requires_grad]
    if not parameters or not losses.requires_grad:
        raise ValueError(
            "own losses without a graph: their backward is what is judged. Pass losses made of parameters that require "
            "grad."
        )
    if not torch.equal(losses, own.losses()):
        raise ValueError(
            "own losses that change from call to call: their gradients cannot be compared. Switch dropout off."
        )
    generator = torch.Generator().manual_seed(seed)

    def drawn(like: Tensor) -> Tensor:
        normal = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return to_device(normal, like.device, like.dtype)

    def gradient(weights: Tensor) -> Tensor:
        """float64, of all parameters, end to end."""
        total = (own.losses() * weights).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([part.detach().double().flatten() for part in parts])

    first, second = drawn(losses), drawn(losses)
    gradients = [gradient(weights) for weights in (first, second)]
    size = gradients[0].norm() + gradients[1].norm()
    apart = float((gradients[0] + gradients[1] - gradient(first + second)).norm() / size.clamp(min=1e-300))
    exact = torch.finfo(torch.promote_types(losses.dtype, parameters[0].dtype)).eps
    if apart > 100 * exact**0.75:
        return (
            f"the gradients of two weightings of the losses do not add up to that of their sum ({apart:.2g} apart): "
            "the backward ignores a part of what comes from above, such as its size"
        )
    slopes = [_slopes(own, parameters, first, gradients[0], drawn) for _ in range(_DRAWS)]
    wrong = [slope for slope in slopes if abs(slope[0] - slope[1]) > max(_SURE * slope[2], _LEAST * slope[3])]
    if 2 * len(wrong) >= _DRAWS:
        measured, stated, *_ = wrong[0]
        return (
            f"the weighted losses change by {measured:.3g} along a direction in which their gradient says "
            f"{stated:.3g}: the backward does not weigh each token by what comes from above, such as one that "
            "multiplies all tokens by the first one's"
        )
    return ""


def _slopes(
    own: OwnLosses, parameters: Sequence[Tensor], weights: Tensor, gradient: Tensor, drawn: Callable[[Tensor], Tensor]
) -> tuple[float, float, float, float]:
    """The measured slope along a random direction, the gradient's, the measured one's doubt, and their usual size."""
    directions = [drawn(parameter) for parameter in parameters]
    along = torch.cat([direction.double().flatten() for direction in directions])
    size = float(torch.cat([p.detach().double().flatten() for p in parameters]).norm().clamp(min=1e-3) / along.norm())
    exact = torch.finfo(weights.dtype).eps

    @torch.no_grad()
    def at(step: float) -> Tensor:
        before = [parameter.detach().clone() for parameter in parameters]
        try:
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=step)
            return own.losses().double() * weights.double()
        finally:
            for parameter, kept in zip(parameters, before, strict=True):
                parameter.copy_(kept)

    measured = []
    for step in (size * exact ** (1 / 3), 2 * size * exact ** (1 / 3)):
        change = (at(step) - at(-step)) / (2 * step)
        measured.append(float(change.sum()))
    rounding = float((at(0.0).abs().sum()) * exact / (size * exact ** (1 / 3)))
    doubt = abs(measured[0] - measured[1]) + rounding
    stated = float(gradient @ along)
    return measured[0], stated, doubt, float(gradient.norm() * along.norm() / len(along) ** 0.5)
