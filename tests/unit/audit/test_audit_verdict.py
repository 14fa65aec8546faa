"""`judge`: sound code is called sound in every mode and layout; what is wrong is told by its shape, cause and factors.

Weights that should be are the float64 oracle's; what a broken trainer makes of them is measured in the simulated one.
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
import simulated_trainer as trainer
import torch
from simulated_trainer import Numbers, Piece, Step, own_mean, ragged, share, some
from torch import Tensor

from megatron_rl_loss.audit.tokens import MeasuredStep, Split, StepTokens
from megatron_rl_loss.audit.verdict import Verdict, judge
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.papers import vl_norm, weighted_token_mean
from megatron_rl_loss.modes.table import ModeInputs

DIVISORS = {"constant": 64.0, "token_sum": 32.0}
ASKED = [(mode, units) for mode in oracle.MODES for units in ("all", "active")]


def asked(mode: str, units: Any = "all") -> Any:
    return resolve(mode, units=units, divisor=DIVISORS.get(mode))


def measured(step: Step, weights: np.ndarray) -> MeasuredStep:
    of = step.numbers
    holders = [step.holder(t, n) for n in of.lengths for t in range(n)]
    split = Split(num_microbatches=of.K, dp_size=of.D, cp_size=of.C, tp_size=of.TP)
    return MeasuredStep(tokens=trainer.tokens_of(step, holders), weights=weights, split=split)


def right_weights(step: Step, mode: str, units: str) -> np.ndarray:
    samples = [oracle.sample([0.0] * len(r.mask), r.mask, r.rollout, r.prompt) for r in step.numbers.rows]
    gradients = oracle.step_gradient(mode, samples, DIVISORS.get(mode), units)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *gradients]).numpy()


def sound_step(step: Step, mode: str, units: str, roundings: float = 16, seed: int = 0) -> MeasuredStep:
    """The oracle's weights, off by at most so many roundings of float32."""
    weights = right_weights(step, mode, units)
    noise = np.random.default_rng(seed).uniform(-1, 1, len(weights)) * roundings * oracle.ROUNDING
    return measured(step, weights * (1 + noise))


# ---- no false alarm

SPLITS = [(1, 1, 1), (1, 1, 4), (2, 2, 2), (3, 2, 5), (1, 4, 2), (4, 1, 1), (2, 1, 3)]


def quick_first(values: Any, quick: int) -> list[Any]:
    """Parameters of which the first few are tried in every run."""
    return [value if i < quick else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


@pytest.mark.parametrize(("mode", "units"), ASKED)
@pytest.mark.parametrize("split", quick_first(sorted(SPLITS, key=lambda split: split != (2, 2, 2)), 1), ids=str)
def test_sound_code_is_called_sound(mode: str, units: str, split: tuple[int, int, int]) -> None:
    D, C, K = split
    for seed, (split_rollouts, fractional) in enumerate(itertools.product([False, True], [False, True])):
        for responses in (False, True):
            step = ragged(
                seed, D=D, C=C, K=K, split_rollouts=split_rollouts, fractional=fractional, responses=responses
            )
            verdict = judge(sound_step(step, mode, units, seed=seed), asked(mode, units))
            assert verdict.sound, str(verdict)
            assert verdict.deviations == ()
            if step.numbers.T:
                assert verdict.misplaced < 1e-5
                assert verdict.low == pytest.approx(1, abs=1e-5)
                assert verdict.high == pytest.approx(1, abs=1e-5)
                assert any(words.startswith(mode) for words in verdict.what_it_is), verdict.what_it_is


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "units"), ASKED)
def test_sound_code_is_called_sound_in_many_steps(mode: str, units: str) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        step = ragged(
            seed,
            D=rng.randrange(1, 4),
            C=rng.choice([1, 2, 4]),
            K=rng.randrange(1, 5),
            samples=rng.choice([(1,), (1, 2), (0, 1, 3)]),
            split_rollouts=rng.random() < 0.5,
            fractional=rng.random() < 0.5,
            masked=rng.choice([0.0, 0.3, 0.9]),
        )
        verdict = judge(sound_step(step, mode, units, seed=seed), asked(mode, units))
        assert verdict.sound, str(verdict)


@pytest.mark.parametrize(("mode", "units"), ASKED)
def test_more_than_roundings_is_not_sound(mode: str, units: str) -> None:
    """Negative control."""
    verdict = judge(sound_step(ragged(3), mode, units, roundings=1000), asked(mode, units))
    assert not verdict.sound
    assert 500 * oracle.ROUNDING < verdict.deviation < 1000 * oracle.ROUNDING * 1.01


def test_one_token_off_is_not_sound() -> None:
    """Negative control: it need not be many."""
    right = sound_step(ragged(3), "token_mean", "all")
    for at in np.flatnonzero(right.weights)[::40]:
        weights = right.weights.copy()
        weights[at] *= 1.0001
        assert not judge(replace(right, weights=weights), asked("token_mean")).sound


@pytest.mark.parametrize("rounding", ["float16", "bfloat16"])
def test_half_precision_gradients_are_allowed_their_roundings(rounding: str) -> None:
    step = ragged(3)
    dtype = getattr(torch, rounding)
    weights = torch.from_numpy(right_weights(step, "sample_mean", "all")).to(dtype).double().numpy()
    rounded = measured(step, weights)
    assert not judge(rounded, asked("sample_mean")).sound
    assert judge(replace(rounded, facts={"rounding": rounding}), asked("sample_mean")).sound
    twice = replace(rounded, weights=weights * 2, facts={"rounding": rounding})
    assert judge(twice, asked("sample_mean")).deviations[0].cause == "times_cp"


def test_a_step_without_an_active_token_is_sound_if_nothing_is_trained() -> None:
    step = ragged(3, masked=1.1)
    nothing = np.zeros(sum(step.numbers.lengths))
    assert judge(measured(step, nothing), asked("token_mean")).sound
    verdict = judge(measured(step, nothing + 0.1), asked("token_mean"))
    assert not verdict.sound
    assert verdict.deviations[0].cause == "masked_samples_trained"


# ---- what is told of the wrong ones


def means(p: Piece) -> Tensor:
    return p.sums / some(p.tokens)


def active(of: Numbers) -> int:
    return sum(tokens > 0 for tokens in of.M)


def by_row(p: Piece, value: Callable[[float], float]) -> Tensor:
    return torch.tensor([value(max(sum(row.mask), 1)) for row in p.rows])


def part_of_prompt(p: Piece) -> Tensor:
    """The mean over prompts of the mean over their samples."""
    group = [sum(other.prompt == row.prompt for other in p.of.rows) for row in p.rows]
    return (means(p) / torch.tensor(group)).sum() / len({row.prompt for row in p.of.rows})


Change = Callable[[np.ndarray, StepTokens], np.ndarray]


def later(weights: np.ndarray, tokens: StepTokens) -> np.ndarray:
    """Every weight one token later in its sample."""
    moved = np.roll(weights, 1)
    moved[tokens.position == 0] = 0
    return moved


def earlier_in_buffer(weights: np.ndarray, tokens: StepTokens) -> np.ndarray:
    """Every weight one token earlier in its micro-batch, around the end."""
    moved = weights.copy()
    for d, k in {*zip(tokens.dp_rank.tolist(), tokens.microbatch.tolist(), strict=True)}:
        here = (tokens.dp_rank == d) & (tokens.microbatch == k)
        moved[here] = np.roll(weights[here], -1)
    return moved


CASES: dict[str, tuple[Callable[[Piece], Any], str, list[tuple[str, str, Any]], dict[str, Any]]] = {
    # name: (loss, asked, [(cause, shape, factor or {place: factor} of the numbers)], options)
    "CP factor and micro-batch means": (
        lambda p: own_mean(p) * p.of.C,
        "token_mean",
        [
            (
                "own_tokens_microbatch",
                "microbatch",
                lambda f: f.by_microbatch(lambda d, k: f.T / (f.D * f.K * f.n[d, k])),
            ),
            ("times_cp", "factor", lambda f: f.C),
        ],
        {},
    ),
    "CP-local counts, per-token path": (
        lambda p: p.sum / some(p.n_here) * p.of.C / p.of.K,
        "token_mean",
        [
            (
                "own_tokens_cp_place",
                "cp_place",
                lambda f: f.by_piece(lambda d, k, c: f.T / (f.D * f.K * f.C * f.piece[d, k, c])),
            ),
            ("times_dp_cp_squared", "factor", lambda f: f.D * f.C**2),
        ],
        {},
    ),
    "rows' own means by micro-batch where prompts were asked for": (
        lambda p: means(p).mean() / (p.of.D * p.of.K),
        "prompt_mean",
        [
            ("other_mode", "sample", None),
            (
                "own_units_microbatch",
                "microbatch",
                lambda f: f.by_microbatch(lambda d, k: len(f.rows) / (f.D * f.K * f.samples[d, k])),
            ),
        ],
        {},
    ),
    "samples' means over what a CP rank holds": (
        lambda p: (p.sums / some(torch.zeros(len(p.masks)).index_add(0, p.sample, p.mask))).sum() / (p.of.N * p.of.C),
        "sample_mean",
        [("own_tokens_of_rollout", "sample", None)],
        {},
    ),
    "the mean over prompts of their samples' means": (
        part_of_prompt,
        "sample_mean",
        [("samples_of_prompt", "prompt", None)],
        {"step": lambda: ragged(4, uneven_prompts=True)},
    ),
    "samples weighted by their length to the -0.75": (
        lambda p: (p.sums * by_row(p, lambda n: n**-0.75)).sum(),
        "token_mean",
        [("power_of_length", "sample", lambda f: f.by_sample(lambda i: f.T * f.M[i] ** -0.75))],
        {},
    ),
    "samples scaled by nothing that is known": (
        lambda p: (p.sums * torch.tensor([1 + hash(row.mask) % 97 / 97 for row in p.rows])).sum() / p.of.T,
        "token_mean",
        [("no_law", "sample", lambda f: f.by_sample(lambda i: 1 + hash(f.rows[i].mask) % 97 / 97))],
        {},
    ),
    "fully masked units left out": (
        lambda p: means(p).sum() / active(p.of),
        "sample_mean",
        [("unit_counting", "factor", lambda f: f.N / active(f))],
        {},
    ),
    "samples by their length, masked tokens too": (
        lambda p: (p.sums / torch.tensor([float(len(row.mask)) for row in p.rows])).sum() / p.of.N,
        "sample_mean",
        [("counted_otherwise", "sample", lambda f: f.by_sample(lambda i: f.M[i] / f.lengths[i]))],
        {},
    ),
    "every row taken for a rollout": (
        lambda p: means(p).sum() / len(p.of.rows),
        "sample_mean",
        [("rows_as_rollouts", "sample", None)],
        {"step": lambda: ragged(3, split_rollouts=True)},
    ),
    "DP ranks scaled apart": (
        lambda p: share(p) * (1.0, 0.3, 2.2)[p.d],
        "token_mean",
        [("no_law", "rank", lambda f: {"DP 0": 1.0, "DP 1": 0.3, "DP 2": 2.2})],
        {},
    ),
    "CP ranks scaled apart, on top of micro-batch means": (
        lambda p: own_mean(p) * (1.0, 0.9)[p.c],
        "token_mean",
        [
            ("no_law", "cp_place", lambda f: {"CP 0": 1.0, "CP 1": 0.9}),
            (
                "own_tokens_microbatch",
                "microbatch",
                lambda f: f.by_microbatch(lambda d, k: f.T / (f.D * f.K * f.n[d, k])),
            ),
        ],
        {},
    ),
    "the tokens of a CP rank are lost": (
        lambda p: share(p) * (p.c == 0),
        "token_mean",
        [("missing", "missing", lambda f: {"CP 1": 0.0})],
        {},
    ),
    "only the last micro-batch is trained": (
        lambda p: share(p) * (p.k == p.of.K - 1),
        "token_mean",
        [("missing", "missing", lambda f: {f"micro-batch {k} of each DP rank": 0.0 for k in range(f.K - 1)})],
        {"step": lambda: ragged(3, masked=0.0)},
    ),
    "nothing is trained": (lambda p: p.sum * 0, "token_mean", [("missing", "missing", lambda f: 0.0)], {}),
    "the prompt is trained": (
        lambda p: p.losses.sum() / p.of.T,
        "token_mean",
        [("prompt_trained", "masked", lambda f: 1.0)],
        {"step": lambda: ragged(3, responses=True, masked=0.0)},
    ),
    "the prompt is trained, and micro-batch means": (
        lambda p: p.losses.sum() / some(p.n) / (p.of.D * p.of.K),
        "token_mean",
        [
            ("prompt_trained", "masked", None),
            (
                "own_tokens_microbatch",
                "microbatch",
                lambda f: f.by_microbatch(lambda d, k: f.T / (f.D * f.K * f.n[d, k])),
            ),
        ],
        {"step": lambda: ragged(3, responses=True, masked=0.0)},
    ),
    "one token later, and x CP": (
        lambda p: share(p) * p.of.C,
        "token_mean",
        [("shift", "shift", None), ("times_cp", "factor", lambda f: f.C)],
        {"step": lambda: ragged(3, responses=True), "change": later},
    ),
    "one token later, of a sample mean": (
        lambda p: means(p).sum() / p.of.N,
        "sample_mean",
        [("shift", "shift", None)],
        {"change": later},
    ),
    "one token earlier in the buffer": (
        share,
        "token_mean",
        [("shift", "shift", None)],
        {"change": earlier_in_buffer},
    ),
    "some tokens twice": (
        share,
        "token_mean",
        [("twice", "twice", None)],
        {"change": lambda weights, tokens: weights * (1 + (tokens.position == 3))},
    ),
    "some tokens twice, and / K": (
        lambda p: share(p) / p.of.K,
        "token_mean",
        [("twice", "twice", None), ("over_microbatches", "factor", lambda f: 1 / f.K)],
        {"change": lambda weights, tokens: weights * (1 + (tokens.position == 3))},
    ),
    "the mask multiplied twice": (
        lambda p: (p.losses * p.mask**2).sum() / p.of.T,
        "token_mean",
        [("mask_squared", "mask", None)],
        {"step": lambda: ragged(3, fractional=True)},
    ),
    "the sign turned": (lambda p: -share(p), "token_mean", [("sign", "factor", lambda f: -1.0)], {}),
    "weights by the token": (
        share,
        "token_mean",
        [("within", "token", None)],
        {"change": lambda weights, tokens: weights * (1 + np.sin(np.arange(len(weights))) / 3)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_shape_cause_and_factors_are_told(name: str) -> None:
    loss, mode, expected, options = CASES[name]
    step = options.get("step", lambda: ragged(3))()
    found = trainer.measure(step, loss)
    if "change" in options:
        found = replace(found, weights=options["change"](found.weights, found.tokens))
    verdict = judge(found, asked(mode))
    assert not verdict.sound
    for deviation, (cause, shape, factor) in zip(verdict.deviations, expected, strict=False):
        assert (deviation.cause, deviation.shape) == (cause, shape), str(verdict)
        if factor is not None:
            numbers = factor(step.numbers)
            if isinstance(numbers, dict):
                assert dict(deviation.factors) == pytest.approx(numbers, rel=1e-5)
            else:
                assert deviation.factor == pytest.approx(numbers, rel=1e-5)
    if len(verdict.deviations) > len(expected):  # rows for rollouts also change how many there are
        assert [one.cause for one in verdict.deviations[len(expected) :]] == ["rows_for_rollouts"]
    assert len(verdict.deviations) >= len(expected)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (2, 3, 2), (2, 2, 3)], ids=str)
def test_all_candidates_are_told_where_sizes_coincide(sizes: tuple[int, int, int]) -> None:
    D, C, K = sizes
    verdict = judge(trainer.measure(ragged(3, D=D, C=C, K=K), lambda p: share(p) * 2), asked("token_mean"))
    names = {"times_dp": D, "times_cp": C, "times_microbatches": K}
    assert set(verdict.deviations[0].causes) == {name for name, size in names.items() if size == 2}


# ---- all factors multiplied are measured/asked

PLACE = re.compile(r"(DP|CP|micro-batch|sample|rollout|prompt) (\d+)")
COLUMNS = {"DP": "dp_rank", "CP": "cp_rank", "micro-batch": "microbatch"}


def multiplied(verdict: Verdict, tokens: StepTokens) -> np.ndarray:
    """Measured/asked of every entry, from the deviations alone."""
    product = np.ones(len(tokens))
    for deviation in verdict.deviations:
        seen = np.zeros(len(tokens))
        for place, factor in deviation.factors:
            here = np.ones(len(tokens), bool)
            for kind, number in PLACE.findall(place):
                here &= getattr(tokens, COLUMNS.get(kind, kind)) == int(number)
            product[here] *= factor
            seen += here
        assert (seen[tokens.mask != 0] == 1).all()  # every token has its place
    return product


def random_bug(rng: random.Random) -> tuple[str, Callable[[Piece], Tensor]]:
    """A mode over counts of some part, times some sizes."""
    count = rng.choice(["step", "microbatch", "piece", "rank"])
    kind = rng.choice(["tokens", "rows"])
    power = {name: rng.choice([-1, 0, 0, 1]) for name in ("D", "C", "K")}

    def bug(p: Piece) -> Tensor:
        scale = math.prod(getattr(p.of, name) ** power[name] for name in power)
        tokens = {
            "step": p.of.T,
            "microbatch": p.of.n[p.d, p.k],
            "piece": p.of.piece[p.d, p.k, p.c],
            "rank": p.of.rank(p.d),
        }[count]
        rows = {
            "step": len(p.of.rows),
            "microbatch": len(p.rows),
            "piece": len(p.rows),
            "rank": sum(p.of.samples[p.d, k] for k in range(p.of.K)),
        }[count]
        if kind == "tokens":
            return p.sum / max(tokens, 1) * scale
        return means(p).sum() / max(rows, 1) * scale

    return f"{kind} of the {count}, {power}", bug


@pytest.mark.parametrize("seed", quick_first(range(40), 12))
def test_all_factors_multiplied_are_measured_over_asked(seed: int) -> None:
    rng = random.Random(f"bugs/{seed}")
    name, bug = random_bug(rng)
    mode, units = rng.choice(ASKED)
    step = ragged(seed, D=rng.choice([1, 3]), C=rng.choice([1, 2]), K=rng.choice([1, 5]))
    found = trainer.measure(step, bug)
    verdict = judge(found, asked(mode, units))
    right = right_weights(step, mode, units)
    on = right != 0
    expected = found.weights[on] / right[on]
    assert verdict.sound == bool(np.allclose(expected, 1, rtol=1e-5, atol=0)), f"{name}\n{verdict}"
    np.testing.assert_allclose(multiplied(verdict, found.tokens)[on], expected, rtol=2e-5)
    assert not {"no_law", "within", "law"} & {cause for one in verdict.deviations for cause in one.causes}, str(verdict)
    shares, wanted = found.weights / found.weights.sum(), right / right.sum()
    assert verdict.misplaced == pytest.approx(np.abs(shares - wanted).sum() / 2, abs=1e-6)
    assert (verdict.low, verdict.high) == pytest.approx((expected.min(), expected.max()), rel=1e-5)


# ---- what it is, in words


@pytest.mark.parametrize(
    ("loss", "contract", "words"),
    [
        (lambda p: means(p).mean(), trainer.accumulate, "sample_mean over the own counts of the micro-batch"),
        (lambda p: means(p).mean(), trainer.accumulate, "verl:seq-mean-token-mean over these counts"),
        (lambda p: p.sum / some(p.n), trainer.accumulate, "skyrl:token_mean_legacy, trl:bnpo"),
        (lambda p: (p.sum, some(p.n_here)), trainer.megatron, "what the CP rank holds of the micro-batch"),
        (lambda p: p.sum / (64 * p.of.N), trainer.summed, "constant with divisor 64, unit counting all"),
        (lambda p: means(p).sum() / p.of.N, trainer.summed, "trl:grpo"),
    ],
)
def test_what_it_is(loss: Any, contract: trainer.Contract, words: str) -> None:
    verdict = judge(trainer.measure(ragged(3), loss, contract), asked("prompt_mean"))
    assert any(words in one for one in verdict.what_it_is), verdict.what_it_is


@pytest.mark.parametrize(
    ("mode", "units"), [*ASKED[:2], *(pytest.param(*one, marks=pytest.mark.slow) for one in ASKED[2:])]
)
def test_another_mode_is_named(mode: str, units: str) -> None:
    step = ragged(5)
    for other, _ in ASKED[::2]:
        if other == mode:
            continue
        verdict = judge(sound_step(step, mode, units), asked(other))
        told = f"{mode} with divisor" if mode in DIVISORS else mode
        assert any(one.startswith(told) for one in verdict.what_it_is), (mode, other, verdict.what_it_is)


def test_where_nothing_is_asked_the_nearest_mode_is() -> None:
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        verdict = judge(sound_step(ragged(3), mode, "all"))
        assert verdict.sound
        assert verdict.asked.startswith(mode)
        assert "nothing was asked for" in verdict.notes[-1]
    verdict = judge(trainer.measure(ragged(3), own_mean))
    assert not verdict.sound
    assert verdict.deviations[0].cause == "own_tokens_microbatch"


def test_a_mode_of_ones_own_can_be_asked_for() -> None:
    def late_tokens(inputs: ModeInputs) -> list[Tensor]:
        return [torch.arange(1.0, int(n) + 1) / inputs.totals.step_tokens for n in inputs.samples.mask_lengths]

    step = ragged(3)
    weights = np.concatenate([np.array(r.mask) * np.arange(1, len(r.mask) + 1) for r in step.numbers.rows])
    weights = weights / step.numbers.T
    verdict = judge(measured(step, weights), resolve(late_tokens))
    assert verdict.sound
    assert "a mode of your own" in verdict.what_it_is[0]
    verdict = judge(measured(step, weights * 2), resolve(late_tokens))
    assert (verdict.deviations[0].cause, verdict.deviations[0].factor) == ("times_cp", pytest.approx(2))
    verdict = judge(sound_step(step, "token_mean", "all"), resolve(late_tokens))
    assert verdict.deviations[0].cause == "within"


# ---- the report


def test_a_mode_with_sums_of_its_own_can_be_asked_for_if_masks_suffice() -> None:
    step = ragged(3, D=2, C=2, K=2)
    right = right_weights(step, "vl_norm", "all")
    assert judge(measured(step, right), resolve(vl_norm)).sound
    assert not judge(measured(step, right), resolve("sample_mean")).sound
    assert not judge(measured(step, right * 1.01), resolve(vl_norm)).sound
    verdict = judge(measured(step, right), resolve(weighted_token_mean))  # by labels
    assert not verdict.sound
    (why,) = verdict.unknown
    assert "weighted_token_mean asks for cannot be made from masks and ids" in why
    assert "'weight'" in why


@pytest.mark.parametrize("coef", [0.05, -0.3, 7.0])
def test_a_term_s_coefficient_is_no_deviation(coef: float) -> None:
    step = ragged(3, D=2, C=2, K=2)
    right = right_weights(step, "prompt_mean", "all")
    term = replace(measured(step, coef * right), facts={"coefficient": coef})
    verdict = judge(term, asked("prompt_mean"))
    assert verdict.sound, str(verdict)
    assert f"the term's coefficient, {coef:g}, is divided out" in verdict.notes
    assert not judge(replace(term, facts={}), asked("prompt_mean")).sound
    assert not judge(replace(term, weights=2 * term.weights), asked("prompt_mean")).sound
    assert not judge(term, asked("sample_mean")).sound
    nothing = replace(term, weights=0 * right, facts={"coefficient": 0.0})
    assert judge(nothing, asked("prompt_mean")).unknown == ("The term's coefficient is 0: it trains nothing.",)


def test_no_verdict_where_it_cannot_be_known() -> None:
    right = sound_step(ragged(3), "token_mean", "all")
    verdict = judge(replace(right, unknown=("ranks are scaled apart: residual 0.49",)), asked("token_mean"))
    assert not verdict.sound
    assert verdict.deviations == ()
    assert verdict.unknown == ("ranks are scaled apart: residual 0.49",)
    assert str(verdict) == "NO VERDICT\n  because ranks are scaled apart: residual 0.49"


def test_weight_on_padding_is_told() -> None:
    right = sound_step(ragged(3), "token_mean", "all")
    verdict = judge(replace(right, stray=(3, 0.25)), asked("token_mean"))
    assert [one.cause for one in verdict.deviations] == ["stray"]
    assert verdict.misplaced == pytest.approx(0.2, rel=1e-3)
    assert "3 places, 20.0 % of all weight" in str(verdict)


def test_the_report_for_a_person() -> None:
    report = str(judge(trainer.measure(ragged(3), lambda p: own_mean(p) * p.of.C), asked("token_mean")))
    lines = report.splitlines()
    assert lines[0].startswith("NOT SOUND: asked token_mean; tokens weigh ")
    assert max(map(len, lines)) <= 112
    told = " ".join(report.split())
    assert (
        "of the gradient's weight is on the wrong tokens It is token_mean over the own counts of the micro-batch"
        in told
    )
    assert "over these counts), times 2 = CP 1. a factor a micro-batch: each micro-batch is divided by its own" in told
    assert "known from Megatron-LM adfa873; Megatron-LM train_rl; verl #6957; SkyRL #925 → #1296 and 10 more" in told
    assert "2. one factor for all tokens, x 2 = CP: multiplied by the context-parallel size once too often" in told
    assert any(line.split()[:3] == ["micro-batch", "DP", "0,"] for line in lines)
    sound = str(judge(sound_step(ragged(3), "token_mean", "all"), asked("token_mean")))
    assert sound.startswith("SOUND: token_mean, every token within ")
    assert len(sound.splitlines()) == 1


def test_the_report_as_json() -> None:
    verdict = judge(trainer.measure(ragged(3), lambda p: own_mean(p) * p.of.C), asked("token_mean"))
    data = json.loads(verdict.to_json())
    assert data["sound"] is False
    assert data["deviations"][1]["causes"] == ["times_cp"]
    assert data["deviations"][1]["factors"] == [["all", pytest.approx(2)]]
    assert {row["microbatch"] for row in data["pieces"]} == set(range(5))
    nothing = replace(sound_step(ragged(3), "token_mean", "all"), unknown=("no",))
    assert json.loads(judge(nothing, asked("token_mean")).to_json())["deviation"] is None


def test_a_measured_step_comes_back_from_json() -> None:
    step = trainer.measure(ragged(3, fractional=True), own_mean, facts={"rounding": "float32"})
    back = MeasuredStep.from_json(step.to_json())
    assert (back.split, back.facts, back.stray) == (step.split, step.facts, step.stray)
    np.testing.assert_array_equal(back.weights, step.weights)
    for name in vars(step.tokens):
        np.testing.assert_array_equal(getattr(back.tokens, name), getattr(step.tokens, name))
    weights = step.weights.copy()
    weights[0] = np.nan
    assert np.isnan(MeasuredStep.from_json(replace(step, weights=weights).to_json()).weights[0])


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
        mask=mask,
        sample=sample,
        position=position,
        dp_rank=piece // 16,
        microbatch=piece % 16,
        cp_rank=position % 2,
        rollout=sample,
        prompt=sample // 5,
    )
    own = np.bincount(piece, weights=mask)[piece]
    step = MeasuredStep(tokens=tokens, weights=mask / own, split=Split(num_microbatches=16, dp_size=4, cp_size=2))
    for mode, more in (("token_mean", []), ("prompt_mean", ["other_mode"]), (None, [])):
        begin = time.process_time()
        verdict = judge(step, None if mode is None else asked(mode))
        assert time.process_time() - begin < 4
        told = [one.cause for one in verdict.deviations]
        assert told == [*more, "own_tokens_microbatch", "parts_summed"]


# ---- whatever the weights


def spoilt(weights: np.ndarray, tokens: StepTokens, rng: random.Random) -> np.ndarray:
    """Weights with something done to them that no loss function would."""
    noise = np.random.default_rng(rng.randrange(2**32))
    if not len(weights):
        return weights
    samples = noise.random(int(tokens.sample.max()) + 1)
    return rng.choice(
        [
            weights,
            weights * noise.choice([0, 1, 2], len(weights)),
            -weights,
            np.where(noise.random(len(weights)) < 0.1, np.nan, weights),
            np.roll(weights, rng.choice([1, -1, 3])),
            weights * samples[tokens.sample],
            weights + 0.01 * (noise.random(len(weights)) < 0.2),
            weights * np.array([1, 0, 3.0])[tokens.dp_rank],
            weights * (1 + tokens.microbatch),
            weights * 1e-30,
            weights * noise.standard_normal(len(weights)),
        ]
    )


@pytest.mark.parametrize("part", quick_first(range(6), 1))
def test_anything_has_a_verdict(part: int) -> None:
    """No weights raise or warn (warnings are errors here), and what is not sound has a deviation."""
    for seed in range(part, 240, 6):
        rng = random.Random(f"spoilt/{seed}")
        step = ragged(
            seed,
            D=rng.choice([1, 2, 3]),
            C=rng.choice([1, 2]),
            K=rng.choice([1, 2, 3]),
            samples=rng.choice([(1,), (1, 2), (0, 2)]),
            split_rollouts=rng.random() < 0.3,
            fractional=rng.random() < 0.3,
            masked=rng.choice([0.0, 0.2, 0.8]),
            responses=rng.random() < 0.4,
            longest=rng.choice([8, 20]),
        )
        mode, units = rng.choice(ASKED)
        found = measured(step, right_weights(step, mode, units))
        if rng.random() < 0.2:  # every CP rank holds every token
            found = replace(found, tokens=replace(found.tokens, cp_rank=np.full(len(found.tokens), -1)))
        for _ in range(rng.randrange(4)):
            found = replace(found, weights=spoilt(found.weights, found.tokens, rng))
        verdict = judge(found, None if rng.random() < 0.2 else asked(mode, units))
        assert str(verdict)
        json.loads(verdict.to_json())
        assert verdict.sound == (not verdict.deviations)
        assert math.isnan(verdict.misplaced) or 0 <= verdict.misplaced <= 1


def test_samples_without_entries_are_told() -> None:
    right = sound_step(ragged(3), "token_mean", "all")
    later = right.tokens.sample + (right.tokens.sample > 3)
    skipped = replace(right, tokens=replace(right.tokens, sample=later, total_lengths=None))
    verdict = judge(skipped, asked("token_mean"))
    assert verdict.sound
    assert "1 samples have no mask entry" in verdict.notes[0]
