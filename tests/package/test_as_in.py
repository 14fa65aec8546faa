"""Where a docstring says that arguments are "as in" another function, their defaults are those of the other."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import megatron_rl_loss

#: Lines of arguments such as ``units, divisor: as in `make_pg_loss_reducer`; only with a mode.``
AS_IN = re.compile(r"^ +([a-z_]+(?:, [a-z_]+)*): as in `(\w+)`", flags=re.MULTILINE)


def public() -> dict[str, Any]:
    return {name: getattr(megatron_rl_loss, name) for name in vars(megatron_rl_loss)["_HOME_OF"]}


def promises() -> Iterator[tuple[str, str, str]]:
    """Function or class, the other one, and the argument that both have."""
    for name, found in public().items():
        for arguments, other in AS_IN.findall(inspect.getdoc(found) or ""):
            named = (argument for argument in arguments.split(", ") if argument not in ("others", "options"))
            yield from ((name, other, argument) for argument in named)


def defaults_of(name: str) -> dict[str, Any]:
    signature = inspect.signature(public()[name])
    return {argument: parameter.default for argument, parameter in signature.parameters.items()}


PROMISES = [*promises()]


def test_there_are_such_docstrings() -> None:
    assert len(PROMISES) > 30
    assert len({name for name, *_ in PROMISES}) > 12


@pytest.mark.parametrize(("name", "other", "argument"), PROMISES)
def test_the_defaults_are_those_of_the_other(name: str, other: str, argument: str) -> None:
    assert other in public()
    ours, theirs = defaults_of(name), defaults_of(other)
    assert argument in ours
    if theirs[argument] is inspect.Parameter.empty:  # a default of its own
        return
    left_out = None if str(ours[argument]) == "<factory>" else ours[argument]  # of a dataclass: an empty one
    assert left_out == theirs[argument], f"{name}({argument}=...): say in its docstring what is left out means"
