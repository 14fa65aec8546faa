"""`judge`: what fits wrong weights is read as places or counts, in words, and the numbers are those of every place.

Weights that should be are the float64 oracle's; wrong ones are formulas in counts (`counted_steps`).
"""

import itertools
import math
import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from counted_steps import Array, Counted, Formula, Step, measured, ragged
from judging import ASKED, asked, each_seed, first_of, judged, right_weights, seeds, sound_step
from published import exact, mean_of_rows, own_mean, own_piece
from torch import Tensor

from megatron_rl_loss.audit import StepTokens, Verdict, judge
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.papers import vl_norm_undivided as vl_norm
from megatron_rl_loss.modes.papers import weighted_token_mean
from megatron_rl_loss.modes.table import ModeInputs

# ---- places before chains


@seeds(*range(4), slow=range(8, 24))
def test_a_second_sample_of_each_pack_counted_twice_is_no_chain_of_causes(seed: int) -> None:
    """Packed, at CP 2: samples weigh once or twice what was asked, which some products of counts do as well."""
    step = ragged(seed, D=1, C=2, K=random.Random(seed).choice([1, 2, 3]), samples=(2, 3), longest=12)
    numbers = itertools.count()
    second = {[next(numbers) for _ in chosen][1] for rank in step.rows for chosen in rank}
    verdict = judged(step, lambda t: exact(t) * (1 + np.isin(t.i, list(second))))
    for reading in verdict.readings:
        assert len(reading.counts) <= 1 or reading.places, str(verdict)
    active = {i for i, row in enumerate(step.counted.samples) if any(row.mask)}
    if verdict.shape == "sample" and 0 < 2 * len(active & second) < len(active):
        twice = tuple((f"sample {i}", pytest.approx(2)) for i in sorted(active & second))
        assert verdict.readings[0].places == twice


@each_seed
@pytest.mark.parametrize("size", ["", "C"])
def test_one_rank_apart_is_said_before_anything_else(seed: int, size: str) -> None:
    verdict = judged(ragged(seed), lambda t: exact(t) * np.where(t.d == 0, 1.5, 1) * getattr(t, size, 1))
    reading = verdict.readings[0]
    assert reading.places == (("DP 0", pytest.approx(1.5)),)
    assert (reading.formula, verdict.shape) == ("CP" if size else "", "rank")
    assert reading.text.startswith("one factor for each rank: DP 0: x 1.5")


def test_ranks_that_all_differ_are_numbers() -> None:
    verdict = judged(ragged(3), lambda t: exact(t) * np.array([1.0, 0.31, 2.2])[t.d])
    assert dict(verdict.factors) == pytest.approx({"DP 0": 1, "DP 1": 0.31, "DP 2": 2.2})
    assert not [one for one in verdict.readings if one.counts]


# ---- counts


def prompts_of_samples(t: Counted) -> Array:
    """The mean over prompts of the mean over their samples."""
    return t.m / t.M / t.over((t.t == 0).astype(float), t.prompt) / t.P


READINGS: dict[str, tuple[Formula, str, dict[str, Any], str]] = {
    # name: (weights, asked, options of the step, what the first reading says)
    "own tokens, times CP": (lambda t: own_mean(t) * t.C, "token_mean", {},
        r"^divided by the tokens of the micro-batch, not of the step \(skyrl:token_mean_legacy, trl:bnpo.*x 2 = CP"),
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
    "stock": (own_piece, "prompt_mean", {}, "tokens of what the CP rank holds of the micro-batch, not of the step"),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_what_fits_is_said_in_words(name: str) -> None:
    formula, mode, options, says = READINGS[name]
    step = ragged(3, **options)
    t = step.counted
    verdict = judged(step, np.where(t.m == 0, 0, formula_of(formula, t)), mode)
    assert any(re.search(says, reading.text) for reading in verdict.readings[:1]), str(verdict)
    assert f"A reading that fits: {verdict.readings[0].text[:20]}" in str(verdict)


def formula_of(formula: Formula, t: Counted) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return formula(t)


# name: (factor, sizes DP, CP, K, what else is known of the step, all readings)
CONSTANTS: dict[str, tuple[float, tuple[int, int, int], dict[str, Any], set[str]]] = {
    "three sizes coincide": (2, (2, 2, 2), {}, {"DP", "CP", "K"}),
    "CP and K": (2, (3, 2, 2), {}, {"CP", "K"}),
    "DP and K": (2, (2, 3, 2), {}, {"DP", "K"}),
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
    verdict = judged(step, np.where(t.m == 0, 0, formula_of(own_piece, t)))
    assert first_of(verdict).startswith(
        "divided by the tokens of what the CP rank holds of the micro-batch, not of the"
    )
    assert verdict.readings[0].formula == ""
    assert dict(verdict.factors) == pytest.approx(t.at("dkc", formula_of(own_piece, t) * t.T), rel=1e-5)


def random_bug(rng: random.Random) -> tuple[str, Formula]:
    """A mode over counts of some part, times some sizes."""
    count = rng.choice(["step", "microbatch", "piece", "rank"])
    kind = rng.choice(["tokens", "rows"])
    power = {name: rng.choice([-1, 0, 0, 1]) for name in ("D", "C", "K")}

    def bug(t: Counted) -> Array:
        scale = math.prod(float(getattr(t, name)) ** power[name] for name in power)
        tokens = {"step": t.T, "microbatch": t.n, "piece": t.n_here, "rank": t.n_rank}[count]
        rows = {"step": t.ROWS, "microbatch": t.rows, "piece": t.rows, "rank": t.rows_rank}[count]
        return scale * (t.m / tokens if kind == "tokens" else t.m / t.M / rows)

    return f"{kind} of the {count}, {power}", bug


@seeds(*range(6), slow=range(10, 30))
def test_numbers_are_measured_over_asked_place_by_place(seed: int) -> None:
    rng = random.Random(f"bugs/{seed}")
    name, bug = random_bug(rng)
    mode, units = rng.choice(ASKED)
    step = ragged(seed, D=rng.choice([1, 3]), C=rng.choice([1, 2]), K=rng.choice([1, 5]))
    t = step.counted
    weights = np.where(t.m == 0, 0, formula_of(bug, t))
    verdict = judge(measured(step, weights), asked(mode, units))
    right = right_weights(step, mode, units)
    on = right != 0
    ratio = weights[on] / right[on]
    assert verdict.sound == bool(np.allclose(ratio, 1, rtol=1e-5, atol=0)), f"{name}\n{verdict}"
    assert (verdict.low, verdict.high) == pytest.approx((ratio.min(), ratio.max()), rel=1e-5)
    shares, wanted = weights / weights.sum(), right / right.sum()
    assert verdict.misplaced == pytest.approx(np.abs(shares - wanted).sum() / 2, abs=1e-6)
    if not verdict.sound:
        assert verdict.shape != "token"
        np.testing.assert_allclose(by_place(verdict, measured(step, weights).tokens)[on], ratio, rtol=2e-5)


PLACE = re.compile(r"(DP|CP|micro-batch|sample|rollout|prompt) (\d+)")
COLUMNS = {"DP": "dp_rank", "CP": "cp_rank", "micro-batch": "microbatch"}


def by_place(verdict: Verdict, tokens: StepTokens) -> Array:
    """Measured / asked of every entry, from the verdict's places alone."""
    found = np.full(len(tokens), np.nan)
    for place, factor in verdict.factors:
        here = np.ones(len(tokens), bool)
        for kind, number in PLACE.findall(place):
            here &= getattr(tokens, COLUMNS.get(kind, kind)) == int(number)
        found[here] = factor
    return found


def test_where_nothing_is_asked_the_nearest_mode_is() -> None:
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        verdict = judge(sound_step(ragged(3), mode))
        assert verdict.sound
        assert verdict.expected.startswith(mode)
        assert "nothing was asked for" in verdict.notes[-1]
    verdict = judge(measured(ragged(3, masked=0.0), own_mean))
    assert not verdict.sound
    assert "divided by the tokens of the micro-batch" in first_of(verdict)


def test_a_mode_of_ones_own_can_be_asked_for() -> None:
    def late_tokens(inputs: ModeInputs) -> list[Tensor]:
        return [torch.arange(1.0, int(n) + 1) / inputs.totals.step_tokens for n in inputs.samples.mask_lengths]

    step = ragged(3)
    t = step.counted
    weights = t.m * (t.t + 1) / t.T
    assert judge(measured(step, weights), resolve(late_tokens)).sound
    verdict = judge(measured(step, weights * 2), resolve(late_tokens))
    assert [one.formula for one in verdict.readings] == ["CP"]
    verdict = judge(sound_step(step, "token_mean"), resolve(late_tokens))
    assert (verdict.shape, verdict.readings) == ("token", ())


def test_a_mode_with_sums_of_its_own_can_be_asked_for_if_masks_suffice() -> None:
    step = ragged(3, D=2, C=2, K=2)
    right = right_weights(step, "vl_norm")
    assert judge(measured(step, right), resolve(vl_norm)).sound
    assert not judge(measured(step, right * 1.01), resolve(vl_norm)).sound
    (why,) = judge(measured(step, right), resolve(weighted_token_mean)).unknown  # by labels
    assert re.search("weighted_token_mean asks for cannot be made from masks and ids.*'weight'", why)


@pytest.mark.parametrize("coef", [0.05, -0.3, 7.0])
def test_a_terms_coefficient_is_no_deviation(coef: float) -> None:
    step = ragged(3, D=2, C=2, K=2)
    right = right_weights(step, "prompt_mean")
    term = measured(step, coef * right, coefficient=coef)
    verdict = judge(term, asked("prompt_mean"))
    assert verdict.sound, str(verdict)
    assert f"the term's coefficient, {coef:g}, is divided out" in verdict.notes
    assert not judge(replace(term, facts={}), asked("prompt_mean")).sound
    assert not judge(replace(term, weights=2 * term.weights), asked("prompt_mean")).sound
    nothing = replace(term, weights=0 * right, facts={"coefficient": 0.0})
    assert judge(nothing, asked("prompt_mean")).unknown == ("The term's coefficient is 0: it trains nothing.",)
