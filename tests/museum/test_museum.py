"""Negative controls: published bugs that are no weights alone (carriers, totals, layouts) must turn the checks red.

An exhibit names a row of `published.WHERE`, a layout, the modes it concerns and a mutant: a few lines patched into the
real package (a carrier, a reducer, the totals, a layout). Every mutant goes the way the sound code goes, in one of two
rooms:

- *Megatron*: the real schedule, DDP and `finalize_model_grads` on four forked gloo ranks, several micro-batches each;
- *simulated*: one process that adds up the shares of all ranks and micro-batches (totals and layouts).

`test_planted_weights.py` plants every published bug as the weights that it gives.

The model is a table with one parameter a token, which is that token's loss; so the gradient is the tokens' weights.
A mutant is *caught* when `disagreement` with the float64 oracle, the worst of the relative errors of gradient and
value, far exceeds TOLERANCE on every rank and in every mode named, for the very function, data and layout in which the
sound code stays below it. Moreover the gradient must be off by the
published factor: the least-squares ratio to the oracle's gradient, and nothing but that ratio may differ. Where the
error depends on the data there is a lower bound instead, and where the published symptom is NaN, NaN.

K micro-batches a rank,
D data-parallel and C context-parallel ranks. Some bugs leave the *logged* loss right and only the gradient wrong, or
the other way round: the comparison looks at both.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import oracle
import pytest
import torch
from published import WHERE
from ranks import run_ranks
from table_step import Batch, aggregation, dealt, one_step, start, step_samples, table_model
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, ZigzagBSHD, ZigzagResponse
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.reduction import sums as reduction
from megatron_rl_loss.step import LocalTokens, counting, layouts

TOLERANCE = oracle.EXACT
DIVISOR = 40960.0
NAN = float("nan")


# ---- the rooms


@dataclass(frozen=True)
class Outcome:
    gradient: Tensor  # of every token of the step, and of padding (last)
    value: float  # the logged loss


@dataclass(frozen=True)
class Room:
    """K micro-batches on each of D data-parallel x C context-parallel ranks."""

    C: int
    D: int
    K: int
    megatron: bool = True
    per_token: bool = False


ROOMS = {
    "cp 2 x dp 2": Room(2, 2, 3),
    "cp 2 x dp 2, per-token": Room(2, 2, 3, per_token=True),
    "cp 4": Room(4, 1, 3),
    "cp 4, 6 micro-batches": Room(4, 1, 6),
    "dp 4": Room(1, 4, 3),
    "simulated cp 2 x dp 2": Room(2, 2, 3, megatron=False),
    "simulated, 1 rank": Room(1, 1, 2, megatron=False),
    "simulated, 1 micro-batch": Room(2, 1, 1, megatron=False),
}


def binary(samples: list[oracle.Sample]) -> list[oracle.Sample]:
    """Masks of zeros and ones alone."""
    return [replace(one, mask=(one.mask > 0).float()) for one in samples]


def one_active_token() -> list[oracle.Sample]:
    """One sample for each of 6 micro-batches, one active token each, somewhere in its 8."""
    return [
        oracle.sample([float(i + t) for t in range(8)], [float(t == i % 8) for t in range(8)], f"r{i}", f"p{i % 2}")
        for i in range(6)
    ]


def phantom_batch() -> list[oracle.Sample]:
    """15 active tokens of loss 54 in all, and one masked sample: 54/15."""
    rows = [[1, 2, 3, 4], [5, 6, 2, 3, 1], [4, 4, 4, 5, 5, 5]]
    samples = [oracle.sample(row, [1] * len(row), f"r{i}", f"p{i}") for i, row in enumerate(rows)]
    return [*samples, oracle.sample([9, 9, 9], [0] * 3, "masked", "p0")]


def correct_alone(samples: list[oracle.Sample]) -> list[oracle.Sample]:
    """For a loss of correct responses: the others are masked."""
    return [replace(one, mask=one.mask * (i % 3 != 1)) for i, one in enumerate(samples)]


def rejected(samples: list[oracle.Sample]) -> list[oracle.Sample]:
    """Every fourth token of those that were active was rejected later, by its importance weight, say."""
    seen, left = 0, []
    for one in samples:
        ranks = seen + one.mask.bool().long().cumsum(0)
        left.append(replace(one, mask=one.mask * (ranks % 4 != 0)))
        seen = int(ranks[-1])
    return left


def alone(samples: list[oracle.Sample]) -> list[oracle.Sample]:
    """Every sample a rollout of its own, with an id, as `Batch` wants it."""
    return [replace(one, rollout_id=f"r{i}") for i, one in enumerate(samples)]


DATA: dict[str, Callable[[], list[oracle.Sample]]] = {
    "ragged": functools.partial(step_samples, 1),
    "ragged, NaN at masked tokens": lambda: [one.poisoned() for one in step_samples(1)],
    "ragged, 0/1 masks": lambda: binary(step_samples(1)),
    "ragged, an empty micro-batch": lambda: binary(step_samples(1)),
    "one active token a micro-batch": one_active_token,
    "ragged, correct responses alone": lambda: correct_alone(binary(step_samples(1))),
    "ragged, some tokens rejected": lambda: rejected(binary(step_samples(1))),
    "worked by hand": lambda: alone(oracle.WORKED),
    "54/15": phantom_batch,
    "rows of 8": lambda: alone(oracle.WORKED),
    "a response of 5 in 8, padded to 12": lambda: [oracle.sample([1, 2, 4, 8, 16], [1, 1, 1, 1, 0], "r", "p")],
}


def dealt_for(data: str, samples: list[oracle.Sample], dp_rank: int, room: Room) -> list[list[int]]:
    if data == "one active token a micro-batch":
        return [[i] for i in range(len(samples))][dp_rank :: room.D]
    chosen = dealt(samples, dp_rank, room.D, room.K)
    if data == "ragged, an empty micro-batch" and dp_rank == 0:
        chosen[0], chosen[-1] = chosen[0] + chosen[-1], []
    return chosen


class RowsBatch(Batch):
    """Rows of 8 positions, not packed."""

    def __init__(self, samples: list[oracle.Sample], chosen: list[int], cp_size: int) -> None:
        super().__init__(samples, chosen, cp_size)
        lengths = [len(samples[i].mask) for i in chosen]
        padding = sum(len(one.mask) for one in samples)
        self.numbers = [row[:n] + [padding] * (8 - n) for row, n in zip(self.numbers, lengths, strict=True)]
        self.samples = Samples(self.samples.loss_masks, layout=ZigzagBSHD(len(chosen), 8, lengths))


class ResponseBatch(Batch):
    """The last 5 tokens of a sample of 8, whose row is padded to 12."""

    def __init__(self, samples: list[oracle.Sample], chosen: list[int], cp_size: int) -> None:
        super().__init__(samples, chosen, cp_size)
        self.samples = Samples(self.samples.loss_masks, layout=ZigzagResponse([8], [5], padded_lengths=[12]))

    def local_numbers(self, cp_rank: int, cp_size: int) -> Tensor:
        held = oracle.response_only([8], [5], [12], cp_rank, cp_size)
        return torch.tensor([at[1] for at in held if at is not None])


BATCHES: dict[str, type[Batch]] = {"rows of 8": RowsBatch, "a response of 5 in 8, padded to 12": ResponseBatch}


def batches_of(data: str, samples: list[oracle.Sample], dp_rank: int, room: Room) -> list[Batch]:
    kind = BATCHES.get(data, Batch)
    return [kind(samples, chosen, room.C) for chosen in dealt_for(data, samples, dp_rank, room)]


def table_of(samples: list[oracle.Sample]) -> list[float]:
    return [float(loss) for one in samples for loss in one.losses] + [0.0]  # the last is padding


def through_megatron(data: str, room: Room, mode: str, units: str) -> Outcome:
    """One step of this rank through the real schedule, DDP and reduction."""
    from megatron.core import parallel_state

    samples = DATA[data]()
    model = table_model(table_of(samples), per_token=room.per_token)
    batches = batches_of(data, samples, parallel_state.get_data_parallel_rank(), room)
    divisor = DIVISOR if mode == "constant" else None
    step = aggregation(mode=mode, units=units, divisor=divisor, with_per_token_loss=True)
    gradient, logged = one_step(model, batches, step, metric=False)
    return Outcome(gradient, logged["pg_loss"])


def simulated(data: str, room: Room, mode: str, units: str) -> Outcome:
    """The shares of all ranks and micro-batches of one step, added up in this process."""
    samples = DATA[data]()
    table = torch.tensor(table_of(samples), requires_grad=True)
    batches = [batch for dp_rank in range(room.D) for batch in batches_of(data, samples, dp_rank, room)]
    step_totals = counting.reduce_step_totals([batch.samples for batch in batches])
    aggregation = resolve(mode, divisor=DIVISOR if mode == "constant" else None, units=units)  # type: ignore[arg-type]
    loss = torch.zeros(())
    for batch in batches:
        for cp_rank in range(room.C):
            reducer = reduction.reducer_of(aggregation, batch.samples.local(cp_rank, room.C), step_totals)
            loss = loss + reducer(table[batch.local_numbers(cp_rank, room.C)])
    loss.backward()
    assert table.grad is not None
    return Outcome(table.grad, float(loss.detach()))


# ---- the comparison, one for sound code and mutants


def expected_outcome(data: str, mode: str, units: str) -> Outcome:
    samples = DATA[data]()
    divisor = DIVISOR if mode == "constant" else None
    gradient = torch.cat([*oracle.step_gradient(mode, samples, divisor, units), torch.zeros(1)])
    return Outcome(gradient, float(oracle.step_loss(mode, samples, divisor, units)))


def disagreement(outcome: Outcome, data: str, mode: str, units: str) -> float:
    """The worst of the relative errors of gradient and value; infinite if one is not finite."""
    expected = expected_outcome(data, mode, units)
    gradient = float((outcome.gradient.double() - expected.gradient).abs().max() / expected.gradient.abs().max())
    scale = oracle.step_scale(mode, DATA[data](), DIVISOR if mode == "constant" else None, units)
    return oracle.worst_error(abs(outcome.value - expected.value) / scale, gradient, oracle.num_tokens(DATA[data]()))


def ratio_and_rest(gradient: Tensor, expected: Tensor) -> tuple[float, float]:
    """The least-squares factor between two gradients, and what it leaves unexplained, relative."""
    ratio = float(gradient.double() @ expected / (expected @ expected))
    rest = (gradient.double() - ratio * expected).abs().max() / (ratio * expected).abs().max()
    return ratio, float(rest)


# ---- the mutants

Plant = Callable[[pytest.MonkeyPatch], None]


def past_the_door(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether Megatron is handed what the micro-batch handed out (`tests/megatron/test_bad_input.py`)."""
    from megatron_rl_loss.megatron import launch

    patch.setattr(launch, "check_returned", lambda *_: None)


def carrier(formula: Callable[[Tensor, Any, Tensor], tuple[Any, ...]]) -> Plant:
    """Hand Megatron ``formula(share, step, local tokens)`` instead of the carrier's loss and token count."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from megatron_rl_loss.megatron import Microbatch

        sound = Microbatch.carry

        def carry(self: Any, share: Tensor, report: Any) -> tuple[Any, ...]:
            pairs = sound(self, share, report)[-1]
            return (*formula(share, self._step, self._local_active_tokens()), pairs)

        patch.setattr(Microbatch, "carry", carry)
        past_the_door(patch)

    return plant


def dp(step: Any) -> int:
    return int(step.dp_cp_size // step.cp_size)


ONE = torch.ones((), dtype=torch.int32)


def stock(patch: pytest.MonkeyPatch) -> None:
    """Megatron's own aggregation: sum and count of the tokens this rank holds of this micro-batch."""
    from megatron_rl_loss.megatron import Microbatch

    def loss(self: Any, per_token_loss: Tensor, metrics: Any = None) -> Any:
        mask = self.samples.local(self._step.cp_rank, self._step.cp_size).mask
        total, count = (per_token_loss.flatten() * mask).sum(), (mask != 0).sum().int()
        return total, count, {"pg_loss": torch.stack([total.detach(), mask.sum()])}

    patch.setattr(Microbatch, "loss", loss)
    past_the_door(patch)


#: What the tokens that a rank holds weigh, mask included.
Weigh = Callable[[Aggregation, LocalTokens, StepTotals], Tensor]


def weights(mutant: Weigh) -> Plant:
    return lambda patch: patch.setattr(reduction, "weigh", mutant)


def tokens_of(local: LocalTokens) -> float:
    """Of the micro-batch alone; an empty one counts as one token."""
    return max(float(local.samples.mask_sums.sum()), 1.0)


def own_count(aggregation: Aggregation, local: LocalTokens, _: StepTotals) -> Tensor:
    """Each micro-batch divided by its own tokens, and summed."""
    return local.mask / tokens_of(local)


def numerator_without_mask(aggregation: Aggregation, local: LocalTokens, step_totals: StepTotals) -> Tensor:
    samples = local.samples
    every_token = samples.in_buffer([torch.ones_like(mask) for mask in samples.loss_masks])
    return local.of(every_token) / step_totals.step_tokens


def multiplied_by_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduction, "_sums_of_rows", lambda table, weights: (table.float() * weights).sum(1))


def counted_by_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Samples, "mask_sums", property(lambda self: torch.tensor(self.mask_lengths, dtype=torch.float64)))


def at_least_one_token_each(patch: pytest.MonkeyPatch) -> None:
    count = vars(Samples)["mask_sums"].func
    patch.setattr(Samples, "mask_sums", property(lambda self: count(self).clip(min=1)))


def pack_as_one_sequence(patch: pytest.MonkeyPatch) -> None:
    describe = Samples.__init__

    def init(self: Samples, *args: Any, **kwargs: Any) -> None:
        describe(self, *args, **kwargs)
        self.rollout_ids = torch.full((len(self),), id(self) % 2**40)
        self.prompt_ids = None  # a pack has several

    patch.setattr(Samples, "__init__", init)


def changed_totals(change: Callable[[StepTotals, list[Samples]], StepTotals]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = counting.reduce_step_totals

        def reduce_step_totals(held: Any, **groups: Any) -> StepTotals:
            return change(sound(held, **groups), held)

        for name in ("megatron_rl_loss.step.counting", "megatron_rl_loss.megatron.launch"):
            if name in sys.modules:
                patch.setattr(sys.modules[name], "reduce_step_totals", reduce_step_totals)

    return plant


def with_rollouts(step_totals: StepTotals, number: int) -> StepTotals:
    rollouts = step_totals.rollouts
    assert rollouts.active is not None
    return replace(step_totals, rollouts=replace(rollouts, all=number, active=min(number, rollouts.active)))


def own_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by what it holds itself, and DDP takes the mean over ranks."""
    from megatron_rl_loss.megatron import launch

    sound = launch.reduce_step_totals
    patch.setattr(launch, "reduce_step_totals", lambda held, **_: sound(held))
    carrier(lambda share, step, _: (share * step.num_microbatches * step.cp_size, ONE))(patch)


def totals_of_the_rank(patch: pytest.MonkeyPatch) -> None:
    """What a rank holds itself given as the whole step, and the shares summed."""
    from megatron_rl_loss.megatron import launch

    sound = launch.reduce_step_totals
    patch.setattr(launch, "reduce_step_totals", lambda held, **_: sound(held))


def rows_cut_as_one_slot(patch: pytest.MonkeyPatch) -> None:
    """Offsets of packed data for rows: the whole buffer as one sequence."""

    def local_segments(self: ZigzagBSHD, cp_rank: int, cp_size: int) -> Any:
        return layouts.ZigzagTHD([0, self.total_tokens]).local_segments(cp_rank, cp_size)

    patch.setattr(ZigzagBSHD, "local_segments", local_segments)


def chunks_of_unpadded_length(patch: pytest.MonkeyPatch) -> None:
    init = ZigzagResponse.__init__
    patch.setattr(ZigzagResponse, "__init__", lambda self, *args, padded_lengths=None: init(self, *args))


# ---- the exhibits


@dataclass(frozen=True)
class Facts:
    """Numbers of the data and the layout, to state factors with."""

    C: int
    D: int
    K: int
    tokens: float  # sum of masks, T
    active: int
    lengths: int
    rows: int
    rollouts: int
    masked_rows: int
    empty_ranks: int  # (CP rank, micro-batch) pairs that hold no active token


def facts_of(data: str, room: Room) -> Facts:
    samples = DATA[data]()
    empty = 0
    for dp_rank in range(room.D):
        for chosen in dealt_for(data, samples, dp_rank, room):
            lengths = [len(samples[i].mask) for i in chosen]
            slots = oracle.padded_slots(lengths, [-(-n // (2 * room.C)) * 2 * room.C for n in lengths])
            for cp_rank in range(room.C):
                held = oracle.zigzag(slots, cp_rank, room.C)
                empty += not any(at is not None and float(samples[chosen[at[0]]].mask[at[1]]) for at in held)
    return Facts(
        C=room.C,
        D=room.D,
        K=room.K,
        tokens=oracle.mask_tokens(samples),
        active=sum(int((one.mask != 0).sum()) for one in samples),
        lengths=sum(len(one.mask) for one in samples),
        rows=len(samples),
        rollouts=len(oracle.units_of("sample_mean", samples)),
        masked_rows=sum(not bool(one.mask.any()) for one in samples),
        empty_ranks=empty,
    )


@dataclass(frozen=True)
class Off:
    """Data-dependent: the gradient is off by at least this much (worst relative error)."""

    at_least: float


Factor = Callable[[Facts], float]


@dataclass(frozen=True)
class Exhibit:
    row: int
    bug: str
    room: str
    plant: Plant
    expected: Factor | Off | float  # of the gradient; NAN: gradient or value is NaN
    modes: Sequence[str] = oracle.MODES
    data: str = "ragged"
    units: str = "all"
    value: float | None = None  # the wrong loss, where one was published

    @property
    def id(self) -> str:
        return f"row {self.row}, {WHERE[self.row]}: {self.bug} [{self.room}]"


#: Tokens before some were rejected.
UNCUT_TOKENS = oracle.mask_tokens(binary(step_samples(1)))

CP_DP, PER_TOKEN, SIMULATED = "cp 2 x dp 2", "cp 2 x dp 2, per-token", "simulated cp 2 x dp 2"
TOKEN = ("token_mean",)

# fmt: off
MUSEUM = [
    # -- carriers: Megatron's schedule, DDP and finalize undo less or more than the carrier thinks
    Exhibit(1, "loss x C on top of 1/(D C)", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.dp_cp_size * step.cp_size, ONE)),
            lambda f: f.C),
    Exhibit(2, "x C although gradients are summed", PER_TOKEN,
            carrier(lambda share, step, n: (share * step.totals.step_active_tokens * step.cp_size, n)), lambda f: f.C),
    Exhibit(10, "an empty bin counted as one token", PER_TOKEN,
            carrier(lambda share, step, n: (share * step.totals.step_active_tokens, n.clamp(min=1))),
            lambda f: f.active / (f.active + f.empty_ranks), data="ragged, an empty micro-batch"),
    Exhibit(15, "backward before /K", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches**2 * step.dp_cp_size, ONE)), lambda f: f.K),
    Exhibit(16, "leftover /C", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * dp(step), ONE)), lambda f: 1 / f.C),
    Exhibit(17, "denominator N D for N/D", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.cp_size / dp(step), ONE)),
            lambda f: 1 / f.D**2),
    Exhibit(18, "sum-norm without x D", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.cp_size, ONE)), lambda f: 1 / f.D,
            ("constant",)),
    Exhibit(18, "sum-norm without /N", CP_DP,
            changed_totals(lambda step_totals, _: with_rollouts(step_totals, 1)), lambda f: f.rollouts,
            ("constant",)),
    Exhibit(19, "a 2-tuple under per-token loss: no token is counted", PER_TOKEN,
            carrier(lambda share, step, _: (share * step.totals.step_active_tokens,)),
            lambda f: f.active * f.C / f.K),
    Exhibit(25, "corrected by D C in a 2-tuple, which has x C already", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.dp_cp_size,)), lambda f: f.C),
    Exhibit(36, "the schedule's /K not undone", CP_DP,
            carrier(lambda share, step, _: (share * step.dp_cp_size, ONE)), lambda f: 1 / f.K),
    Exhibit(38, "rank-local denominator", "dp 4", own_rank_alone, Off(0.1), TOKEN),
    # -- Megatron's stock aggregation itself
    Exhibit(3, "stock 3-tuple: sum over c of (s_c/n_c)/C", CP_DP, stock, Off(0.1), TOKEN,
            "ragged, 0/1 masks"),
    Exhibit(3, "stock 3-tuple, one active token a micro-batch", CP_DP, stock,
            lambda f: 1 / f.C, TOKEN, "one active token a micro-batch"),
    Exhibit(3, "stock 3-tuple, one active token a micro-batch", "cp 4, 6 micro-batches",
            stock, lambda f: 1 / f.C, TOKEN, "one active token a micro-batch"),
    Exhibit(9, "stock 3-tuple without CP: mean of micro-batch means", "dp 4", stock, Off(0.1),
            TOKEN, "ragged, 0/1 masks"),
    # -- weights and reducers
    Exhibit(22, "x m for where(m): NaN at masked tokens", CP_DP, multiplied_by_mask, NAN,
            data="ragged, NaN at masked tokens"),
    Exhibit(37, "token mean with an unmasked numerator", "simulated, 1 rank",
            weights(numerator_without_mask),
            Off(0.1), TOKEN, "worked by hand", value=3.944),
    # -- totals and descriptions
    Exhibit(40, "tokens counted by length, ignoring the mask", SIMULATED, counted_by_length,
            lambda f: f.tokens / f.lengths, TOKEN),
    Exhibit(42, "clamp(M_i, 1): phantom tokens", "simulated, 1 rank", at_least_one_token_each,
            lambda f: f.tokens / (f.tokens + f.masked_rows), TOKEN, "54/15", value=54 / 16),
    Exhibit(42, "clamp(M_i, 1): phantom tokens", CP_DP, at_least_one_token_each,
            lambda f: f.tokens / (f.tokens + f.masked_rows), TOKEN, "ragged, 0/1 masks"),
    Exhibit(45, "rows counted, not rollouts", SIMULATED,
            changed_totals(lambda t, microbatches: with_rollouts(t, sum(map(len, microbatches)))),
            lambda f: f.rollouts / f.rows, ("sample_mean", "constant")),
    Exhibit(46, "a packed row treated as one sequence", SIMULATED, pack_as_one_sequence, Off(0.1),
            ("sample_mean", "constant")),
    # -- layouts
    Exhibit(44, "rows under CP cut as packed data, silently", "simulated, 1 micro-batch",
            rows_cut_as_one_slot, Off(0.5), TOKEN, "rows of 8"),
    Exhibit(44, "chunks of the unpadded length, silently", "simulated, 1 micro-batch",
            chunks_of_unpadded_length, Off(0.5), TOKEN, "a response of 5 in 8, padded to 12"),
    # -- read in other projects, and habits
    Exhibit(52, "tokens of all mini-batches / D on a 2-tuple, without x K", CP_DP,
            carrier(lambda share, step, _: (share * dp(step),)), lambda f: 1 / f.K, TOKEN),
    Exhibit(53, "the micro-batch's own count of correct tokens", CP_DP,
            weights(own_count), Off(0.1), TOKEN, "ragged, correct responses alone"),
    Exhibit(56, "mask cut after the tokens were counted", CP_DP,
            changed_totals(lambda t, _: replace(t, step_tokens=UNCUT_TOKENS)), lambda f: f.tokens / UNCUT_TOKENS,
            TOKEN, "ragged, some tokens rejected"),
    Exhibit(57, "the returned loss divided by K once more", CP_DP,
            carrier(lambda share, step, _: (share * step.num_shares / step.num_microbatches, ONE)), lambda f: 1 / f.K),
    Exhibit(57, "the count dropped from the tuple", CP_DP,
            carrier(lambda share, step, _: (share * step.num_shares,)), lambda f: f.C),
    Exhibit(57, "the count dropped from the tuple under per-token loss", PER_TOKEN,
            carrier(lambda share, step, _: (share * step.totals.step_active_tokens,)),
            lambda f: f.active * f.C / f.K),
    Exhibit(58, "totals of the rank given as the step's", "dp 4", totals_of_the_rank, Off(0.5),
            ("token_mean", "sample_mean", "prompt_mean", "constant")),
    # -- the false alarm: the "fix" is the bug
    Exhibit(0, "token count summed over D C, where CP ranks hold full masks", CP_DP,
            changed_totals(lambda t, _: replace(t, step_tokens=2 * t.step_tokens)), lambda f: 1 / f.C, TOKEN),
]
# fmt: on

# ---- visits


def in_megatron(world: tuple[int, int], numbers: list[int]) -> dict[int, list[Outcome]]:
    """On one of four ranks: each exhibit's sound and mutant outcomes, mode by mode."""
    cp_size, _ = world
    start(cp=cp_size)
    return {number: visited(MUSEUM[number], through_megatron) for number in numbers}


_SOUND: dict[tuple[str, Room, str, str], Outcome] = {}


def visited(exhibit: Exhibit, run: Callable[[str, Room, str, str], Outcome]) -> list[Outcome]:
    """Sound outcomes of the exhibit's modes, then the mutant's."""
    room = ROOMS[exhibit.room]
    # Many exhibits share data and layout: the sound code need not go there again.
    for mode in exhibit.modes:
        if (exhibit.data, room, mode, exhibit.units) not in _SOUND:
            _SOUND[exhibit.data, room, mode, exhibit.units] = run(exhibit.data, room, mode, exhibit.units)
    sound = [_SOUND[exhibit.data, room, mode, exhibit.units] for mode in exhibit.modes]
    with pytest.MonkeyPatch.context() as patch:
        exhibit.plant(patch)
        return sound + [run(exhibit.data, room, mode, exhibit.units) for mode in exhibit.modes]


@functools.cache
def megatron_visits(cp_size: int, dp_size: int) -> list[dict[int, list[Outcome]]]:
    """By rank; one launch for all exhibits of a layout."""
    numbers = [
        number
        for number, exhibit in enumerate(MUSEUM)
        if (room := ROOMS[exhibit.room]).megatron and (cp_size, dp_size) == (room.C, room.D)
    ]
    return run_ranks(cp_size * dp_size, functools.partial(in_megatron, (cp_size, dp_size), numbers))


def outcomes(number: int) -> tuple[list[list[Outcome]], list[list[Outcome]]]:
    """Sound and mutant outcomes of an exhibit: by rank, then by mode."""
    exhibit = MUSEUM[number]
    room = ROOMS[exhibit.room]
    if room.megatron:
        by_rank = [rank[number] for rank in megatron_visits(room.C, room.D)]
    else:
        by_rank = [visited(exhibit, simulated)]
    modes = len(exhibit.modes)
    return [rank[:modes] for rank in by_rank], [rank[modes:] for rank in by_rank]


PARAMETERS = [
    pytest.param(number, id=exhibit.id, marks=pytest.mark.slow if ROOMS[exhibit.room].megatron else ())
    for number, exhibit in enumerate(MUSEUM)
]


@pytest.mark.parametrize("number", PARAMETERS)
def test_the_mutant_is_caught_and_off_by_the_published_factor(number: int) -> None:
    """The sound code passes the very comparison that the mutant fails."""
    exhibit = MUSEUM[number]
    facts = facts_of(exhibit.data, ROOMS[exhibit.room])
    sound, mutants = outcomes(number)
    for rank in sound:
        for mode, outcome in zip(exhibit.modes, rank, strict=True):
            assert disagreement(outcome, exhibit.data, mode, exhibit.units) < TOLERANCE, mode
    for rank in mutants:
        for mode, outcome in zip(exhibit.modes, rank, strict=True):
            error = disagreement(outcome, exhibit.data, mode, exhibit.units)
            assert error > 1000 * TOLERANCE, f"{mode}: the comparison does not see this bug"
            expected = expected_outcome(exhibit.data, mode, exhibit.units)
            if isinstance(exhibit.expected, Off):
                off = (outcome.gradient.double() - expected.gradient).abs().max() / expected.gradient.abs().max()
                assert off > exhibit.expected.at_least, mode
            elif callable(exhibit.expected):
                ratio, rest = ratio_and_rest(outcome.gradient, expected.gradient)
                assert ratio == pytest.approx(exhibit.expected(facts), rel=2 * TOLERANCE), mode
                assert rest < 2 * TOLERANCE, f"{mode}: more than a factor"
            else:
                assert math.isnan(outcome.value) or bool(outcome.gradient.isnan().any()), mode
            if exhibit.value is not None:
                assert outcome.value == pytest.approx(exhibit.value, abs=1e-3)


def test_every_exhibit_is_another() -> None:
    assert {exhibit.row for exhibit in MUSEUM} <= set(WHERE)
    ids = [exhibit.id for exhibit in MUSEUM]
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
def test_stock_megatron_logs_the_right_loss_over_a_wrong_gradient() -> None:
    """Why rows 3 and 9 went unseen for long: its logged loss is sum s / sum n."""
    number = next(n for n, one in enumerate(MUSEUM) if one.row == 3)
    data = MUSEUM[number].data
    right = expected_outcome(data, "token_mean", "all")
    error = oracle.sum_error(oracle.num_tokens(DATA[data]())) * oracle.step_scale("token_mean", DATA[data]())
    for rank in outcomes(number)[1]:
        assert rank[0].value == pytest.approx(right.value, abs=error)
        assert not torch.allclose(rank[0].gradient.double(), right.gradient, rtol=0.1)
