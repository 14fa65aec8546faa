"""Steps of weights that are right, by the oracle, or wrong, by formulas in counts, and what `judge` says of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from counted_steps import Array, Formula, Step, measured

from megatron_rl_loss.audit import MeasuredStep, Verdict, judge
from megatron_rl_loss.modes.names import resolve

DIVISORS = {"constant": 64.0, "token_sum": 32.0}
ASKED = [(mode, units) for mode in oracle.MODES for units in ("all", "active")]


def seeds(*quick: int, slow: range) -> Any:
    return pytest.mark.parametrize("seed", [*quick, *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow)])


each_seed = seeds(1, slow=range(2, 5))


def asked(mode: str, units: Any = "all") -> Any:
    return resolve(mode, units=units, divisor=DIVISORS.get(mode))


def right_weights(step: Step, mode: str, units: str = "all") -> Array:
    samples = [oracle.sample([0.0] * len(r.mask), r.mask, r.rollout, r.prompt) for r in step.counted.samples]
    gradients = oracle.step_gradient(mode, samples, DIVISORS.get(mode), units)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *gradients]).numpy()


def sound_step(step: Step, mode: str, units: str = "all", roundings: float = 16, seed: int = 0) -> MeasuredStep:
    """The oracle's weights, off by at most so many roundings of float32."""
    weights = right_weights(step, mode, units)
    noise = np.random.default_rng(seed).uniform(-1, 1, len(weights)) * roundings * oracle.ROUNDING
    return replace(measured(step, weights), weights=weights * (1 + noise))


def judged(step: Step, weights: Array | Formula, mode: str = "token_mean") -> Verdict:
    return judge(measured(step, weights), asked(mode))


def first_of(verdict: Verdict) -> str:
    """The simplest reading."""
    assert verdict.readings, str(verdict)
    return verdict.readings[0].text
