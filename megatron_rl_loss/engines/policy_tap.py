"""One tap for every engine's policy loss: a row says where the loss function keeps its columns.

    LOSS = LossPaths("logprobs", "batch.advantages", {"batch.old_logprobs": "old", "batch.rollout_logprobs?": "old"})

The strings are paths (`places`). A *trial* calls the loss function again with other values at these paths; then
everything is put back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.log_prob_gradients import follow
from megatron_rl_loss.engines.places import places, swapped, value_at
from megatron_rl_loss.extend import Aggregation, Tap, is_observed, taps_of

Value = Callable[[Tensor, Tensor], Any]  # of a trial's log-probs and advantages
_VALUES: dict[str, Value] = {
    "old": lambda leaf, advantages: leaf.detach(),  # so that the ratio is 1
    "ones": lambda leaf, advantages: torch.ones_like(leaf),
    "zeros": lambda leaf, advantages: torch.zeros_like(leaf),
    "none": lambda leaf, advantages: None,
}
#: Each further trial has advantages that are smaller by this.
_SMALLER = 16


class LossPaths(NamedTuple):
    """The places in a loss function whose values a trial replaces.

    Attributes:
        log_probs: path of the log-probs by which the loss is differentiated, or of the function that computes them.
        advantages: path of the advantages.
        trial: other paths, with their values in a trial: ``old`` for the log-probs themselves, so that the ratio is 1,
            ``ones``, ``zeros``, ``none``, or a function of a trial's log-probs and advantages. In the place of a
            function there is then one that returns the value.
        silent: containers, such as metrics, that a trial must not change.
        size: a trial's advantages are +-size; small where the engine clamps what stands for the advantages.
        advantage: the value at `advantages`, if it is another function of a trial's log-probs and advantages.
        old: paths of old log-probs that a trial raises, if the engine clamps ratios near 1: ratios are then e^-3.
    """

    log_probs: str
    advantages: str
    trial: Mapping[str, str | Value] = {}
    silent: Sequence[str] = ()
    size: float = 1.0
    advantage: Value = lambda leaf, advantages: advantages
    old: Sequence[str] = ()


class WeighedMicrobatch(NamedTuple):
    """A micro-batch whose loss is tapped, as the batch describes it, not as the engine's code does inside.

    Attributes:
        samples: masks, ids and layout, of log-probs.
        factors: float, of the shape of the advantages: those that they were multiplied by.
        plain: the advantages before that: those that the loss function gets must be their products with the factors.
            None for a loss that is no policy loss.
        name, coef, aggregation: as in `tap`.
        temperature: logits were divided by it; None where gradients by the model's output are not those by logits.
        is_followed: False if the way from log-probs to the model's output is not measured: the layout says it.
    """

    samples: Samples
    factors: Tensor
    plain: Tensor | None
    name: str = "pg"
    coef: float | None = None
    aggregation: Aggregation | None = None
    temperature: float | None = 1.0
    is_followed: bool = True

    def factors_of(self, advantages: Any) -> Tensor:
        """The factors of the advantages that the loss function gets; where those are 0 by themselves, as declared."""
        if self.plain is None:
            return self.factors
        if advantages.is_nested:
            advantages = torch.nested.to_padded_tensor(advantages, 0.0)
        expected = self.plain.to(advantages.device) * self.factors
        return self.factors * (advantages / expected).nan_to_num(1.0)


def tap_policy(
    row: LossPaths, stock: Callable[[], Any], arguments: dict[str, Any], describe: Callable[[], WeighedMicrobatch]
) -> Any:
    """The result of `stock()`, whose policy loss is measured while a step is observed.

    At a ratio r of 1 a policy loss has the slope -A * r by a token's log-prob. So with advantages +-f the token's
    weight in the loss is

        -(d loss(log_probs, +f) / d log_probs - d loss(log_probs, -f) / d log_probs) / 2

    where what does not depend on the advantage (KL, entropy) cancels. Where an engine clamps ratios near 1, r is e^-3,
    at which no advantage above 0 is clipped, and -f is 0. Other trials tell if the engine clamps what was changed: with
    smaller advantages slopes are then others, and proportional; at e^-4 they are others. Weights that are not those
    that were asked are then no evidence. Where r is e^-3, advantages below 0 are tried too, also at e^0.01, at which
    PPO does not clip them; if neither gives the same weights, theirs count.

    Args:
        stock, arguments: the loss function with the values in `arguments`, and its arguments by name. It returns the
            loss, a float scalar from which the backward pass starts, or a tuple that begins with it.
        describe: called where the loss is tapped.
    """
    if not is_observed():
        return stock()
    seen: list[Tensor] = []
    (container, name), *_ = places(row.log_probs, arguments)
    compute = value_at(container, name)
    if callable(compute) and not isinstance(compute, Tensor):

        def see(*args: Any, **kwargs: Any) -> Tensor:
            seen.append(compute(*args, **kwargs))
            return seen[-1]

        with swapped(arguments, {row.log_probs: see}):
            result = stock()
    else:
        seen.append(compute)
        result = stock()
    loss = _first(result)
    if not seen or taps_of(loss) is None:
        return result

    def weights_of(size: float, lower: float) -> Tensor:
        """The weights by trials of advantages of that size, with old log-probs raised by `lower`."""

        def loss_of(advantages: Tensor) -> Tensor:
            makers = {path: _VALUES[make] if isinstance(make, str) else make for path, make in row.trial.items()}
            makers |= {row.log_probs: lambda leaf, _: leaf, row.advantages: row.advantage}
            values = {path: make(leaf, advantages) for path, make in makers.items()}
            values |= {path: values[path] + lower for path in row.old}
            with swapped(arguments, values, row.silent):
                return _first(stock())

        above = loss_of(factors * size)
        below = loss_of(factors * (0.0 if row.old else -size))
        width = size * math.exp(-lower) * (1 if row.old else 2)
        difference = below - above
        slopes = torch.autograd.grad(difference, leaf, allow_unused=True)[0] if difference.requires_grad else None
        return torch.zeros_like(leaf) if slopes is None else slopes / width

    measured = describe()
    factors = measured.factors_of(value_at(*places(row.advantages, arguments)[0])).to(seen[0].device)
    leaf = seen[0].detach().requires_grad_()
    is_clamped = False
    if not seen[0].requires_grad:  # exchanged with old log-probs: no gradient goes to these
        weights = torch.zeros_like(leaf)
    elif row.old:
        weights = weights_of(row.size, 3.0)
        is_clamped = not _agree(weights, weights_of(row.size, 4.0))
        negative = [weights_of(-row.size, lower) for lower in (3.0, -0.01)]
        if not any(_agree(weights, others) for others in negative):
            positive, weights = weights, negative[-1]
            is_clamped |= bool(weights.abs().max() <= 2.0**-6 * positive.abs().max())
    else:
        weights, smaller = weights_of(row.size, 0.0), weights_of(row.size / _SMALLER, 0.0)
        is_clamped = not _agree(weights, smaller) and _agree(smaller, weights_of(row.size / _SMALLER**2, 0.0))
    tapped = tap_sum(
        loss, weights, measured.name, samples=measured.samples, coef=measured.coef, aggregation=measured.aggregation
    )
    if tapped is not None and is_clamped:
        tapped.doubt = "the engine clamps what a trial of its loss changes, so that its slopes are not its weights."
    if tapped is not None and measured.is_followed and seen[0].requires_grad:
        tapped.at_log_probs = True
        layout = measured.samples.layout
        replicated = layout is not None and layout.is_whole
        follow(seen[0], replicated=replicated, temperature=measured.temperature)
    return result


def tap_sum(
    total: Tensor,
    weights: Tensor,
    name: str,
    *,
    samples: Samples,
    coef: float | None = None,
    aggregation: Aggregation | None = None,
) -> Tap | None:
    """`tap` for a sum, float scalar, of weights * losses that an engine computes; None if nothing is observed.

    Another sum in a micro-batch is another micro-batch's, since engines may go through it by samples. One over the same
    samples, as their labels say, adds to their weights: tokens that come twice weigh too much.
    """
    if (taps := taps_of(total)) is None:
        return None
    tapped = taps.losses.get(name, {}).get(taps.num_microbatches - 1)
    is_same = tapped is not None and samples.labels and tapped.samples and tapped.samples.digest() == samples.digest()
    if tapped is None or not is_same:
        if tapped is not None:
            taps.begin_microbatch()
        tapped = Tap(tuple(weights.shape), weights.dtype, samples=samples, coef=coef, aggregation=aggregation)
        taps.add(tapped, name)
    hooked, flat = tapped.hooked, weights.detach().reshape(-1)
    total.register_hook(lambda gradient: hooked.add(gradient * flat))
    return tapped


def _agree(weights: Tensor, others: Tensor) -> bool:
    """True if they differ by rounding alone; a clamp changes more."""
    return bool(((weights - others).abs() <= 2.0**-6 * weights.abs().max()).all())


def _first(result: Any) -> Tensor:
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss
