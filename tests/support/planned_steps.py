"""Planned steps through Megatron's real schedule and DDP in a loop of one's own, on a model that is a table of losses.

`engine` stands for what another engine does with what a loss function returns, before Megatron gets it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import oracle
import torch
from step_samples import DIVISOR, dealt, step_samples
from steps import session_of, turns_of, weights_of
from table_step import Batch, relative_error, start, table_model
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD
from megatron_rl_loss.plan.carriers import FORMS

STEP = step_samples(8)
TABLE = [float(loss) for one in STEP for loss in one.losses] + [0.0]
CP, DP = 2, 2
OF_SAMPLES = {"ids": {"session": [session_of(one) for one in STEP], "turn": [turns_of(one) for one in STEP]}}
#: (what a loss function returns, the micro-batch, their number) -> what Megatron's schedule is given
Engine = Callable[[Any, Batch, int], Any]


def batches_of(dp_rank: int) -> list[Batch]:
    """Three micro-batches; on the last DP rank two, then a filler in the place of the third where one is needed."""
    batches = [Batch(STEP, chosen, CP, **OF_SAMPLES) for chosen in dealt(STEP, dp_rank, DP, 3)]
    if dp_rank == DP - 1:
        last = Batch(STEP, [], CP)
        last.numbers = [[len(TABLE) - 1] * 4]
        last.samples = Samples([], layout=ZigzagTHD([0, 4], filler_slots=1), rollout_ids=[], prompt_ids=[])
        merged = Batch(STEP, [i for chosen in dealt(STEP, dp_rank, DP, 3)[1:] for i in chosen], CP, **OF_SAMPLES)
        batches = [batches[0], merged, last]
    return batches


#: What a loss function returns, and whether with per-token loss: without it Megatron's DDP averages, else it sums.
FORM_SETTINGS = [
    (form.name, per_token)
    for form in FORMS.values()
    if form.caller != "engine"
    for per_token, carrier in form.carriers.items()
    if per_token != bool(carrier.ddp)
]


def start_ranks() -> tuple[int, int]:
    """On a rank: its place among the context- and among the data-parallel ranks."""
    state = start(cp=CP)
    return state.get_context_parallel_rank(), state.get_data_parallel_rank()


def gradient_of(mode: str) -> Tensor:
    """The gradient of the step loss by each entry of the table, float64."""
    if mode in oracle.BY_IDS:
        return torch.tensor([w for row in weights_of(mode, STEP, "all") for w in row] + [0.0], dtype=torch.float64)
    divisor = DIVISOR if mode == "constant" else None
    return torch.cat([*oracle.step_gradient(mode, STEP, divisor), torch.zeros(1)])


def step(
    model: Any,
    plan: Any,
    batches: list[Batch],
    cp_rank: int,
    form: str,
    engine: Engine = lambda returned, batch, num_microbatches: returned,
) -> list[Tensor]:
    """Forward and backward of a step, with the schedule where the form is one of its; the shares."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def losses(batch: Batch) -> Tensor:
        output: Tensor = model(batch.local_numbers(cp_rank, CP).cuda())
        return output

    if FORMS[form].caller == "loop":
        shares = []
        for batch, microbatch in zip(batches, plan, strict=True):
            share = microbatch(losses(batch))
            microbatch.carry(share, form=form).backward()
            shares.append(share.detach())
        finalize_model_grads([model], None)
        return shares

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        batch, microbatch = next(iterator)

        def loss_func(output: Tensor) -> Any:
            share = microbatch(output)
            return engine(microbatch.carry(share, {"mine": {"share": share.detach()}}, form=form), batch, len(plan))

        return losses(batch), loss_func

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(list(zip(batches, plan, strict=True))),
        model=model,
        num_microbatches=len(plan),
        seq_length=8,
        micro_batch_size=1,
    )
    return [report["mine"]["share"] for report in reports]


def errors_in(form: str, engine: Engine, *, per_token: bool) -> list[float]:
    """On a rank: the largest error of a token's gradient in the step of each mode, relative to the largest one."""
    from megatron_rl_loss import plan_step

    cp_rank, dp_rank = start_ranks()
    batches, found = batches_of(dp_rank), []
    for mode in oracle.MODES:
        divisor = DIVISOR if mode == "constant" else None
        model = table_model(TABLE, per_token=per_token)
        plan = plan_step([batch.samples for batch in batches], mode, divisor=divisor, model=model)
        step(model, plan, batches, cp_rank, form, engine)
        found.append(relative_error(model.module.losses.main_grad.cpu(), gradient_of(mode)))
    return found
