"""Score centering: a term that takes the mean of the score under the sampler out of a policy loss."""

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice
from megatron_rl_loss.core.taps import reports_output
from megatron_rl_loss.losses.at_ids import AtIds, check_at_ids, check_has_no_rest, check_has_rest, check_sum, rest_of
from megatron_rl_loss.losses.gates import Gate
from megatron_rl_loss.losses.ratio import Masked, check_shape, check_trained, masked_places

Support = Literal["vocabulary", "ids"]


@reports_output
def score_centering(
    log_probs: Tensor | AtIds,
    rollout_log_probs: Tensor | AtIds,
    advantages: Tensor,
    local: Masked,
    *,
    gate: Gate | None = None,
    support: Support = "vocabulary",
) -> Tensor:
    """``A C``, one value per token, to be added to a policy loss: ``C = sum_v sg(m(v) - beta p(v)) log p(v)``.

    >>> trainer, sampler = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.6, 0.2]]).log()
    >>> at_ids = AtIds(trainer[..., :-1], trainer[..., -1])
    >>> score_centering(at_ids, sampler, torch.ones(1), torch.ones(1))  # rho is 0.2 / 0.25
    tensor([-0.1386])

    Its gradient is the mean under the sampler q of the score ``grad log p``, over the sampler's most likely ids and
    their tail, one more category v, where q is ``rho p``. docs/losses.md, "Score centering", has the formulas.

    Args:
        log_probs: of the trainer at K ids with their rest, differentiable; with ``support="ids"`` a tensor [..., K].
        rollout_log_probs: of the sampler at the same ids [..., K], each id once; -inf where it gave fewer.
        advantages: [...], of the policy loss that this is added to.
        local: the `Microbatch`, this rank's tokens of it, or the mask of the tokens, [...].
        gate: of tokens, by p / q: that of the importance weights of the policy loss; None where it has none.
        support: what the sampler could draw: the whole ``vocabulary``, or these ``ids`` alone (top-p, top-k).

    Returns float32 [...] (float64 of float64), computed in float64, 0 where masked.

    Raises:
        ValueError: shapes that differ, K = 0, no rest, probabilities that sum to more than 1.05 (an id twice, or
            logits), or with a rest not to 1; another kind of gate; a sampler or advantages that require grad.
        TypeError: log-probs that are no float tensors.

    Source: arXiv:2609.20807.
    """
    check_choice("support", support, get_args(Support))
    for name, values in (("log_probs", log_probs), ("rollout_log_probs", rollout_log_probs)):
        check_at_ids(name, values, "Pass log-probs at the sampler's ids, not ids")
        if support == "ids":
            check_has_no_rest(name, values, "support='ids'", "the log-probs at the ids alone")
    if support == "vocabulary":
        check_has_rest("log_probs", log_probs, "support='vocabulary'", "rollout_log_probs")
    log_probs, log_rest = log_probs if isinstance(log_probs, AtIds) else (log_probs, None)
    rollout_log_probs, rest_of_q = (
        rollout_log_probs if isinstance(rollout_log_probs, AtIds) else (rollout_log_probs, None)
    )
    check_shape("rollout_log_probs", rollout_log_probs, log_probs)
    check_shape("advantages", advantages, log_probs[..., 0], broadcasts=True)
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
    rests = [None if rest is None else rest.double().masked_fill(absent.all(-1), 0) for rest in (log_rest, rest_of_q)]
    sides = [values.detach().masked_fill(absent, -torch.inf) for values in (log_p, log_q)]
    for name, at_ids, rest in zip(("log_probs", "rollout_log_probs"), sides, rests, strict=True):
        check_sum(name, at_ids, None if rest is None else rest.detach())
    if support == "ids":
        log_p, log_q = (_over(values, absent) for values in (log_p, log_q))
    p, q = (values.detach().masked_fill(absent, -torch.inf).exp() for values in (log_p, log_q))
    slopes = weighed(p, q, gate)
    centred: Tensor | float = 0.0
    if support == "vocabulary" and rests[0] is not None:
        rest_p, rest_q = (rest_of(at_ids, rest).detach() for at_ids, rest in zip(sides, rests, strict=True))
        alpha = weighed(torch.ones_like(rest_p), rest_q.clamp(min=0) / rest_p.clamp(min=1e-6), gate)
        beta = alpha.clamp(max=1)
        slopes = slopes - beta[..., None] * p
        centred = (alpha - beta) * rest_p * rests[0]
    centred = centred + (slopes * log_p.masked_fill(absent, 0)).sum(-1)
    exact = torch.promote_types(log_probs.dtype, torch.float32)
    return (advantages.detach().double() * centred).masked_fill(nothing, 0).to(exact)


def weighed(p: Tensor, q: Tensor, gate: Gate | None) -> Tensor:
    """``m(v)``: q times the weight that the policy loss gives an id of ratio p / q."""
    if gate is None:
        return q
    low, high = 0.0 if gate.low is None else gate.low, gate.high
    if gate.action == "clamp":
        return torch.minimum(torch.maximum(p, low * q), high * q)
    return p.where((p >= low * q) & (p <= high * q), 0)


def _over(log_probs: Tensor, absent: Tensor) -> Tensor:
    """Renormalised over the ids that are there; finite where none is."""
    return log_probs.masked_fill(absent, -1e30).log_softmax(-1)
