"""Negative controls: published bugs that are no weights alone (carriers, totals) must turn the checks red.

An exhibit names a row of `published.WHERE`, a layout, the modes it concerns and a mutant: a few lines patched into the
real package. Every mutant goes the way the sound code goes: the real schedule, DDP and `finalize_model_grads` on four
forked gloo ranks, several micro-batches each. `test_audit_names.py` has every published bug as its weights.

The model is a table with one parameter a token, which is that token's loss; so the gradient is the tokens' weights.
A mutant is *caught* when `disagreement` with the float64 oracle, the worst of the relative errors of gradient and
value, far exceeds TOLERANCE on every rank and in every mode named, for the very function, data and layout in which the
sound code stays below it. Moreover the gradient must be off by the published factor: the least-squares ratio to the
oracle's gradient, and nothing but that ratio may differ. Where the error depends on the data there is a lower bound
instead, and where the published symptom is NaN, NaN.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from published import WHERE
from ranks import run_ranks
from step_samples import dealt, step_samples
from table_step import Batch, aggregation, one_step, start, table_model
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.reduction import sums as reduction

pytestmark = pytest.mark.slow

TOLERANCE = oracle.EXACT
DIVISOR = 40960.0
NAN = float("nan")


class Outcome(NamedTuple):
    gradient: Tensor  # of every token of the step, and of padding (last)
    value: float  # the logged loss


class Room(NamedTuple):
    """K micro-batches on each of D data-parallel x C context-parallel ranks."""

    C: int
    D: int
    K: int = 3
    per_token: bool = False


CP_DP, PER_TOKEN, DP = Room(2, 2), Room(2, 2, per_token=True), Room(1, 4)


def binary(samples: list[oracle.Sample]) -> list[oracle.Sample]:
    """Masks of zeros and ones alone."""
    return [replace(one, mask=(one.mask > 0).float()) for one in samples]


def one_active_token() -> list[oracle.Sample]:
    """One sample for each of 6 micro-batches, one active token each, somewhere in its 8."""
    return [
        oracle.sample([float(i + t) for t in range(8)], [float(t == i % 8) for t in range(8)], f"r{i}", f"p{i % 2}")
        for i in range(6)
    ]


DATA: dict[str, Callable[[], list[oracle.Sample]]] = {
    "ragged": functools.partial(step_samples, 1),
    "NaN at masked tokens": lambda: [one.poisoned() for one in step_samples(1)],
    "0/1 masks": lambda: binary(step_samples(1)),
    "an empty micro-batch": lambda: binary(step_samples(1)),
    "one active token a micro-batch": one_active_token,
}


def dealt_for(data: str, samples: list[oracle.Sample], dp_rank: int, room: Room) -> list[list[int]]:
    if data == "one active token a micro-batch":
        return [[i] for i in range(len(samples))][dp_rank :: room.D]
    chosen = dealt(samples, dp_rank, room.D, room.K)
    if data == "an empty micro-batch" and dp_rank == 0:
        chosen[0], chosen[-1] = chosen[0] + chosen[-1], []
    return chosen


@functools.cache
def expected_outcome(data: str, mode: str) -> Outcome:
    samples = DATA[data]()
    divisor = DIVISOR if mode == "constant" else None
    gradient = torch.cat([*oracle.step_gradient(mode, samples, divisor, "all"), torch.zeros(1)])
    return Outcome(gradient, float(oracle.step_loss(mode, samples, divisor, "all")))


def disagreement(outcome: Outcome, data: str, mode: str) -> float:
    """The worst of the relative errors of gradient and value; infinite if one is not finite."""
    expected = expected_outcome(data, mode)
    gradient = float((outcome.gradient.double() - expected.gradient).abs().max() / expected.gradient.abs().max())
    scale = oracle.step_scale(mode, DATA[data](), DIVISOR if mode == "constant" else None, "all")
    return oracle.worst_error(abs(outcome.value - expected.value) / scale, gradient, oracle.num_tokens(DATA[data]()))


def ratio_and_rest(gradient: Tensor, expected: Tensor) -> tuple[float, float]:
    """The least-squares factor between two gradients, and what it leaves unexplained, relative."""
    ratio = float(gradient.double() @ expected / (expected @ expected))
    rest = (gradient.double() - ratio * expected).abs().max() / (ratio * expected).abs().max()
    return ratio, float(rest)


# ---- the mutants

Plant = Callable[[pytest.MonkeyPatch], None]


def past_the_door(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether Megatron is handed what the micro-batch handed out (`tests/megatron/test_handover.py`)."""
    from megatron_rl_loss.megatron import launch

    patch.setattr(launch, "check_returned", lambda *_: None)


def carrier(formula: Callable[[Tensor, Any, Tensor], tuple[Any, ...]]) -> Plant:
    """Hand Megatron ``formula(share, step, local tokens)`` instead of the carrier's loss and token count."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from megatron_rl_loss.megatron import Microbatch

        sound = Microbatch.carry

        def carry(self: Any, share: Tensor, report: Any, **form: Any) -> tuple[Any, ...]:
            sound(self, share, report, **form)
            return (*formula(share, self._plan, self._local_active_tokens()), report)

        patch.setattr(Microbatch, "carry", carry)
        past_the_door(patch)

    return plant


def dp(plan: Any) -> int:
    return int(plan.dp_size)


ONE = torch.ones((), dtype=torch.int32)


def stock(patch: pytest.MonkeyPatch) -> None:
    """Megatron's own aggregation: sum and count of the tokens this rank holds of this micro-batch."""
    from megatron_rl_loss.megatron import Microbatch

    def loss(self: Any, per_token_loss: Tensor, metrics: Any = None) -> Any:
        mask = self.samples.local(self._plan.cp_rank, self._plan.cp_size).mask
        total, count = (per_token_loss.flatten() * mask).sum(), (mask != 0).sum().int()
        return total, count, {"pg_loss": torch.stack([total.detach(), mask.sum()])}

    patch.setattr(Microbatch, "loss", loss)
    past_the_door(patch)


def multiplied_by_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reduction, "_sums_of_rows", lambda rows, weights: (torch.stack(rows).float() * weights).sum(1))


def at_least_one_token_each(patch: pytest.MonkeyPatch) -> None:
    count = vars(Samples)["mask_sums"].func
    patch.setattr(Samples, "mask_sums", property(lambda self: count(self).clip(min=1)))


def changed_totals(change: Callable[[StepTotals], StepTotals]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        planning = sys.modules["megatron_rl_loss.plan.plan"]
        sound = planning.reduce_step_totals
        patch.setattr(planning, "reduce_step_totals", lambda held, **groups: change(sound(held, **groups)))

    return plant


def one_rollout(totals: StepTotals) -> StepTotals:
    return replace(totals, rollouts=replace(totals.rollouts, all=1, active=1))


def totals_of_the_rank(patch: pytest.MonkeyPatch) -> None:
    """What a rank holds itself given as the whole step, and the shares summed."""
    planning = sys.modules["megatron_rl_loss.plan.plan"]
    sound = planning.reduce_step_totals
    patch.setattr(planning, "reduce_step_totals", lambda held, **_: sound(held))


def own_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by what it holds itself, and DDP takes the mean over ranks."""
    totals_of_the_rank(patch)
    carrier(lambda share, step, _: (share * step.num_microbatches * step.cp_size, ONE))(patch)


# ---- the exhibits


class Off(NamedTuple):
    """Data-dependent: the gradient is off by at least this much (worst relative error)."""

    at_least: float


@dataclass(frozen=True)
class Exhibit:
    row: int
    bug: str
    room: Room
    plant: Plant
    expected: Off | float  # of the gradient, a factor; NAN: gradient or value is NaN
    modes: Sequence[str] = oracle.MODES
    data: str = "ragged"

    @property
    def id(self) -> str:
        return f"row {self.row}, {WHERE[self.row]}: {self.bug}, cp {self.room.C}"


C, D, K = CP_DP[:3]
RAGGED, BINARY = step_samples(1), binary(step_samples(1))
ACTIVE = oracle.mask_tokens(BINARY)
ROLLOUTS = len(oracle.units_of("sample_mean", RAGGED))
MASKED = sum(not one.mask.any() for one in RAGGED)
EMPTY = 4  # (CP rank, micro-batch) pairs that hold no active token, with an empty micro-batch
TOKEN = ("token_mean",)
ONE_TOKEN = "one active token a micro-batch"

# fmt: off
MUSEUM = [
    # -- carriers: Megatron's schedule, DDP and finalize undo less or more than the carrier thinks
    Exhibit(1, "loss x C on top of 1/(D C)", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.dp_size * step.cp_size**2, ONE)), C),
    Exhibit(2, "x C although gradients are summed", PER_TOKEN,
            carrier(lambda share, step, n: (share * step.totals.step_active_tokens * step.cp_size, n)), C),
    Exhibit(10, "an empty bin counted as one token", PER_TOKEN,
            carrier(lambda share, step, n: (share * step.totals.step_active_tokens, n.clamp(min=1))),
            ACTIVE / (ACTIVE + EMPTY), data="an empty micro-batch"),
    Exhibit(15, "backward before /K", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches**2 * step.dp_size * step.cp_size, ONE)), K),
    Exhibit(16, "leftover /C", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * dp(step), ONE)), 1 / C),
    Exhibit(17, "denominator N D for N/D", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.cp_size / dp(step), ONE)), 1 / D**2),
    Exhibit(18, "sum-norm without x D", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.cp_size, ONE)), 1 / D,
            ("constant",)),
    Exhibit(19, "a 2-tuple under per-token loss: no token is counted", PER_TOKEN,
            carrier(lambda share, step, _: (share * step.totals.step_active_tokens,)), ACTIVE * C / K),
    Exhibit(25, "corrected by D C in a 2-tuple, which has x C already", CP_DP,
            carrier(lambda share, step, _: (share * step.num_microbatches * step.dp_size * step.cp_size,)), C),
    Exhibit(36, "the schedule's /K not undone", CP_DP,
            carrier(lambda share, step, _: (share * step.dp_size * step.cp_size, ONE)), 1 / K),
    Exhibit(52, "tokens of all mini-batches / D on a 2-tuple, without x K", CP_DP,
            carrier(lambda share, step, _: (share * dp(step),)), 1 / K, TOKEN),
    # -- Megatron's stock aggregation itself
    Exhibit(3, "stock 3-tuple: sum over c of (s_c/n_c)/C", CP_DP, stock, Off(0.1), TOKEN, "0/1 masks"),
    Exhibit(3, "stock 3-tuple, one active token a micro-batch", CP_DP, stock, 1 / C, TOKEN, ONE_TOKEN),
    Exhibit(9, "stock 3-tuple without CP: mean of micro-batch means", DP, stock, Off(0.1), TOKEN, "0/1 masks"),
    # -- sums and totals
    Exhibit(22, "x m for where(m): NaN at masked tokens", CP_DP, multiplied_by_mask, NAN, data="NaN at masked tokens"),
    Exhibit(42, "clamp(M_i, 1): phantom tokens", CP_DP, at_least_one_token_each,
            ACTIVE / (ACTIVE + MASKED), TOKEN, "0/1 masks"),
    Exhibit(18, "sum-norm without /N", CP_DP, changed_totals(one_rollout), ROLLOUTS, ("constant",)),
    Exhibit(38, "rank-local denominator", DP, own_rank_alone, Off(0.1), TOKEN),
    Exhibit(58, "totals of the rank given as the step's", DP, totals_of_the_rank, Off(0.5),
            ("token_mean", "sample_mean", "prompt_mean", "constant")),
    # -- the false alarm: the "fix" is the bug
    Exhibit(0, "token count summed over D C, where CP ranks hold full masks", CP_DP,
            changed_totals(lambda totals: replace(totals, step_tokens=2 * totals.step_tokens)), 1 / C, TOKEN),
]
# fmt: on

# ---- visits


def outcome_of(data: str, room: Room, mode: str) -> Outcome:
    """One step of this rank through the real schedule, DDP and reduction."""
    from megatron.core import parallel_state

    samples = DATA[data]()
    table = [float(loss) for one in samples for loss in one.losses] + [0.0]  # the last is padding
    model = table_model(table, per_token=room.per_token)
    hands = dealt_for(data, samples, parallel_state.get_data_parallel_rank(), room)
    divisor = DIVISOR if mode == "constant" else None
    step = aggregation(mode=mode, units="all", divisor=divisor, with_per_token_loss=True)
    gradient, logged = one_step(model, [Batch(samples, chosen, room.C) for chosen in hands], step, metric=False)
    return Outcome(gradient, logged["pg_loss"])


def visited(world: tuple[int, int]) -> dict[str, list[list[Outcome]]]:
    """On one of four ranks: of each exhibit of that layout sound and mutant outcomes, mode by mode."""
    import megatron_rl_loss.megatron.launch  # noqa: F401  # mutants patch it

    start(cp=world[0])
    sound = functools.cache(outcome_of)  # many exhibits share data and layout
    found = {}
    for exhibit in MUSEUM:
        if world == (exhibit.room.C, exhibit.room.D):
            steps = [(exhibit.data, exhibit.room, mode) for mode in exhibit.modes]
            before = [sound(*step) for step in steps]
            with pytest.MonkeyPatch.context() as patch:
                exhibit.plant(patch)
                found[exhibit.id] = [before, [outcome_of(*step) for step in steps]]
    return found


@functools.cache
def visits(world: tuple[int, int]) -> list[dict[str, list[list[Outcome]]]]:
    """By rank; one launch for all exhibits of a layout."""
    return run_ranks(4, visited, world)


def outcomes(exhibit: Exhibit) -> list[list[list[Outcome]]]:
    """By rank: sound and mutant outcomes, by mode."""
    return [rank[exhibit.id] for rank in visits((exhibit.room.C, exhibit.room.D))]


@pytest.mark.parametrize("exhibit", [pytest.param(exhibit, id=exhibit.id) for exhibit in MUSEUM])
def test_the_mutant_is_caught_and_off_by_the_published_factor(exhibit: Exhibit) -> None:
    """The sound code passes the very comparison that the mutant fails."""
    for sound, mutants in outcomes(exhibit):
        for mode, before, outcome in zip(exhibit.modes, sound, mutants, strict=True):
            assert disagreement(before, exhibit.data, mode) < TOLERANCE, mode
            error = disagreement(outcome, exhibit.data, mode)
            assert error > 1000 * TOLERANCE, f"{mode}: the comparison does not see this bug"
            expected = expected_outcome(exhibit.data, mode)
            if isinstance(exhibit.expected, Off):
                off = (outcome.gradient.double() - expected.gradient).abs().max() / expected.gradient.abs().max()
                assert off > exhibit.expected.at_least, mode
            elif not math.isnan(exhibit.expected):
                ratio, rest = ratio_and_rest(outcome.gradient, expected.gradient)
                assert ratio == pytest.approx(exhibit.expected, rel=2 * TOLERANCE), mode
                assert rest < 2 * TOLERANCE, f"{mode}: more than a factor"
            else:
                assert math.isnan(outcome.value) or bool(outcome.gradient.isnan().any()), mode


def test_stock_megatron_logs_the_right_loss_over_a_wrong_gradient() -> None:
    """Why rows 3 and 9 went unseen for long: its logged loss is sum s / sum n."""
    exhibit = next(one for one in MUSEUM if one.row == 3)
    samples = DATA[exhibit.data]()
    right = expected_outcome(exhibit.data, "token_mean")
    error = oracle.sum_error(oracle.num_tokens(samples)) * oracle.step_scale("token_mean", samples)
    for _, (mutant,) in outcomes(exhibit):
        assert mutant.value == pytest.approx(right.value, abs=error)
        assert not torch.allclose(mutant.gradient.double(), right.gradient, rtol=0.1)
