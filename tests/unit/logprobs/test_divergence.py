"""Divergence over the whole vocabulary where formulas are delicate; values and gradients are in test_logprobs.py."""

import itertools
from typing import Any

import head_oracle
import pytest
import torch
from head_oracle import FP32, batch_of, relative
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import OutputLayer, Samples, Teacher, ZigzagTHD, log_probs_from_hidden, loss_from_hidden

KINDS: dict[str, dict[str, Any]] = {
    "forward_kl": {"kind": "forward_kl"},
    "reverse_kl": {"kind": "reverse_kl"},
    "jsd": {"kind": "jsd", "beta": 0.3},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


#: Of a probability, in float32, many of them with random signs.
ROUNDING = 2e-8
INF = torch.inf
#: Of student and teacher: ids that neither has, ids that one alone has, a certain teacher, ties, far apart.
ROWS = [
    ([1.0, 2, -INF, 0], [0.0, 1, -INF, 3], ()),
    ([1.0, 2, 0, 0], [0.0, 1, -INF, 3], ("reverse_kl",)),
    ([1.0, 2, -INF, 0], [0.0, 1, 2, 3], ("forward_kl",)),
    ([1.0, 2, 3, 0], [0.0, -INF, -INF, -INF], ("reverse_kl",)),
    ([2.0, 2, 2, 2], [1.0, 1, 1, 1], ()),
    ([90.0, 0, -90, 0], [0.0, 90, 0, -90], ()),
    ([3e3, 0, 0, 0], [0.0, 0, 0, 0], ()),
]


@every_kind
def test_infinite_and_far_logits(kind: str) -> None:
    """Infinite where the formula is, and nowhere NaN; of equal distributions 0."""
    for student, teacher, infinite in ROWS:
        logits, taught = (torch.tensor([row], dtype=torch.float64) for row in (student, teacher))
        p, q = logits.softmax(1), taught.softmax(1)
        log_p, log_q = logits.log_softmax(1), taught.log_softmax(1)
        m = (0.3 * q + 0.7 * p).log()
        terms: dict[str, Any] = {"forward_kl": [(1, q, log_q, log_p)], "reverse_kl": [(1, p, log_p, log_q)]}
        terms["jsd"] = [(0.3, q, log_q, m), (0.7, p, log_p, m)]
        expected = sum(
            share * float(a * (log_a - log_b))
            for share, *measures in terms[kind]
            for a, log_a, log_b in zip(*(x[0] for x in measures), strict=True)
            if a > 0
        )
        leaf = logits.detach().float().T.requires_grad_()
        of_teacher = Teacher(taught.float(), **KINDS[kind])
        divergences = log_probs_from_hidden(torch.ones(1, 1), OutputLayer(leaf), teacher=of_teacher).divergence
        assert (expected == INF) == (kind in infinite)
        assert divergences.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)
        if kind not in infinite:
            (gradient,) = torch.autograd.grad(divergences.sum(), leaf)
            assert gradient.isfinite().all()
            if p.tolist() == q.tolist():
                assert gradient.count_nonzero() == 0


@every_kind
def test_small_divergences_are_not_lost_and_never_negative(kind: str) -> None:
    """32,768 ids: a sum of p log(p / q) alone is off by the rounding of both norms, 1e-6."""
    generator = torch.Generator().manual_seed(0)
    teacher = 3 * torch.randn(6, 32768, generator=generator)
    steps = torch.tensor([0, 1e-3, 3e-3, 1e-2, 1e-1, 1])[:, None]
    student = teacher + steps * torch.randn(6, 32768, generator=generator)
    of_teacher = Teacher(teacher, **KINDS[kind])
    divergences = log_probs_from_hidden(
        torch.eye(6), OutputLayer(student.T.contiguous()), teacher=of_teacher
    ).divergence.double()
    taught = teacher.double() + 0 * steps
    expected = head_oracle.divergence(student.double(), taught, torch.zeros(6, 0).long(), **KINDS[kind])
    assert ((divergences - expected).abs() <= ROUNDING + 1e-6 * expected).all()
    assert (divergences >= -ROUNDING).all()


@every_kind
def test_the_teacher_gets_no_gradient_and_may_come_as_logits_or_be_the_student(kind: str) -> None:
    batch = batch_of(9, 24, 16)
    hidden, weight = (leaf.float().requires_grad_() for leaf in (batch.hidden, batch.weight))
    taught: dict[str, Any] = {key: leaf.float().requires_grad_() for key, leaf in batch.taught.items()}
    layer = OutputLayer(weight, chunk_tokens=4)
    outputs = log_probs_from_hidden(hidden, layer, teacher=Teacher(**taught, **KINDS[kind]))
    assert outputs.log_probs is None
    assert outputs.entropy is None
    outputs.divergence.sum().backward()
    assert all(leaf.grad is None for leaf in taught.values())
    assert hidden.grad is not None
    logits = taught["hidden"] @ taught["weight"].T
    of_logits = log_probs_from_hidden(hidden, layer, teacher=Teacher(logits, **KINDS[kind]))
    torch.testing.assert_close(of_logits.divergence, outputs.divergence)
    itself = log_probs_from_hidden(hidden, layer, teacher=Teacher(hidden, weight, **KINDS[kind])).divergence
    assert itself.abs().max() <= ROUNDING
    (gradient,) = torch.autograd.grad(itself.sum(), hidden)
    assert gradient.abs().max() <= 1e-6


@every_kind
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_is_its_casts(to: torch.dtype, kind: str) -> None:
    batch = batch_of(9, 24, 16)

    def divergences_as(dtype: torch.dtype) -> Tensor:
        taught: dict[str, Any] = {key: tensor.to(dtype) for key, tensor in batch.taught.items()}
        teacher = Teacher(**taught, **KINDS[kind])
        layer = OutputLayer(batch.weight.to(dtype))
        return log_probs_from_hidden(batch.hidden.to(dtype), layer, teacher=teacher).divergence

    with torch.autocast("cpu", dtype=to):
        inside = divergences_as(torch.float32)
    assert torch.equal(inside, divergences_as(to))
    assert not torch.equal(inside, divergences_as(torch.float32))  # negative control


# --- memory and cuts


@pytest.mark.parametrize(("ids", "taught"), [(1, False), (8, False), (8, True)])
def test_what_is_kept_for_backward(ids: int, taught: bool) -> None:
    """No copy of what the caller gave, and three numbers a token; with a teacher, four more."""
    kept: list[Tensor] = []
    hidden, weight = torch.randn(50, 6, requires_grad=True), torch.randn(64, 6, requires_grad=True)
    labels, layer = torch.zeros(50, ids, dtype=torch.int64), OutputLayer(weight, chunk_tokens=8)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        if taught:
            teacher = Teacher(hidden, weight, kind="jsd")
            log_probs_from_hidden(hidden, layer, labels, teacher=teacher)
        else:
            log_probs_from_hidden(hidden, layer, labels)
    of_caller = {tensor.untyped_storage().data_ptr() for tensor in (hidden, weight, labels)}
    made = [saved.numel() for saved in kept if saved.untyped_storage().data_ptr() not in of_caller]
    assert sorted(made) == [3 * 50] + [4 * 50] * taught
    # Labels, and the leaves of student and teacher: backward refuses one that was changed in place.
    assert len(kept) - len(made) == 3 + 2 * taught


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_packed_rows_cut_over_cp(cp_size: int) -> None:
    """K ids and the teacher's hidden states are columns of the micro-batch; a rank has what the whole has there."""
    lengths, padded = [5, 9, 3], [8, 16, 8]
    starts = [0, 8, 24]
    total, batch = sum(padded), batch_of(32, 24, 16)
    masks = [torch.ones(n) * (i != 1) for i, n in enumerate(lengths)]  # a fully masked sample
    hidden, weight = batch.hidden.float(), batch.weight.float()
    taught, its_weight = batch.taught["hidden"].float(), batch.taught["weight"].float()
    whole_mask = torch.zeros(total)
    for start, mask in zip(starts, masks, strict=True):
        whole_mask[start : start + len(mask)] = mask
    expected = head_oracle.divergence(
        batch.hidden @ batch.weight.T, batch.taught["hidden"] @ batch.taught["weight"].T, batch.ids, "jsd"
    )
    log_probs, _ = head_oracle.log_probs_and_entropy(batch.hidden @ batch.weight.T, batch.ids)
    seen = 0
    for cp_rank in range(cp_size):
        layout = ZigzagTHD([0, *itertools.accumulate(padded)], total_lengths=lengths)
        samples = Samples(masks, layout=layout)
        tokens = samples.local(cp_rank, cp_size)
        local, of_rank = tokens.of, tokens.mask  # `microbatch.local` is the former
        teacher = Teacher(local(taught), its_weight, kind="jsd")
        outputs = log_probs_from_hidden(
            local(hidden), OutputLayer(weight), local(batch.ids), teacher=teacher, token_mask=of_rank
        )
        kept = torch.tensor(of_rank) > 0
        assert torch.equal(kept, local(whole_mask) > 0)
        seen += int(kept.sum())
        assert relative(outputs.divergence, local(expected) * kept) <= FP32
        assert relative(outputs.log_probs, local(log_probs) * kept[:, None]) <= FP32
    assert seen == int(whole_mask.sum())


# --- refusals

H, W, T, U = torch.zeros(3, 4), torch.zeros(8, 4), torch.zeros(3, 2), torch.zeros(8, 2)


def of(*of_model: Tensor, labels: Tensor | None = None, **of_teacher: Any) -> Any:
    teacher = Teacher(*(of_model or (T, U)), **{"kind": "jsd"} | of_teacher)
    return log_probs_from_hidden(H, OutputLayer(W), labels, teacher=teacher)


REFUSALS = refusals(
    of,
    ((T[:2], U), r"a teacher of 8 ids on this rank for tokens \(2,\): the student has 8 ids and", (T, U)),
    ((T, U[:7]), "a teacher of 7 ids on this rank", (T, U)),
    ((T,), "a teacher of 2 ids on this rank", (T @ U.T,)),
    ((T, W), r"\(3, 2\).* and \(8, 4\)", (H, W)),
    ({"kind": "kl"}, "kind of divergence 'kl'", {"kind": "reverse_kl"}),
    ({"beta": 1}, r"beta is 1: it must be a number in \(0, 1\)", {"beta": 0.9}),
    ({"kind": "forward_kl", "beta": 0.5}, "beta=0.5 for forward_kl", {"kind": "forward_kl"}),
    ({"temperature": 0}, "the teacher's temperature is 0", {"temperature": 2}),
    ({"labels": torch.zeros(3, 0).long()}, "K >= 1", {"labels": torch.zeros(3).long()}),
)
REFUSALS |= refusals(
    lambda **more: Teacher(hidden=T, **more), ({"kind": "KL"}, "kind of divergence 'KL'", {"kind": "jsd"})
)
REFUSALS |= refusals(
    lambda *of_teacher: Teacher(*of_teacher, kind="jsd"),
    ((T.long(),), "the teacher's hidden is torch.int64: it must be a float tensor", (T,)),
    (([[0.0]],), "the teacher's hidden is a list: it must be a float tensor", (T,)),
    ((T, U.long()), "the teacher's weight is torch.int64", (T, U)),
    ((T, U, U[:, 0].long()), "the teacher's bias is torch.int64", (T, U, U[:, 0])),
    error=TypeError,
)


def taught(teacher: Any, inputs: Any = None) -> Any:
    per_token: Any = lambda log_probs, entropy, divergence=None, other=None: (-log_probs, {})  # noqa: E731
    return loss_from_hidden(H, OutputLayer(W), torch.zeros(3).long(), torch.ones(3), per_token, inputs, teacher=teacher)


JSD = Teacher(T, U, kind="jsd")
REFUSALS |= refusals(
    taught,
    *(
        ((wrong,), f"teacher is a {type(wrong).__name__}: it must be a Teacher", (JSD,))
        for wrong in ([T, U], T, {"hidden": T})
    ),
    error=TypeError,
)
REFUSALS |= refusals(
    taught,
    (
        (JSD, {"divergence": torch.ones(3)}),
        "an input named 'divergence', with a teacher",
        (JSD, {"other": torch.ones(3)}),
    ),
)

test_refusals = refusal_tests(REFUSALS)


def test_misuse_that_shapes_or_types_alone_show() -> None:
    hidden, layer, labels = torch.ones(3, 2, 4), OutputLayer(torch.ones(7, 4)), torch.zeros(3, 2, dtype=torch.int64)
    per_token: Any = lambda log_probs, entropy, **inputs: (-log_probs, {})  # noqa: E731
    with pytest.raises(ValueError, match=r"weights of shape .2, 3. .* Transpose"):
        loss_from_hidden(hidden, layer, labels, torch.ones(2, 3), per_token)
    with pytest.raises(ValueError, match=r"x of shape .2, 3. .* Transpose"):
        loss_from_hidden(hidden, layer, labels, torch.ones(6), per_token, {"x": torch.ones(2, 3)})
    with pytest.raises(TypeError, match=r"hidden is torch\.int64: it must be a float tensor"):
        log_probs_from_hidden(hidden.long(), layer, labels)
    with pytest.raises(TypeError, match=r"output layer's weight is torch\.int64: it must be a float tensor"):
        OutputLayer(layer.weight.long())
    with pytest.raises(TypeError, match="output_layer is a Tensor: it must be an OutputLayer"):
        log_probs_from_hidden(hidden, layer.weight, labels)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="no labels, and no teacher: nothing would be read of the logits"):
        log_probs_from_hidden(hidden, layer)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"kernel='triton' with a teacher: .* Leave kernel out"):
        log_probs_from_hidden(hidden, layer, labels, teacher=Teacher(hidden, layer.weight, kind="jsd"), kernel="triton")
    with pytest.raises(ValueError, match="bias without its weight"):
        Teacher(torch.ones(3, 2, 7), bias=torch.ones(7), kind="jsd")
