"""The weight of each token that this rank holds: its mask entry times the number that the mode returned."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction, ModeInputs
from megatron_rl_loss.step.collectives import StepGroups
from megatron_rl_loss.step.ids import Ids, IdsByName
from megatron_rl_loss.step.masks import Floats, Mask, to_array
from megatron_rl_loss.step.samples import Labels, LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals, count_step
from megatron_rl_loss.step.units import UnitCounting

_TINY = float(np.finfo(np.float32).tiny)  # the smallest float32 that is not rounded to fewer bits


def weights_column(
    mode: str | Mode | ModeFunction,
    loss_masks: Iterable[Mask],
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    ids: IdsByName | None = None,
    labels: Labels | None = None,
) -> list[Tensor]:
    """The weight of every token of a whole step, a tensor per sample: a data column beside ``advantages``.

    For a driver that holds all masks of a step before it deals samples out; no collective is needed.

    >>> weights_column("sample_mean", [torch.tensor([1, 1, 0]), torch.tensor([1])])
    [tensor([0.2500, 0.2500, 0.0000]), tensor([0.5000])]

    Returns a float32 tensor per sample, as long as its mask. Arguments and errors as in `make_pg_loss_reducer`.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    samples = Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids, ids=ids, labels=labels)
    totals = count_step([samples], StepGroups(), sums=list(aggregation.mode.sums.values()))
    return list(weigh(aggregation, samples.local(0, 1), totals).split(samples.mask_lengths))


def checked_weights(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """`weigh` with totals that a user made: ValueError for totals of a part of the step."""
    if not isinstance(totals, StepTotals):
        raise TypeError(
            f"totals is {totals!r}: it must be a StepTotals, which counts the whole step. Pass "
            "StepTotals.from_loss_masks(...) of all the step's masks."
        )
    if local.samples.cp_group is None:
        totals.check_apart(local.cp_size)
    weights = weigh(aggregation, local, totals)
    totals.check_covers(local.samples)
    return weights


def rehearse(aggregation: Aggregation, samples: Samples) -> set[str]:
    """Call the mode before the step is counted, so that wrong keys, labels and shapes raise already.

    Returns the keys that the mode asked for.
    """
    inputs = ModeInputs(aggregation.mode, samples, None, aggregation.divisor, aggregation.units)
    if len(samples):
        _beside(aggregation.mode, inputs)  # of part of a step they need not be finite
    return inputs.asked


def weigh(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """The weight of every token that this rank holds, mask included: ``sum_t w_t * loss_t`` is its share of the loss.

    float32 [num_local_tokens] on the host, in the order of the layout; 0 where the mask is 0. Where every CP rank holds
    every token (`Gathered`), each has 1/cp_size of the weight.
    """
    if not len(local.samples):
        return torch.zeros(len(local), dtype=torch.float32, device="cpu")
    inputs = ModeInputs(aggregation.mode, local.samples, totals, aggregation.divisor, aggregation.units)
    return _applied(local, _beside(aggregation.mode, inputs), f"the mode {aggregation.mode.name!r}")


def unit_weights(local: LocalTokens, sizes: Sequence[float] | None = None) -> Tensor:
    """``m / D`` for every token that this rank holds: the weight inside its unit, without the number of units.

    For a trainer that divides by that number itself. ``sizes``: D of each sample; None for its own mask sum.
    """
    of_samples = local.samples.mask_sums if sizes is None else np.asarray(sizes, np.float64)
    with np.errstate(divide="ignore"):
        return _applied(local, 1 / of_samples, "unit sizes")


@np.errstate(all="ignore")  # what is not finite is refused
def _applied(local: LocalTokens, beside: Floats, of: str) -> Tensor:
    """The mask times the mode's weights (`_beside`), as float32 and shared by CP copies.

    ValueError for a weight of an active token that is not finite, or that float32 rounds to 0.
    """
    per_token = beside.ndim == 2
    exact = (local.of(beside[0]) if per_token else beside) / local.copies
    exact[(local.mask if per_token else local.samples.mask_sums) == 0] = 0
    rounded = exact.astype(np.float32)
    of_tokens = rounded if per_token else local.spread(rounded)
    weights = local.mask.astype(np.float32, copy=False) * of_tokens
    is_finite, vanishes = np.isfinite(rounded).all(), ((np.abs(exact) < _TINY) & (exact != 0)).any()
    if not local.samples.holds_flags:  # a product of two large or small numbers need not be what they are
        is_finite &= np.isfinite(weights).all()
        vanishes |= ((np.abs(weights) < _TINY) & (local.mask != 0) & (of_tokens != 0)).any()
    if not is_finite:
        raise ValueError(
            f"token weights with NaN or Inf from {of}: weights must be finite where a mask is not 0. Use 0 to leave "
            "tokens out."
        )
    if vanishes:
        raise ValueError(
            f"a token weight from {of} that float32 rounds to 0: the token would silently not be trained. Use a "
            "smaller divisor, or larger mask values."
        )
    with torch.inference_mode(False):  # they serve in training too
        return torch.from_numpy(weights)


@np.errstate(all="ignore")
def _beside(mode: Mode, inputs: ModeInputs) -> Floats:
    """Weights that a mode returns: one number per sample, [num_samples], or per token, [1, total_tokens]."""
    returned, samples = mode.function(inputs), inputs.batch
    if isinstance(returned, np.ndarray) and returned.dtype == object:  # of ids per token
        returned = list(returned)
    if isinstance(returned, list | tuple) and all(np.ndim(row) == 1 for row in returned):
        return samples.in_buffer([to_array(row) for row in returned])[None]
    array = to_array(returned)
    if array.dtype.kind not in "fiu" or array.shape not in ((), (len(samples),)):
        raise TypeError(
            f"the mode {mode.name!r} returned {array.dtype} of shape {array.shape}: it must return a number, "
            f"{len(samples)} numbers (one per sample), or a list of rows (one per sample, one weight per token). Leave "
            "the mask out: the library multiplies by it."
        )
    return array.astype(np.float64) if array.ndim else np.full(len(samples), float(array))
