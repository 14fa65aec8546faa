"""Weights that may have been clipped: all of one number below 1, and none at masked tokens."""

import math

import numpy as np
import pytest

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.proof.difference import Compared, may_be_clipped
from megatron_rl_loss.proof.factor import Factor


@pytest.mark.parametrize(
    ("deviation", "low", "high", "is_possible"),
    [(0.12, 0.88, 0.88, True), (0.88, 0.88, 0.88, False), (0.3, 0.7, 0.88, False), (0.12, 1.12, 1.12, False)],
    ids=["one number", "masked tokens weigh", "several numbers", "too large"],
)
def test_what_clipping_explains(deviation: float, low: float, high: float, is_possible: bool) -> None:
    totals = StepTotals.of(Samples([np.ones(3), np.ones(4)]))
    compared = Compared(totals, deviation, low, high, "token 0", {"DP": 2}, None, averages=True)
    assert bool(may_be_clipped(compared, Factor(0.88 / math.pi, 1e-6))) == is_possible
