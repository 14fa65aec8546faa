"""Carriers: forms of a share that cancel a trainer's own scaling, a row of one table each.

A trainer scales a returned loss in up to four places. Megatron has three: the schedule
(`core/pipeline_parallel/schedules.py`, `forward_step_calc_loss`), DDP
(`core/distributed/distributed_data_parallel.py`) and `core/distributed/finalize_model_grads.py`. An engine with a loss
function of its own around yours multiplies before them. A row has the powers of counts that a share is multiplied by
before it is returned, and those that each place multiplies by. The powers of each count add up to 0, so the gradient
is that of the sum of all shares. Megatron's probe (`megatron/probe.py`) checks the rows in force against the
installed Megatron; `tests/frameworks/real` runs the engines' rows through their code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Count = Literal["num_microbatches", "dp_size", "cp_size", "step_active_tokens", "rollouts"]
Powers = Mapping[Count, int]
#: A pair, (loss, report), for Megatron's schedule or for an engine.
PairForm = Literal["2-tuple", "slime", "verl", "nemo_rl"]
#: What is returned: (loss, num_tokens, report), a pair, or the loss alone, where gradients are summed over ranks, or
#: where they are averaged.
Form = Literal["3-tuple", "sum", "mean"] | PairForm


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """One way to return a share.

    Attributes:
        form: the form of the return value.
        per_token: the value of `calculate_per_token_loss` that this row is for; None where it makes no difference.
        returned: the loss is the share times these powers of counts.
        num_tokens: the token count of a 3-tuple: one, or the active tokens of this rank and micro-batch.
        engine, schedule, ddp, finalize: the powers of counts by which each place multiplies the loss or its gradient.
        dynamic_cp: True if it holds where the context-parallel group changes between micro-batches.
    """

    form: Form
    per_token: bool | None
    returned: Powers = field(default_factory=dict)
    num_tokens: Literal["one", "active tokens"] = "one"
    engine: Powers = field(default_factory=dict)
    schedule: Powers = field(default_factory=dict)
    ddp: Powers = field(default_factory=dict)
    finalize: Powers = field(default_factory=dict)
    dynamic_cp: bool = False


#: The schedule divides a loss by its token count, 1, and by the number of micro-batches; DDP averages over its ranks.
TRIPLE = Carrier(
    form="3-tuple",
    per_token=False,
    returned={"num_microbatches": 1, "dp_size": 1, "cp_size": 1},
    schedule={"num_microbatches": -1},
    ddp={"dp_size": -1, "cp_size": -1},
)
#: At the end of the step gradients are divided by the sum of all token counts. These are the real ones, so auxiliary
#: losses, which Megatron divides by them too, keep their scale.
TRIPLE_PER_TOKEN = Carrier(
    form="3-tuple",
    per_token=True,
    returned={"step_active_tokens": 1},
    num_tokens="active tokens",
    finalize={"step_active_tokens": -1},
    dynamic_cp=True,
)
#: The schedule multiplies the loss of a pair by the CP size, and divides it by the number of micro-batches.
PAIR = Carrier(
    form="2-tuple",
    per_token=False,
    returned={"num_microbatches": 1, "dp_size": 1},
    schedule={"num_microbatches": -1, "cp_size": 1},
    ddp={"dp_size": -1, "cp_size": -1},
)
#: For a trainer that adds up the gradients of ranks and micro-batches and divides by nothing.
SUM = Carrier(form="sum", per_token=None, dynamic_cp=True)
#: For a trainer that averages gradients over the DP and CP ranks and adds up micro-batches: torch's DDP and FSDP, or
#: Megatron's DDP in a loop without its schedule.
MEAN = Carrier(
    form="mean",
    per_token=False,
    returned={"dp_size": 1, "cp_size": 1},
    ddp={"dp_size": -1, "cp_size": -1},
)
#: slime 624b824a, backends/megatron_utils/loss.py, and miles 31f1ca96, backends/training_utils/loss.py:
#: `loss_function`. They divide by the global batch size, which counts rollouts. Without a row for per-token loss: there
#: they divide by tokens of which each fully masked sample has one.
SLIME = Carrier(
    form="slime",
    per_token=False,
    returned={"rollouts": 1},
    engine={"num_microbatches": 1, "rollouts": -1, "dp_size": 1, "cp_size": 1},
    schedule={"num_microbatches": -1},
    ddp={"dp_size": -1, "cp_size": -1},
)
#: verl 1dda039b and 0.9.1, workers/engine/megatron/transformer_impl.py, `postprocess_micro_batch_func`.
VERL = Carrier(
    form="verl",
    per_token=False,
    returned={"dp_size": 1},
    engine={"num_microbatches": 1},
    schedule={"num_microbatches": -1, "cp_size": 1},
    ddp={"dp_size": -1, "cp_size": -1},
)
#: The same function. The step's tokens cancel: verl multiplies by them, Megatron divides. In dynamic CP dp_size is 1.
VERL_PER_TOKEN = Carrier(form="verl", per_token=True, returned={"dp_size": 1}, engine={"dp_size": -1}, dynamic_cp=True)
#: NeMo-RL 7ea279ab, models/megatron/train.py, `LossPostProcessor`: a pair with per-token loss, whose count of tokens is
#: 0, so that Megatron divides by nothing.
NEMO_RL = Carrier(
    form="nemo_rl",
    per_token=True,
    returned={"cp_size": 1},
    engine={"num_microbatches": 1, "cp_size": -2},
    schedule={"num_microbatches": -1, "cp_size": 1},
)
CARRIERS = (TRIPLE, TRIPLE_PER_TOKEN, PAIR, SUM, MEAN, SLIME, VERL, VERL_PER_TOKEN, NEMO_RL)


def carriers_of(per_token: bool) -> list[Carrier]:
    """The rows for a model whose config has this `calculate_per_token_loss`."""
    return [row for row in CARRIERS if row.per_token in (None, per_token)]


def find_carrier(form: Form, per_token: bool, dynamic_cp: bool) -> Carrier:
    """The row of a form; ValueError for an unknown form, or one that is not exact with these settings."""
    forms = {row.form: row for row in carriers_of(per_token)}
    if form not in forms:
        known = ", ".join(map(repr, forms))
        if any(row.form == form for row in CARRIERS):
            has, turn = ("with", "off") if per_token else ("without", "on")
            raise ValueError(
                f"form={form!r} {has} per-token loss: Megatron's scaling is then another than this form cancels. Turn "
                f"calculate_per_token_loss {turn}, or choose one of {known}."
            )
        known = ", ".join(map(repr, dict.fromkeys(row.form for row in CARRIERS)))
        raise ValueError(f"form={form!r}: there is no such form. Choose one of {known}.")
    if dynamic_cp and not forms[form].dynamic_cp:
        has = "with" if per_token else "without"
        raise ValueError(
            f"form={form!r} {has} per-token loss, in a step whose cp_groups change between micro-batches: this form "
            "scales by group sizes and numbers of micro-batches, which then differ between ranks. Plan with per-token "
            "loss, and return '3-tuple', 'sum' or 'verl'."
        )
    return forms[form]


def product(powers: Powers, counts: Mapping[Count, float | None]) -> float:
    """The product of the powers of the counts; ValueError where a count is not known."""
    known = {name: value for name, value in counts.items() if value is not None}
    if missing := [name for name in powers if name not in known]:
        raise ValueError(
            f"totals without {', '.join(missing)}: the returned loss is multiplied by this count. Give the count of "
            "the whole step."
        )
    return math.prod(known[name] ** power for name, power in powers.items())
