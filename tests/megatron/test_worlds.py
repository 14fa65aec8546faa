"""Every layout x loop: the gradient of one step against the float64 oracle, and the line that says what is proved.

A launch is a layout. In it each loop trains the table of losses, with everything that a loss function may return to it,
and the tiny GPT once; in CP 2 x DP 2 by every mode. More settings of the GPT's step: test_matrix.py, of
the loss: test_aggregation.py.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import gpt_oracle
import oracle
import pytest
import torch
from missing import has
from table_step import relative_error
from tiny_gpt import Layout
from torch import Tensor
from world import FORM_SETTINGS, FP32_BOUNDS, LOOPS, STEP, World, gradient_of, trained_in, whole

from megatron_rl_loss.core.carriers import FORMS, IN_A_LOOP

pytestmark = pytest.mark.slow

LAYOUTS = [
    Layout(tp=1, sp=False, pp=1, vp=1, cp=1, dp=1),
    Layout(tp=1, sp=False, pp=1, vp=1, cp=2, dp=2),
    Layout(tp=2, sp=True, pp=1, vp=1, cp=2, dp=1),
    Layout(tp=1, sp=False, pp=2, vp=1, cp=1, dp=2),
    Layout(tp=2, sp=False, pp=2, vp=2, cp=1, dp=1),
]
EVERY_MODE = LAYOUTS[1]
MODES = (*oracle.MODES, *oracle.BY_IDS)


def worlds_in(layout: Layout) -> list[World]:
    """Every loop that the layout has, with each form that may be returned to it; modes in turn, but in one layout."""
    worlds, modes, in_turn = list[World](), itertools.cycle(oracle.MODES), itertools.cycle(oracle.MODES)
    for loop in LOOPS:
        if (loop == "by hand" and layout.pp > 1) or (loop == "pretrain" and not has("pretrain_cfg_container")):
            continue
        caller = "loop" if loop == "by hand" else "schedule"
        settings = [
            (form, per_token) for form, per_token in FORM_SETTINGS if (FORMS | IN_A_LOOP)[form].caller == caller
        ]
        if loop == "pretrain":
            settings = settings[:1] if layout.dp == 1 else settings[1:2]
        for form, per_token in settings:
            table_modes: tuple[str, ...] = oracle.MODES[::3] if loop == "pretrain" else MODES
            if layout != EVERY_MODE:
                table_modes = (next(in_turn),)
            worlds += [World(layout, "table", loop, mode, form, per_token) for mode in table_modes]
        worlds.append(World(layout, "gpt", loop, next(modes), *settings[-1]))
    return worlds


@functools.cache
def table_loss(mode: str) -> tuple[float, float]:
    """The step loss, and what its rounding errors are relative to."""
    losses, weights = torch.cat([sample.losses for sample in STEP]), gradient_of(mode)[:-1]
    return float(weights @ losses), float(weights @ losses.abs()) * oracle.sum_error(oracle.num_tokens(STEP))


def errors_in(world: World, gradients: list[tuple[str, Tensor]]) -> float:
    """The worst error of a gradient on any rank, of what it may be."""
    if world.model == "table":
        errors = [relative_error(gradient, gradient_of(world.mode)) / oracle.EXACT for _, gradient in gradients]
    else:
        right = gpt_oracle.step_of(world.case.shape(world.layout), world.mode, "all").gradients
        assert {name for name, _ in gradients} == set(right)
        errors = [relative_error(gradient, right[name]) / FP32_BOUNDS["gradients"] for name, gradient in gradients]
    return oracle.worst_of(*errors)


def active_tokens(world: World) -> int:
    masks: Any = [sample.mask.tolist() for sample in STEP]
    if world.model == "gpt":
        masks = [rollout.mask for rollout in gpt_oracle.rollouts_without_old_policy()]
    return sum(entry != 0 for mask in masks for entry in mask)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_the_oracles_and_its_line_says_so(
    layout: Layout, record_property: Callable[[str, Any], None]
) -> None:
    worlds, worst = worlds_in(layout), 0.0
    for world, outcomes, printed in trained_in(layout, worlds):
        error = errors_in(world, list(whole(outcomes, "gradients")))
        assert error < 1, world
        worst = max(worst, error)
        if world.loop != "by hand":
            assert re.findall(r"proved on (\d+) tokens", printed) == [str(active_tokens(world))], world
        losses = [outcome.metrics["pg_loss"] for _, outcome in outcomes if outcome.metrics is not None]
        assert losses, world
        if world.model == "table":
            right, bound = table_loss(world.mode)
            assert losses == pytest.approx([right] * len(losses), abs=bound), world
    record_property("worlds", len(worlds))
    record_property("world_error", worst)


def test_the_comparison_sees_another_mode() -> None:
    """Negative control: each mode's step of both models against the oracle of every other one."""
    layout = LAYOUTS[0]
    worlds = [World(layout, model, "plan", mode) for model in ("table", "gpt") for mode in oracle.MODES]
    for world, outcomes, _ in trained_in(layout, worlds):
        gradients = list(whole(outcomes, "gradients"))
        for mode in oracle.MODES:
            assert (errors_in(world._replace(mode=mode), gradients) < 1) == (mode == world.mode), (world, mode)
