"""A mode of your own, tried before it trains: `python own_mode.py`. Import this file before the flags are parsed.

A mode returns weights without the mask: a number, an array with one per sample, or a list with an array per sample.
Modes count over the whole step, by key, never over one micro-batch.
"""

from typing import Any

import numpy as np

from megatron_rl_loss import check_loss, register_loss_mode
from megatron_rl_loss.core.modes import ModeInputs


@register_loss_mode("root_length")
def root_length(step: ModeInputs) -> Any:
    """1/N sum_i (sum_t l*m / sqrt(M_i)): between `sample_mean`, which divides by M_i, and `constant`; i a sample."""
    return 1 / (np.sqrt(step.tokens("sample")) * step.units("rollout"))


@register_loss_mode("microbatch_mean")
def microbatch_mean(step: ModeInputs) -> float:
    """A usual mistake: the samples of the micro-batch divide, so weights change with the cut of the step."""
    return 1 / len(step.batch)


if __name__ == "__main__":
    for mode in ("root_length", "microbatch_mean"):
        print(check_loss(mode=mode), "\n")
