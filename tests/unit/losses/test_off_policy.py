"""Importance weights, sequence masks and rejection, by hand; whole steps over CP are in test_losses_over_cp.py."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from refusals import refusal_tests, refusals
from torch import Tensor

from megatron_rl_loss.losses import importance_weights, keep_sequences, surviving_masks, truncated_importance_weights

LOG_RATIOS = torch.tensor([-9.0, math.log(0.5), -0.1, 0.0, 0.4, math.log(2.0), 3.0, 200.0], dtype=torch.float64)
INSIDE = [math.exp(-0.1), 1, math.exp(0.4), 2]


@pytest.mark.parametrize(
    ("low", "outside", "expected"),
    [
        (0.0, "cap", [math.exp(-9), 0.5, *INSIDE, 2, 2]),
        (0.0, "drop", [math.exp(-9), 0.5, *INSIDE, 0, 0]),
        (0.5, "cap", [0.5, 0.5, *INSIDE, 2, 2]),
        (0.5, "drop", [0, 0.5, *INSIDE, 0, 0]),
    ],
)
def test_importance_weights(low: float, outside: Any, expected: list[float]) -> None:
    log_ratio = LOG_RATIOS.clone().requires_grad_()
    weights = importance_weights(log_ratio, low=low, high=2.0, outside=outside)
    assert weights.tolist() == pytest.approx(expected)
    assert not weights.requires_grad
    if (low, outside) == (0, "cap"):
        truncated = truncated_importance_weights(log_ratio - 1, torch.full_like(LOG_RATIOS, -1))
        torch.testing.assert_close(truncated, weights)
        assert not truncated.requires_grad


def test_keep_sequences() -> None:
    mean_kl = torch.tensor([0.01, 0.2, 0.2, 0.05], requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 0.0])
    assert keep_sequences(mean_kl, max_kl=0.02, advantages=advantages).tolist() == [1, 0, 1, 1]
    assert keep_sequences(mean_kl, max_kl=0.05).tolist() == [1, 0, 0, 1]  # at the bound it stays
    assert not keep_sequences(mean_kl, max_kl=0.1).requires_grad


MASKS = [torch.tensor([1, 1, 0, 1]), torch.tensor([1, 1]), torch.tensor([0, 1, 1]), torch.tensor([0.5, 0.25, 1.0])]
RATIOS = [
    torch.tensor([0.1, 3.0, 9.0, -0.2]),  # its masked 9.0 must not matter
    torch.tensor([1.0, -1.2]),
    torch.tensor([math.nan, 1.0, 1.0]),
    torch.tensor([0.0, 1.0, 0.0]),  # a weighted mean of 0.25 / 1.75, not 1 / 3
]
FRACTIONS, NONE = [0.5, 0.25, 1.0], [0, 0, 0]


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("token", {"high": 5.0}, [[1, 0, 0, 1], [1, 1], [0, 1, 1], FRACTIONS]),
        ("token", {"low": 0.5, "high": 2.0}, [[1, 0, 0, 1], [0, 0], NONE, [0.5, 0, 1]]),
        ("sequence", {"high": 5.0}, [[0, 0, 0, 0], [1, 1], NONE, FRACTIONS]),  # sums 2.9, -0.2, 2.0, 0.25
        ("geometric", {"high": 2.7}, [[1, 1, 0, 1], [1, 1], NONE, FRACTIONS]),  # means 0.97, -0.1, 1.0, 0.14
        ("geometric", {"low": 0.95, "high": 3.0}, [[1, 1, 0, 1], [0, 0], [0, 1, 1], FRACTIONS]),
        ("geometric", {"high": 1.2}, [[0, 0, 0, 0], [1, 1], NONE, FRACTIONS]),
    ],
)
def test_surviving_masks(level: Any, bounds: dict[str, float], expected: list[list[float]]) -> None:
    before = [one.clone() for one in MASKS]
    survivors = surviving_masks(MASKS, RATIOS, level=level, **bounds)
    assert [one.tolist() for one in survivors] == expected
    assert [one.dtype for one in survivors] == [one.dtype for one in MASKS]
    assert all(map(torch.equal, MASKS, before))


TWO, WITH_GRAPH, IN = torch.zeros(2), torch.zeros(2, requires_grad=True), "it must be a number in"


def survive(*log_ratios: Tensor, level: Any = "token") -> list[Tensor]:
    return surviving_masks([torch.ones(2)], log_ratios or [TWO], high=2.0, level=level)


REFUSALS = {
    **refusals(
        lambda **more: importance_weights(TWO, **{"high": 2.0} | more),
        ({"high": 0.0}, rf"high is 0.0: {IN} \(0, inf\)", {"high": 0.1}),
        ({"high": None}, "high is None", {"high": 1}),
        ({"low": -0.1}, rf"low is -0.1: {IN} \[0, 2.0\)", {"low": 0}),
        ({"low": 2.0}, rf"low is 2.0: {IN} \[0, 2.0\)", {"low": 1.9}),
        ({"outside": "mask"}, "no such way with what is outside. Choose one of cap, drop", {"outside": "drop"}),
    ),
    **refusals(
        partial(truncated_importance_weights, TWO),
        ({"behavior_log_probs": TWO, "cap": 0}, rf"cap is 0: {IN} \(0, inf\)", (TWO,)),
        ((torch.zeros(1),), r"\(2,\) and \(1,\)", (TWO,)),
    ),
    **refusals(
        partial(keep_sequences, TWO),
        ({"max_kl": 0.0}, rf"max_kl is 0.0: {IN} \(0, inf\)", {"max_kl": 1e-3}),
        ({"max_kl": 1, "advantages": torch.zeros(3, 2)}, r"advantages of shape \(3, 2\)", {"max_kl": 1}),
    ),
    **refusals(
        survive,
        ((WITH_GRAPH,), "log-ratios of sample 0 that require grad: who survives must be known before", ()),
        ((torch.zeros(3),), r"mask and log-ratios of sample 0 of shapes \(2,\) and \(3,\)", ()),
        ((TWO, TWO), "2 log-ratios for 1 loss masks", ()),
        ({"level": "prompt"}, "no such level of rejection. Choose one of token, sequence, geom", {"level": "sequence"}),
    ),
    **refusals(survive, (([0.0, 0.0],), "mask and log-ratios of sample 0 with a list: .+ tensor", ()), error=TypeError),
}

test_refusals = refusal_tests(REFUSALS)
