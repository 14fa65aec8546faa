"""`tap` records the gradient that reaches a per-token loss, and changes nothing.

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


def _added(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The total [numel], and the gradient on top."""
    flat = gradient.detach().reshape(-1).to(dtype, copy=True)
    return flat if total is None else total + flat


@dataclass
class TappedLosses:
    """The losses of one micro-batch that went through a tap, with the tap's arguments."""

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
    at_log_probs: bool = False  # by `tap_slopes`: the gradient has the way of log-probs to the model's output before it

    def add_gradient(self, gradient: Tensor) -> None:
        """A tensor hook: returns nothing, so that the gradient goes on as it is."""
        self.gradient = _added(self.gradient, gradient, torch.promote_types(gradient.dtype, torch.float32))


@dataclass
class LogProbPath:
    """The gradient that an engine's loss sends to log-probs, which is compared with that at the model's output.

    With p the probability of a token and t the temperature, a gradient g at its log-prob makes the absolute values of
    the gradients by its logits add up to ``|g| * 2 * (1 - p) / t``.
    """

    log_probs: Tensor  # [numel]
    replicated: bool  # each context-parallel rank holds all of them
    temperature: float | None  # None where gradients by the model's output are not those by logits
    gradient: Tensor | None = None  # float64 [numel]
    source: Callable[[], Tensor | None] = lambda: None  # as in `TappedLosses`

    def add_gradient(self, gradient: Tensor) -> None:
        self.gradient = _added(self.gradient, gradient, torch.float64)


@dataclass
class Taps:
    """Everything that was tapped of one step on this rank.

    Attributes:
        num_microbatches: how many were begun. At 0, each tap of a name counts as another micro-batch.
        losses: by term and micro-batch. A term that is tapped twice in a micro-batch is a second term.
        paths, output_sizes: of each micro-batch of `tap_slopes`: its log-probs; the sum of the absolute values of the
            gradient by the model's output on this rank.
        sizes_at_log_probs: the same sums for outputs that went through `tap_output`; these then count.
    """

    num_microbatches: int = 0
    losses: dict[str, dict[int, TappedLosses]] = field(default_factory=dict)
    paths: list[LogProbPath] = field(default_factory=list)
    output_sizes: list[Tensor] = field(default_factory=list)
    sizes_at_log_probs: list[Tensor] = field(default_factory=list)

    def begin_microbatch(self) -> None:
        self.num_microbatches += 1

    def find(self, losses: Tensor) -> TappedLosses | None:
        """The tap of these very losses in this micro-batch, if there is one."""
        for of_term in self.losses.values():
            for number, tapped in of_term.items():
                if self.num_microbatches in (0, number + 1) and tapped.source() is losses:
                    return tapped
        return None

    def of(self, losses: Tensor, name: str) -> TappedLosses:
        """The tap of these very losses in this micro-batch; made if there is none yet."""
        if found := self.find(losses):
            return found
        tapped = TappedLosses(tuple(losses.shape), losses.dtype, source=ref(losses))
        if losses.requires_grad:
            losses.register_hook(tapped.add_gradient)
        self.add(tapped, name)
        return tapped

    def add(self, tapped: TappedLosses, name: str) -> None:
        """Add losses to this micro-batch under their name, or, if it is taken, as a further term."""
        microbatch = self.num_microbatches - 1 if self.num_microbatches else len(self.losses.get(name, {}))
        terms = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        term = next(term for term in terms if microbatch not in self.losses.setdefault(term, {}))
        self.losses[term][microbatch] = tapped


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


def observed_taps() -> Taps | None:
    """Those of the audit that observes the current step, if one does; None while torch compiles."""
    return None if torch.compiler.is_compiling() else _OBSERVED.get()[0]


def is_observed() -> bool:
    """True while an audit observes the current step."""
    return observed_taps() is not None


def _taps_of(value: Tensor) -> Taps | None:
    """`observed_taps`, unless no gradient will reach the value."""
    return observed_taps() if torch.is_grad_enabled() and value.requires_grad else None


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
    at_log_probs: bool = False,
) -> Tensor:
    """The losses unchanged; while an audit observes the step, the tap records the gradient that reaches them.

    Call it in a loss function on the unreduced losses, before masks or weights are multiplied to them, once for each
    term: ``per_token_loss = tap(per_token_loss, samples=samples_of(batch))``. The reducers of this package do so
    themselves. Without an audit, without gradients, of losses that need none or while torch compiles it does nothing.

    Args:
        per_token_loss: float, this rank's losses in the order of the samples' layout.
        name: of the term.
        samples: the samples of these losses; optional where the audit has `samples_of`.
        expected_weights: the weight each of them should have, if the caller knows.
        coef: the factor of the term in the loss; an audit divides it out. NaN where there may be any.
        aggregation: the term's own, if it is not the policy loss's.
        tokens: the model's input ids on this rank, in the order of the losses; an audit compares them with those of
            ``Samples(tokens=...)``, cut by the layout.
        log_probs: the trainer's and the batch's old ones, in the order of the losses, for an audit to compare.
        at_log_probs: true for losses of the log-probs that `tap_slopes` was given, whose way to the model it follows.
    """
    taps = observed_taps()
    is_of_no_token = samples is not None and not per_token_loss.numel()  # its samples are told all the same
    if taps is None or not torch.is_grad_enabled() or not (per_token_loss.requires_grad or is_of_no_token):
        return per_token_loss
    tapped = taps.of(per_token_loss, name)  # this package's reducers tap losses that the user may have tapped before
    tapped.samples = tapped.samples or samples
    tapped.expected_weights = tapped.expected_weights or expected_weights
    tapped.coef = coef if tapped.coef is None else tapped.coef
    tapped.at_log_probs = at_log_probs
    tapped.aggregation = tapped.aggregation or aggregation
    if tapped.tokens is None and tokens is not None:
        tapped.tokens = torch.as_tensor(tokens).detach().reshape(-1).clone()
    tapped.log_probs = tapped.log_probs or tuple(
        one.detach().reshape(-1).to(torch.float32, copy=True) for one in log_probs or ()
    )
    return per_token_loss


def tap_slopes(
    loss: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    log_probs: Tensor,
    factors: Tensor,
    *,
    samples: Samples,
    temperature: float | None = 1.0,
    name: str = "pg",
    coef: float | None = None,
    aggregation: Aggregation | None = None,
) -> Tensor:
    """`tap` for a policy loss of an engine's own, whose per-token losses nobody hands out; returns `loss` as it is.

    At a ratio of 1 a policy loss has the slope -A by a token's log-prob. So with advantages +-f the token's weight in
    the loss is

        -(d loss_of(log_probs, +f) / d log_probs - d loss_of(log_probs, -f) / d log_probs) / 2

    where what does not depend on the advantage (KL, entropy) cancels. A second loss in a micro-batch counts as another
    micro-batch: an engine may compute one for each sample, and tokens that come twice weigh too much.

    Args:
        loss: float scalar, the engine's loss of a micro-batch, from which its backward pass starts.
        loss_of: the same loss of log-probs, which are the old ones too, and of advantages. It is called twice, and may
            change nothing that the engine keeps.
        log_probs: float, those that `loss` was computed of, in the order of the samples' layout.
        factors: float, of the shape of the advantages: those that they were multiplied by.
        samples: the micro-batch.
        temperature: logits were divided by it; None where gradients by the model's output are not those by logits.
        name, coef, aggregation: as in `tap`.
    """
    if (taps := _taps_of(loss)) is None:
        return loss
    leaf = log_probs.detach().requires_grad_()
    half = (loss_of(leaf, -factors) - loss_of(leaf, factors)) / 2
    (slopes,) = torch.autograd.grad(half, leaf, allow_unused=True) if half.requires_grad else (None,)
    weights = torch.zeros_like(leaf) if slopes is None else slopes
    tap_sum(loss, weights, name, samples=samples, coef=coef, aggregation=aggregation, at_log_probs=True)
    if not any(path.source() is log_probs for path in taps.paths):
        is_whole = samples.layout is not None and samples.layout.is_whole
        path = LogProbPath(leaf.detach().reshape(-1), is_whole, temperature, source=ref(log_probs))
        log_probs.register_hook(path.add_gradient)
        taps.paths.append(path)
    return loss


def tap_sum(
    total: Tensor,
    weights: Tensor,
    name: str,
    *,
    samples: Samples,
    coef: float | None = None,
    aggregation: Aggregation | None = None,
    at_log_probs: bool = False,
) -> Tensor:
    """`tap` for a sum of weights * losses that an engine computes; returns `total`, float scalar, as it is.

    Another sum in a micro-batch is another micro-batch's, since engines may go through it by samples. One over the same
    samples, as their labels say, adds to their weights.
    """
    if (taps := _taps_of(total)) is None:
        return total
    tapped = taps.losses.get(name, {}).get(taps.num_microbatches - 1)
    is_same = tapped is not None and samples.labels and tapped.samples and tapped.samples.digest() == samples.digest()
    if tapped is None or not is_same:
        if tapped is not None:
            taps.begin_microbatch()
        tapped = TappedLosses(tuple(weights.shape), weights.dtype, samples, at_log_probs=at_log_probs)
        tapped.coef, tapped.aggregation = coef, aggregation
        taps.add(tapped, name)
    flat, of_tokens = weights.detach().reshape(-1), tapped
    total.register_hook(lambda gradient: of_tokens.add_gradient(gradient * flat))
    return total


def tap_output(output: Tensor) -> Tensor:
    """The model's output as the log-probs of `tap_slopes` are computed from it.

    Needed where other terms of the loss are computed from it too, or the schedule is not handed it.
    """
    if (taps := _taps_of(output)) is None:
        return output
    output, sizes = output.view_as(output), taps.sizes_at_log_probs
    output.register_hook(lambda gradient: sizes.append(size_of_gradient(gradient)))
    return output


def size_of_gradient(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient.detach(), 1, dtype=torch.float64)
