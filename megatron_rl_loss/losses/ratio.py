"""The common part of the policy losses: their inputs, checked and masked; the ratio of two policies, and its bounds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import warn_on_one_rank
from megatron_rl_loss.core.errors import check_float, check_within, only_if, require
from megatron_rl_loss.core.masks import Array, to_array
from megatron_rl_loss.core.samples import check_values
from megatron_rl_loss.core.transfers import on_device, to_device
from megatron_rl_loss.losses.place import Place, tokens_of

#: The tokens of a loss, or their mask in the shape of its values.
Masked = Place | Tensor | Array
#: Values above it are no log-probs. Rounding a log-prob of 0 in bfloat16 stays below it.
_HIGHEST_LOG_PROB = 0.1
#: Rounding a log-prob of 0 in float32 stays below it, for logits up to 100.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class PolicyLoss:
    """An unreduced policy loss.

    Attributes:
        per_token_loss: one value per token, differentiable, float32 (float64 of float64); a reducer aggregates it.
        clipped: 1.0 where a clip decided the loss, else 0.0; detached. The gradient is then 0, but not of a loss that
            clips a weight, as CISPO does. Its sample mean is the clip fraction.
        ppo_kl: ``old_log_probs - log_probs`` (estimator k1 of KL(old || new)), detached.
    """

    per_token_loss: Tensor
    clipped: Tensor
    ppo_kl: Tensor


@dataclass(frozen=True)
class RatioBounds:
    """Bounds of the log-ratio: below where A < 0, above where A < 0 (the dual clip), above elsewhere."""

    low: float
    dual: float
    high: float

    @classmethod
    def around_1(cls, clip_low: float, clip_high: float | None, dual_clip: float | None = None) -> "RatioBounds":
        """From widths, checked."""
        check_within("clip_low", clip_low, "(0, 1]", "0.2 is usual")
        if clip_high is None and 0.5 <= clip_low < 1:
            raise ValueError(
                f"clip_low is {clip_low!r}, without a clip_high: widths from 1, so the ratio would be clipped at "
                f"{1 - clip_low:.3g} and {1 + clip_low:.3g}. Pass {1 - clip_low:.3g} for a bound of {clip_low:.3g}, or "
                "clip_high= too."
            )
        if clip_high is not None and 0.5 <= clip_low < 1 and clip_high < clip_low:
            raise ValueError(
                f"clip_low is {clip_low!r}, clip_high {clip_high!r}: widths from 1, so the ratio would be clipped at "
                f"{1 - clip_low:.3g} and {1 + clip_high:.3g}. Pass clip_low={1 - clip_low:.3g} for a bound of "
                f"{clip_low:.3g}."
            )
        clip_high = clip_low if clip_high is None else clip_high
        check_within("clip_high", clip_high, "(0, inf)", "0.2 or 0.28 is usual")
        if 1 < clip_high < 2:
            raise ValueError(
                f"clip_high is {clip_high!r}: a width above 1, so the ratio would be clipped at {1 + clip_high:.3g}. "
                f"Pass {clip_high - 1:.3g} for a bound of {clip_high:.3g}."
            )
        if dual_clip is not None:
            check_within("dual_clip", dual_clip, "(1, inf)", "3.0 is usual; None turns it off")
        dual = math.inf if dual_clip is None else math.log(dual_clip)
        return cls(math.log1p(-clip_low) if clip_low < 1 else -math.inf, dual, math.log1p(clip_high))

    def clip(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """The log-ratio bounded on the side that A pushes to, and where the bound changed it.

        ``-A exp`` of it is ``max(-A r, -A clip(r))``. Its gradient is 0 beyond the bound, where that of the formula as
        written may be 0 * inf.
        """
        bounded = torch.where(advantages < 0, log_ratio.clamp(self.low, self.dual), log_ratio.clamp(max=self.high))
        return bounded, (advantages != 0) & (bounded != log_ratio)

    def surrogate(self, inputs: "PolicyInputs", log_ratio: Tensor) -> PolicyLoss:
        """``w * max(-A r, -A clip(r))`` of that log-ratio."""
        within, clipped = self.clip(inputs.before_exp(log_ratio), inputs.advantages)
        return inputs.policy_loss(-inputs.advantages * within.exp(), clipped)


@dataclass(frozen=True)
class PolicyInputs:
    """A policy loss's inputs: checked, float32 at least, and 0 at masked tokens.

    Attributes:
        log_ratio: differentiable in `log_probs`; 0 where a token of weight 0 has an infinite one.
        weights: importance weights, detached, or None.
        largest: exponent, see `largest_exponent`.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    weights: Tensor | None
    largest: float

    @classmethod
    def of(
        cls, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor | None, local: Masked
    ) -> "PolicyInputs":
        for name, tensor in (("log_probs", log_probs), ("old_log_probs", old_log_probs)):
            check_float(name, tensor, "Pass log-probs, not token ids")
        check_shape("old_log_probs", old_log_probs, log_probs)
        check_shape("advantages", advantages, log_probs, broadcasts=True)
        if advantages.requires_grad:
            raise ValueError("advantages that require grad: advantages are constants of the policy loss. Detach them.")
        if weights is not None:
            check_shape("importance_weights", weights, log_probs, broadcasts=True)
        check_trained("log_probs", log_probs, old_log_probs=old_log_probs, importance_weights=weights)
        factors = [] if weights is None else [weights.detach()]
        by_name = {"log_probs": log_probs, "old_log_probs": old_log_probs}
        log_probs, old, advantages, *factors = masked(local, log_probs, old_log_probs.detach(), advantages, *factors)
        check_log_probs(by_name, log_probs.detach(), old)
        _warn_of_zeros(advantages, local)
        if factors and not torch.compiler.is_compiling() and factors[0].numel():
            require(
                ~(factors[0].amin() < 0),  # NaN passes
                lambda: f"importance_weights with values down to {factors[0].amin():.3g}",
                "weights are ratios, 0 at least. Pass importance_weights(log_ratio, ...), not the log-ratio.",
            )
        log_ratio = log_probs - old
        if factors:  # else 0 * inf of a rejected token would be NaN
            log_ratio = log_ratio.masked_fill((factors[0] == 0) & ~log_ratio.isfinite(), 0)
        largest = largest_exponent(log_ratio.dtype)
        return cls(log_probs, old, log_ratio, advantages, factors[0] if factors else None, largest)

    def kept(self, values: Tensor) -> Tensor:
        """The values, and 0 at tokens of weight 0."""
        return values if self.weights is None else values.masked_fill(self.weights == 0, 0)

    def before_exp(self, log_ratio: Tensor, power: int = 1) -> Tensor:
        """`kept` log-ratios, `bounded`: all that are finite have a finite exp."""
        return bounded(self.kept(log_ratio), self.largest / power)

    def policy_loss(self, loss: Tensor, clipped: Tensor | None = None) -> PolicyLoss:
        """The loss times the importance weights; `clipped` of a loss that has no clip is False everywhere."""
        clipped = torch.zeros_like(loss, dtype=torch.bool) if clipped is None else clipped
        if self.weights is not None:
            loss, clipped = self.kept(loss * self.weights), clipped & (self.weights != 0)
        return PolicyLoss(loss, clipped.to(loss.dtype), -self.log_ratio.detach())


def _warn_of_zeros(advantages: Tensor, local: "Masked") -> None:
    """Warn of a sample with advantages of 0 at some active tokens alone; nothing is read of a device, or of a mask."""
    if isinstance(local, Tensor | np.ndarray) or not advantages.is_cpu or torch.compiler.is_compiling():
        return
    tokens = tokens_of(local)
    if advantages.numel() != len(tokens) or not len(tokens.samples):
        return
    active, zero = tokens.mask != 0, to_array(advantages).reshape(-1) == 0
    if not (active & zero).any():
        return
    zeros, others = (np.bincount(tokens.sample_index, active & of, len(tokens.samples)) for of in (zero, ~zero))
    for i in np.flatnonzero((zeros > 0) & (others > 0))[:1]:
        warn_on_one_rank(
            f"sample {i} has advantages of exactly 0 at {zeros[i]:.0f} of {zeros[i] + others[i]:.0f} active tokens: a "
            "token without an advantage still counts in every denominator. To leave tokens out, set their loss mask "
            "to 0."
        )


#: Of a loss of single tokens with its settings: of inputs that were checked; torch operations alone.
Formula = Callable[[PolicyInputs], PolicyLoss]


def largest_exponent(dtype: torch.dtype) -> float:
    """80 for float32: ``exp`` of it is finite, and so are factors of e^8 beside it."""
    return math.log(torch.finfo(dtype).max) - 8


def bounded(exponents: Tensor, most: float | None = None) -> Tensor:
    """The exponents, at most so large that ``exp`` of them is finite: by default their dtype's `largest_exponent`.

    The slope of a loss beyond is that at the bound: a clamp would leave the tokens that are furthest off without any.
    An infinite exponent stays: an input's infinity is not hidden.
    """
    most = largest_exponent(exponents.dtype) if most is None else most
    is_beyond = (exponents > most) & (exponents != math.inf)
    return torch.where(is_beyond, most + (exponents - exponents.detach()), exponents)


def check_trained(name: str, trained: Tensor, **constants: Tensor | None) -> None:
    """Raise ValueError where a constant of a loss has a graph and what the loss trains has none: they are swapped."""
    for other, constant in constants.items():
        if constant is not None and constant.requires_grad and not trained.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} without a graph, and {other} with one: the loss trains {name} and takes {other} as a "
                f"constant, so nothing would be trained. Check the order of the arguments; {name} come first."
            )


def masked(local: Masked, *values: Tensor) -> list[Tensor]:
    """The tensors in float32 at least, and 0 at masked tokens, in the shape of the first."""
    nothing = masked_places(local, values[0])
    return [at_least_float32(value).masked_fill(nothing, 0) for value in values]


def masked_places(local: Masked, trained: Tensor) -> Tensor:
    """True at masked tokens, in the shape of a loss's input and on its device."""
    if isinstance(local, Tensor | np.ndarray):
        mask = on_device(local, torch.device("cpu")) if isinstance(local, np.ndarray) else local
        check_float("a loss's input", trained, "Pass one float per token")
        check_shape("a mask", mask, trained)
        if not torch.compiler.is_compiling() and mask.numel():
            entries: Any = to_array(mask) if mask.is_cpu else mask
            least, most = (entries.min(), entries.max()) if mask.is_cpu else (entries.amin(), entries.amax())
            largest = torch.finfo(mask.dtype).max if mask.is_floating_point() else 1
            require(
                (least >= 0) & (most <= largest),  # False of NaN
                lambda: f"a mask with {most if least >= 0 else least:.3g}",
                "a mask has 1, or a weight above 0, where a token counts, and 0 elsewhere; one of integers has 0 and "
                "1. Pass the loss mask, neither labels, token ids nor an attention mask that is added to scores.",
            )
        return to_device(mask == 0, trained.device)
    tokens = tokens_of(local)
    check_values("a loss's input", trained, tokens)
    return on_device(tokens.mask == 0, trained.device).view(trained.shape)


def name_token(local: Masked, at: int, shape: torch.Size) -> str:
    """A token of a loss in words, by its place end to end."""
    if isinstance(local, Tensor | np.ndarray):
        place = np.unravel_index(at, tuple(shape)) if len(shape) else ()
        return f"the token at {[int(i) for i in place]}"
    sample, position = tokens_of(local).place_of(at)
    return f"token {position} of sample {sample}"


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision has 8 or 11 bits: too few for ratios near 1, and float16 no range for their exp."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_shape(name: str, factor: Tensor, values: Tensor, *, broadcasts: bool = False) -> None:
    """Raise ValueError for a factor of another shape than the values, or with `broadcasts` one that does not fit."""
    for what, tensor in ((name, factor), (f"the tensor beside {name}", values)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{what} is a {type(tensor).__name__}: it must be a tensor with one entry per token. Wrap it in "
                "torch.tensor."
            )
        if tensor.is_complex():
            raise TypeError(f"{what} is {tensor.dtype}: it must hold real numbers. Pass a float tensor.")
    fits = factor.shape == values.shape
    if broadcasts and factor.dim() <= values.dim():
        shape = (*[1] * (values.dim() - factor.dim()), *factor.shape)
        fits = all(n in (1, m) for n, m in zip(shape, values.shape, strict=True))
        # Of [tokens] or [1, tokens] beside [batch, tokens] every row would get the same values.
        own = [n for n, m in zip(shape, values.shape, strict=True) if m > 1]
        fits = fits and own == sorted(own, key=lambda n: n == 1)
    if not fits:
        raise ValueError(
            f"{name} of shape {tuple(factor.shape)} for values of shape {tuple(values.shape)}: both must have one "
            f"shape{', or the first have one value for each row, or one for all' * broadcasts}. Cut both for the same "
            "rank, in the same order; samples.in_buffer gives each token its sample's value."
        )


def not_log_probs(low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether values from low to high, rounded to that dtype or a wider one, are no log-probs; False of NaN.

    Small probabilities are below the highest log-prob. But not one of them is below 0, and their size is no rounding's.
    """
    rounding = _ROUNDING if dtype.itemsize >= 4 else _HIGHEST_LOG_PROB
    return (high > _HIGHEST_LOG_PROB) | ((low >= 0) & (high > rounding))


def range_in_words(low: Tensor, high: Tensor) -> str:
    """How far values that are no log-probs go."""
    return f"values up to {high:.3g}" + only_if(low >= 0, ", none below 0")


def check_log_probs(by_name: Mapping[str, Tensor], *inputs: Tensor) -> None:
    """Raise ValueError for values that are no log-probs; NaN passes.

    Args:
        by_name: the tensors, in their own dtypes.
        inputs: the same, 0 at masked tokens, in float32 at least.
    """
    for (name, tensor), values in zip(by_name.items(), inputs, strict=True):
        if values.numel() and not torch.compiler.is_compiling():
            low, high = values.aminmax()
            require(
                ~not_log_probs(low, high, tensor.dtype),
                lambda name=name, low=low, high=high: f"{name} with {range_in_words(low, high)}",  # type: ignore[misc]
                "log-probs are at most 0. Megatron's loss is minus the log-prob: pass -loss, log-probs for "
                "probabilities, and check the order of the arguments.",
            )
