"""Values inside an engine's objects, named by paths, and other values put there for a while.

A path begins at an argument of a function, ``self`` included, or at a loaded module, ``package.module:NAME``, and goes
through attributes, keys, and ``*``, all values. A path that an engine lacks raises, except for one that ends in ``?``,
whose value may be None too.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Call = Callable[[Callable[[], Any], dict[str, Any]], Any]  # (stock, arguments), as in `Function`
_ABSENT: Any = object()


def wrapped(function: Any, call: Call, **beside: Any) -> Any:
    """A function that runs `call(stock, arguments)` instead; `arguments` has a method's self, and `beside`."""
    signature = inspect.signature(function)
    owner = {"self": function.__self__} if hasattr(function, "__self__") else {}
    names = [parameter.name for parameter in signature.parameters.values() if parameter.kind is parameter.VAR_KEYWORD]

    @functools.wraps(function, updated=())
    def replacement(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        arguments = {**owner, **beside, **bound.arguments}
        for name in names:  # arguments by keyword alone
            arguments |= arguments.pop(name, {})

        def stock() -> Any:
            own = {name: arguments[name] for name in bound.arguments if name in arguments}
            further = {
                name: value for name, value in arguments.items() if name not in (*signature.parameters, *owner, *beside)
            }
            bound.arguments.update(own | dict.fromkeys(names, further))
            return function(*bound.args, **bound.kwargs)

        return call(stock, arguments)

    return replacement


@contextmanager
def swapped(arguments: Any, values: Mapping[str, Any], copied: Sequence[str] = ()) -> Iterator[None]:
    """Inside a ``with``, other values at those paths, or copies; a function's place gets one that returns the value."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for path in (*values, *copied):
            for container, name in places(path, arguments):
                own = value_at(container, name)
                if path.endswith("?") and own is None:
                    continue
                held = container.keys() if _has_keys(container) else vars(container)
                before.append((container, name, own if name in held else _ABSENT))
                value = values[path] if path in values else _fork(own)
                if callable(own) and not isinstance(own, Tensor) and not callable(value):
                    value = functools.partial(_returned, value)
                _set(container, name, value)
        yield
    finally:
        for container, name, own in reversed(before):
            _set(container, name, own)


def places(path: str, arguments: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """The containers at whose names the path ends. Raises ValueError where there is none, unless it ends in ``?``."""
    module, _, inside = path.rstrip("?").rpartition(":")
    *steps, last = inside.split(".")
    containers: list[Any] = [sys.modules.get(module) if module else arguments]
    for step in steps:
        containers = [
            each
            for container in containers
            for each in (container.values() if step == "*" else [value_at(container, step)])
        ]
    holders = [(container, last) for container in containers if value_at(container, last, _ABSENT) is not _ABSENT]
    if not holders and not path.endswith("?") and "*" not in steps:
        raise ValueError(
            f"a policy loss without {path}: its arguments are {', '.join(arguments)}. Use a version of the engine that "
            "has it, or another row."
        )
    return holders


def value_at(container: Any, name: str, default: Any = None) -> Any:
    """The value of that key or attribute."""
    if _has_keys(container):
        return container[name] if name in container.keys() else default  # noqa: SIM118  a TensorDict has no `in`
    return getattr(container, name, default)


def _returned(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _has_keys(container: Any) -> bool:
    """True for dicts, TensorDicts and the like."""
    return isinstance(container, Mapping) or {"keys", "__getitem__"} <= {*dir(type(container))}


def _set(container: Any, name: str, value: Any) -> None:
    if _has_keys(container):
        if value is _ABSENT:
            del container[name]
        else:
            container[name] = value
    elif value is _ABSENT:
        delattr(container, name)
    else:
        setattr(container, name, value)


def _fork(value: Any) -> Any:
    """A copy of dicts and lists, at any depth, with the same values."""
    if isinstance(value, MutableMapping):
        forked = copy.copy(value)
        forked.update({key: _fork(inner) for key, inner in value.items()})
        return forked
    return copy.copy(value) if isinstance(value, list) else value
