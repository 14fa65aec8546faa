"""Names for what happens to coincide, or fits nothing: the plainest cause leads, and what is odd is pointed at.

Each step is measured in the simulated trainer, at sizes that differ unless they are to coincide.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simulated_trainer as trainer
from simulated_trainer import Piece, Step, own_mean, ragged, share, some
from torch import Tensor

from megatron_rl_loss.audit.report import Verdict
from megatron_rl_loss.audit.tokens import MeasuredStep
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import resolve

#: One that is quick, and more.
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
each_seed = pytest.mark.parametrize("seed", SEEDS)


def judged(step: Step, loss: Any, mode: str = "token_mean", contract: Any = trainer.summed, **options: Any) -> Verdict:
    return judge(trainer.measure(step, loss, contract), resolve(mode, **options))


def causes(verdict: Verdict) -> list[str]:
    """The likeliest cause of each deviation."""
    return [deviation.cause for deviation in verdict.deviations]


# ---- parts without an entry


def short_rows(seed: int) -> Step:
    """Rows of up to 8 tokens padded to 24: the second CP rank holds padding alone of some micro-batches."""
    step = Step(ragged(seed, longest=9, samples=(1, 2)).rows, cp_size=2, length=24)
    pieces = {(d, k) for d in range(step.D) for k in range(step.K)}
    longest = {(d, k): max(len(row.mask) for row in step.rows[d][k]) for d, k in pieces}
    assert min(longest.values()) <= 6 < max(longest.values())  # a zigzag chunk is 6 long
    return step


@each_seed
def test_a_piece_without_an_entry_is_a_part_of_the_mean(seed: int) -> None:
    step = short_rows(seed)
    stock = judged(step, lambda p: (p.sum, some(p.n_here)), contract=trainer.megatron)
    assert causes(stock) == ["own_tokens_cp_place"]
    of = step.numbers
    expected = of.by_piece(lambda d, k, c: of.T / (of.D * of.K * of.C * of.piece[d, k, c]))
    assert dict(stock.deviations[0].factors) == pytest.approx(expected, rel=1e-5)
    assert "the mean of all 30" in stock.what_it_is[0]
    summed = judged(step, lambda p: p.sum / some(p.n_here) / (p.of.D * p.of.K))
    assert causes(summed) == ["own_tokens_cp_place", "times_cp"]
    assert summed.deviations[1].factor == pytest.approx(2, rel=1e-5)


# ---- a shift


@pytest.mark.parametrize("move", [1, -1])
@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", None])
def test_a_shift_does_not_divide_by_zero(move: int, mode: str | None) -> None:
    """Warnings are errors here."""
    for seed in range(3):
        right = trainer.measure(ragged(seed), share)
        tokens = right.tokens
        weights = np.roll(right.weights, move)
        weights[np.roll(tokens.sample, move) != tokens.sample] = 0  # fell off its sample
        verdict = judge(replace(right, weights=weights), None if mode is None else resolve(mode))
        assert verdict.deviations[0].cause == "shift"


# ---- nothing was asked for


@each_seed
def test_where_nothing_is_asked_a_mean_of_means_is_one_deviation(seed: int) -> None:
    verdict = judge(trainer.measure(ragged(seed), own_mean))
    assert causes(verdict) == ["own_tokens_microbatch"]
    assert verdict.asked == "token_mean"


# ---- what is odd is pointed at


@each_seed
@pytest.mark.parametrize("size", ["", "C"])
def test_one_rank_off_is_one_cause(seed: int, size: str) -> None:
    verdict = judged(ragged(seed), lambda p: share(p) * (1.5 if p.d == 0 else 1.0) * getattr(p.of, size, 1))
    assert causes(verdict) == ["no_law", *(["times_cp"] if size else [])]
    assert (verdict.deviations[0].shape, dict(verdict.deviations[0].factors)) == ("rank", pytest.approx({"DP 0": 1.5}))
    assert "DP 0 alone" in str(verdict)
    assert "otherwise token_mean" in str(verdict)


def odd(measured: MeasuredStep, where: np.ndarray, factor: float) -> MeasuredStep:
    assert 0 < (where & (measured.weights != 0)).sum() < 30
    return replace(measured, weights=np.where(where, factor * measured.weights, measured.weights))


@each_seed
@pytest.mark.parametrize(("loss", "beside"), [(share, []), (own_mean, ["own_tokens_microbatch"])])
def test_an_odd_token_or_sample_is_named(seed: int, loss: Callable[[Piece], Tensor], beside: list[str]) -> None:
    right = trainer.measure(ragged(seed, masked=0.0), loss)
    tokens = right.tokens
    at = int(np.flatnonzero(tokens.mask)[20])
    token = f"sample {tokens.sample[at]}, token {tokens.position[at]}"
    verdict = judge(odd(right, np.arange(len(tokens)) == at, 100), resolve("token_mean"))
    assert causes(verdict) == ["odd_tokens", *beside]
    assert dict(verdict.deviations[0].factors) == pytest.approx({token: 100}, rel=1e-5)
    assert verdict.deviations[0].tokens == 1
    assert token in str(verdict)
    verdict = judge(odd(right, tokens.sample == 3, -1), resolve("token_mean"))
    assert causes(verdict) == ["odd_tokens", *beside]
    assert dict(verdict.deviations[0].factors) == pytest.approx({"sample 3": -1}, rel=1e-5)
    assert "all of sample 3" in str(verdict)


def test_weights_that_all_differ_have_no_odd_ones() -> None:
    right = trainer.measure(ragged(1), share)
    noise = 1 + np.sin(np.arange(len(right.weights))) / 3
    assert causes(judge(replace(right, weights=right.weights * noise), resolve("token_mean"))) == ["within"]


# ---- the named product leads, and what coincides is said


@each_seed
@pytest.mark.parametrize(
    ("times", "name"), [(lambda f: 1 / f.D, "clamped_over_dp"), (lambda f: f.C, "clamped_times_cp")]
)
def test_phantom_tokens_and_a_size_come_before_a_count_of_nothing(seed: int, times: Any, name: str) -> None:
    step = ragged(seed, masked=0.3)
    phantoms = len(step.numbers.masked)
    assert phantoms
    verdict = judged(step, lambda p: p.sum / (p.of.T + phantoms) * times(p.of))
    assert causes(verdict) == [name]


def test_a_count_of_nothing_is_still_told() -> None:
    verdict = judged(ragged(1), lambda p: p.sum / (p.of.T + p.of.K))
    assert causes(verdict) == ["other_count"]


@pytest.mark.parametrize("power", [1, -1])
def test_prompts_are_said_where_their_number_is_that_of_micro_batches(power: int) -> None:
    numbers = iter(range(10**6))
    rows = [[[replace(row, prompt=next(numbers) % 5) for row in chosen] for chosen in rank] for rank in ragged(1).rows]
    step = Step(rows, cp_size=2)
    per_prompt = {q: sum(sum(row.mask) for row in step.numbers.rows if row.prompt == q) for q in range(5)}
    assert min(per_prompt.values()) > 0

    def summed(p: Piece) -> Tensor:
        own = p.sums.new_tensor([per_prompt[row.prompt] for row in p.rows])
        return (p.sums / own).sum() * (1 if power == 1 else 1 / 25)

    (deviation,) = judged(step, summed, "prompt_mean").deviations
    said = {"times_microbatches", "times_units"} if power == 1 else {"over_microbatches", "over_units"}
    assert set(deviation.causes) == said


@pytest.mark.parametrize(("power", "name"), [(-1, "over_pp"), (1, "times_pp")])
def test_the_pipeline_size_is_tried(power: int, name: str) -> None:
    measured = trainer.measure(ragged(1), lambda p: share(p) * 7**power)
    step = replace(measured, split=replace(measured.split, pp_size=7))
    assert causes(judge(step, resolve("token_mean"))) == [name]


# ---- padded widths


def width(p: Piece, multiple: int = 1) -> int:
    return -(-max((len(row.mask) for row in p.rows), default=0) // multiple) * multiple


@each_seed
@pytest.mark.parametrize("multiple", [1, 4])
def test_padded_widths_are_named(seed: int, multiple: int) -> None:
    """4: twice the context-parallel size, of which padded rows are a multiple."""
    step = ragged(seed)
    of = step.numbers

    def by_width(p: Piece) -> Tensor:
        return p.sum / (p.of.N * width(p, multiple))

    def widest(d: int, k: int) -> int:
        return -(-max(len(row.mask) for row in step.rows[d][k]) // multiple) * multiple

    verdict = judged(step, by_width, "constant", divisor=8)
    assert causes(verdict) == ["own_width_microbatch"]
    expected = of.by_microbatch(lambda d, k: 8 / widest(d, k))
    assert dict(verdict.deviations[0].factors) == pytest.approx(expected, rel=1e-5)
    assert causes(judge(trainer.measure(step, by_width))) == ["own_width_microbatch"]
    verdict = judged(step, lambda p: p.sum / (len(p.rows) * width(p, multiple) * p.of.D * p.of.K))
    assert causes(verdict) == ["own_tokens_microbatch", "counted_otherwise"]
    assert "rows x the longest row" in verdict.deviations[1].text


def test_a_divisor_that_is_one_width_is_a_divisor() -> None:
    """Negative control: rows of one length."""
    verdict = judged(ragged(1, length=11), lambda p: p.sum / (p.of.N * width(p)), "constant", divisor=8)
    assert causes(verdict) == ["divisor"]


# ---- rows' means over what a CP rank holds of them


@each_seed
def test_rows_means_by_cp_rank_are_told_as_such_where_every_micro_batch_has_as_many_rows(seed: int) -> None:
    """Their number is everywhere the same, and explains nothing."""
    ragged_rows = ragged(seed, longest=40, samples=(2, 2)).rows
    step = Step(ragged_rows, cp_size=2)

    def loss(p: Piece) -> Tensor:
        rows = [(p.losses * p.mask)[p.sample == i].sum() / some(p.mask[p.sample == i].sum()) for i in range(2)]
        return (rows[0] + rows[1]) / 2 * p.of.C / (p.of.D * p.of.K)

    verdict = judged(step, loss, "sample_mean")
    own, factor = verdict.deviations
    assert own.cause == "own_tokens_of_rollout"
    held = {}
    for i, row in enumerate(step.numbers.rows):
        for c in range(2):
            mine = [entry for t, entry in enumerate(row.mask) if step.holder(t, len(row.mask)) == c]
            if sum(mine):
                held[f"sample {i}, CP {c}"] = sum(row.mask) / sum(mine) / 2  # a row's mean over its two parts
    assert dict(own.factors) == pytest.approx(held, rel=1e-5)
    assert factor.factor == pytest.approx(4, rel=1e-5)
