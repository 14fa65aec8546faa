"""What is asked of process groups: sums over them, rows to the owner of their key, errors to every rank."""

import math
from collections.abc import Callable, Collection, Sequence
from types import EllipsisType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import BadBatchError

Group = dist.ProcessGroup
Result = TypeVar("Result")


# --- groups


def if_several(group: Group | None) -> Group | None:
    """The group, or None where it has one rank and nothing is to be exchanged."""
    return group if size_of(group) > 1 else None


def several(*groups: Group | None) -> list[Group]:
    """Those of the groups that have several ranks."""
    return [group for group in groups if group is not None and size_of(group) > 1]


def rank_in(group: Group | None) -> int:
    return 0 if group is None else group.rank()


def size_of(group: Group | None) -> int:
    """Its ranks; 1 without a group. Refuses what is no group."""
    if group is None:
        return 1
    if isinstance(group, Tensor) or not hasattr(group, "size"):
        raise TypeError(
            f"a process group of type {type(group).__name__}: it must be a ProcessGroup of torch.distributed, or None. "
            "Pass what dist.new_group or Megatron's parallel_state returns."
        )
    return group.size()


def world_size() -> int:
    """Ranks of this job that `torch.distributed` knows of."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def stated_dp_group(dp_group: Group | EllipsisType | None, what: str) -> Group | None:
    """The data-parallel group that the user named, or None for none; refuses no word of it among several ranks."""
    if not isinstance(dp_group, EllipsisType):
        return dp_group
    if world_size() > 1:
        raise ValueError(
            f"{what} of {world_size()} ranks without a dp_group: counts must be summed over the ranks that hold other "
            "samples. Pass dp_group=..., or dp_group=None if this rank alone has the whole step."
        )
    return None


def world_rank() -> int:
    """This rank's number among all of this job."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def device_of(group: Group) -> torch.device:
    """Where the group's backends take tensors: the host if one of them does ("cpu:gloo,cuda:nccl")."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_reduce(values: Tensor, group: Group | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce values on the host over the group, in place."""
    if group is not None:
        moved = values.to(device_of(group))
        dist.all_reduce(moved, op=op, group=group)
        values.copy_(moved)


def agree_on(mine: Collection[str], names: Sequence[str], groups: Sequence[Group]) -> tuple[str, ...]:
    """Those of the names that some rank of the groups has."""
    flags = torch.tensor([float(name in mine) for name in names], dtype=torch.float64, device="cpu")
    for group in several(*groups):
        all_reduce(flags, group, dist.ReduceOp.MAX)
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag > 0)


def gather_objects(value: Result, group: Group) -> list[Result]:
    """The values of all ranks of the group, on each of them."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


# --- errors to every rank


def attempt(prepare: Callable[[], Result]) -> Result | Exception:
    """What `prepare` returns, or raises: a failure that is to travel to the other ranks first."""
    try:
        return prepare()
    except Exception as error:
        return error


def raise_together(failed: bool, failure: Exception | None, groups: Sequence[Group]) -> None:
    """If any rank failed, raise on all of them, with every failing rank's reason (costs collectives only then)."""
    if not failed:
        return
    if failure is not None and not groups:
        raise failure
    reasons = {} if failure is None else {dist.get_rank(): f"{type(failure).__name__}: {failure}"}
    for group in groups:
        reasons = {rank: reason for part in gather_objects(reasons, group) for rank, reason in part.items()}
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in sorted(reasons.items()):
        ranks_of.setdefault(reason, []).append(rank)
    listed = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {reason}" for reason, ranks in ranks_of.items()
    )
    raise BadBatchError(f"All ranks stopped here, no weight was changed. {listed}") from failure


def check_together(check: Callable[[], object], groups: Sequence[Group]) -> None:
    """Run a check on all ranks; if it raises on any of them, all raise."""
    outcome = attempt(check)
    failure = outcome if isinstance(outcome, Exception) else None
    raise_together(any(agree_on(["failed"] if failure else [], ["failed"], groups)), failure, groups)


def gather_parts(prepare: Callable[[], Result], group: Group | None) -> list[Result]:
    """What `prepare` returns on each rank of the group; if any rank failed, all raise."""
    mine = attempt(prepare)
    failure = mine if isinstance(mine, Exception) else None
    group = if_several(group)
    if group is None:
        raise_together(failure is not None, failure, [])
        return [mine]  # type: ignore[list-item]
    parts: list[Any] = gather_objects(mine if failure is None else None, group)
    raise_together(any(part is None for part in parts), failure, [group])
    return parts


#: Up to so many ranks, rows go straight to their owner.
ONE_HOP_RANKS = 64


def columns_of(ranks: int) -> int:
    """Columns of the grid of ranks: their largest divisor up to the root of their number; one line for few ranks."""
    if ranks <= ONE_HOP_RANKS:
        return ranks
    return max(columns for columns in range(1, math.isqrt(ranks) + 1) if ranks % columns == 0)


class Exchange:
    """Rows to the owner rank of their key, which is their first column, and answers back.

    Above `ONE_HOP_RANKS` ranks are a grid. A row goes along a line of it to the column of its owner, then along that
    column: with n ranks and c columns a rank sends to c - 1 and n / c - 1 others, not n - 1; a row travels twice.
    """

    def __init__(self, group: Group | None) -> None:
        self._group, self._hops = group, list[_Hop]()

    def to_owners(self, rows: Tensor) -> Tensor:
        ranks, columns = size_of(self._group), columns_of(size_of(self._group))
        line, column = divmod(rank_in(self._group), columns)
        of_line, of_column = range(line * columns, (line + 1) * columns), range(column, ranks, columns)
        for peers in (of_line, of_column):
            if self._group is not None and len(peers) > 1:
                scrambled = rows[:, 0] * -7046029254386353131  # without their regularity keys spread evenly over ranks
                owner = ((scrambled ^ (scrambled >> 32)) & (2**62 - 1)).remainder(ranks)
                to = owner % columns if peers is of_line else owner // columns
                self._hops.append(_Hop(to, peers, self._group))
                rows = self._hops[-1].forth(rows)
        return rows

    def answers(self, rows: Tensor) -> Tensor:
        for hop in reversed(self._hops):
            rows = hop.back(rows)
        return rows


class _Hop:
    """Rows to some peers of the group, numbered from 0, and as many rows back."""

    def __init__(self, to: Tensor, peers: range, group: Group) -> None:
        self._peers, self._group = peers, group
        self._order = to.argsort(stable=True)
        self._sent = to.bincount(minlength=len(peers))
        ones = torch.ones_like(self._sent)
        self._received = self._swap(self._sent, ones, ones)

    def forth(self, rows: Tensor) -> Tensor:
        return self._swap(rows[self._order], self._sent, self._received)

    def back(self, rows: Tensor) -> Tensor:
        back = self._swap(rows, self._received, self._sent)
        unsorted = torch.empty_like(back)
        unsorted[self._order] = back
        return unsorted

    def _swap(self, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        """So many rows to each peer, and from each."""
        rows = rows.contiguous().to(device_of(self._group))
        out = rows.new_empty(int(received.sum()), *rows.shape[1:])
        if len(self._peers) == self._group.size():
            dist.all_to_all_single(out, rows, received.tolist(), sent.tolist(), group=self._group)
            return out.cpu()
        swaps = []
        for peer, mine, theirs in zip(
            self._peers, rows.split(sent.tolist()), out.split(received.tolist()), strict=True
        ):
            if peer == self._group.rank():
                theirs.copy_(mine)
                continue
            rank = dist.get_global_rank(self._group, peer)
            pairs = (dist.isend, mine), (dist.irecv, theirs)
            swaps += [dist.P2POp(swap, part, rank, self._group) for swap, part in pairs if part.numel()]
        for work in dist.batch_isend_irecv(swaps) if swaps else []:
            work.wait()
        return out.cpu()
