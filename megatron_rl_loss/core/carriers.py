"""What a loss function returns so that a trainer's own scaling cancels: a table of forms, with a carrier for each.

A trainer scales a returned loss in up to four places. Megatron has three: the schedule
(`core/pipeline_parallel/schedules.py`, `forward_step_calc_loss`), DDP
(`core/distributed/distributed_data_parallel.py`) and `core/distributed/finalize_model_grads.py`. An engine with a loss
function of its own around yours multiplies before them. A carrier has the powers of counts that a share is multiplied
by before it is returned, and those that each place multiplies by. The powers of each count add up to 0, so the gradient
is that of the sum of all shares. Megatron's probe (`megatron/probe.py`) checks the forms of its schedule against the
installed Megatron; `tests/engines/real` runs the engines' forms through their code.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor

from megatron_rl_loss import load_further_tables
from megatron_rl_loss.core.errors import check_choice
from megatron_rl_loss.core.samples import LocalTokens

Count = Literal["num_microbatches", "ranks", "dp_size", "cp_size", "step_active_tokens", "rollouts"]
Powers = Mapping[Count, int]
#: Who calls a loss function: Megatron's schedule, an engine's own loss function around it, or a loop of neither.
Caller = Literal["schedule", "engine", "loop"]
#: A part that is a count: this rank's tokens, and its rank in the context-parallel group -> the count.
CountOf = Callable[[LocalTokens, int], int]
#: DDP averages gradients over the DP and CP ranks; with per-token loss it sums them.
DDP_MEAN: Powers = {"dp_size": -1, "cp_size": -1}
#: What a trainer without Megatron's schedule does to the gradients of ranks: an argument of `plan_step`.
Gradients = Literal["averaged over ranks", "summed over ranks"]


def active_tokens(tokens: LocalTokens, cp_rank: int) -> int:
    """The active tokens of this rank; where all CP ranks hold all tokens, the first of them counts them."""
    return 0 if tokens.copies > 1 and cp_rank > 0 else tokens.num_active


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """The scaling that a form cancels.

    Attributes:
        returned: the loss is the share times these powers of counts.
        engine, schedule, ddp, finalize: the powers of counts by which each place multiplies the loss or its gradient.
        counts: by part, the counts that are returned beside the loss; a part that is missing here is 1.
        dynamic_cp: True if it holds where the context-parallel group changes between micro-batches.
    """

    returned: Powers = field(default_factory=dict)
    engine: Powers = field(default_factory=dict)
    schedule: Powers = field(default_factory=dict)
    ddp: Powers = field(default_factory=dict)
    finalize: Powers = field(default_factory=dict)
    counts: Mapping[str, CountOf] = field(default_factory=dict)
    dynamic_cp: bool = False


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a loss function returns, to whom, and where the gradient is exact.

    Attributes:
        name: what users pass as ``form=``; of a loop, what they say of gradients.
        parts: of the return value in their order: ``loss``, ``report``, and any others are counts. A single part is
            returned without a tuple.
        caller: who calls the loss function.
        carriers: by the value of Megatron's `calculate_per_token_loss` for which the form is exact.
    """

    name: str
    parts: tuple[str, ...]
    caller: Caller
    carriers: Mapping[bool, Carrier]

    def __str__(self) -> str:
        return f"gradients {self.name}" if self.caller == "loop" else f"form={self.name!r}"

    @property
    def counts(self) -> list[str]:
        """The parts that are counts."""
        return [part for part in self.parts if part not in ("loss", "report")]

    def assemble(self, values: Mapping[str, Any]) -> Any:
        """The return value, from its parts by name."""
        parts = tuple(values[part] for part in self.parts)
        return parts if len(parts) > 1 else parts[0]

    def read(self, returned: object) -> dict[str, Any] | None:
        """The parts of a return value by name; None for a value that does not have the shape of this form."""
        if len(self.parts) == 1:
            return {self.parts[0]: returned} if isinstance(returned, Tensor) else None
        if not isinstance(returned, tuple) or len(returned) != len(self.parts):
            return None
        return dict(zip(self.parts, returned, strict=True))


#: The form of a loss function that names none. Without per-token loss the schedule divides a loss by its token count,
#: 1, and by the number of micro-batches; DDP averages over its ranks. With it gradients are divided, at the end of the
#: step, by the sum of all token counts. These are the real ones, so auxiliary losses, which Megatron divides by them
#: too, keep their scale.
DEFAULT: Form = Form(
    name="3-tuple",
    parts=("loss", "num_tokens", "report"),
    caller="schedule",
    carriers={
        False: Carrier(
            returned={"num_microbatches": 1, "dp_size": 1, "cp_size": 1},
            schedule={"num_microbatches": -1},
            ddp=DDP_MEAN,
        ),
        True: Carrier(
            returned={"step_active_tokens": 1},
            counts={"num_tokens": active_tokens},
            finalize={"step_active_tokens": -1},
            dynamic_cp=True,
        ),
    },
)


#: A row for each form; the shelf `engines` adds those that engines alone take.
FORMS = {
    form.name: form
    for form in (
        DEFAULT,
        # The schedule multiplies the loss of a pair by the CP size, and divides it by the number of micro-batches.
        Form(
            name="2-tuple",
            parts=("loss", "report"),
            caller="schedule",
            carriers={
                False: Carrier(
                    returned={"num_microbatches": 1, "dp_size": 1},
                    schedule={"num_microbatches": -1, "cp_size": 1},
                    ddp=DDP_MEAN,
                )
            },
        ),
    )
}


#: What `Microbatch.loss` returns to a loop without Megatron's schedule, by what the loop's trainer does to gradients of
#: ranks. Those of micro-batches add up in ``.grad``. torch's DDP and FSDP average over the ranks of their group, and so
#: does Megatron's DDP where no schedule of Megatron runs.
IN_A_LOOP: dict[str, Form] = {
    name: Form(name=name, parts=("loss",), caller="loop", carriers=dict.fromkeys((False, True), carrier))
    for name, carrier in (
        ("averaged over ranks", Carrier(returned={"ranks": 1}, ddp={"ranks": -1}, dynamic_cp=True)),
        ("summed over ranks", Carrier(dynamic_cp=True)),
    )
}


def form_in_loop(gradients: Gradients | None, ranks: int) -> Form:
    """What `Microbatch.loss` returns to a loop over so many ranks; ValueError where nobody says what it has to."""
    if gradients is None and ranks > 1:
        raise ValueError(
            f"a plan over {ranks} ranks without gradients=: it must say what the trainer does to the gradients of "
            'ranks. Pass gradients="averaged over ranks" under DistributedDataParallel or fully_shard (FSDP), and '
            'gradients="summed over ranks" where you call all_reduce(SUM) yourself; a Megatron model, model=, says it.'
        )
    if gradients is not None:
        check_choice("gradients=", gradients, tuple(IN_A_LOOP))
    return IN_A_LOOP[gradients or "summed over ranks"]


def register_form(form: Form) -> None:
    """Add the form of another trainer, whose name `Microbatch.loss` then takes."""
    FORMS[form.name] = form


def find_form(name: str) -> Form:
    """The form of that name; ValueError for an unknown one."""
    is_name = isinstance(name, str)
    if is_name and name not in FORMS:
        load_further_tables()
    if not is_name or name not in FORMS:
        known = ", ".join(map(repr, FORMS))
        raise ValueError(
            f"form={name!r}: there is no such form. Choose one of {known}, or leave form out: in a loop without "
            "Megatron's schedule, plan_step(..., gradients=...) says what loss() returns."
        )
    return FORMS[name]


def find_carrier(form: Form, per_token: bool, dynamic_cp: bool) -> Carrier:
    """The scaling that a form cancels in a plan with these settings; ValueError where the form is not exact in it."""
    has = "with" if per_token else "without"
    if per_token not in form.carriers:
        exact = [repr(row.name) for row in FORMS.values() if per_token in row.carriers]
        raise ValueError(
            f"form={form.name!r} {has} per-token loss: this form does not cancel Megatron's scaling then. Turn "
            f"calculate_per_token_loss {'off' if per_token else 'on'}, or choose one of {', '.join(exact)}."
        )
    carrier = form.carriers[per_token]
    if dynamic_cp and not carrier.dynamic_cp:
        exact = [repr(row.name) for row in FORMS.values() if True in row.carriers and row.carriers[True].dynamic_cp]
        raise ValueError(
            f"form={form.name!r} {has} per-token loss, in a step whose cp_groups change between micro-batches: this "
            "form scales by group sizes and numbers of micro-batches, which then differ between ranks. Plan with "
            f"per-token loss, and return one of {', '.join(exact)}."
        )
    return carrier


def product(powers: Powers, counts: Mapping[Count, float]) -> float:
    """The product of the powers of the counts."""
    return math.prod(counts[name] ** power for name, power in powers.items())


class Receipt(NamedTuple):
    """What `Microbatch.loss` returned last: its form, tensors, their changes in place, and the names of its report."""

    form: Form
    tensors: dict[str, "ReferenceType[Tensor]"]  # by part; not the loss itself, which would keep its graph
    versions: dict[str, int]
    reported: frozenset[str]

    @classmethod
    def of(cls, form: Form, tensors: Mapping[str, Tensor], reported: Iterable[str]) -> "Receipt":
        references = {part: ref(tensor) for part, tensor in tensors.items()}
        return cls(form, references, {part: _version(tensor) for part, tensor in tensors.items()}, frozenset(reported))


def _version(tensor: Tensor) -> int:
    """The number of changes in place, which torch does not count for tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def check_returned(returned: object, receipt: Receipt | None, *, trains: bool = False) -> None:
    """Raise ValueError unless a loss function returned the very objects of its micro-batch's `loss`, unchanged.

    Any other loss (a mean of its own, a tuple without the count, an earlier micro-batch's loss, a term added on top)
    would train on another aggregation, because Megatron scales every loss alike. The proof of the first step finds
    such a loss too; this check names the cause, and holds in evaluation and where no proof is made.
    """
    form = DEFAULT if receipt is None else receipt.form
    parts = form.read(returned)
    if isinstance(returned, Tensor) and receipt is not None:
        raise ValueError(
            f"loss_func returned a loss alone: Megatron's schedule takes ({', '.join(DEFAULT.parts)}). Return "
            "microbatch.loss(per_token_loss, metrics) of a plan that knows the Megatron model."
        )
    if parts is None:
        shown = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ValueError(
            f"loss_func returned {shown}: it must return all that this micro-batch's loss() returned. Return "
            "microbatch.loss(per_token_loss, metrics) unchanged."
        )
    for part, reason in _differences(parts, receipt):
        raise ValueError(
            f"loss_func returned a {part} that this micro-batch did not hand out: {reason}. Return the result of this "
            "micro-batch's loss(...) unchanged; put further terms into loss({...})."
        )
    if trains and not parts["loss"].requires_grad:
        raise ValueError(
            "loss_func made a loss without gradients in a training step: such a loss trains nothing. Leave "
            "torch.no_grad() out of the loss function."
        )
    report = parts["report"] if isinstance(parts.get("report"), Mapping) else {}
    if receipt is not None and report and not receipt.reported & report.keys():
        raise ValueError(
            f"a report of {', '.join(map(str, report))} alone: Megatron logs the mean over the micro-batches of one "
            "rank, which depends on the cut of the step. Pass values of tokens as metrics, loss(losses, {name: "
            "values}), and add what is no sum to the report that loss() returned."
        )


def _differences(parts: Mapping[str, Any], receipt: Receipt | None) -> Iterator[tuple[str, str]]:
    """The part that differs, and the likely reason."""
    if receipt is None:
        yield "loss", "its loss() was not called"
        return
    for part, reference in receipt.tensors.items():
        value, carried = parts[part], reference()
        if value is carried and carried is not None and _version(carried) != receipt.versions[part]:
            yield part, "it was changed in place"
        elif value is not carried and isinstance(value, Tensor):
            yield part, "it is another aggregation, has a factor or a term on top, or is an earlier micro-batch's loss"
        elif value is not carried:
            yield part, f"it is a {type(value).__name__}"
