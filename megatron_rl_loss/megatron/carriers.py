"""How a rank's share of the step loss gets past Megatron's scaling: a table with a row for each way.

Megatron scales what a loss function returns in three places: the schedule (`core/pipeline_parallel/schedules.py`,
`forward_step_calc_loss`), DDP (`core/distributed/distributed_data_parallel.py`) and
`core/distributed/finalize_model_grads.py`. A row says by which counts a share is multiplied before it is returned, and
by which counts each place divides. The counts are the same on both sides, so the gradient is that of the sum of all
shares. `probe` checks the row in force against the installed Megatron.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Count = Literal["num_microbatches", "dp_cp_size", "step_active_tokens"]
#: What Megatron's schedule takes from a loss function: loss, token count, report.
Carried = tuple[Tensor, Tensor, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """One way to return a share as (loss, num_tokens, report).

    Attributes:
        per_token: the value of `calculate_per_token_loss` that this row is for.
        factors: the loss is the share times these counts.
        num_tokens: what is returned as token count: one, or the active tokens of this rank and micro-batch.
        schedule_divisors, ddp_divisors, finalize_divisors: counts that Megatron divides by, by place.
    """

    per_token: bool
    factors: tuple[Count, ...]
    num_tokens: Literal["one", "active tokens"]
    schedule_divisors: tuple[Count, ...] = ()
    ddp_divisors: tuple[Count, ...] = ()
    finalize_divisors: tuple[Count, ...] = ()


#: The schedule divides a loss by its token count, 1, and by the number of micro-batches; DDP averages over its ranks.
MEAN = Carrier(
    per_token=False,
    factors=("num_microbatches", "dp_cp_size"),
    num_tokens="one",
    schedule_divisors=("num_microbatches",),
    ddp_divisors=("dp_cp_size",),
)
#: At the end of the step gradients are divided by the sum of all token counts. These are the real ones, so auxiliary
#: losses, which Megatron divides by them too, keep their scale.
PER_TOKEN = Carrier(
    per_token=True,
    factors=("step_active_tokens",),
    num_tokens="active tokens",
    finalize_divisors=("step_active_tokens",),
)
CARRIERS = (MEAN, PER_TOKEN)


def carrier_for(per_token: object) -> Carrier:
    """The row for a model whose config has this `calculate_per_token_loss`."""
    return PER_TOKEN if per_token else MEAN


def product(names: tuple[Count, ...], counts: Mapping[Count, float | None]) -> float:
    """The product of the named counts; ValueError where one is not known."""
    values = [counts[name] for name in names]
    if None in values:
        raise ValueError(
            "totals without step_active_tokens: per-token loss needs it. Give the count of the whole step."
        )
    return math.prod(value for value in values if value is not None)


class Receipt(NamedTuple):
    """What `Microbatch.carry` returned last, and how often each tensor had been changed in place by then."""

    loss: Tensor
    num_tokens: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, loss: Tensor, num_tokens: Tensor) -> "Receipt":
        return cls(loss, num_tokens, (loss._version, num_tokens._version))


def check_returned(returned: object, receipt: Receipt | None) -> None:
    """Refuse what a loss function returned unless it is, object by object and unchanged, what `carry` returned last.

    Anything else (its own mean, a tuple without the count, an earlier micro-batch's loss, a term added on top) would
    train on another aggregation: Megatron scales whatever it is given.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        shown = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ValueError(
            f"loss_func returned {shown}: Megatron must be handed what this micro-batch's loss() or carry() returned, "
            "all of it. Return microbatch.loss(per_token_loss, metrics) as it is."
        )
    for part, reason in _differences(returned[0], returned[1], receipt):
        raise ValueError(
            f"loss_func returned a {part} that this micro-batch did not hand out: {reason}. Return what "
            "microbatch.loss(...) or microbatch.carry(share, report) of this micro-batch returned, unchanged; put "
            "further terms into the share."
        )


def _differences(loss: object, num_tokens: object, receipt: Receipt | None) -> Iterator[tuple[str, str]]:
    """The part that differs, and the likely reason."""
    if receipt is None:
        yield "loss", "neither its loss() nor its carry() was called"
        return
    parts = zip(("loss", "token count"), (loss, num_tokens), receipt[:2], receipt.versions, strict=True)
    for part, value, carried, version in parts:
        if value is carried and carried._version != version:
            yield part, "it was changed in place"
        elif value is not carried and isinstance(value, Tensor):
            yield part, "it is another aggregation, has a factor or a term on top, or is an earlier micro-batch's loss"
        elif value is not carried:
            yield part, f"it is a {type(value).__name__}"
