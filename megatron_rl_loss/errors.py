"""This package's two own errors, and the checks that every folder needs.

Each error says what was given, the rule it breaks, and what to do: ``given: rule. Remedy.``
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any

import torch
from torch import Tensor


class BadBatchError(ValueError):
    """A rank could not prepare its part of the step; raised on every rank, naming the rank and its reason."""


class ContractError(ValueError):
    """The installed Megatron does not scale losses as this version of megatron_rl_loss relies on."""


def is_int(value: object) -> bool:
    """True for a whole number (NumPy's too) that is not a bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor)


def check_int(name: str, value: object, at_least: int, remedy: str) -> None:
    """Refuse what is not a whole number from `at_least` on."""
    if not is_int(value) or value < at_least:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}: it must be an int >= {at_least}. {remedy}.")


def check_count(name: str, value: object) -> None:
    """Refuse what cannot be a count of the step: a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1e18:  # type: ignore[operator]
        raise ValueError(
            f"{name} is {value!r}: it must be a finite number >= 0 (below 1e18). Pass the count of the whole step."
        )


def check_within(name: str, value: Any, interval: str, usual: str) -> None:
    """Refuse a setting that is no number in an interval, written as (0, 1]."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    sound = isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high  # type: ignore[operator]
    if not sound or (value == low and interval[0] == "(") or (value == high and interval[-1] == ")"):
        raise ValueError(f"{name} is {value!r}: it must be a number in {interval}. {usual}.")


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a name that is none of the choices."""
    known = list(choices)
    if value not in known:
        raise ValueError(f"{what} {value!r}: there is no such {what}. {did_you_mean(str(value), known)}.")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The known names, the closest first if one is close."""
    plain = {one.replace("_", "-"): one for one in known}
    close = get_close_matches(name.lower().replace("_", "-"), plain, n=1)
    hint = f"Did you mean {plain[close[0]]}? " if close else ""
    return f"{hint}Choose one of {', '.join(known)}"


def check_one_each(entries: str, number: int, samples: str, expected: int, remedy: str = "Pass both in order") -> None:
    """Refuse a list without one entry per sample."""
    if number != expected:
        raise ValueError(f"{number} {entries} for {expected} {samples}: there must be one per sample. {remedy}.")


def check_callable(what: str, value: object, rule: str, remedy: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(f"{what} is a {type(value).__name__}: {rule}. {remedy}.")


def check_cp(cp_rank: int, cp_size: int) -> None:
    """Refuse a CP coordinate that cannot be one."""
    place, remedy = f"cp_rank={cp_rank!r}, cp_size={cp_size!r}", "Pass cp_group.rank() and cp_group.size()"
    if not is_int(cp_rank) or not is_int(cp_size):
        raise TypeError(f"{place}: both must be ints. {remedy}.")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{place}: needs 0 <= cp_rank < cp_size. {remedy}.")


def place_in_cp(cp_rank: int | None, cp_size: int) -> int:
    """The CP rank, which may be left out where there is one alone."""
    if cp_rank is None and cp_size != 1:
        raise ValueError(
            f"cp_size={cp_size} without a cp_rank: each rank holds other tokens. Pass cp_rank=cp_group.rank()."
        )
    return 0 if cp_rank is None else cp_rank


def require(holds: bool | Tensor, describe: Callable[[], str], rule: str) -> None:
    """Raise ValueError where a condition is False: at once on the host, without waiting on a device.

    A device stops at it later, with the rule and the remedy alone: nobody has read what was given.
    """
    if isinstance(holds, Tensor) and not holds.is_cpu:
        torch._assert_async(holds, f"values on a device: {rule}")
    elif not holds:
        raise ValueError(f"{describe()}: {rule}")


def first_order(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of the backward of a node whose gradient has no graph: refuses create_graph=True."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def call(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise ValueError(
                    f"create_graph=True through {name}: its gradient has no graph, so nothing made of it (a gradient "
                    "penalty) would train the model. Make that term of plain torch operations."
                )
            return backward(ctx, *gradients)

        return call

    return decorate
