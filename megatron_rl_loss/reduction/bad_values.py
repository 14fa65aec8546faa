"""What is logged of losses that cannot be summed or trained exactly; loaded when there are some."""

import functools
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl_loss.step.collectives import world_rank
from megatron_rl_loss.step.samples import LocalTokens

logger = logging.getLogger(__name__)


def log_not_finite(what: str, values: Tensor, weights: Tensor, local: LocalTokens) -> None:
    """`WeightedSum.report_not_finite`."""
    flat = values.detach().reshape(-1)
    wrong = ((weights != 0) & ~flat.isfinite()).nonzero()[:1, 0].tolist()
    for token in wrong:  # none where the sum of finite losses overflows
        sample, place = local.place_of(token)
        logger.warning(
            f"rank {world_rank()}: {what} is {float(flat[token])} at token {place} of sample {sample} of a "
            "micro-batch: the token's mask is not 0, so the step's sum is not finite. Check the token's log-probs "
            "and advantage, or mask it."
        )


def warn_of_float16(rows: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Log float16 losses whose gradient cannot hold the weights, of (losses, weights); looks at weights on the host.

    The gradient is scaled in float32 and rounded once, so a loss scale helps. bfloat16 has the range of float32.
    """
    for values, weights in rows:
        if values.dtype == torch.float16 and values.requires_grad and weights.is_cpu and weights.any():
            smallest = float(weights[weights != 0].abs().amin())
            if smallest < torch.finfo(torch.float16).tiny:
                say_float16(math.ceil(-math.log2(smallest)) - 14)  # its normal numbers begin at 2^-14


@functools.cache  # once for each size, not for each micro-batch
def say_float16(bits: int) -> None:
    logger.warning(
        f"losses in float16 with weights that are up to 2^{bits} times too small for it: the gradient of a float16 "
        f"loss is float16, so tokens' weights are rounded, the smallest to 0. Pass float32 losses, or train with a "
        f"loss scale of 2^{bits} at least."
    )
