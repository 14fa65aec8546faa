"""Which process groups a model trains over, and objects sent over them."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_rl_loss.step.collectives import Group, attempt, gather_parts, several

Made = TypeVar("Made")
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


def from_first_tp_rank(make: Callable[[], Made], tp_group: Group, pp_group: Group | None = None) -> Made:
    """What `make` gives on the first tensor-parallel rank, on all of them, tensors on the host; or its error.

    For the batches of a packing scheduler, whose iterator is None on the other ranks. All ranks call it, inside the
    function that `plan_step` gets as ``samples``: so an error of `make` raises on every rank of the step. With
    `pp_group`, `make` returns a list of dicts; each pipeline stage may have keys of its own (tokens on the first,
    labels and loss mask on the last one), and all stages get all keys.
    """

    def of_all_stages() -> Any:
        return join_batches(gather_parts(lambda: tree_map_only(Tensor, Tensor.cpu, make()), pp_group))

    made: list[Any] = [attempt(make if pp_group is None else of_all_stages) if tp_group.rank() == 0 else None]
    if several(tp_group):
        made = tree_map_only(Tensor, Tensor.cpu, made)
        dist.broadcast_object_list(made, src=dist.get_global_rank(tp_group, 0), group=tp_group)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def join_batches(parts: Any) -> list[Any]:
    """Lists of dicts, one dict for each micro-batch -> the same with all keys of all lists."""
    return [functools.reduce(operator.or_, batches) for batches in zip(*parts, strict=True)]


def gather_to_first(values: list[Any], groups: ProcessGroupCollection) -> list[Any]:
    """The values of all ranks, on the rank that is first in every group; an empty list elsewhere. All must call it."""
    for group in several(groups.cp, groups.dp, groups.tp, groups.pp):
        gathered: list[list[Any]] | None = [[] for _ in range(group.size())] if group.rank() == 0 else None
        dist.gather_object(values, gathered, dst=dist.get_global_rank(group, 0), group=group)
        values = [value for part in gathered or [] for value in part]
    return values


def spread_from_first(value: Any, groups: ProcessGroupCollection) -> Any:
    """The value of the rank that is first in every group, on all ranks. All must call it."""
    values = [value]
    for group in several(groups.pp, groups.tp, groups.dp, groups.cp):
        dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]
