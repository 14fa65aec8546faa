"""Weights by totals that a user counted, which may be of a part of the step; a plan counts its own."""

import numpy as np
from torch import Tensor

from megatron_rl_loss.modes.aggregation import Aggregation
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.collectives import world_size
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import COUNTINGS

#: Sums of fractional masks may differ in the last bit.
_SLACK = 1 + 1e-9


def checked_weights(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> Tensor:
    """`weigh` with totals that a user made: ValueError for totals of a part of the step."""
    if not isinstance(totals, StepTotals):
        raise TypeError(
            f"totals is {totals!r}: it must be a StepTotals, which counts the whole step. Pass "
            "StepTotals.from_loss_masks(...) of all the step's masks."
        )
    if local.samples.cp_group is None:
        _check_apart(totals, local.cp_size)
    weights = weigh(aggregation, local, totals)
    _check_covers(totals, local.samples)
    return weights


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
    _check_fits("step_tokens", float(samples.mask_sums.sum()), totals.step_tokens)
    for name, units in totals.units.items():
        parts = samples.parts.get(name)
        if parts is not None:
            ids, at = np.unique(parts.ids, return_inverse=True)
            most = len(ids)
            if most and units.have_ids:
                here = np.bincount(at, samples.mask_sums_by(name), most)
                whole = units.at("tokens", ids, f"{name} id")
                worst = int((here - whole * _SLACK).argmax())
                _check_fits(f"mask tokens of one {name}", float(here[worst]), float(whole[worst]))
        elif name == "sample" or (name == "rollout" and units.have_ids):
            # Without ids each sample is a unit, and a rollout is a sample.
            most, at = len(samples), np.arange(len(samples))
        else:
            continue
        for counting, number in units.number.items():
            if number < most:  # else these samples cannot be more units
                counts = np.bincount(at, COUNTINGS[counting].of_parts(samples, name))
                _check_fits(f"{name} units ({counting})", int((counts > 0).sum()), number)


def _check_fits(name: str, here: float, whole: float) -> None:
    """Raise ValueError for a count of the whole step that is below that of some samples in it."""
    if here > whole * _SLACK:
        raise ValueError(
            f"{name} of {whole:g} in the totals, and {here:g} in these samples alone: totals must count the whole "
            "step. Make them from all of its samples, on all ranks."
        )
