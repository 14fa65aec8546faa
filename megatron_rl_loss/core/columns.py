"""Weights of a whole step as data columns, for a trainer that only sums."""

from collections.abc import Callable, Iterable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import LossModes
from megatron_rl_loss.core.collectives import Group, StepGroups, attempt, check_together, stated_dp_group
from megatron_rl_loss.core.counting import UnitCounting
from megatron_rl_loss.core.errors import check_one_each, check_sized
from megatron_rl_loss.core.masks import Mask
from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.core.plan import make_plan
from megatron_rl_loss.core.record import Trainer
from megatron_rl_loss.core.samples import Samples, as_samples
from megatron_rl_loss.core.transfers import to_device


def weights_column(
    mode: str | Mode | ModeFunction,
    samples: Samples | Iterable[Mask],
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    dp_group: Group | EllipsisType | None = ...,
) -> list[Tensor]:
    """The weight of every token of a whole step, a tensor per sample: a data column beside ``advantages``.

    For a driver that holds all masks of a step before it deals samples out. In a job of several ranks state the
    `dp_group`, as in `plan_step`: None where this rank has the whole step, and no collective runs.

    >>> weights_column("sample_mean", [torch.tensor([1, 1, 0]), torch.tensor([1])])
    [tensor([0.2500, 0.2500, 0.0000]), tensor([0.5000])]

    Returns a float32 tensor per sample, as long as its mask. Arguments and errors as in `plan_step`.
    """
    weights, lengths = _weights(lambda: _whole(samples), mode, divisor, units, _groups(dp_group))
    return _rows(weights, lengths)


def _whole(samples: Samples | Iterable[Mask]) -> Samples:
    """Samples of whole rows; ValueError for a layout, in which rows are padded or cut."""
    whole = as_samples(samples)
    if whole.layout is not None:
        raise ValueError(
            "samples with a layout for columns: a column is of whole rows, one per sample. Leave layout= out."
        )
    return whole


def _groups(dp_group: Group | EllipsisType | None) -> StepGroups:
    return StepGroups(stated_dp_group(dp_group, "weights"))


def _weights(
    describe: Callable[[], Samples],
    mode: str | Mode | ModeFunction,
    divisor: float | None,
    units: UnitCounting | None,
    groups: StepGroups,
) -> tuple[Tensor, list[int]]:
    """The weights of the samples that `describe` makes, and their lengths; its error is raised on all ranks."""
    modes = attempt(lambda: LossModes.resolve(mode, divisor=divisor, units=units))
    (microbatch,) = make_plan(lambda: [describe()], modes, Trainer(groups=groups))
    return microbatch.weights, list(microbatch.samples.mask_lengths)


def _rows(flat: Tensor, lengths: list[int]) -> list[Tensor]:
    """Each in a storage of its own, so that one sent elsewhere does not take all along."""
    return [part.clone() for part in flat.split(lengths)]


def _real(sample: int, advantages: Any) -> Tensor:
    """The advantages of a sample, or its only one, as a tensor; TypeError for what are no real numbers."""
    if isinstance(advantages, np.ma.MaskedArray):
        raise TypeError(f"advantages of sample {sample} are a MaskedArray: {_FILLED}")
    if isinstance(advantages, Tensor):
        is_plain = type(advantages) in (Tensor, torch.nn.Parameter) and advantages.layout == torch.strided
        is_plain &= not (advantages.is_nested or advantages.is_meta or advantages.is_quantized)
        dtype = advantages.dtype
        is_float = dtype.is_floating_point and dtype.itemsize > 1
        if is_plain and (is_float or not (dtype.is_floating_point or advantages.is_complex() or dtype == torch.bool)):
            return advantages.detach()
        kind = f"{dtype}" if is_plain else f"a {advantages.layout} {type(advantages).__name__} on {advantages.device}"
    else:
        try:
            array = np.asarray(advantages)
        except (ValueError, TypeError, RuntimeError):  # ragged, or tensors that NumPy cannot read
            array = np.empty(0, object)
        if array.dtype.kind in "iuf":
            own = np.ascontiguousarray(array, array.dtype.newbyteorder("=") if array.itemsize <= 8 else np.float64)
            return torch.tensor(advantages if isinstance(advantages, list | tuple | float | int) else own, device="cpu")
        kind = getattr(advantages, "dtype", type(advantages).__name__)
    raise TypeError(f"advantages of sample {sample} are {kind}: they must be real numbers. Pass floats, or a tensor.")


_FILLED = "entries that it masks would count by what lies under them. Pass advantages.filled(0)."
_MARK = "_folded_by_megatron_rl_loss"


def fold_into_advantages(
    advantages: Sequence[Tensor] | Sequence[float] | Tensor,
    samples: Samples | Iterable[Mask],
    *,
    mode: str | Mode | ModeFunction,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    dp_group: Group | EllipsisType | None = ...,
) -> list[Tensor]:
    """``w_t * A_t`` for every token, so that the plain sum of the per-token losses, over everything, is the step loss.

    >>> fold_into_advantages([6.0, -3.0], [[1, 1, 0], [1]], mode="token_mean")
    [tensor([2., 2., 0.]), tensor([-1.])]

    The weight includes the mask: a 0/1 mask may be applied again in the sum, fractional weights may not.

    Args:
        advantages: one number per sample, or one 1-D tensor per sample, as long as its mask.
        samples: of the whole step, or this rank's of it, without a layout; or their masks alone.
        mode, divisor, units, dp_group: as in `weights_column`.

    Returns one tensor per sample, float32 (float64 if given so), on the advantages' device, 0 where the weight is 0.

    Raises ValueError for advantages that were folded before, that do not match the masks, or that are NaN or infinite
    at an active token; anything else as `weights_column`.
    """
    columns: list[Tensor] = []

    def described() -> Samples:
        check_sized("advantages", advantages)
        if isinstance(advantages, np.ma.MaskedArray):
            raise TypeError(f"advantages are a MaskedArray: {_FILLED}")
        if any(hasattr(column, _MARK) for column in advantages):
            raise ValueError(
                "advantages that were folded already: folding them again would divide by the step's counts twice. Fold "
                "once per step, before the step is cut into micro-batches."
            )
        whole = _whole(samples)
        check_one_each("advantages", len(advantages), "loss masks", len(whole))
        rows = [_real(i, column) for i, column in enumerate(advantages)]
        flat = whole.in_buffer(rows)
        columns.append(flat if isinstance(flat, Tensor) else torch.from_numpy(flat))  # of no samples it is an array
        return whole

    groups = _groups(dp_group)
    weights, lengths = _weights(described, mode, divisor, units, groups)

    def fold() -> list[Tensor]:
        (flat,) = columns
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        own = to_device(weights, flat.device)
        if not bool(torch.isfinite(flat[own != 0]).all()):
            raise ValueError(
                "advantages with NaN or Inf at active tokens: folding takes finite advantages. Mask such tokens, or "
                "aggregate the losses with a plan."
            )
        return _rows((flat * own).masked_fill(own == 0, 0), lengths)

    folded = check_together(fold, groups.all)
    for part in folded:
        setattr(part, _MARK, True)
    return folded
