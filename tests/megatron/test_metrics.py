"""Metrics over a whole step, of every normaliser and kind, through the real schedule: one value on every rank.

A metric's values are a function of a token's number (`table_step`); what is logged, as `train_step` reduces it, is
compared with float64 over the union of all micro-batches and ranks, and is not what means of means would give.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from megatron_rl_loss.megatron.microbatch import Step
from ranks import run_ranks
from refusals import Call, Refusal, check_refusal, each_of
from table_step import Batch, aggregation, dealt, logged_by_step, start, step_samples, table_model
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.megatron import AggregationSettings, Microbatch
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.reduction import Metric, Term

SAMPLES = step_samples(8)
TABLE = [float(torch.tensor(x)) for one in SAMPLES for x in one.losses.tolist()]
OVERS = ("samples", "tokens", "prompts", "none")
KINDS = ("mean", "min", "max", "variance", "ess")
MASKS = (None, "thinned")
NAMES = {f"{over}, {kind}, {mask}": (over, kind, mask) for over, kind, mask in itertools.product(OVERS, KINDS, MASKS)}
# DP, CP, micro-batches
LAYOUTS = [(2, 2, 2), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((1, 1, 3), (4, 1, 1), (1, 4, 2)))]


def thinned_masks() -> list[Tensor]:
    """Two of three tokens of each sample, of two thirds of them."""
    return [one.mask * (i % 3 != 1) * (torch.arange(len(one.mask)) % 3 != 0) for i, one in enumerate(SAMPLES)]


def of(x: Tensor) -> Tensor:
    return x.cos() + 0.25 * x + 1


def logged_by(dp: int, cp: int, microbatches: int, per_token: bool) -> list[dict[str, float]]:
    """On a rank: what `train_step` would log, for a loss alone and for one of several terms."""
    from megatron.core import parallel_state

    start(cp=cp)
    dp_rank, cp_rank = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    model = table_model([*TABLE, math.nan], per_token=per_token)  # padding must not matter
    masks, batches = thinned_masks(), []
    for chosen in dealt(SAMPLES, dp_rank, dp, microbatches):
        batch = Batch(SAMPLES, chosen, cp)
        given = batch.samples
        ids = {"rollout_ids": given.rollout_ids, "prompt_ids": given.prompt_ids}
        thinned = {"thinned": [masks[i] for i in chosen]}
        batch.samples = Samples(given.loss_masks, layout=given.layout, term_masks=thinned, **ids)
        batches.append(batch)
    settings = AggregationSettings.resolve("prompt_mean", with_per_token_loss=True)
    whole = aggregation(term_masks=["thinned"], prepared=settings)

    def forward_step(iterator: Any, model: Any, several: bool) -> Any:
        microbatch = next(iterator)
        numbers = model(microbatch.data.local_numbers(cp_rank, cp))

        def loss_func(x: Tensor) -> Any:
            metrics = {
                name: Metric(of(x)[None], over, kind=kind, mask=mask) for name, (over, kind, mask) in NAMES.items()
            }
            plain = {"plain": of(x)[None]}
            return microbatch.loss({"a": x[None], "b": Term(x[None])} if several else x[None], {**metrics, **plain})

        return numbers, loss_func

    steps = [functools.partial(forward_step, several=several) for several in (False, True)]
    return [logged_by_step(whole, step, batches, model) for step in steps]


def expected() -> dict[str, tuple[float, float]]:
    """Value and scale of each, in float64."""
    parts = torch.tensor(TABLE, dtype=torch.float64).split([len(one.mask) for one in SAMPLES])
    mode_of = dict(zip(OVERS, ("sample_mean", "token_mean", "prompt_mean", "token_sum"), strict=True))
    found = {}
    for name, (over, kind, mask) in NAMES.items():
        masks = thinned_masks() if mask else [one.mask for one in SAMPLES]

        def moment(power: int, over: str = over, masks: list[Tensor] = masks) -> float:
            samples = [
                oracle.Sample(of(x) ** power, m, one.rollout_id, one.prompt_id)
                for x, m, one in zip(parts, masks, SAMPLES, strict=True)
            ]
            return float(oracle.step_loss(mode_of[over], samples))

        weight, first, second = moment(0), moment(1), moment(2)
        active = torch.cat([of(x)[m != 0] for x, m in zip(parts, masks, strict=True)])
        found[name] = {
            "mean": (first, abs(first)),
            "min": (float(active.min()), 1.0),
            "max": (float(active.max()), 1.0),
            "variance": (second / weight - (first / weight) ** 2, second / weight),
            "ess": (first**2 / weight / second, 1.0),
        }[kind]
    found["plain"] = found["samples, mean, None"]
    return found


@pytest.mark.parametrize(("dp", "cp", "microbatches"), LAYOUTS)
def test_a_metric_is_that_of_the_whole_step(
    dp: int, cp: int, microbatches: int, record_property: Callable[[str, Any], None]
) -> None:
    right = expected()
    worst = 0.0
    for of_rank in run_ranks(dp * cp, logged_by, dp, cp, microbatches, cp == 2):
        for found, losses in zip(of_rank, ({"pg_loss"}, {"loss", "a", "b"}), strict=True):
            assert found.keys() == right.keys() | losses
            for name, (value, scale) in right.items():
                worst = oracle.worst_of(worst, abs(found[name] - value) / scale)
    record_property("metrics_error", worst)
    # Moments are float32 sums, two of which are subtracted.
    assert worst < 4 * oracle.sum_error(oracle.num_tokens(SAMPLES))


def test_the_data_tells_them_apart() -> None:
    """All normalisers differ, and so do both masks."""
    right = expected()
    for kind in ("mean", "variance", "ess"):
        values = sorted(abs(right[f"{over}, {kind}, {mask}"][0]) for over in OVERS[:3] for mask in MASKS)
        assert all(b > 1.001 * a for a, b in itertools.pairwise(values)), (kind, values)
    assert any(right[f"samples, {kind}, None"] != right[f"samples, {kind}, thinned"] for kind in ("min", "max"))


# --- in this process


def microbatch_of(masks: list[Tensor], units: str = "all") -> Microbatch:
    step = Step(
        aggregation=resolve("sample_mean", units=units),  # type: ignore[arg-type]
        totals=StepTotals.from_loss_masks(masks),
        num_microbatches=1,
        cp_rank=0,
        cp_size=1,
        dp_cp_size=1,
    )
    return Microbatch(None, Samples(masks), step)


MASK = [torch.tensor([1.0, 1, 0]), torch.tensor([1.0])]
LOSSES = torch.ones(4, requires_grad=True)
X = torch.tensor([1.0, 3.0, math.nan, 5.0])


def finished(masks: list[Tensor], values: Tensor, **keywords: Any) -> dict[str, float]:
    microbatch = microbatch_of(masks)
    losses = torch.ones(len(values), requires_grad=True)
    metrics = {kind: Metric(values, "tokens", kind=kind) for kind in KINDS}
    _, _, report = microbatch.loss(losses, metrics)
    assert all(math.isnan(float(report[kind][0])) for kind in KINDS[1:])  # until the step is finished
    return {name: float(value) for name, value in microbatch._step.parts.finish(None).items()}


def test_by_hand() -> None:
    # Tokens 1, 3, 5: mean 3, of squares 35/3.
    assert finished(MASK, X) == pytest.approx({"min": 1, "max": 5, "variance": 35 / 3 - 9, "ess": 27 / 35})


def test_without_an_active_token_there_is_none() -> None:
    found = finished([torch.zeros(2)], torch.ones(2))
    assert all(math.isnan(value) for value in found.values())
    assert found.keys() == set(KINDS[1:])


def metric(over: Any = "samples", **keywords: Any) -> Call:
    return lambda: microbatch_of(MASK).loss(LOSSES, {"x": Metric(X, over, **keywords)})


REFUSALS: dict[str, Refusal] = {
    "an unknown normaliser": (
        metric("rollouts"),
        ValueError,
        "there is no such normaliser of a metric. Choose one of samples, tokens, prompts, none",
        metric("tokens"),
    ),
    "an unknown kind": (
        metric(kind="std"),
        ValueError,
        "there is no such kind of metric. Choose one of mean, min, max, variance, ess",
        metric(kind="variance"),
    ),
    "over prompts that nothing counted": (
        metric("prompts"),
        ValueError,
        "'x' by prompt_mean and totals without prompts.all",
        metric("none"),
    ),
    "an extreme of another number of tokens": (
        lambda: microbatch_of(MASK).loss(LOSSES, {"x": Metric(X[:3], kind="max")}),
        ValueError,
        r"a metric of shape \(3,\)",
        lambda: microbatch_of(MASK).loss(LOSSES, {"x": Metric(X[None], kind="max")}),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
