"""Terms beside a policy loss: a critic's loss and estimates of the KL to a reference, one value per token.

Masked inputs, half precision and large log-ratios are treated as in `losses/token.py`.
"""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import warn_on_one_rank
from megatron_rl_loss.core.errors import check_choice, check_float, check_within, first_order
from megatron_rl_loss.core.taps import reports_output
from megatron_rl_loss.losses.ratio import (
    Masked,
    bounded,
    check_log_probs,
    check_shape,
    check_trained,
    masked,
    name_token,
)

#: From here on one token's slope of k3, e^10 = 22,026, is all that a norm sees.
_FAR = 10.0
KlEstimator = Literal["k1", "k2", "k3"]


@reports_output
def value_loss(
    values: Tensor, returns: Tensor, local: Masked, *, old_values: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """A critic's loss, one value per token: ``max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2``.

    Without `clip` only the first square. Differentiable in `values`; `local` as in `ppo_clip_loss`. Raises ValueError
    for shapes that differ, for returns or old values that require grad while the values do not, for a clip without old
    values or old values without a clip, and for a clip that is not finite and above 0.
    Source: OpenAI's PPO2 (Baselines), as in most PPO critics.
    """
    check_shape("returns", returns, values)
    check_trained("values", values, returns=returns, old_values=old_values)
    if (clip is None) != (old_values is None):
        raise ValueError(
            f"clip={clip!r} with {'no' if old_values is None else 'some'} old_values: values are clipped around "
            "old_values. Pass both, or drop both."
        )
    others = [returns.detach()]
    if clip is not None and old_values is not None:
        check_within("clip", clip, "(0, inf)", "0.2 is usual; None turns it off")
        check_shape("old_values", old_values, values)
        others.append(old_values.detach())
    values, target, *old = masked(local, values, *others)
    square = (values - target).square()
    if clip is not None:
        clipped = torch.maximum(torch.minimum(values, old[0] + clip), old[0] - clip)
        square = torch.maximum(square, (clipped - target).square())
    return square / 2


#: Names of other projects' estimators: whose, and what they are here. By open-instruct's number 2 it means k3.
_ELSEWHERE = {
    "0": ("open-instruct", "'k1'"),
    "1": ("open-instruct", "'k2'"),
    "2": ("open-instruct", "'k3'"),
    "3": ("open-instruct", "'k1' with old_log_probs="),
    "kl": ("verl", "'k1'"),
    "mse": ("verl", "'k2'"),
    "low_var_kl": ("verl and slime", "'k3'"),
}


@reports_output
def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    local: Masked,
    *,
    estimator: KlEstimator = "k3",
    old_log_probs: Tensor | None = None,
    bound: float | None = None,
) -> Tensor:
    """Estimate of KL(policy || reference) per token, from the policy's samples; ``d = log_probs - ref_log_probs``.

    ``k1 = d`` (unbiased, may be negative), ``k2 = d^2 / 2`` (biased), ``k3 = exp(-d) - 1 + d`` (unbiased, >= 0).

    Args:
        log_probs: differentiable.
        ref_log_probs: of the reference, same shape; detached.
        local: as in `ppo_clip_loss`.
        old_log_probs: of the policy that drew the tokens, to multiply by ``r = exp(log_probs - old_log_probs)``, whose
            gradient counts: that of ``r k3`` is ``r d grad log_probs``, the KL's own. None for the estimator alone,
            whose gradient is not the KL's even where r is 1, but for k2. k1 alone has the gradient of the log-prob,
            whatever the reference is: without old log-probs its log-probs must be detached, as those of a metric are.
        bound: of ``|d|``: beyond it the value is that at the bound, without a gradient (TRL: 20). None for no bound: on
            the host a token further than 10 below the reference is then warned of, whose slope of k3, above 20,000,
            leaves nothing of the other tokens' gradient once it is clipped.

    k3 and estimates times r have gradients by these formulas, exact to float32 however far the reference is; gradients
    of these gradients raise ValueError.

    Raises ValueError for an unknown estimator, shapes that differ, k2 with old log-probs, k1 without them, a bound
    that is not above 0, reference or old log-probs
    that require grad while the log-probs do not, and values above 0.1, or none below 0, which are no log-probs.
    Source: Schulman, "Approximating KL divergence" (2020); k3 in GRPO, arXiv:2402.03300 eq. 4; times r, DeepSeek-V3.2,
    arXiv:2512.02556 eq. 7.
    """
    check_shape("ref_log_probs", ref_log_probs, log_probs)
    check_float("ref_log_probs", ref_log_probs, "Pass log-probs, not token ids")
    if isinstance(estimator, str | int) and (known := _ELSEWHERE.get(str(estimator))) is not None:
        where, here = known
        raise ValueError(f"KL estimator {estimator!r}: that of {where} is {here} here. Pass that.")
    check_choice("KL estimator", estimator, get_args(KlEstimator))
    others = [ref_log_probs.detach()]
    if old_log_probs is not None:
        check_shape("old_log_probs", old_log_probs, log_probs)
        check_float("old_log_probs", old_log_probs, "Pass log-probs, not token ids")
        if estimator == "k2":
            raise ValueError(
                "k2 with old_log_probs: k2 times the ratio has not the KL's gradient. Take k3, or drop old_log_probs."
            )
        others.append(old_log_probs.detach())
    elif estimator == "k1" and log_probs.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "k1 of log-probs that require grad, without old_log_probs: its gradient is that of the log-prob alone, so "
            "as a loss it pushes down every sampled token, whatever the reference is. Pass old_log_probs= for a loss, "
            "or log_probs.detach() for a metric."
        )
    if bound is not None:
        check_within("bound", bound, "(0, inf)", "20 is usual; None for no bound")
    check_trained("log_probs", log_probs, ref_log_probs=ref_log_probs, old_log_probs=old_log_probs)
    by_name = {"log_probs": log_probs, "ref_log_probs": ref_log_probs}
    by_name |= {} if old_log_probs is None else {"old_log_probs": old_log_probs}
    log_probs, reference, *old = masked(local, log_probs, *others)
    check_log_probs(by_name, log_probs.detach(), reference, *old)
    if bound is None and log_probs.requires_grad and (estimator == "k3" or old):
        _warn_of_far_token(log_probs.detach(), reference, local)
    if estimator != "k3" and not old:
        d = log_probs - reference
        d = d if bound is None else d.clamp(-bound, bound)
        return d if estimator == "k1" else d.square() / 2
    with torch.no_grad():
        far = None
        if bound is not None:
            d = _difference(log_probs, reference)
            far = d.abs() > bound
            reference = reference.where(~far, log_probs - d.clamp(-bound, bound))
        value, slope = _k3(log_probs, reference) if not old else _times_ratio(estimator, log_probs, reference, old[0])
        slope = slope if far is None else slope.masked_fill(far, 0)
    estimate: Tensor = _WithSlope.apply(log_probs, value, slope)
    return estimate


def _warn_of_far_token(now: Tensor, reference: Tensor, local: Masked) -> None:
    """Warn of the token that is furthest below the reference; of a device nothing is read."""
    if not now.is_cpu or not now.numel() or torch.compiler.is_compiling():
        return
    d = _difference(now, reference).flatten()
    least, at = d.min(0)
    if float(least) < -_FAR:
        warn_on_one_rank(
            f"{name_token(local, int(at), now.shape)} has a log-prob {-float(least):.3g} below the reference's: its "
            f"slope of the KL is up to exp({-float(least):.3g}), so clipping by the norm leaves the other tokens no "
            "gradient. Pass bound= to leave out the gradient of such tokens, mask them, or compare the two sides' "
            "log-probs."
        )


def _k3(now: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """k3 and its slope ``1 - exp(-d)``; finite where the log-probs are."""
    d = _difference(now, reference)
    change = torch.expm1(bounded(-d))
    return change + d.clamp(min=torch.finfo(d.dtype).min), -change


def _times_ratio(estimator: KlEstimator, now: Tensor, reference: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """r k1 and its slope ``r + r d``; r k3 and its slope ``r d``.

    Of r k3 autograd would add slopes of the size ``r exp(-d)`` that cancel: in float32 nothing is left from d = -20 on.
    """
    d, ratio = _difference(now, reference), bounded(_difference(now, old)).exp()
    step = (ratio * d).masked_fill((d == 0) | (d == -math.inf), 0)  # where the policy's probability is 0, so is r d
    if estimator == "k1":
        return step, ratio + step
    # Far from the reference r (exp(-d) - 1 + d), term by term: r may be 0 where exp(-d) overflows.
    far = bounded(_difference(reference, old)).exp() - ratio + step
    value = torch.where(d.abs() < 1, ratio * (torch.expm1(-d) + d), far)
    return torch.where(ratio == math.inf, ratio, value), step


def _difference(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).masked_fill(a == b, 0)  # of equal infinities, too


class _WithSlope(torch.autograd.Function):
    """Values that are known already, and their slopes by the first argument."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return values.clone()

    @staticmethod
    @first_order("kl_estimate")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return gradient * slopes, None, None
