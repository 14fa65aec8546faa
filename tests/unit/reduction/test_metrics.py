"""Extremes of a step whose ranks or micro-batches may have no token; other kinds: tests/megatron/test_metrics.py."""

import math

import pytest
import torch

from megatron_rl_loss import Samples, StepTotals, ZigzagResponse, make_pg_loss_reducer
from megatron_rl_loss.reduction.metrics import Metric, Parts


@pytest.mark.parametrize(("kind", "expected"), [("min", -2.0), ("max", 5.0)])
def test_a_rank_without_tokens_has_no_extreme(kind: str, expected: float) -> None:
    """Three response tokens at the end of 16 lie on one of two ranks."""
    masks, layout = [torch.tensor([1, 0, 1])], ZigzagResponse([16], [3])
    values, parts, sizes = torch.tensor([5.0, math.nan, -2.0]), Parts(), []
    for rank in range(2):
        local = Samples(masks, layout=layout).local(rank, 2)
        place = {"layout": layout, "cp_rank": rank, "cp_size": 2}
        reducer = make_pg_loss_reducer("token_mean", masks, totals=StepTotals(step_tokens=2), **place)  # type: ignore[arg-type]
        metric = Metric(local.of(values), "tokens", kind=kind)  # type: ignore[arg-type]
        parts.add("x", metric.kind, metric.extreme(reducer))
        sizes.append(len(local))
    assert sorted(sizes) == [0, 3]
    assert float(parts.finish([None])["x"]) == expected


def test_a_step_without_a_token_has_none() -> None:
    reducer = make_pg_loss_reducer("token_mean", [torch.zeros(2)], totals=StepTotals(step_tokens=0))
    parts = Parts()
    parts.add("x", "max", Metric(torch.ones(2), "tokens", kind="max").extreme(reducer))
    assert math.isnan(parts.finish([None])["x"])
