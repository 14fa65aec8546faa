"""The process groups of a model, and objects that are sent over them."""

import functools
import operator
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.step.collectives import Group, attempt, gather_parts, several

Made = TypeVar("Made")
_NEEDED = ("tp", "pp", "cp", "dp", "dp_cp")


def groups_of(chunk: Any, of_user: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """The user's groups, else the model's own, else those of Megatron's parallel state.

    Raises ValueError for a collection that lacks one of the groups.
    """
    groups = of_user
    if groups is None:
        groups = getattr(unwrap_model(chunk), "pg_collection", None)
        if groups is None or any(getattr(groups, name, None) is None for name in _NEEDED):
            groups = ProcessGroupCollection.use_mpu_process_groups(list(_NEEDED))
    missing = [name for name in _NEEDED if getattr(groups, name, None) is None]
    if missing:
        raise ValueError(
            f"a ProcessGroupCollection without {', '.join(missing)}: the counts of a step are reduced over these "
            "groups. Set them in the collection."
        )
    return groups


def from_first_tp_rank(make: Callable[[], Made], tp_group: Group, pp_group: Group | None = None) -> Made:
    """Call `make` on the first tensor-parallel rank and return its result, tensors on the host, on all of them.

    For the batches of a packing scheduler, whose iterator is None on the other ranks. All ranks call it inside the
    function that `plan_step` gets as ``samples``, so an error of `make` is raised on every rank of the step. With
    `pp_group`, `make` returns a list of dicts. Each pipeline stage may have keys of its own (tokens on the first stage,
    labels and loss mask on the last), and all stages get all keys.

    Raises the errors of `make`, and those of pickle for a result that cannot be sent.
    """
    if not several(tp_group, pp_group):
        return make()

    def sent() -> bytes:
        parts = gather_parts(lambda: pickle.dumps(tree_map_only(Tensor, Tensor.cpu, make())), pp_group)
        return parts[0] if pp_group is None else pickle.dumps(join_batches(map(pickle.loads, parts)))

    is_first = tp_group.rank() == 0
    mine = attempt(sent) if is_first else None
    told: list[Any] = [f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine]
    if several(tp_group):
        dist.broadcast_object_list(told, src=dist.get_global_rank(tp_group, 0), group=tp_group)
    if isinstance(mine, Exception):
        raise mine
    if isinstance(told[0], str):
        raise BadBatchError(f"the first tensor-parallel rank could not make its batches: {told[0]}")
    made: Made = pickle.loads(told[0])
    return made


def join_batches(parts: Iterable[Any]) -> list[Any]:
    """Merge lists of dicts, one dict for each micro-batch, into one list of dicts with the keys of all lists."""
    return [functools.reduce(operator.or_, batches) for batches in zip(*parts, strict=True)]


def gather_to_first(values: list[Any], groups: ProcessGroupCollection) -> list[Any]:
    """Gather all ranks' values on the rank that is first in every group; others get an empty list. All must call it."""
    for group in several(groups.cp, groups.dp, groups.tp, groups.pp):
        gathered: list[list[Any]] | None = [[] for _ in range(group.size())] if group.rank() == 0 else None
        dist.gather_object(values, gathered, dst=dist.get_global_rank(group, 0), group=group)
        values = [value for part in gathered or [] for value in part]
    return values
