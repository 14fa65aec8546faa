"""A mode of your own, tried before it trains: `python own_mode.py`. Import this file before the flags are parsed.

A mode returns weights *beside* the mask: a number, a tensor with one per sample, or a list with a tensor per sample.
It counts over the whole step (`inputs.totals`), never over the micro-batch in hand.
"""

import torch

from megatron_rl_loss import ModeInputs, register_pg_loss_reducer
from megatron_rl_loss.audit import check_loss


@register_pg_loss_reducer("root_length")
def root_length(inputs: ModeInputs) -> torch.Tensor:
    """1/N sum_i (sum_t l*m / sqrt(M_i)): between `sample_mean`, which divides by M_i, and `constant`; i a sample."""
    rollouts = inputs.totals.rollouts.counted(inputs.units)
    assert rollouts is not None  # every step has counted them
    return 1 / (rollouts * inputs.samples.mask_sums.clamp(min=1e-12).sqrt())


@register_pg_loss_reducer("microbatch_mean")
def microbatch_mean(inputs: ModeInputs) -> float:
    """A usual mistake: divided by the samples of the micro-batch, so it changes with how the step is cut."""
    return 1 / max(len(inputs.samples), 1)


if __name__ == "__main__":
    for mode in ("root_length", "microbatch_mean"):
        print(check_loss(mode=mode), "\n")
