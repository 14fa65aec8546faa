"""The distillation losses of verl, NeMo-RL, ms-swift and TRL, from checkouts, and ours on the same logits.

Each runs by its own code, at TP 1 and 2 where it has that: verl's `_VocabParallelKLDivergence`, what it does behind it
stated here; NeMo-RL's `get_distillation_topk_logprobs_from_logits` (`ChunkedDistributedGatherLogprob`) and
`DistillationLossFn`; ms-swift's `gkd_loss` with the functions of its Megatron trainer; TRL's `generalized_jsd_loss`.

A row of `CASES` is a setting of theirs, and ours that is the same. Errors are of the gradient of the logits, to the
float64 formula of ours. A setting that differs from any of ours is held to the divergence of the ids and the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from checkouts import MS_SWIFT, NEMO_RL, TRL, VERL, Framework, checkout, load, record_errors
from divergence_oracle import divergence, logits_of
from head_oracle import relative
from ranks import run_ranks
from table_step import start
from torch import Tensor

from megatron_rl_loss import (
    AtIds,
    OutputLayer,
    Teacher,
    divergence_at_ids,
    log_probs_from_hidden,
    log_probs_from_logits,
)
from megatron_rl_loss.losses.divergence import DivergenceKind, Tail

TOKENS, VOCABULARY, K = 33, 64, 8
#: Sums over the vocabulary, forward and backward.
TOLERANCE = oracle.chain_error(1, VOCABULARY)
SLOPES = torch.linspace(0.5, 2, TOKENS)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A setting of a framework, and ours: kinds with coefficients, which are added up.

    Attributes:
        theirs: of the checkout's path, this rank's logits, the teacher's, and the ids: a loss per token [tokens], or
            its sum with `SLOPES`; differentiable.
        restricted: the teacher is one over the K ids alone: their softmax.
        temperature: of student and teacher.
        same: False where it is no setting of ours.
    """

    setting: str
    theirs: Callable[[str, Tensor, Tensor, Tensor], Tensor]
    terms: dict[DivergenceKind, float]
    tail: Tail
    beta: float = 0.5
    restricted: bool = False
    temperature: float = 1.0
    ids: int = K
    same: bool = True


# --- theirs


def of_verl(root: str, student: Tensor, teacher: Tensor, ids: Tensor, clamp: float | None) -> Tensor:
    (module,) = load(VERL, root, "verl.trainer.distillation.megatron.losses")
    at_ids = teacher.log_softmax(-1).gather(-1, ids)
    values: Tensor = module._VocabParallelKLDivergence.apply(student[None], at_ids[None], ids[None], clamp)[0][0]
    return values if clamp is None else values.clamp_min(0)  # trainer/distillation/losses.py, compute_forward_kl_topk


def of_nemo_rl(root: str, student: Tensor, teacher: Tensor, ids: Tensor, kind: str, zero_outside: bool) -> Tensor:
    names = "nemo_rl.algorithms.loss.loss_functions", "nemo_rl.distributed.model_utils"
    losses, utils = load(NEMO_RL, root, *names)
    cfg = SimpleNamespace(kl_type=kind, mixed_kl_weight=0.25, zero_outside_topk=zero_outside)
    # It leaves out the last position: one more stands there.
    student, teacher, ids = (torch.cat([column, column[:1]])[None] for column in (student, teacher, ids))
    entropy = zero_outside and kind != "forward"
    group = dist.group.WORLD
    columns = utils.get_distillation_topk_logprobs_from_logits(
        student, teacher.gather(-1, ids), ids, zero_outside, entropy, dist.get_rank(), group
    )
    data = {"token_mask": torch.cat([torch.zeros(1), SLOPES])[None], "sample_mask": torch.ones(1), "input_ids": ids}
    loss, _ = losses.DistillationLossFn(cfg)(*columns, data, None, torch.tensor(1.0))
    return loss


def of_ms_swift(
    root: str, student: Tensor, teacher: Tensor, ids: Tensor, beta: float, temperature: float, of_server: bool
) -> Tensor:
    names = "rlhf_trainers.gkd_loss", "megatron.trainers.gkd_utils", "megatron.trainers.vocab_parallel_utils"
    gkd, utils, vocabulary = load(MS_SWIFT, root, *(f"swift.{name}" for name in names))
    log_probs = (teacher.log_softmax(-1) if of_server else teacher).gather(-1, ids)
    functions = utils.tp_gather_topk, vocabulary.vocab_parallel_log_softmax, vocabulary.vocab_parallel_kl_div
    totals = []
    for t in range(TOKENS):  # it gives the sum of all: one token after the other, to weigh them apart
        token = slice(t, t + 1)
        output = gkd.TeacherOutput(topk_logprobs=log_probs[token][None], topk_indices=ids[token][None])
        labels = torch.zeros(1, 1, dtype=torch.int64)
        total, count = gkd.gkd_loss(student[token][None], output, labels, beta, temperature, *functions)
        assert count == 1
        totals.append(total)
    return torch.stack(totals)


def of_trl(root: str, student: Tensor, teacher: Tensor, _: Tensor, beta: float, temperature: float) -> Tensor:
    (module,) = load(TRL, root, "trl.experimental.gkd.gkd_trainer")
    values = module.GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=beta, temperature=temperature, reduction="none"
    )
    return values[0].sum(-1)


FORWARD: dict[DivergenceKind, float] = {"forward_kl": 1}
REVERSE: dict[DivergenceKind, float] = {"reverse_kl": 1}
JSD: dict[DivergenceKind, float] = {"jsd": 1}


def nemo(setting: str, kind: str, terms: dict[DivergenceKind, float], tail: Tail, **more: Any) -> Case:
    zero_outside = "zero_outside" in setting
    return Case(setting, partial(of_nemo_rl, kind=kind, zero_outside=zero_outside), terms, tail, **more)


def swift(setting: str, beta: float, terms: dict[DivergenceKind, float], temperature: float) -> Case:
    theirs = partial(of_ms_swift, beta=beta, temperature=temperature, of_server="server" in setting)
    return Case(setting, theirs, terms, "renormalise", beta=beta, temperature=temperature)


def trl(setting: str, beta: float, terms: dict[DivergenceKind, float], temperature: float) -> Case:
    theirs = partial(of_trl, beta=beta, temperature=temperature)
    return Case(setting, theirs, terms, "drop", beta=beta, temperature=temperature, ids=VOCABULARY)


CASES: dict[Framework, list[Case]] = {
    VERL: [
        Case("`forward_kl_topk` unclamped", partial(of_verl, clamp=None), FORWARD, "drop"),
        Case("`forward_kl_topk` by default", partial(of_verl, clamp=-10.0), FORWARD, "bucket", same=False),
    ],
    NEMO_RL: [
        nemo("forward KL of top-k", "forward", FORWARD, "renormalise"),
        nemo("reverse KL of top-k", "reverse", REVERSE, "renormalise"),
        nemo("mixed KL of top-k", "mixed", {"forward_kl": 0.25, "reverse_kl": 0.75}, "renormalise"),
        nemo("forward KL of top-k, `zero_outside_topk`", "forward", FORWARD, "drop", restricted=True),
        nemo("reverse KL of top-k, `zero_outside_topk`", "reverse", REVERSE, "bucket", same=False),
    ],
    MS_SWIFT: [
        swift("GKD of a server, beta 0", 0, FORWARD, 1),
        swift("GKD of top-k, beta 1", 1, REVERSE, 2),
        swift("GKD of top-k, beta 0.3", 0.3, JSD, 1),
        swift("GKD of a server, beta 0.3", 0.3, JSD, 2),
    ],
    TRL: [
        trl("GKD, beta 0", 0, FORWARD, 1),
        trl("GKD, beta 1", 1, REVERSE, 2),
        trl("GKD, beta 0.3", 0.3, JSD, 1),
        trl("GKD, beta 0.3", 0.3, JSD, 2),
    ],
}


def ours(case: Case, logits: Tensor, teacher: Tensor, ids: Tensor, **settings: Any) -> Tensor:
    """A value per token, of this rank's logits."""
    t = case.temperature
    if case.ids == VOCABULARY:  # the logits are hidden states of a layer that changes nothing
        layer = OutputLayer(torch.eye(VOCABULARY), temperature=t)
        return log_probs_from_hidden(logits, layer, teacher=Teacher(teacher, **settings)).divergence
    rest: dict[str, Any] = {"rest_without": torch.ones_like(ids) > 0} if case.tail == "bucket" else {}
    at_ids, _ = log_probs_from_logits(logits, ids, tp_group=dist.group.WORLD, temperature=t, **rest)
    student = AtIds(at_ids[:, :-1], at_ids[:, -1]) if rest else at_ids
    late = t if case.tail == "renormalise" else 1.0  # the teacher's temperature, when only log-probs are there
    log_probs = (teacher * late / t).log_softmax(-1).gather(-1, ids)
    log_probs = log_probs.log_softmax(-1) if case.restricted else log_probs
    everything = torch.ones(TOKENS)
    return divergence_at_ids(student, log_probs, everything, tail=case.tail, teacher_temperature=late, **settings)


def errors(framework: Framework, tp: int, root: str) -> list[tuple[float, float]]:
    """On a rank: of theirs and of ours, of the gradient of the logits that it holds."""
    start(tp)
    held = VOCABULARY // tp
    columns = slice(dist.get_rank() * held, (dist.get_rank() + 1) * held)
    student, teacher = logits_of(TOKENS, VOCABULARY)
    errors_of_cases = list[Any]()
    for case in CASES[framework]:
        ids, t = teacher.topk(case.ids).indices, case.temperature
        whole = student.double().requires_grad_()
        p, q = ((logits / t).softmax(-1).gather(-1, ids) for logits in (whole, teacher.double()))
        q = q / q.sum(-1, keepdim=True) if case.restricted else q
        of_kinds = (coef * divergence(p, q, kind, case.tail, case.beta) for kind, coef in case.terms.items())
        (sum(of_kinds) * SLOPES).sum().backward()

        theirs, mine = (student[:, columns].clone().requires_grad_() for _ in range(2))
        value = case.theirs(root, theirs, teacher, ids)
        (value if value.dim() == 0 else value * SLOPES).sum().backward()

        for kind, coef in case.terms.items():
            beta = case.beta if kind == "jsd" else None
            values = ours(case, mine, teacher, ids, kind=kind, beta=beta)
            (coef * values * SLOPES).sum().backward()
        errors_of_cases.append(tuple(relative(leaf.grad, whole.grad[:, columns]) for leaf in (theirs, mine)))
    return errors_of_cases


WHERE = [
    (framework, tp) for framework in CASES for tp in ((1,) if framework is TRL else (1, 2))
]  # TRL has no tensor parallelism


@pytest.mark.parametrize(("framework", "tp"), WHERE, ids=lambda value: getattr(value, "variable", value))
def test_their_distillation_losses_are_ours(framework: Framework, tp: int, record_property: Any) -> None:
    by_rank = run_ranks(tp, errors, framework, tp, checkout(framework))
    for case, *of_ranks in zip(CASES[framework], *by_rank, strict=True):
        own, ours = map(max, zip(*of_ranks, strict=True))
        assert ours <= TOLERANCE, case.setting
        assert (own <= TOLERANCE) == case.same, (case.setting, own)
        assert case.same or own > 0.01
        record_errors(record_property, framework, case.setting, own, ours)
