"""What Megatron's schedules take as a model, and the schedules replaced while a step is to be measured."""

import functools
import importlib
from collections.abc import Callable
from typing import Any


def chunks_of(model: Any) -> list[Any]:
    """The model's chunks: itself, or those of a list."""
    return model if isinstance(model, list) else [model]


def run_schedules_by(run: Callable[..., Any]) -> Callable[[], None]:
    """Replace each of Megatron's schedules with ``run(schedule, *args, **kwargs)``.

    Returns a function that restores all schedules that nobody has replaced since. Imports Megatron when it is called;
    raises ImportError.
    """
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    originals = {name: value for name, value in vars(schedules).items() if name.startswith("forward_backward_")}
    replacements = {
        name: functools.wraps(schedule)(functools.partial(run, schedule)) for name, schedule in originals.items()
    }
    vars(schedules).update(replacements)

    def put_back() -> None:
        still = {name for name, replacement in replacements.items() if getattr(schedules, name) is replacement}
        vars(schedules).update({name: originals[name] for name in still})

    return put_back
