"""Megatron's schedules, replaced in their module for a process that calls them somewhere in an engine."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from megatron.core.pipeline_parallel import schedules

Schedule = Callable[..., Any]


def run_schedules_by(run: Callable[..., Any]) -> None:
    """From now on ``run(schedule, *args, **kwargs)`` is called in the place of each schedule that is fetched."""
    for name, schedule in list(vars(schedules).items()):
        if name.startswith("forward_backward_"):
            setattr(schedules, name, wraps(schedule)(partial(run, schedule)))
