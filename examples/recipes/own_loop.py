"""A loop of your own over Megatron's schedule, where `pretrain` is not what trains: one wrapped call.

`model` is in Megatron's DistributedDataParallel, a list of chunks with virtual pipeline stages; `optimizer` is
Megatron's. `forward_step` takes `next_microbatch(data_iterator)` and its loss function returns `microbatch.loss(...)`,
as under `pretrain`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_rl_loss import Samples
from megatron_rl_loss.megatron import AggregationSettings, LossAggregation


def train(
    model: Any,
    optimizer: Any,
    data_iterator: Any,
    forward_step: Callable[..., Any],
    samples_of: Callable[[Any], Samples],
    *,
    mode: str,
    num_microbatches: int,
    micro_batch_size: int,
    seq_length: int,
) -> Iterator[dict[str, float]]:
    """Step after step; what was reported, summed over the step, on ranks of the last pipeline stage."""
    chunks = model if isinstance(model, list) else [model]
    for chunk in chunks:
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    aggregation = LossAggregation(AggregationSettings.resolve(mode), samples_of)
    schedule = aggregation.wrap_schedule(get_forward_backward_func())
    while True:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
        )
        optimizer.step()
        sums = {name: torch.stack([report[name] for report in reports]).sum(0) for name in (reports or [{}])[0]}
        for pair in sums.values():  # a numerator and a denominator
            dist.all_reduce(pair, group=mpu.get_data_parallel_group(with_context_parallel=True))
        yield {name: float(pair[0] / pair[1]) for name, pair in sums.items()} | aggregation.summary
