"""Where a token's weight is computed: ``w = mask / (D * U)``, the one noun that everything else here is made of.

Reducers sum weight * loss; folding multiplies weights to advantages; the frameworks' adapters ask for the same weights.
"""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_one_each, place_in_cp, require
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction, ModeInputs, OwnMode, Weights
from megatron_rl_loss.step.ids import Ids
from megatron_rl_loss.step.masks import inverse
from megatron_rl_loss.step.samples import Labels, LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals, TokensById, UnitCounting, UnitCounts, reduce_step_totals


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

    Raises ValueError and TypeError as `make_pg_loss_reducer`.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    if not isinstance(samples, Samples):
        raise TypeError(
            f"samples is a {type(samples).__name__}: it describes the micro-batch's masks. Pass Samples(loss_masks)."
        )
    return checked_weights(aggregation, samples.local(place_in_cp(cp_rank, cp_size), cp_size), totals)


def weights_column(
    mode: str | ModeFunction,
    loss_masks: Sequence[Tensor],
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    labels: Labels | None = None,
) -> list[Tensor]:
    """The weight of every token of a whole step, a tensor per sample: a data column beside ``advantages``.

    For a driver that holds all masks of a step before it deals samples out. It needs no collective. A trainer that adds
    up weight * loss, however it cuts the column with its other columns, then has the step loss of the mode.

    >>> weights_column("sample_mean", [torch.tensor([1, 1, 0]), torch.tensor([1])])
    [tensor([0.2500, 0.2500, 0.0000]), tensor([0.5000])]

    Masks, ids and labels are those of all samples of the step, as in `Samples`; the rest, and errors, are as in
    `make_pg_loss_reducer`. Returns a float32 tensor per sample, as long as its mask, on the masks' device.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    samples = Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids, labels=labels)
    statistics = aggregation.mode.statistics if isinstance(aggregation.mode, OwnMode) else None
    totals = reduce_step_totals([samples], statistics=statistics)
    return list(checked_weights(aggregation, samples.local(0, 1), totals).split(samples.mask_lengths))


def checked_weights(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """`weigh`; refuses unsound masks and totals of a part of the step, which a user may hand in."""
    if not isinstance(totals, StepTotals):
        raise TypeError(
            f"totals is {totals!r}: the denominators are those of the whole step, and never guessed from a "
            "micro-batch. Pass StepTotals.from_loss_masks(...) of all the step's masks."
        )
    if local.samples.cp_group is None:
        totals.check_apart(local.cp_size)
    local.samples.check_masks()
    weights = weigh(aggregation, local, totals)
    totals.check_covers(local.samples)
    return weights


def weigh(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """`token_weights` of parts that are made already."""
    mode, samples = aggregation.mode, local.samples
    if isinstance(mode, OwnMode):
        return local.mask * _own_weights(mode, aggregation, local, totals)
    if not len(samples):
        return unit_weights(local)
    _check_ids(mode, samples, totals)
    for name in missing_counts(aggregation, totals, with_rollout_ids=samples.rollout_ids is not None):
        raise ValueError(
            f"totals without {name}: loss aggregation {mode.name!r} needs it. Make the totals with the ids of the "
            "samples (StepTotals.from_loss_masks), or give the count yourself."
        )
    if mode.unit == "step":
        num_units: int | None = 1
        named = "step_tokens"
    else:
        num_units = _counts(mode, totals).counted(aggregation.units)
        named = f"{mode.unit}s.{aggregation.units}" + (" or its unit's tokens" if mode.size == "tokens" else "")
    assert num_units is not None  # missing_counts has seen to it
    size = aggregation.divisor if mode.takes_divisor else _unit_tokens(mode, samples, totals)
    return unit_weights(local, size, num_units, named=f"totals whose {named} are 0")


def unit_weights(
    local: LocalTokens,
    size: float | Tensor | Sequence[float] | None = None,
    num_units: float = 1,
    *,
    named: str = "a unit whose size is 0",
) -> Tensor:
    """``m / (D * U)`` for every token that this rank holds; without U, ``m / D``: the weight inside a token's unit.

    For a trainer that divides by the number of units itself. `token_weights` takes D and U from the step's totals.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> unit_weights(samples.local(0, 1))
    tensor([0.5000, 0.5000, 0.0000, 1.0000])

    Args:
        local: the tokens that this rank holds.
        size: D: a number for all tokens (a divisor, the tokens of the step), or a number per sample (the mask tokens
            that its unit has in the whole step), [num_samples]; None where each sample is a unit: its mask sum.
        num_units: U.
        named: how an error names a D * U of 0.

    Returns what `token_weights` returns.

    Raises:
        ValueError: D * U is 0 for an active token; a weight that float32 rounds to 0; sizes of another number than
            samples. On a device, a device assertion.
    """
    samples = local.samples
    if not len(samples):
        return local.mask
    sums, number = samples.mask_sums, num_units * local.copies
    sizes = sums
    if isinstance(size, int | float):
        sizes = torch.full_like(sums, size)
    elif size is not None:
        of_host = size if isinstance(size, Tensor) else torch.tensor(size, dtype=torch.float64, device="cpu")
        sizes = of_host.to(sums.device, torch.float64, non_blocking=True)
        check_one_each("unit sizes", len(sizes), "loss masks", len(samples))
    if size is not None or number == 0:  # a sample's own sum is 0 only where it has no active token
        require(
            ((sizes * number > 0) | (sums == 0)).all(),
            lambda: f"active tokens in a micro-batch, and {named}",
            "the totals must be those of the whole step. Make them from all its masks.",
        )
    of_samples = inverse(sizes, number)
    weights = local.mask * local.spread(of_samples)
    if size is not None or not samples.holds_flags:  # a sample's own sum is no reason to vanish
        require(
            (of_samples >= _TINY).all() if samples.holds_flags else ((weights == 0) == (local.mask == 0)).all(),
            lambda: "a token weight that float32 rounds to 0",
            "the token would silently not be trained. Use a smaller divisor, or masks that are not so small.",
        )
    return weights


#: The smallest float32 that is not rounded to fewer bits.
_TINY = torch.finfo(torch.float32).tiny


def missing_counts(aggregation: Aggregation, totals: StepTotals, *, with_rollout_ids: bool) -> list[str]:
    """The counts that the mode will need and the totals do not hold, by name."""
    mode = aggregation.mode
    if isinstance(mode, OwnMode):
        return [
            f"the statistic {name!r}"
            for name, statistic in mode.statistics.items()
            if name not in totals.statistics and (with_rollout_ids or not statistic.of_rollouts)
        ]
    if mode.unit == "step":
        return ["step_tokens"] if totals.step_tokens is None and not mode.takes_divisor else []
    counts = _counts(mode, totals)
    missing = [f"{mode.unit}s.{aggregation.units}"] if counts.counted(aggregation.units) is None else []
    by_id = mode.unit == "prompt" or with_rollout_ids
    return [*missing, f"{mode.unit}s.tokens"] if by_id and counts.tokens is None else missing


def _counts(mode: Mode, totals: StepTotals) -> UnitCounts:
    return totals.prompts if mode.unit == "prompt" else totals.rollouts


def _check_ids(mode: Mode, samples: Samples, totals: StepTotals) -> None:
    """Refuse ids that the mode needs and does not get, or rollout ids on one side only."""
    if mode.unit == "step" and mode.takes_divisor:
        return  # it counts nothing
    counted_by_id = totals.rollouts.tokens is not None
    if counted_by_id and samples.rollout_ids is None:  # samples would be counted for rollouts
        raise ValueError(
            "totals made with rollout_ids, a micro-batch without: its units cannot be told. Pass rollout_ids with "
            "every micro-batch."
        )
    if mode.unit == "rollout" and mode.takes_divisor and not counted_by_id and samples.rollout_ids is not None:
        raise ValueError(
            "a micro-batch with rollout_ids, totals made without: the totals may count samples for rollouts. Make the "
            "totals with them; if they count rollouts already, leave the ids out here."
        )
    if mode.unit == "prompt" and samples.prompt_ids is None:
        raise ValueError(
            f"loss aggregation {mode.name!r} without prompt_ids: it averages inside each prompt group. Pass "
            "prompt_ids, one per sample."
        )


def _unit_tokens(mode: Mode, samples: Samples, totals: StepTotals) -> float | Tensor | None:
    """Mask tokens over the whole step, of the unit of each sample or of the step; None where each sample is a unit."""
    if mode.unit == "step":
        return totals.step_tokens
    ids = samples.prompt_ids if mode.unit == "prompt" else samples.rollout_ids
    tokens = _counts(mode, totals).tokens
    return tokens.of(f"{mode.unit}_ids", ids) if ids is not None and isinstance(tokens, TokensById) else None


def _own_weights(mode: OwnMode, aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """What a user's mode returned, for each token, shared by the ranks that hold copies: one number, or float32."""
    samples = local.samples
    if not len(samples):
        return local.mask
    inputs = ModeInputs(samples=samples, totals=totals, divisor=aggregation.divisor, units=aggregation.units, mode=mode)
    returned: Weights = mode.function(inputs)
    if isinstance(returned, Real) and not isinstance(returned, bool):
        weights = torch.tensor(float(returned), dtype=torch.float32, device="cpu")
    elif isinstance(returned, Tensor) and (returned.dim() == 0 or returned.shape == (len(samples),)):
        weights = returned
    elif isinstance(returned, Sequence) and all(isinstance(one, Tensor) and one.dim() == 1 for one in returned):
        lengths = [len(one) for one in returned]
        if lengths != samples.mask_lengths:
            expected = samples.mask_lengths[:8]
            raise ValueError(
                f"token weights of lengths {lengths[:8]} from the mode {mode.name!r}: they must have the lengths of "
                f"the loss masks, {expected}. Return one weight per mask entry."
            )
        weights = samples.in_buffer(returned)[None]
    else:
        shown = tuple(returned.shape) if isinstance(returned, Tensor) else returned
        raise TypeError(
            f"the mode {mode.name!r} returned {shown!r} ({type(returned).__name__}): it must return weights beside the "
            f"mask: a number, a tensor of {len(samples)} (one per sample), or a list of 1-D tensors (one per "
            "sample, one weight per token). Leave the mask out, the library multiplies by it."
        )
    require(
        torch.isfinite(weights).all(),
        lambda: f"token weights with NaN or Inf from the mode {mode.name!r}",
        "they must be finite. Use 0 to leave tokens out.",
    )
    beside = local.of(weights[0]) if weights.dim() == 2 else weights
    beside = (beside.detach() / local.copies).float().to(local.mask.device, non_blocking=True)
    return local.spread(beside) if weights.dim() == 1 else beside
