"""Score centering: a term that takes the mean of the score under the sampler out of a policy loss."""

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice, check_float
from megatron_rl_loss.core.taps import reports_output
from megatron_rl_loss.losses.divergence import check_sum
from megatron_rl_loss.losses.gates import Gate
from megatron_rl_loss.losses.ratio import Masked, check_shape, check_trained, masked_places

Support = Literal["vocabulary", "ids"]


@reports_output
def score_centering(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    local: Masked,
    *,
    gate: Gate | None = None,
    support: Support = "vocabulary",
) -> Tensor:
    """``A C``, one value per token, to be added to a policy loss: ``C = sum_H sg(m(v) - alpha p(v)) log p(v)``.

    >>> trainer, sampler = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.6, 0.2]]).log()
    >>> score_centering(trainer, sampler, torch.ones(1), torch.ones(1))  # rho is 0.2 / 0.25
    tensor([-0.1386])

    Where sampler q and trainer p differ, the score ``grad log p`` has a mean under q that is not 0, and the policy
    drifts by it in every step. The gradient of this term is that mean, weighed as the policy loss is, with p at the
    sampler's most likely ids H, and in its tail, q modelled as ``rho p``, ``rho = (1 - sum_H q) / (1 - sum_H p)`` (its
    denominator at least 1e-6). Its value is no loss and need not be small. It is 0-mean where p = q.

    | gate | m(v) on H | alpha of the tail |
    |---|---|---|
    | None: the policy loss has no weight of p / q | q | rho |
    | ``Gate(action="clamp", ...)``: truncated weights | clamp(p, low q, high q) | clamp(1, low rho, high rho) |
    | ``Gate(action="mask", ...)``: IcePop | p where p / q is within, else 0 | 1 where 1 / rho is within, else 0 |

    Args:
        log_probs: of the policy in training at K ids [..., K], in the whole vocabulary's distribution; differentiable.
            With labels [..., 1 + K], the sampled token's first, `log_probs_from_logits`, `log_probs_from_hidden` and
            `loss_from_hidden` give all of them in one pass, at any tensor parallelism.
        rollout_log_probs: of the sampler at the same ids, detached here; -inf where it gave fewer. Each id once: where
            an engine adds the sampled token to its top K, it may be there already.
        advantages: [...], as in `ppo_clip_loss`: of the policy loss that this is added to.
        local: the `Microbatch`, this rank's tokens of it, or the mask of the tokens, [...].
        gate: of tokens, by their ratio: that of the importance weights of the policy loss. None where it has none.
        support: what the sampler could draw: the ``vocabulary``, of which H are the most likely; or these ``ids`` alone
            (top-p, top-k): p and q are then renormalised over them, and there is no tail. The policy loss takes its
            log-probs over the same ids (`keep`).

    Returns float32 [...] (float64 of float64), computed in float64, 0 where masked. Raises ValueError for shapes that
    differ, K = 0, probabilities that sum to more than 1.05 (an id twice, or logits), another gate, and a sampler or
    advantages that require grad; TypeError for log-probs that are no float tensors.
    Source: arXiv:2609.20807.
    """
    for name, tensor in (("log_probs", log_probs), ("rollout_log_probs", rollout_log_probs)):
        check_float(name, tensor, "Pass log-probs at the sampler's ids, not ids")
    check_shape("rollout_log_probs", rollout_log_probs, log_probs)
    if log_probs.dim() == 0 or log_probs.shape[-1] == 0:
        raise ValueError(f"log-probs of shape {tuple(log_probs.shape)}: they must be [..., K], K >= 1. Pass some ids.")
    check_shape("advantages", advantages, log_probs[..., 0], broadcasts=True)
    check_choice("support", support, get_args(Support))
    if gate is not None and (not isinstance(gate, Gate) or (gate.level, gate.metric) != ("token", "ratio")):
        raise ValueError(
            f"gate={gate!r}: the term follows weights of single tokens, by their ratio. Pass None, Gate(high=..., "
            "action='clamp') for truncated weights, or Gate(low=..., high=...) for IcePop."
        )
    if advantages.requires_grad:
        raise ValueError("advantages that require grad: advantages are constants of the policy loss. Detach them.")
    check_trained("log_probs", log_probs, rollout_log_probs=rollout_log_probs)
    nothing = masked_places(local, log_probs[..., 0])
    absent = (rollout_log_probs.detach() == -torch.inf) | nothing[..., None]
    log_p, log_q = (values.double() for values in (log_probs, rollout_log_probs.detach()))
    for name, values in (("log_probs", log_p), ("rollout_log_probs", log_q)):
        check_sum(name, values.detach().masked_fill(absent, -torch.inf))
    if support == "ids":
        log_p, log_q = (_over(values, absent) for values in (log_p, log_q))
    slopes = coefficients(log_p.detach().masked_fill(absent, -torch.inf).exp(), log_q, absent, gate, support)
    centred = (slopes * log_p.masked_fill(absent, 0)).sum(-1)
    exact = torch.promote_types(log_probs.dtype, torch.float32)
    return (advantages.detach().double() * centred).masked_fill(nothing, 0).to(exact)


def coefficients(p: Tensor, log_q: Tensor, absent: Tensor, gate: Gate | None, support: Support) -> Tensor:
    """``m(v) - alpha p(v)`` at each id, 0 where there is none."""
    q = log_q.masked_fill(absent, -torch.inf).exp()
    rho = torch.zeros_like(p[..., :1])
    if support == "vocabulary":
        rest_of_q, rest_of_p = (1 - at_ids.sum(-1, keepdim=True) for at_ids in (q, p))
        rho = rest_of_q.clamp(min=0) / rest_of_p.clamp(min=1e-6)
    if gate is None:
        m, alpha = q, rho
    else:
        low, high = 0.0 if gate.low is None else gate.low, gate.high
        if gate.action == "clamp":
            m = torch.minimum(torch.maximum(p, low * q), high * q)
            alpha = torch.minimum(torch.maximum(torch.ones_like(rho), low * rho), high * rho)
        else:
            m = p.where((p >= low * q) & (p <= high * q), 0)
            alpha = ((low * rho <= 1) & (high * rho >= 1)).to(p)
    return (m - alpha * p).masked_fill(absent, 0)


def _over(log_probs: Tensor, absent: Tensor) -> Tensor:
    """Renormalised over the ids that are there; finite where none is."""
    return log_probs.masked_fill(absent, -1e30).log_softmax(-1)
