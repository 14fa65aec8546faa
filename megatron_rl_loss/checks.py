"""Checks that several rooms share, each stated once. They raise what refusals.ini says."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.errors import explain_blindly, refused


def is_int(value: object) -> bool:
    """True for a whole number (NumPy's too) that is not a bool."""
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor)


def check_int(name: str, value: object, at_least: int, remedy: str) -> None:
    """Refuse what is not a whole number from `at_least` on."""
    if not is_int(value) or value < at_least:  # type: ignore[operator]
        raise refused("not_an_int", name=name, value=value, at_least=at_least, remedy=remedy)


def check_count(name: str, value: object) -> None:
    """Refuse what cannot be a count of the step: a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1e18:  # type: ignore[operator]
        raise refused("not_a_count", name=name, value=value)


def check_within(name: str, value: float, sound: bool, rule: str, usual: str) -> None:
    """Refuse a setting that is out of its bounds."""
    if not sound:
        raise refused("out_of_bounds", name=name, value=value, rule=rule, usual=usual)


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a name that is none of the choices."""
    known = list(choices)
    if value not in known:
        raise refused("no_such_choice", what=what, value=value, choices=did_you_mean(str(value), known))


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """The known names, the closest first if one is close."""
    plain = {name.replace("_", "-"): name for name in known}
    close = get_close_matches(given.lower().replace("_", "-"), plain, n=1)
    hint = f"Did you mean {plain[close[0]]}? " if close else ""
    return f"{hint}Choose one of {', '.join(known)}"


def check_one_each(given: str, number: int, what: str, expected: int, remedy: str = "Pass both in order") -> None:
    """Refuse lists that do not have one entry a sample."""
    if number != expected:
        raise refused("not_one_each", number=number, name=given, expected=expected, what=what, remedy=remedy)


def check_callable(what: str, value: object, rule: str, remedy: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise refused("not_callable", what=what, type=type(value).__name__, rule=rule, remedy=remedy)


def check_cp(cp_rank: int, cp_size: int) -> None:
    """Refuse a CP coordinate that cannot be one."""
    if type(cp_rank) is type(cp_size) is int and 0 <= cp_rank < cp_size:
        return
    if not is_int(cp_rank) or not is_int(cp_size):
        raise refused("cp_place_no_ints", cp_rank=cp_rank, cp_size=cp_size)
    if not 0 <= cp_rank < cp_size:
        raise refused("cp_place_outside", cp_rank=cp_rank, cp_size=cp_size)


def place_in_cp(cp_rank: int | None, cp_size: int) -> int:
    """The CP rank, which may go unsaid where there is one alone."""
    if cp_rank is None and cp_size != 1:
        raise refused("cp_rank_unsaid", cp_size=cp_size)
    return 0 if cp_rank is None else cp_rank


def require(holds: "bool | Tensor", refusal: str, facts: Callable[[], dict[str, Any]]) -> None:
    """Raise a refusal where a condition is False: at once on the host, without waiting on a device.

    A device stops at it later, with the text but without the facts, which nobody has looked at.
    """
    if isinstance(holds, Tensor) and not holds.is_cpu:
        torch._assert_async(holds, explain_blindly(refusal))
    elif not holds:
        raise refused(refusal, **facts())
