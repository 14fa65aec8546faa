"""What the policy losses share: their inputs, checked and filled; the ratio of two policies, and its bounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_within, require
from megatron_rl_loss.losses.place import Place, located
from megatron_rl_loss.reduction.sums import check_values

#: Values above it are no log-probs. Rounding a log-prob of 0 in bfloat16 stays below it.
_HIGHEST_LOG_PROB = 0.1


@dataclass(frozen=True)
class PolicyLoss:
    """An unreduced policy loss.

    Attributes:
        per_token_loss: one value per token, differentiable, float32 (float64 of float64); a reducer aggregates it.
        clipped: 1.0 where a clip decided the loss, so that its gradient is 0, else 0.0; detached. Its sample mean is
            the clip fraction.
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
        clip_high = clip_low if clip_high is None else clip_high
        check_within("clip_low", clip_low, "(0, 1]", "0.2 is usual")
        check_within("clip_high", clip_high, "(0, inf)", "0.2 or 0.28 is usual")
        if 1 < clip_high < 2:
            raise ValueError(
                f"clip_high is {clip_high!r}: it is a width: the ratio would be clipped at {1 + clip_high:.3g}. Pass "
                f"{clip_high - 1:.3g} for a bound of {clip_high:.3g}."
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
        falls = advantages < 0
        lowest = torch.where(falls, self.low, log_ratio.new_full((), -math.inf))
        highest = torch.where(falls, self.dual, log_ratio.new_full((), self.high))
        return log_ratio.clamp(lowest, highest), (advantages != 0) & ((log_ratio < lowest) | (log_ratio > highest))

    def surrogate(self, given: "Given", log_ratio: Tensor) -> PolicyLoss:
        """``w * max(-A r, -A clip(r))`` of that log-ratio."""
        bounded, clipped = self.clip(log_ratio, given.advantages)
        return given.policy_loss(-given.advantages * bounded.exp(), clipped)


@dataclass(frozen=True)
class Given:
    """A policy loss's inputs: checked, float32 at least, and 0 at masked tokens where the mask is known."""

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor  # differentiable in log_probs
    advantages: Tensor
    weights: Tensor | None  # importance weights, detached
    shield: Callable[[Tensor], Tensor]  # what every loss made of log_probs goes through

    @classmethod
    def of(
        cls,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        importance_weights: Tensor | None,
        local: Place | Tensor | None,
    ) -> "Given":
        check_same_shape("log-probs", log_probs, old_log_probs)
        check_broadcasts("advantages", advantages, log_probs)
        if advantages.requires_grad:
            raise ValueError("advantages that require grad: they are constants of the policy loss. Detach them.")
        factors = [old_log_probs.detach(), advantages]
        if importance_weights is not None:
            check_broadcasts("importance_weights", importance_weights, log_probs)
            factors.append(importance_weights.detach())
        log_probs, (old, advantages, *weights), shield = filled(local, log_probs, *factors)
        _check_log_probs(log_probs.detach(), old)
        return cls(log_probs, old, log_probs - old, advantages, weights[0] if weights else None, shield)

    def policy_loss(self, loss: Tensor, clipped: Tensor) -> PolicyLoss:
        """Of a loss that importance weights still have to multiply."""
        if self.weights is not None:
            loss = loss * self.weights
        return PolicyLoss(self.shield(loss), clipped.expand(loss.shape).to(loss.dtype), -self.log_ratio.detach())


def filled(
    local: Place | Tensor | None, trained: Tensor, *others: Tensor
) -> tuple[Tensor, list[Tensor], Callable[[Tensor], Tensor]]:
    """The tensors in float32 at least, 0 at masked tokens before any exp; and what the loss goes through.

    Where the mask is not known, it is the gradient that tells: a token whose loss gets exactly 0 hands on 0, where
    the chain rule might make NaN of it. While torch compiles nobody sees to that.
    """
    inside, *rest = map(at_least_float32, (trained, *others))
    if local is not None:
        mask = _mask_of(local, trained) != 0
        return torch.where(mask, inside, 0), [torch.where(mask, one, 0) for one in rest], lambda loss: loss
    if torch.compiler.is_compiling() or not trained.requires_grad or not torch.is_grad_enabled():
        return inside, rest, lambda loss: loss
    inside, of_loss = inside.view_as(trained), [torch.ones((), device=trained.device)]

    def shield(loss: Tensor) -> Tensor:
        if loss.requires_grad:
            loss.register_hook(of_loss.append)
        return loss

    inside.register_hook(lambda gradient: gradient.masked_fill(of_loss[-1] == 0, 0))
    return inside, rest, shield


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision has 8 or 11 bits: too few for ratios near 1, and float16 no range for their exp."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _mask_of(local: Place | Tensor, values: Tensor) -> Tensor:
    """The mask of the tokens, in the shape of their values."""
    if isinstance(local, Tensor):
        check_same_shape("log-probs and mask", values, local)
        return local
    tokens = located(local)[0]
    check_values("a loss's input", values, tokens)
    return tokens.mask.to(values.device, non_blocking=True).view(values.shape)


def check_same_shape(what: str, a: Tensor, b: Tensor) -> None:
    _check_tensors(what, a, b)
    if a.shape != b.shape:
        raise ValueError(
            f"{what} of shapes {tuple(a.shape)} and {tuple(b.shape)}: they must be equal. Cut both for the same rank, "
            "in the same order."
        )


def check_broadcasts(name: str, factor: Tensor, log_probs: Tensor) -> None:
    _check_tensors(name, factor)
    shape, of_tokens = factor.shape, log_probs.shape
    pairs = zip(reversed(shape), reversed(of_tokens), strict=False)
    if len(shape) > len(of_tokens) or any(size not in (1, wanted) for size, wanted in pairs):
        raise ValueError(
            f"{name} of shape {tuple(shape)} for log-probs of shape {tuple(of_tokens)}: they must have that shape or "
            "broadcast to it. Give one per token."
        )


def _check_tensors(what: str, *values: object) -> None:
    for one in values:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{what} with a {type(one).__name__}: a loss is made of tensors, with one entry per token. Wrap it in "
                "torch.tensor."
            )


def _check_log_probs(log_probs: Tensor, old_log_probs: Tensor) -> None:
    if not log_probs.numel() or torch.compiler.is_compiling():
        return
    highest = torch.maximum(log_probs, old_log_probs).amax()

    def given() -> str:
        wrong = log_probs.amax() > _HIGHEST_LOG_PROB
        name, values = ("log_probs", log_probs) if wrong else ("old_log_probs", old_log_probs)
        share = float((values > 0).float().mean())
        return f"{name} with values up to {float(values.amax()):.3g}, {share:.0%} of them above 0"

    require(
        ~(highest > _HIGHEST_LOG_PROB),  # NaN passes: masked tokens may have it
        given,
        "log-probs are 0 at the most. Megatron's loss is minus the log-prob: pass -loss, and look at the order of the "
        "arguments: advantages come third.",
    )
