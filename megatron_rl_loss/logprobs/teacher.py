"""Divergence of a student from its teacher over the whole vocabulary: a chunk's values, and their gradient.

With p of the student, q of the teacher, z the student's logits over its temperature, and ``m = beta q + (1 - beta) p``:

    forward_kl = KL(q || p)                              d / d z = p - q
    reverse_kl = KL(p || q)                              d / d z = p (log(p / q) - KL(p || q))
    jsd = beta KL(q || m) + (1 - beta) KL(p || m)        d / d z = (1 - beta) p (log(p / m) - KL(p || m))

A KL is summed as ``a log(a / b) - a + b``, whose terms are never negative: errors of the norms drop out.
"""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import reduce_in_place
from megatron_rl_loss.core.errors import check_float, check_within
from megatron_rl_loss.logprobs.reading import LN_2, Places, Reading
from megatron_rl_loss.losses.divergence import DivergenceKind, check_kind


@dataclass(frozen=True)
class Teacher:
    """The teacher of some tokens, and the kind of divergence from it.

    Attributes:
        hidden: [..., its width], float, of the tokens as in the student's hidden states, or of all tokens where these
            are a sequence-parallel part; or, without a weight, logits of all tokens, [..., vocabulary / TP].
        weight, bias: of its output layer, the same ids of the same vocabulary as the student's on this rank.
        kind, beta: as in `divergence_at_ids`.
        temperature: of its logits; by default the student's.

    Raises ValueError for an unknown kind, and for an unusable beta or temperature; TypeError for tensors that are not
    float.
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    _: KW_ONLY
    kind: DivergenceKind
    beta: float | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        check_kind(self.kind, self.beta)
        for name in ("hidden", "weight", "bias"):
            if name == "hidden" or getattr(self, name) is not None:
                check_float(f"the teacher's {name}", getattr(self, name), "Pass hidden states and weight, or logits")
        if self.bias is not None and self.weight is None:
            raise ValueError("a teacher's bias without its weight: logits include a bias. Drop it, or pass both.")
        if self.temperature is not None:
            check_within("the teacher's temperature", self.temperature, "(0, inf)", "Leave it out for the student's")


def check_teacher(teacher: object) -> None:
    """Raise TypeError unless the object is a `Teacher`."""
    if not isinstance(teacher, Teacher):
        raise TypeError(
            f"teacher is a {type(teacher).__name__}: it must be a Teacher. Pass Teacher(hidden, weight, kind=...)."
        )


class Comparison:
    """A chunk of a student's logits beside its teacher's.

    Attributes:
        logits: the teacher's, of places in the batch.
    """

    def __init__(self, read: Reading, teacher: Teacher, logits: Callable[[Places], Tensor]) -> None:
        self._read, self._other, self.logits = read, read.at(teacher.temperature), logits
        self._kind, self._beta = teacher.kind, check_kind(teacher.kind, teacher.beta)
        tensors = teacher.hidden, teacher.weight, teacher.bias
        self.read_in_backward = [tensor for tensor in tensors if tensor is not None]

    def compare(self, logits: Tensor, norm: Tensor, teacher_logits: Tensor, part: slice) -> Tensor:
        """[4, chunk]: the divergence; the level, KL(p || q) or KL(p || m), of the gradient; the teacher's norm."""
        teacher_norm = self._other.combine(self._other.statistics(teacher_logits, part), part)[1][:2].to(norm.dtype)
        sums = torch.zeros_like(teacher_norm)
        for rows, log_p, p, log_q, q in self._blocks(logits, norm, teacher_logits, teacher_norm, part):
            if self._kind == "forward_kl":
                sums[0, rows] = _kl(q, log_q, p, log_p)
            elif self._kind == "reverse_kl":
                sums[:, rows] = _kl(p, log_p, q, log_q)
            else:
                log_m = self._middle(p, q)
                m = log_m.exp2()
                level = _kl(p, log_p, m, log_m)
                sums[:, rows] = torch.stack([self._beta * _kl(q, log_q, m, log_m) + (1 - self._beta) * level, level])
        # The third round of a chunk, after two for the teacher's norm. Backward takes none: its level is kept.
        if self._read.tp_group is not None and sums.numel():
            reduce_in_place(sums, self._read.tp_group)
        return torch.cat([sums, teacher_norm])

    def slopes(
        self, logits: Tensor, norm: Tensor, teacher_logits: Tensor, compared: Tensor, d: Tensor, part: slice
    ) -> Iterator[Tensor]:
        """The gradient towards the logits, a block after the other, of ``d * divergence``; `compared` as above."""
        factor = (d * self._read.scale)[:, None]
        for rows, log_p, p, log_q, q in self._blocks(logits, norm, teacher_logits, compared[2:], part):
            if self._kind == "forward_kl":
                yield p.sub_(q).mul_(factor[rows])
                continue
            log_m = log_q if self._kind == "reverse_kl" else self._middle(p, q)
            # Where p is 0 its logarithm is -inf, and the product below must be 0, not NaN.
            above = log_p.sub_(log_m).mul_(LN_2).sub_(compared[1, rows, None]).masked_fill_(p == 0, 0)
            yield above.mul_(p).mul_((1 - self._beta) * factor[rows])

    def _middle(self, p: Tensor, q: Tensor) -> Tensor:
        """log2 m, finite: below the smallest normal number nothing counts."""
        return (self._beta * q + (1 - self._beta) * p).clamp_(min=torch.finfo(p.dtype).tiny).log2_()

    def _blocks(
        self, logits: Tensor, norm: Tensor, teacher_logits: Tensor, teacher_norm: Tensor, part: slice
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
        """Rows at a time: log2 p and p, log2 q and q."""
        student = self._read.probabilities(logits, norm, part)
        teacher = self._other.probabilities(teacher_logits, teacher_norm, part)
        for (rows, log_p, p), (_, log_q, q) in zip(student, teacher, strict=True):
            yield rows, log_p, p, log_q, q


def _kl(a: Tensor, log_a: Tensor, b: Tensor, log_b: Tensor) -> Tensor:
    """``sum_j a log(a / b) - a + b`` of this rank's ids, from logarithms to base 2; 0 log 0 is 0."""
    return (log_a - log_b).mul_(a).masked_fill_(a == 0, 0).sum(-1).mul_(LN_2).add_((b - a).sum(-1))
