"""`tap` writes down the gradient that reaches a per-token loss, and changes nothing.

The gradient at a token's unreduced loss is everything that the loss function and the schedule do to that token on this
rank: its weight, their factors and the loss scale. What happens to gradients afterwards a tap does not see.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.step.samples import Samples


@dataclass
class TappedLosses:
    """The losses of one micro-batch that went through a tap, and what the tap was told of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    samples: Samples | None = None
    expected_weights: Callable[[], Tensor] | None = None
    coef: float | None = None
    aggregation: Aggregation | None = None
    tokens: Tensor | None = None  # int [numel]
    log_probs: tuple[Tensor, ...] = ()  # float32 [numel] of both sides, where they are to be compared
    gradient: Tensor | None = None  # float32 (float64 of float64 losses) [numel]; None before the backward pass
    source: Callable[[], Tensor | None] = lambda: None  # a weak reference: the tensor would keep its graph

    def add_gradient(self, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        flat = gradient.detach().reshape(-1)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        self.gradient = flat if self.gradient is None else self.gradient + flat


@dataclass
class Taps:
    """Everything that was tapped of one step on this rank.

    Attributes:
        num_microbatches: how many were begun. At 0, each tap of a name counts as another micro-batch.
        losses: by term and micro-batch. A term that is tapped twice in a micro-batch is a second term.
    """

    num_microbatches: int = 0
    losses: dict[str, dict[int, TappedLosses]] = field(default_factory=dict)

    def begin_microbatch(self) -> None:
        self.num_microbatches += 1

    def of(self, losses: Tensor, name: str) -> TappedLosses:
        """The tap of these very losses in this micro-batch; made if there is none yet."""
        for of_term in self.losses.values():
            for number, tapped in of_term.items():
                if self.num_microbatches in (0, number + 1) and tapped.source() is losses:
                    return tapped
        microbatch = self.num_microbatches - 1 if self.num_microbatches else len(self.losses.get(name, {}))
        terms = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        term = next(term for term in terms if microbatch not in self.losses.setdefault(term, {}))
        tapped = TappedLosses(tuple(losses.shape), losses.dtype, source=ref(losses))
        losses.register_hook(tapped.add_gradient)
        self.losses[term][microbatch] = tapped
        return tapped


#: Where taps write, and what the step should be aggregated by. Belongs to whoever runs the step: `observe` sets it and
#: puts it back. Loss functions are called by a schedule that knows nothing of an audit, so none can hand on its `Taps`.
_OBSERVED: ContextVar[tuple[Taps | None, Aggregation | None]] = ContextVar("observed", default=(None, None))


@contextmanager
def observe(taps: Taps | None = None, aggregation: Aggregation | None = None) -> Iterator[None]:
    """In a ``with``: taps write into `taps`; the step should be aggregated by `aggregation`. None changes nothing."""
    outer_taps, outer_aggregation = _OBSERVED.get()
    token = _OBSERVED.set((taps or outer_taps, aggregation or outer_aggregation))
    try:
        yield
    finally:
        _OBSERVED.reset(token)


def expected_aggregation() -> Aggregation | None:
    """The aggregation of the current step, if its trainer said so."""
    return _OBSERVED.get()[1]


def is_observed() -> bool:
    """True while an audit observes the current step."""
    return not torch.compiler.is_compiling() and _OBSERVED.get()[0] is not None


def tap(
    per_token_loss: Tensor,
    name: str = "pg",
    *,
    samples: Samples | None = None,
    expected_weights: Callable[[], Tensor] | None = None,
    coef: float | None = None,
    aggregation: Aggregation | None = None,
    tokens: Tensor | None = None,
    log_probs: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The losses as they are; while an audit observes the step, the gradient that reaches them is written down.

    Call it in a loss function on the unreduced losses, before masks or weights are multiplied to them, once for each
    term: ``per_token_loss = tap(per_token_loss, samples=samples_of(batch))``. The reducers of this package do so
    themselves. Without an audit, without gradients, of losses that need none or while torch compiles it does nothing.

    Args:
        per_token_loss: float, this rank's losses in the order of the samples' layout.
        name: of the term.
        samples: what they are the losses of; may be left out where the audit has `samples_of`.
        expected_weights: the weight each of them should have, if the caller knows.
        coef: the factor of the term in the loss; an audit divides it out.
        aggregation: the term's own, if it is not the policy loss's.
        tokens: the model's input ids on this rank, in the order of the losses; an audit compares them with those of
            ``Samples(tokens=...)``, cut by the layout.
        log_probs: the trainer's and the batch's old ones, in the order of the losses, for an audit to compare.
    """
    taps = _OBSERVED.get()[0] if is_observed() else None
    if taps is None or not torch.is_grad_enabled() or not per_token_loss.requires_grad:
        return per_token_loss
    tapped = taps.of(per_token_loss, name)  # this package's reducers tap losses that the user may have tapped before
    tapped.samples = tapped.samples or samples
    tapped.expected_weights = tapped.expected_weights or expected_weights
    tapped.coef = coef if tapped.coef is None else tapped.coef
    tapped.aggregation = tapped.aggregation or aggregation
    if tapped.tokens is None and tokens is not None:
        tapped.tokens = torch.as_tensor(tokens).detach().reshape(-1).clone()
    tapped.log_probs = tapped.log_probs or tuple(
        one.detach().reshape(-1).to(torch.float32, copy=True) for one in log_probs or ()
    )
    return per_token_loss
