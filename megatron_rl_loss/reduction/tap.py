"""`tap`: the gradient that reaches a per-token loss is written down, and nothing else changes.

The gradient at a token's unreduced loss is everything that the loss function and the schedule do to that token on this
rank: its weight, their factors and the loss scale. What happens to gradients afterwards is for others to find out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.step.samples import Samples


@dataclass(frozen=True)
class Declared:
    """What a term of a loss was declared to be: ``coef`` times the aggregation of its values."""

    aggregation: Aggregation
    coef: float


@dataclass
class Tapped:
    """The losses of one micro-batch that went through a tap.

    Attributes:
        shape, dtype: of the losses.
        samples: what they are the losses of, where the tap was told.
        asked: the weight each of them should have, [num_local_tokens], where the tap was told.
        declared: the term's own aggregation and coefficient, where the tap was told.
        gradient: float32 (float64 of float64 losses) [numel]; None until the backward pass came by.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    samples: Samples | None = None
    asked: Callable[[], Tensor] | None = None
    declared: Declared | None = None
    gradient: Tensor | None = None
    source: "ReferenceType[Tensor] | None" = None  # not the tensor itself, which would keep its graph

    def keep(self, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        kept = gradient.detach().reshape(-1)
        kept = kept.to(torch.promote_types(kept.dtype, torch.float32), copy=True)
        self.gradient = kept if self.gradient is None else self.gradient + kept


@dataclass
class Taps:
    """What was tapped of one step on this rank, by term and micro-batch.

    Attributes:
        num_microbatches: how many were begun; who does not know where one begins leaves it at 0, and then each tap of a
            name is another micro-batch.
        heard: a term's losses, by micro-batch. A term that is tapped twice in a micro-batch is a second term.
    """

    num_microbatches: int = 0
    heard: dict[str, dict[int, Tapped]] = field(default_factory=dict)

    def begin_microbatch(self) -> None:
        self.num_microbatches += 1

    def again(self, losses: Tensor) -> Tapped | None:
        """What was tapped of these very losses already, in this micro-batch."""
        taken = [one for of_term in self.heard.values() for number, one in of_term.items() if self._is_now(number)]
        return next((one for one in taken if one.source is not None and one.source() is losses), None)

    def _is_now(self, number: int) -> bool:
        return self.num_microbatches in (0, number + 1)

    def add(self, name: str, tapped: Tapped) -> None:
        if self.num_microbatches == 0:
            of_name = self.heard.setdefault(name, {})
            of_name[len(of_name)] = tapped
            return
        number, term = 1, name
        while self.num_microbatches - 1 in self.heard.setdefault(term, {}):
            number += 1
            term = f"{name}#{number}"
        self.heard[term][self.num_microbatches - 1] = tapped


_listening: Taps | None = None
_asked: Aggregation | None = None


@contextmanager
def asking(aggregation: Aggregation) -> Iterator[None]:
    """For the duration of a ``with``, what a step is asked to aggregate by; an audit that begins in it looks it up."""
    global _asked
    before, _asked = _asked, aggregation
    try:
        yield
    finally:
        _asked = before


def asked_for() -> Aggregation | None:
    """What the step that runs was asked to aggregate by, if somebody said so."""
    return _asked


@contextmanager
def listening(taps: Taps) -> Iterator[Taps]:
    """For the duration of a ``with``, taps write into `taps`."""
    global _listening
    before, _listening = _listening, taps
    try:
        yield taps
    finally:
        _listening = before


def is_listening() -> bool:
    """Whether an audit listens."""
    return _listening is not None and not torch.compiler.is_compiling()


def tap(
    per_token_loss: Tensor,
    name: str = "pg",
    *,
    samples: Samples | None = None,
    asked: Callable[[], Tensor] | None = None,
    declared: Declared | None = None,
) -> Tensor:
    """The losses as they are; while an audit listens, the gradient that reaches them is written down.

    Call it in a loss function on the unreduced losses, before masks or weights are multiplied to them, once for each
    term: ``per_token_loss = tap(per_token_loss, samples=samples_of(batch))``. The reducers of this package do so
    themselves. Without an audit, without gradients, of losses that need none or while torch compiles it does nothing.

    Args:
        per_token_loss: float, this rank's losses in the order of the samples' layout.
        name: of the term.
        samples: what they are the losses of; where the audit is told (`samples_of`) it may be left out.
        asked: the weight each of them should have, where the caller knows.
        declared: the term's own aggregation and coefficient, where it has them.
    """
    if _listening is None or torch.compiler.is_compiling():
        return per_token_loss
    if torch.is_grad_enabled() and per_token_loss.requires_grad:
        again = _listening.again(per_token_loss)
        if again is not None:  # this package's reducers tap what a user has tapped
            again.samples, again.asked = again.samples or samples, again.asked or asked
            again.declared = again.declared or declared
            return per_token_loss
        shape, dtype = tuple(per_token_loss.shape), per_token_loss.dtype
        tapped = Tapped(shape, dtype, samples, asked, declared, source=ref(per_token_loss))
        per_token_loss.register_hook(tapped.keep)
        _listening.add(name, tapped)
    return per_token_loss
