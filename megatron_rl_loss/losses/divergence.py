"""The divergence of a student from its teacher at each token, from the log-probs of both at K ids."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import check_choice, check_within
from megatron_rl_loss.losses.at_ids import AtIds, check_at_ids, check_has_no_rest, check_has_rest, check_sum, rest_of
from megatron_rl_loss.losses.ratio import Masked, check_shape, check_trained, masked_places

DivergenceKind = Literal["forward_kl", "reverse_kl", "jsd"]
Tail = Literal["bucket", "drop", "renormalise"]
#: The log-prob of an id that the teacher did not give: its exp is 0, and unlike -inf it can be subtracted.
_NOTHING = -1e30


def divergence_at_ids(
    log_probs: Tensor | AtIds,
    teacher_log_probs: Tensor | AtIds,
    local: Masked,
    *,
    kind: DivergenceKind,
    beta: float | None = None,
    tail: Tail = "bucket",
    teacher_temperature: float = 1.0,
) -> Tensor:
    """Divergence of student p from teacher q, one value per token, from their log-probs at the same K ids.

    >>> student, teacher = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    >>> at_ids = AtIds(student[..., :-1], student[..., -1])
    >>> divergence_at_ids(at_ids, teacher, torch.ones(1), kind="reverse_kl")  # log 2 / 2 - log 2 / 4
    tensor([0.1733])

    Args:
        log_probs: of the student at K ids, differentiable: `AtIds` for ``bucket``, else a tensor [..., K].
        teacher_log_probs: at the same ids [..., K]; -inf where it gave fewer. `AtIds` where it sends its rest.
        local: the `Microbatch`, this rank's tokens of it, or the mask of the tokens, [...].
        kind: ``forward_kl`` KL(q || p), ``reverse_kl`` KL(p || q), or ``jsd`` beta KL(q || m) + (1 - beta) KL(p || m)
            with m = beta q + (1 - beta) p.
        beta: of ``jsd``, in (0, 1); 0.5 by default.
        tail: ``bucket``: the K ids and one category for all others. ``drop``: the K ids alone, which is no divergence
            and may be negative. ``renormalise``: p and q divided by their sums over the K ids.
        teacher_temperature: divides the teacher's log-probs, with ``renormalise`` alone.

    Returns float32 [...] (float64 of float64), computed in float64. docs/logprobs.md, "Distillation", says more.

    Raises:
        ValueError: shapes that differ, K = 0, no rest of the student's for ``bucket``, probabilities that sum to more
            than 1.05, or with a rest not to 1; a teacher alone that requires grad; unknown names and unusable settings.
        TypeError: log-probs that are no float tensors.

    Source: GKD, arXiv:2306.13649 eq. 1 and section 2; MiniLLM, arXiv:2306.08543.
    """
    share = check_kind(kind, beta)
    check_choice("tail", tail, get_args(Tail))
    for name, values in (("log_probs", log_probs), ("teacher_log_probs", teacher_log_probs)):
        check_at_ids(name, values, "Pass log-probs, not ids; of a LogProbs its .log_probs")
        if tail != "bucket":
            check_has_no_rest(name, values, f"tail={tail!r}", "the log-probs alone, or tail='bucket'")
    if tail == "bucket":
        check_has_rest("log_probs", log_probs, "tail='bucket'", "teacher_log_probs")
    log_probs, log_rest = log_probs if isinstance(log_probs, AtIds) else (log_probs, None)
    teacher_log_probs, teacher_log_rest = (
        teacher_log_probs if isinstance(teacher_log_probs, AtIds) else (teacher_log_probs, None)
    )
    check_shape("teacher_log_probs", teacher_log_probs, log_probs)
    check_trained("log_probs", log_probs, teacher_log_probs=teacher_log_probs, teacher_log_rest=teacher_log_rest)
    check_within("teacher_temperature", teacher_temperature, "(0, inf)", "1.0 is usual")
    if teacher_temperature != 1 and tail != "renormalise":
        raise ValueError(
            f"teacher_temperature={teacher_temperature!r} with tail={tail!r}: K log-probs do not tell the mass of "
            "other ids at another temperature. Let the teacher divide its logits by it, or pass tail='renormalise'."
        )
    exact = torch.promote_types(log_probs.dtype, torch.float32)
    resolution = torch.finfo(torch.promote_types(torch.float32, teacher_log_probs.dtype)).eps / 2
    absent = (teacher_log_probs == -torch.inf) | masked_places(local, log_probs[..., 0])[..., None]
    p, q = (at_ids.double().masked_fill(absent, _NOTHING) for at_ids in (log_probs, teacher_log_probs.detach()))
    rests = [
        rest if rest is None else rest.double().masked_fill(absent.all(-1), 0)
        for rest in (log_rest, None if teacher_log_rest is None else teacher_log_rest.detach())
    ]
    for name, at_ids, rest in (("log_probs", p, rests[0]), ("teacher_log_probs", q, rests[1])):
        check_sum(name, at_ids.detach(), None if rest is None else rest.detach())
    if tail == "bucket":
        teacher_rest = rest_of(q, None).clamp(min=resolution).log() if rests[1] is None else rests[1]
        assert rests[0] is not None
        p, q = (torch.cat([at_ids, rest[..., None]], -1) for at_ids, rest in ((p, rests[0]), (q, teacher_rest)))
    if tail != "drop":  # of a bucket: takes out what rounding adds to a sum of 1
        p, q = p.log_softmax(-1), (q / teacher_temperature).log_softmax(-1)
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


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """``sum a log(a / b)`` from log-probs; 0 log 0 is 0."""
    return (a.exp() * (a - b).masked_fill(a == -torch.inf, 0)).sum(-1)
