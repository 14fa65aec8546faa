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
from collections.abc import Callable
from typing import Any

import gpt_oracle
import oracle
import pytest
from gpt_errors import BF16_BOUNDS, FP32_BOUNDS, errors_of, gradient_error, outcomes_in
from gpt_oracle import GptShape
from tiny_gpt import Case, Layout, batches_of, dealt, fully_masked

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


OF_SEQUENCES = [
    Layout(1, False, 1, 1, 2, 1),
    Layout(1, False, 1, 1, 4, 1),
    Layout(2, True, 1, 1, 2, 1),
    Layout(1, False, 2, 1, 2, 1),
    Layout(1, False, 1, 1, 2, 2),
    Layout(2, True, 2, 1, 2, 1),
]


@pytest.mark.parametrize("layout", OF_SEQUENCES, ids=str)
def test_losses_of_sequences_equal_the_oracle(layout: Layout, record_property: Callable[[str, Any], None]) -> None:
    """A sequence's ratio is a sum over CP ranks, forward and backward, between the schedule's own collectives."""
    plain: dict[str, Any] = {"bf16": False, "optimizer": "plain", "tied": False, "lopsided": False}
    cases = [
        Case(microbatches, mode, "all", scaling, loss=loss, **plain)
        for loss, mode in (("gspo", "sample_mean"), ("gmpo", "sample_mean"), ("gspo_token", "token_mean"))
        for microbatches, scaling in ((2, "mean"), (3, "per token"))
    ]
    for case, outcomes in outcomes_in(layout, cases):
        errors = errors_of(outcomes, gpt_oracle.step_of(case.shape(layout), case.mode, case.units, case.loss))
        assert all(errors[what] <= bound for what, bound in FP32_BOUNDS.items()), (case, errors)
        ppo = gpt_oracle.step_of(case.shape(layout), case.mode, case.units)
        assert errors_of(outcomes, ppo)["gradients"] > 1e-2, "another loss would not be seen"
        record_property("sequence_losses_gradients_error", errors["gradients"])


OF_COUNTS = [Layout(2, True, 1, 1, 2, 1), Layout(1, False, 1, 1, 2, 2), Layout(1, False, 2, 1, 1, 2)]
#: Of gradients, relative to a tensor's largest entry: what the package promises.
PROMISED = 1e-5


def of_counts(layout: Layout) -> list[Case]:
    """With 2 and 3 micro-batches, Megatron's mean and per-token loss: each way to count with both."""
    plain: dict[str, Any] = {"bf16": False, "optimizer": "plain", "tied": False, "lopsided": False}
    ways = [
        ("token", "token_mean", "all"),
        ("token", "sample_mean", "active"),
        ("geometric", "sample_mean", "active"),
        ("geometric", "prompt_mean", "active"),
        ("", "vl_norm", "all"),
        ("token", "vl_norm", "all"),
    ]
    return [
        Case(microbatches, mode, units, scaling, rejects=rejects, **plain)
        for rejects, mode, units in ways
        for microbatches, scaling in ((2, "mean"), (3, "per token"))
    ]


@pytest.mark.parametrize("layout", OF_COUNTS, ids=str)
def test_survivors_and_declared_sums_equal_the_oracle(
    layout: Layout, record_property: Callable[[str, Any], None]
) -> None:
    """Totals made after rejection, in the look-ahead, and totals of M^-alpha, which VL Norm declares."""
    worst = 0.0
    for case, outcomes in outcomes_in(layout, of_counts(layout)):
        shape = case.shape(layout)
        errors = errors_of(outcomes, gpt_oracle.step_of(shape, case.mode, case.units, rejects=case.rejects))
        assert all(errors[what] <= bound for what, bound in FP32_BOUNDS.items()), (case, errors)
        assert errors["gradients"] <= PROMISED, (case, errors)
        worst = max(worst, errors["gradients"])
        others = [gpt_oracle.step_of(shape, "sample_mean", "all", rejects=case.rejects)]
        if case.rejects:
            others.append(gpt_oracle.step_of(shape, case.mode, case.units))
        if case.rejects and case.mode != "vl_norm":  # the same tokens trained, but the rejected ones counted
            others.append(gpt_oracle.step_of(shape, case.mode, case.units, rejects=case.rejects, counted="before"))
        for other in others:
            assert errors_of(outcomes, other)["gradients"] > 1e-2, (case, "other counts would not be seen")
    record_property("counts_gradients_error", worst)


def test_the_data_has_what_breaks_counts_of_survivors() -> None:
    """Samples that lose a token or all, and a rollout and a prompt group that were active and are no more."""
    rollouts = gpt_oracle.rollouts_of(GptShape(2, False, False))
    for rejects in ("token", "geometric"):
        kept = [gpt_oracle.survivors(one, rejects) for one in rollouts]
        lost = [sum(a) - sum(b) for a, b in zip((one.mask for one in rollouts), kept, strict=True)]
        assert any(lost), rejects
        assert any(not some and any(mask) for some, mask in zip(lost, kept, strict=True)), rejects
        assert any(0 < some < sum(one.mask) for some, one in zip(lost, rollouts, strict=True)) == (rejects == "token")
        for kind in ("rollout_id", "prompt_id"):
            active, left = (
                {getattr(one, kind) for one, mask in zip(rollouts, masks, strict=True) if any(mask)}
                for masks in ([one.mask for one in rollouts], kept)
            )
            assert left < active or (rejects, kind) == ("token", "prompt_id"), (rejects, kind)


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
