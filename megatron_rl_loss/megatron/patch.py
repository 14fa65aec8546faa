"""What `LossAggregation.attached` replaces in `megatron.training.training`, which has no hook in these two places."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Schedule = Callable[..., Any]


@contextmanager
def patched_pretrain(wrap_schedule: Callable[[Schedule], Schedule]) -> Iterator[None]:
    """For the duration of a ``with``, `pretrain` runs every schedule through `wrap_schedule` and logs all values.

    `get_forward_backward_func` is replaced, since no hook is passed by all ranks before a pipeline schedule starts; and
    `training_log`, which leaves values below 0 (policy losses, log-probs) out of its progress line.
    """
    from megatron.training import training

    get_schedule, training_log = training.get_forward_backward_func, training.training_log
    if hasattr(get_schedule, "wrapped_by_megatron_rl_loss"):
        raise RuntimeError(
            "attached() inside attached(): a launch has one LossAggregation. Leave the first `with` before."
        )

    @functools.wraps(get_schedule)
    def get_wrapped_schedule(*args: Any, **kwargs: Any) -> Schedule:
        return wrap_schedule(get_schedule(*args, **kwargs))

    get_wrapped_schedule.wrapped_by_megatron_rl_loss = True  # type: ignore[attr-defined]
    training.get_forward_backward_func, training.training_log = get_wrapped_schedule, _logging_all(training)
    try:
        yield
    finally:
        training.get_forward_backward_func, training.training_log = get_schedule, training_log


def _logging_all(training: Any) -> Callable[..., Any]:
    """Megatron's `training_log`, with a line of all values behind its own."""
    training_log = training.training_log

    @functools.wraps(training_log)
    def log_all(loss_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        result = training_log(loss_dict, *args, **kwargs)
        iteration = args[2] if len(args) > 2 else kwargs["iteration"]
        if iteration % training.get_args().log_interval == 0:
            values = " | ".join(f"{name}: {float(value):.6E}" for name, value in loss_dict.items())
            training.print_rank_last(f"   of iteration {iteration:8d} alone | {values} |")
        return result

    return log_all
