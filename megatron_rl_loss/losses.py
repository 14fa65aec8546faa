"""Per-token policy losses and group-relative advantages: what the reducers aggregate.

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

from megatron_rl_loss.checks import check_choice, check_within
from megatron_rl_loss.errors import refused
from megatron_rl_loss.ids import Ids, as_ids

KlEstimator = Literal["k1", "k2", "k3"]


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
    clip_high = clip_low if clip_high is None else clip_high
    _check_same_shape(log_probs, old_log_probs)
    check_within("clip_low", clip_low, 0 < clip_low <= 1, "in (0, 1]", "0.2 is usual")
    check_within("clip_high", clip_high, 0 < clip_high < math.inf, "finite and above 0", "0.2 or 0.28 is usual")
    if 1 < clip_high < 2:
        raise refused("clip_high_is_a_bound", value=clip_high, bound=1 + clip_high, width=clip_high - 1)
    if advantages.requires_grad:
        raise refused("advantages_with_graph")
    _check_log_probs("log_probs", log_probs, "Megatron's loss is minus the log-prob: pass -loss")
    _check_log_probs("old_log_probs", old_log_probs, "Look at the order of the arguments: advantages come third")
    if dual_clip is not None:
        sound = 1 < dual_clip < math.inf
        check_within("dual_clip", dual_clip, sound, "finite and above 1", "3.0 is usual; None turns it off")
    for name, factor in (("advantages", advantages), ("importance_weights", importance_weights)):
        if factor is not None and not _broadcasts(factor.shape, log_probs.shape):
            shapes = {"shape": tuple(factor.shape), "expected": tuple(log_probs.shape)}
            raise refused("factor_of_other_shape", name=name, **shapes)
    # max(-A r, -A clip(r)) is -A r with r bounded on one side, by the sign of A. Bounding log r before the exp gives
    # the same value, and a gradient of 0 beyond the bound, where that of the formula as written may be 0 * inf.
    log_ratio = log_probs - old_log_probs.detach()
    falls = advantages < 0
    lowest = torch.where(falls, math.log1p(-clip_low) if clip_low < 1 else -math.inf, -math.inf)
    highest = torch.where(falls, math.inf if dual_clip is None else math.log(dual_clip), math.log1p(clip_high))
    lowest, highest = lowest.to(log_ratio), highest.to(log_ratio)
    loss = -advantages * log_ratio.clamp(lowest, highest).exp()
    clipped = (advantages != 0) & ((log_ratio < lowest) | (log_ratio > highest))
    if importance_weights is not None:
        loss = loss * importance_weights.detach()
    return PolicyLoss(loss, clipped.to(loss.dtype), -log_ratio.detach())


def truncated_importance_weights(log_probs: Tensor, behavior_log_probs: Tensor, *, cap: float = 2.0) -> Tensor:
    """``min(exp(log_probs - behavior_log_probs), cap)``, detached: corrects for samples drawn by another policy.

    Typically `log_probs` are the trainer's recomputed old log-probs and `behavior_log_probs` those the inference engine
    sampled with. Raises ValueError for shapes that differ and for a cap that is not finite and above 0.
    Source: truncated importance sampling, Ionides 2008; for RL post-training, Yao et al. 2025 ("Your efficient RL
    framework secretly brings you off-policy RL training").
    """
    _check_same_shape(log_probs, behavior_log_probs)
    check_within("cap", cap, 0 < cap < math.inf, "finite and above 0", "2.0 is usual")
    return (log_probs - behavior_log_probs).detach().exp().clamp(max=cap)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, *, estimator: KlEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's samples; ``d = log_probs - ref_log_probs``.

    ``k1 = d`` (unbiased, may be negative), ``k2 = d^2 / 2`` (biased), ``k3 = exp(-d) - 1 + d`` (unbiased, >= 0).
    Differentiable in `log_probs`; the reference is detached. Raises ValueError for an unknown estimator or shapes that
    differ. Source: Schulman, "Approximating KL divergence" (2020); k3 in GRPO, arXiv:2402.03300 eq. 4.
    """
    _check_same_shape(log_probs, ref_log_probs)
    check_choice("KL estimator", estimator, get_args(KlEstimator))
    difference = log_probs - ref_log_probs.detach()
    if estimator == "k1":
        return difference
    return difference.square() / 2 if estimator == "k2" else torch.expm1(-difference) + difference


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
        raise refused("rewards_no_tensor", type=type(rewards).__name__)
    if normalize_by_std:
        check_within("epsilon", epsilon, epsilon > 0, "above 0: groups of equal rewards have std 0", "1e-6 is usual")
    if rewards.dim() != 1 or not bool(torch.isfinite(rewards).all()):
        raise refused("odd_rewards", shape=tuple(rewards.shape))
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
        raise refused("rewards_of_one_rollout_differ", sample=int(unlike.nonzero()[0]))
    return 1 / rollout.bincount().double()[rollout]


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
        raise refused("looks_like_no_log_probs", name=name, highest=highest, share=share, remedy=remedy)


def _check_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise refused("unlike_log_probs", a=tuple(a.shape), b=tuple(b.shape))
