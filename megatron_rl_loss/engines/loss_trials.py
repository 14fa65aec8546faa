"""What an adapter says of an engine's loss function, and trials: the function called again with other values.

    LOSS = LossPaths("logprobs", "batch.advantages", {"batch.old_logprobs": "old", "batch.rollout_logprobs?": "old"})

The strings are paths (`places`). A trial reports to no measurement, and everything is put back after it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.engines.places import places, swapped, value_at
from megatron_rl_loss.extend import Aggregation, Tap, taps_of, unobserved

Value = Callable[[Tensor, Tensor], Any]  # of a trial's log-probs and advantages
_VALUES: dict[str, Value] = {
    "old": lambda leaf, advantages: leaf.detach(),  # so that the ratio is 1
    "ones": lambda leaf, advantages: torch.ones_like(leaf),
    "zeros": lambda leaf, advantages: torch.zeros_like(leaf),
    "none": lambda leaf, advantages: None,
}


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
        mask: of entropies, in an engine that masks them where it computes them: at a masked token one of 0 weighs
            nothing. That of a token to train on may be 0 too.
        estimator: of a KL penalty, by d = log-prob - reference's: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = e^-d + d - 1.
    """

    coef: float
    aggregation: Aggregation
    samples: Samples | None = None
    mask: Tensor | None = None
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


class Trials(NamedTuple):
    """The loss function with the values in `arguments`, its arguments by name, as a step calls it: `stock()`.

    It returns the loss, a float scalar from which the backward pass starts, or a tuple that begins with it.
    """

    row: LossPaths
    stock: Callable[[], Any]
    arguments: dict[str, Any]

    @property
    def advantages(self) -> Any:
        """Those that the loss function gets."""
        return value_at(*places(self.row.advantages, self.arguments)[0])

    def loss(self, leaf: Tensor, advantages: Tensor, others: Mapping[str, str | Value]) -> Tensor:
        """The loss of the log-probs `leaf` with those advantages, and `others`, values as in `LossPaths.trial`."""
        functions = {path: made_by(make) for path, make in {**self.row.trial, **others}.items()}
        functions |= {self.row.log_probs: lambda leaf, _: leaf, self.row.advantages: self.row.advantage}
        values = {path: function(leaf, advantages) for path, function in functions.items()}
        with unobserved(), swapped(self.arguments, values, self.row.silent):
            return first_of(self.stock())


def made_by(make: str | Value) -> Value:
    """The function of a trial's log-probs and advantages."""
    return _VALUES[make] if isinstance(make, str) else make


def given(value: Any) -> Value:
    """The function that returns this value in every trial."""
    return lambda leaf, advantages: value


def first_of(result: Any) -> Tensor:
    """The loss, of what a loss function returned."""
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


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
