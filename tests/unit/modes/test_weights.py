"""The weight of a token: what the modes make of the step's totals, and what is refused. `oracle` states it apart."""

import doctest
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import NAN
from placements import Place, Placement, every_layout, laid_out
from refusals import Call, Refusal, check_refusal, each_of
from steps import Step, divisor_of, ids_of, on_both, quicker, steps, totals_of

from megatron_rl_loss import (
    Gathered,
    ModeInputs,
    Samples,
    StepTotals,
    UnitCounts,
    ZigzagTHD,
    make_pg_loss_reducer,
    register_pg_loss_reducer,
    token_weights,
)
from megatron_rl_loss.modes import MODES, unit_weights, weights
from megatron_rl_loss.modes import table as modes

INF = float("inf")


def test_docstring_examples() -> None:
    result = doctest.testmod(weights)
    assert result.attempted > 0
    assert result.failed == 0


# --- against the oracle: every mode x layout x CP size, on random ragged steps, on the host and as on a device


def padded_masks(chosen: Sequence[oracle.Sample], placed: Placement) -> list[torch.Tensor]:
    lengths = placed.mask_lengths or [len(one.mask) for one in chosen]
    return [
        torch.cat([one.mask, one.mask.new_zeros(n - len(one.mask))]) for one, n in zip(chosen, lengths, strict=True)
    ]


@pytest.mark.parametrize(("mode", "units"), oracle.WORKED_VALUES)
def test_the_oracle_and_the_weights_give_what_is_worked_out_by_hand(mode: str, units: Any) -> None:
    """README shows these values."""
    value, divisor = oracle.WORKED_VALUES[mode, units], divisor_of(mode)
    assert float(oracle.step_loss(mode, oracle.WORKED, divisor, units)) == pytest.approx(value, rel=1e-14)
    masks = [one.mask for one in oracle.WORKED]
    samples = Samples(masks, prompt_ids=[one.prompt_id for one in oracle.WORKED])
    totals = StepTotals.from_loss_masks(masks, prompt_ids=[one.prompt_id for one in oracle.WORKED])
    weights = token_weights(mode, samples, totals, divisor=divisor, units=units)
    losses = torch.cat([one.losses for one in oracle.WORKED])
    assert float(weights.double() @ losses.double()) == pytest.approx(value, rel=1e-6)


@every_layout
@quicker
@given(step=steps(), units=st.sampled_from(["all", "active"]))
def test_they_are_the_slopes_of_the_step_loss(step: Step, units: Any, place: Place, cp_size: int) -> None:
    """For every token that a rank holds, 0 in padding; over the ranks, every copy has its part."""
    totals = totals_of(step.samples)
    expected = {mode: oracle.step_gradient(mode, step.samples, divisor_of(mode), units) for mode in oracle.MODES}
    for microbatch in step.microbatches:
        chosen = [step.samples[i] for i in microbatch]
        placed = laid_out(place, tuple(len(one.mask) for one in chosen), cp_size)
        masks, copies = padded_masks(chosen, placed), cp_size if isinstance(placed.layout, Gathered) else 1
        for mode, (cp_rank, held) in itertools.product(oracle.MODES, enumerate(placed.held)):
            slopes = [0.0 if at is None else float(expected[mode][microbatch[at[0]]][at[1]]) / copies for at in held]
            right = torch.tensor(slopes, dtype=torch.float64)

            def weights(mode: str = mode, masks: Any = masks, layout: Any = placed.layout, **cp: int) -> torch.Tensor:
                samples = Samples(masks, layout=layout, **ids_of(chosen))  # noqa: B023
                return token_weights(mode, samples, totals, divisor=divisor_of(mode), units=units, **cp)

            for found in on_both(functools.partial(weights, cp_rank=cp_rank, cp_size=cp_size)):
                assert found.dtype == torch.float32
                torch.testing.assert_close(found.double(), right, rtol=oracle.EXACT, atol=0)


def test_weights_by_counts_of_a_part_would_be_seen() -> None:
    """Negative control: totals of each micro-batch by itself give other weights, in every mode but a plain sum."""
    step, part = oracle.WORKED, oracle.WORKED[2:3]
    for mode in MODES:
        samples = Samples([part[0].mask], **ids_of(part))
        of_part = token_weights(mode, samples, totals_of(part), divisor=divisor_of(mode))
        right = oracle.step_gradient(mode, step, divisor_of(mode))[2]
        assert torch.allclose(of_part.double(), right) == (mode == "token_sum")


def test_a_reducer_has_the_same_ones() -> None:
    step = oracle.WORKED
    masks, ids = [one.mask for one in step], ids_of(step)
    for mode in MODES:
        options = {"divisor": divisor_of(mode), "units": "active"}
        reducer = make_pg_loss_reducer(mode, masks, totals=totals_of(step), **options, **ids)  # type: ignore[arg-type]
        found = token_weights(mode, Samples(masks, **ids), totals_of(step), **options)  # type: ignore[arg-type]
        assert torch.equal(reducer.weights, found)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
    torch.float16, torch.bfloat16,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_those_of_numpy_whatever_the_masks_are_made_of(dtype: torch.dtype) -> None:
    """Bit by bit: a mode's float64 weight of each sample rounded once, times the mask."""
    generator = np.random.default_rng(3)
    lengths = [0, 5, 1, 0, 40, 7, 300]
    flags = [generator.integers(0, 2, n) for n in lengths]
    masks = [torch.from_numpy(one).to(dtype) for one in flags]
    beside = generator.random(len(lengths))
    found = token_weights(lambda inputs: torch.from_numpy(beside), Samples(masks), StepTotals())
    expected = np.repeat(beside.astype(np.float32), lengths) * np.concatenate(flags).astype(np.float32)
    assert np.array_equal(found.numpy(), expected)


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


def inside(size: Any, num_units: float = 1, masks: Sequence[torch.Tensor] = FRACTIONS) -> Call:
    return lambda: unit_weights(Samples(masks).local(0, 1), size, num_units)


# --- modes of one's own: weights beside the mask


MASK = [torch.tensor([1.0, 0, 0.5]), torch.tensor([1.0, 1])]


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (2, [2, 0, 1, 2, 2]),
        (0.5, [0.5, 0, 0.25, 0.5, 0.5]),
        (np.float32(0.5), [0.5, 0, 0.25, 0.5, 0.5]),
        (torch.tensor(2.0), [2, 0, 1, 2, 2]),
        (torch.tensor([2.0, 3.0]), [2, 0, 1, 3, 3]),
        (torch.tensor([2.0, 3.0], dtype=torch.float64), [2, 0, 1, 3, 3]),
        ([torch.tensor([4.0, 5, 6]), torch.tensor([7.0, 8])], [4, 0, 3, 7, 8]),
        ((torch.tensor([4, 5, 6]), torch.tensor([True, False])), [4, 0, 3, 1, 0]),
        ([torch.tensor([1.0, -2, -2]), torch.tensor([0.0, -1])], [1, 0, -1, 0, -1]),
    ],
    ids=["int", "float", "NumPy float", "0-dim", "a sample", "float64", "a token", "ints and bools", "of any sign"],
)
def test_a_mode_of_ones_own_returns_them(beside: Any, expected: list[float]) -> None:
    assert token_weights(lambda inputs: beside, Samples(MASK), StepTotals()).tolist() == expected


@every_layout
def test_they_are_cut_for_the_rank_and_shared_by_copies(place: Place, cp_size: int) -> None:
    """A weight of its own for every token: its sample times 100, plus its position, plus 1."""
    lengths = (3, 1, 8)
    placed = laid_out(place, lengths, cp_size)
    masks = [torch.ones(n) for n in placed.mask_lengths or lengths]
    samples = Samples(masks, layout=placed.layout)

    def numbered(inputs: ModeInputs) -> list[torch.Tensor]:
        return [100.0 * i + torch.arange(len(mask)) + 1 for i, mask in enumerate(inputs.samples.loss_masks)]

    copies = cp_size if isinstance(placed.layout, Gathered) else 1
    for cp_rank, held in enumerate(placed.held):
        found = token_weights(numbered, samples, StepTotals(), cp_rank=cp_rank, cp_size=cp_size)
        known = [(w * copies, at) for w, at in zip(found.tolist(), held, strict=True) if at is not None]
        expected = [100 * at[0] + at[1] + 1 for _, at in known]
        assert [w for w, _ in known] == pytest.approx(expected, rel=oracle.EXACT)


def test_no_gradient_goes_to_them() -> None:
    beside = torch.tensor([1.0, -2.0], requires_grad=True)
    losses = torch.ones(5, requires_grad=True)
    make_pg_loss_reducer(lambda inputs: beside, MASK, totals=StepTotals())(losses).backward()
    assert beside.grad is None
    assert losses.grad is not None
    assert losses.grad.tolist() == [1, 0, 0.5, -2, -2]


def test_what_is_masked_is_ignored_whatever_its_weight() -> None:
    losses = torch.tensor([1.0, NAN, 4, INF, 2])
    with_nan = make_pg_loss_reducer(
        lambda inputs: [torch.tensor([1.0, 7, 1]), torch.tensor([0.0, 1])], MASK, totals=StepTotals()
    )
    assert float(with_nan(losses)) == 1 + 2 + 2


# --- totals made by hand

MASKS = [torch.ones(4), torch.tensor([1.0, 0.5, 0, 0])]
LOSSES = torch.tensor([1.0, 2, 3, 4, 5, 6, NAN, NAN])


def by_hand(mode: str, totals: StepTotals, **keywords: Any) -> float:
    keywords = {"divisor": divisor_of(mode), **keywords}
    return float(make_pg_loss_reducer(mode, MASKS, totals=totals, **keywords)(LOSSES))


def totals_with(counts: dict[str, Any]) -> StepTotals:
    """From counts by their full names, as error texts give them: step_tokens, rollouts.all, prompts.tokens, ..."""
    fields: dict[str, Any] = {}
    for name, count in counts.items():
        kind, _, which = name.partition(".")
        if which:
            fields.setdefault(kind, {})[which] = count
        else:
            fields[kind] = count
    return StepTotals(**{k: UnitCounts(**v) if isinstance(v, dict) else v for k, v in fields.items()})


@pytest.mark.parametrize(
    ("mode", "needed", "keywords", "expected"),
    [
        pytest.param("token_mean", {"step_tokens": 20}, {}, 18 / 20, id="token_mean"),
        pytest.param("token_mean", {"step_tokens": 20.5}, {"units": "active"}, 18 / 20.5, id="token_mean active"),
        pytest.param("sample_mean", {"rollouts.all": 5}, {}, (2.5 + 8 / 1.5) / 5, id="sample_mean"),
        pytest.param(
            "sample_mean", {"rollouts.active": 3}, {"units": "active"}, (2.5 + 8 / 1.5) / 3, id="sample_mean active"
        ),
        pytest.param(
            "sample_mean",
            {"rollouts.all": 2, "rollouts.tokens": {7: 10, 8: 1.5}},
            {"rollout_ids": [7, 8]},
            (10 / 10 + 8 / 1.5) / 2,
            id="sample_mean, split rollouts",
        ),
        pytest.param(
            "prompt_mean",
            {"prompts.all": 4, "prompts.tokens": {0: 11, 1: 9}},
            {"prompt_ids": [0, 0]},
            18 / 11 / 4,
            id="prompt_mean, int ids",
        ),
        pytest.param(
            "prompt_mean",
            {"prompts.all": 4, "prompts.tokens": {"a": 8, "b": 5, -5: 1}},
            {"prompt_ids": ["b", "a"]},
            (10 / 5 + 8 / 8) / 4,
            id="prompt_mean, string ids",
        ),
        pytest.param(
            "prompt_mean",
            {"prompts.active": 2, "prompts.tokens": {0: 11}},
            {"prompt_ids": torch.tensor([0, 0]), "units": "active"},
            18 / 11 / 2,
            id="prompt_mean active",
        ),
        pytest.param("constant", {"rollouts.all": 5}, {"divisor": 100}, 18 / 500, id="constant"),
        pytest.param("constant", {"rollouts.active": 4}, {"units": "active"}, 18 / 32, id="constant active"),
    ],
)
def test_totals_by_hand(mode: str, needed: dict[str, Any], keywords: dict[str, Any], expected: float) -> None:
    assert by_hand(mode, totals_with(needed), **keywords) == pytest.approx(expected, rel=oracle.sum_error(len(LOSSES)))
    for name in needed:
        rest = {field: value for field, value in needed.items() if field != name}
        with pytest.raises(ValueError, match=f"totals without {name}: loss aggregation '{mode}' needs it"):
            by_hand(mode, totals_with(rest), **keywords)


WITH_ROLLOUTS = StepTotals.from_loss_masks(MASKS, rollout_ids=[0, 0], prompt_ids=[0, 0])
PROMPTS = StepTotals(prompts=UnitCounts(all=2, tokens={0: 8, "a": 6}))


def masked(mode: str, totals: StepTotals) -> Call:
    """A micro-batch without an active token."""
    return lambda: make_pg_loss_reducer(mode, [torch.zeros(2)], totals=totals, prompt_ids=[0])(torch.ones(2))


def own(beside: Any) -> Call:
    return lambda: token_weights(lambda inputs: beside, Samples([torch.ones(3), torch.ones(2)]), StepTotals())


REFUSALS: dict[str, Refusal] = {
    "a unit's size of 0": (inside([3, 0, 0]), ValueError, "a unit whose size is 0", inside([3, 0, 4])),
    "a size of 0": (inside(0), ValueError, "active tokens in a micro-batch", inside(0, 1, [torch.zeros(2)])),
    "no units": (inside(None, 0), ValueError, "active tokens in a micro-batch", inside(None, 0, [torch.zeros(2)])),
    "sizes of another number": (inside([3, 4]), ValueError, "2 unit sizes for 3 loss masks", inside([3, 4, 5])),
    "a size beyond float32": (inside(1e46), ValueError, "float32 rounds to 0", inside(1e37)),
    "unknown int id": (
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, 1]),
        ValueError,
        "prompt_ids of sample 1 has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, "a"]),
    ),
    "unknown string id": (
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=["a", "b"]),
        ValueError,
        "has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=["a", "a"]),
    ),
    "an int id is not its string": (
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=["0", "a"]),
        ValueError,
        "has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, "a"]),
    ),
    "unknown id among none": (
        lambda: by_hand("prompt_mean", StepTotals(prompts=UnitCounts(all=2, tokens={})), prompt_ids=[0, 0]),
        ValueError,
        "has no token count",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, 0]),
    ),
    **{
        f"rollout ids in the totals only, {mode}": (
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, prompt_ids=[0, 0]),
            ValueError,
            "totals made with rollout_ids, a micro-batch without",
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, prompt_ids=[0, 0], rollout_ids=[0, 0]),
        )
        for mode in MODES
        if mode != "token_sum"  # it has one unit, whatever the ids
    },
    **{
        f"active tokens in a step of no {mode} unit": (
            lambda mode=mode, totals=totals: by_hand(mode, totals, prompt_ids=[0, 0]),
            ValueError,
            field,
            masked(mode, neighbour),
        )
        for mode, field, totals, neighbour in [
            ("token_mean", "step_tokens", StepTotals(step_tokens=0), StepTotals(step_tokens=0)),
            ("sample_mean", "rollouts.all", *(StepTotals(rollouts=UnitCounts(all=n)) for n in (0, 1))),
            ("prompt_mean", "unit's tokens", *[StepTotals(prompts=UnitCounts(all=1, tokens={0: 0}))] * 2),
        ]
    },
    "rollout ids in the micro-batch only": (
        lambda: by_hand("sample_mean", totals_of([]), rollout_ids=[0, 0]),
        ValueError,
        "totals without rollouts.tokens",
        lambda: by_hand("sample_mean", WITH_ROLLOUTS, rollout_ids=[0, 0]),
    ),
    **{
        f"a rollout that is not in the totals, {mode}": (
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, rollout_ids=[0, 5], prompt_ids=[0, 0]),
            ValueError,
            "rollout_ids of sample 1 has no token count",
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, rollout_ids=[0, 0], prompt_ids=[0, 0]),
        )
        for mode in ("constant", "sample_mean")
    },
    "prompt_mean without prompt ids": (
        lambda: by_hand("prompt_mean", PROMPTS),
        ValueError,
        "'prompt_mean' without prompt_ids",
        lambda: by_hand("prompt_mean", PROMPTS, prompt_ids=[0, 0]),
    ),
    "unknown mode": (
        lambda: by_hand("dapo", WITH_ROLLOUTS),
        ValueError,
        "'dapo': there is no such mode. Did you mean trl:dapo\\? Choose one of sample_mean, prompt_mean, token_mean",
        lambda: by_hand("token_mean", StepTotals(step_tokens=6)),
    ),
    "unknown counting": (
        lambda: by_hand("token_mean", StepTotals(step_tokens=6), units="some"),
        ValueError,
        "'some': there is no such unit counting. Choose one of all, active",
        lambda: by_hand("token_mean", StepTotals(step_tokens=6), units="active"),
    ),
    "constant without a divisor": (
        lambda: by_hand("constant", StepTotals(rollouts=UnitCounts(all=2)), divisor=None),
        ValueError,
        "'constant' without a divisor",
        lambda: by_hand("constant", StepTotals(rollouts=UnitCounts(all=2)), divisor=1),
    ),
    **{
        f"divisor {value!r}": (
            lambda value=value: by_hand("constant", StepTotals(rollouts=UnitCounts(all=2)), divisor=value),
            error,
            fragment,
            lambda: by_hand("constant", StepTotals(rollouts=UnitCounts(all=2)), divisor=1e-3),
        )
        for value, error, fragment in [
            (0, ValueError, "divisor 0: it must be finite and above 0"),
            (-8, ValueError, "divisor -8"),
            (NAN, ValueError, "divisor nan"),
            (INF, ValueError, "divisor inf"),
            (1e30, ValueError, "below 1e30"),
            (True, TypeError, r"divisor True \(bool\)"),
            ("8", TypeError, r"divisor '8' \(str\)"),
        ]
    },
    **{
        f"divisor with {mode}": (
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, divisor=8, rollout_ids=[0, 0], prompt_ids=[0, 0]),
            ValueError,
            f"divisor 8 with loss aggregation '{mode}': only 'constant' and 'token_sum' have",
            lambda mode=mode: by_hand(mode, WITH_ROLLOUTS, rollout_ids=[0, 0], prompt_ids=[0, 0]),
        )
        for mode in MODES
        if not MODES[mode].takes_divisor
    },
    "another divisor than a number or none": (
        lambda: make_pg_loss_reducer("mine", [torch.ones(1)], totals=StepTotals(), divisor=0),
        ValueError,
        "divisor 0: it must be finite and above 0",
        lambda: make_pg_loss_reducer("mine", [torch.ones(1)], totals=StepTotals(), divisor=1),
    ),
    "neither a name nor a function": (
        lambda: token_weights(3, Samples(MASKS), StepTotals()),  # type: ignore[arg-type]
        TypeError,
        r"loss aggregation 3 \(int\)",
        lambda: token_weights("token_sum", Samples(MASKS), StepTotals()),
    ),
    "rollout ids in the micro-batch only, constant": (
        lambda: by_hand("constant", StepTotals(rollouts=UnitCounts(all=2)), rollout_ids=[0, 0]),
        ValueError,
        "a micro-batch with rollout_ids, totals made without",
        lambda: by_hand("constant", WITH_ROLLOUTS, rollout_ids=[0, 0]),
    ),
    "CP without a layout": (
        lambda: token_weights("token_sum", Samples(MASKS), StepTotals(), cp_rank=0, cp_size=2),
        ValueError,
        "cp_size is 2 and no layout was given.*Pass one of megatron_rl_loss's layouts",
        lambda: token_weights(
            "token_sum", Samples(MASKS, layout=ZigzagTHD([0, 4, 8])), StepTotals(), cp_rank=0, cp_size=2
        ),
    ),
    "own weights of other lengths": (
        own([torch.ones(2), torch.ones(3)]),
        ValueError,
        r"lengths \[2, 3\].*\[3, 2\].*Return one weight per mask entry",
        own([torch.ones(3), torch.ones(2)]),
    ),
    "own weights missing": (
        own([torch.ones(5)]),
        ValueError,
        r"lengths \[5\]",
        own([torch.ones(3).bool(), torch.ones(2).int()]),
    ),
    "own weights of no sample": (own([]), ValueError, r"lengths \[\]", own([torch.zeros(3), torch.zeros(2)])),
    "own weights of another number": (own(torch.ones(5)), TypeError, r"returned \(5,\)", own(torch.ones(2))),
    "own weights 2-D": (own(torch.ones(1, 5)), TypeError, r"returned \(1, 5\)", own(torch.tensor(1.0))),
    "own weights in lists": (own([[1.0] * 3, [1.0] * 2]), TypeError, "a number, a tensor of 2", own(torch.ones(2))),
    "own weights forgotten": (own(None), TypeError, r"returned None \(NoneType\)", own(0)),
    "own weights a bool": (own(True), TypeError, r"returned True \(bool\)", own(1)),
    "own weights a reducer": (own(torch.sum), TypeError, "must return weights beside the mask", own(1.0)),
    "own weights NaN": (own(NAN), ValueError, "token weights with NaN or Inf", own(0.0)),
    "own weights infinite": (
        own([torch.ones(3), torch.tensor([1.0, INF])]),
        ValueError,
        "token weights with NaN or Inf.*Use 0 to leave tokens out",
        own([torch.ones(3), torch.tensor([1.0, 0.0])]),
    ),
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of its own, with one mode."""
    monkeypatch.setattr(modes, "_REGISTERED", {})
    register_pg_loss_reducer("mine")(lambda inputs: 1)


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
