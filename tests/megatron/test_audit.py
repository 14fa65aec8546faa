"""An audit's measured weights: of this package's losses, of Megatron's stock ones, in every kind of layout.

The model is `tiny_gpt`'s, a real GPT in Megatron's DDP, schedule and finalisation. Expected weights are formulas, from
the float64 oracle and its own zigzag (`audited_gpt.expected_weights`). That a step goes on as if it were not measured
is compared bit by bit.
"""

import functools
from typing import Any

import gpt_oracle
import numpy as np
import oracle
import pytest
from audited_gpt import Ask, expected_weights, mutations, run_steps
from ranks import run_ranks
from tiny_gpt import Case, Layout

pytestmark = pytest.mark.slow

#: What a weight may be off by: its own roundings and those of the factor, which a sum over all tokens averages out.
EXACT = 1e-6

STEP = Case(3, "sample_mean", "all", "mean", bf16=False, optimizer="plain", tied=False, lopsided=False)
PER_TOKEN = STEP._replace(scaling="per token")
OVERLAP = STEP._replace(optimizer="distributed+overlap")
STOCK = ("2-tuple, local", "2-tuple, over CP", "3-tuple")

ASKS: list[Ask] = [
    *(Ask(STEP._replace(mode=mode)) for mode in oracle.MODES),
    Ask(STEP._replace(mode="prompt_mean", units="active", tied=True, optimizer="distributed")),
    Ask(OVERLAP._replace(mode="token_mean", tied=True)),
    Ask(STEP._replace(optimizer="overlap", scaling="averaged in collective")),
    Ask(PER_TOKEN._replace(mode="constant", optimizer="distributed")),
    Ask(PER_TOKEN._replace(mode="token_mean")),
    *(Ask(STEP, loss) for loss in STOCK),
    *(Ask(PER_TOKEN, loss) for loss in STOCK),
    Ask(OVERLAP, "3-tuple"),
    Ask(STEP, "3-tuple", how="output"),
]
QUICK = Layout(2, True, 1, 1, 2, 1)
LAYOUTS = [
    QUICK,
    Layout(1, False, 1, 1, 1, 1),
    Layout(2, False, 1, 1, 2, 1),
    Layout(1, False, 1, 1, 2, 2),
    Layout(1, False, 2, 1, 2, 1),
    Layout(1, False, 2, 2, 1, 2),
    Layout(1, False, 1, 1, 1, 3),
]


def asks_in(layout: Layout) -> list[Ask]:
    if layout.vp == 1:
        return ASKS
    return [ask._replace(case=ask.case._replace(microbatches=4)) for ask in ASKS]  # whole rounds, Megatron asks


def run(layout: Layout, asks: list[Ask], mutation: str | None = None) -> list[list[Any]]:
    """By ask, what each rank gave."""
    rollouts = {shape: gpt_oracle.rollouts_of(shape) for shape in {ask.case.shape(layout) for ask in asks}}
    by_rank = run_ranks(layout.world_size, functools.partial(run_steps, layout, asks, rollouts, mutation))
    return [[found[k] for found in by_rank] for k in range(len(asks))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_measured_weights_are_the_declared_ones(layout: Layout, record_property: Any) -> None:
    asks = asks_in(layout)
    worst = 0.0
    for ask, (first, *others) in zip(asks, run(layout, asks), strict=True):
        measured, _, _ = first
        assert all(other[0] is None for other in others)
        assert not measured.unknown, (ask, measured.unknown)
        expected = expected_weights(layout, ask)
        for name, values in expected.items():
            if name != "weights":
                np.testing.assert_array_equal(getattr(measured.tokens, name), values, err_msg=f"{ask} {name}")
        weights = expected["weights"]
        active = weights != 0
        assert 0 < active.sum() < len(active)
        off = np.abs(measured.weights[active] / weights[active] - 1).max()
        worst = max(worst, off)
        assert off <= EXACT, (ask, off, measured.facts)
        assert not measured.weights[~active].any()
        assert measured.stray == (0, 0.0)
        split = measured.split
        assert (split.num_microbatches, split.dp_size, split.cp_size, split.tp_size, split.pp_size) == (
            ask.case.microbatches, layout.dp, layout.cp, layout.tp, layout.pp,
        )  # fmt: skip
        assert split.per_token == (ask.case.scaling == "per token")
        assert measured.facts["residual"] <= measured.facts["residual_by_rounding"]
        assert measured.facts["rounding"] == "float32"
        assert bool(measured.notes) == (ask.how == "output")
        for _, deviation, _ in (first, *others):
            assert deviation is None or deviation <= EXACT
    record_property("audit_weight_error", worst)


@pytest.mark.parametrize("layout", [QUICK, Layout(1, False, 2, 2, 1, 2)], ids=str)
def test_a_step_goes_on_as_if_it_were_not_measured(layout: Layout) -> None:
    """Gradients and weights after the optimizer's step, every bit of them, on every rank."""
    asks = asks_in(layout)[::3]
    alone = [ask._replace(how="alone") for ask in asks]
    outcomes = run(layout, [*asks, *alone])
    for measured, unmeasured in zip(outcomes[: len(asks)], outcomes[len(asks) :], strict=True):
        for (_, _, after), (_, _, expected) in zip(measured, unmeasured, strict=True):
            for values, others in zip(after, expected, strict=True):
                assert values.tobytes() == others.tobytes()


@pytest.mark.parametrize("mutation", [name for name in mutations if name])
def test_no_verdict_where_no_one_factor_holds(mutation: str) -> None:
    layout, what = mutations[mutation].layout, mutations[mutation].says
    ((measured, *_), *_), *_ = run(layout, [Ask(STEP)], mutation)
    assert what in " ".join(measured.unknown), measured.unknown
    assert len(measured.weights) == len(expected_weights(layout, Ask(STEP))["weights"])
