"""The collectives of the proof, which an error on one rank does not leave unfinished.

A rank whose part of a collective raises before it takes part would leave all others waiting. Such a rank takes part
all the same, with values that tell nothing, and goes on: which collectives run never depends on what a rank saw.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, all_reduce, gather_objects, several

Value = TypeVar("Value")


class Exchange:
    """Collectives of one measured step.

    Attributes:
        failure: the first error on this rank, of which the results may be worthless.
        sent: the bytes of the numbers that this rank handed to reductions.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.sent = 0

    def reduce(
        self, values: Tensor, group: Group | None, op: Any = dist.ReduceOp.SUM, otherwise: float | None = None
    ) -> None:
        """Reduce float64 values on the host over the group, in place. Without a group, or over one rank: nothing.

        Args:
            otherwise: what this rank contributes after an error; by default what makes a sum NaN, and no maximum.
        """
        for over in several(group):
            self.sent += values.nbytes
            try:
                all_reduce(values, over, op)
            except Exception as error:
                self.failure = self.failure or error
                nothing = -torch.inf if op == dist.ReduceOp.MAX else torch.nan
                values.fill_(nothing if otherwise is None else otherwise)
                all_reduce(values, over, op)

    def gather(self, value: Value, group: Group) -> list[Value | None]:
        """The values of all ranks of the group; None for a rank that failed."""
        try:
            return [*gather_objects(value, group)]
        except Exception as error:
            self.failure = self.failure or error
            return [*gather_objects(None, group)]

    def local(self, compute: Callable[[], Value], otherwise: Value) -> Value:
        """What this rank computes between two collectives; after an error, what takes part in the next one instead."""
        try:
            return compute()
        except Exception as error:
            self.failure = self.failure or error
            return otherwise

    def largest(self, numbers: Sequence[float], groups: Sequence[Group]) -> list[float]:
        """The largest of each number over the ranks of all groups, which are reduced over one after the other."""
        values = torch.tensor(numbers, dtype=torch.float64)
        for group in groups:
            self.reduce(values, group, dist.ReduceOp.MAX)
        return [float(value) for value in values]

    def has_failed(self, groups: Sequence[Group]) -> bool:
        """True on all ranks of the groups if some rank had an error, in this very collective too."""
        flag = torch.tensor([float(self.failure is not None)], dtype=torch.float64)
        for group in groups:
            self.reduce(flag, group, dist.ReduceOp.MAX, otherwise=1.0)
        return bool(flag > 0)

    def agree(self, mine: Collection[str], names: Sequence[str], groups: Sequence[Group]) -> tuple[str, ...]:
        """The names that some rank of the groups has."""
        flags = self.largest([float(name in mine) for name in names], groups)
        return tuple(name for name, flag in zip(names, flags, strict=True) if flag > 0)
