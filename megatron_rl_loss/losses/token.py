"""Losses of a token (policy, value, KL) and group-relative advantages: what the reducers aggregate.

Everything here is elementwise over tokens, of any shape, in the dtype of its inputs, and unreduced; masks are the
reducers' business. At masked positions pass log-probs that are finite and about equal (0 in both, say): a NaN there is
ignored by a reducer, but on the way back to the model the chain rule may turn 0 * NaN or 0 * inf into a NaN.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_choice, check_within
from megatron_rl_loss.step.ids import Ids, as_ids

KlEstimator = Literal["k1", "k2", "k3"]
Divergence = Literal["tv", "kl"]


@dataclass(frozen=True)
class PolicyLoss:
    """Unreduced policy loss.

    Attributes:
        per_token_loss: to be aggregated, differentiable.
        clipped: 1.0 where a clip decided the loss (its gradient is 0 there), else 0.0; detached.
            Its sample mean is the clip fraction.
        ppo_kl: ``old_log_probs - log_probs`` (estimator k1 of KL(old || new)), detached.
    """

    per_token_loss: Tensor
    clipped: Tensor
    ppo_kl: Tensor


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate, a value a token: ``w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``.

    ``r = exp(log_probs - old_log_probs)``. With `dual_clip` c > 1, where A < 0 the value is at most ``-c A``.

    Args:
        log_probs: of the policy in training. Differentiable.
        old_log_probs: of the policy the ratio is taken to, same shape.
        advantages: same shape, or broadcastable to it.
        clip_low, clip_high: clip range below and above 1; `clip_high` defaults to `clip_low` (DAPO: 0.28).
        dual_clip: c, or None for none (3.0 in the paper).
        importance_weights: factor w, detached here, e.g. `truncated_importance_weights`; None for 1.

    Raises:
        ValueError: log-probs of different shapes, factors that do not broadcast to them, ``clip_low`` outside (0, 1],
            ``clip_high`` <= 0, or from 1 to 2, which looks like a bound of the ratio, ``dual_clip`` <= 1; advantages
            that require grad; values above 0.1, which are no log-probs (on a device the first call alone looks).

    Source: PPO, arXiv:1707.06347 eq. 7; separate bounds, DAPO, arXiv:2503.14476 eq. 10; dual clip, arXiv:1912.09729
    eq. 5.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs, advantages, importance_weights)
    bounds = ratio_bounds(clip_low, clip_high, dual_clip)
    return clipped_surrogate(log_ratio, log_ratio, advantages, bounds, importance_weights)


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log_probs``: the weight is clipped, never the gradient.

    Args:
        clip_low: width below 1; None for no lower bound, as in the paper.
        clip_high: width above 1; 4.0 bounds the ratio at 5.
        log_probs, old_log_probs, advantages, importance_weights: as in `ppo_clip_loss`.

    Raises ValueError as `ppo_clip_loss`. `PolicyLoss.clipped` is 1 where the ratio was.
    Source: CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; with the prompt mean, ScaleRL, arXiv:2510.13786.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs, advantages, importance_weights)
    if clip_low is not None:
        check_within("clip_low", clip_low, 0 < clip_low <= 1, "in (0, 1]", "None for no lower bound is usual")
    check_within("clip_high", clip_high, 0 < clip_high < math.inf, "finite and above 0", "4.0 is usual")
    lowest = -math.inf if clip_low in (None, 1) else math.log1p(-clip_low)
    within = log_ratio.detach().clamp(lowest, math.log1p(clip_high))
    loss = -within.exp() * advantages * log_probs
    return policy_loss_of(loss, (advantages != 0) & (within != log_ratio), log_ratio, importance_weights)


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """``-A * (4 / tau) * sigmoid(tau * (r - 1))``, tau by the sign of A: a soft gate in place of the clip.

    Its gradient at r = 1 is that of ``-A r``. `PolicyLoss.clipped` is 0: nothing is cut off.

    Args:
        tau_positive, tau_negative: temperature where A > 0, and elsewhere; larger decays faster.
        log_probs, old_log_probs, advantages, importance_weights: as in `ppo_clip_loss`.

    Raises ValueError as `ppo_clip_loss`, and for a temperature outside [0.1, 100]. Source: SAPO, arXiv:2511.20347.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs, advantages, importance_weights)
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        check_within(name, tau, 0.1 <= tau <= 100, "in [0.1, 100]", "1.0 and 1.05 are usual")
    taus = torch.where(advantages > 0, tau_positive, log_ratio.new_full((), tau_negative))
    # From e^10 on the gate is 1 to the last bit, its gradient 0; beyond, the exp itself may overflow.
    gate = torch.sigmoid(taus * torch.expm1(log_ratio.clamp(max=10))) * (4 / taus)
    return policy_loss_of(-advantages * gate, torch.zeros_like(advantages != 0), log_ratio, importance_weights)


def dppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence = "tv",
    threshold: float = 0.15,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """``-A r`` where the policy may still move, 0 where it has left a trust region in the direction it is pushed.

    With p and q the sampled token's probability now and before, a token is left out where ``A (p - q) > 0`` and its
    binary divergence (this token against all others) is above `threshold`: ``tv = |p - q|``, or
    ``kl = q log(q / p) + (1 - q) log((1 - q) / (1 - p))``.

    Args:
        old_log_probs: of the policy that sampled the tokens.
        threshold: largest divergence; 0.15 for ``tv``, 0.05 for ``kl`` are usual.
        log_probs, advantages, importance_weights: as in `ppo_clip_loss`.

    Raises ValueError as `ppo_clip_loss`, and for an unknown divergence or a threshold that is not above 0 (for ``tv``
    below 1). Source: DPPO, arXiv:2602.04879.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs, advantages, importance_weights)
    check_choice("divergence", divergence, get_args(Divergence))
    sound = 0 < threshold < (1 if divergence == "tv" else math.inf)
    check_within("threshold", threshold, sound, "above 0, and below 1 for tv", "0.15 for tv, 0.05 for kl are usual")
    with torch.no_grad():
        now, before = log_probs.double(), old_log_probs.double()
        moved = now.exp() - before.exp()
        far = moved.abs() if divergence == "tv" else _binary_kl(before, now)
        left_out = (advantages * moved > 0) & (far > threshold)
    loss = -advantages * log_ratio.masked_fill(left_out, 0).exp()
    return policy_loss_of(loss.masked_fill(left_out, 0), left_out, log_ratio, importance_weights)


def _binary_kl(before: Tensor, now: Tensor) -> Tensor:
    """KL of two coins whose log-probs of heads are given, float64; 0 * log 0 is 0."""
    others_before, others_now = (torch.expm1(heads.clamp(max=0)).abs() for heads in (before, now))
    of_others = torch.where(others_before > 0, others_before * (others_before / others_now).log(), 0)
    return before.exp() * (before - now) + of_others


def value_loss(
    values: Tensor, returns: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Of a critic, a value a token: ``max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2``.

    Differentiable in `values`. Without `clip` the first square alone. Raises ValueError for shapes that differ, a clip
    without old values or the other way, and for one that is not finite and above 0.
    Source: OpenAI's PPO2 (Baselines), as in most PPO critics.
    """
    _check_same_shape("values and returns", values, returns)
    square = (values - returns.detach()).square()
    if (clip is None) != (old_values is None):
        raise ValueError(
            f"clip={clip!r} with {'no' if old_values is None else 'some'} old_values: values are clipped around the "
            "old ones: both are needed, or neither. Pass both, or drop both."
        )
    if clip is not None and old_values is not None:
        check_within("clip", clip, 0 < clip < math.inf, "finite and above 0", "0.2 is usual; None turns it off")
        _check_same_shape("values and old values", values, old_values)
        old = old_values.detach()
        within = torch.maximum(torch.minimum(values, old + clip), old - clip)
        square = torch.maximum(square, (within - returns.detach()).square())
    return square / 2


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, *, estimator: KlEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's samples; ``d = log_probs - ref_log_probs``.

    ``k1 = d`` (unbiased, may be negative), ``k2 = d^2 / 2`` (biased), ``k3 = exp(-d) - 1 + d`` (unbiased, >= 0).
    Differentiable in `log_probs`; the reference is detached. Raises ValueError for an unknown estimator or shapes that
    differ. Source: Schulman, "Approximating KL divergence" (2020); k3 in GRPO, arXiv:2402.03300 eq. 4.
    """
    _check_same_shape("log-probs", log_probs, ref_log_probs)
    check_choice("KL estimator", estimator, get_args(KlEstimator))
    difference = log_probs - ref_log_probs.detach()
    if estimator == "k1":
        return difference
    return difference.square() / 2 if estimator == "k2" else torch.expm1(-difference) + difference


def distillation_advantages(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """``log pi_teacher - log pi`` of each sampled token, detached: minus a one-sample estimate of KL(pi || teacher).

    As advantages of a policy loss with ``log_probs`` those of the policy that sampled the tokens, its gradient is that
    of the reverse KL of each token's distribution, estimated from the sample (future tokens' KL left out). Raises
    ValueError for shapes that differ. Source: on-policy distillation, arXiv:2306.13649; as advantages, Thinking
    Machines Lab 2025.
    """
    _check_same_shape("log-probs", log_probs, teacher_log_probs)
    return (teacher_log_probs - log_probs).detach()


def group_relative_advantages(
    rewards: Tensor,
    prompt_ids: Ids,
    *,
    rollout_ids: Ids | None = None,
    normalize_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """One advantage a sample: its reward less its prompt group's mean, over the group's std if asked.

    ``A_i = (r_i - mean(r_group)) / (std(r_group) + epsilon)``, std with Bessel's correction (0 for a group of one);
    with ``normalize_by_std=False`` the numerator alone. Groups may have any sizes and any order. Computed in float64.
    Warns when all groups have equal rewards each, so that all advantages are 0.

    Args:
        rewards: float [num_samples].
        prompt_ids: one id (int or str) a sample.
        rollout_ids: one id a sample where rollouts are split over samples: a rollout counts once in its group, and its
            samples share its advantage.

    Returns:
        float32 [num_samples], on the rewards' device.

    Raises TypeError for rewards that are no tensor, ValueError for rewards that are not 1-D and finite or do not match
    the ids, that differ within a rollout, and for an epsilon that is not above 0.
    Source: GRPO, arXiv:2402.03300 section 4.1.2; without std, Dr. GRPO, arXiv:2503.20783 section 3.
    """
    if not isinstance(rewards, Tensor):
        raise TypeError(
            f"rewards is a {type(rewards).__name__}: it must be a tensor, one entry a sample. Wrap it in torch.tensor."
        )
    if normalize_by_std:
        check_within("epsilon", epsilon, epsilon > 0, "above 0: groups of equal rewards have std 0", "1e-6 is usual")
    if rewards.dim() != 1 or not bool(torch.isfinite(rewards).all()):
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)}: they must be 1-D and finite. Pass one finite reward a sample."
        )
    prompts = as_ids("prompt_ids", prompt_ids, rewards.numel())
    unique, group = prompts.to(rewards.device).unique(return_inverse=True)
    exact = rewards.double()
    counts = _once_a_rollout(exact, group, rollout_ids)

    def group_sum(values: Tensor) -> Tensor:
        return torch.zeros_like(unique, dtype=torch.float64).index_add_(0, group, values * counts)

    size = group_sum(torch.ones_like(exact))
    centred = exact - (group_sum(exact) / size)[group]
    if rewards.numel() > 1 and not centred.any():
        warnings.warn("all rewards are equal within their prompt groups: all advantages are 0", stacklevel=2)
    if not normalize_by_std:
        return centred.float()
    std = (group_sum(centred.square()) / (size - 1).clamp(min=1)).sqrt()
    return (centred / (std + epsilon)[group]).float()


def _once_a_rollout(rewards: Tensor, group: Tensor, rollout_ids: Ids | None) -> Tensor:
    """1 / the number of samples of each sample's rollout, float64 [num_samples]."""
    if rollout_ids is None:
        return torch.ones_like(rewards)
    ids = as_ids("rollout_ids", rollout_ids, rewards.numel()).to(rewards.device)
    unique, rollout = ids.unique(return_inverse=True)
    first = torch.empty_like(unique).scatter_(0, rollout, torch.arange(len(rollout), device=rewards.device))[rollout]
    unlike = (rewards[first] != rewards) | (group[first] != group)
    if bool(unlike.any()):
        raise ValueError(
            f"rewards that differ within the rollout of sample {int(unlike.nonzero()[0])}: samples of one rollout "
            "share its reward and its prompt. Give every part the rollout's reward and prompt id."
        )
    return 1 / rollout.bincount().double()[rollout]


# --- what the policy losses share


@dataclass(frozen=True)
class RatioBounds:
    """Bounds of the log-ratio: below where A < 0, above where A < 0 (the dual clip), above elsewhere."""

    low: float
    dual: float
    high: float


def ratio_bounds(clip_low: float, clip_high: float | None, dual_clip: float | None = None) -> RatioBounds:
    """From widths around 1, checked."""
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
    return RatioBounds(
        low=math.log1p(-clip_low) if clip_low < 1 else -math.inf,
        dual=math.inf if dual_clip is None else math.log(dual_clip),
        high=math.log1p(clip_high),
    )


def log_ratio_of(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, importance_weights: Tensor | None
) -> Tensor:
    """``log r`` of each token, differentiable in the first; refuses what cannot be a policy loss's inputs."""
    _check_same_shape("log-probs", log_probs, old_log_probs)
    if advantages.requires_grad:
        raise ValueError("advantages that require grad: they are constants of the policy loss. Detach them.")
    _check_log_probs("log_probs", log_probs, "Megatron's loss is minus the log-prob: pass -loss")
    _check_log_probs("old_log_probs", old_log_probs, "Look at the order of the arguments: advantages come third")
    for name, factor in (("advantages", advantages), ("importance_weights", importance_weights)):
        if factor is not None and not _broadcasts(factor.shape, log_probs.shape):
            raise ValueError(
                f"{name} of shape {tuple(factor.shape)} for log-probs of shape {tuple(log_probs.shape)}: they must "
                "have that shape or broadcast to it. Give one a token."
            )
    return log_probs - old_log_probs.detach()


def one_sided(log_ratio: Tensor, advantages: Tensor, bounds: RatioBounds) -> tuple[Tensor, Tensor]:
    """log r bounded on the side that A pushes to, and where it was: ``max(-A r, -A clip(r))`` is -A of its exp.

    Bounding log r before the exp gives the same value, and a gradient of 0 beyond the bound, where that of the formula
    as written may be 0 * inf.
    """
    falls = advantages < 0
    lowest = torch.where(falls, bounds.low, log_ratio.new_full((), -math.inf))
    highest = torch.where(falls, bounds.dual, log_ratio.new_full((), bounds.high))
    return log_ratio.clamp(lowest, highest), (advantages != 0) & ((log_ratio < lowest) | (log_ratio > highest))


def clipped_surrogate(
    log_ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor, bounds: RatioBounds, weights: Tensor | None
) -> PolicyLoss:
    """``w * max(-A r, -A clip(r))`` of the ratio given; `token_log_ratio` is for ``ppo_kl``."""
    bounded, clipped = one_sided(log_ratio, advantages, bounds)
    return policy_loss_of(-advantages * bounded.exp(), clipped, token_log_ratio, weights)


def policy_loss_of(loss: Tensor, clipped: Tensor, log_ratio: Tensor, weights: Tensor | None) -> PolicyLoss:
    """The parts put together, weighted."""
    if weights is not None:
        loss = loss * weights.detach()
    return PolicyLoss(loss, clipped.expand(loss.shape).to(loss.dtype), -log_ratio.detach())


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


#: Rounding of a log-prob of 0 in bfloat16 stays below it.
_NO_LOG_PROB = 0.1
_looked_at: set[tuple[str, torch.device]] = set()


def _check_log_probs(name: str, values: Tensor, remedy: str) -> None:
    """Refuse what cannot be log-probs; always on the host, once a process on a device, where looking waits."""
    key = name, values.device
    if not values.numel() or torch.compiler.is_compiling() or (not values.is_cpu and key in _looked_at):
        return
    _looked_at.add(key)
    highest = float(values.detach().max())
    if highest > _NO_LOG_PROB:
        share = float((values.detach() > 0).float().mean())
        raise ValueError(
            f"{name} with values up to {highest:.3g}, {share:.0%} of them above 0: log-probs are 0 at the most. "
            f"{remedy}."
        )


def _check_same_shape(what: str, a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(
            f"{what} of shapes {tuple(a.shape)} and {tuple(b.shape)}: they must be equal. Cut both for the same rank, "
            "in the same order."
        )
