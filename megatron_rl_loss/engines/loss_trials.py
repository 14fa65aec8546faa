"""What an adapter says of an engine's loss function, and trials: the function called again with other values.

    LOSS = LossPaths("logprobs", "batch.advantages", {"batch.old_logprobs": "old", "batch.rollout_logprobs?": "old"})

The strings are paths (`places`). A trial reports to no measurement, and everything is put back after it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.engines.places import places, swapped, value_at
from megatron_rl_loss.extend import Aggregation, Tap, taps_of, unobserved


class Trial(NamedTuple):
    """The values of one trial, tensors in the frame of the function's log-probs, and its advantages.

    Attributes:
        log_probs: those by which the loss is differentiated.
        old, reference: log-probs of the old policy and of the reference policy, without a gradient.
        advantages: in their own frame.
    """

    log_probs: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor


Value = Callable[[Trial], Any]
Penalty = Callable[[Tensor, Tensor], Tensor]  # of d = log-prob - reference's, and of the ratio to the old policy
PENALTIES: dict[str, Penalty] = {
    "k1": lambda d, ratio: d,
    "abs": lambda d, ratio: d.abs(),
    "k2": lambda d, ratio: d**2 / 2,
    "k3": lambda d, ratio: (-d).exp() + d - 1,
}
_VALUES: dict[str, Value] = {
    "old": lambda trial: trial.old,
    "reference": lambda trial: trial.reference,
    "ones": lambda trial: torch.ones_like(trial.log_probs),
    "zeros": lambda trial: torch.zeros_like(trial.log_probs),
    "none": lambda trial: None,
}


class LossPaths(NamedTuple):
    """The places in a loss function whose values a trial replaces.

    Attributes:
        log_probs: path of the log-probs by which the loss is differentiated, or of the function that computes them.
        advantages: path of the advantages.
        trial: other paths, with their values in a trial: ``old`` for log-probs of the old policy and of what generated,
            ``reference`` for those of the reference policy, ``ones``, ``zeros``, ``none``, or a function of a `Trial`.
            In the place of a function there is then one that returns the value.
        silent: containers, such as metrics, that a trial must not change.
        size: a trial's advantages are +-size; small where the engine clamps what stands for the advantages.
        distance: a trial's distances to the reference, at most 3/4, are multiplied by it; small where they are clamped.
        clamps: the engine clamps ratios near 1: a trial's ratios are then e^-3.
        entropy: path of the entropies, or of the function that computes them.
    """

    log_probs: str
    advantages: str
    trial: Mapping[str, str | Value] = {}
    silent: Sequence[str] = ()
    size: float = 1.0
    distance: float = 1.0
    clamps: bool = False
    entropy: str = ""


class Beside(NamedTuple):
    """A term beside the policy loss, as the engine's config names it.

    Attributes:
        coef: its factor in the loss.
        aggregation: its own.
        samples: those that it is aggregated over, if they are not the policy loss's.
        mask: of entropies, in an engine that masks them where it computes them: at a masked token one of 0 weighs
            nothing. That of a token to train on may be 0 too.
        estimator: of a KL penalty: the name of one of `PENALTIES`, or a function as these.
        doubt: why its weight cannot be measured; empty if it can.
    """

    coef: float
    aggregation: Aggregation
    samples: Samples | None = None
    mask: Tensor | None = None
    estimator: str | Penalty = "k3"
    doubt: str = ""


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
        expected = to_device(self.plain, advantages.device) * self.factors
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

    def loss(self, trial: Trial, entropy: Tensor | None = None) -> Tensor:
        """The loss with the values of the trial, and those entropies in the place of the model's."""
        functions = {path: _VALUES[make] if isinstance(make, str) else make for path, make in self.row.trial.items()}
        functions |= {
            self.row.log_probs: lambda trial: trial.log_probs,
            self.row.advantages: lambda trial: trial.advantages,
        }
        values = {path: function(trial) for path, function in functions.items()}
        values |= {self.row.entropy: entropy} if self.row.entropy and entropy is not None else {}
        with unobserved(), swapped(self.arguments, values, self.row.silent):
            return first_of(self.stock())


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
            taps.num_microbatches += 1  # of the same call of the engine's loss function, whose parts add up
        tapped = Tap(tuple(weights.shape), weights.dtype, samples=samples, coef=coef, aggregation=aggregation)
        taps.add(tapped, name)
    hooked, flat = tapped.hooked, weights.detach().reshape(-1)
    total.register_hook(lambda gradient: hooked.add(gradient * flat))
    return tapped
