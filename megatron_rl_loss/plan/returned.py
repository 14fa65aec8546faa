"""Validation of a loss function's return value: a loss that its micro-batch did not make would train silently."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor


def check_caller(form: str) -> None:
    """Raise ValueError for a form of a loss alone that is returned to Megatron's schedule."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "megatron.core.pipeline_parallel.schedules":
            raise ValueError(
                f"form={form!r} in a loss function of Megatron's schedule: the form is a loss alone, for loops without "
                "the schedule, which takes (loss, num_tokens, report). Leave form out, or pass form='2-tuple'."
            )
        frame = frame.f_back


class Receipt(NamedTuple):
    """The tensors that `Microbatch.carry` returned last, their numbers of changes in place, and the noted names."""

    tensors: tuple["ReferenceType[Tensor]", ...]  # not the loss itself, which would keep its graph
    versions: tuple[int, ...]
    noted: frozenset[str]  # names of the values that `Plan.finish` will fill into the report

    @classmethod
    def of(cls, *tensors: Tensor, noted: Iterable[str] = ()) -> "Receipt":
        return cls(tuple(map(ref, tensors)), tuple(map(_version, tensors)), frozenset(noted))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def check_returned(returned: object, receipt: Receipt | None, *, trains: bool = False) -> None:
    """Raise ValueError unless a loss function returned the very objects that `carry` returned last, unchanged.

    Any other loss (a mean of its own, a tuple without the count, an earlier micro-batch's loss, a term added on top)
    would train on another aggregation, because Megatron scales every loss alike. A report of shares would be logged as
    means over the micro-batches of one rank.
    """
    length = 3 if receipt is None else len(receipt.tensors) + 1
    if isinstance(returned, Tensor) and receipt is not None:
        raise ValueError(
            "loss_func returned a loss alone, the result of form='sum' or form='mean': Megatron's schedule takes "
            "(loss, num_tokens, report). Return microbatch.loss(per_token_loss, metrics), without a form."
        )
    if not isinstance(returned, tuple) or len(returned) != length:
        shown = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ValueError(
            f"loss_func returned {shown}: it must return all that this micro-batch's loss() or carry() returned. "
            "Return microbatch.loss(per_token_loss, metrics) unchanged."
        )
    for part, reason in _differences(returned[:-1], receipt):
        raise ValueError(
            f"loss_func returned a {part} that this micro-batch did not hand out: {reason}. Return the result of this "
            "micro-batch's loss(...) or carry(share, report) unchanged; put further terms into loss({...})."
        )
    if trains and not returned[0].requires_grad:
        raise ValueError(
            "loss_func made a loss without gradients in a training step: such a loss trains nothing. Leave "
            "torch.no_grad() out of the loss function."
        )
    report = returned[-1] if isinstance(returned[-1], Mapping) else {}
    own = [name for name, value in report.items() if isinstance(value, Tensor) and value.dim() == 0]
    if own and len(own) == len(report) and not (receipt and receipt.noted & report.keys()):
        raise ValueError(
            f"a report of single numbers, {', '.join(report)}: Megatron logs their mean over the micro-batches of one "
            "rank, but shares must be summed. Pass shares through microbatch.report({name: share})."
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
        elif value is not carried and isinstance(value, Tensor):
            yield part, "it is another aggregation, has a factor or a term on top, or is an earlier micro-batch's loss"
        elif value is not carried:
            yield part, f"it is a {type(value).__name__}"
