"""Outcomes of `tiny_gpt` on all ranks, and their errors against the step that `gpt_oracle` states."""

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import gpt_oracle
import oracle
import torch
from gpt_oracle import Step
from ranks import run_ranks
from tiny_gpt import Case, Layout, Outcome, run_layout
from torch import Tensor

# gradients, weights: the worst tensor's largest error, relative to its largest entry. updates: the same of what Adam's
# step added to the weights. overall: the norm of the error of all gradients, relative to the norm. grad_norm: relative.
# metrics: relative to the same metric of absolute values.
# Four layers at most, whose longest sums are over 32 channels or entries of the vocabulary.
FP32_BOUNDS = dict.fromkeys(("gradients", "overall", "grad_norm", "metrics", "weights"), oracle.chain_error(4, 32))
# Of a step that clipping and Adam's square root may make steeper in the gradient.
FP32_BOUNDS["updates"] = 5 * FP32_BOUNDS["gradients"]


# Results of products are rounded to 2^-9, some 2 * 4 * 6 in a chain forward and backward: sqrt(48) * 2^-9 = 0.014, and
# for an entry many times that. What the bounds tell apart nevertheless: test_bf16_bounds_would_see_another_mode.
# No bound for updates: storing a weight in bfloat16 rounds it by as much as a step of Adam moves it.
BF16_BOUNDS = {"gradients": 0.25, "overall": 0.1, "grad_norm": 0.05, "metrics": 0.02, "weights": 0.02}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def whole(outcomes: list[tuple[dict[str, int], Outcome]], of: str) -> Iterator[tuple[str, Tensor]]:
    """Every copy of every parameter's gradient or weight, put together over TP ranks: one a stage, CP and DP rank."""
    shards: dict[tuple[str, int, int, int], dict[int, tuple[Any, int | None]]] = defaultdict(dict)
    for place, outcome in outcomes:
        for name, shard in getattr(outcome, of).items():
            shards[name, place["pp"], place["cp"], place["dp"]][place["tp"]] = shard
    for (name, *_), by_rank in shards.items():
        parts = [torch.from_numpy(by_rank[rank][0]) for rank in sorted(by_rank)]
        dim = by_rank[0][1]
        for tensor in parts if dim is None else [torch.cat(parts, dim)]:
            yield name.rstrip("'"), tensor


def errors_of(outcomes: list[tuple[dict[str, int], Outcome]], expected: Step) -> dict[str, float]:
    """The worst relative errors over all ranks and tensors."""
    errors: dict[str, float] = dict.fromkeys(FP32_BOUNDS, 0.0)
    seen: dict[str, set[str]] = {"gradients": set(), "weights": set()}

    def note(what: str, error: float) -> None:
        errors[what] = max(errors[what], error if error == error else float("inf"))  # NaN must not pass

    squares: dict[str, list[float]] = defaultdict(list)
    for name, gradient in whole(outcomes, "gradients"):
        seen["gradients"].add(name)
        note("gradients", relative_error(gradient, expected.gradients[name]))
        squares[name].append(float((gradient - expected.gradients[name]).square().sum()))
    note("overall", sum(max(copies) for copies in squares.values()) ** 0.5 / expected.grad_norm)
    for name, weight in whole(outcomes, "weights"):
        seen["weights"].add(name)
        first = expected.first_weights[name]
        note("weights", relative_error(weight, expected.weights[name]))
        note("updates", relative_error(weight - first, expected.weights[name] - first))
    assert seen["gradients"] == seen["weights"] == set(expected.gradients)
    assert any(outcome.metrics is not None for _, outcome in outcomes)
    for _, outcome in outcomes:
        note("grad_norm", abs(outcome.grad_norm - expected.grad_norm) / expected.grad_norm)
        if outcome.metrics is not None:
            assert set(outcome.metrics) == set(expected.metrics)
            for name, value in outcome.metrics.items():
                note("metrics", abs(value - expected.metrics[name]) / expected.scales[name])
    return errors


def outcomes_in(
    layout: Layout, cases: list[Case], stock: bool = False, attention: str = "packed", head: str = ""
) -> Iterator[tuple[Case, list[tuple[dict[str, int], Outcome]]]]:
    rollouts = {shape: gpt_oracle.rollouts_of(shape) for shape in {case.shape(layout) for case in cases}}
    by_rank = run_ranks(
        layout.world_size, functools.partial(run_layout, layout, cases, rollouts, stock, attention, head)
    )
    for k, case in enumerate(cases):
        yield case, [(place, found[k]) for place, found in by_rank]


def gradient_error(outcomes: list[tuple[dict[str, int], Outcome]], expected: Step, fit: bool = False) -> float:
    """The worst of all tensors on all ranks; with `fit`, after the one factor that fits best (least squares)."""
    pairs = [(gradient, expected.gradients[name]) for name, gradient in whole(outcomes, "gradients")]
    factor = 1.0
    if fit:
        factor = float(sum((a * b).sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs))
    return max(relative_error(a * factor, b) for a, b in pairs)
