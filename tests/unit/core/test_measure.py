"""`measure_tokens` and `keep_tokens`: against sorted float64 lists, over ranks and in one process."""

import functools
import math
import os
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from placements import bshd, contiguous, gathered, response, thd
from ranks import bytes_reduced, run_ranks, start_process_group
from refusals import outcome_of, refusal_tests, refusals
from steps import drawn_step, samples_of
from torch import Tensor

from megatron_rl_loss import Samples, Term, ZigzagTHD, keep_tokens, measure_tokens, pass_gap, plan_step
from megatron_rl_loss.core.plan import Plan

SHARES = (0.01, 0.2, 0.5, 0.8, 1.0)
Pairs = Sequence[tuple[float, float]]  # value and mask entry of each token


def measured_by_hand(pairs: Pairs, shares: Sequence[float] = SHARES) -> list[float]:
    """Tokens, sum, and for each share the smallest value that enough tokens do not exceed, as by `measured_in`."""
    pairs = sorted((value, entry) for value, entry in pairs if entry)
    tokens = sum(Fraction(entry) for _, entry in pairs)
    quantiles = []
    for share in shares:
        upto, reached = Fraction(0), math.inf
        for value, entry in pairs:
            upto += Fraction(entry)
            if upto >= Fraction(str(share)) * tokens:
                reached = value
                break
        quantiles.append(reached)
    return [float(tokens), float(sum(Fraction(entry) * Fraction(value) for value, entry in pairs)), *quantiles]


def measured_in(plan: Plan, values: Any, shares: Sequence[float] = SHARES) -> list[float]:
    measured = measure_tokens(plan, values)
    assert math.isnan(measured.mean) or measured.mean == measured.sum / measured.tokens
    return [measured.tokens, measured.sum, *(measured.quantile(q) for q in shares)]


# --- over ranks

CASES = [(place, cp_size) for cp_size in (2, 4) for place in (thd, bshd, response, contiguous, gathered)]


def value_at(sample: int, position: int) -> float:
    """A value of either sign, negative on the whole; rounded to float32."""
    return float(torch.tensor(random.Random(f"{sample} {position}").uniform(-3, 2)))


def on_ranks() -> list[Any]:
    """On a rank: of each layout what is found of the step, and a term over the tokens above a half."""
    start_process_group()
    rank, measured = int(os.environ["RANK"]), []
    cp = {size: [dist.new_group(list(range(k, k + size))) for k in range(0, 4, size)] for size in (2, 4)}
    dp = {size: [dist.new_group(list(range(k, 4, size))) for k in range(size)] for size in (2, 4)}
    for seed, (place, size) in enumerate(CASES):
        step, described, held = drawn_step(seed, 4 // size, 2), [], []
        for hand in step.hands[rank // size]:
            chosen = [step.samples[i] for i in hand]
            at = place([len(sample.mask) for sample in chosen], size) if hand else None
            described.append(samples_of(chosen, at) if at else Samples([]))
            held.append([(hand[t[0]], t[1]) if t else None for t in at.held[rank % size]] if at else [])
        groups: Any = {"dp_group": dp[size][rank % size], "cp_group": cp[size][rank // size]}
        plan = plan_step(described, "token_mean", gradients="summed over ranks", **groups)
        values = {
            id(microbatch): torch.tensor([value_at(*t) if t else math.nan for t in held_tokens]).reshape(
                microbatch.tokens.loss_shapes[-1]
            )
            for microbatch, held_tokens in zip(plan, held, strict=True)
        }
        numbers = measured_in(plan, lambda microbatch: values[id(microbatch)], [0.5])  # noqa: B023
        half = numbers[2]
        keep_tokens(plan, "above", lambda microbatch: values[id(microbatch)] > half)  # noqa: B023
        assert all(microbatch.tokens.samples is microbatch.samples for microbatch in plan)
        shares = [
            microbatch.loss({"x": Term(values[id(microbatch)].requires_grad_(), mask="above")}) for microbatch in plan
        ]
        measured.append((numbers, sum(float(share.detach()) for share in shares)))
    dist.barrier()
    return measured


def test_in_every_layout_over_ranks() -> None:
    """Results agree to the bit, and kept tokens are trained on by their own count."""
    by_rank = run_ranks(4, on_ranks)
    for seed in range(len(CASES)):
        step = drawn_step(seed, 4 // CASES[seed][1], 2)
        pairs = [
            (value_at(i, t), float(entry))
            for i, sample in enumerate(step.samples) for t, entry in enumerate(sample.mask.double().tolist())
        ]  # fmt: skip
        tokens, total, half = measured_by_hand(pairs, [0.5])
        for numbers, _ in (rank_results[seed] for rank_results in by_rank):
            assert [numbers[0], numbers[2]] == [pytest.approx(tokens, rel=1e-12), half]
            assert numbers[1] == pytest.approx(total, rel=1e-12, abs=1e-12)
        above = [(value, entry) for value, entry in pairs if value > half]
        kept = sum(entry for _, entry in above)
        mean = sum(value * entry for value, entry in above) / kept if kept else 0.0
        assert sum(rank_results[seed][1] for rank_results in by_rank) == pytest.approx(mean, rel=1e-5, abs=1e-6), CASES[
            seed
        ]


def collectives() -> tuple[dict[str, list[int]], list[str], bool]:
    """On a rank of two, a data- or a context-parallel group: bytes of each call, errors, and who knows the results.

    Last, rank 0 is a pipeline stage without a loss.
    """
    start_process_group()
    rank, sent = int(os.environ["RANK"]), bytes_reduced()
    sent_by, errors, world = {}, [], dist.group.WORLD
    for name in ("dp", "cp"):
        own = [f"{name}{rank if name == 'dp' else 0}{k}" for k in range(2)]
        mask, layout = torch.ones(6), ZigzagTHD([0, 8, 12], total_lengths=[6, 2])
        samples = [
            Samples([mask, mask[:2]], layout=layout, rollout_ids=[own[0] + str(k), own[1] + str(k)]) for k in range(2)
        ]
        groups = {"dp_group": None, f"{name}_group": world} if name in ("dp", "cp") else {"dp_group": None}
        plan = plan_step(samples, "sample_mean", gradients="summed over ranks", **groups)
        sent.clear()
        measured = measure_tokens(plan, lambda microbatch: torch.arange(len(microbatch.tokens)).float())
        sent_by[f"{name} measure"], sent[:] = [*sent], []
        measured.quantile(0.5)
        sent_by[f"{name} quantile"], sent[:] = [*sent], []
        keep_tokens(plan, "kept", lambda microbatch: torch.ones(len(microbatch.tokens), dtype=torch.bool))
        sent_by[f"{name} keep"], sent[:] = [*sent], []
        ones: Any = None if rank else lambda microbatch: torch.ones(len(microbatch.tokens))
        errors += [
            outcome_of(functools.partial(measure_tokens, plan, ones)),
            outcome_of(
                functools.partial(
                    keep_tokens, plan, f"x{rank}", lambda microbatch: torch.ones(len(microbatch.tokens)) > 0
                )
            ),
        ]
        sent.clear()
        if rank == 0 and name == "cp":  # its partner may wait inside `values`: no collective, but the error at once
            errors.append(outcome_of(functools.partial(measure_tokens, plan, lambda microbatch: torch.ones(1))))
            sent_by["alone"] = [*sent]
        elif name == "dp":
            bad: Any = (
                (lambda microbatch: torch.ones(1)) if rank else lambda microbatch: torch.ones(len(microbatch.tokens))
            )
            errors.append(outcome_of(functools.partial(measure_tokens, plan, bad)))
    stage_samples = [Samples([torch.ones(2)])] if rank else None
    plan = plan_step(stage_samples, "token_mean", dp_group=None, replica_groups=[world], num_microbatches=1)
    not_finite: list[Any] = [lambda microbatch: torch.tensor([1.0, math.nan]), None]
    for values in not_finite:
        errors.append(outcome_of(functools.partial(measure_tokens, plan, values if rank else None)))
    measured = measure_tokens(plan, (lambda microbatch: torch.tensor([-30.0, 5.0])) if rank else None)
    known = (measured.tokens, measured.mean, measured.quantile(0.5)) == (2, -12.5, -30)
    keep_tokens(plan, "kept", (lambda microbatch: torch.tensor([False, True])) if rank else None)
    return sent_by, errors, known and (not rank or plan[0].totals.with_mask("kept").step_tokens == 1)


def test_rounds_and_bytes_and_errors_on_every_rank() -> None:
    for rank, (sent_by, errors, known) in enumerate(run_ranks(2, collectives)):
        for name in ("dp", "cp"):
            assert sent_by[f"{name} measure"] == [32]
            assert sent_by[f"{name} quantile"] == [256 * 8] * 4
        assert sent_by["dp keep"] == [16]
        assert sent_by["cp keep"][:2] == [16, 2 * 12]  # a byte per position of the buffers
        texts = [
            "ValueError: values of 1 of 2 ranks of a pipeline stage", "asks for tokens to keep as 'x",
            "rank 1: ValueError: values to measure of shape",
            "ValueError: values of 1 of 2 ranks of a pipeline stage", "asks for tokens to keep as 'x",
            *(["ValueError: values to measure of shape (1,)"] if rank == 0 else []),
            "a value of nan at an active token", "values of 0 of 1 ranks",
        ]  # fmt: skip
        assert sent_by.get("alone", []) == []
        assert all(text in error for text, error in zip(texts, errors, strict=True)), errors
        assert known


# --- in one process


def plan_of(masks: list[Tensor], parts: int = 1) -> Plan:
    return plan_step([Samples(masks[k::parts]) for k in range(parts)], "token_mean", dp_group=None)


@pytest.mark.parametrize("kind", ["ties", "all sizes"])
@pytest.mark.parametrize("number", [1, 2, 10, 100])
def test_against_sorted_lists(kind: str, number: int) -> None:
    """float32 numbers of all sizes and signs, or many equal ones."""
    rng = random.Random(number)
    many = [rng.choice([-1, 1]) * 10 ** rng.uniform(-44, 30) for _ in range(number)]
    values = torch.tensor([rng.choice([0.0, -0.0, 1.5, -2.25]) for _ in many] if kind == "ties" else many)
    masks: list[list[float]] = [[rng.choice([0, 0.5, 1, 1]) for _ in range(number - 1)], [1]]
    plan = plan_of([torch.tensor(mask, dtype=torch.float32) for mask in masks], 2)
    tensors = dict(zip(map(id, plan), values.split([number - 1, 1]), strict=True))
    pairs = list(zip(values.tolist(), [*masks[0], *masks[1]], strict=True))
    measured, by_hand = measured_in(plan, lambda microbatch: tensors[id(microbatch)]), measured_by_hand(pairs)
    assert (measured[0], measured[2:]) == (by_hand[0], by_hand[2:])
    assert measured[1] == pytest.approx(by_hand[1], abs=1e-14 * float(values.double().abs().sum()))


def test_nothing_is_active() -> None:
    measured = measure_tokens(plan_of([torch.zeros(2)]), lambda microbatch: torch.tensor([math.nan, 1]))
    assert (measured.tokens, measured.sum, measured.quantile(0.5)) == (0, 0, math.inf)
    assert math.isnan(measured.mean)


def test_masks_in_turn() -> None:
    """A mask that is measured by, replaced, and of which nothing survives."""
    plan, values = plan_of([torch.ones(4)]), torch.tensor([1.0, 2, 3, 6], requires_grad=True)
    sums = []
    for bound in (1.5, 2.5, 9.0):
        keep_tokens(plan, "above", lambda microbatch: values > bound)  # noqa: B023
        term = plan[0].loss({"pg": Term(values, mask="above")})
        plan.reset()
        sums += [measure_tokens(plan, lambda microbatch: values, mask="above").sum, float(term.detach())]
    assert sums == pytest.approx([11, 11 / 3, 9, 4.5, 0, 0])
    assert not plan.samples[0].by_mask  # the data is as it was


def test_the_gap_between_two_passes() -> None:
    microbatch = plan_of([torch.tensor([1.0, 1, 0])])[0]
    microbatch.log_probs["now"] = torch.tensor([-1.0, -2.0, -9.0])
    assert float(pass_gap(microbatch, "now", torch.tensor([-1.0, -2.0, math.nan], requires_grad=True))) == 0
    with pytest.warns(UserWarning, match="now of the training pass .* differ by up to 0.5 at a token"):
        assert float(pass_gap(microbatch, "now", torch.tensor([-1.5, -2.0, 0.0]))) == 0.5


X = torch.ones(2)


def measured(values: Any = X, q: float = 0.5) -> float:
    return measure_tokens(plan_of([torch.ones(2)]), lambda microbatch: values).quantile(q)


def kept(flags: Any, name: str = "kept") -> None:
    plan = plan_step([Samples([X], term_masks={"ok": [X]})], "token_mean", dp_group=None)
    keep_tokens(plan, name, lambda microbatch: flags)


def gap(name: str, of_plan: Any = False) -> Tensor:
    microbatch = (plan := plan_of([X]))[0]
    microbatch.log_probs["then"] = X
    return pass_gap(plan if of_plan else microbatch, name, X)  # type: ignore[arg-type]


test_refusals = refusal_tests(
    {
        **refusals(
            measured,
            ((X, 0.0), r"q is 0.0: it must be a number in \(0, 1\]", (X, 1e-9)),
            ((torch.ones(3),), r"values to measure of shape \(3,\)", (X[None],)),
            ((X / 0,), "a value of inf at an active token", (-100 * X,)),
        ),
        **refusals(measured, ((X.long(),), "values to measure is torch.int64", (X.double(),)), error=TypeError),
        **refusals(
            kept,
            ((None,), "tokens to keep are a NoneType", (X > 0,)),
            ((X,), "they must be a tensor of bools. Return a comparison", (X > 0,)),
            ((X.numpy() > 0,), "tokens to keep are a ndarray", (X > 0,)),
            error=TypeError,
        ),
        **refusals(
            functools.partial(measure_tokens, plan_of([X])),
            ((X,), "values to measure is a Tensor: it must be a function", (lambda microbatch: X,)),
            error=TypeError,
        ),
        **refusals(
            lambda plan: measure_tokens(plan, lambda microbatch: X),
            ((plan_of([X])[0],), "plan is a Microbatch: it must be the plan of this step", (plan_of([X]),)),
            error=TypeError,
        ),
        **refusals(
            lambda plan: keep_tokens(plan, "kept", lambda microbatch: X > 0),
            ((plan_of([X])[0],), "plan is a Microbatch: it must be the plan of this step", (plan_of([X]),)),
            error=TypeError,
        ),
        **refusals(
            lambda flags: keep_tokens(plan_of([X]), "kept", flags),
            ((X > 0,), "tokens to keep is a Tensor: it must be a function", (lambda microbatch: X > 0,)),
            error=TypeError,
        ),
        **refusals(kept, ((X > 0, "ok"), "tokens to keep as 'ok', which is a mask of the Samples", (X > 0, "good"))),
        **refusals(
            lambda of_plan: gap("then", of_plan),
            ((True,), "microbatch is a Plan: it must be a micro-batch of a plan", (False,)),
            error=TypeError,
        ),
        **refusals(gap, (("now",), "pass_gap of 'now', but forward passes gave then", ("then",))),
    }
)
