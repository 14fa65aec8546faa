"""Exact in every layout: whole optimizer steps of a real Megatron GPTModel against a float64 oracle in one process.

A covering array: every layout of TP, SP, PP, VPP, CP and DP on 1 to 8 ranks, and in it cases chosen so that all pairs
of values of all axes (and nearly all triples) occur. Of every case all gradients, the grad norm, the logged metrics and
the weights after a step of Adam are compared on every rank. `gpt_oracle` states the step, `tiny_gpt` runs it. With
``TEST_DEVICE=cuda`` the same cases run on GPUs and NCCL. Not exercised here: experts, Transformer Engine (see
test_transformer_engine.py).
"""

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import gpt_oracle
import oracle
import pytest
import torch
from gpt_oracle import GptShape, Step
from ranks import run_ranks
from tiny_gpt import Case, Layout, Outcome, batches_of, dealt, fully_masked, run_layout
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.gpus]

MICROBATCHES = (1, 2, 3, 8)
OPTIMIZERS = ("plain", "distributed", "overlap", "distributed+overlap")
CASE_AXES: dict[str, tuple[Any, ...]] = {
    "microbatches": MICROBATCHES,
    "mode": oracle.MODES,
    "units": ("all", "active"),
    "scaling": ("mean", "averaged in collective", "per token"),
    "bf16": (False, True),
    "optimizer": OPTIMIZERS,
    "tied": (False, True),
    "lopsided": (False, True),
}

# gradients, weights: the worst tensor's largest error, relative to its largest entry. updates: the same of what Adam's
# step added to the weights. overall: the norm of the error of all gradients, relative to the norm. grad_norm: relative.
# metrics: relative to the same metric of absolute values.
FP32_BOUNDS = {
    "gradients": 1e-5, "overall": 1e-5, "grad_norm": 1e-5, "metrics": 1e-5, "weights": 1e-5, "updates": 5e-5
}  # fmt: skip
# No bound for updates: storing a weight in bfloat16 rounds it by as much as a step of Adam moves it.
BF16_BOUNDS = {"gradients": 0.25, "overall": 0.1, "grad_norm": 0.05, "metrics": 0.02, "weights": 0.02}


# ---- the array


def all_layouts() -> list[Layout]:
    found = [
        Layout(tp, sp, pp, vp, cp, dp)
        for tp, pp, cp, dp in itertools.product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8))
        for sp in ((False, True) if tp > 1 else (False,))
        for vp in ((1, 2) if pp > 1 else (1,))
        if tp * pp * cp * dp <= 8
    ]
    return sorted(found, key=lambda layout: (layout.world_size, layout))


LAYOUTS = all_layouts()


def possible_cases(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Values of each axis in this layout; those of the case are free of each other."""
    axes = dict(CASE_AXES)
    if layout.vp > 1:  # Megatron's interleaved schedule wants whole rounds
        axes["microbatches"] = tuple(m for m in MICROBATCHES if m % layout.pp == 0)
    return axes


def cells(layout: Layout, case: Case) -> list[tuple[str, Any]]:
    """The case as values of all axes; TP with SP, and PP with VPP, are one axis each."""
    return [
        ("tp", (layout.tp, layout.sp)),
        ("pp", (layout.pp, layout.vp)),
        ("cp", layout.cp),
        ("dp", layout.dp),
        *case._asdict().items(),
    ]


Combination = tuple[tuple[str, Any], ...]


def possible_combinations(size: int) -> set[Combination]:
    """All combinations of values of `size` axes that some possible case has."""
    found: set[Combination] = set()
    for layout in LAYOUTS:
        any_case = Case(*(values[0] for values in possible_cases(layout).values()))
        choices = {name: [value] for name, value in cells(layout, any_case)}
        choices |= {name: list(values) for name, values in possible_cases(layout).items()}
        for names in itertools.combinations(choices, size):
            for values in itertools.product(*(choices[name] for name in names)):
                found.add(tuple(zip(names, values, strict=True)))
    return found


@functools.cache
def covering_array() -> dict[Layout, list[Case]]:
    """Cases by layout: greedily, of some random candidates the one with the most pairs, then triples, still missing."""
    rng = random.Random(2)
    pairs, triples = possible_combinations(2), possible_combinations(3)
    array: dict[Layout, list[Case]] = {layout: [] for layout in LAYOUTS}

    def gain(layout: Layout, case: Case) -> tuple[int, int]:
        at = cells(layout, case)
        return (
            len(pairs.intersection(itertools.combinations(at, 2))),
            len(triples.intersection(itertools.combinations(at, 3))),
        )

    def add(layout: Layout, candidates: set[Case]) -> None:
        best = max(sorted(candidates - set(array[layout])), key=functools.partial(gain, layout))
        pairs.difference_update(itertools.combinations(cells(layout, best), 2))
        triples.difference_update(itertools.combinations(cells(layout, best), 3))
        array[layout].append(best)

    # Rounds, the last three without the layouts on 8 ranks: they are the most numerous and take the longest.
    for turn, layout in itertools.product(range(6), LAYOUTS):
        if turn < 3 or layout.world_size < 8:
            add(layout, {Case(*map(rng.choice, possible_cases(layout).values())) for _ in range(40)})
    while pairs:  # of values that few layouts can have
        pair = min(pairs, key=repr)
        for layout in LAYOUTS:
            drawn = {Case(*map(rng.choice, possible_cases(layout).values())) for _ in range(100)}
            if fitting := {case for case in drawn if set(pair) <= set(cells(layout, case))} - set(array[layout]):
                add(layout, fitting)
                break
    return array


def covered(size: int) -> set[Combination]:
    return {
        combination
        for layout, cases in covering_array().items()
        for case in cases
        for combination in itertools.combinations(cells(layout, case), size)
    }


def test_the_array_covers_every_pair_and_nearly_every_triple(record_property: Callable[[str, Any], None]) -> None:
    chosen = [(layout, case) for layout, cases in covering_array().items() for case in cases]
    assert len(set(chosen)) == len(chosen) >= 200
    assert possible_combinations(2) == covered(2)
    triples = possible_combinations(3)
    assert covered(3) <= triples
    assert len(covered(3)) > 0.95 * len(triples)
    assert {layout.world_size for layout in LAYOUTS} == {1, 2, 4, 8}


def test_the_data_has_what_breaks_wrong_aggregation() -> None:
    """The same samples for every layout; seen from it, everything that a step can look like."""
    rollouts = gpt_oracle.rollouts_of(GptShape(2, False, False))
    units = {"rollout_id": defaultdict(set), "prompt_id": defaultdict(set)}
    assert sorted({len(one.tokens) for one in rollouts})[:2] == [1, 2]
    assert any(0 < weight < 1 for one in rollouts for weight in one.mask)
    for kind, members in units.items():
        for i, one in enumerate(rollouts):
            members[getattr(one, kind)].add(i)
    group_sizes = [len(members) for members in units["prompt_id"].values()]
    assert len(set(group_sizes)) > 2
    masked = fully_masked(rollouts)
    for kind in units:  # a whole unit that counts by one unit counting only
        assert any(members <= set(masked) for members in units[kind].values())
    assert any(members & set(masked) and not members <= set(masked) for members in units["rollout_id"].values())
    seen: dict[str, set[tuple[Layout, Case]]] = defaultdict(set)
    for layout, case in ((layout, case) for layout, cases in covering_array().items() for case in cases):
        hands = dealt(len(rollouts), masked, layout.dp, case.microbatches, case.lopsided)
        assert sorted(i for rank in hands for hand in rank for i in hand) == list(range(len(rollouts)))
        assert len(hands) == layout.dp
        assert {len(rank) for rank in hands} == {case.microbatches}
        here = layout, case
        if any(not any(rank) for rank in hands):
            seen["a rank without samples"].add(here)
        if any(hand and set(hand) <= set(masked) for rank in hands for hand in rank):
            seen["a fully masked micro-batch"].add(here)
        for kind, members in units.items():
            homes = [{(d, m) for d, rank in enumerate(hands) for m, hand in enumerate(rank) if unit & set(hand)}
                     for unit in members.values()]  # fmt: skip
            if any(len({d for d, _ in home}) > 1 for home in homes):
                seen[f"a {kind} on several ranks"].add(here)
            if any(len({m for d, m in home if d == 0}) > 1 for home in homes):
                seen[f"a {kind} in several micro-batches"].add(here)
        if layout.cp > 1:
            by_rank = [batches_of(rollouts, case, layout.dp, 0, layout.cp, cp_rank) for cp_rank in range(layout.cp)]
            for parts in zip(*by_rank, strict=True):
                if len({bool(part.mask.any()) for part in parts}) == 2:
                    seen[f"of CP {layout.cp}, a rank without an active token"].add(here)
    assert min(len(where) for where in seen.values()) >= 3, {name: len(where) for name, where in seen.items()}
    assert len(seen) == 8, sorted(seen)
    assert all(len(rollouts) % dp for dp in (2, 4, 8))


# ---- the comparison


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def whole(outcomes: list[tuple[dict[str, int], Outcome]], of: str) -> Iterator[tuple[str, Tensor]]:
    """Every copy of every parameter's gradient or weight, put together over TP ranks: one a stage, CP and DP rank."""
    shards: dict[tuple[str, int, int, int], dict[int, tuple[Any, int | None]]] = defaultdict(dict)
    for place, outcome in outcomes:
        for name, shard in getattr(outcome, of).items():
            shards[name, place["pp"], place["cp"], place["dp"]][place["tp"]] = shard
    for (name, *_), by_rank in shards.items():
        parts = [torch.from_numpy(by_rank[rank][0]) for rank in sorted(by_rank)]
        dim = by_rank[0][1]
        for tensor in parts if dim is None else [torch.cat(parts, dim)]:
            yield name.rstrip("'"), tensor


def errors_of(outcomes: list[tuple[dict[str, int], Outcome]], expected: Step) -> dict[str, float]:
    """The worst relative errors over all ranks and tensors."""
    errors: dict[str, float] = dict.fromkeys(FP32_BOUNDS, 0.0)
    seen: dict[str, set[str]] = {"gradients": set(), "weights": set()}

    def note(what: str, error: float) -> None:
        errors[what] = max(errors[what], error if error == error else float("inf"))  # NaN must not pass

    squares: dict[str, list[float]] = defaultdict(list)
    for name, gradient in whole(outcomes, "gradients"):
        seen["gradients"].add(name)
        note("gradients", relative_error(gradient, expected.gradients[name]))
        squares[name].append(float((gradient - expected.gradients[name]).square().sum()))
    note("overall", sum(max(copies) for copies in squares.values()) ** 0.5 / expected.grad_norm)
    for name, weight in whole(outcomes, "weights"):
        seen["weights"].add(name)
        first = expected.first_weights[name]
        note("weights", relative_error(weight, expected.weights[name]))
        note("updates", relative_error(weight - first, expected.weights[name] - first))
    assert seen["gradients"] == seen["weights"] == set(expected.gradients)
    assert any(outcome.metrics is not None for _, outcome in outcomes)
    for _, outcome in outcomes:
        note("grad_norm", abs(outcome.grad_norm - expected.grad_norm) / expected.grad_norm)
        if outcome.metrics is not None:
            assert set(outcome.metrics) == set(expected.metrics)
            for name, value in outcome.metrics.items():
                note("metrics", abs(value - expected.metrics[name]) / expected.scales[name])
    return errors


def outcomes_in(
    layout: Layout, cases: list[Case], stock: bool = False, attention: str = "packed"
) -> Iterator[tuple[Case, list[tuple[dict[str, int], Outcome]]]]:
    rollouts = {shape: gpt_oracle.rollouts_of(shape) for shape in {case.shape(layout) for case in cases}}
    by_rank = run_ranks(layout.world_size, functools.partial(run_layout, layout, cases, rollouts, stock, attention))
    for k, case in enumerate(cases):
        yield case, [(place, found[k]) for place, found in by_rank]


QUICK = [Layout(1, False, 1, 1, 2, 1), Layout(2, True, 1, 1, 2, 1), Layout(1, False, 2, 2, 1, 2),
         Layout(1, False, 2, 1, 2, 1), Layout(2, False, 1, 1, 1, 2)]  # fmt: skip


BF16_CONTROLS = [Layout(1, False, 1, 1, 2, 1), Layout(2, True, 2, 1, 1, 1)]


@pytest.mark.parametrize("layout", [*QUICK, *(layout for layout in LAYOUTS if layout not in QUICK)], ids=str)
def test_a_whole_step_equals_the_oracle(layout: Layout, record_property: Callable[[str, Any], None]) -> None:
    cases = covering_array()[layout]
    worst: dict[str, float] = defaultdict(float)
    failed = []
    for case, outcomes in outcomes_in(layout, cases):
        expected = gpt_oracle.step_of(case.shape(layout), case.mode, case.units)
        errors = errors_of(outcomes, expected)
        bounds = BF16_BOUNDS if case.bf16 else FP32_BOUNDS
        for what in bounds:
            key = f"{'bf16' if case.bf16 else 'fp32'}_{what}_error"
            worst[key] = max(worst[key], errors[what])
        if any(not errors[what] <= bound for what, bound in bounds.items()):
            failed.append((max(errors.values()), case, errors))
    record_property("cases", len(cases))
    for key, error in worst.items():
        record_property(key, error)
    failed.sort(key=lambda failure: -failure[0])
    assert not failed, "\n".join(f"{case}: {errors}" for _, case, errors in failed[:5])


def gradient_error(outcomes: list[tuple[dict[str, int], Outcome]], expected: Step, fit: bool = False) -> float:
    """The worst of all tensors on all ranks; with `fit`, after the one factor that fits best (least squares)."""
    pairs = [(gradient, expected.gradients[name]) for name, gradient in whole(outcomes, "gradients")]
    factor = 1.0
    if fit:
        factor = float(sum((a * b).sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs))
    return max(relative_error(a * factor, b) for a, b in pairs)


@pytest.mark.parametrize("layout", BF16_CONTROLS, ids=str)
def test_bf16_bounds_would_see_another_mode(layout: Layout) -> None:
    """Every mode and unit counting against the oracle of each other one: beyond the bound that the right one keeps."""
    plain = {"microbatches": 2, "scaling": "mean", "bf16": True, "optimizer": "plain", "tied": False, "lopsided": False}
    cases = [Case(mode=mode, units=units, **plain) for mode, units in oracle.COUNTINGS]  # type: ignore[arg-type]
    for case, outcomes in outcomes_in(layout, cases):
        for mode, units in oracle.COUNTINGS:
            one_unit = mode in ("token_mean", "token_sum")
            same = mode == case.mode and (units == case.units or one_unit)
            errors = errors_of(outcomes, gpt_oracle.step_of(case.shape(layout), mode, units))
            for what in ("gradients", "overall"):
                assert (errors[what] < BF16_BOUNDS[what]) == same, (what, case, mode, units, errors)


def test_the_comparison_sees_megatrons_stock_aggregation() -> None:
    """Negative control: sum of masked losses and local token count, as Megatron's own loss functions return them.

    One micro-batch and one data-parallel rank, so that CP is all that is cut. With CP 1 stock is the token mean but for
    a factor (it counts tokens, not their weights); with CP it is off by far more than a factor.
    """
    case = Case(1, "token_mean", "all", "mean", bf16=False, optimizer="plain", tied=False, lopsided=False)
    expected = gpt_oracle.step_of(GptShape(2, False, False), "token_mean", "all")
    errors = {}
    for cp in (1, 2, 4):
        (_, outcomes), *_ = outcomes_in(Layout(1, False, 1, 1, cp, 1), [case], stock=True)
        errors[cp] = gradient_error(outcomes, expected), gradient_error(outcomes, expected, fit=True)
    assert errors[1][1] < FP32_BOUNDS["gradients"], errors
    assert min(*errors[1][:1], *errors[2], *errors[4]) > 1e-2, errors
