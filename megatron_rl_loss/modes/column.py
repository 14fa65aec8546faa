"""The weights of a whole step as a data column, for a driver that holds all of its masks."""

from collections.abc import Iterable
from types import EllipsisType

from torch import Tensor

from megatron_rl_loss.modes.aggregation import resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.collectives import Group, StepGroups, stated_dp_group
from megatron_rl_loss.step.counting import count_step
from megatron_rl_loss.step.ids import Ids, IdsByName
from megatron_rl_loss.step.masks import Mask
from megatron_rl_loss.step.samples import Labels, Samples
from megatron_rl_loss.step.units import UnitCounting


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
    dp_group: Group | EllipsisType | None = ...,
) -> list[Tensor]:
    """The weight of every token of a whole step, a tensor per sample: a data column beside ``advantages``.

    For a driver that holds all masks of a step before it deals samples out; no collective is needed. In a job of
    several ranks state the `dp_group`, as in `StepTotals.from_loss_masks`: None where this rank has the whole step.

    >>> weights_column("sample_mean", [torch.tensor([1, 1, 0]), torch.tensor([1])])
    [tensor([0.2500, 0.2500, 0.0000]), tensor([0.5000])]

    Returns a float32 tensor per sample, as long as its mask. Arguments and errors as in `make_pg_loss_reducer`.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    samples = Samples(loss_masks, rollout_ids=rollout_ids, prompt_ids=prompt_ids, ids=ids, labels=labels)
    groups = StepGroups(stated_dp_group(dp_group, "weights"))
    totals = count_step([samples], groups, sums=list(aggregation.mode.sums.values()))
    return list(weigh(aggregation, samples.local(0, 1), totals).split(samples.mask_lengths))
