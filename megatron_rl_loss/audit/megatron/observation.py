"""What an audit sees of a step: the batches that are taken, and the schedule's computing of each loss."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron_rl_loss.step.collectives import attempt
from megatron_rl_loss.step.samples import Samples


class Watched(Iterator[Any]):
    """An iterator of which every batch is described; whatever else it can do, it still can."""

    def __init__(self, iterator: Any, samples_of: Callable[[Any], Samples], into: list[Samples | Exception]) -> None:
        self._iterator, self._samples_of, self._into = iterator, samples_of, into

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._into.append(attempt(lambda: self._samples_of(batch)))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


@contextmanager
def observe_schedule(begin: Callable[[Any], None], end: Callable[[], None]) -> Iterator[None]:
    """In a ``with``: say what the model returned whenever the schedule computes a micro-batch's loss to train on, and
    when it has set the scales of auxiliary losses.
    """
    original = schedules.forward_step_calc_loss
    signature = inspect.signature(original)

    @functools.wraps(original)
    def calculate(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        loss_func: Any = call.arguments.get("loss_func")

        def loss_of(output: Any, **further: Any) -> Any:
            begin(output)
            return loss_func(output, **further)

        if not callable(loss_func) or not torch.is_grad_enabled() or call.arguments.get("collect_non_loss_data"):
            return original(*args, **kwargs)
        call.arguments["loss_func"] = loss_of
        result = original(*call.args, **call.kwargs)
        end()
        return result

    schedules.forward_step_calc_loss = calculate
    try:
        yield
    finally:
        schedules.forward_step_calc_loss = original
