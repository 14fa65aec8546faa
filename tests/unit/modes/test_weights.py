"""The weight of a token: what the modes make of the step's totals, and what is refused. `oracle` states it apart."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import NAN
from placements import Place, every_layout, laid_out, padded_masks
from refusals import refusal_tests, refusals
from step_samples import step_samples
from steps import Step, divisor_of, ids_of, on_both, quick, steps, totals_of

from megatron_rl_loss import (
    Gathered,
    ModeInputs,
    Samples,
    StepTotals,
    UnitCounts,
    ZigzagTHD,
    make_pg_loss_reducer,
    token_weights,
    weights_column,
)
from megatron_rl_loss.modes import MODES, unit_weights, vl_norm_undivided

INF = float("inf")


# --- against the oracle: every mode x layout x CP size, on random ragged steps, on the host and as on a device


@pytest.mark.parametrize(("mode", "units"), oracle.WORKED_VALUES)
def test_the_oracle_and_the_weights_give_what_is_worked_out_by_hand(mode: str, units: Any) -> None:
    """README shows these values."""
    value, divisor = oracle.WORKED_VALUES[mode, units], divisor_of(mode)
    assert float(oracle.step_loss(mode, oracle.WORKED, divisor, units)) == pytest.approx(value, rel=1e-14)
    samples = Samples([one.mask for one in oracle.WORKED], **ids_of(oracle.WORKED))
    weights = token_weights(mode, samples, totals_of(oracle.WORKED), divisor=divisor, units=units)
    losses = torch.cat([one.losses for one in oracle.WORKED])
    assert float(weights.double() @ losses.double()) == pytest.approx(value, rel=1e-6)


def numbered(inputs: ModeInputs) -> list[torch.Tensor]:
    """A mode of one's own: another weight for every token of the micro-batch."""
    return [100.0 * i + torch.arange(len(mask)) + 1 for i, mask in enumerate(inputs.samples.loss_masks)]


@every_layout
@quick
@given(step=steps(), units=st.sampled_from(["all", "active"]))
def test_they_are_the_slopes_of_the_step_loss(step: Step, units: Any, place: Place, cp_size: int) -> None:
    """For every token that a rank holds, 0 in padding; over the ranks, every copy has its part."""
    totals = totals_of(step.samples)
    slopes = {mode: oracle.step_gradient(mode, step.samples, divisor_of(mode), units) for mode in oracle.MODES}
    for microbatch in step.microbatches:
        chosen = [step.samples[i] for i in microbatch]
        placed = laid_out(place, tuple(len(one.mask) for one in chosen), cp_size)
        masks, copies = padded_masks(chosen, placed), cp_size if isinstance(placed.layout, Gathered) else 1
        right: dict[Any, Any] = {mode: [of_mode[i].tolist() for i in microbatch] for mode, of_mode in slopes.items()}
        right[numbered] = [
            [(100.0 * i + t + 1) * m for t, m in enumerate(mask.tolist())] for i, mask in enumerate(masks)
        ]
        expected = [
            0.0 if at is None else of_mode[at[0]][at[1]] / copies
            for of_mode, held in itertools.product(right.values(), placed.held)
            for at in held
        ]

        def weights(masks: Any = masks, placed: Any = placed, right: Any = right, chosen: Any = chosen) -> Any:
            samples = Samples(masks, layout=placed.layout, **ids_of(chosen))
            asked = functools.partial(token_weights, samples=samples, totals=totals, cp_size=cp_size)
            options = {
                mode: {"divisor": None if mode is numbered else divisor_of(mode), "units": units} for mode in right
            }
            ranks = range(len(placed.held))
            return torch.cat([asked(mode, cp_rank=r, **options[mode]) for mode, r in itertools.product(right, ranks)])

        for found in on_both(weights):
            assert found.dtype == torch.float32
            torch.testing.assert_close(
                found.double(), torch.tensor(expected, dtype=torch.float64), rtol=oracle.EXACT, atol=0
            )


@pytest.mark.parametrize(("mode", "units"), oracle.COUNTINGS)
def test_a_column_is_what_the_tokens_of_the_whole_step_weigh(mode: str, units: Any) -> None:
    """Bit by bit; however it is cut, as above."""
    step, settings = step_samples(seed=2), {"divisor": divisor_of(mode), "units": units}
    masks = [one.mask for one in step]
    column = weights_column(mode, masks, **settings, **ids_of(step))
    assert list(map(len, column)) == list(map(len, masks))
    weights = token_weights(mode, Samples(masks, **ids_of(step)), totals_of(step), **settings)
    assert torch.equal(torch.cat(column), weights)


def test_a_column_of_a_mode_over_its_own_sums() -> None:
    column = weights_column(vl_norm_undivided, [torch.ones(4), torch.zeros(2), torch.ones(1)])
    powers = [4**-0.75, 0.0, 1.0]
    expected = [torch.full((length,), power / sum(powers)) for length, power in zip((4, 2, 1), powers, strict=True)]
    torch.testing.assert_close(column, expected)


# --- inside a unit, without the number of units

FRACTIONS = [torch.tensor([1.0, 0, 0.5]), torch.zeros(2), torch.tensor([1.0, 1])]


@pytest.mark.parametrize(
    ("size", "num_units", "expected"),
    [
        (None, 1, [2 / 3, 0, 1 / 3, 0, 0, 0.5, 0.5]),
        (None, 4, [1 / 6, 0, 1 / 12, 0, 0, 1 / 8, 1 / 8]),
        (1, 1, [1, 0, 0.5, 0, 0, 1, 1]),
        (8.0, 0.5, [0.25, 0, 0.125, 0, 0, 0.25, 0.25]),
        ([3, 0, 4], 1, [1 / 3, 0, 1 / 6, 0, 0, 0.25, 0.25]),
        (torch.tensor([3.0, 5, 4]), 2, [1 / 6, 0, 1 / 12, 0, 0, 1 / 8, 1 / 8]),
    ],
    ids=["own sums", "own sums and U", "mask", "divisor and U", "sizes in a list", "sizes in a tensor"],
)
def test_weights_inside_a_unit(size: Any, num_units: float, expected: list[float]) -> None:
    found = unit_weights(Samples(FRACTIONS).local(0, 1), size, num_units)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=oracle.EXACT)


def test_weights_inside_a_unit_are_cut_and_shared() -> None:
    halves = [unit_weights(Samples([torch.ones(4)], layout=ZigzagTHD([0, 4])).local(r, 2)) for r in range(2)]
    assert torch.cat(halves).tolist() == [0.25] * 4
    assert unit_weights(Samples([torch.ones(4)], layout=Gathered([0, 4])).local(1, 2)).tolist() == [0.125] * 4
    assert unit_weights(Samples([], layout=ZigzagTHD([0, 4], filler_slots=1)).local(0, 2)).tolist() == [0, 0]


def inside(size: Any, num_units: float = 1, masks: Sequence[torch.Tensor] = FRACTIONS) -> torch.Tensor:
    return unit_weights(Samples(masks).local(0, 1), size, num_units)


# --- totals made by hand

MASKS = [torch.ones(4), torch.tensor([1.0, 0.5, 0, 0])]
LOSSES = torch.tensor([1.0, 2, 3, 4, 5, 6, NAN, NAN])


def by_hand(mode: str, totals: StepTotals, **keywords: Any) -> float:
    keywords = {"divisor": divisor_of(mode), **keywords}
    return float(make_pg_loss_reducer(mode, MASKS, totals=totals, **keywords)(LOSSES))


def totals_with(counts: dict[str, Any]) -> StepTotals:
    """From counts by their full names, as error texts give them: step_tokens, rollouts.all, prompts.tokens, ..."""
    fields: dict[str, Any] = {"rollouts": {}, "prompts": {}}
    for name, count in counts.items():
        kind, _, which = name.rpartition(".")
        (fields[kind] if kind else fields)[which] = count
    return StepTotals(**{k: UnitCounts(**v) if isinstance(v, dict) else v for k, v in fields.items()})


SPLIT = {"rollouts.all": 2, "rollouts.tokens": {7: 10, 8: 1.5}}
STRINGS = {"prompts.all": 4, "prompts.tokens": {"a": 8, "b": 5, -5: 1}}
ACTIVE: dict[str, Any] = {"units": "active"}
PAIR = torch.tensor([0, 0])


@pytest.mark.parametrize(
    ("mode", "needed", "keywords", "expected"),
    [
        ("token_mean", {"step_tokens": 20}, {}, 18 / 20),
        ("token_mean", {"step_tokens": 20.5}, ACTIVE, 18 / 20.5),
        ("sample_mean", {"rollouts.all": 5}, {}, (2.5 + 8 / 1.5) / 5),
        ("sample_mean", {"rollouts.active": 3}, ACTIVE, (2.5 + 8 / 1.5) / 3),
        ("sample_mean", SPLIT, {"rollout_ids": [7, 8]}, (10 / 10 + 8 / 1.5) / 2),
        ("prompt_mean", {"prompts.all": 4, "prompts.tokens": {0: 11, 1: 9}}, {"prompt_ids": [0, 0]}, 18 / 11 / 4),
        ("prompt_mean", STRINGS, {"prompt_ids": ["b", "a"]}, (10 / 5 + 8 / 8) / 4),
        ("prompt_mean", {"prompts.active": 2, "prompts.tokens": {0: 11}}, {"prompt_ids": PAIR, **ACTIVE}, 18 / 11 / 2),
        ("constant", {"rollouts.all": 5}, {"divisor": 100}, 18 / 500),
        ("constant", {"rollouts.active": 4}, ACTIVE, 18 / 32),
    ],
)
def test_totals_by_hand(mode: str, needed: dict[str, Any], keywords: dict[str, Any], expected: float) -> None:
    assert by_hand(mode, totals_with(needed), **keywords) == pytest.approx(expected, rel=oracle.sum_error(len(LOSSES)))
    for name in needed:
        rest = {field: value for field, value in needed.items() if field != name}
        with pytest.raises(ValueError, match=f"totals without {name}: loss aggregation '{mode}' needs it"):
            by_hand(mode, totals_with(rest), **keywords)


# --- refusals, each beside its nearest legal neighbour

WITH_ROLLOUTS = StepTotals.from_loss_masks(MASKS, rollout_ids=[0, 0], prompt_ids=[0, 0])
PROMPTS = StepTotals(prompts=UnitCounts(all=2, tokens={0: 8, "a": 6}))
NO_PROMPTS, EMPTY_PROMPT = (StepTotals(prompts=UnitCounts(all=2, tokens=tokens)) for tokens in ({}, {0: 0}))
ONE, TWO = (StepTotals(rollouts=UnitCounts(all=n)) for n in (1, 2))
ZERO, SIX = StepTotals(step_tokens=0), StepTotals(step_tokens=6)
LAID_OUT = ZigzagTHD([0, 4, 8])
ROLLOUTS: dict[str, Any] = {"rollout_ids": [0, 0]}
IDS: dict[str, Any] = {"prompt_ids": [0, 0]}
BOTH: dict[str, Any] = {**ROLLOUTS, **IDS}
UNKNOWN = "has no token count"


def reduced(mode: str, totals: Any, ids: Any = IDS, masks: Any = MASKS, units: Any = None) -> Any:
    return make_pg_loss_reducer(mode, masks, totals=totals, units=units, **{"divisor": divisor_of(mode), **ids})


def masked(mode: str, totals: StepTotals) -> tuple[Any, ...]:
    """A micro-batch without an active token."""
    return mode, totals, IDS, [torch.zeros(4), torch.zeros(4)]


def placed(mode: Any, totals: StepTotals, layout: Any = None, cp_size: int = 1, masks: Any = MASKS) -> torch.Tensor:
    return token_weights(mode, Samples(masks, layout=layout), totals, cp_size=cp_size)


def of_divisor(divisor: Any) -> Any:
    return reduced("constant", TWO, {"divisor": divisor})


def vanishing(divisor: float) -> Any:
    return reduced("constant", StepTotals(rollouts=UnitCounts(all=10**17)), {"divisor": divisor})


def totals_of_ids(count: float) -> StepTotals:
    return StepTotals(rollouts=UnitCounts(all=1, tokens={0: count}))


def active_ones(count: int) -> StepTotals:
    return StepTotals(rollouts=UnitCounts(active=count))


def small(weight: float) -> torch.Tensor:
    return placed("token_mean", StepTotals(step_tokens=1e17), masks=[torch.tensor([weight, 1.0])])


REFUSALS = {
    **refusals(
        inside,
        (([3, 0, 0],), "a unit whose size is 0", ([3, 0, 4],)),
        ((0,), "active tokens in a micro-batch", (0, 1, [torch.zeros(2)])),
        ((None, 0), "active tokens in a micro-batch", (None, 0, [torch.zeros(2)])),
        (([3, 4],), "2 unit sizes for 3 loss masks", ([3, 4, 5],)),
        ((1e46,), "float32 rounds to 0", (1e37,)),
        ((1e46, 1, [torch.ones(2).int()]), "float32 rounds to 0", (1e37, 1, [torch.ones(2).int()])),
    ),
    **refusals(vanishing, ((1e29,), "a token weight that float32 rounds to 0", (1e20,))),
    **refusals(small, ((1e-30,), "a token weight that float32 rounds to 0", (1e-20,))),
    **refusals(
        reduced,
        *(
            (("prompt_mean", PROMPTS, {"prompt_ids": unknown}), f"sample {i} {UNKNOWN}", ("prompt_mean", PROMPTS))
            for i, unknown in ((1, [0, 1]), (1, ["a", "b"]), (0, ["0", "a"]))  # an int id is not its string
        ),
        (("prompt_mean", NO_PROMPTS), UNKNOWN, ("prompt_mean", PROMPTS, {"prompt_ids": [0, "a"]})),
        (("prompt_mean", PROMPTS, {}), "'prompt_mean' without prompt_ids", ("prompt_mean", PROMPTS)),
        *(
            ((mode, WITH_ROLLOUTS), "totals made with rollout_ids, a micro-batch without", (mode, WITH_ROLLOUTS, BOTH))
            for mode in MODES
            if mode != "token_sum"  # which has one unit, whatever the ids
        ),
        *(
            ((mode, WITH_ROLLOUTS, {"rollout_ids": [0, 5]}), f"sample 1 {UNKNOWN}", (mode, WITH_ROLLOUTS, ROLLOUTS))
            for mode in ("constant", "sample_mean")
        ),
        *(
            ((mode, totals, ROLLOUTS), text, (mode, WITH_ROLLOUTS, ROLLOUTS))
            for mode, totals, text in (
                ("sample_mean", totals_of([]), "totals without rollouts.tokens"),
                ("constant", TWO, "a micro-batch with rollout_ids, totals made without"),
            )
        ),
        # --- active tokens in a step that has none
        (("token_mean", ZERO), "step_tokens", masked("token_mean", ZERO)),
        (("sample_mean", StepTotals(rollouts=UnitCounts(all=0))), "rollouts.all", masked("sample_mean", TWO)),
        (("prompt_mean", EMPTY_PROMPT), "unit's tokens", masked("prompt_mean", EMPTY_PROMPT)),
        # --- totals of a part of the step
        (("token_mean", StepTotals(step_tokens=4)), "step_tokens alone are 5.5: the totals say 4", ("token_mean", SIX)),
        (("constant", ONE, {}), "rollouts.all alone are 2", ("constant", TWO, {})),
        (
            ("sample_mean", totals_of_ids(5), ROLLOUTS),
            "a rollout with 5.5 mask tokens in these samples: the totals say it has fewer",
            ("sample_mean", totals_of_ids(5.5), ROLLOUTS),
        ),
        (("sample_mean", active_ones(1), {}, MASKS, "active"), "rollouts.active alone are 2", ("constant", TWO, {})),
        # --- names and settings
        (("dapo", SIX), "'dapo': there is no such mode. Did you mean trl:dapo.*of sample_mean", ("token_mean", SIX)),
        (("token_mean", SIX, IDS, MASKS, "some"), "'some': there is no such unit counting. Choose one of all, active",
         ("sample_mean", active_ones(2), {}, MASKS, "active")),
        *(
            ((mode, WITH_ROLLOUTS, {**BOTH, "divisor": 8}),
             f"divisor 8 with loss aggregation '{mode}': only 'constant' and 'token_sum' have",
             (mode, WITH_ROLLOUTS, BOTH))
            for mode in MODES if not MODES[mode].takes_divisor
        ),
    ),
    **refusals(reduced, (("token_mean", None), "totals is None.*never guessed", ("token_mean", SIX)), error=TypeError),
    **refusals(
        of_divisor,
        ((None,), "'constant' without a divisor", (1,)),
        ((0,), "divisor 0: it must be finite and above 0", (1e-3,)),
        ((-8,), "divisor -8", (8,)),
        ((NAN,), "divisor nan", (8,)),
        ((INF,), "divisor inf", (8,)),
        ((1e30,), "below 1e30", (1e20,)),
    ),
    **refusals(
        of_divisor,
        ((True,), r"divisor True \(bool\)", (1,)),
        (("8",), r"divisor '8' \(str\)", (8,)),
        error=TypeError,
    ),
    **refusals(
        placed,
        (("token_mean", SIX, LAID_OUT, 2), "cp_size=2 without a cp_rank: each rank holds other", ("token_mean", SIX)),
    ),
    **refusals(placed, ((3, SIX), r"loss aggregation 3 \(int\)", ("token_sum", SIX)), error=TypeError),
    **refusals(
        functools.partial(token_weights, "token_sum"),
        ((MASKS, SIX), "samples is a list: it describes the micro-batch's masks", (Samples(MASKS), SIX)),
        error=TypeError,
    ),
}  # fmt: skip
test_refusals = refusal_tests(REFUSALS)
