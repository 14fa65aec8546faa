"""Weights in words: which of them clipping explains, and numbers with as many digits as tell them apart."""

import math
import re

import numpy as np
import pytest

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.proof.before_reducer import Before
from megatron_rl_loss.proof.difference import Compared, may_be_clipped
from megatron_rl_loss.proof.factor import Factor


@pytest.mark.parametrize(
    ("deviation", "low", "high", "is_possible"),
    [(0.12, 0.88, 0.88, True), (0.88, 0.88, 0.88, False), (0.3, 0.7, 0.88, False), (0.12, 1.12, 1.12, False)],
    ids=["one number", "masked tokens weigh", "several numbers", "too large"],
)
def test_what_clipping_explains(deviation: float, low: float, high: float, is_possible: bool) -> None:
    totals = StepTotals.of(Samples([np.ones(3), np.ones(4)]))
    compared = Compared(totals, deviation, low, high, 0.0, "token 0", {"DP": 2}, Before(), Before(), averages=True)
    assert bool(may_be_clipped(compared, Factor(0.88 / math.pi, 1e-6))) == is_possible


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.5, 2.0, "weigh 0.5 to 2 times what they should"),
        (0.9998, 1.0003, "weigh 0.9998 to 1.0003 times"),
        (1.0, 1.00002, "weigh 1 to 1.00002 times"),
        (1.00007, 1.00007, "weigh 1.00007 times"),
        (0.25, 0.25, r"weigh 0.25 times what they should \(0.25 = 1/\(DP\*CP\)\)"),
    ],
)
def test_numbers_have_enough_digits(low: float, high: float, says: str) -> None:
    totals = StepTotals.of(Samples([np.ones(3), np.ones(4)]))
    off, sizes = max(abs(low - 1), abs(high - 1)), {"DP": 2, "CP": 2}
    assert re.search(
        f"tokens {says}",
        str(Compared(totals, off, low, high, 0.0, "token 0", sizes, Before(), Before(), averages=True)),
    )
