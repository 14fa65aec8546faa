"""Exact in every layout: whole optimizer steps of a real Megatron GPTModel against a float64 oracle in one process.

A covering array: layouts on 1 to 8 ranks, and in them cases, chosen so that all pairs of values of all axes occur. Of
every case all gradients, the grad norm, the logged metrics and the weights after a step of Adam are compared on every
rank. `gpt_oracle` states the step, a `World` runs it. Not exercised: experts, Transformer Engine (see
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
from tiny_gpt import HEADS, Case, Layout
from world import BF16_BOUNDS, World, beyond_bounds, errors_of, trained_in

pytestmark = [pytest.mark.slow, pytest.mark.gpus]

CASE_AXES: dict[str, tuple[Any, ...]] = {
    "microbatches": (1, 3, 4),
    "mode": oracle.MODES,
    "units": tuple(oracle.BY_MASKS),
    "scaling": ("mean", "averaged in collective", "per token"),
    "bf16": (False, True),
    "optimizer": ("plain", "overlap", "distributed+overlap"),
    "tied": (False, True),
    "lopsided": (False, True),
    "head": ("", *HEADS),
    "loop": ("adapter", "plan"),
}
#: All pairs of sizes 1 and 2 of two axes; then CP and PP over four ranks.
LAYOUTS = [
    Layout(tp=1, sp=False, pp=1, vp=1, cp=1, dp=1),
    Layout(tp=2, sp=False, pp=1, vp=1, cp=1, dp=1),
    Layout(tp=1, sp=False, pp=2, vp=1, cp=2, dp=1),
    Layout(tp=1, sp=False, pp=2, vp=2, cp=1, dp=2),
    Layout(tp=2, sp=True, pp=2, vp=1, cp=1, dp=1),
    Layout(tp=2, sp=True, pp=2, vp=2, cp=1, dp=1),
    Layout(tp=2, sp=False, pp=2, vp=1, cp=1, dp=2),
    Layout(tp=2, sp=False, pp=2, vp=2, cp=2, dp=1),
    Layout(tp=2, sp=True, pp=1, vp=1, cp=2, dp=2),
    Layout(tp=1, sp=False, pp=1, vp=1, cp=4, dp=1),
    Layout(tp=1, sp=False, pp=4, vp=2, cp=1, dp=1),
]


# ---- the array


def axes_in(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Values of each axis in this layout; TP with SP, and PP with VPP, are one axis each."""
    fixed = {"tp": (layout.tp, layout.sp), "pp": (layout.pp, layout.vp), "cp": layout.cp, "dp": layout.dp}
    axes = {name: (value,) for name, value in fixed.items()} | CASE_AXES
    if layout.vp > 1:  # Megatron's interleaved schedule wants whole rounds
        axes["microbatches"] = tuple(m for m in CASE_AXES["microbatches"] if m % layout.pp == 0)
    return axes


def pairs_of(axes: dict[str, tuple[Any, ...]]) -> set[Any]:
    """All pairs of values of two axes."""
    cells = [[(name, value) for value in values] for name, values in axes.items()]
    return {pair for axis, further in itertools.combinations(cells, 2) for pair in itertools.product(axis, further)}


def pairs_in(layout: Layout, case: Case) -> set[Any]:
    return pairs_of(axes_in(layout) | {name: (value,) for name, value in case._asdict().items()})


@functools.cache
def covering_array() -> dict[Layout, list[Case]]:
    """Cases by layout: greedily, of some random candidates the one with the most pairs that are still missing."""
    rng = random.Random(7)
    missing = set().union(*(pairs_of(axes_in(layout)) for layout in LAYOUTS))
    array: dict[Layout, list[Case]] = {layout: [] for layout in LAYOUTS}
    while missing:
        for layout, axes in ((layout, axes_in(layout)) for layout in LAYOUTS):
            drawn = {Case(*(rng.choice(axes[name]) for name in CASE_AXES)) for _ in range(40)} - set(array[layout])
            gains = {case: pairs_in(layout, case) & missing for case in sorted(drawn)}
            best = max(gains, key=lambda case: len(gains[case]))
            if gains[best]:
                array[layout].append(best)
                missing -= gains[best]
    return array


def test_the_layouts_hold_every_pair_of_sizes_1_and_2() -> None:
    def pairs(sizes: Any) -> set[Any]:
        return set(itertools.combinations(enumerate(sizes), 2))

    sizes = itertools.product(((1, False), (2, False), (2, True)), ((1, 1), (2, 1), (2, 2)), (1, 2), (1, 2))
    assert set().union(*map(pairs, sizes)) <= set().union(
        *(pairs((sizes[:2], sizes[2:4], *sizes[4:])) for sizes in LAYOUTS)
    )
    assert {layout.world_size for layout in LAYOUTS} == {1, 2, 4, 8}


# ---- the comparison


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_whole_step_equals_the_oracle(layout: Layout, record_property: Callable[[str, Any], None]) -> None:
    cases = covering_array()[layout]
    worst: dict[str, float] = defaultdict(float)
    failed = []
    for world, outcomes, _ in trained_in(layout, [World.of(layout, case) for case in cases]):
        case = world.case
        errors = errors_of(outcomes, gpt_oracle.step_of(case.shape(layout), case.mode, case.units))
        for what, error in errors.items():
            key = f"{'bf16' if case.bf16 else 'fp32'}_{what}_error"
            worst[key] = max(worst[key], error)
        if beyond_bounds(case, errors):
            failed.append(f"{case}: {errors}")
    record_property("cases", len(cases))
    for key, error in worst.items():
        record_property(key, error)
    assert not failed, "\n".join(failed[:5])


def test_bf16_bounds_would_see_another_mode() -> None:
    """Every mode and unit counting against the oracle of each other one: beyond the bound that the right one keeps."""
    layout = Layout(1, False, 1, 1, 1, 1)
    cases = [Case(2, mode, units, "mean", True, "plain", False, False) for mode, units in oracle.COUNTINGS]
    for world, outcomes, _ in trained_in(layout, [World.of(layout, case) for case in cases]):
        case = world.case
        for mode, units in oracle.COUNTINGS:
            one_unit = mode in ("token_mean", "token_sum")
            same = mode == case.mode and (units == case.units or one_unit)
            errors = errors_of(outcomes, gpt_oracle.step_of(case.shape(layout), mode, units))
            for what in ("gradients", "overall"):
                assert (errors[what] < BF16_BOUNDS[what]) == same, (what, case, mode, units, errors)
