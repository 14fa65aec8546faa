"""The divergence of a student from its teacher at each token, from the log-probs of both at K ids."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice, check_float, check_within, require
from megatron_rl_loss.losses.ratio import Masked, check_shape, check_trained, masked_places

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
Tail = Literal["bucket", "drop", "renormalise"]
#: The log-prob of an id that the teacher did not give: its exp is 0, and unlike -inf it can be subtracted.
_NOTHING = -1e30


def divergence_at_ids(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    local: Masked,
    *,
    kind: DivergenceKind,
    beta: float | None = None,
    tail: Tail = "bucket",
    log_rest: Tensor | None = None,
    teacher_log_rest: Tensor | None = None,
    teacher_temperature: float = 1.0,
) -> Tensor:
    """Divergence of student p from teacher q, one value per token, from their log-probs at the same K ids.

    >>> student, teacher = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    >>> divergence_at_ids(student, teacher, torch.ones(1), kind="reverse_kl")  # log 2 / 2 - log 2 / 4
    tensor([0.1733])

    With ``KL(a || b) = sum_i a_i log(a_i / b_i)``:

    - ``forward_kl``: ``KL(q || p)``. ``reverse_kl``: ``KL(p || q)``.
    - ``jsd``: ``beta KL(q || m) + (1 - beta) KL(p || m)``, ``m = beta q + (1 - beta) p``. Towards beta 0 it is
      ``beta KL(q || p)``, towards 1 ``(1 - beta) KL(p || q)``; it is 0 at both ends.

    `tail` chooses the categories of the sum:

    - ``bucket``: the K ids and one category for all others, of probability ``1 - sum_i p_i``. The divergence of K + 1
      categories, never negative, and never above that of the whole vocabulary. From float32 log-probs digits of the
      others are lost below a probability of 1e-4, and below 1e-5 value and gradient of their term are noise: pass
      `log_rest`.
    - ``drop``: the K ids alone, unscaled. The sum is no divergence: it may be negative, and is not least where p = q.
    - ``renormalise``: the K ids, p and q each divided by their sum. The mass on other ids has no effect.

    Args:
        log_probs: of the student at K ids [..., K], in the whole vocabulary's distribution; differentiable.
        teacher_log_probs: of the teacher at the same ids, detached here. -inf where it gave fewer than K: these ids are
            in no sum, and `bucket` counts them among the others. A token without any has divergence and gradient 0.
        local: the `Microbatch`, this rank's tokens of it, or the mask of the tokens, [...].
        beta: of ``jsd``, in (0, 1); 0.5 by default.
        log_rest: of ``bucket``: the log of the student's probability of all ids that the teacher did not give [...],
            made where the logits are, as ``rest_without=teacher_log_probs > -inf`` of `log_probs_from_hidden` does;
            differentiable.
        teacher_log_rest: the teacher's, detached here.
        teacher_temperature: divides the teacher's log-probs, with ``renormalise`` alone: elsewhere their sum at another
            temperature would be needed, which K log-probs do not tell. The student's belongs to its log-probs.

    Returns float32 [...] (float64 of float64), computed in float64. A probability of others below half the inputs'
    epsilon (6e-8 in float32), which rounding hides, is taken as that. Raises ValueError for shapes that differ, K = 0,
    probabilities that sum to more than 1.05 (repeated ids, or logits), or with a rest not to 1, a teacher that requires
    grad while the student does not, unknown names and unusable settings; TypeError for log-probs that are no float
    tensors.
    Source: GKD, arXiv:2306.13649 eq. 1 and section 2; reverse KL of the student's samples, MiniLLM, arXiv:2306.08543.
    """
    for name, tensor in (("log_probs", log_probs), ("teacher_log_probs", teacher_log_probs)):
        check_float(name, tensor, "Pass log-probs, not ids; of a LogProbs its .log_probs")
    check_shape("teacher_log_probs", teacher_log_probs, log_probs)
    check_trained("log_probs", log_probs, teacher_log_probs=teacher_log_probs, teacher_log_rest=teacher_log_rest)
    share = check_kind(kind, beta)
    check_choice("tail", tail, get_args(Tail))
    if log_probs.dim() == 0 or log_probs.shape[-1] == 0:
        raise ValueError(f"log-probs of shape {tuple(log_probs.shape)}: they must be [..., K], K >= 1. Pass some ids.")
    check_within("teacher_temperature", teacher_temperature, "(0, inf)", "1.0 is usual")
    if teacher_temperature != 1 and tail != "renormalise":
        raise ValueError(
            f"teacher_temperature={teacher_temperature!r} with tail={tail!r}: K log-probs do not tell the mass of "
            "other ids at another temperature. Let the teacher divide its logits by it, or pass tail='renormalise'."
        )
    for name, rest in (("log_rest", log_rest), ("teacher_log_rest", teacher_log_rest)):
        if rest is not None:
            check_float(name, rest, "Pass the log of a probability")
            check_shape(name, rest, log_probs[..., 0])
            if tail != "bucket":
                raise ValueError(
                    f"{name} with tail={tail!r}: other ids are in no sum of it. Leave it out, or pass tail='bucket'."
                )
    exact = torch.promote_types(log_probs.dtype, torch.float32)
    resolution = torch.finfo(torch.promote_types(exact, teacher_log_probs.dtype)).eps / 2
    absent = (teacher_log_probs == -torch.inf) | masked_places(local, log_probs[..., 0])[..., None]
    p, q = (at_ids.double().masked_fill(absent, _NOTHING) for at_ids in (log_probs, teacher_log_probs.detach()))
    rests = [
        rest if rest is None else rest.double().masked_fill(absent.all(-1), 0)[..., None]
        for rest in (log_rest, None if teacher_log_rest is None else teacher_log_rest.detach())
    ]
    for name, at_ids, rest in (("log_probs", p, rests[0]), ("teacher_log_probs", q, rests[1])):
        check_sum(name, at_ids.detach(), None if rest is None else rest.detach())
    p, q = (
        _categories(at_ids, rest, tail, resolution)
        for at_ids, rest in zip((p, q / teacher_temperature), rests, strict=True)
    )
    if kind == "forward_kl":
        return _kl(q, p).to(exact)
    if kind == "reverse_kl":
        return _kl(p, q).to(exact)
    mixture = torch.logaddexp(q + math.log(share), p + math.log1p(-share))
    return (share * _kl(q, mixture) + (1 - share) * _kl(p, mixture)).to(exact)


def check_kind(kind: str, beta: float | None) -> float:
    """The teacher's share of the mixture, 0 without one; ValueError for an unknown kind or an unusable beta."""
    check_choice("kind of divergence", kind, get_args(DivergenceKind))
    if beta is not None:
        check_within("beta", beta, "(0, 1)", "0.5 is usual; at the ends take forward_kl or reverse_kl")
        if kind != "jsd":
            raise ValueError(f"beta={beta!r} for {kind}: only jsd takes beta. Drop beta.")
    return (0.5 if beta is None else beta) if kind == "jsd" else 0.0


def check_sum(name: str, log_probs: Tensor, log_rest: Tensor | None = None) -> None:
    """ValueError for log-probs at ids [..., K] whose probabilities sum to more than 1, or with a rest not to 1."""
    if log_probs.numel() and not torch.compiler.is_compiling():
        sums = log_probs.exp().sum(-1)
        if log_rest is not None:
            furthest = (sums + log_rest[..., 0].exp() - 1).abs().amax()
            require(
                ~(furthest > 0.05),  # NaN passes
                lambda: f"{name} whose probabilities and rest sum to 1 only within {furthest:.3g}",
                "the rest is the log of the probability of all ids that the teacher did not give. Pass "
                "rest_without=teacher_log_probs > -inf where log-probs are made.",
            )
        largest = sums.amax()
        require(
            ~(largest > 1.05),  # NaN passes
            lambda: f"{name} with probabilities of a token's ids that sum to {largest:.4g}",
            "probabilities sum to 1 at most. Give each id once per token, and log-probs, not logits.",
        )


def _categories(log_probs: Tensor, log_rest: Tensor | None, tail: Tail, resolution: float) -> Tensor:
    """Log-probs of the categories that are compared."""
    if tail == "drop":
        return log_probs
    if log_rest is not None:
        log_probs = torch.cat([log_probs, log_rest], dim=-1)
    elif tail == "bucket":
        rest = 1 - log_probs.exp().sum(-1, keepdim=True)
        rest = rest + (rest.detach().clamp(min=resolution) - rest.detach())  # the gradient is that of the sum
        log_probs = torch.cat([log_probs, rest.log()], dim=-1)
    return log_probs.log_softmax(-1)  # of a bucket: takes out what rounding adds to a sum of 1


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """``sum a log(a / b)`` from log-probs; 0 log 0 is 0."""
    return (a.exp() * (a - b).masked_fill(a == -torch.inf, 0)).sum(-1)
