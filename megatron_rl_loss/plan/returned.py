"""Validation of a loss function's return value: a loss that its micro-batch did not make would train silently."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor

from megatron_rl_loss.plan.carriers import DEFAULT, Form


class Receipt(NamedTuple):
    """What `Microbatch.scale_for_trainer` returned last: form, tensors, their changes in place, and noted names."""

    form: Form
    tensors: dict[str, "ReferenceType[Tensor]"]  # by part; not the loss itself, which would keep its graph
    versions: dict[str, int]
    noted: frozenset[str]  # names of the values that `Plan.finish` will fill into the report

    @classmethod
    def of(cls, form: Form, tensors: Mapping[str, Tensor], noted: Iterable[str] = ()) -> "Receipt":
        references = {part: ref(tensor) for part, tensor in tensors.items()}
        return cls(form, references, {part: _version(tensor) for part, tensor in tensors.items()}, frozenset(noted))


def _version(tensor: Tensor) -> int:
    """The number of changes in place, which torch does not count for tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def check_returned(returned: object, receipt: Receipt | None, *, trains: bool = False) -> None:
    """Raise ValueError unless a loss function returned the very objects of the last `scale_for_trainer`, unchanged.

    Any other loss (a mean of its own, a tuple without the count, an earlier micro-batch's loss, a term added on top)
    would train on another aggregation, because Megatron scales every loss alike. A report of shares would be logged as
    means over the micro-batches of one rank.
    """
    form = DEFAULT if receipt is None else receipt.form
    parts = form.read(returned)
    if isinstance(returned, Tensor) and receipt is not None:
        from megatron_rl_loss.plan.forms import FORMS

        alone = " or ".join(f"form={row.name!r}" for row in FORMS.values() if row.parts == ("loss",))
        raise ValueError(
            f"loss_func returned a loss alone, the result of {alone}: Megatron's schedule takes "
            f"({', '.join(DEFAULT.parts)}). Return microbatch.loss(per_token_loss, metrics), without a form."
        )
    if parts is None:
        shown = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ValueError(
            f"loss_func returned {shown}: it must return all that this micro-batch's loss() or "
            "scale_for_trainer() returned. Return microbatch.loss(per_token_loss, metrics) unchanged."
        )
    for part, reason in _differences(parts, receipt):
        raise ValueError(
            f"loss_func returned a {part} that this micro-batch did not hand out: {reason}. Return the result of this "
            "micro-batch's loss(...) or scale_for_trainer(share, report) unchanged; put further terms into loss({...})."
        )
    if trains and not parts["loss"].requires_grad:
        raise ValueError(
            "loss_func made a loss without gradients in a training step: such a loss trains nothing. Leave "
            "torch.no_grad() out of the loss function."
        )
    report = parts["report"] if isinstance(parts.get("report"), Mapping) else {}
    own = [name for name, value in report.items() if isinstance(value, Tensor) and value.dim() == 0]
    if own and len(own) == len(report) and not (receipt and receipt.noted & report.keys()):
        raise ValueError(
            f"a report of single numbers, {', '.join(report)}: Megatron logs their mean over the micro-batches of one "
            "rank, but shares must be summed. Pass shares through microbatch.report({name: share})."
        )


def _differences(parts: Mapping[str, Any], receipt: Receipt | None) -> Iterator[tuple[str, str]]:
    """The part that differs, and the likely reason."""
    if receipt is None:
        yield "loss", "neither its loss() nor its scale_for_trainer() was called"
        return
    for part, reference in receipt.tensors.items():
        value, carried = parts[part], reference()
        if value is carried and carried is not None and _version(carried) != receipt.versions[part]:
            yield part, "it was changed in place"
        elif value is not carried and isinstance(value, Tensor):
            yield part, "it is another aggregation, has a factor or a term on top, or is an earlier micro-batch's loss"
        elif value is not carried:
            yield part, f"it is a {type(value).__name__}"
