"""What Megatron's schedule does: which batches it takes, when it computes a micro-batch's loss, what that returns."""

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
def observe_schedule(begin: Callable[[Any], None], returned: set[str]) -> Iterator[None]:
    """For the duration of a ``with``, say when the schedule computes a micro-batch's loss, and what that returned."""
    original = schedules.forward_step_calc_loss
    signature = inspect.signature(original)

    def loss_of(loss_func: Callable[..., Any], output: Any, **kwargs: Any) -> Any:
        begin(output)
        result = loss_func(output, **kwargs)
        if isinstance(result, tuple):
            returned.add(f"{len(result)}-tuple")
        return result

    @functools.wraps(original)
    def calculate(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        loss_func = call.arguments.get("loss_func")
        if callable(loss_func) and torch.is_grad_enabled() and not call.arguments.get("collect_non_loss_data"):
            call.arguments["loss_func"] = functools.partial(loss_of, loss_func)
        return original(*call.args, **call.kwargs)

    schedules.forward_step_calc_loss = calculate
    try:
        yield
    finally:
        schedules.forward_step_calc_loss = original
