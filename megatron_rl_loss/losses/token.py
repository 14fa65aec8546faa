"""Policy losses of single tokens: PPO, CISPO, SAPO, CFPO and DPPO.

Each is elementwise over tokens of any shape, and not reduced: reducers sum. Half precision is raised to float32 first.
Inputs at masked tokens are set to 0, even NaN and inf. A token of importance weight 0 has loss and gradient 0, even
with an infinite ratio. Finite inputs have finite losses and gradients: from a log-ratio of about 80 on (40 where it is
squared; 700 and 350 in float64) a ratio is that of the bound. No function waits for a device.

Each loss is a door, which checks its inputs, and a formula of them, which `torch.fx` can trace (`by_name.formula_of`).
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_bool, check_choice, check_within
from megatron_rl_loss.core.taps import reports_output
from megatron_rl_loss.losses.gates import binary_kl
from megatron_rl_loss.losses.ratio import Formula, Masked, PolicyInputs, PolicyLoss, RatioBounds

DivergenceName = Literal["tv", "kl"]


@reports_output
def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Masked,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate, one value per token: ``w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``.

    >>> log_probs, old_log_probs = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])
    >>> ppo_clip_loss(log_probs, old_log_probs, torch.ones(2), torch.ones(2)).per_token_loss
    tensor([-1.0000, -1.2000])

    ``r = exp(log_probs - old_log_probs)``. With `dual_clip` c > 1, the value is at most ``-c A`` where A < 0.

    Args:
        log_probs: of the policy in training; differentiable.
        old_log_probs: of the policy in the ratio's denominator, same shape.
        advantages: same shape; or one for all, or, of log-probs [batch, tokens], one for each row, [batch, 1].
        local: the `Microbatch`, this rank's tokens of it, or the mask of the tokens in the shape of the log-probs.
        clip_low, clip_high: clip range below and above 1; `clip_high` defaults to `clip_low` (DAPO: 0.28).
        dual_clip: c (3.0 in the paper), or None for none.
        importance_weights: the factor w, detached here; None for 1.

    Raises ValueError for log-probs of different shapes; factors of another shape; values above 0.1, or none below 0
    and some above 1e-5, which are no log-probs, and masks or weights below 0 (a device stops at them later); advantages
    that require grad, or other constants that do while the log-probs do not; ``clip_low`` outside (0, 1], or from 0.5
    to 1 without a ``clip_high``; ``clip_high`` <= 0, or from 1 to 2, which looks like a bound of the ratio;
    ``dual_clip`` <= 1.
    Source: PPO, arXiv:1707.06347 eq. 7; separate bounds, DAPO, arXiv:2503.14476 eq. 10; dual clip, arXiv:1912.09729
    eq. 5.
    """
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    return ppo(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)(inputs)


def ppo(*, clip_low: float = 0.2, clip_high: float | None = None, dual_clip: float | None = None) -> Formula:
    """PPO's formula, of inputs that were checked."""
    bounds = RatioBounds.around_1(clip_low, clip_high, dual_clip)
    return lambda inputs: bounds.surrogate(inputs, inputs.log_ratio)


@reports_output
def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Masked,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log_probs``: the clip bounds the weight, not the gradient.

    Args:
        clip_low: width below 1; None for no lower bound, as in the paper.
        clip_high: width above 1; 4.0 bounds the ratio at 5.
        log_probs, old_log_probs, advantages, local, importance_weights: as in `ppo_clip_loss`.

    `PolicyLoss.clipped` is 1 where the ratio was clipped. Raises ValueError as `ppo_clip_loss`, but for its guards
    against bounds in the place of widths: widths above 1 are usual here.
    Source: CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; with the prompt mean, ScaleRL, arXiv:2510.13786.
    """
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    return cispo(clip_low=clip_low, clip_high=clip_high)(inputs)


def cispo(*, clip_low: float | None = None, clip_high: float = 4.0) -> Formula:
    """CISPO's formula, of inputs that were checked."""
    if clip_low is not None:
        check_within("clip_low", clip_low, "(0, 1]", "None for no lower bound is usual")
    check_within("clip_high", clip_high, "(0, inf)", "4.0 is usual")
    lowest = -math.inf if clip_low is None or clip_low == 1 else math.log1p(-clip_low)

    def formula(inputs: PolicyInputs) -> PolicyLoss:
        bounded = inputs.log_ratio.detach().clamp(lowest, math.log1p(clip_high))
        clipped = (inputs.advantages != 0) & (bounded != inputs.log_ratio)
        return inputs.policy_loss(-bounded.exp() * inputs.advantages * inputs.log_probs, clipped)

    return formula


@reports_output
def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Masked,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """``-A * (4 / tau) * sigmoid(tau * (r - 1))``, tau by the sign of A: a soft gate in place of the clip.

    At r = 1 its gradient is that of ``-A r``. `PolicyLoss.clipped` is 0 everywhere: a gate cuts nothing off.

    Args:
        tau_positive, tau_negative: temperature where A > 0, and elsewhere; a larger one decays faster.
        log_probs, old_log_probs, advantages, local, importance_weights: as in `ppo_clip_loss`.

    Raises ValueError as `ppo_clip_loss`, and for a temperature outside [0.1, 100]. Source: arXiv:2511.20347, eq. 6.
    """
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    return sapo(tau_positive=tau_positive, tau_negative=tau_negative)(inputs)


def sapo(*, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Formula:
    """SAPO's formula, of inputs that were checked."""
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        check_within(name, tau, "[0.1, 100]", "1.0 and 1.05 are usual")

    def formula(inputs: PolicyInputs) -> PolicyLoss:
        taus = torch.full_like(inputs.log_ratio, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
        # From e^10 on the gate is 1 to the last bit and its gradient 0; far beyond, the exp itself would overflow.
        # Autograd makes the gradient of expm1 of its result, so it would be 0 below -17.
        place = taus * (inputs.log_ratio.clamp(max=10).exp() - 1)
        # Above 0 from the gap to 1: the gradient of a sigmoid is made of its result, which is rounded there.
        gate = torch.where(place > 0, 1 - torch.sigmoid(-place), torch.sigmoid(place)) * (4 / taus)
        return inputs.policy_loss(-inputs.advantages * gate)

    return formula


@reports_output
def cfpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Masked,
    *,
    epsilon: float = 0.2,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """``-A r + |A| (r - 1)^2 / (2 epsilon)``: a quadratic penalty in place of the clip, least at ``r = 1 +- epsilon``.

    `PolicyLoss.clipped` is 0 everywhere.

    Args:
        epsilon: width of the trust region, that of a clip range.
        log_probs, old_log_probs, advantages, local, importance_weights: as in `ppo_clip_loss`.

    Raises ValueError as `ppo_clip_loss`, and for an epsilon outside (0, 1].
    Source: CFPO, arXiv:2601.22801; before language models, SPO, arXiv:2401.16025.
    """
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    return cfpo(epsilon=epsilon)(inputs)


def cfpo(*, epsilon: float = 0.2) -> Formula:
    """CFPO's formula, of inputs that were checked."""
    check_within("epsilon", epsilon, "(0, 1]", "0.2 is usual")

    def formula(inputs: PolicyInputs) -> PolicyLoss:
        a = inputs.advantages
        change = torch.expm1(inputs.before_exp(inputs.log_ratio, power=2).masked_fill(a == 0, 0))
        # One product for both terms of r: an infinite one less another would be NaN.
        return inputs.policy_loss(a.abs() * change * (change / (2 * epsilon) - a.sign()) - a)

    return formula


@reports_output
def dppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Masked,
    *,
    divergence: DivergenceName = "tv",
    both_directions: bool = False,
    threshold: float | None = None,
    importance_weights: Tensor | None = None,
) -> PolicyLoss:
    """``-A r``, and 0 where the policy has left a trust region in the direction that A pushes it.

    With p and q the sampled token's probability now and before, that is where ``A (p - q) > 0`` and its binary
    divergence is above `threshold`: ``tv = |p - q|``, or ``kl = q log(q / p) + (1 - q) log((1 - q) / (1 - p))``.

    Args:
        old_log_probs: of the policy that sampled the tokens.
        both_directions: 0 outside the trust region for both signs of A: with ``tv``, prime-rl's IPO.
        threshold: largest divergence; by default 0.15 for ``tv``, 0.05 for ``kl``, 0.3 in both directions.
        log_probs, advantages, local, importance_weights: as in `ppo_clip_loss`.

    Raises ValueError as `ppo_clip_loss`, for an unknown divergence, and for a threshold that is not above 0 (and below
    1 for ``tv``). Source: DPPO, arXiv:2602.04879 eq. 11 to 14; IPO, prime-rl's `ipo_loss_fn` (its pull request 3418,
    the threshold that of 3586).
    """
    inputs = PolicyInputs.of(log_probs, old_log_probs, advantages, importance_weights, local)
    return dppo(divergence=divergence, both_directions=both_directions, threshold=threshold)(inputs)


def dppo(
    *, divergence: DivergenceName = "tv", both_directions: bool = False, threshold: float | None = None
) -> Formula:
    """DPPO's formula, of inputs that were checked."""
    check_choice("divergence", divergence, get_args(DivergenceName))
    check_bool("both_directions", both_directions)
    if threshold is None:
        threshold = 0.3 if both_directions else 0.15 if divergence == "tv" else 0.05
    interval = "(0, 1)" if divergence == "tv" else "(0, inf)"
    check_within("threshold", threshold, interval, "0.15 for tv, 0.05 for kl are usual")

    def formula(inputs: PolicyInputs) -> PolicyLoss:
        a = inputs.advantages
        now, before = inputs.log_probs.detach().double(), inputs.old_log_probs.double()
        difference = now.exp() - before.exp()
        distance = difference.abs() if divergence == "tv" else binary_kl(before, now)
        pushed = a != 0 if both_directions else a * difference > 0
        left_out = pushed & (distance > threshold)
        loss = -a * inputs.before_exp(inputs.log_ratio).masked_fill(left_out | (a == 0), 0).exp()
        return inputs.policy_loss(loss.masked_fill(left_out, 0), left_out)

    return formula
