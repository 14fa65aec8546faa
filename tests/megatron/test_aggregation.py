"""The adapter against the real Megatron-Core: DDP, schedules, `finalize_model_grads`, process groups, on gloo ranks.

The model is a table with one parameter for every token of the step, which is that token's loss. So the gradient after
Megatron's whole way (schedule scaling, DDP, reduction, per-token division) is the token's weight, to be compared with
the float64 oracle. A launch takes every mode and carrier, losses of six terms with modes, masks and coefficients of
their own, and metrics of every kind, as `train_step` reduces them. All layouts, where a loss is one policy loss, and
what an exact comparison sees: test_worlds.py. Modes over sums of one's own: examples/test_paper_modes.py.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import oracle
import pytest
import torch
from logged_means import logged_means
from ranks import run_ranks
from step_samples import DIVISOR, dealt, step_samples
from table_step import Batch, aggregation, relative_error, run_step, start
from table_step import table_model as model_of
from torch import Tensor

from megatron_rl_loss import Metric, Term

slow = pytest.mark.slow
SAMPLES, CP = step_samples(seed=1), 2
TABLE = [float(torch.tensor(loss)) for sample in SAMPLES for loss in sample.losses.tolist()]


# ---- layouts


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step on CP 2 x DP 2."""

    gathered: bool = False
    extra_microbatch: bool = False  # an empty one, on the first DP rank alone
    ddp_options: dict[str, Any] = field(default_factory=dict)

    def hands(self, dp_rank: int, dp_size: int) -> list[list[int]]:
        hands = dealt(SAMPLES, dp_rank, dp_size, 2)
        return [*hands, []] if self.extra_microbatch and dp_rank == 0 else hands


QUICK = "cut tokens"
CASES = {
    QUICK: Case(),
    "gathered, an empty micro-batch more on one DP rank, overlap": Case(
        gathered=True, extra_microbatch=True, ddp_options={"overlap_grad_reduce": True}
    ),
}


# ---- what is asked of a step

#: name: values, mode (None: the policy loss's, or what the launch declared), coefficient, mask.
TERMS: dict[str, tuple[Callable[[Tensor], Tensor], str | None, float, str | None]] = {
    "pg": (lambda x: x, None, 1.0, None),
    "kl": (lambda x: x * x / 2, "token_mean", 0.05, None),
    "entropy": (torch.sin, "prompt_mean", -0.3, None),
    "value": (lambda x: (x - 0.5) ** 2, "constant", 0.7, None),
    "nll": (lambda x: x**3 / 9, "token_mean", 0.2, "correct"),
    "declared": (torch.cos, None, 0.4, "correct"),
}
DECLARED = {"declared": "prompt_mean"}
ALONE = {"pg_loss": TERMS["pg"]}
#: The NLL's mask: every third sample, without its first token.
CORRECT = [
    sample.mask * (i % 3 == 0) * (torch.arange(len(sample.mask)) > 0 if len(sample.mask) > 1 else 1)
    for i, sample in enumerate(SAMPLES)
]
MODE_OF = {"samples": "sample_mean", "tokens": "token_mean", "prompts": "prompt_mean", "none": "token_sum"}
KINDS = ("mean", "min", "max", "variance", "ess")
METRICS = {
    f"{over}, {kind}, {mask}": (over, kind, mask)
    for over, kind, mask in itertools.product(MODE_OF, KINDS, (None, "correct"))
}


def seen(losses: Tensor) -> Tensor:
    """A metric's values."""
    return losses.cos() + 0.25 * losses + 1


@dataclass(frozen=True)
class Ask:
    mode: str
    units: Any
    per_token: bool
    several: bool  # terms

    @property
    def terms(self) -> dict[str, Any]:
        return TERMS if self.several else ALONE


ASKS = [
    Ask(mode, units, per_token=i % 2 == 1, several=i // 2 % 2 == 1) for i, (mode, units) in enumerate(oracle.COUNTINGS)
]


def divisor_of(mode: str) -> float | None:
    return oracle.divisor_of(mode, DIVISOR)


# ---- on a rank


def step_of(case: Case, ask: Ask, state: Any) -> tuple[Tensor, dict[str, float]]:
    """The reduced gradient, and what `train_step` would log."""
    model = model_of([*TABLE, float("nan")], per_token=ask.per_token, **case.ddp_options)
    hands = case.hands(state.get_data_parallel_rank(), state.get_data_parallel_world_size())
    further: Any = {"term_masks": {"correct": CORRECT}}
    batches = [Batch(SAMPLES, hand, CP, case.gathered, **further) for hand in hands]

    def loss(microbatch: Any, losses: Tensor) -> Any:
        terms = {
            name: Term(of(losses)[None], mode, coef=coef, mask=mask, divisor=divisor_of(mode or ""))
            for name, (of, mode, coef, mask) in TERMS.items()
        }
        metrics: dict[str, Any] = {
            name: Metric(seen(losses)[None], over, kind=kind, mask=mask)  # type: ignore[arg-type]
            for name, (over, kind, mask) in METRICS.items()
        }
        return microbatch.loss(terms if ask.several else losses[None], {**metrics, "plain": seen(losses)[None]})

    asked = {"mode": ask.mode, "units": ask.units, "divisor": divisor_of(ask.mode)}
    whole = aggregation(
        terms=DECLARED if ask.several else None, term_masks=["correct"], with_per_token_loss=True, **asked
    )
    logged = logged_means(run_step(model, batches, loss, whole.wrap_schedule))
    return model.module.losses.main_grad.clone().cpu(), logged


def steps_on(name: str) -> list[tuple[Tensor, dict[str, float]]]:
    case = CASES[name]
    state = start(cp=CP)
    return [step_of(case, ask, state) for ask in ASKS]


# ---- the comparison

Numbers = dict[str, tuple[float, float]]  # by name, value and scale: what its rounding errors are relative to


def loss_by(mode: str, samples: list[oracle.Sample], units: str) -> Tensor:
    return oracle.step_loss(mode, samples, divisor_of(mode), units)


def expected_loss(ask: Ask) -> tuple[Tensor, Numbers]:
    """Gradient, and the loss and its terms, in float64."""
    leaf = torch.tensor(TABLE, dtype=torch.float64, requires_grad=True)
    parts = leaf.split([len(sample.mask) for sample in SAMPLES])
    numbers, loss, scale = {}, torch.zeros((), dtype=torch.float64), 0.0
    for name, (of, own, coef, mask) in ask.terms.items():
        mode = own or DECLARED.get(name, ask.mode)
        term_samples = [
            replace(sample, losses=of(part), mask=CORRECT[i] if mask else sample.mask)
            for i, (sample, part) in enumerate(zip(SAMPLES, parts, strict=True))
        ]
        term = loss_by(mode, term_samples, ask.units)
        absolute = loss_by(
            mode, [replace(sample, losses=sample.losses.detach().abs()) for sample in term_samples], ask.units
        )
        loss, scale = loss + coef * term, scale + abs(coef) * float(absolute)
        numbers[name] = float(term.detach()), float(absolute)
    if ask.several:
        numbers["loss"] = float(loss.detach()), scale
    return torch.autograd.grad(loss, leaf)[0], numbers


@functools.cache
def expected_metrics() -> Numbers:
    """Means over active units, however the loss counts."""
    values = seen(torch.tensor(TABLE, dtype=torch.float64)).split([len(sample.mask) for sample in SAMPLES])
    expected = {}
    for name, (over, kind, mask) in METRICS.items():
        masks = [CORRECT[i] if mask else sample.mask for i, sample in enumerate(SAMPLES)]
        weight, first, second = (
            float(loss_by(
                MODE_OF[over],
                [replace(sample, losses=x**power, mask=m) for sample, x, m in zip(SAMPLES, values, masks, strict=True)],
                "active",
            ))
            for power in range(3)
        )  # fmt: skip
        active = torch.cat([loss[m != 0] for loss, m in zip(values, masks, strict=True)])
        expected[name] = {
            "mean": (first, abs(first)),
            "min": (float(active.min()), 1.0),
            "max": (float(active.max()), 1.0),
            "variance": (second / weight - (first / weight) ** 2, second / weight),
            "ess": (first**2 / weight / second, 1.0),
        }[kind]
    return expected | {"plain": expected["samples, mean, None"]}


@pytest.mark.gpus
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == QUICK else slow) for name in CASES])
def test_gradient_loss_and_metrics_equal_the_oracle(name: str, record_property: Callable[[str, Any], None]) -> None:
    worst = 0.0
    moment_error = 4 * oracle.sum_error(oracle.num_tokens(SAMPLES))  # moments are float32 sums, two are subtracted
    for rank_steps in run_ranks(4, steps_on, name):
        for ask, (gradient, logged) in zip(ASKS, rank_steps, strict=True):
            right, numbers = expected_loss(ask)
            numbers |= expected_metrics()
            # Values are float32 functions of the table, their gradients a product or two more, and six are added up.
            worst = oracle.worst_of(worst, relative_error(gradient[:-1], right) / (3 if ask.several else 1))
            assert ask.several or gradient[-1] == 0, "padding has a gradient"
            assert logged.keys() == numbers.keys()
            assert next(iter(logged)) == ("loss" if ask.several else "pg_loss")
            for number, (value, scale) in numbers.items():
                assert abs(logged[number] - value) < moment_error * scale, (ask, number)
    record_property("aggregation_error", worst)
    assert worst < oracle.EXACT


# ---- metrics that come and go

MASKS = (None, "correct")


def steps_with(of_step: Callable[[int, int], list[str]], always: bool, state: Any) -> list[dict[str, float]]:
    """Four steps on dp 2 x cp 2: all ranks have tokens, DP rank 1 has none, nobody has any of a further mask, and DP
    rank 0 alone has some. `of_step`: names of metrics by step and DP rank; left out where a micro-batch has no token
    of theirs, unless `always`.
    """
    dp_rank = state.get_data_parallel_rank()
    wrap, logged = aggregation(mode="token_mean", term_masks=["correct"]).wrap_schedule, []
    for number in range(4):
        samples, batches = step_samples(seed=number), []
        for chosen in dealt(samples, dp_rank, 2, 3):
            for i in chosen if number == 1 and dp_rank else []:
                samples[i].mask.zero_()
            some = number < 2 or (number == 3 and dp_rank == 0)
            correct = [sample.mask * some for sample in samples]
            batches.append(Batch(samples, chosen, 2, term_masks={"correct": correct}))

        def loss(microbatch: Any, losses: Tensor, number: int = number) -> Any:
            metrics = {
                "twice": Metric(2 * losses),
                "most": Metric(losses, "tokens", kind="max"),
                "spread": Metric(losses, "tokens", kind="variance"),
                "of correct": Metric(losses, "none", mask="correct"),
            }
            has = {mask: bool(microbatch.tokens_of(mask).num_active) for mask in MASKS}
            names = [name for name in of_step(number, dp_rank) if always or has[metrics[name].mask]]
            return microbatch.loss(losses, {name: metrics[name] for name in names})

        model = model_of([math.sin(i) for i in range(1 + sum(len(sample.mask) for sample in samples))])
        logged.append(logged_means(run_step(model, batches, loss, wrap)))
    return logged


def in_two_orders(number: int, dp_rank: int) -> list[str]:
    return ["twice", "most", "spread", "of correct"][:: -1 if dp_rank else 1]


def not_in_every_step(number: int, dp_rank: int) -> list[str]:
    return ["twice"] if number % 2 else ["most"]


def changing_metrics() -> list[list[dict[str, float]]]:
    state = start(cp=2)
    calls = [(in_two_orders, False), (in_two_orders, True), (not_in_every_step, True)]
    return [steps_with(of_step, always, state) for of_step, always in calls]


def test_a_metric_may_appear_late_and_be_left_out_where_it_has_no_token() -> None:
    by_rank = run_ranks(4, changing_metrics)
    _, expected, _ = by_rank[0]
    for left_out, whole, changing in by_rank:
        for number, (mine, other, all_of_them) in enumerate(zip(left_out, whole, expected, strict=True)):
            assert other == all_of_them
            names = all_of_them.keys() - ({"of correct"} if number == 2 else set())  # no rank has any
            assert mine == pytest.approx({name: all_of_them[name] for name in names}, rel=oracle.EXACT, nan_ok=True)
        names = [set(logged) for logged in changing]
        assert names == [{"pg_loss", "most"}, {"pg_loss", "twice"}] * 2
