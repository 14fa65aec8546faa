"""What Megatron's schedule does: which batches it takes, and when it computes a micro-batch's loss."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules


class Watched(Iterator[Any]):
    """An iterator that shows every batch to somebody; whatever else it can do, it still can."""

    def __init__(self, iterator: Any, show: Callable[[Any], None]) -> None:
        self._iterator = iterator
        self._show = show

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._show(batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


@contextmanager
def observe_schedule(begin: Callable[[Any], None]) -> Iterator[None]:
    """In a ``with``: say what the model returned whenever the schedule computes a micro-batch's loss to train on."""
    original = schedules.forward_step_calc_loss
    signature = inspect.signature(original)

    @functools.wraps(original)
    def calculate(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        loss_func: Any = call.arguments.get("loss_func")

        def loss_of(output: Any, **further: Any) -> Any:
            begin(output)
            return loss_func(output, **further)

        if callable(loss_func) and torch.is_grad_enabled() and not call.arguments.get("collect_non_loss_data"):
            call.arguments["loss_func"] = loss_of
        return original(*call.args, **call.kwargs)

    schedules.forward_step_calc_loss = calculate
    try:
        yield
    finally:
        schedules.forward_step_calc_loss = original
