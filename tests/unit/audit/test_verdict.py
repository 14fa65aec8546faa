"""`judge`: sound weights are called sound in every mode and layout; weight in the wrong places is told; the report.

Weights that should be are the float64 oracle's; wrong ones are formulas in counts (`counted_steps`).
"""

import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from counted_steps import Array, Counted, Formula, Row, Step, measured, ragged
from judging import ASKED, asked, each_seed, first_of, judged, right_weights, seeds, sound_step
from published import exact, own_mean

from megatron_rl_loss.audit import MeasuredStep, Split, StepTokens, judge

# ---- no false alarm

SPLITS = [(2, 2, 2), (1, 1, 1), (3, 2, 5), (1, 4, 2), (4, 1, 1)]


@pytest.mark.parametrize(("mode", "units"), ASKED)
@pytest.mark.parametrize(
    "split", [SPLITS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in SPLITS[1:])], ids=str
)
def test_sound_code_is_called_sound(mode: str, units: str, split: tuple[int, int, int]) -> None:
    D, C, K = split
    kinds = itertools.product([False, True], [False, True], [False, True])
    for seed, (split_rollouts, fractional, responses) in enumerate(kinds):
        step = ragged(seed, D=D, C=C, K=K, split_rollouts=split_rollouts, fractional=fractional, responses=responses)
        verdict = judge(sound_step(step, mode, units, seed=seed), asked(mode, units))
        assert verdict.sound, str(verdict)
        assert verdict.deviations == verdict.readings == ()
        assert verdict.misplaced < 1e-5
        if Counted(step).T:  # else there is no ratio
            assert (verdict.low, verdict.high) == pytest.approx((1, 1), abs=1e-5)
        assert str(verdict).startswith(f"SOUND: {mode}")


def test_one_token_off_by_more_than_roundings_is_not_sound() -> None:
    """Negative control: it need not be many."""
    right = sound_step(ragged(3), "token_mean")
    for at in np.flatnonzero(right.weights)[::40]:
        weights = right.weights.copy()
        weights[at] *= 1.0001
        verdict = judge(replace(right, weights=weights), asked("token_mean"))
        assert not verdict.sound
        assert verdict.deviation == pytest.approx(1e-4, abs=17 * oracle.ROUNDING)


@pytest.mark.parametrize("rounding", ["float16", "bfloat16"])
def test_half_precision_gradients_are_allowed_their_roundings(rounding: str) -> None:
    weights = torch.from_numpy(right_weights(ragged(3), "sample_mean")).to(getattr(torch, rounding)).double().numpy()
    rounded = measured(ragged(3), weights)
    assert not judge(rounded, asked("sample_mean")).sound
    assert judge(replace(rounded, facts={"rounding": rounding}), asked("sample_mean")).sound
    twice = replace(rounded, weights=weights * 2, facts={"rounding": rounding})
    assert judge(twice, asked("sample_mean")).readings[0].formula == "CP"


def test_a_step_without_an_active_token_is_sound_if_nothing_is_trained() -> None:
    step = ragged(3, masked=1.1)
    assert judged(step, lambda t: 0 * t.m).sound
    verdict = judged(step, lambda t: 0 * t.m + 0.1)
    assert [one.name for one in verdict.deviations] == ["masked_samples_trained"]


# ---- weight in the wrong places


def later(t: Counted) -> Array:
    """Every weight one token later in its sample."""
    moved = np.roll(exact(t), 1)
    moved[t.t == 0] = 0
    return moved


def earlier_in_buffer(t: Counted) -> Array:
    """Every weight one token earlier in its micro-batch, around the end."""
    moved = exact(t)
    for d, k in {*zip(t.d.tolist(), t.k.tolist(), strict=True)}:
        here = (t.d == d) & (t.k == k)
        moved[here] = np.roll(moved[here], -1)
    return moved


PROMPTS: dict[str, Any] = {"responses": True, "masked": 0.0}
DEVIATIONS: dict[str, tuple[Formula, dict[str, Any], str, str]] = {
    # name: (weights, options of the step, the deviation's name, the constant that is left)
    "a CP rank is lost": (lambda t: exact(t) * (t.c == 0), {}, "missing", ""),
    "only the last micro-batch": (lambda t: exact(t) * (t.k == t.K - 1), {"masked": 0.0}, "missing", ""),
    "nothing": (lambda t: 0 * t.m, {}, "missing", ""),
    "the prompt too": (lambda t: 0 * t.m + 1 / t.T, PROMPTS, "prompt_trained", ""),
    "the prompt too, by micro-batch": (lambda t: (0 * t.m + 1) / t.n / (t.D * t.K), PROMPTS, "prompt_trained", ""),
    "some masked tokens too": (lambda t: np.maximum(t.m, t.t == 3) / t.T, {"masked": 0.0}, "masked_trained", ""),
    "one token later": (lambda t: later(t) * t.C, {"responses": True}, "shift", "CP"),
    "one token earlier in the buffer": (earlier_in_buffer, {}, "shift", ""),
    "some tokens twice": (lambda t: exact(t) * (1 + (t.t == 3)), {}, "odd_tokens", ""),
    "some tokens twice, and / K": (lambda t: exact(t) * (1 + (t.t == 3)) / t.K, {}, "odd_tokens", "1/K"),
    "the mask multiplied twice": (lambda t: t.m**2 / t.T, {"fractional": True}, "mask_squared", ""),
    "fractions ignored": (lambda t: (t.m > 0) / t.T, {"fractional": True}, "fraction_ignored", ""),
    "the sign turned": (lambda t: -exact(t), {}, "sign", ""),
    "the sign of a rank turned": (lambda t: exact(t) * np.where(t.d == 1, -1, 1), {}, "sign", ""),
    "NaN somewhere": (lambda t: np.where(t.t == 3, np.nan, exact(t)), {}, "nan", ""),
    "NaN where no token is active": (lambda t: np.where(t.M == 0, np.nan, exact(t)), {"masked": 0.3}, "nan_empty", ""),
    "NaN everywhere": (lambda t: np.nan * t.m, {"masked": 0.0, "samples": (3,), "C": 1}, "nan_masked", ""),
    "every token": (lambda t: 0 * t.m + 1 / t.T, {"masked": 0.3}, "mask_ignored", ""),
    "three tokens later": (lambda t: np.roll(exact(t), 3), {"masked": 0.0}, "misaligned", ""),
}  # fmt: skip
#: Facts by themselves. What the others could come of is no fact, and must read so.
PLAIN = {"missing", "prompt_trained", "masked_trained", "odd_tokens", "sign", "nan", "stray"}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_weight_in_the_wrong_places_is_told_as_a_fact(name: str) -> None:
    formula, options, kind, constant = DEVIATIONS[name]
    step = ragged(3, **options)
    verdict = judged(step, formula)
    assert [one.name for one in verdict.deviations] == [kind], str(verdict)
    assert kind in PLAIN or re.search(r"\bas (if|of)\b", verdict.deviations[0].text), str(verdict)
    assert [reading.formula for reading in verdict.readings[:1] if not reading.counts] == [constant] * bool(constant)
    if kind == "missing" and name != "nothing":
        places = {place for place, factor in verdict.deviations[0].factors if factor == 0}
        assert places == ({"CP 1"} if "CP" in name else {f"micro-batch {k} of each DP rank" for k in range(4)})


@each_seed
@pytest.mark.parametrize("formula", [exact, own_mean], ids=["", "own_mean"])
def test_a_turned_sign_and_an_odd_token_are_taken_off_whatever_else_is_wrong(formula: Formula, seed: int) -> None:
    """They are neither a factor for each token nor a chain of causes."""
    step = ragged(seed, masked=0.0)
    t = step.counted
    at = int(np.flatnonzero(t.m)[20])
    for name, factors, place in (
        ("sign", np.where(t.d == 1, -1, 1), ("DP 1", -1)),
        ("odd_tokens", np.where(np.arange(len(t.m)) == at, 100, 1), (f"sample {t.i[at]}, token {t.t[at]}", 100)),
    ):
        verdict = judged(step, factors * formula(t))
        (deviation,) = verdict.deviations
        assert deviation.name == name
        assert dict(deviation.factors) == pytest.approx(dict([place]), rel=1e-5)
        assert ["micro-batch" in reading.text for reading in verdict.readings[:1]] == [True] * (formula is own_mean)


def test_weight_on_padding_is_told() -> None:
    right = sound_step(ragged(3), "token_mean")
    verdict = judge(replace(right, stray=(3, 0.25)), asked("token_mean"))
    assert [one.name for one in verdict.deviations] == ["stray"]
    assert verdict.misplaced == pytest.approx(0.2, rel=1e-3)
    assert "3 places, 20.0 % of all weight" in str(verdict)


def test_weights_that_all_differ_have_no_reading_and_no_odd_tokens() -> None:
    verdict = judged(ragged(1), lambda t: exact(t) * (1 + np.sin(np.arange(len(t.m))) / 3))
    assert (verdict.shape, verdict.deviations, verdict.readings) == ("token", (), ())
    assert "No reading fits" in str(verdict)


# ---- the report


def test_no_verdict_where_it_cannot_be_known() -> None:
    right = sound_step(ragged(3), "token_mean")
    verdict = judge(replace(right, unknown=("ranks are scaled apart: residual 0.49",)), asked("token_mean"))
    assert (verdict.sound, verdict.deviations, verdict.readings) == (False, (), ())
    assert str(verdict) == "NO VERDICT: ranks are scaled apart: residual 0.49"
    assert json.loads(verdict.to_json())["deviation"] is None


def test_the_report_is_plain_data_too() -> None:
    """`tests/package/test_pages.py` compares its text."""
    data = json.loads(judged(ragged(3, masked=0.0), lambda t: own_mean(t) * t.C).to_json())
    assert data["sound"] is False
    assert data["readings"][0]["constant"] == [["CP", 1]]
    assert {row["microbatch"] for row in data["pieces"]} == set(range(5))
    assert len(str(judge(sound_step(ragged(3), "token_mean"), asked("token_mean"))).splitlines()) == 1


def test_a_measured_step_comes_back_from_json() -> None:
    step = measured(ragged(3, fractional=True), exact, rounding="float32")
    back = MeasuredStep.from_json(replace(step, weights=np.where(step.weights == 0, np.nan, step.weights)).to_json())
    assert (back.split, back.facts, back.stray) == (step.split, step.facts, step.stray)
    np.testing.assert_array_equal(np.nan_to_num(back.weights), step.weights)
    for name in vars(step.tokens):
        np.testing.assert_array_equal(getattr(back.tokens, name), getattr(step.tokens, name))


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "shortest", "longest"), [(512, 100, 300), (50_000, 2, 3)])
def test_a_large_step_is_judged_at_once(samples: int, shortest: int, longest: int) -> None:
    """100 thousand tokens: a second or two on one core, with room for a machine that is busy otherwise."""
    lengths = np.random.default_rng(0).integers(shortest, longest, samples)
    sample = np.repeat(np.arange(samples), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    mask = (np.random.default_rng(1).random(len(sample)) < 0.7).astype(float)
    piece = sample * 64 // samples
    tokens = StepTokens(
        mask=mask, sample=sample, position=position, dp_rank=piece // 16, microbatch=piece % 16, cp_rank=position % 2,
        rollout=sample, prompt=sample // 5,
    )  # fmt: skip
    own = np.bincount(piece, weights=mask)[piece]
    step = MeasuredStep(tokens=tokens, weights=mask / own, split=Split(num_microbatches=16, dp_size=4, cp_size=2))
    for mode in ("token_mean", "prompt_mean", None):
        begin = time.process_time()
        verdict = judge(step, None if mode is None else asked(mode))
        assert time.process_time() - begin < 10
        assert "the tokens of the micro-batch, not of the step" in first_of(verdict)


# ---- whatever the weights


def spoilt(weights: Array, tokens: StepTokens, rng: random.Random) -> Array:
    """Weights with something done to them that no loss function would."""
    noise = np.random.default_rng(rng.randrange(2**32))
    if not len(weights):
        return weights
    changes: list[Callable[[], Array]] = [
        lambda: weights,
        lambda: weights * noise.choice([0, 1, 2], len(weights)),
        lambda: -weights,
        lambda: np.where(noise.random(len(weights)) < 0.1, np.nan, weights),
        lambda: np.roll(weights, rng.choice([1, -1, 3])),
        lambda: weights * noise.random(int(tokens.sample.max()) + 1)[tokens.sample],
        lambda: weights + 0.01 * (noise.random(len(weights)) < 0.2),
        lambda: weights * np.array([1, 0, 3.0])[tokens.dp_rank],
        lambda: weights * np.array([1, -2, 3.0])[tokens.dp_rank],
        lambda: weights * (1 + tokens.microbatch),
        lambda: weights * 1e-30,
        lambda: weights * noise.standard_normal(len(weights)),
    ]
    return rng.choice(changes)()


@seeds(0, slow=range(1, 5))
def test_anything_has_a_verdict(seed: int) -> None:
    """No weights raise or warn (warnings are errors here), and what is not sound has numbers or a deviation."""
    for draw in range(40):
        rng = random.Random(f"spoilt/{seed}/{draw}")
        step = ragged(
            draw, D=rng.choice([1, 2, 3]), C=rng.choice([1, 2]), K=rng.choice([1, 2, 3]),
            samples=rng.choice([(1,), (1, 2), (0, 2)]), split_rollouts=rng.random() < 0.3,
            fractional=rng.random() < 0.3, masked=rng.choice([0.0, 0.2, 0.8]), responses=rng.random() < 0.4,
            longest=rng.choice([8, 20]),
        )  # fmt: skip
        mode, units = rng.choice(ASKED)
        found = measured(step, right_weights(step, mode, units))
        if rng.random() < 0.2:  # every CP rank holds every token
            found = replace(found, tokens=replace(found.tokens, cp_rank=np.full(len(found.tokens), -1)))
        for _ in range(rng.randrange(4)):
            found = replace(found, weights=spoilt(found.weights, found.tokens, rng))
        verdict = judge(found, None if rng.random() < 0.2 else asked(mode, units))
        assert str(verdict)
        json.loads(verdict.to_json())
        assert verdict.sound != bool(verdict.deviations or verdict.factors)
        assert math.isnan(verdict.misplaced) or 0 <= verdict.misplaced <= 1


def test_samples_without_entries_are_told() -> None:
    right = sound_step(ragged(3), "token_mean")
    after = right.tokens.sample + (right.tokens.sample > 3)
    verdict = judge(replace(right, tokens=replace(right.tokens, sample=after, total_lengths=None)), asked("token_mean"))
    assert verdict.sound
    assert "1 samples have no mask entry" in verdict.notes[0]


def test_one_row_is_one_row() -> None:
    """The smallest step there is."""
    step = Step([[[Row((1.0, 1.0))]]])
    assert judged(step, exact).sound
    assert first_of(judged(step, lambda t: t.m))
