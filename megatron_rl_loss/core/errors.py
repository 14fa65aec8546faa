"""This package's two own errors, and the checks that every folder needs.

Each error names the given value, the rule that it breaks, and a remedy: ``given: rule. Remedy.``
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor


class BadBatchError(ValueError):
    """A rank could not prepare its part of the step; raised on every rank, naming the rank and its reason."""


class ContractError(ValueError):
    """The installed Megatron does not scale losses as this version of megatron_rl_loss relies on."""


Part = TypeVar("Part", str, list[Any])


def only_if(condition: object, part: Part) -> Part:
    """The part of a text or list where the condition holds, else an empty one."""
    return part if condition else type(part)()


def is_int(value: object) -> TypeGuard[int]:
    """True for a whole number (NumPy's too) that is not a bool."""
    return type(value) is int or (hasattr(value, "__index__") and not isinstance(value, bool | Tensor))


def is_number(value: object) -> TypeGuard[float]:
    """True for a real number (NumPy's too) that is not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_int(name: str, value: object, at_least: int, remedy: str) -> None:
    """Raise ValueError unless the value is an int >= `at_least`."""
    if not is_int(value) or value < at_least:
        raise ValueError(f"{name} is {value!r}: it must be an int >= {at_least}. {remedy}.")


def check_within(name: str, value: Any, interval: str, usual: str) -> None:
    """Raise ValueError unless the value is a number in the interval, which is written as (0, 1]."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    sound = is_number(value) and low <= value <= high
    if not sound or (value == low and interval[0] == "(") or (value == high and interval[-1] == ")"):
        raise ValueError(f"{name} is {value!r}: it must be a number in {interval}. {usual}.")


def check_choice(what: str, value: object, choices: Iterable[str], otherwise: str = "") -> None:
    """Raise ValueError for a name that is not among the choices; the text ends with another remedy if there is one."""
    known = list(choices)
    if value not in known:
        remedy = ", ".join(filter(None, (did_you_mean(str(value), known), otherwise)))
        raise ValueError(f"{what} {value!r}: there is no such {what}. {remedy}.")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The known names, the closest first if one is close."""
    plain = {spelling.replace("_", "-"): spelling for spelling in known}
    word = name.lower().replace("_", "-")
    is_part_of_several = word not in plain and sum(word in spelling for spelling in plain) > 1
    close = [] if is_part_of_several else get_close_matches(word, plain, n=1)
    hint = f"Did you mean {plain[close[0]]}? " if close else ""
    return f"{hint}Choose one of {', '.join(known)}"


def check_one_each(entries: str, number: int, samples: str, expected: int, remedy: str = "Pass both in order") -> None:
    """Raise ValueError for a list without one entry per sample."""
    if number != expected:
        raise ValueError(f"{number} {entries} for {expected} {samples}: there must be one per sample. {remedy}.")


def is_unordered(value: object) -> bool:
    """True for a set, whose order differs between processes, and for a mapping, whose entries are its keys."""
    return isinstance(value, Set | Mapping)


def check_sized(what: str, value: object) -> None:
    """Raise TypeError for values without a length and an order: a generator, a single number, a text or a set, say."""
    is_scalar = getattr(value, "ndim", 1) == 0 or isinstance(value, str | bytes)
    if not isinstance(value, Sized) or is_scalar or is_unordered(value):
        raise TypeError(f"{what} is a {type(value).__name__}: there must be one entry per sample. Pass a list.")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless the value is True or False: the text "False" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: it must be True or False. Pass a bool.")


def check_mapping(name: str, value: object, remedy: str) -> None:
    """Raise TypeError unless the value is a mapping, whose keys are names."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}: it must be a dict whose keys are names. {remedy}.")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} has the key {key!r}: it must be a dict whose keys are names. {remedy}.")


def check_names(what: str, value: object) -> None:
    """Raise TypeError unless the value is a list of names: a set has another order on each rank."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        names = f"[{value!r}]" if isinstance(value, str) else "['name', ...]"
        raise TypeError(f"{what} is {shown}: it must be a list of names. Pass {names}.")


def check_callable(what: str, value: object, rule: str, remedy: str) -> None:
    """Raise TypeError unless the value is callable."""
    if not callable(value):
        raise TypeError(f"{what} is a {type(value).__name__}: {rule}. {remedy}.")


def check_float(name: str, value: object, remedy: str) -> None:
    """Raise TypeError unless the value is a tensor of floats."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"{name} is {kind}: it must be a float tensor. {remedy}.")


def require(holds: bool | Tensor, describe: Callable[[], str], rule: str) -> None:
    """Raise ValueError where a condition is False: at once on the host, without waiting on a device.

    On a device the assertion fires later. Its text has the rule and the remedy alone: the host never reads the values.
    """
    if isinstance(holds, Tensor) and not holds.is_cpu:
        torch._assert_async(holds, f"values on a device: {rule}")
    elif not holds:
        raise ValueError(f"{describe()}: {rule}")


def first_order(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a backward function written by hand: its gradient has no graph, so create_graph=True is a ValueError."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def call(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise ValueError(
                    f"create_graph=True through {name}: its gradient has no graph, so a loss made from that gradient "
                    "(a gradient penalty) would not train the model. Write that term with plain torch operations."
                )
            return backward(ctx, *gradients)

        return call

    return decorate


def print_text(text: str) -> None:
    """Print a report; characters that standard output cannot encode, as in a locale of ASCII, become ``?``."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
