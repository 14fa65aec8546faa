"""PPO's clipped loss of single tokens; what holds for its inputs is said in `losses/token.py`."""

from torch import Tensor

from megatron_rl_loss.core.taps import reports_output
from megatron_rl_loss.losses.ratio import Formula, Masked, PolicyInputs, PolicyLoss, RatioBounds


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
