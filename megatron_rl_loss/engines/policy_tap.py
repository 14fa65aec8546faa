"""One tap for every engine's policy loss and the terms beside it: a row says where a loss function keeps its columns.

    LOSS = LossPaths("logprobs", "batch.advantages", {"batch.old_logprobs": "old", "batch.rollout_logprobs?": "old"})

The strings are paths (`places`). A *trial* calls the loss function again with other values at these paths; then
everything is put back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.log_prob_gradients import follow
from megatron_rl_loss.engines.places import places, swapped, value_at
from megatron_rl_loss.extend import Aggregation, Tap, is_observed, observed_taps, taps_of

Value = Callable[[Tensor, Tensor], Any]  # of a trial's log-probs and advantages
_VALUES: dict[str, Value] = {
    "old": lambda leaf, advantages: leaf.detach(),  # so that the ratio is 1
    "ones": lambda leaf, advantages: torch.ones_like(leaf),
    "zeros": lambda leaf, advantages: torch.zeros_like(leaf),
    "none": lambda leaf, advantages: None,
}
#: Each further trial has advantages that are smaller by this.
_SMALLER = 16
#: A trial of the terms beside the policy loss has this log-prob, and the reference's lower and higher by half of 1:
#: numbers that every dtype has.
_LOG_PROB, _ABOVE_REFERENCE = -1.0, (0.5, -0.5)
#: Slopes of KL penalties by the log-prob at these.
_SLOPES_OF_KL = {
    "k1": (1.0, 1.0), "abs": (1.0, -1.0), "k2": _ABOVE_REFERENCE,
    "k3": (1 - math.exp(-0.5), 1 - math.exp(0.5)),
}  # fmt: skip
_ADDED = (
    "The loss has more than the terms that the config names: at advantages of 0 it has a slope where these have none. "
    "That is a term that somebody added, or a KL penalty of another estimator."
)


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
        reference: for terms beside the policy loss, paths of the reference's log-probs, with values as in `trial`.
        entropy: path of the entropies, or of the function that computes them.
        output: path of the model's output, by which nothing but log-probs and entropies may have a slope.
    """

    log_probs: str
    advantages: str
    trial: Mapping[str, str | Value] = {}
    silent: Sequence[str] = ()
    size: float = 1.0
    advantage: Value = lambda leaf, advantages: advantages
    old: Sequence[str] = ()
    reference: Mapping[str, str | Value] = {}
    entropy: str = ""
    output: str = ""


class Beside(NamedTuple):
    """A term beside the policy loss, as the engine's config names it.

    Attributes:
        coef: its factor in the loss.
        aggregation: its own.
        samples: those that it is aggregated over, if they are not the policy loss's.
        estimator: of a KL penalty, by d = log-prob - reference's: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = e^-d + d - 1.
    """

    coef: float
    aggregation: Aggregation
    samples: Samples | None = None
    estimator: str = "k3"


class WeighedMicrobatch(NamedTuple):
    """A micro-batch whose loss is tapped, as the batch describes it, not as the engine's code does inside.

    Attributes:
        samples: masks, ids and layout, of log-probs.
        factors: float, of the shape of the advantages: those that they were multiplied by. None: the policy loss is
            tapped elsewhere.
        plain: the advantages before that: those that the loss function gets must be their products with the factors.
            None for a loss that is no policy loss.
        name, coef, aggregation: as in `tap`.
        temperature: logits were divided by it; None where gradients by the model's output are not those by logits.
        is_followed: False if the way from log-probs to the model's output is not measured: the layout says it.
        beside: all further terms of the loss, "kl" and "entropy"; None if they are not measured.
    """

    samples: Samples
    factors: Tensor | None
    plain: Tensor | None
    name: str = "pg"
    coef: float | None = None
    aggregation: Aggregation | None = None
    temperature: float | None = 1.0
    is_followed: bool = True
    beside: Mapping[str, Beside] | None = None

    def factors_of(self, advantages: Any) -> Tensor:
        """The factors of the advantages that the loss function gets; where those are 0 by themselves, as declared."""
        assert self.factors is not None
        if self.plain is None:
            return self.factors
        if advantages.is_nested:
            advantages = torch.nested.to_padded_tensor(advantages, 0.0)
        expected = self.plain.to(advantages.device) * self.factors
        return self.factors * (advantages / expected).nan_to_num(1.0)


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
        stock, arguments: the loss function with the values in `arguments`, and its arguments by name. It returns the
            loss, a float scalar from which the backward pass starts, or a tuple that begins with it.
        describe: called where the loss is tapped.
    """
    if not is_observed():
        return stock()
    values, keepers = {}, dict[str, list[Tensor]]()
    for path in (row.log_probs, *[row.entropy] * bool(row.entropy)):
        for container, name in places(path, arguments)[:1]:
            values[path], keepers[path] = _kept(value_at(container, name))
    with swapped(arguments, values):
        result = stock()
    loss, seen = _first(result), keepers[row.log_probs]
    if not seen or taps_of(loss) is None:
        return result
    measured = describe()
    if measured.factors is not None:
        tapped = _tap_by_advantages(row, stock, arguments, measured, seen[0], loss)
        if tapped is not None and measured.is_followed and seen[0].requires_grad:
            tapped.at_log_probs = True
            layout = measured.samples.layout
            replicated = layout is not None and layout.is_whole
            follow(seen[0], replicated=replicated, temperature=measured.temperature)
    if measured.beside is not None:
        _tap_beside(row, stock, arguments, measured, seen[0], [*keepers.get(row.entropy, ())], loss)
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


def _trial(
    row: LossPaths,
    stock: Callable[[], Any],
    arguments: dict[str, Any],
    leaf: Tensor,
    advantages: Tensor,
    others: Mapping[str, Any],
) -> Tensor:
    """The loss of the log-probs `leaf` with those advantages, and `others`: values, by paths, of these two."""
    makers = {**row.trial, **others}
    functions = {path: _maker(make) for path, make in makers.items()}
    functions |= {row.log_probs: lambda leaf, _: leaf, row.advantages: row.advantage}
    values = {path: function(leaf, advantages) for path, function in functions.items()}
    with swapped(arguments, values, row.silent):
        return _first(stock())


def _tap_by_advantages(
    row: LossPaths,
    stock: Callable[[], Any],
    arguments: dict[str, Any],
    measured: WeighedMicrobatch,
    log_probs: Tensor,
    loss: Tensor,
) -> Tap | None:
    """The tap of the loss, by its slopes at ratios of 1 or e^-3."""
    factors = measured.factors_of(value_at(*places(row.advantages, arguments)[0])).to(log_probs.device)
    leaf = log_probs.detach().requires_grad_()

    def weights_of(size: float, lower: float) -> Tensor:
        """The weights by trials of advantages of that size, with old log-probs raised by `lower`."""

        def loss_of(advantages: Tensor) -> Tensor:
            raised = {path: leaf.detach() + lower for path in row.old}
            return _trial(row, stock, arguments, leaf, advantages, {k: partial(_given, v) for k, v in raised.items()})

        above = loss_of(factors * size)
        below = loss_of(factors * (0.0 if row.old else -size))
        width = size * math.exp(-lower) * (1 if row.old else 2)
        difference = below - above
        slopes = torch.autograd.grad(difference, leaf, allow_unused=True)[0] if difference.requires_grad else None
        return torch.zeros_like(leaf) if slopes is None else slopes / width

    is_clamped = False
    if not log_probs.requires_grad:  # exchanged with old log-probs: no gradient goes to these
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
    return tapped


def _tap_beside(
    row: LossPaths,
    stock: Callable[[], Any],
    arguments: dict[str, Any],
    measured: WeighedMicrobatch,
    log_probs: Tensor,
    entropies: list[Tensor],
    loss: Tensor,
) -> None:
    """Tap the terms beside the policy loss, whose slopes are all that is left at advantages of 0.

    With d = log-prob - reference's, a KL penalty of the weight w has the slope w k'(d) by a log-prob, so that w is the
    difference of two slopes / the difference of k'. An entropy bonus has its weight as its slope by an entropy. What is
    left of slopes is another term's.
    """
    assert measured.beside is not None
    leaf = torch.full_like(log_probs, _LOG_PROB).requires_grad_()
    bonus = torch.zeros_like(entropies[0] if entropies else leaf).requires_grad_()
    inputs = [leaf, bonus]
    for container, name in places(row.output, arguments) if row.output else ():
        inputs += [value_at(container, name)] * bool(value_at(container, name).requires_grad)
    like = value_at(*places(row.advantages, arguments)[0]) if measured.factors is None else measured.factors
    advantages = torch.zeros_like(like, device=log_probs.device)

    def slopes_at(above_reference: float) -> list[Tensor]:
        def reference(make: str | Value, *of_trial: Tensor) -> Any:
            return _maker(make)(*of_trial) - above_reference

        others: dict[str, Any] = {path: partial(reference, make) for path, make in row.reference.items()}
        others |= {row.entropy: partial(_given, bonus)} if row.entropy else {}
        total = _trial(row, stock, arguments, leaf, advantages, others)
        slopes = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else [None] * len(inputs)
        return [torch.zeros_like(of) if slope is None else slope for of, slope in zip(inputs, slopes, strict=True)]

    (first, of_entropy, *further), (second, *_) = (slopes_at(distance) for distance in _ABOVE_REFERENCE)
    size = _largest(first, second, of_entropy, *further)
    weights = {}
    if (kl := measured.beside.get("kl")) is not None:
        high, low = _SLOPES_OF_KL[kl.estimator]
        weights["kl"] = (first - second) / (high - low) if high != low else (first + second) / 2
        first, second = first - high * weights["kl"], second - low * weights["kl"]
    if "entropy" in measured.beside:
        weights["entropy"] = of_entropy.masked_fill(entropies[0] == 0, 0) if entropies else of_entropy
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


def _maker(make: str | Value) -> Value:
    return _VALUES[make] if isinstance(make, str) else make


def _given(value: Any, *_: Any) -> Any:
    return value


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
