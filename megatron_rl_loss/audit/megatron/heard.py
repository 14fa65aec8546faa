"""Listening to Megatron's schedule: which batches are taken, when a micro-batch's loss is computed, what it returns."""

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
def heard_schedule(begin: Callable[[Any], None], returned: set[str]) -> Iterator[None]:
    """For the duration of a ``with``, say when the schedule computes a micro-batch's loss, and what that returned."""
    original = schedules.forward_step_calc_loss
    signature = inspect.signature(original)

    @functools.wraps(original)
    def heard(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        loss_func = given.arguments.get("loss_func")
        if callable(loss_func) and torch.is_grad_enabled() and not given.arguments.get("collect_non_loss_data"):
            given.arguments["loss_func"] = functools.partial(_heard_loss, loss_func, begin, returned)
        return original(*given.args, **given.kwargs)

    schedules.forward_step_calc_loss = heard
    try:
        yield
    finally:
        schedules.forward_step_calc_loss = original


def _heard_loss(
    loss_func: Callable[..., Any], begin: Callable[[Any], None], returned: set[str], output: Any, **kwargs: Any
) -> Any:
    begin(output)
    result = loss_func(output, **kwargs)
    if isinstance(result, tuple):
        returned.add(f"{len(result)}-tuple")
    return result
