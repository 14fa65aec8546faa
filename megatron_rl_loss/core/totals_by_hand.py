"""Reducers by totals that a user counted, which may be of a part of the step; a plan counts its own."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation, resolve, weigh
from megatron_rl_loss.core.collectives import world_size
from megatron_rl_loss.core.counting import COUNTINGS, StepTotals, UnitCounting
from megatron_rl_loss.core.masks import Mask
from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.core.reducers import WeightedSum
from megatron_rl_loss.core.samples import LocalTokens, Samples, as_samples
from megatron_rl_loss.core.segments import segments_by

#: Sums of fractional masks may differ in the last bit.
_SLACK = 1 + 1e-9


def reducer_by(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> WeightedSum:
    """The reducer by totals that a user made: ValueError for totals of a part of the step."""
    if not isinstance(totals, StepTotals):
        raise TypeError(
            f"totals is {totals!r}: it must be a StepTotals, which counts the whole step. Pass "
            "StepTotals.of(...) of all the step's masks."
        )
    if local.samples.cp_group is None:
        _check_apart(totals, local.cp_size)
    reducer = WeightedSum(partial(weigh, aggregation, local, totals), local, aggregation)
    _check_covers(totals, local.samples)
    return reducer


def _check_apart(totals: StepTotals, cp_size: int) -> None:
    """Raise ValueError for a data-parallel group so large that it must contain context-parallel ranks."""
    if totals.dp_size > 1 and cp_size > 1 and totals.dp_size * cp_size > world_size():
        raise ValueError(
            f"totals over a dp_group of {totals.dp_size} ranks, and cp_size={cp_size}, in a job of {world_size()} "
            "ranks: the dp_group contains context-parallel ranks, which hold the same samples. Pass the "
            "data-parallel group without CP."
        )


def _check_covers(totals: StepTotals, samples: Samples) -> None:
    """Raise ValueError for totals below the counts of these samples, so of a part of the step."""
    if not len(samples):
        return
    _check_fits("step_tokens", float(np.add.reduce(samples.mask_sums)), totals.step_tokens)
    for name, units in totals.units.items():
        if name not in {"sample", *samples.parts} and not (name == "rollout" and units.have_ids):
            continue
        if not units.have_ids and min(units.number.values()) >= len(samples):
            continue  # units without ids are samples, which cannot be more than these
        segments = segments_by(name, samples, "totals")
        if segments.have_ids and units.have_ids and len(segments):
            whole = units.at("tokens", segments.ids, f"{name} id", segments.sample)
            here = segments.unit_mask_sums[segments.unit]
            worst = int((here - whole * _SLACK).argmax())
            _check_fits(f"mask tokens of one {name}", float(here[worst]), float(whole[worst]))
        for counting, number in units.number.items():
            if number < segments.num_units:  # else these samples cannot be more units
                counts = np.bincount(segments.unit, COUNTINGS[counting].segment_values(segments))
                _check_fits(f"{name} units ({counting})", int((counts > 0).sum()), number)


def _check_fits(name: str, here: float, whole: float) -> None:
    """Raise ValueError for a count of the whole step that is below that of some samples in it."""
    if here > whole * _SLACK:
        raise ValueError(
            f"{name} of {whole:g} in the totals, and {here:g} in these samples alone: totals must count the whole "
            "step. Make them from all of its samples, on all ranks."
        )


Reducer = Callable[[Tensor], Tensor]


def make_pg_loss_reducer(
    mode: str | Mode | ModeFunction,
    samples: Samples | Iterable[Mask],
    *,
    totals: StepTotals,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    cp_rank: int | None = None,
    cp_size: int = 1,
) -> WeightedSum:
    """``reducer(per_token_loss) -> share``: this rank's part of the step loss, of one micro-batch. Parts add up.

    >>> masks = [[1, 1, 0], [1]]
    >>> totals = StepTotals.of(masks)
    >>> make_pg_loss_reducer("token_mean", masks, totals=totals)(torch.tensor([1.0, 2.0, 9.0, 6.0]))
    tensor(3.)

    A trainer that averages gradients over ranks (DDP, FSDP) trains on ``share`` times the number of these ranks.

    Args:
        mode: ``sample_mean``, ``prompt_mean``, ``token_mean``, ``constant``, ``token_sum``, another framework's name
            (``verl:token-mean``), your own, or a function of `ModeInputs`.
        samples: of the micro-batch: masks, layout, ids and labels; or its masks alone.
        totals: of the whole step. Totals of less are refused; of more than the step no micro-batch can tell.
        divisor: L of ``constant``, in tokens (the generation budget, say), or d of ``token_sum``.
        units: count ``all`` of them (the default), those with a token of nonzero weight (``active``), or these and the
            samples with a true label ``counted`` (``counted``).
        cp_rank, cp_size: this rank's place in its context-parallel group; cp_rank is required where cp_size > 1.

    Returns:
        A function of the local losses (float, in the layout's order); its value is 0-dim float32 (float64 of float64
        losses), connected to the graph even without an active token. NaN and Inf at masked positions are ignored.

    Raises:
        ValueError, TypeError: unknown mode; a divisor that is missing, unusable or without effect; totals without what
            the mode counts, or smaller than this micro-batch; anything `Samples` refuses.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    local = as_samples(samples).local(place_in_cp(cp_rank, cp_size), cp_size)
    return reducer_by(aggregation, local, totals)


def place_in_cp(cp_rank: int | None, cp_size: int) -> int:
    """The CP rank; None is allowed where cp_size is 1."""
    if cp_rank is None and cp_size != 1:
        raise ValueError(
            f"cp_size={cp_size} without a cp_rank: each CP rank holds other tokens. Pass cp_rank=cp_group.rank()."
        )
    return 0 if cp_rank is None else cp_rank
