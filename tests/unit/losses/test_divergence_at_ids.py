"""Divergences at K ids against float64 over explicit categories; what each tail is and is not."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from divergence_oracle import divergence
from rests import with_rest
from torch import Tensor

from megatron_rl_loss import AtIds, Samples, Term, divergence_at_ids, log_probs_from_logits, plan_step
from megatron_rl_loss.losses.divergence import DivergenceKind, Tail

INF, NAN = math.inf, math.nan
VOCABULARY, K, TOKENS = 40, 6, 64
KINDS, TAILS = get_args(DivergenceKind), get_args(Tail)
EVERY = pytest.mark.parametrize(("kind", "tail"), list(itertools.product(KINDS, TAILS)))
#: Half the distance of float32's numbers around 1: what one rounding may change, relatively.
ROUNDING = torch.finfo(torch.float32).eps / 2


def stated(p: list[float], q: list[float], kind: str, tail: str, beta: float = 0.5) -> float:
    """The divergence by its definition: the probabilities of the teacher's ids, one term after the other."""
    if tail == "bucket":
        p, q = [*p, 1 - math.fsum(p)], [*q, 1 - math.fsum(q)]
    if tail == "renormalise":
        p, q = [x / math.fsum(p) for x in p], [x / math.fsum(q) for x in q]

    def kl(a: list[float], b: list[float]) -> float:
        return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x)

    if kind != "jsd":
        return kl(q, p) if kind == "forward_kl" else kl(p, q)
    mixture = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


def drawn(dtype: torch.dtype = torch.float32, spread: float = 2.0, near: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of student and teacher over the whole vocabulary; the teacher's most likely ids come first."""
    generator = torch.Generator().manual_seed(0)
    teacher, noise = (
        torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64) * spread for _ in range(2)
    )
    teacher = teacher.sort(descending=True).values
    return (teacher + near * noise).log_softmax(-1).to(dtype), teacher.log_softmax(-1).to(dtype)


def with_its_rest(log_probs: Tensor, teacher_log_probs: Tensor, tail: str = "bucket", **_: Any) -> Tensor | AtIds:
    """What the tail takes of a student's log-probs."""
    return with_rest(log_probs, teacher_log_probs) if tail == "bucket" else log_probs


def at_ids(log_probs: Tensor, teacher_log_probs: Tensor, **settings: Any) -> Tensor:
    student = with_its_rest(log_probs, teacher_log_probs, **settings)
    return divergence_at_ids(student, teacher_log_probs, torch.ones(log_probs.shape[:-1]), **settings)


@EVERY
@pytest.mark.parametrize("missing", [0, 2, K])
def test_values_are_the_formulas(kind: Any, tail: Any, missing: int) -> None:
    """Float32 inputs of which float64 is computed: one rounding, of the result."""
    student, teacher = (logs[:, :K].clone() for logs in drawn())
    teacher[::2, K - missing :] = -INF
    for beta in (0.1, 0.5, 0.9) if kind == "jsd" else (None,):
        divergences = at_ids(student, teacher, kind=kind, tail=tail, beta=beta)
        assert (divergences.shape, divergences.dtype) == ((TOKENS,), torch.float32)
        for token, value in enumerate(divergences.tolist()):
            known = [i for i in range(K) if teacher[token, i] > -INF]
            p, q = ([math.exp(logs[token, i]) for i in known] for logs in (student, teacher))
            right = stated(p, q, kind, tail, *([beta] if beta else [])) if p else 0.0
            # Sums of K + 1 float64 terms, each below a few times 10, then rounded to float32.
            assert value == pytest.approx(right, rel=ROUNDING, abs=1e-14)


@EVERY
def test_gradients_are_the_formulas(kind: Any, tail: Any) -> None:
    """Those of ids that the teacher did not give, and of masked tokens, are 0."""
    student, teacher = (logs[:, :K].clone() for logs in drawn())
    teacher[::2, 4:], teacher[6], student[5] = -INF, -INF, NAN
    mask = torch.ones(TOKENS)
    mask[[5, 7]] = 0
    # In float64: what reaches float32 log-probs by two ways, their own and the rest's, is rounded twice.
    leaf, upstream = student.double().requires_grad_(), torch.linspace(-1, 1, TOKENS).double()
    now = with_its_rest(leaf, teacher, tail)
    divergence_at_ids(now, teacher, mask, kind=kind, tail=tail).backward(upstream)
    right = torch.zeros(TOKENS, K, dtype=torch.float64)
    for token in (i for i in range(TOKENS) if i not in (5, 6, 7)):
        known = teacher[token] > -INF
        exact = student[token, known].double().requires_grad_()
        value = divergence(exact.exp(), teacher[token, known].double().exp(), kind, tail)
        (slope,) = torch.autograd.grad(value, exact)
        right[token, known] = slope * upstream[token]
    assert leaf.grad is not None
    assert (leaf.grad[right == 0] == 0).all()
    torch.testing.assert_close(leaf.grad, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_is_between_0_and_the_whole_vocabulary(kind: Any) -> None:
    """The divergence grows with K, as merged categories say less; with all ids it is the whole vocabulary's."""
    # Others of probability e^-10 at least: rounding changes that by 1e-16 / e^-10, and so the term at most.
    for spread, near in itertools.product((0.1, 1.0), (1e-6, 1e-2, 1.0)):
        student, teacher = drawn(torch.float64, spread, near)
        by_k = [at_ids(student[:, :k], teacher[:, :k], kind=kind) for k in (1, 2, 8, VOCABULARY - 1, VOCABULARY)]
        whole = divergence(student.exp(), teacher.exp(), kind)
        assert (1 - student[:, :-1].exp().sum(-1)).min() > math.exp(-10)
        assert all((more >= less - 1e-11).all() for less, more in itertools.pairwise([torch.zeros(()), *by_k]))
        # A category of probability below 1.1e-16 stands beside all ids: its term is at most that times its log.
        torch.testing.assert_close(by_k[-1], whole, rtol=1e-12, atol=1e-13)
        rounded = at_ids(student[:, :K].float(), teacher[:, :K].float(), kind=kind)
        assert (rounded >= -1e-15).all()


def test_dropping_the_tail_is_no_divergence() -> None:
    """The sum is negative where the student is surer of these ids than the teacher, and falls beyond p = q."""
    teacher = torch.tensor([[0.5, 0.2]]).log()
    surer = torch.tensor([[0.6, 0.3]]).log()
    by_tail = {tail: at_ids(surer, teacher, kind="forward_kl", tail=tail).item() for tail in TAILS}
    assert by_tail["drop"] == pytest.approx(0.5 * math.log(5 / 6) + 0.2 * math.log(2 / 3))
    assert by_tail["drop"] < 0 < by_tail["renormalise"] < by_tail["bucket"]
    for tail, least in (("drop", False), ("bucket", True), ("renormalise", True)):
        leaf = teacher.clone().requires_grad_()
        at_ids(leaf, teacher, kind="reverse_kl", tail=tail).sum().backward()
        assert leaf.grad is not None
        assert (leaf.grad.abs().amax() < 1e-15) == least


@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_that_rounding_hides(kind: Any) -> None:
    """Sums of float32 probabilities at 1 or just above: finite, not negative, and with a gradient towards the tail."""
    certain = torch.tensor([[0.0, -30], [-1e-7, -30], [1e-7, -16], [-1e-3, -7]])
    for student, teacher in itertools.product(certain, certain):
        leaf = student[None].clone().requires_grad_()
        value = at_ids(leaf, teacher[None], kind=kind)
        value.sum().backward()
        assert leaf.grad is not None
        assert value.isfinite().all()
        assert leaf.grad.isfinite().all()
        assert value.item() >= -1e-15
        assert value.item() < 1e-15 or not torch.equal(student, teacher)
    leaf = certain[:1].clone().requires_grad_()
    at_ids(leaf, certain[3:], kind=kind).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[0, 0] > 1e-6 if kind != "jsd" else leaf.grad[0, 0] > 0


def with_a_rest_of(exponent: float, missing: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of student and teacher, exact in float32, whose first K ids have all but 10^exponent; labels and marks."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, TOKENS, VOCABULARY, generator=generator)
    logits[..., K:] += math.log(10) * exponent - math.log(VOCABULARY - K)
    labels = torch.arange(K).expand(TOKENS, K)
    return logits[0], logits[1], labels, (labels < K - missing)


@pytest.mark.parametrize("exponent", [-1.0, -3.0, -5.0, -7.0, -9.0])
@pytest.mark.parametrize("missing", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rest_that_is_made_of_the_logits(kind: Any, exponent: float, missing: int) -> None:
    """Value and gradient of the term of other ids, to a sum and a few roundings; what K log-probs leave is noise."""
    student, teacher, labels, known = with_a_rest_of(exponent, missing)
    leaves = student.clone().requires_grad_(), student.double().requires_grad_()
    by_model = []
    for logits in (leaves[0], teacher):
        log_probs, _ = log_probs_from_logits(logits, labels, rest_without=known)
        by_model.append(AtIds(log_probs[..., :K], log_probs[..., K]))
    p, q = by_model
    q = q._replace(log_probs=q.log_probs.masked_fill(~known, -INF))
    everything = torch.ones(TOKENS)
    value = divergence_at_ids(p, q, everything, kind=kind)
    bits = K - missing
    p_exact, q_exact = (probs.double().softmax(-1) for probs in (leaves[1], teacher))
    p_exact, q_exact = (
        torch.cat([probs[:, :bits], probs[:, bits:].sum(-1, keepdim=True)], -1) for probs in (p_exact, q_exact)
    )
    right = divergence(p_exact, q_exact, kind)
    torch.testing.assert_close(value.double(), right, rtol=2e-6, atol=1e-12)
    # Of the ids that the teacher did not give: a gradient of the size of their probability.
    for losses, of_logits in ((value, leaves[0]), (right, leaves[1])):
        losses.sum().backward(inputs=[of_logits])
    mine, exact = leaves[0].grad[:, K:].double(), leaves[1].grad[:, K:]
    assert ((mine - exact).norm() / exact.norm()) < 1e-5
    if exponent < -6 and kind == "forward_kl" and not missing:  # negative control
        leaf = student.clone().requires_grad_()
        alone = log_probs_from_logits(leaf, labels)[0]
        divergence_at_ids(with_rest(alone), q, everything, kind=kind).sum().backward()
        assert ((leaf.grad[:, K:].double() - exact).norm() / exact.norm()) > 1e-3


def test_a_rest_where_the_teacher_gave_nothing() -> None:
    """Tokens without ids, and masked ones: 0, whatever stands there."""
    student, teacher, rest = FINE[:, :2].clone(), FINE[:, :2].clone(), torch.full((2,), -0.3)
    teacher[1] = -INF
    student[0], rest[1] = NAN, NAN
    leaf = rest.requires_grad_()
    now, of_teacher = AtIds(student, leaf), AtIds(teacher, leaf.detach())
    value = divergence_at_ids(now, of_teacher, torch.tensor([0.0, 1]), kind="jsd")
    value.sum().backward()
    assert value.tolist() == [0, 0]
    assert leaf.grad.tolist() == [0, 0]


def test_the_teachers_rest_is_a_constant() -> None:
    """Beside a student without a graph, where it would train nothing, its graph is refused."""
    student, teacher = (torch.tensor([[p, 0.25]]).log() for p in (0.5, 0.25))
    rest, teacher_rest = (torch.tensor([p]).log().requires_grad_() for p in (0.25, 0.5))
    now, of_teacher, one = AtIds(student.requires_grad_(), rest), AtIds(teacher, teacher_rest), torch.ones(1)
    divergence_at_ids(now, of_teacher, one, kind="forward_kl").sum().backward()
    assert (rest.grad is None, teacher_rest.grad is None) == (False, True)
    with pytest.raises(ValueError, match="log_probs without a graph, and teacher_log_rest with one"):
        divergence_at_ids(AtIds(student.detach(), rest), of_teacher, one, kind="forward_kl")


@EVERY
def test_an_impossible_id_of_the_student(kind: Any, tail: Any) -> None:
    """A log-prob of -inf, outside of kept ids: 0 log 0 is 0, and a forward KL is infinite, as it is."""
    student, teacher = torch.tensor([[-0.5, -INF, -1.5]]).requires_grad_(), torch.tensor([[-1.0, -2.0, -1.5]])
    value = at_ids(student, teacher, kind=kind, tail=tail)
    value.sum().backward()
    assert value.item() == INF if kind == "forward_kl" else value.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_the_teachers_temperature() -> None:
    """Renormalised log-probs at a temperature are the softmax of logits at it over the ids, whatever their norm."""
    student, teacher = drawn(torch.float64)
    divergences = at_ids(student[:, :K], teacher[:, :K], kind="forward_kl", tail="renormalise", teacher_temperature=2.0)
    at_two = ((teacher - 3) / 2)[:, :K].log_softmax(-1)
    right = divergence(student[:, :K].exp(), at_two.exp(), "forward_kl", "renormalise")
    torch.testing.assert_close(divergences, right)


def test_the_teacher_is_a_constant_and_half_precision_is_raised() -> None:
    student, teacher = (logs[:, :K].bfloat16().requires_grad_() for logs in drawn())
    divergences = at_ids(student, teacher, kind="jsd")
    assert torch.equal(divergences, at_ids(student.float(), teacher.float(), kind="jsd"))
    divergences.sum().backward()
    assert (student.grad is None, teacher.grad is None) == (False, True)


def test_a_mixture_is_two_terms_each_with_its_mode_and_mask() -> None:
    """Policy loss by prompt_mean, and 0.5 of the divergence by token_mean over the tokens that the teacher saw."""
    masks, seen = [[1, 1, 0, 1], [0, 1, 1]], [[1, 0, 0, 1], [0, 1, 0]]
    samples = Samples(masks, prompt_ids=["a", "b"], term_masks={"seen": seen})
    student, teacher = (logs[:7, :K] for logs in drawn())
    leaf, policy = student.clone().requires_grad_(), torch.arange(7.0, requires_grad=True)
    with pytest.warns(UserWarning, match="every prompt group of the step has one rollout"):
        (microbatch,) = plan_step([samples], "prompt_mean", dp_group=None, term_masks=["seen"])
    kl = divergence_at_ids(with_rest(leaf), teacher, microbatch, kind="reverse_kl")
    share = microbatch.loss({"pg": policy, "kl": Term(kl, "token_mean", coef=0.5, mask="seen")})
    exact = student.double().requires_grad_()
    of_kl = divergence(exact.exp(), teacher.double().exp(), "reverse_kl", "bucket")
    right = ((0 + 1 + 3) / 3 + (5 + 6) / 2) / 2 + 0.5 * of_kl[[0, 3, 5]].sum() / 3
    share.backward()
    right.backward()
    assert float(share.detach()) == pytest.approx(right.item(), rel=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-6, atol=1e-12)


LOCAL = torch.ones(2)
FINE = torch.full((2, 3), -2.0)
REST = torch.full((2,), -9.0)  # that of FINE is -0.52
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("teacher_log_probs of shape", (FINE, FINE[:, :2]), {}),
    ("a mask of shape", (FINE[:1], FINE[:1]), {}),
    ("K >= 1", (FINE[:, :0], FINE[:, :0]), {}),
    ("K >= 1", (torch.zeros(()), torch.zeros(())), {}),
    ("there is no such kind of divergence", (FINE, FINE), {"kind": "kl"}),
    ("there is no such tail", (FINE, FINE), {"tail": "renormalize"}),
    ("take forward_kl or reverse_kl", (FINE, FINE), {"kind": "jsd", "beta": 0.0}),
    ("only jsd takes beta", (FINE, FINE), {"beta": 0.5}),
    ("it must be a number in", (FINE, FINE), {"teacher_temperature": 0, "tail": "renormalise"}),
    ("do not tell the mass of other ids", (FINE, FINE), {"teacher_temperature": 2.0}),
    ("^log_probs with a rest, and tail='drop'", (AtIds(FINE, REST), FINE), {"tail": "drop"}),
    ("^teacher_log_probs with a rest, and tail='ren", (FINE, AtIds(FINE, REST)), {"tail": "renormalise"}),
    ("the rest of log_probs of shape", (AtIds(FINE, FINE), FINE), {}),
    ("^log_probs whose probabilities and rest sum to 1 only within 0.594", (AtIds(FINE, REST), FINE), {}),
    ("^teacher_log_probs whose .* Pass rest_without=", (FINE, AtIds(FINE, REST + 2)), {}),
    ("^log_probs without the rest, and tail='bucket': .+ rest_without=teacher_log_p", (AtIds, FINE), {}),
    ("^log_probs with probabilities .+ sum to 3:", (0 * FINE, FINE), {}),
    ("^teacher_log_probs with probabilities .+ Give each id once", (FINE, FINE + 1.5), {}),
]


@pytest.mark.parametrize(("message", "log_probs", "settings"), WRONG)
def test_wrong_uses_are_refused(message: str, log_probs: tuple[Any, ...], settings: dict[str, Any]) -> None:
    now, teacher = log_probs
    if now is AtIds:  # of which the rest is left out
        now = FINE
    elif isinstance(now, Tensor) and now.numel():
        now = with_its_rest(now, teacher.log_probs if isinstance(teacher, AtIds) else now, **settings)
    with pytest.raises(ValueError, match=message):
        divergence_at_ids(now, teacher, LOCAL, **{"kind": "forward_kl"} | settings)


def test_log_probs_must_be_float_tensors() -> None:
    for log_probs, name in (((FINE.long(), FINE), "log_probs"), ((FINE, FINE.long()), "teacher_log_probs")):
        with pytest.raises(TypeError, match=f"^{name} is torch.int64: it must be a float tensor"):
            divergence_at_ids(*log_probs, LOCAL, kind="forward_kl")
    lists: Any = FINE.tolist()
    with pytest.raises(TypeError, match="log_probs is a list: it must be a float"):
        divergence_at_ids(lists, FINE, LOCAL, kind="forward_kl")
