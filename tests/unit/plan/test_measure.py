"""`Plan.measure` and `Plan.keep`: against sorted float64 lists, in every layout, over ranks and in one process."""

import functools
import math
import os
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from cp_steps import CASES as ALL_CASES
from cp_steps import DIVISOR, RANKS, Outcome, dealt, error_of, hand_of, rollouts
from placements import CP_SIZES, bshd
from ranks import bytes_reduced, run_ranks, start_process_group
from refusals import outcome_of, refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.losses import segment_sum
from megatron_rl_loss.plan import Plan, plan_step
from megatron_rl_loss.reduction import Term

SHARES = (0.01, 0.2, 0.5, 0.8, 1.0)
NAMES = ("log_probs", "advantages")  # the latter tie within a sample
CASES = [(place, cp_size) for place, cp_size in ALL_CASES if cp_size > 1]  # alone: test_against_sorted_lists
Pairs = Sequence[tuple[float, float]]  # value and mask entry of each token


def smallest(pairs: Pairs, where: Any) -> float:
    """The first value, in order, up to which the sums fulfil a condition."""
    for value in sorted({value for value, _ in pairs}):
        upto = [(v, m) for v, m in pairs if v <= value]
        if where(sum(Fraction(m) for _, m in upto), sum(Fraction(m) * Fraction(v) for v, m in upto)):
            return value
    return math.inf


def found_by_hand(pairs: Pairs, shares: Sequence[float] = SHARES) -> list[float]:
    """What `found_in` finds."""
    pairs = [(value, entry) for value, entry in pairs if entry]
    tokens = sum(Fraction(entry) for _, entry in pairs)
    total = sum(Fraction(entry) * Fraction(value) for value, entry in pairs)
    quantiles = [smallest(pairs, lambda n, _, q=q: n >= Fraction(str(q)) * tokens) for q in shares]
    return [float(tokens), float(total), *quantiles, smallest(pairs, lambda n, total: total > -2 * n)]


def found_in(plan: Plan, values: Any, shares: Sequence[float] = SHARES) -> list[float]:
    measured = plan.measure(values)
    assert math.isnan(measured.mean) or measured.mean == measured.sum / measured.tokens
    quantiles = [measured.quantile(q) for q in shares]
    return [measured.tokens, measured.sum, *quantiles, measured.smallest(lambda n, total: total > -2 * n)]


def sum_of_unit(step: Sequence[Any], name: str, key: str, unit: Any) -> float:
    return sum(float((one.values[name] * one.mask).sum()) for one in step if getattr(one, key) == unit)


# --- over ranks, in every layout


def mode_of(number: int) -> tuple[str, str]:
    return oracle.COUNTINGS[number % len(oracle.COUNTINGS)]


def on_ranks() -> dict[int, tuple[list[float], Outcome]]:
    """On a rank: of every layout and CP size, what is found of the step, and a term over the tokens above a half."""
    start_process_group()
    rank, step, found = int(os.environ["RANK"]), rollouts(), {}
    groups: dict[tuple[str, int], list[Any]] = {}
    for size in CP_SIZES[1:]:
        groups["cp", size] = [dist.new_group(list(range(k, k + size))) for k in range(0, RANKS, size)]
        groups["dp", size] = [dist.new_group(list(range(k, RANKS, size))) for k in range(size)]
    for number, (place, cp_size) in enumerate(CASES):
        dp_rank, cp_rank = divmod(rank, cp_size)
        cp_group = groups["cp", cp_size][dp_rank]
        hands = [
            (chosen, *hand_of(step, chosen, place, cp_size, cp_rank, cp_group, None))
            for chosen in dealt(len(step), RANKS // cp_size)[dp_rank]
            if chosen or place is not bshd
        ]
        name, (mode, units) = NAMES[number % 2], mode_of(number // 2)
        plan = plan_step(
            [tokens.samples for _, tokens, _ in hands],
            mode,
            divisor=DIVISOR if mode == "constant" else None,
            units=units,  # type: ignore[arg-type]
            dp_group=groups["dp", cp_size][cp_rank],
            cp_group=cp_group,
        )
        for one, (_, tokens, _) in zip(plan, hands, strict=True):
            one.log_probs = tokens.values
        numbers = found_in(plan, lambda one, name=name: one.log_probs[name], [0.5])
        by: Any = ("prompt", "rollout")[number % 2]
        sums = plan.sum_by(by, lambda one, name=name: segment_sum(one.log_probs[name].float(), one))
        for of_microbatch, (chosen, _, _) in zip(sums, hands, strict=True):
            expected = [sum_of_unit(step, name, f"{by}_id", getattr(step[i], f"{by}_id")) for i in chosen]
            assert of_microbatch.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        plan.keep("above", lambda one, name=name, half=numbers[2]: one.log_probs[name].float() > half)
        share, slopes = 0.0, {}
        for one, (chosen, tokens, held) in zip(plan, hands, strict=True):
            leaf = tokens.values["token_advantages"].float().requires_grad_()
            part = one.loss({"above": Term(leaf, mask="above")}, form="sum")
            part.backward()
            share += float(part.detach())
            for at, slope in zip(held, leaf.grad.flatten().tolist(), strict=True):
                if at is not None:
                    key = chosen[at[0]], at[1]
                    slopes[key] = slopes.get(key, 0) + slope
        found[number] = numbers, Outcome(share, slopes)
    dist.barrier()
    return found


@pytest.mark.slow
def test_in_every_layout_over_ranks() -> None:
    step, by_rank = rollouts(), run_ranks(RANKS, on_ranks)
    by_hand, survivors = {}, {}
    for name in NAMES:
        of_tokens = torch.cat([torch.stack([one.values[name], one.mask.double()], 1) for one in step])
        by_hand[name] = found_by_hand(of_tokens.tolist(), [0.5])
        kept = [one.mask * (one.values[name] > by_hand[name][2]) for one in step]
        survivors[name] = [
            oracle.Sample(one.values["token_advantages"], mask, one.rollout_id, one.prompt_id)
            for one, mask in zip(step, kept, strict=True)
        ]
    for number in range(len(CASES)):
        name, (mode, units) = NAMES[number % 2], mode_of(number // 2)
        divisor = DIVISOR if mode == "constant" else None
        for (tokens, total, *thresholds), _ in (found[number] for found in by_rank):
            assert [tokens, *thresholds] == [by_hand[name][0], *by_hand[name][2:]]  # not one bit off
            assert total == pytest.approx(by_hand[name][1], rel=1e-13)
        value = float(oracle.step_loss(mode, survivors[name], divisor, units))
        slopes = oracle.step_gradient(mode, survivors[name], divisor, units)
        by_token: Any = {(i, t): x for i, of_sample in enumerate(slopes) for t, x in enumerate(of_sample.tolist())}
        scale = oracle.step_scale(mode, survivors[name], divisor, units)
        assert error_of([found[number][1] for found in by_rank], value, by_token, scale) < oracle.EXACT, CASES[number]


def collectives() -> tuple[dict[str, list[int]], list[str], bool]:
    """On a rank of two, a data- or a context-parallel group: bytes of each call, errors, and who knows the results.

    Last, rank 0 is a pipeline stage without a loss.
    """
    start_process_group()
    rank, sent = int(os.environ["RANK"]), bytes_reduced()
    found, errors, world = {}, [], dist.group.WORLD
    samples = Samples([torch.ones(6), torch.ones(2)], layout=ZigzagTHD([0, 8, 12], total_lengths=[6, 2]))
    for name, options in {"dp": {"dp_group": world}, "cp": {"dp_group": None, "cp_group": world}}.items():
        plan = plan_step([samples, samples], "sample_mean", **options)  # type: ignore[arg-type]
        found[f"{name} plan"], sent[:] = [*sent], []
        measured = plan.measure(lambda one: torch.arange(len(one.tokens)).float())
        found[f"{name} measure"], sent[:] = [*sent], []
        measured.quantile(0.5)
        found[f"{name} quantile"], sent[:] = [*sent], []
        plan.keep("kept", lambda one: torch.ones(len(one.tokens), dtype=torch.bool))
        found[f"{name} keep"], sent[:] = [*sent], []
        ones = None if rank else lambda one: torch.ones(len(one.tokens))
        flags = None if rank else lambda one: torch.ones(len(one.tokens)) > 0
        errors += [
            outcome_of(functools.partial(plan.measure, ones)),
            outcome_of(functools.partial(plan.keep, "x", flags)),
            outcome_of(functools.partial(plan.keep, f"x{rank}", lambda one: torch.ones(len(one.tokens)) > 0)),
        ]
        sent.clear()
    of_stage = [Samples([torch.ones(2)])] if rank else None
    plan = plan_step(of_stage, "token_mean", dp_group=None, replica_groups=[world], num_microbatches=1)
    for values in (lambda one: torch.tensor([1.0, math.nan]), None):
        errors.append(outcome_of(lambda values=values: plan.measure(values)))
    errors.append(outcome_of(lambda: plan.keep("kept", lambda one: torch.ones(3))))
    measured = plan.measure(lambda one: torch.tensor([-3.0, 5.0]))
    known = (measured.tokens, measured.mean, measured.quantile(0.5)) == (2, 1, -3)
    plan.keep("kept", lambda one: torch.tensor([False, True]))
    return found, errors, known and (not rank or plan[0].totals.with_mask("kept").step_tokens == 1)


def test_rounds_and_bytes_and_errors_on_every_rank() -> None:
    for found, errors, known in run_ranks(2, collectives):
        for name in ("dp", "cp"):
            assert found[f"{name} measure"] == [32]
            assert found[f"{name} quantile"] == [4096] * 4
        assert len(found["dp keep"]) == 1 + len(found["dp plan"])
        assert found["cp keep"][:2] == [16, 2 * 12]  # a byte per position of the buffers
        assert len(found["cp keep"]) == 2 + len(found["cp plan"])
        alone = ["ValueError: values of 1 of 2 ranks of a pipeline stage"] * 2
        texts = [
            *alone,
            "asks for tokens to keep as 'x",
            *alone,
            "asks for tokens to keep as 'x",
            "a value of nan at an active token",
            "values of 0 of 1 ranks",
            "are torch.float32",
        ]
        assert all(text in error for text, error in zip(texts, errors, strict=True)), errors
        assert known


# --- in one process


def plan_of(masks: list[Tensor], parts: int = 1) -> Plan:
    return plan_step([Samples(masks[k::parts]) for k in range(parts)], "token_mean", dp_group=None)


def drawn(rng: random.Random, kind: str) -> Iterator[float]:
    """float32 numbers: of all sizes and signs, or many equal ones."""
    while True:
        if kind == "ties":
            yield rng.choice([0.0, -0.0, 1.5, -2.25])
        else:
            yield float(torch.tensor(rng.choice([-1, 1]) * 10 ** rng.uniform(-44, 30), dtype=torch.float32))


@pytest.mark.parametrize("kind", ["ties", "all sizes"])
@pytest.mark.parametrize("number", [1, 2, 10, 100])
def test_against_sorted_lists(kind: str, number: int) -> None:
    rng = random.Random(number)
    numbers = drawn(rng, kind)
    values = [next(numbers) for _ in range(number)]
    masks = [[rng.choice([0, 0.5, 1, 1]) for _ in values[:-1]], [1]]
    pairs = list(zip(values, [*masks[0], *masks[1]], strict=True))
    plan = plan_of([torch.tensor(mask, dtype=torch.float32) for mask in masks], 2)
    tensors = dict(zip(map(id, plan), torch.tensor(values).split([number - 1, 1]), strict=True))
    found, by_hand = found_in(plan, lambda one: tensors[id(one)]), found_by_hand(pairs)
    assert (found[0], found[2:]) == (by_hand[0], by_hand[2:])
    assert found[1] == pytest.approx(by_hand[1], abs=1e-14 * sum(abs(value) for value in values))


def test_nothing_is_active() -> None:
    measured = plan_of([torch.zeros(2)]).measure(lambda one: torch.tensor([math.nan, 1]))
    assert (measured.tokens, measured.sum, measured.quantile(0.5)) == (0, 0, math.inf)
    assert math.isnan(measured.mean)


def test_masks_in_turn() -> None:
    """A mask that is measured by, replaced, and of which nothing survives."""
    plan, values = plan_of([torch.ones(4)]), torch.tensor([1.0, 2, 3, 6], requires_grad=True)
    found = []
    for bound in (1.5, 2.5, 9.0):
        plan.keep("above", lambda one, bound=bound: values > bound)
        term = plan[0].loss({"pg": Term(values, mask="above")}, form="sum")
        found += [plan.measure(lambda one: values, mask="above").sum, float(term.detach())]
    assert found == pytest.approx([11, 11 / 3, 9, 4.5, 0, 0])
    assert not plan.samples[0].by_mask  # type: ignore[index]  # the data is as it was


def test_the_gap_between_two_passes() -> None:
    one = plan_of([torch.tensor([1.0, 1, 0])])[0]
    one.log_probs["now"] = torch.tensor([-1.0, -2.0, -9.0])
    assert float(one.gap("now", torch.tensor([-1.0, -2.0, math.nan], requires_grad=True))) == 0
    with pytest.warns(UserWarning, match="now: .* differ by up to 0.5 at a token"):
        assert float(one.gap("now", torch.tensor([-1.5, -2.0, 0.0]))) == 0.5


X = torch.ones(2)


def measured(values: Any = X, q: float = 0.5) -> float:
    return plan_of([torch.ones(2)]).measure(lambda one: values).quantile(q)


def kept(flags: Any, name: str = "kept") -> None:
    plan_step([Samples([X], term_masks={"ok": [X]})], "token_mean", dp_group=None).keep(name, lambda one: flags)


test_refusals = refusal_tests(
    {
        **refusals(
            measured,
            ((X, 0.0), r"q is 0.0: it must be a number in \(0, 1\]", (X, 1e-9)),
            ((torch.ones(3),), r"values to measure of shape \(3,\)", (X[None],)),
            ((X / 0,), "a value of inf at an active token", (X,)),
        ),
        **refusals(measured, ((X.long(),), "values to measure is torch.int64", (X.double(),)), error=TypeError),
        **refusals(
            kept,
            ((None,), "tokens to keep are NoneType", (X > 0,)),
            ((X,), "they must be bools. Pass a comparison", (X > 0,)),
            error=TypeError,
        ),
        **refusals(kept, ((X > 0, "ok"), "tokens to keep as 'ok', which is a mask of the Samples", (X > 0, "good"))),
        **refusals(
            lambda plan, name: (plan[0].log_probs.update(then=X), plan[0].gap(name, X)),
            ((plan_of([X]), "now"), "forward pass 'now'", (plan_of([X]), "then")),
        ),
    }
)
