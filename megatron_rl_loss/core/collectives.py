"""Collectives on the host: sums over process groups, objects of all ranks, errors carried to every rank."""

import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.core.errors import BadBatchError, only_if
from megatron_rl_loss.core.transfers import to_device

logger = logging.getLogger(__name__)
_PACKAGE = str(Path(__file__).parents[1])

#: Bytes of the first all-gather of objects, which holds small ones whole, and of the length that each begins with.
_SMALL, _LENGTH = 256, 8
#: What a broadcast costs, in bytes that could be received meanwhile; and lengths of ranks that are tried.
_BROADCAST, _MOST_LENGTHS = 2**16, 16

Group = dist.ProcessGroup
Result = TypeVar("Result")


def unwrapped(group: Group) -> Group:
    """The group that torch knows, of one that wraps it in ``.group``.

    Engines that free the memory of communicators between steps wrap groups, so that they can destroy a group and build
    it again behind the same object (slime's, miles's and ROLL's ``ReloadableProcessGroup``). torch looks a group up by
    identity, so each collective unwraps the group anew, and nothing keeps the inner one. What an engine has put in the
    place of a function of `torch.distributed` takes such a group too.

    Raises ValueError for a wrapper whose group is destroyed.
    """
    inner: Any = group
    while (held := getattr(inner, "group", inner)) is not inner:
        if held is None:
            raise ValueError(
                f"a process group of type {type(inner).__name__} whose group is destroyed: no collective can run over "
                "it. Build the engine's groups again before the step."
            )
        inner = held
    return cast(Group, inner)


def rank_in(group: Group | None) -> int:
    return 0 if group is None else unwrapped(group).rank()


def size_of(group: Group | None) -> int:
    """The number of ranks of a group; 1 without a group.

    Raises TypeError for anything else, ValueError for a group that was destroyed behind its wrapper.
    """
    if group is None:
        return 1
    inner = unwrapped(group)
    if isinstance(inner, Tensor) or not hasattr(inner, "size"):
        raise TypeError(
            f"a process group of type {type(group).__name__}: it must be a ProcessGroup of torch.distributed, or None. "
            "Pass what dist.new_group or Megatron's parallel_state returns."
        )
    return inner.size()


def several(*groups: Group | None) -> list[Group]:
    """The groups that have several ranks."""
    return [group for group in groups if group is not None and size_of(group) > 1]


def is_first_rank(groups: Sequence[Group]) -> bool:
    """True on the one rank that speaks for a job, or for those ranks of it that these groups join."""
    return all(rank_in(group) == 0 for group in groups)


@dataclass(frozen=True)
class StepGroups:
    """The process groups that a step is spread over.

    Attributes:
        dp_group: its ranks hold other samples: the data-parallel group without context parallelism, or with it where
            `Samples` have a `cp_group` of their own.
        cp_group: the context-parallel group, whose ranks hold other tokens of the same samples.
        replica_groups: further groups whose ranks hold the same samples (tensor, pipeline parallel).
    """

    dp_group: Group | None = None
    cp_group: Group | None = None
    replica_groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.replica_groups, list | tuple):
            raise TypeError(
                f"replica_groups is a {type(self.replica_groups).__name__}: it must be a list of process groups. Pass "
                "[group]."
            )

    @property
    def replicas(self) -> list[Group]:
        """Groups of several ranks that hold the same samples."""
        return several(self.cp_group, *self.replica_groups)

    @property
    def all(self) -> list[Group]:
        """All of these groups that have several ranks."""
        return [*several(self.dp_group), *self.replicas]

    @property
    def loss_groups(self) -> list[Group]:
        """Groups of several ranks whose shares of the loss add up."""
        return several(self.dp_group, self.cp_group)


@dataclass(frozen=True)
class ModelGroups:
    """The process groups of a Megatron model, by the names of its `ProcessGroupCollection`.

    Attributes:
        embd: of the stages that share an embedding, if it has one.
    """

    tp: Group
    pp: Group
    cp: Group
    dp: Group
    dp_cp: Group
    embd: Group | None = None

    @property
    def all(self) -> list[Group]:
        """Over which all ranks of the model agree, one group after the other."""
        return [self.dp_cp, self.tp, self.pp]


def ranks_of(group: Group | None) -> list[int]:
    """Global ranks of the group; this one without a group."""
    return [world_rank()] if group is None else dist.get_process_group_ranks(unwrapped(group))


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def world_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def stated_dp_group(
    dp_group: Group | EllipsisType | None,
    what: str,
    why: str = "counts must be summed over the ranks that hold other samples",
) -> Group | None:
    """The data-parallel group that the user named, or None; ValueError for neither in a job of several ranks."""
    if not isinstance(dp_group, EllipsisType):
        return dp_group
    if world_size() > 1:
        raise ValueError(
            f"{what} in a job of {world_size()} ranks without a dp_group: {why}. Pass dp_group=..., or dp_group=None "
            "if this rank alone holds the whole step."
        )
    return None


def device_of(group: Group) -> torch.device:
    """The device whose tensors the group's backends take: the host if one of them does ("cpu:gloo,cuda:nccl").

    Raises ValueError for a group that torch does not know.
    """
    inner = unwrapped(group)
    try:
        backends = dist.get_backend_config(inner)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"a process group of type {type(inner).__name__} that torch.distributed does not know: it was destroyed, "
            "or it wraps a group elsewhere than in .group. Pass a group that dist.new_group returned and that was not "
            "destroyed since."
        ) from error
    devices = [backend.partition(":")[0] for backend in backends.split(",")]
    if "cpu" in devices or not devices[0]:
        return torch.device("cpu")
    return torch.device(devices[0], getattr(torch, devices[0]).current_device())


def all_reduce(values: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce values over the group, in place, wherever each rank has them."""
    # NCCL takes tensors on its device alone; values that lie there already are reduced in place, without a copy.
    moved = to_device(values, device_of(group))
    reduce_in_place(moved, group, op)
    values.copy_(moved)


def reduce_in_place(values: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce values that lie, on every rank, on the device on which they were computed: none of them travels."""
    dist.all_reduce(values, op=op, group=unwrapped(group))


def all_gather_single(received: Tensor, sent: Tensor, group: Group) -> None:
    """torch's all-gather into one tensor, by its name in this version."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(received, sent, group=unwrapped(group))


def reduce_scatter_single(received: Tensor, sent: Tensor, group: Group) -> None:
    """torch's sum of one tensor, scattered over the ranks, by its name in this version."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, name)(received, sent, group=unwrapped(group))


def gather_objects(value: Result, group: Group) -> list[Result]:
    """The values of all ranks of the group, on each of them: one all-gather where all are small, else a second one.

    What a few ranks have beyond the others is broadcast: an all-gather would fill up all ranks to the longest.
    """
    # torch's all_gather_object always takes two collectives: lengths, then data.
    pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    length = len(pickled).to_bytes(_LENGTH, "little")
    first = _gather_bytes((length + pickled)[:_SMALL], _SMALL, group)
    lengths = [int.from_bytes(part[:_LENGTH], "little") for part in first]
    further, mine = [max(number + _LENGTH - _SMALL, 0) for number in lengths], (length + pickled)[_SMALL:]
    most = bytes_of_all(further)  # as the lengths, the same on every rank
    rest = _gather_bytes(mine[:most], most, group) if most else [b""] * len(first)
    for rank in [rank for rank, number in enumerate(further) if number > most]:
        rest[rank] += _broadcast_bytes(mine[most:], further[rank] - most, rank, group)
    whole = (part[_LENGTH:] + more for part, more in zip(first, rest, strict=True))
    return [pickle.loads(data[:length]) for data, length in zip(whole, lengths, strict=True)]


def bytes_of_all(lengths: Sequence[int]) -> int:
    """How many bytes of each rank an all-gather takes, so that a rank receives least; longer ones are broadcast."""

    def received(most: int) -> int:
        beyond = [length - most for length in lengths if length > most]
        return len(lengths) * most + sum(beyond) + _BROADCAST * len(beyond)

    return min(sorted({*lengths}, reverse=True)[:_MOST_LENGTHS], key=received)


def _broadcast_bytes(data: bytes, number: int, rank: int, group: Group) -> bytes:
    """A number of bytes of that rank of the group, on all of its ranks."""
    device = device_of(group)
    if rank == rank_in(group):
        sent = to_device(torch.frombuffer(bytearray(data), dtype=torch.uint8), device)
    else:
        sent = torch.empty(number, dtype=torch.uint8, device=device)
    dist.broadcast(sent, ranks_of(group)[rank], group=unwrapped(group))
    return sent.cpu().numpy().tobytes()


def _gather_bytes(data: bytes, most: int, group: Group) -> list[bytes]:
    """The bytes of all ranks, filled up with zeros to `most`; groups of several backends exchange them on the host."""
    sent = to_device(torch.frombuffer(bytearray(data.ljust(most, b"\0")), dtype=torch.uint8), device_of(group))
    received = sent.new_empty(size_of(group) * most)
    all_gather_single(received, sent, group=group)
    joined = received.cpu().numpy().tobytes()
    return [joined[begin : begin + most] for begin in range(0, len(joined), most)]


def agree_on(mine: Collection[str], names: Sequence[str], groups: Sequence[Group]) -> tuple[str, ...]:
    """The names that some rank of the groups has."""
    flags = torch.tensor([float(name in mine) for name in names], dtype=torch.float64, device="cpu")
    for group in several(*groups):
        all_reduce(flags, group, dist.ReduceOp.MAX)
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag > 0)


#: Checks of values on a device that the host is told of late. `make_plan` runs them, where all ranks raise together.
LATE_CHECKS: list[Callable[[], None]] = []


def attempt(prepare: Callable[[], Result]) -> Result | Exception:
    """The result of `prepare`, or its error, for `raise_together` to raise on all ranks."""
    try:
        return prepare()
    except Exception as error:
        return error


def failure_of(outcome: object) -> Exception | None:
    """The error, if what `attempt` returned is one."""
    return outcome if isinstance(outcome, Exception) else None


def warn_on_one_rank(text: str) -> None:
    """Warn; where Python's filters make errors of warnings, log: an error here would leave other ranks waiting.

    From Python 3.12 on the warning is attributed to the first caller outside this package.
    """
    try:
        if sys.version_info >= (3, 12):
            warnings.warn(text, skip_file_prefixes=(_PACKAGE,))
        else:
            warnings.warn(text, stacklevel=2)
    except UserWarning:
        logger.warning(text)


def raise_together(failed: bool, failure: Exception | None, groups: Sequence[Group]) -> None:
    """Raise on all ranks if any of them failed, with every failing rank's reason (costs collectives only then)."""
    if not failed:
        return
    if failure is not None and not groups:
        raise failure
    reasons = {} if failure is None else {world_rank(): f"{type(failure).__name__}: {failure}"}
    for group in groups:
        reasons = {rank: reason for part in gather_objects(reasons, group) for rank, reason in part.items()}
    ranks_by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(reasons.items()):
        ranks_by_reason.setdefault(reason, []).append(rank)
    listed = "; ".join(
        f"rank{only_if(len(ranks) > 1, 's')} {', '.join(map(str, ranks))}: {reason}"
        for reason, ranks in ranks_by_reason.items()
    )
    raise BadBatchError(f"Step aborted on all ranks before the optimizer ran. {listed}") from failure


def check_together(check: Callable[[], Result], groups: Sequence[Group]) -> Result:
    """What a check returns on this rank; if it raises on any of them, all raise."""
    outcome: Any = attempt(check)
    failure = failure_of(outcome)
    raise_together(any(agree_on(["failed"] if failure else [], ["failed"], groups)), failure, groups)
    checked: Result = outcome
    return checked


def gather_parts(prepare: Callable[[], Result], group: Group | None) -> list[Result]:
    """The results of `prepare` on each rank of the group; if any rank failed, all raise."""
    mine, groups = attempt(prepare), several(group)
    failure = failure_of(mine)
    parts: list[Any] = gather_objects(None if failure else mine, groups[0]) if groups else [mine]
    raise_together(failure is not None or any(part is None for part in parts), failure, groups)
    return parts
