"""What the policy losses share: the ratio of two policies, its bounds, and the checks of their inputs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_within, require

#: Values above it are no log-probs. Rounding a log-prob of 0 in bfloat16 stays below it.
_HIGHEST_LOG_PROB = 0.1


@dataclass(frozen=True)
class PolicyLoss:
    """An unreduced policy loss.

    Attributes:
        per_token_loss: one value per token, differentiable; a reducer aggregates it.
        clipped: 1.0 where a clip decided the loss, so that its gradient is 0, else 0.0; detached. Its sample mean is
            the clip fraction.
        ppo_kl: ``old_log_probs - log_probs`` (estimator k1 of KL(old || new)), detached.
    """

    per_token_loss: Tensor
    clipped: Tensor
    ppo_kl: Tensor

    @classmethod
    def weigh(cls, loss: Tensor, clipped: Tensor, log_ratio: Tensor, weights: Tensor | None) -> "PolicyLoss":
        """The three parts, from a loss that importance weights still have to multiply."""
        if weights is not None:
            loss = loss * weights.detach()
        return cls(loss, clipped.expand(loss.shape).to(loss.dtype), -log_ratio.detach())


@dataclass(frozen=True)
class RatioBounds:
    """Bounds of the log-ratio: below where A < 0, above where A < 0 (the dual clip), above elsewhere."""

    low: float
    dual: float
    high: float

    @classmethod
    def around_1(cls, clip_low: float, clip_high: float | None, dual_clip: float | None = None) -> "RatioBounds":
        """From the widths that users give, checked."""
        clip_high = clip_low if clip_high is None else clip_high
        check_within("clip_low", clip_low, 0 < clip_low <= 1, "in (0, 1]", "0.2 is usual")
        check_within("clip_high", clip_high, 0 < clip_high < math.inf, "finite and above 0", "0.2 or 0.28 is usual")
        if 1 < clip_high < 2:
            raise ValueError(
                f"clip_high is {clip_high!r}: it is a width: the ratio would be clipped at {1 + clip_high:.3g}. Pass "
                f"{clip_high - 1:.3g} for a bound of {clip_high:.3g}."
            )
        if dual_clip is not None:
            sound = 1 < dual_clip < math.inf
            check_within("dual_clip", dual_clip, sound, "finite and above 1", "3.0 is usual; None turns it off")
        return cls(
            low=math.log1p(-clip_low) if clip_low < 1 else -math.inf,
            dual=math.inf if dual_clip is None else math.log(dual_clip),
            high=math.log1p(clip_high),
        )

    def clip(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """The log-ratio bounded on the side that A pushes to, and where the bound changed it.

        ``-A exp`` of it is ``max(-A r, -A clip(r))``. Its gradient is 0 beyond the bound, where that of the formula as
        written may be 0 * inf.
        """
        falls = advantages < 0
        lowest = torch.where(falls, self.low, log_ratio.new_full((), -math.inf))
        highest = torch.where(falls, self.dual, log_ratio.new_full((), self.high))
        return log_ratio.clamp(lowest, highest), (advantages != 0) & ((log_ratio < lowest) | (log_ratio > highest))

    def surrogate(
        self, log_ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor, weights: Tensor | None
    ) -> PolicyLoss:
        """``w * max(-A r, -A clip(r))``; `token_log_ratio` is for ``ppo_kl``."""
        bounded, clipped = self.clip(log_ratio, advantages)
        return PolicyLoss.weigh(-advantages * bounded.exp(), clipped, token_log_ratio, weights)


def log_ratio_of(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, importance_weights: Tensor | None
) -> Tensor:
    """``log r`` per token, differentiable in `log_probs`. Refuses inputs that no policy loss can have."""
    check_same_shape("log-probs", log_probs, old_log_probs)
    if advantages.requires_grad:
        raise ValueError("advantages that require grad: they are constants of the policy loss. Detach them.")
    _check_log_probs(log_probs.detach(), old_log_probs.detach())
    check_broadcasts("advantages", advantages, log_probs)
    if importance_weights is not None:
        check_broadcasts("importance_weights", importance_weights, log_probs)
    return log_probs - old_log_probs.detach()


def check_same_shape(what: str, a: Tensor, b: Tensor) -> None:
    """Refuse tensors of different shapes."""
    if a.shape != b.shape:
        raise ValueError(
            f"{what} of shapes {tuple(a.shape)} and {tuple(b.shape)}: they must be equal. Cut both for the same rank, "
            "in the same order."
        )


def check_broadcasts(name: str, factor: Tensor, log_probs: Tensor) -> None:
    """Refuse a factor that does not broadcast to the log-probs' shape."""
    shape, of_tokens = factor.shape, log_probs.shape
    pairs = zip(reversed(shape), reversed(of_tokens), strict=False)
    if len(shape) > len(of_tokens) or any(size not in (1, wanted) for size, wanted in pairs):
        raise ValueError(
            f"{name} of shape {tuple(shape)} for log-probs of shape {tuple(of_tokens)}: they must have that shape or "
            "broadcast to it. Give one per token."
        )


def _check_log_probs(log_probs: Tensor, old_log_probs: Tensor) -> None:
    """Refuse values that cannot be log-probs; on a device nobody waits for the answer."""
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
