"""Folding the aggregation into the advantages, for trainers that only sum (Tinker, SkyRL).

A loss that is positively homogeneous in the advantage, ``loss(w * A) = w * loss(A)`` for w >= 0, can be given
``w * A``: its plain sum then *is* the step loss. PPO's clipped loss, GSPO, CISPO, SAPO and REINFORCE are; KL and
entropy terms, quadratic penalties and losses that compare advantages with a bound are not.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_one_each, check_sized
from megatron_rl_loss.modes.aggregation import resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.users_totals import checked_weights
from megatron_rl_loss.step.masks import Mask
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import UnitCounting

_MARK = "_folded_by_megatron_rl_loss"


def fold_into_advantages(
    advantages: Sequence[Tensor] | Sequence[float] | Tensor,
    loss_masks: Iterable[Mask],
    *,
    mode: str | Mode | ModeFunction,
    totals: StepTotals,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    **of_samples: Any,
) -> list[Tensor]:
    """``w_t * A_t`` for every token, so that the plain sum of the per-token losses, over everything, is the step loss.

    >>> masks = [[1, 1, 0], [1]]
    >>> fold_into_advantages([6.0, -3.0], masks, mode="token_mean", totals=StepTotals.from_loss_masks(masks))
    [tensor([2., 2., 0.]), tensor([-1.])]

    The weight includes the mask: a 0/1 mask may be applied again in the sum, fractional weights may not.

    Args:
        advantages: one number per sample, or one 1-D tensor per sample, as long as its mask.
        loss_masks, of_samples: of all or some of the step's samples; ids and labels as in `Samples`; not cut for CP.
        mode, divisor, units, totals: as in `make_pg_loss_reducer`.

    Returns:
        One tensor per sample, float32 (float64 if given so), on the advantages' device, 0 where the weight is 0.

    Raises:
        ValueError: advantages that were folded before, that do not match the masks, or that are NaN or infinite at an
            active token; anything `make_pg_loss_reducer` refuses.
    """
    check_sized("advantages", advantages)
    if any(hasattr(column, _MARK) for column in advantages):
        raise ValueError(
            "advantages that were folded already: folding them again would divide by the step's counts twice. Fold "
            "once per step, before the step is cut into micro-batches."
        )
    if of_samples.get("layout") is not None:
        raise ValueError("layout= with advantages to fold: these are whole rows, one per sample. Leave layout= out.")
    samples = Samples(loss_masks, **of_samples)
    check_one_each("advantages", len(advantages), "loss masks", len(samples))
    rows = [
        column.detach() if isinstance(column, Tensor) else torch.tensor(column, device="cpu") for column in advantages
    ]
    flat = samples.in_buffer(rows)
    flat = flat if isinstance(flat, Tensor) else torch.from_numpy(flat)  # of no samples it is an array
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    aggregation = resolve(mode, divisor=divisor, units=units)
    weights = checked_weights(aggregation, samples.local(0, 1), totals).to(flat.device)
    if not bool(torch.isfinite(flat[weights != 0]).all()):
        raise ValueError(
            "advantages with NaN or Inf at active tokens: folding takes finite advantages. Mask such tokens, or "
            "aggregate the losses with make_pg_loss_reducer."
        )
    # Each in a storage of its own, so that one sent elsewhere does not take all along.
    folded = [part.clone() for part in (flat * weights).masked_fill(weights == 0, 0).split(samples.mask_lengths)]
    for part in folded:
        setattr(part, _MARK, True)
    return folded
