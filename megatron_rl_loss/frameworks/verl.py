"""verl: its `agg_loss`, exact from explicit counts of the whole step. Imports no verl.

    from verl.trainer.ppo import core_algos
    from verl.workers.utils import losses
    from megatron_rl_loss.frameworks.verl import agg_loss

    core_algos.agg_loss = losses.agg_loss = agg_loss

Only a verl that passes global counts can use it (its engine does: `global_batch_info`); see docs/frameworks/verl.md.
"""

import torch
from torch import Tensor

from megatron_rl_loss.errors import explain
from megatron_rl_loss.layouts import is_int
from megatron_rl_loss.names import resolve_name
from megatron_rl_loss.reducers import check_mode


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
        raise TypeError(explain(f"loss_mat is {loss_mat.dtype}", "it must be a float tensor", "Pass unreduced losses"))
    if loss_mat.dim() != 2 or loss_mat.shape != loss_mask.shape:
        given = f"loss_mat of shape {tuple(loss_mat.shape)}, loss_mask of shape {tuple(loss_mask.shape)}"
        raise ValueError(explain(given, "both must be [rows, response_length]", "Pass unreduced losses and their mask"))
    if not is_int(dp_size) or dp_size < 1:
        raise ValueError(explain(f"dp_size is {dp_size!r}", "it must be an int >= 1", "Pass the data-parallel size"))
    norm = loss_agg_mode == "seq-mean-token-sum-norm"
    if norm and loss_scale_factor is None:
        rule = "verl would divide by the padded length of this micro-batch"
        remedy = "Set actor.loss_scale_factor, e.g. to the maximal response length"
        raise ValueError(explain(f"{loss_agg_mode} without loss_scale_factor", rule, remedy))
    named = resolve_name(f"verl:{loss_agg_mode}", divisor=loss_scale_factor if norm else None)
    check_mode(named.mode, named.divisor)
    dtype = torch.promote_types(loss_mat.dtype, torch.float32)
    mask = loss_mask.to(dtype)
    sums = (loss_mat.masked_fill(mask == 0, 0).to(dtype) * mask).sum(-1)
    if named.mode == "sample_mean":
        tokens = mask.sum(-1)
        sums = sums / tokens.masked_fill(tokens == 0, 1)
    denominator: float | Tensor = named.divisor or 1
    if named.mode == "token_mean":
        denominator = _count("batch_num_tokens", batch_num_tokens, loss_agg_mode, mask.sum())
    elif named.mode != "token_sum":
        rows = (mask != 0).any(-1).sum()
        denominator = denominator * _count("global_batch_size", global_batch_size, loss_agg_mode, rows)
    return sums.sum() / denominator * dp_size


def _count(name: str, value: float | Tensor | None, mode: str, here: Tensor) -> float | Tensor:
    """A count of the whole step, at least this micro-batch's own; 1 for a step without anything to count."""
    remedy = "Pass the count of the whole step, over all its micro-batches and DP ranks"
    if value is None:
        rule = "verl would take this micro-batch's own, and the loss would depend on how the step is cut"
        raise ValueError(explain(f"{mode} without {name}", rule, remedy))
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return torch.where((value == 0) & (here == 0), 1, value)
    if here.device.type != "cpu" and value > 0:
        return value  # without making the device wait
    if float(value) * (1 + 1e-6) < float(here) or not value >= 0:
        given = f"{name} is {float(value):g}"
        raise ValueError(explain(given, f"this micro-batch alone has {float(here):g}", remedy))
    return value if value > 0 else 1
