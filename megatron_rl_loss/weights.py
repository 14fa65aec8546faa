"""Where a token's weight is computed: ``w = mask / (D * U)``, the one noun that everything else here is made of.

Reducers sum weight * loss; folding multiplies weights to advantages; the frameworks' adapters ask for the same weights.
"""

from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.aliases import Aggregation, resolve
from megatron_rl_loss.checks import place_in_cp, require
from megatron_rl_loss.errors import refused
from megatron_rl_loss.masks import SMALLEST, Values
from megatron_rl_loss.modes import Mode, ModeFunction, ModeInputs, OwnMode, Weights
from megatron_rl_loss.samples import LocalTokens, Samples
from megatron_rl_loss.totals import StepTotals, UnitCounting, UnitCounts


def token_weights(
    mode: str | ModeFunction,
    samples: Samples,
    totals: StepTotals,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    cp_rank: int | None = None,
    cp_size: int = 1,
) -> Tensor:
    """The weight of every token that this rank holds, mask included: ``sum_t w_t * loss_t`` is its share of the loss.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> token_weights("sample_mean", samples, StepTotals.from_loss_masks(samples.loss_masks))
    tensor([0.2500, 0.2500, 0.0000, 0.5000])

    Args:
        mode, divisor, units, totals: as in `make_pg_loss_reducer`.
        samples: one micro-batch.
        cp_rank, cp_size: this rank's place in its context-parallel group; a rank of several must be given.

    Returns:
        float32 [num_local_tokens], on the masks' device, in the order of the layout; 0 where the mask is 0. Where every
        CP rank holds every token (`Gathered`), each has 1/cp_size of the weight.

    Raises:
        ValueError, TypeError: as `make_pg_loss_reducer`.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    return weigh_at_the_door(aggregation, samples.local(place_in_cp(cp_rank, cp_size), cp_size), totals)


def weigh_at_the_door(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """`weigh`, and refuse what a user may hand in and a look-ahead never does: unsound masks, totals of a part."""
    if not isinstance(totals, StepTotals):
        raise refused("no_totals", value=totals)
    local.samples.check_masks()
    weights = weigh(aggregation, local, totals)
    totals.check_covers(local.samples)
    return weights


def weigh(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """`token_weights` of parts that are made already."""
    mode, samples = aggregation.mode, local.samples
    if isinstance(mode, OwnMode):
        return samples.masks.tensor(local.flags * _own_weights(mode, aggregation, local, totals))
    beside = _unit_weights(mode, aggregation, local, totals)
    weights = local.flags * beside
    if (isinstance(beside, float) or not samples.masks.holds_flags) and len(samples):
        kept = beside > _TINY if samples.masks.holds_flags else samples.masks.keep_all(weights, local.flags)
        require(kept, "weights_underflow", dict)
    return samples.masks.tensor(weights)


#: The smallest float32 that is not rounded to fewer bits.
_TINY = float(np.finfo(np.float32).tiny)


def _unit_weights(mode: Mode, aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Values:
    """``1 / (D * U)`` of each token's unit, shared by the ranks that hold copies: one number, or float32 values."""
    samples = local.samples
    if not len(samples):
        return 0.0
    _check_ids_agree(mode, samples, totals)
    number = _number_of_units(mode, aggregation.units, totals) * local.copies
    size = aggregation.divisor if mode.takes_divisor else _unit_tokens(mode, samples, totals)
    assert size is not None  # resolve saw to it
    if not isinstance(size, float):  # one a sample
        if size is not samples.sums or number == 0:  # its own sum is 0 where it has no active token
            sound = ((size * float(number) > 0) | (samples.sums == 0)).all()
            require(sound, "no_units", lambda: {"counts": _counts_of(mode, aggregation.units)})
        inverse = samples.masks.inverse(size, number)
        return inverse if len(samples) == 1 else local.spread(inverse)  # one is broadcast
    if size * number == 0:
        require((samples.sums == 0).all(), "no_units", lambda: {"counts": _counts_of(mode, aggregation.units)})
    return 1 / max(size * number, SMALLEST)


def missing_counts(aggregation: Aggregation, totals: StepTotals, *, with_rollout_ids: bool) -> list[str]:
    """The counts that the mode will need and the totals do not hold, by name."""
    mode = aggregation.mode
    if isinstance(mode, OwnMode):
        return []
    if mode.unit == "step":
        needed: dict[str, object] = {} if mode.takes_divisor else {"step_tokens": totals.step_tokens}
    else:
        units = _units_of(mode, totals)
        needed = {f"{mode.unit}s.{aggregation.units}": units.counted(aggregation.units)}
        if mode.unit == "prompt" or with_rollout_ids:
            needed[f"{mode.unit}s.tokens"] = units.tokens
    return [name for name, count in needed.items() if count is None]


def _counts_of(mode: Mode, units: UnitCounting) -> str:
    """What the totals say of the mode's units, for a refusal."""
    of_unit = " or its unit's tokens" if mode.size == "tokens" else ""
    return "step_tokens" if mode.unit == "step" else f"{mode.unit}s.{units}{of_unit}"


def _check_ids_agree(mode: Mode, samples: Samples, totals: StepTotals) -> None:
    """Refuse rollout ids on one side only: samples would be counted for rollouts, or rollouts for samples."""
    if mode.unit == "step" and mode.takes_divisor:
        return  # it counts nothing
    if totals.rollouts.tokens is not None and samples.rollout_ids is None:
        raise refused("rollout_ids_in_totals_only")
    if (
        mode.unit == "rollout"
        and mode.takes_divisor
        and totals.rollouts.tokens is None
        and samples.rollout_ids is not None
    ):
        raise refused("rollout_ids_here_only")


def _number_of_units(mode: Mode, units: UnitCounting, totals: StepTotals) -> int:
    """U: how many units count in the step."""
    if mode.unit == "step":
        return 1
    number = _units_of(mode, totals).counted(units)
    if number is None:
        raise refused("count_missing", count=f"{mode.unit}s.{units}", mode=mode.name)
    return number


def _unit_tokens(mode: Mode, samples: Samples, totals: StepTotals) -> Values:
    """Mask tokens over the whole step: of the unit of each sample, float64 [num_samples], or of the step itself."""
    if mode.unit == "step":
        if totals.step_tokens is None:
            raise refused("count_missing", count="step_tokens", mode=mode.name)
        return float(totals.step_tokens)
    ids = samples.prompt_ids if mode.unit == "prompt" else samples.rollout_ids
    if ids is None and mode.unit == "prompt":
        raise refused("prompt_ids_missing", mode=mode.name, where="", remedy="Pass prompt_ids, one a sample")
    if ids is None:
        return samples.sums  # a sample is a rollout
    tokens = _units_of(mode, totals).tokens
    if tokens is None:
        raise refused("count_missing", count=f"{mode.unit}s.tokens", mode=mode.name)
    return samples.masks.from_host(tokens.of(f"{mode.unit}_ids", ids))  # type: ignore[union-attr]


def _units_of(mode: Mode, totals: StepTotals) -> UnitCounts:
    return totals.prompts if mode.unit == "prompt" else totals.rollouts


def _own_weights(mode: OwnMode, aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Values:
    """What a user's mode returned, for each token, shared by the ranks that hold copies: one number, or float32."""
    samples = local.samples
    if not len(samples):
        return 0.0
    inputs = ModeInputs(samples=samples, totals=totals, divisor=aggregation.divisor, units=aggregation.units, mode=mode)
    given: Weights = mode.function(inputs)
    if isinstance(given, Real) and not isinstance(given, bool):
        weights = torch.tensor(float(given), dtype=torch.float32, device="cpu")
    elif isinstance(given, Tensor) and (given.dim() == 0 or given.shape == (len(samples),)):
        weights = given
    elif isinstance(given, Sequence) and all(isinstance(one, Tensor) and one.dim() == 1 for one in given):
        lengths = [len(one) for one in given]
        if lengths != samples.mask_lengths:
            expected = samples.mask_lengths[:8]
            raise refused("weights_of_other_lengths", mode=mode.name, lengths=lengths[:8], expected=expected)
        weights = samples.in_buffer(given)[None]
    else:
        shown = tuple(given.shape) if isinstance(given, Tensor) else given
        raise refused("no_weights", mode=mode.name, given=shown, type=type(given).__name__, num_samples=len(samples))
    require(torch.isfinite(weights).all(), "weights_not_finite", lambda: {"mode": mode.name})
    beside = samples.masks.from_tensor((local.of(weights[0]) if weights.dim() == 2 else weights) / local.copies)
    return local.spread(beside) if weights.dim() == 1 else beside
