"""The audit names the bugs that public projects really had: cause, factor and row.

Each is planted in a small trainer (`support/simulated_trainer.py`) in a few lines, as its project had it: a loss
function of what one CP rank holds of one micro-batch, and what the framework then does to gradients. The audit sees
nothing but the measured weights. What it is to say follows from the bug's own arithmetic, in float64 (`Numbers`), and
is stated in the row: the cause, and measured/asked for all tokens or place by place.

Rows are numbered as in the list of published bugs these were taken from. K micro-batches a rank, D data-parallel and C
context-parallel ranks; sizes differ, so that no two products of them coincide.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import simulated_trainer as trainer
import torch
from simulated_trainer import Numbers, Piece, Returned, Row, Step, ragged, share, some
from torch import Tensor

from megatron_rl_loss.audit.causes import MUSEUM
from megatron_rl_loss.audit.report import Deviation, Verdict
from megatron_rl_loss.audit.verdict import judge
from megatron_rl_loss.modes.names import resolve

pytestmark = pytest.mark.slow

#: A factor is found from float32 weights: a few roundings.
CLOSE = 1e-5

Factor = float | Mapping[str, float]


@dataclass(frozen=True)
class Found:
    """A deviation that the audit must tell: its cause, and its factor, or factors by place."""

    cause: str
    factor: Callable[[Numbers], Factor] | None = None


@dataclass(frozen=True)
class Planted:
    row: int
    bug: str
    loss: Callable[[Piece], Returned]
    finds: Found
    contract: trainer.Contract = trainer.summed
    asked: str = "token_mean"
    divisor: float | None = None
    step: Callable[[], Step] = field(default=lambda: ragged(1))
    also: tuple[Found, ...] = ()  # what else is wrong, found beside it
    poisoned: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"row {self.row}, {MUSEUM[self.row]}: {self.bug}"


# ---- parts of the planted losses


def own_mean(p: Piece) -> Tensor:
    """The micro-batch's own token mean: this CP rank's part of it."""
    return p.sum / some(p.n)


def sample_means(p: Piece) -> Tensor:
    """Each sample's own mean, this CP rank's part, [num_samples]."""
    return p.sums / some(p.tokens)


def nothing(p: Piece) -> Tensor:
    return p.losses.sum() * 0


def mean_of_rows(p: Piece) -> Tensor:
    """The mean over the micro-batch's rows of their means; of an empty micro-batch nothing."""
    return sample_means(p).mean() if p.masks else nothing(p)


def right_sample_mean(p: Piece) -> Tensor:
    return sample_means(p).sum() / p.of.N


def real(p: Piece) -> int:
    """The micro-batches of this DP rank that have an active token."""
    return p.of.filled(p.d)


def rows_cut_as_packed(p: Piece) -> Tensor:
    """Losses are cut row by row; the mask as if all rows were one sequence."""
    joined = torch.cat(p.masks)
    chunk = len(joined) // (2 * p.of.C)
    mask = torch.cat([joined.split(chunk)[p.c], joined.split(chunk)[2 * p.of.C - 1 - p.c]])
    return (p.losses * mask).sum() / p.of.T


def changed(of: Step, change: Callable[[int, int, Sequence[float]], Sequence[float]]) -> Step:
    """The step with other masks, by rank and micro-batch."""
    rows = [
        [[replace(row, mask=tuple(change(d, k, row.mask))) for row in chosen] for k, chosen in enumerate(rank)]
        for d, rank in enumerate(of.rows)
    ]
    return Step(rows, of.cp_size)


def one_token_each() -> Step:
    """A micro-batch holds one active token."""
    of = ragged(2, samples=(1,), masked=0.0)
    return changed(of, lambda d, k, mask: [float(t == (3 * k + d) % len(mask)) for t in range(len(mask))])


def weighted_samples() -> Step:
    """One sample a micro-batch; its tokens all have the sample's weight as their mask."""
    of = ragged(4, samples=(1,), masked=0.0)
    weights = [0.25, 0.5, 1.0, 2.0, 0.125]
    return changed(of, lambda d, k, mask: [entry * weights[(k + 2 * d) % 5] for entry in mask])


def masked_piece() -> Step:
    """A CP rank's piece of a micro-batch has no active token: all are at the row's ends."""
    of = ragged(5, samples=(1,), masked=0.0)
    rows = [[list(chosen) for chosen in rank] for rank in of.rows]
    rows[0][1] = [Row((1.0, 1.0, *[0.0] * 12, 1.0, 1.0), 1, 0)]
    return Step(rows, of.cp_size)


def pads_as_masked_rows() -> Step:
    """The last row of some micro-batches is padding."""
    of = ragged(6, samples=(2, 3), masked=0.0)
    rows = [[list(chosen) for chosen in rank] for rank in of.rows]
    for d, k in ((0, 0), (1, 3), (2, 4)):
        rows[d][k].append(Row((0.0,) * len(rows[d][k][0].mask), 900 + k, 300))
    return Step(rows, of.cp_size)


TWICE = (3, 11)  # samples that are fed once more as padding


def duplicates(p: Piece) -> Tensor:
    """The pads are copies of real rows, counted and trained."""
    numbers = [i for i, where in enumerate(p.of.where) if where == (p.d, p.k)]
    times = torch.tensor([1.0 + (i in TWICE) for i in numbers])
    return (p.sums * times).sum() / (p.of.T + sum(p.of.M[i] for i in TWICE))


def masked_completions(of: Numbers) -> float:
    return sum(of.lengths[i] for i in of.masked)


# ---- what is to be found


def factor(cause: str, of: Callable[[Numbers], Factor]) -> Found:
    return Found(cause, of)


OWN_MICROBATCH = Found("own_tokens_microbatch", lambda f: f.by_microbatch(lambda d, k: f.T / (f.D * f.K * f.n[d, k])))
OWN_PIECE = Found(
    "own_tokens_cp_place", lambda f: f.by_piece(lambda d, k, c: f.T / (f.D * f.K * f.C * f.piece[d, k, c]))
)
OWN_RANK = Found("own_tokens_dp_rank", lambda f: f.by_rank(lambda d: f.T / (f.D * f.rank(d))))
OWN_ROWS = Found("own_units_microbatch", lambda f: f.by_microbatch(lambda d, k: f.N / (f.D * f.K * f.samples[d, k])))
TIMES_CP, OVER_CP = factor("times_cp", lambda f: f.C), factor("over_cp", lambda f: 1 / f.C)
TIMES_K, OVER_K = factor("times_microbatches", lambda f: f.K), factor("over_microbatches", lambda f: 1 / f.K)
OTHER_MODE = Found("other_mode")

MEGATRON, PER_TOKEN, DDP, ACCUMULATE = (
    trainer.megatron,
    trainer.megatron_per_token,
    trainer.plain_ddp,
    trainer.accumulate,
)

NO_CP: Callable[[], Step] = lambda: ragged(1, C=1)  # noqa: E731
ONE_RANK: Callable[[], Step] = lambda: ragged(7, C=1, D=1)  # noqa: E731
WITH_EMPTY: Callable[[], Step] = lambda: ragged(8, empty=[(0, 1), (2, 3)])  # noqa: E731
EVEN_ROWS: Callable[[], Step] = lambda: ragged(9, C=1, samples=(2,), masked=0.0)  # noqa: E731
#: Tokens of another step, and of this one before its masks were cut.
OTHER_STEP = ragged(99).numbers.T
UNCUT = ragged(1).numbers.T + 61

# fmt: off
PLANTED = [
    Planted(1, "loss x C with DDP's 1/D, where DDP divides by D C already",
            lambda p: share(p) * p.of.K * p.of.D * p.of.C, TIMES_CP, MEGATRON),
    Planted(2, "per-token loss still x C", lambda p: (p.sum * p.of.C, p.n_here), TIMES_CP,
            PER_TOKEN),
    Planted(3, "the stock 3-tuple", lambda p: (p.sum, some(p.n_here)), OWN_PIECE,
            MEGATRON),
    Planted(3, "the stock 3-tuple, one active token a micro-batch",
            lambda p: (p.sum, some(p.n_here)), OVER_CP, MEGATRON, step=one_token_each),
    Planted(4, "0/0 on a CP rank without an active token", lambda p: (p.sum, p.n_here),
            Found("nan_empty"), MEGATRON, step=masked_piece),
    Planted(5, "an auxiliary term divided by tokens as well",
            lambda p: p.sum / some(p.n) / p.of.T,
            Found("divided_again_tokens_microbatch", lambda f: f.by_microbatch(lambda d, k: 1 / f.n[d, k]))),
    Planted(6, "an auxiliary term x n_local, not x n_local T C",
            lambda p: share(p) / (p.of.TP * p.of.C), factor("over_tp_cp", lambda f: 1 / (f.TP * f.C)),
            step=lambda: ragged(1, TP=7)),
    Planted(7, "an auxiliary term / K, not x C / K",
            lambda p: share(p) * p.of.D * p.of.K / p.of.C, OVER_CP, MEGATRON),
    Planted(8, "MTP: the sum over M < N tokens is divided by N",
            lambda p: p.sum / (p.of.T + sum(m > 0 for m in p.of.M)),
            factor("shifted", lambda f: f.T / (f.T + sum(m > 0 for m in f.M)))),
    Planted(9, "mean of micro-batch means", lambda p: (p.sum, some(p.n_here)), OWN_MICROBATCH,
            MEGATRON, step=NO_CP),
    Planted(10, "bin mean of means, an empty one counted too",
            lambda p: own_mean(p) / (p.of.D * p.of.K), OWN_MICROBATCH, step=WITH_EMPTY),
    Planted(10, "an empty bin counted as one token",
            lambda p: (p.sum, some(p.n_here)),
            factor("clamped_pieces", lambda f: f.T / (f.T + sum(n == 0 for n in f.piece.values()))), PER_TOKEN,
            step=WITH_EMPTY),
    Planted(11, "a fixed 1/G with micro-batches of any size", mean_of_rows, OWN_ROWS, ACCUMULATE,
            asked="sample_mean"),
    Planted(12, "seq-mean-token-sum computed a token mean", right_sample_mean,
            Found("other_mode", lambda f: f.by_sample(lambda i: 1 / f.M[i])), asked="verl:seq-mean-token-sum"),
    Planted(13, "masked_mean 0/0", lambda p: (p.sums / p.tokens).sum() / p.of.N, Found("nan_empty"),
            asked="sample_mean"),
    Planted(14, "sum over k of (s_k/n_k)(rows_k/rows)",
            lambda p: own_mean(p) * len(p.masks) / len(p.of.rows),
            Found("own_tokens_by_rows_microbatch",
                  lambda f: f.by_microbatch(lambda d, k: f.T * f.samples[d, k] / (len(f.rows) * f.n[d, k])))),
    Planted(15, "backward before / K", lambda p: share(p) * p.of.K * p.of.D, TIMES_K, DDP),
    Planted(16, "leftover / C", lambda p: share(p) * p.of.D / p.of.C, OVER_CP, DDP),
    Planted(17, "denominator N D, not N / D", lambda p: p.sum / (p.of.T * p.of.D),
            factor("over_dp_squared", lambda f: 1 / f.D**2), DDP),
    Planted(18, "sum-norm without / N", lambda p: p.sum / 64.0 * p.of.D,
            factor("times_units", lambda f: f.N), DDP, asked="constant", divisor=64.0),
    Planted(18, "then without x D", lambda p: p.sum / (64.0 * p.of.N),
            factor("over_dp", lambda f: 1 / f.D), DDP, asked="constant", divisor=64.0),
    Planted(19, "a 2-tuple under per-token loss: no token is counted", lambda p: p.sum,
            factor("times_cp_tokens_over_microbatches", lambda f: f.T * f.C / f.K), PER_TOKEN),
    Planted(20, "the critic normalised in each micro-batch, and summed", own_mean, OWN_MICROBATCH, DDP,
            also=(TIMES_K,)),
    Planted(21, "torch.mean in each micro-batch, and summed", mean_of_rows, OWN_ROWS, DDP,
            asked="sample_mean", also=(TIMES_K,)),
    Planted(22, "x m for where(m): NaN at a masked token poisons everything", share,
            Found("nan_masked"), poisoned=True, step=lambda: ragged(1, samples=(1,), masked=0.0, longest=60)),
    Planted(23, "micro-batch mean of means", own_mean, OWN_MICROBATCH, ACCUMULATE),
    Planted(24, "normalised twice", lambda p: share(p) / p.of.T,
            factor("over_tokens", lambda f: 1 / f.T)),
    Planted(25, "corrected by D C in a 2-tuple",
            lambda p: share(p) * p.of.K * p.of.D * p.of.C, TIMES_CP, MEGATRON),
    Planted(26, "micro-batch mean / G", own_mean, OWN_MICROBATCH, ACCUMULATE,
            step=NO_CP),
    Planted(27, "no 1/G", mean_of_rows, TIMES_K, DDP, asked="sample_mean", step=EVEN_ROWS),
    Planted(28, "a local denominator called DAPO", own_mean, OWN_MICROBATCH, ACCUMULATE,
            step=NO_CP),
    Planted(29, "the generation batch's denominator",
            lambda p: p.sum / (p.of.T + OTHER_STEP) * p.of.D,
            factor("other_count", lambda f: f.T / (f.T + OTHER_STEP)), DDP),
    Planted(30, "truncated, masked completions counted",
            lambda p: p.sum / (p.of.T + masked_completions(p.of)),
            factor("masked_length", lambda f: f.T / (f.T + masked_completions(f)))),
    Planted(31, "sum over k of mean_k / G", own_mean, OWN_MICROBATCH, ACCUMULATE,
            step=ONE_RANK),
    Planted(32, "the same across devices", lambda p: p.sum / p.of.rank(p.d), OWN_RANK,
            DDP, step=NO_CP),
    Planted(33, "summed over micro-batches", own_mean, OWN_MICROBATCH, DDP, also=(TIMES_K,)),
    Planted(34, "1/K counted empty micro-batches", own_mean, OWN_MICROBATCH, ACCUMULATE,
            step=WITH_EMPTY),
    Planted(35, "micro-batch means averaged", own_mean, OWN_MICROBATCH, ACCUMULATE),
    Planted(36, "the schedule's / K not undone", lambda p: share(p) * p.of.D, OVER_K, MEGATRON),
    Planted(37, "an unmasked numerator", lambda p: p.losses.sum() / p.of.T,
            factor("mask_ignored", lambda f: 1.0)),
    Planted(38, "a rank-local denominator", lambda p: p.sum / p.of.rank(p.d), OWN_RANK,
            DDP),
    Planted(39, "min(loss_scale, 1) for max", lambda p: p.sum / min(p.of.T, 1),
            factor("times_tokens", lambda f: f.T)),
    Planted(40, "tokens from response_lengths, ignoring the mask",
            lambda p: p.sum / sum(p.of.lengths), factor("length", lambda f: f.T / sum(f.lengths))),
    Planted(41, "the per-token path rescaled", lambda p: share(p) * p.of.C, TIMES_CP),
    Planted(41, "then without x C", lambda p: share(p) / p.of.C, OVER_CP),
    Planted(42, "clamp(M_i, 1): phantom tokens", lambda p: p.sum / sum(max(m, 1) for m in p.of.M),
            factor("clamped", lambda f: f.T / (f.T + len(f.masked)))),
    Planted(43, "divisor 1000, 40960 meant", lambda p: p.sum / (1000 * p.of.N),
            factor("divisor", lambda f: 40.96), asked="constant", divisor=40960.0),
    Planted(44, "BSHD data sliced as THD under CP", rows_cut_as_packed, Found("misaligned"),
            step=lambda: ragged(10, samples=(3,), length=24)),
    Planted(45, "rows counted, not rollouts",
            lambda p: (p.sums / torch.tensor([some_rollout(p, row) for row in p.rows])).sum() / len(p.of.rows),
            factor("rows_for_rollouts", lambda f: f.N / len(f.rows)), asked="sample_mean",
            step=lambda: ragged(11, split_rollouts=True)),
    Planted(46, "a packed row treated as one sequence", lambda p: own_mean(p) / (p.of.D * p.of.K),
            OWN_MICROBATCH, asked="sample_mean", also=(OTHER_MODE,)),
    Planted(47, "micro-batch 2 -> 1 changes the gradient", own_mean, OWN_MICROBATCH, ACCUMULATE,
            step=lambda: ragged(12, samples=(1,), masked=0.0)),
    Planted(48, "rows of padding keep their advantages",
            lambda p: (p.losses * torch.maximum(p.mask, pad_rows(p)[p.sample])).sum() / p.of.T,
            factor("masked_samples_trained", lambda f: 1.0), step=pads_as_masked_rows),
    Planted(48, "the pads are copies of real rows, trained again", duplicates,
            Found("twice", lambda f: {f"sample {i}": 2.0 for i in TWICE}),
            also=(factor("other_count", lambda f: f.T / (f.T + sum(f.M[i] for i in TWICE))),)),
    Planted(49, "per-token loss is never divided", lambda p: p.sum,
            factor("times_tokens", lambda f: f.T)),
    Planted(50, "FSDP's per-token normaliser dropped", lambda p: p.sum,
            factor("times_tokens_over_dp", lambda f: f.T / f.D), DDP),
    Planted(52, "tokens of all mini-batches / D on a 2-tuple, no x K",
            lambda p: p.sum / (p.of.T / p.of.D), OVER_K, MEGATRON),
    Planted(53, "the micro-batch's own count of correct tokens", own_mean,
            OWN_MICROBATCH, DDP, also=(TIMES_K,), step=lambda: ragged(13, masked=0.4)),
    Planted(54, "mean over the rank's 'real' micro-batches of their means",
            lambda p: own_mean(p) / real(p),
            Found("own_tokens_real_microbatches",
                  lambda f: f.by_microbatch(lambda d, k: f.T / (f.D * f.filled(d) * f.n[d, k]))),
            DDP, step=WITH_EMPTY),
    Planted(55, "normalised over a packed batch of one: identically 1",
            lambda p: p.sum / p.mask.max() / p.of.T,
            Found("fraction_ignored", lambda f: f.by_microbatch(lambda d, k: 1 / max(f.first_row(d, k).mask))),
            step=weighted_samples),
    Planted(56, "the mask cut after tokens were counted", lambda p: p.sum / UNCUT,
            factor("other_count", lambda f: f.T / UNCUT)),
    Planted(57, "divided by K once more", lambda p: share(p) / p.of.K, OVER_K),
    Planted(57, "the count dropped from the tuple", lambda p: share(p) * p.of.K * p.of.D * p.of.C, TIMES_CP,
            MEGATRON),
    Planted(57, "the count dropped from the tuple, per-token loss", lambda p: p.sum,
            factor("times_cp_tokens_over_microbatches", lambda f: f.T * f.C / f.K), PER_TOKEN),
    Planted(58, "one micro-batch's totals as the step's", own_mean, OWN_MICROBATCH,
            also=(factor("parts_summed", lambda f: f.D * f.K),)),
    Planted(58, "one rank's totals as the step's", lambda p: p.sum / p.of.rank(p.d), OWN_RANK,
            also=(factor("parts_summed", lambda f: f.D),)),
    Planted(58, "the last step's totals as this one's", lambda p: p.sum / OTHER_STEP,
            factor("other_count", lambda f: f.T / OTHER_STEP)),
    Planted(0, "the false alarm's fix: tokens summed over D C",
            lambda p: p.sum / (p.of.T * p.of.C),
            OVER_CP),
]
# fmt: on

#: What cannot be planted in this trainer, and why.
NOT_PLANTED = {
    51: "A float num_tokens. The last pipeline stage raises and the others wait: there is"
    " no gradient, so no token has a weight to be measured.",
}


def some_rollout(p: Piece, row: Row) -> float:
    """Tokens of the row's rollout, over all its rows."""
    return max(sum(sum(other.mask) for other in p.of.rows if other.rollout == row.rollout), 1.0)


def pad_rows(p: Piece) -> Tensor:
    return torch.tensor([float(row.rollout >= 900) for row in p.rows])


def verdict_on(bug: Planted) -> tuple[Verdict, Numbers]:
    step = bug.step()
    measured = trainer.measure(step, bug.loss, bug.contract, poisoned=bug.poisoned, facts=bug.facts)
    return judge(measured, resolve(bug.asked, divisor=bug.divisor)), step.numbers


def check(deviation: Deviation, found: Found, of: Numbers) -> None:
    if found.factor is None:
        return
    expected = found.factor(of)
    if isinstance(expected, Mapping):
        assert dict(deviation.factors) == pytest.approx(dict(expected), rel=CLOSE)
    else:
        assert deviation.factor == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.id)
def test_the_bug_is_named(bug: Planted) -> None:
    verdict, of = verdict_on(bug)
    assert not verdict.sound
    told = str(verdict)
    for found in (bug.finds, *bug.also):
        deviation = next((one for one in verdict.deviations if found.cause in one.causes), None)
        assert deviation is not None, f"{found.cause} is not named:\n{told}"
        assert deviation.cause == found.cause, f"something else is thought more likely:\n{told}"
        check(deviation, found, of)
    named = next(one for one in verdict.deviations if bug.finds.cause in one.causes)
    rows = {row for one in verdict.deviations for row in one.rows}
    assert bug.row in (rows if bug.also else named.rows), told
    assert len(verdict.deviations) == 1 + len(bug.also), f"more than was planted:\n{told}"


def test_the_museum_is_complete() -> None:
    assert set(MUSEUM) == set(range(59))  # 0 is the false alarm
    rows = {bug.row for bug in PLANTED} - {0}
    assert rows | set(NOT_PLANTED) == set(range(1, 59))
    assert not rows & set(NOT_PLANTED)
    assert len(rows) >= 45


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.id)
def test_without_the_bug_the_same_data_is_sound(bug: Planted) -> None:
    """Negative control: the asked mode itself, by its formula, in the same step."""
    step = bug.step()
    of = step.numbers
    rollouts = {row.rollout: 0.0 for row in of.rows}
    for row, tokens in zip(of.rows, of.M, strict=True):
        rollouts[row.rollout] += tokens

    def right(p: Piece) -> Tensor:
        if bug.asked == "token_mean":
            return p.sum / of.T
        if bug.asked == "sample_mean":
            own = torch.tensor([max(rollouts[row.rollout], 1.0) for row in p.rows])
            return (p.sums / own).sum() / of.N
        return p.sum / ((bug.divisor or 1.0) * of.N)

    verdict = judge(trainer.measure(step, right, facts=bug.facts), resolve(bug.asked, divisor=bug.divisor))
    assert verdict.sound, str(verdict)
    assert verdict.deviations == ()
    assert not math.isnan(verdict.misplaced)
