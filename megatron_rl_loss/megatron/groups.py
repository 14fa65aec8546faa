"""Which process groups a model trains over, and objects sent over them."""

from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from megatron_rl_loss.step.collectives import Group, if_several

_NEEDED = ("tp", "pp", "cp", "dp", "dp_cp")


def groups_of(chunk: Any, of_user: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """The user's groups, else the model's own, else those of Megatron's parallel state.

    Raises ValueError for a collection without one of the groups.
    """
    groups = of_user
    if groups is None:
        groups = getattr(unwrap_model(chunk), "pg_collection", None)
        if groups is None or any(getattr(groups, name, None) is None for name in _NEEDED):
            groups = ProcessGroupCollection.use_mpu_process_groups(list(_NEEDED))
    missing = [name for name in _NEEDED if getattr(groups, name, None) is None]
    if missing:
        raise ValueError(
            f"a ProcessGroupCollection without {', '.join(missing)}: the step's totals need them. Set those groups."
        )
    return groups


def gather_to_first(values: list[Any], groups: ProcessGroupCollection) -> list[Any]:
    """The values of all ranks, on the rank that is first in every group; an empty list elsewhere. All must call it."""
    for group in (groups.cp, groups.dp, groups.tp, groups.pp):
        values = _gather(values, group)
    return values


def _gather(values: list[Any], group: Group) -> list[Any]:
    if if_several(group) is None:
        return values
    gathered: list[list[Any]] | None = [[] for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather_object(values, gathered, dst=dist.get_global_rank(group, 0), group=group)
    return [value for part in gathered or [] for value in part]


def spread_from_first(value: Any, groups: ProcessGroupCollection) -> Any:
    """The value of the rank that is first in every group, on all ranks. All must call it."""
    values = [value]
    for group in (groups.pp, groups.tp, groups.dp, groups.cp):
        if if_several(group) is not None:
            dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]
