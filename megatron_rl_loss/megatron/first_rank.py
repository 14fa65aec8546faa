"""Batches that the first tensor-parallel rank alone has, sent to the others."""

import functools
import operator
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_rl_loss.core.collectives import Group, attempt, gather_parts, rank_in, several, unwrapped
from megatron_rl_loss.core.errors import BadBatchError

Batches = TypeVar("Batches")


def from_first_tp_rank(make: Callable[[], Batches], tp_group: Group, pp_group: Group | None = None) -> Batches:
    """Call `make` on the first tensor-parallel rank and return its result, tensors on the host, on all of them.

    For the batches of a packing scheduler, whose iterator is None on the other ranks. All ranks call it inside the
    function that `plan_step` gets as ``samples``, so an error of `make` is raised on every rank of the step. With
    `pp_group`, `make` returns a list of dicts. Each pipeline stage may have keys of its own (tokens on the first stage,
    labels and loss mask on the last), and all stages get all keys.

    Raises the errors of `make`, and those of pickle for a result that cannot be sent.
    """
    if not several(tp_group, pp_group):
        return make()

    # The first TP ranks of all stages meet in one gather; the other TP ranks take no part in it, and wait for the
    # broadcast of their stage.
    def sent() -> bytes:
        parts = gather_parts(lambda: pickle.dumps(tree_map_only(Tensor, Tensor.cpu, make())), pp_group)
        return parts[0] if pp_group is None else pickle.dumps(join_batches(map(pickle.loads, parts)))

    # An error travels in the place of the batches: the other ranks of the TP group wait for one of the two.
    is_first = rank_in(tp_group) == 0
    mine = attempt(sent) if is_first else None
    outcome: list[Any] = [f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine]
    if several(tp_group):
        known = unwrapped(tp_group)
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(known, 0), group=known)
    if isinstance(mine, Exception):
        raise mine
    if isinstance(outcome[0], str):
        raise BadBatchError(f"the first tensor-parallel rank could not make its batches: {outcome[0]}")
    result: Batches = pickle.loads(outcome[0])
    return result


def join_batches(parts: Iterable[Any]) -> list[Any]:
    """Merge lists of dicts, one dict for each micro-batch, into one list of dicts with the keys of all lists."""
    return [functools.reduce(operator.or_, batches) for batches in zip(*parts, strict=True)]
