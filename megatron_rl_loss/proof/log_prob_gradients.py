"""The way of gradients from log-probs, to which an engine's loss sends them, to the model's output.

With p the probability of a token and t the temperature, a gradient g at its log-prob makes the absolute values of the
gradients by its logits add up to ``|g| * 2 * (1 - p) / t``. The sum over all tokens that arrives is compared with the
one that was sent: the backward of a gather over context-parallel ranks sums the gradients (ratio 1), or takes a rank's
own slice (1 / CP).
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import all_reduce, several
from megatron_rl_loss.core.taps import taps_of

#: The entries of a block whose absolute values are summed at once.
_BLOCK = 2**22


class FollowedLogProbs:
    """Log-probs that a tapped loss was computed of, with the gradient that reaches them."""

    def __init__(self, log_probs: Tensor, replicated: bool, temperature: float | None) -> None:
        self.source = ref(log_probs)  # the tensor itself would keep its graph
        self.values = log_probs.detach().reshape(-1).clone()
        self.replicated, self.temperature = replicated, temperature
        self.gradient = torch.zeros_like(self.values, dtype=torch.float64)
        log_probs.register_hook(self.add_gradient)

    def add_gradient(self, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        self.gradient += gradient.detach().reshape(-1)


@dataclass
class LogProbGradients:
    """The log-probs of a step on this rank, and sizes of gradients at the model's output: `Taps.log_prob_gradients`.

    Attributes:
        is_followed: gradients at the model's output are those by logits.
        is_replicated: each context-parallel rank holds all log-probs.
        output_sizes: of outputs that the schedule handed to the loss function.
        tapped_sizes: of outputs that went through `tap_output`; these then count.
    """

    log_probs: list[FollowedLogProbs] = field(default_factory=list)
    output_sizes: list[Tensor] = field(default_factory=list)
    tapped_sizes: list[Tensor] = field(default_factory=list)

    @property
    def is_followed(self) -> bool:
        return all(followed.temperature is not None for followed in self.log_probs)

    @property
    def is_replicated(self) -> bool:
        return any(followed.replicated for followed in self.log_probs)

    def keep_output(self, gradient: Tensor) -> None:
        """A hook of the model's output."""
        self.output_sizes.append(size_of_gradient(gradient))

    def sent_and_arrived(self, cp: Any) -> Tensor:
        """The two sums of this rank, float64 [2]; all ranks of the CP group call it together."""
        sums = torch.zeros(2, dtype=torch.float64)
        for followed in self.log_probs:
            gradient = followed.gradient.clone()
            for group in several(cp) if followed.replicated else ():
                all_reduce(gradient, group)
            sent = (gradient.abs() * 2 * (1 - followed.values.double().exp())).sum() / (followed.temperature or 1.0)
            sums[0] += sent.cpu() / (cp.size() if followed.replicated else 1)
        sums[1] = sum(float(size) for size in self.tapped_sizes or self.output_sizes)
        return sums


def follow_log_probs(log_probs: Tensor, *, replicated: bool, temperature: float | None) -> None:
    """Follow the gradient of log-probs to the model's output, once."""
    if (taps := taps_of(log_probs)) is not None:
        taps.log_prob_gradients = taps.log_prob_gradients or LogProbGradients()
        held = taps.log_prob_gradients.log_probs
        if not any(known.source() is log_probs for known in held):
            held.append(FollowedLogProbs(log_probs, replicated, temperature))


def tap_output(output: Tensor) -> Tensor:
    """The model's output as log-probs are computed from it.

    Needed where other terms of the loss are computed from it too, or the schedule is not handed it.
    """
    if (taps := taps_of(output)) is None:
        return output
    taps.log_prob_gradients = taps.log_prob_gradients or LogProbGradients()
    output, sizes = output.view_as(output), taps.log_prob_gradients.tapped_sizes
    output.register_hook(lambda gradient: sizes.append(size_of_gradient(gradient)))
    return output


def size_of_gradient(gradient: Tensor) -> Tensor:
    """The sum of absolute values, float64. Of blocks of rows, since torch would copy all to the type of its result."""
    rows = gradient.detach().reshape(-1, gradient.shape[-1] if gradient.dim() else 1)
    blocks = rows.split(max(_BLOCK // max(rows.shape[1], 1), 1))
    sizes = [torch.linalg.vector_norm(block, 1, dim=1, dtype=torch.float32).double().sum() for block in blocks]
    return torch.stack(sizes).sum()
