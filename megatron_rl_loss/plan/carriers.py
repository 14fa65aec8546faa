"""What a loss function returns so that a trainer's own scaling cancels: `Carrier`, `Form`, and the default form.

A trainer scales a returned loss in up to four places. Megatron has three: the schedule
(`core/pipeline_parallel/schedules.py`, `forward_step_calc_loss`), DDP
(`core/distributed/distributed_data_parallel.py`) and `core/distributed/finalize_model_grads.py`. An engine with a loss
function of its own around yours multiplies before them. A carrier has the powers of counts that a share is multiplied
by before it is returned, and those that each place multiplies by. The powers of each count add up to 0, so the gradient
is that of the sum of all shares. Megatron's probe (`megatron/probe.py`) checks the forms of its schedule against the
installed Megatron; `tests/frameworks/real` runs the engines' forms through their code.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from megatron_rl_loss.step.samples import LocalTokens

Count = Literal["num_microbatches", "dp_size", "cp_size", "step_active_tokens", "rollouts"]
Powers = Mapping[Count, int]
#: Who calls a loss function: Megatron's schedule, an engine's own loss function around it, or a loop of neither.
Caller = Literal["schedule", "engine", "loop"]
#: A part that is a count: this rank's tokens, and its rank in the context-parallel group -> the count.
CountOf = Callable[[LocalTokens, int], int]
#: DDP averages gradients over the DP and CP ranks; with per-token loss it sums them.
DDP_MEAN: Powers = {"dp_size": -1, "cp_size": -1}
#: Forms whose results type checkers know: a pair, (loss, report), and the loss alone. Others are checked when called.
PairForm = Literal["2-tuple", "slime", "verl", "nemo_rl"]
LossForm = Literal["sum", "mean"]


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
        name: what users pass as ``form=``.
        parts: of the return value in their order: ``loss``, ``report``, and any others are counts. A single part is
            returned without a tuple.
        caller: who calls the loss function.
        carriers: by the value of Megatron's `calculate_per_token_loss` for which the form is exact.
    """

    name: str
    parts: tuple[str, ...]
    caller: Caller
    carriers: Mapping[bool, Carrier]

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
DEFAULT = Form(
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


def find_form(name: str) -> Form:
    """The form of that name; ValueError for an unknown one."""
    if name == DEFAULT.name:
        return DEFAULT
    from megatron_rl_loss.plan.forms import FORMS  # which few launches need

    if name not in FORMS:
        known = ", ".join(map(repr, FORMS))
        raise ValueError(f"form={name!r}: there is no such form. Choose one of {known}; 'mean' is for DDP and FSDP.")
    return FORMS[name]


def find_carrier(form: Form, per_token: bool, dynamic_cp: bool, for_schedule: bool) -> Carrier:
    """The scaling that a form cancels with these settings; ValueError where it is not exact with them."""
    carrier = form.carriers.get(per_token)
    if carrier is None or (for_schedule and form.caller == "loop") or (dynamic_cp and not carrier.dynamic_cp):
        from megatron_rl_loss.plan.forms import refusal

        raise refusal(form, per_token, for_schedule)
    return carrier


def product(powers: Powers, counts: Mapping[Count, float]) -> float:
    """The product of the powers of the counts."""
    return math.prod(counts[name] ** power for name, power in powers.items())
