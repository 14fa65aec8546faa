"""`judge`: sound weights are called sound, weight in the wrong places is told, a cause that fits the rest is named.

Weights that should be are the float64 oracle's; wrong ones are formulas in counts (`counted_steps`).
"""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from counted_steps import Array, Counted, Formula, Row, Step, measured, ragged
from published import exact, own_mean, own_piece

from megatron_rl_loss import Mode, Samples, Sum, check_loss
from megatron_rl_loss.audit.judge import explain, judge
from megatron_rl_loss.audit.tokens import MeasuredStep, PlacedSamples, StepTokens
from megatron_rl_loss.audit.verdict import Verdict
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.counting import COUNTINGS, Counting
from megatron_rl_loss.core.modes import ModeInputs

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


def test_a_counting_by_labels_is_judged_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by `check_loss`; where samples lack the labels, the nearest mode is one that counts by masks."""
    row = Counting(
        "wanted",
        "wanted ones",
        lambda segments: segments.spread(np.array(segments.samples.label("wanted"))),
        ("wanted",),
    )
    monkeypatch.setitem(COUNTINGS, row.name, row)
    weights = np.array([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2])  # of one prompt that counts, of two
    for labels, nearest in (
        ({"wanted": [False, True, False]}, "prompt_mean, counting wanted units"),
        ({}, "prompt_mean"),
    ):
        samples = Samples([[1, 1], [1], [1, 1]], prompt_ids=[0, 0, 1], labels=labels)
        placed = PlacedSamples(dp_rank=0, microbatch=0, samples=samples, cp_rank=np.zeros(5, np.int64))
        step = MeasuredStep(microbatches=(placed,), weights=weights)
        assert (judge(step).sound, judge(step).expected) == (bool(labels), nearest)
        assert judge(step, asked("prompt_mean", "wanted")).sound == bool(labels)
    described: Any = {"labels": {"wanted": lambda drawn: drawn.prompt % 2 == 0}}
    assert check_loss(mode="prompt_mean", units="wanted", draws=2, **described).sound


@pytest.mark.parametrize(("mode", "units"), oracle.COUNTINGS)
def test_sound_code_is_called_sound_and_anything_has_a_verdict(mode: str, units: str) -> None:
    """No weights raise or warn (warnings are errors here), and unsound weights have numbers or a deviation."""
    for draw in range(5):
        rng = random.Random(f"{mode}/{units}/{draw}")
        step = ragged(
            draw, D=rng.choice([1, 2, 3]), C=rng.choice([1, 2, 4]), K=rng.choice([1, 2, 3]),
            samples=rng.choice([(1,), (1, 2), (0, 2)]), split_rollouts=rng.random() < 0.4,
            fractional=rng.random() < 0.4, masked=rng.choice([0.0, 0.2, 0.8]), responses=rng.random() < 0.4,
            longest=rng.choice([8, 20]),
        )  # fmt: skip
        sound = sound_step(step, mode, units, seed=draw)
        if rng.random() < 0.2:  # every CP rank holds every token
            everywhere = [replace(of, cp_rank=np.full_like(of.cp_rank, -1)) for of in sound.microbatches]
            sound = replace(sound, microbatches=tuple(everywhere))
        verdict = judge(sound, asked(mode, units))
        if not step.counted.T:
            assert "no token with an expected or measured weight" in verdict.headline
            continue
        assert verdict.sound, str(verdict)
        assert (verdict.misplaced, verdict.causes) == ((), ())
        assert verdict.wrong_share < 1e-5
        assert (verdict.low, verdict.high) == pytest.approx((1, 1), abs=1e-5)
        assert str(verdict).startswith(f"SOUND: {mode}")
        for _ in range(rng.randrange(1, 4)):
            sound = replace(sound, weights=spoilt(sound.weights, sound.tokens, rng))
        verdict = judge(sound, None if rng.random() < 0.2 else asked(mode, units))
        lines = str(verdict).splitlines()
        assert len(lines) <= 15
        assert max(map(len, lines)) <= 120
        json.dumps(verdict.to_dict(), allow_nan=False)
        assert math.isnan(verdict.wrong_share) or 0 <= verdict.wrong_share <= 1


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
    assert judge(twice, asked("sample_mean")).causes[0].constant == "CP"


def test_the_smallest_step_and_one_without_an_active_token() -> None:
    smallest = Step([[[Row((1.0, 1.0))]]])
    assert judged(smallest, exact).sound
    assert judged(smallest, lambda t: t.m).causes
    nothing = ragged(3, masked=1.1)
    assert judged(nothing, lambda t: 0 * t.m).unknown[0].startswith("The step has no token")
    assert [fact.name for fact in judged(nothing, lambda t: 0 * t.m + 0.1).misplaced] == ["masked_samples_trained"]


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
MISPLACED: dict[str, tuple[Formula, dict[str, Any], str, str]] = {
    # weights, options of the step, a fact's name, the constant beside what is left
    "a CP rank is lost": (lambda t: exact(t) * (t.c == 0), {}, "missing", ""),
    "only the last micro-batch": (lambda t: exact(t) * (t.k == t.K - 1), {"masked": 0.0}, "missing", ""),
    "nothing": (lambda t: 0 * t.m, {}, "missing", ""),
    "the prompt too": (lambda t: 0 * t.m + 1 / t.T, PROMPTS, "prompt_trained", ""),
    "the prompt too, / K": (lambda t: (0 * t.m + 1) / t.T / t.K, PROMPTS, "prompt_trained", "1/K"),
    "some masked tokens too": (lambda t: np.maximum(t.m, t.t == 3) / t.T, {"masked": 0.0}, "masked_trained", ""),
    "one token later": (lambda t: later(t) * t.C, {"masked": 0.0}, "shift", "CP"),
    "first tokens dropped": (lambda t: exact(t) * (t.t > 0), {}, "missing", ""),
    "the mask inverted": (lambda t: (t.m == 0) / t.T, {}, "inverted", ""),
    "one token earlier in the buffer": (earlier_in_buffer, {}, "shift", ""),
    "a sample thrice": (lambda t: exact(t) * (1 + 2 * (t.i == 3)), {"masked": 0.0}, "copies", ""),
    "a sample thrice, / K": (lambda t: exact(t) / t.K * (1 + 2 * (t.i == 3)), {"masked": 0.0}, "copies", "1/K"),
    "the mask multiplied twice": (lambda t: t.m**2 / t.T, {"fractional": True}, "fractions", ""),
    "fractions ignored": (lambda t: (t.m > 0) / t.T, {"fractional": True}, "fractions", ""),
    "the sign turned": (lambda t: -exact(t), {}, "sign", ""),
    "the sign of a rank turned": (lambda t: exact(t) * np.where(t.d == 1, -1, 1), {}, "sign", ""),
    "NaN somewhere": (lambda t: np.where(t.t == 3, np.nan, exact(t)), {}, "nan", ""),
    "NaN where no token is active": (lambda t: np.where(t.M == 0, np.nan, exact(t)), {"masked": 0.3}, "nan_empty", ""),
    "NaN everywhere": (lambda t: np.nan * t.m, {"masked": 0.0, "samples": (3,), "C": 1}, "nan", ""),
    "every token": (lambda t: 0 * t.m + 1 / t.T, {"masked": 0.3}, "mask_ignored", ""),
    "three tokens later": (lambda t: np.roll(exact(t), 3), {"masked": 0.0}, "misaligned", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MISPLACED)
def test_weight_in_the_wrong_places_is_told_as_a_fact(name: str) -> None:
    formula, options, kind, constant = MISPLACED[name]
    verdict = judged(ragged(3, **options), formula)
    assert [fact.name for fact in verdict.misplaced] == [kind], str(verdict)
    assert [cause.constant for cause in verdict.causes if not cause.row] == [constant] * bool(constant)
    assert verdict.misplaced[0].text in " ".join(str(verdict).split())
    if kind in ("missing", "sign") and name not in ("nothing", "first tokens dropped"):
        place = {"a CP": "CP 1", "th": "DP 1", "on": "micro-batch 0 of each DP rank; micro-batch 1"}
        whole = name == "the sign turned"
        assert whole or place[next(words for words in place if name.startswith(words))] in verdict.misplaced[0].text


def test_weight_on_padding_is_told() -> None:
    verdict = judge(replace(sound_step(ragged(3), "token_mean"), stray=(3, 0.25)), asked("token_mean"))
    assert [fact.name for fact in verdict.misplaced] == ["stray"]
    assert verdict.wrong_share == pytest.approx(0.2, rel=1e-3)
    assert "20.0 % of all weight lies on padding" in str(verdict)
    for step in (ragged(3), Step([[[Row(())]]])):
        verdict = judge(replace(measured(step, exact), stray=(3, math.nan)), asked("token_mean"))
        assert "weights are not finite" in verdict.headline
        assert "NaN or infinite weight lies on padding" in str(verdict)


# ---- causes


def scaled(factor: Callable[[Counted], Array], t: Counted) -> Array:
    weights: Array = exact(t) * factor(t)
    return weights


def test_what_no_row_explains_stays_a_number() -> None:
    """A rank apart, a factor of chance for each rank, for each sample, for each token."""
    seed, rng = 1, np.random.default_rng(1)
    factors: list[Callable[[Counted], Array]] = [
        lambda t: np.where(t.d == 0, 1.5, 1), lambda t: rng.uniform(0.5, 2, 3)[t.d],
        lambda t: rng.uniform(0.5, 2, t.ROWS)[t.i], lambda t: rng.uniform(0.5, 2, len(t.m)),
    ]  # fmt: skip
    for factor in factors:
        verdict = judged(ragged(seed), partial(scaled, factor))
        assert (verdict.misplaced, verdict.causes) == ((), ())
        assert "No known cause fits" in str(verdict)
        assert "DP 0, micro-batch" in str(verdict)
    assert "No gradient reached the tapped losses" in str(judged(ragged(seed), lambda t: 0 * exact(t)))
    verdict = judged(ragged(seed), lambda t: exact(t) * 1.2344)
    assert "in your own code" not in str(verdict)
    assert not verdict.causes[0].named
    assert "tokens weigh 1.234 times what they should" in str(verdict)
    assert "no product of the step's sizes and counts" in " ".join(str(verdict).split())


def prompts_of_samples(t: Counted) -> Array:
    """The mean over prompts of the mean over their samples."""
    return t.m / t.M / t.over((t.t == 0).astype(float), t.prompt) / t.P


CAUSES: dict[str, tuple[Formula, str, dict[str, Any], str]] = {
    # weights, asked, options of the step, the cause
    "samples' means over what a CP rank holds": (lambda t: t.m / t.M_here / (t.N * t.C), "sample_mean",
        {"longest": 60, "masked": 0.0}, "sample means inside the CP rank's piece of the micro-batch, .*1/CP"),
    "prompts of samples": (prompts_of_samples, "sample_mean", {"uneven_prompts": True, "masked": 0.0},
        "prompt means of sample means"),
    "fully masked units left out": (lambda t: t.m / t.M / (t.ROWS - t.MASKED), "sample_mean", {}, "= N/N_active: f"),
    "by length": (lambda t: t.m / t.length / t.N, "sample_mean", {}, "sample means over lengths, masked tokens too"),
    "rows as rollouts": (lambda t: t.m / t.M / t.ROWS, "sample_mean", {"split_rollouts": True}, "^sample means, over"),
    "fractions counted as tokens": (lambda t: t.m / (t.m != 0).sum(), "token_mean", {"fractional": True},
        "whose mask is not 0, fractions as 1, of the step$"),
    "phantoms by micro-batch": (lambda t: t.m / (t.n + t.over(((t.M == 0) & (t.t == 0)) * 1.0, t.d, t.k)) / t.D / t.K,
        "token_mean", {"masked": 0.3}, "one for each fully masked sample, of the micro-batch"),
    "the rectangle": (lambda t: t.m / (t.rows * t.width * t.D * t.K), "token_mean", {}, "rows x longest row of the"),
    "another mode, times CP": (lambda t: t.C * t.m / t.M / t.N, "token_mean", {}, "sample means.*x 2 = CP"),
    "by prompts, no tokens": (lambda t: t.m / t.P, "token_mean", {}, "not divided by any count of tokens.*= 1/P$"),
    "a divisor": (lambda t: t.m / (64 * t.N), "constant", {}, "^$"),
    "no divisor": (lambda t: t.m / t.N, "constant", {}, "every token alike, x 64 = L$"),
    "own samples": (lambda t: t.m / 64 / t.rows / t.D / t.K, "constant", {}, "samples of the micro-batch.*= 1/L$"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_what_fits_is_said_in_words_and_numbers(name: str) -> None:
    formula, mode, options, says = CAUSES[name]
    step = ragged(3, **options)
    t = step.counted
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(t.m == 0, 0, formula(t))
    verdict = judged(step, weights, mode)
    if says == "^$":
        assert verdict.sound  # negative control
        return
    assert re.search(says, str(verdict.causes[0])), str(verdict)
    assert "Fits: " + str(verdict.causes[0])[:30] in str(verdict)
    right = right_weights(step, mode)
    ratio = weights[right != 0] / right[right != 0]
    assert (verdict.low, verdict.high) == pytest.approx((ratio.min(), ratio.max()), rel=1e-5)
    apart = np.abs(weights / weights.sum() - right / right.sum()).sum() / 2
    assert verdict.wrong_share == pytest.approx(apart, abs=1e-6)


# factor, sizes DP, CP, K, the pipeline's size, all constants
CONSTANTS: dict[str, tuple[float, tuple[int, int, int], int, set[str]]] = {
    "three sizes coincide": (2, (2, 2, 2), 1, {"DP", "CP", "K"}),
    "DP and CP": (2, (2, 2, 3), 1, {"DP", "CP"}),
    "by the pipeline's size": (1 / 7, (3, 2, 5), 7, {"1/PP"}),
    "by three sizes, or prompts by ranks": (10 / 3, (3, 2, 5), 1, {"CP·K/DP", "P/DP"}),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_all_names_of_a_constant_are_said(name: str) -> None:
    factor, (D, C, K), pp_size, constants = CONSTANTS[name]
    step = measured(ragged(3, D=D, C=C, K=K), lambda t: factor * exact(t))
    verdict = judge(replace(step, split=replace(step.split, pp_size=pp_size)), asked("token_mean"))
    assert {cause.constant for cause in verdict.causes} == constants
    assert ("Each of these causes fits" in str(verdict)) == (len(constants) > 1)
    assert f"or a factor of {factor:.4g} in your own code" in " ".join(str(verdict).split())


def test_a_cause_of_several_steps_fits_each_of_them() -> None:
    """1/DP² and 1/P are the same number on one step; a cause must hold on all."""
    steps = [measured(ragged(seed, D=3), lambda t: exact(t) / t.D**2) for seed in range(6)]
    (cause,) = explain(steps, asked("token_mean"), tolerance=1e-5)
    assert cause.constant == "1/DP²"
    mixed = [*steps, measured(ragged(1), lambda t: own_mean(t))]
    assert explain(mixed, asked("token_mean"), tolerance=1e-5) == ()


def test_a_piece_without_an_entry_is_a_part_of_the_mean() -> None:
    """Rows of up to 8 tokens padded to 24: the second CP rank holds padding alone of some micro-batches."""
    step = Step(ragged(1, longest=9, samples=(1, 2)).rows, cp_size=2, length=24)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.where(step.counted.m == 0, 0, own_piece(step.counted))
    cause = judged(step, weights).causes[0]
    assert cause.row.startswith("divided by the tokens of the CP rank's piece of the micro-batch")
    assert cause.constant == ""


# ---- what is asked for


def test_where_nothing_is_asked_the_nearest_mode_is() -> None:
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        verdict = judge(sound_step(ragged(3), mode))
        assert verdict.sound
        assert verdict.expected.startswith(mode)
        assert f"nearest mode {verdict.expected} (no mode is known: give --expect); each of" in verdict.headline
    verdict = judge(measured(ragged(3, masked=0.0), own_mean))
    assert not verdict.sound
    assert "divided by the tokens of the micro-batch" in verdict.causes[0].row


def late_tokens(inputs: ModeInputs) -> list[Any]:
    return [torch.arange(1.0, int(n) + 1) / inputs.tokens("step") for n in inputs.batch.mask_lengths]


def powers(batch: Samples) -> Array:
    return np.where(batch.mask_sums > 0, np.maximum(batch.mask_sums, 1.0) ** -0.75, 0.0)


VL_NORM = Mode(name="vl_norm", function=lambda of: powers(of.batch) / of.sum("powers"), sums={"powers": Sum(of=powers)})


def weighted_token_mean(of: ModeInputs) -> Any:
    return np.array(of.label("weight")) / of.tokens("step")


def with_labels(t: Counted) -> dict[str, Any]:
    return {"labels": {"weight": [0.5 + i % 3 for i in range(t.ROWS)]}}


def test_a_mode_of_ones_own_can_be_asked_for_if_masks_suffice() -> None:
    step = ragged(3)
    t = step.counted
    weights = t.m * (t.t + 1) / t.T
    assert judge(measured(step, weights), resolve(late_tokens)).sound
    verdict = judge(measured(step, weights * 2), resolve(late_tokens))
    assert [cause.constant for cause in verdict.causes] == ["CP"]
    verdict = judge(sound_step(step, "token_mean"), resolve(late_tokens))
    assert verdict.causes == ()
    right = right_weights(step, "vl_norm")
    assert judge(measured(step, right), resolve(VL_NORM)).sound
    assert not judge(measured(step, right * 1.01), resolve(VL_NORM)).sound


def test_a_mode_over_labels_is_judged_by_the_labels_of_the_step() -> None:
    """A term's unregistered function, too. Without the labels there is no verdict."""
    step = ragged(3)
    labelled = measured(step, lambda t: t.m * (0.5 + t.i % 3) / t.T, with_labels)
    for mode in (weighted_token_mean, lambda of: np.array(of.batch.labels["weight"]) / of.tokens("step")):
        assert judge(labelled, resolve(mode)).sound
        assert [
            cause.constant for cause in judge(replace(labelled, weights=2 * labelled.weights), resolve(mode)).causes
        ] == ["CP"]
        assert not judge(measured(step, exact, with_labels), resolve(mode)).sound
        (why,) = judge(measured(step, exact), resolve(mode)).unknown
        assert re.search("cannot be computed from the samples.*'weight'", why)


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
    assert stray.wrong_share == pytest.approx(0.2, rel=1e-3)
    assert stray.deviation == pytest.approx(0.25 * (right != 0).sum(), rel=1e-3)  # of an active token's mean weight
    assert stray.headline.endswith(", 20.0 % of all weight is on wrong tokens")
    assert "of all weight" not in judge(replace(term, weights=2 * term.weights), asked("prompt_mean")).headline
    nothing = replace(term, weights=0 * right, facts={"coefficient": 0.0})
    assert judge(nothing, asked("prompt_mean")).unknown == ("The term's coefficient is 0, so the term trains nothing.",)


def test_a_terms_undeclared_factor_is_said_and_taken_as_its_coefficient() -> None:
    term = measured(ragged(3), lambda t: 0.01 * exact(t), undeclared_term=True)
    verdict = judge(term, asked("token_mean"))
    assert verdict.sound
    assert "all weights share the factor 0.01, taken as the term's coefficient" in verdict.notes[0]
    assert not judge(replace(term, facts={}), asked("token_mean")).sound
    assert not judge(measured(ragged(3), own_mean, undeclared_term=True), asked("token_mean")).sound


def test_modes_over_further_ids_are_compared() -> None:
    named = measured(
        ragged(3, masked=0.0),
        lambda t: t.m / t.G / t.P,
        lambda t: {
            "rollout_ids": [row.rollout for row in t.samples],
            "ids": {"session": [row.prompt for row in t.samples]},
        },
    )
    assert judge(named, resolve(lambda of: 1 / (of.tokens("session") * of.units("session")))).sound
    assert not judge(named, asked("sample_mean")).sound
    assert judge(named, asked("token_mean")).causes[0].row == "session means, over the sessions of the step"


def turns_of(t: Counted) -> list[list[int]]:
    """A turn is three tokens of a rollout, in one or two samples; each second masked token is in no turn."""
    return [
        [-1 if entry == 0 and i % 2 == 0 else 100 * row.rollout + i // 3 for i, entry in enumerate(row.mask)]
        for row in t.samples
    ]


def with_turns(t: Counted) -> dict[str, Any]:
    rows = t.samples
    return {
        "rollout_ids": [row.rollout for row in rows],
        "prompt_ids": [row.prompt for row in rows],
        "ids": {"turn": turns_of(t)},
    }


def test_modes_over_ids_per_token_are_compared() -> None:
    step = ragged(3, split_rollouts=True)
    masks, turn = step.counted.m, np.concatenate(turns_of(step.counted))
    assert (turn < 0).any()
    sizes = {unit: masks[turn == unit].sum() for unit in set(turn.tolist()) - {-1}}
    right = np.array([m / sizes[unit] / len(sizes) if m else 0 for m, unit in zip(masks, turn.tolist(), strict=True)])
    step_of_turns = measured(step, right, with_turns)
    assert step_of_turns.tokens.per_token == {"turn"}
    assert judge(step_of_turns, asked("turn_mean")).sound
    assert not judge(step_of_turns, asked("turn_mean", units="active")).sound
    assert judge(step_of_turns, asked("token_mean")).causes[0].row == "turn means, over the turns of the step"


def test_masked_tokens_that_are_trained_may_be_in_no_unit() -> None:
    """The causes are then not looked for with the trained tokens as the mask, which no unit could hold."""
    verdict = judge(
        measured(ragged(3, split_rollouts=True), lambda t: 0 * t.m + 1 / t.T, with_turns), asked("turn_mean")
    )
    assert [fact.name for fact in verdict.misplaced] == ["mask_ignored"]


# ---- the report


def test_no_verdict_where_it_cannot_be_known_and_samples_without_entries_are_counted() -> None:
    right = sound_step(ragged(3), "token_mean")
    verdict = judge(replace(right, unknown=("ranks are scaled apart: residual 0.49", "again")), asked("token_mean"))
    assert (verdict.sound, verdict.misplaced, verdict.causes) == (False, (), ())
    assert str(verdict) == "NO VERDICT: ranks are scaled apart: residual 0.49\nalso: again"
    assert verdict.to_dict()["deviation"] is None
    empty = Step([[[Row((1.0, 1.0)), Row((), 1), Row((1.0,), 2)]]])  # a rollout without an entry is a rollout
    verdict = judge(measured(empty, np.array([1, 1, 2]) / 6), asked("sample_mean"))
    assert verdict.sound
    assert not any("no mask entry" in note for note in verdict.notes)
    assert not judge(measured(empty, np.array([1, 1, 2]) / 4), asked("sample_mean")).sound


def test_a_sound_verdict_says_what_it_covers_and_what_it_cannot_see() -> None:
    right = sound_step(ragged(3), "token_mean")
    plain = str(judge(right, asked("token_mean")))
    assert "not checked: that masks and layout are those of the model's batch" in " ".join(plain.split())
    compared = str(judge(replace(right, facts={"tokens_compared": 314}), asked("token_mean")))
    assert "314 input ids agree with the samples" in " ".join(compared.split())
    assert "whether masks and layout" not in " ".join(compared.split())


@pytest.mark.parametrize(
    ("weights", "bars"),
    [
        ([1] * 6 + [0] + [1.5] * 6, ["▄▄|▄▄▄▄", "▆▆▆▆▆▆"]),
        ([0.5, 0, 1, 1.5, 2, 7, 0, 0.01, 0.25, 1, 1, np.nan, 1], ["▂-|▄▆██", "▁▁▄▄?▄"]),
        ([1] * 6 + [0.5] + [1] * 6, ["▄▄|▄▄▄▄", "!▄▄▄▄▄▄"]),  # masked tokens are shown if they are trained
    ],
)
def test_bars_show_measured_over_asked(weights: list[float], bars: list[str]) -> None:
    small = Step([[[Row((1.0,) * 2), Row((1.0,) * 4, 1)], [Row((0.0, *[1.0] * 6), 2)]]])
    verdict = judge(measured(small, np.array(weights) / 12), asked("token_mean"))
    assert [place.bar for place in verdict.places] == bars
    rows = [line for line in str(verdict).splitlines() if line.startswith("  DP 0, micro-batch")]
    assert [row.split()[-1] for row in rows] == bars


def test_the_table_has_a_column_where_cp_ranks_are_alike_and_says_what_it_leaves_out() -> None:
    verdict = judged(ragged(3, masked=0.0), lambda t: exact(t) * np.where(t.d == 0, 1.5, 1))
    lines = str(verdict).splitlines()
    rows = [line.split() for line in lines if line.startswith("  DP")]
    assert {place: ratios for _, place, _, _, *ratios, _ in rows} == {"0,": ["1.5"], "1,": ["1"], "2,": ["1"]}
    assert len(lines) <= 15
    assert f"measured / expected, {15 - len(rows)} more in the JSON (" in str(verdict)
    assert "expected, 1 more in the JSON (" in str(replace(verdict, places=verdict.places[: len(rows) + 1]))
    assert "more in the JSON" not in str(replace(verdict, places=verdict.places[: len(rows)]))


def test_a_micro_batch_of_one_token_has_its_place() -> None:
    small = Step([[[Row((1.0,))], [Row((1.0, 1.0), 1)]], [[Row((1.0,), 2)], [Row((1.0,), 3)]]])
    places = judge(measured(small, np.array([3.0, 1, 1, 1, 1]) / 5), asked("token_mean")).places
    assert [(place.dp_rank, place.microbatch) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [place.bar for place in places] == ["█", "▄▄", "▄", "▄"]


def test_a_common_factor_is_divided_out_of_the_table() -> None:
    """256 times what they should, and one token in the wrong place: the others are no "twice or more"."""
    step = ragged(3)
    weights = right_weights(step, "token_mean") * 256
    weights[np.flatnonzero(weights)[0]] = 0
    verdict = judged(step, weights)
    assert verdict.common == pytest.approx(256)
    assert "measured / expected / 256" in str(verdict)
    assert {*"".join(place.bar for place in verdict.places)} == {"-", "▄", "|"}
    weights[weights != 0] = right_weights(step, "token_mean")[weights != 0] * 1.5
    assert judged(step, weights).common == 1


def test_long_bars_are_drawn_together_and_their_mean_stays() -> None:
    verdict = judged(ragged(3, D=1, C=2, K=2, samples=(6,), masked=0.0, longest=200), lambda t: exact(t) * t.C)
    assert {*"".join(place.bar for place in verdict.places)} == {"█", "|"}
    assert max(len(place.bar) for place in verdict.places) <= 66


def test_the_report_is_plain_data_too() -> None:
    data = json.loads(json.dumps(judged(ragged(3, masked=0.0), lambda t: own_mean(t) * t.C).to_dict()))
    assert data["sound"] is False
    assert re.search("x 2 = CP", data["causes"][0])
    assert {row["microbatch"] for row in data["places"]} == set(range(5))
