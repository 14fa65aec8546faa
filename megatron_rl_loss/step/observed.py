"""What observes the step that runs now. Loss functions and reducers report to it; none of it changes a number.

Whoever runs a step sets the observer and puts it back. Loss functions are called by a schedule that knows nothing of a
measurement, so none can hand the observer on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Observer(Protocol):
    """The part of `reduction.taps.Taps` that loss functions report to."""

    def add_output(self, per_token_loss: Tensor, made_by: str) -> None: ...


#: The observer, and the aggregation that the step should have; None where nobody said so.
_OBSERVED: ContextVar[tuple[Any, Any]] = ContextVar("observed", default=(None, None))


@contextmanager
def observe(observer: Any = None, aggregation: Any = None) -> Iterator[None]:
    """In a ``with``: report to the observer; the step should have the aggregation. None changes nothing."""
    outer_observer, outer_aggregation = _OBSERVED.get()
    token = _OBSERVED.set((observer or outer_observer, aggregation or outer_aggregation))
    try:
        yield
    finally:
        _OBSERVED.reset(token)


def observer() -> Any:
    """The observer of the current step, if there is one; None while torch compiles."""
    return None if torch.compiler.is_compiling() else _OBSERVED.get()[0]


def expected_aggregation() -> Any:
    """The aggregation of the current step, if its trainer said so."""
    return _OBSERVED.get()[1]


def reports_output(loss_function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a loss function: the gradient at its result shows what lies between it and the reducer."""

    @wraps(loss_function)
    def report(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result = loss_function(*args, **kwargs)
        observes: Observer | None = observer()
        if observes is not None:
            per_token_loss: Any = getattr(result, "per_token_loss", result)
            observes.add_output(per_token_loss, loss_function.__name__)
        return result

    return report
