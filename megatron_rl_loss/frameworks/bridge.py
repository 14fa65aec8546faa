"""Megatron-Bridge: any mode in a forward step of your own under its `pretrain`.

    from megatron_rl_loss.frameworks.bridge import attached

    with attached(LossAggregation(settings, samples_of)):
        pretrain(config, forward_step)  # which returns microbatch.loss(...), of next_microbatch(data_iterator)

Bridge's loops of training and of evaluation fetch Megatron's schedule themselves. Inside the ``with`` they get one that
plans each step before its first micro-batch.
Source: Megatron-Bridge 067f987d, training/train.py (train, train_step), training/eval.py (evaluate).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_rl_loss.frameworks.columns import mark

if TYPE_CHECKING:
    from megatron_rl_loss.megatron.launch import LossAggregation

__all__ = ["attached"]


@contextmanager
def attached(aggregation: "LossAggregation") -> Iterator[None]:
    """For the duration of a ``with``, Bridge runs every schedule through ``aggregation.wrap_schedule``.

    Raises:
        ValueError: inside another `attached`.
    """
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import train

    stock = {module: module.get_forward_backward_func for module in (train, evaluation)}
    for module, get_schedule in stock.items():

        @functools.wraps(get_schedule)
        def get_wrapped_schedule(*args: Any, get_schedule: Any = get_schedule, **kwargs: Any) -> Any:
            return aggregation.wrap_schedule(get_schedule(*args, **kwargs))

        mark(get_wrapped_schedule, get_schedule)
        module.get_forward_backward_func = get_wrapped_schedule
    try:
        yield
    finally:
        for module, get_schedule in stock.items():
            module.get_forward_backward_func = get_schedule
