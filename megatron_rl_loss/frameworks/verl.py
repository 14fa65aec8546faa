"""verl: its `agg_loss`, exact from explicit counts of the whole step. Imports no verl.

    from verl.trainer.ppo import core_algos
    from verl.workers.utils import losses
    from megatron_rl_loss.frameworks.verl import agg_loss

    core_algos.agg_loss = losses.agg_loss = agg_loss

Only a verl that passes global counts can use it (its engine does: `global_batch_info`); see docs/frameworks/verl.md.
"""

import torch
from torch import Tensor

from megatron_rl_loss.aliases import resolve
from megatron_rl_loss.checks import check_int
from megatron_rl_loss.errors import refused
from megatron_rl_loss.modes import Mode
from megatron_rl_loss.reduction import reducer_of
from megatron_rl_loss.samples import Samples
from megatron_rl_loss.totals import StepTotals, UnitCounts


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """A micro-batch's share of the step loss, times `dp_size`: the mean over DP ranks of their sums is the step loss.

    ===========================  ===============================================================
    ``token-mean``               sum l*m / batch_num_tokens
    ``token-sum``                sum l*m
    ``seq-mean-token-sum``       sum l*m / global_batch_size
    ``seq-mean-token-sum-norm``  sum l*m / (global_batch_size * loss_scale_factor)
    ``seq-mean-token-mean``      sum over rows of (sum l*m / M_row) / global_batch_size
    ===========================  ===============================================================

    Args:
        loss_mat, loss_mask: [rows, response_length], whole rows (gathered over CP); the mask 0/1, bool or weights >= 0.
        loss_agg_mode: one of the above.
        dp_size: ranks over which gradients are averaged afterwards.
        batch_num_tokens: mask tokens of the whole step, all ranks and micro-batches.
        global_batch_size: sequences of the whole step. verl's engine counts all of them, masked ones too.
        loss_scale_factor: L of ``seq-mean-token-sum-norm``; with other modes it has no effect, as in verl.

    Returns:
        A 0-dim tensor, at least float32, connected to the graph. Losses at masked positions are never looked at.

    Raises:
        ValueError: a count the mode needs is None (verl then takes the micro-batch's own, or its padded length, and the
            loss depends on how the step is cut), is not above 0 while tokens are active, or is below this micro-batch's
            own; an unknown mode; shapes that are not one [rows, response_length].
        TypeError: losses that are not floats.

    Source: verl 0.10.0.dev, verl/trainer/ppo/core_algos.py `agg_loss`.
    """
    if not loss_mat.is_floating_point():
        raise refused("no_float_losses", what="loss_mat", kind=loss_mat.dtype)
    if loss_mat.dim() != 2 or loss_mat.shape != loss_mask.shape:
        raise refused("no_loss_matrix", losses=tuple(loss_mat.shape), mask=tuple(loss_mask.shape))
    check_int("dp_size", dp_size, 1, "Pass the data-parallel size")
    norm = loss_agg_mode == "seq-mean-token-sum-norm"
    if norm and loss_scale_factor is None:
        raise refused("loss_scale_factor_missing", mode=loss_agg_mode)
    aggregation = resolve(f"verl:{loss_agg_mode}", divisor=loss_scale_factor if norm else None)
    samples = Samples(list(loss_mask))
    samples.check_masks()
    # With one rollout, or one token, in the step, the weights leave the division by the step's number to us.
    whole = StepTotals(step_tokens=1, rollouts=UnitCounts(all=1))
    share = reducer_of(aggregation, samples.local(0, 1), whole)(loss_mat)
    share = share.to(torch.promote_types(loss_mat.dtype, torch.float32)) * dp_size
    assert isinstance(aggregation.mode, Mode)  # verl's names have no other
    if aggregation.mode.unit == "rollout":
        rows = (samples.active_tokens > 0).sum()
        return share / _count("global_batch_size", global_batch_size, loss_agg_mode, rows)
    if not aggregation.mode.takes_divisor:
        tokens = samples.mask_sums.sum()
        return share / _count("batch_num_tokens", batch_num_tokens, loss_agg_mode, tokens)
    return share


def _count(name: str, value: float | Tensor | None, mode: str, here: Tensor) -> float | Tensor:
    """A count of the whole step, at least this micro-batch's own; 1 for a step without anything to count."""
    if value is None:
        raise refused("count_missing_in_verl", mode=mode, name=name)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return torch.where((value == 0) & (here == 0), 1, value)
    if here.device.type != "cpu" and value > 0:
        return value  # without making the device wait
    if float(value) * (1 + 1e-6) < float(here) or not value >= 0:
        raise refused("count_too_small_in_verl", name=name, value=float(value), here=float(here))
    return value if value > 0 else 1
