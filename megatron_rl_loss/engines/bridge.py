"""Megatron-Bridge: any mode in a forward step of your own under its `pretrain`.

    from megatron_rl_loss.engines.bridge import attached

    with attached(LossAggregation(settings, samples_of)):
        pretrain(config, forward_step)  # which returns microbatch.loss(...), of next_microbatch(data_iterator)

Bridge's training and evaluation loops fetch Megatron's schedule themselves. Inside the ``with`` both loops get a
schedule that plans each step before its first micro-batch.
Source: Megatron-Bridge 067f987d, training/train.py (train, train_step), training/eval.py (evaluate).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_rl_loss.engines.replacing import Function, Replaced

if TYPE_CHECKING:
    from megatron_rl_loss.megatron.launch import LossAggregation

__all__ = ["attached"]


@contextmanager
def attached(aggregation: "LossAggregation") -> Iterator[None]:
    """For the duration of a ``with``, Bridge runs every schedule through ``aggregation.wrap_schedule``.

    Raises ValueError inside another `attached`.
    """
    from megatron.bridge.training import eval as evaluation
    from megatron.bridge.training import train

    functions = [
        Function(module, "get_forward_backward_func", (), lambda stock, arguments: aggregation.wrap_schedule(stock()))
        for module in (train, evaluation)
    ]
    replaced = Replaced("Megatron-Bridge", "067f987d, or 0.6.2", functions)
    try:
        yield
    finally:
        replaced.undo()
