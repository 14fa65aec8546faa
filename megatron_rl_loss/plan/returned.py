"""What a loss function returned must be what its micro-batch handed out: another loss would train silently."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor


class Receipt(NamedTuple):
    """The tensors of what `Microbatch.carry` returned last, and how often each had been changed in place by then.

    Attributes:
        noted: names that `Plan.finish` fills into the report.
    """

    tensors: tuple["ReferenceType[Tensor]", ...]  # not the loss itself, which would keep its graph
    versions: tuple[int, ...]
    noted: frozenset[str]

    @classmethod
    def of(cls, *tensors: Tensor, noted: Iterable[str] = ()) -> "Receipt":
        return cls(tuple(map(ref, tensors)), tuple(map(_version, tensors)), frozenset(noted))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def check_returned(returned: object, receipt: Receipt | None) -> None:
    """Refuse what a loss function returned unless it is, object by object and unchanged, what `carry` returned last.

    Anything else (its own mean, a tuple without the count, an earlier micro-batch's loss, a term added on top) would
    train on another aggregation: Megatron scales whatever it is given. So would a report of shares be logged as means
    over the micro-batches of one rank.
    """
    length = 3 if receipt is None else len(receipt.tensors) + 1
    if not isinstance(returned, tuple) or len(returned) != length:
        shown = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ValueError(
            f"loss_func returned {shown}: Megatron must be handed what this micro-batch's loss() or carry() returned, "
            "all of it. Return microbatch.loss(per_token_loss, metrics) as it is."
        )
    for part, reason in _differences(returned[:-1], receipt):
        raise ValueError(
            f"loss_func returned a {part} that this micro-batch did not hand out: {reason}. Return what "
            "microbatch.loss(...) or microbatch.carry(share, report) of this micro-batch returned, unchanged; put "
            "further terms into the share."
        )
    check_report(returned[-1], receipt.noted if receipt else frozenset())


def check_report(report: Any, noted: Collection[str]) -> None:
    """Refuse a report of single numbers, as shares are: `pretrain` logs their mean over one rank's micro-batches.

    Those that `Plan.finish` fills in are the step's on every rank.
    """
    values = dict(report) if isinstance(report, Mapping) else {}
    if values.keys() - noted and all(isinstance(value, Tensor) and value.dim() == 0 for value in values.values()):
        raise ValueError(
            f"a report of single numbers, {', '.join(report)}: Megatron logs their mean over the micro-batches of one "
            "rank, and shares must be summed. Pass shares through microbatch.report({name: share})."
        )


def _differences(returned: Sequence[object], receipt: Receipt | None) -> Iterator[tuple[str, str]]:
    """The part that differs, and the likely reason."""
    if receipt is None:
        yield "loss", "neither its loss() nor its carry() was called"
        return
    parts = zip(("loss", "token count"), returned, receipt.tensors, receipt.versions, strict=False)
    for part, value, reference, version in parts:
        carried = reference()
        if value is carried and carried is not None and _version(carried) != version:
            yield part, "it was changed in place"
        elif value is not carried and isinstance(value, torch.Tensor):
            yield part, "it is another aggregation, has a factor or a term on top, or is an earlier micro-batch's loss"
        elif value is not carried:
            yield part, f"it is a {type(value).__name__}"
