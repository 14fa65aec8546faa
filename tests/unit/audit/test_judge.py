"""`judge`: sound weights are called sound, weight in the wrong places is told, what fits the rest is said in words.

Weights that should be are the float64 oracle's; wrong ones are formulas in counts (`counted_steps`).
"""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from counted_steps import Array, Counted, Formula, Row, Step, measured, ragged
from published import exact, mean_of_rows, own_mean, own_piece
from torch import Tensor

from megatron_rl_loss import Mode, ModeInputs, Samples, Sum
from megatron_rl_loss.audit.tokens import MeasuredStep, StepTokens
from megatron_rl_loss.audit.verdict import Verdict, judge
from megatron_rl_loss.modes.names import resolve

DIVISORS = {"constant": 64.0, "token_sum": 32.0}


def asked(mode: str, units: Any = "all") -> Any:
    return resolve(mode, units=units, divisor=DIVISORS.get(mode))


def right_weights(step: Step, mode: str, units: str = "all") -> Array:
    samples = [oracle.sample([0.0] * len(r.mask), r.mask, r.rollout, r.prompt) for r in step.counted.samples]
    gradients = oracle.step_gradient(mode, samples, DIVISORS.get(mode), units)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *gradients]).numpy()


def sound_step(step: Step, mode: str, units: str = "all", seed: int = 0) -> MeasuredStep:
    """The oracle's weights, off by at most 16 roundings of float32."""
    weights = right_weights(step, mode, units)
    noise = np.random.default_rng(seed).uniform(-1, 1, len(weights)) * 16 * oracle.ROUNDING
    return replace(measured(step, weights), weights=weights * (1 + noise))


def judged(step: Step, weights: Array | Formula, mode: str = "token_mean") -> Verdict:
    return judge(measured(step, weights), asked(mode))


# ---- sound or not, whatever the weights


def spoilt(weights: Array, tokens: StepTokens, rng: random.Random) -> Array:
    """Weights with something done to them that no loss function would."""
    noise = np.random.default_rng(rng.randrange(2**32))
    if not len(weights):
        return weights
    changes: list[Callable[[], Array]] = [
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


@pytest.mark.parametrize(("mode", "units"), oracle.COUNTINGS)
def test_sound_code_is_called_sound_and_anything_has_a_verdict(mode: str, units: str) -> None:
    """No weights raise or warn (warnings are errors here), and what is not sound has numbers or a deviation."""
    for draw in range(8):
        rng = random.Random(f"{mode}/{units}/{draw}")
        step = ragged(
            draw, D=rng.choice([1, 2, 3]), C=rng.choice([1, 2, 4]), K=rng.choice([1, 2, 3]),
            samples=rng.choice([(1,), (1, 2), (0, 2)]), split_rollouts=rng.random() < 0.4,
            fractional=rng.random() < 0.4, masked=rng.choice([0.0, 0.2, 0.8]), responses=rng.random() < 0.4,
            longest=rng.choice([8, 20]),
        )  # fmt: skip
        found = sound_step(step, mode, units, seed=draw)
        if rng.random() < 0.2:  # every CP rank holds every token
            found = replace(found, tokens=replace(found.tokens, cp_rank=np.full(len(found.tokens), -1)))
        verdict = judge(found, asked(mode, units))
        assert verdict.sound, str(verdict)
        assert verdict.deviations == verdict.readings == ()
        assert verdict.misplaced < 1e-5
        if step.counted.T:  # else there is no ratio
            assert (verdict.low, verdict.high) == pytest.approx((1, 1), abs=1e-5)
        assert str(verdict).startswith(f"SOUND: {mode}")
        for _ in range(rng.randrange(1, 4)):
            found = replace(found, weights=spoilt(found.weights, found.tokens, rng))
        verdict = judge(found, None if rng.random() < 0.2 else asked(mode, units))
        assert str(verdict)
        json.loads(verdict.to_json())
        assert verdict.sound != bool(verdict.deviations or verdict.factors)
        assert math.isnan(verdict.misplaced) or 0 <= verdict.misplaced <= 1


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


def test_the_smallest_step_and_one_without_an_active_token() -> None:
    one = Step([[[Row((1.0, 1.0))]]])
    assert judged(one, exact).sound
    assert judged(one, lambda t: t.m).readings
    nothing = ragged(3, masked=1.1)
    assert judged(nothing, lambda t: 0 * t.m).sound
    assert [one.name for one in judged(nothing, lambda t: 0 * t.m + 0.1).deviations] == ["masked_samples_trained"]


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
PLAIN = {"missing", "prompt_trained", "masked_trained", "odd_tokens", "sign", "nan"}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_weight_in_the_wrong_places_is_told_as_a_fact(name: str) -> None:
    formula, options, kind, constant = DEVIATIONS[name]
    verdict = judged(ragged(3, **options), formula)
    assert [one.name for one in verdict.deviations] == [kind], str(verdict)
    assert kind in PLAIN or re.search(r"\bas (if|of)\b", verdict.deviations[0].text), str(verdict)
    assert [reading.formula for reading in verdict.readings[:1] if not reading.counts] == [constant] * bool(constant)
    if kind == "missing" and name != "nothing":
        places = {place for place, factor in verdict.deviations[0].factors if factor == 0}
        assert places == ({"CP 1"} if "CP" in name else {f"micro-batch {k} of each DP rank" for k in range(4)})


@pytest.mark.parametrize("seed", range(1, 4))
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


# ---- readings: places before chains of counts


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("size", ["", "C"])
def test_one_rank_apart_is_said_before_anything_else(seed: int, size: str) -> None:
    verdict = judged(ragged(seed), lambda t: exact(t) * np.where(t.d == 0, 1.5, 1) * getattr(t, size, 1))
    reading = verdict.readings[0]
    assert reading.places == (("DP 0", pytest.approx(1.5)),)
    assert (reading.formula, verdict.shape) == ("CP" if size else "", "rank")
    assert reading.text.startswith("one factor for each rank: DP 0: x 1.5")


def test_what_has_no_reading_is_numbers_and_copies_are_said() -> None:
    verdict = judged(ragged(3), lambda t: exact(t) * np.array([1.0, 0.31, 2.2])[t.d])
    assert dict(verdict.factors) == pytest.approx({"DP 0": 1, "DP 1": 0.31, "DP 2": 2.2})
    assert not [one for one in verdict.readings if one.counts]
    verdict = judged(ragged(1), lambda t: exact(t) * (1 + np.sin(np.arange(len(t.m))) / 3))
    assert (verdict.shape, verdict.deviations, verdict.readings) == ("token", (), ())
    assert "No reading fits" in str(verdict)
    twice = judged(ragged(3), lambda t: exact(t) * np.where(t.d == 0, 2, 1))
    assert "DP 0: x 2, as if counted several times" in twice.readings[0].text


def prompts_of_samples(t: Counted) -> Array:
    """The mean over prompts of the mean over their samples."""
    return t.m / t.M / t.over((t.t == 0).astype(float), t.prompt) / t.P


READINGS: dict[str, tuple[Formula, str, dict[str, Any], str]] = {
    # name: (weights, asked, options of the step, what the first reading says)
    "rows' means by micro-batch, for prompts": (mean_of_rows, "prompt_mean", {"masked": 0.0},
        r"divided by .*tokens of the rollout.*number of rollouts of the micro-batch.*not divided by the tokens"),
    "samples' means over what a CP rank holds": (lambda t: t.m / t.M_here / (t.N * t.C), "sample_mean",
        {"longest": 60, "masked": 0.0}, r"tokens of the rollout of what the CP rank holds.*; not divided by"),
    "prompts of samples": (prompts_of_samples, "sample_mean", {"uneven_prompts": True, "masked": 0.0},
        r"^divided by the number of rollouts of the prompt"),
    "fully masked units left out": (lambda t: t.m / t.M / (t.ROWS - t.MASKED), "sample_mean", {}, "= N/N_active: f"),
    "by length": (lambda t: t.m / t.length / t.N, "sample_mean", {}, "mask entries, masked ones too.* of the rollout"),
    "rows as rollouts": (lambda t: t.m / t.M / t.ROWS, "sample_mean", {"split_rollouts": True}, "tokens of the sample"),
    "phantoms": (lambda t: t.m / (t.T + t.MASKED), "token_mean", {"masked": 0.3}, "= T/T_clamped: counted were mask"),
    "a count of nothing": (lambda t: t.m / (t.T + t.K), "token_mean", {}, "as if divided by .*which is no count"),
    "the padded width": (lambda t: t.m / (t.N * t.width), "constant", {},
        "^divided by the longest row.* not by the divisor$"),
    "the rectangle": (lambda t: t.m / (t.rows * t.width * t.D * t.K), "token_mean", {}, "rows x the longest row"),
    "another mode": (lambda t: t.m / t.M / t.N, "prompt_mean", {},
        r"^the weights of sample_mean, unit counting all \(verl:seq-mean-token-mean, skyrl:sequence_mean, trl:grpo\)$"),
    "another mode, times CP": (lambda t: t.C * t.m / t.M / t.N, "token_mean", {}, "weights of sample_mean.*x 2 = CP"),
    "a divisor": (lambda t: t.m / (64 * t.N), "prompt_mean", {}, "^the weights of constant with divisor 64, unit"),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_what_fits_is_said_in_words_and_numbers(name: str) -> None:
    formula, mode, options, says = READINGS[name]
    step = ragged(3, **options)
    t = step.counted
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(t.m == 0, 0, formula(t))
    verdict = judged(step, weights, mode)
    assert any(re.search(says, reading.text) for reading in verdict.readings[:1]), str(verdict)
    assert f"A reading that fits: {verdict.readings[0].text[:20]}" in str(verdict)
    ends = re.search(r"one number for each \w+: (\S+) \(.+?\) to (\S+) \(", " ".join(str(verdict).split()))
    assert (ends is not None) == (verdict.shape in ("sample", "rollout", "prompt"))
    assert ends is None or float(ends[1]) < float(ends[2])
    right = right_weights(step, mode)
    ratio = weights[right != 0] / right[right != 0]
    assert (verdict.low, verdict.high) == pytest.approx((ratio.min(), ratio.max()), rel=1e-5)
    apart = np.abs(weights / weights.sum() - right / right.sum()).sum() / 2
    assert verdict.misplaced == pytest.approx(apart, abs=1e-6)


# name: (factor, sizes DP, CP, K, what else is known of the step, all readings)
CONSTANTS: dict[str, tuple[float, tuple[int, int, int], dict[str, Any], set[str]]] = {
    "three sizes coincide": (2, (2, 2, 2), {}, {"DP", "CP", "K"}),
    "DP and CP": (2, (2, 2, 3), {}, {"DP", "CP"}),
    "the pipeline's size": (7, (3, 2, 5), {"pp_size": 7}, {"PP"}),
    "by the pipeline's size": (1 / 7, (3, 2, 5), {"pp_size": 7}, {"1/PP"}),
    "a generation batch": (5 / 7, (3, 2, 5), {"steps_per_generation": 7}, {"K/steps_per_generation"}),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_all_names_of_a_constant_are_said(name: str) -> None:
    factor, (D, C, K), known, formulas = CONSTANTS[name]
    step = measured(ragged(3, D=D, C=C, K=K), lambda t: factor * exact(t))
    step = replace(step, split=replace(step.split, pp_size=known.get("pp_size", 1)), facts=known)
    assert {one.formula for one in judge(step, asked("token_mean")).readings} == formulas


def test_a_piece_without_an_entry_is_a_part_of_the_mean() -> None:
    """Rows of up to 8 tokens padded to 24: the second CP rank holds padding alone of some micro-batches."""
    step = Step(ragged(1, longest=9, samples=(1, 2)).rows, cp_size=2, length=24)
    t = step.counted
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(t.m == 0, 0, own_piece(t))
    verdict = judged(step, weights)
    assert verdict.readings[0].text.startswith("divided by the tokens of what the CP rank holds of the micro-batch, no")
    assert verdict.readings[0].formula == ""
    assert dict(verdict.factors) == pytest.approx(t.at("dkc", weights * t.T), rel=1e-5)


# ---- what is asked for


def test_where_nothing_is_asked_the_nearest_mode_is() -> None:
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        verdict = judge(sound_step(ragged(3), mode))
        assert verdict.sound
        assert verdict.expected.startswith(mode)
        assert "nothing was asked for" in verdict.notes[-1]
    verdict = judge(measured(ragged(3, masked=0.0), own_mean))
    assert not verdict.sound
    assert "divided by the tokens of the micro-batch" in verdict.readings[0].text


def late_tokens(inputs: ModeInputs) -> list[Tensor]:
    return [torch.arange(1.0, int(n) + 1) / inputs.tokens("step") for n in inputs.batch.mask_lengths]


def powers(batch: Samples) -> Array:
    return np.where(batch.mask_sums > 0, np.maximum(batch.mask_sums, 1.0) ** -0.75, 0.0)


VL_NORM = Mode(name="vl_norm", function=lambda of: powers(of.batch) / of.sum("powers"), sums={"powers": Sum(of=powers)})


def weighted_token_mean(of: ModeInputs) -> Any:
    return np.array(of.label("weight")) / of.tokens("step")


def test_a_mode_of_ones_own_can_be_asked_for_if_masks_suffice() -> None:
    step = ragged(3)
    t = step.counted
    weights = t.m * (t.t + 1) / t.T
    assert judge(measured(step, weights), resolve(late_tokens)).sound
    verdict = judge(measured(step, weights * 2), resolve(late_tokens))
    assert [one.formula for one in verdict.readings] == ["CP"]
    verdict = judge(sound_step(step, "token_mean"), resolve(late_tokens))
    assert (verdict.shape, verdict.readings) == ("token", ())
    right = right_weights(step, "vl_norm")
    assert judge(measured(step, right), resolve(VL_NORM)).sound
    assert not judge(measured(step, right * 1.01), resolve(VL_NORM)).sound
    (why,) = judge(measured(step, right), resolve(weighted_token_mean)).unknown  # by labels
    assert re.search("weighted_token_mean asks for cannot be made from masks and ids.*'weight'", why)


@pytest.mark.parametrize("coef", [0.05, -0.3])
def test_a_terms_coefficient_is_no_deviation(coef: float) -> None:
    step = ragged(3, D=2, C=2, K=2)
    right = right_weights(step, "prompt_mean")
    term = measured(step, coef * right, coefficient=coef)
    verdict = judge(term, asked("prompt_mean"))
    assert verdict.sound, str(verdict)
    assert f"the term's coefficient, {coef:g}, is divided out" in verdict.notes
    assert not judge(replace(term, facts={}), asked("prompt_mean")).sound
    assert not judge(replace(term, weights=2 * term.weights), asked("prompt_mean")).sound
    stray = judge(replace(term, stray=(3, 0.25 * abs(coef))), asked("prompt_mean"))
    assert stray.misplaced == pytest.approx(0.2, rel=1e-3)
    nothing = replace(term, weights=0 * right, facts={"coefficient": 0.0})
    assert judge(nothing, asked("prompt_mean")).unknown == ("The term's coefficient is 0: it trains nothing.",)


# ---- the report


def test_no_verdict_where_it_cannot_be_known_and_samples_without_entries_are_told() -> None:
    right = sound_step(ragged(3), "token_mean")
    verdict = judge(replace(right, unknown=("ranks are scaled apart: residual 0.49", "again")), asked("token_mean"))
    assert (verdict.sound, verdict.deviations, verdict.readings) == (False, (), ())
    assert str(verdict) == "NO VERDICT: ranks are scaled apart: residual 0.49\n  also: again"
    assert json.loads(verdict.to_json())["deviation"] is None
    after = right.tokens.sample + (right.tokens.sample > 3)
    verdict = judge(replace(right, tokens=replace(right.tokens, sample=after, total_lengths=None)), asked("token_mean"))
    assert verdict.sound
    assert "1 samples have no mask entry" in verdict.notes[0]


def test_the_report_and_a_measured_step_are_plain_data_too() -> None:
    """`tests/package/test_pages.py` compares the report's text."""
    data = json.loads(judged(ragged(3, masked=0.0), lambda t: own_mean(t) * t.C).to_json())
    assert data["sound"] is False
    assert data["readings"][0]["constant"] == [["CP", 1]]
    assert {row["microbatch"] for row in data["pieces"]} == set(range(5))
    assert len(str(judge(sound_step(ragged(3), "token_mean"), asked("token_mean"))).splitlines()) == 1
    step = replace(measured(ragged(3, fractional=True), exact, rounding="float32"), stray=(2, 0.5))
    back = MeasuredStep.from_json(replace(step, weights=np.where(step.weights == 0, np.nan, step.weights)).to_json())
    assert (back.split, back.facts, back.stray) == (step.split, step.facts, step.stray)
    np.testing.assert_array_equal(np.nan_to_num(back.weights), step.weights)
    for name in vars(step.tokens):
        np.testing.assert_array_equal(getattr(back.tokens, name), getattr(step.tokens, name))
