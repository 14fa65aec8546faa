"""A digest of a user's function, for ranks to compare: two lambdas, or two partials of one function, have one name."""

import functools
from collections.abc import Iterator
from enum import Enum
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl_loss.modes.table import Mode
from megatron_rl_loss.step.ids import hashed

#: Values whose text says all of them.
_PLAIN: tuple[type, ...] = (int, float, complex, str, bytes, bool, type(None), np.generic, Enum)

#: Values that are compared as attributes of any object.
_COMPARED = (*_PLAIN, np.ndarray, Tensor, list, tuple, set, frozenset, dict)


def fingerprint(mode: Mode) -> str:
    """Eight hexadecimal digits of the mode's function and of the functions of its declared sums.

    They depend on the code, its constants, defaults, captured values and bound arguments: numbers, text, arrays,
    containers, functions and objects that are called. Of other objects, such as a config, those attributes count whose
    names the code has, if they are numbers, text, arrays or containers, and of global names numbers and text.
    """
    parts = [
        _text_of(mode.function),
        *(f"{name} {declared.by} {_text_of(declared.of)}" for name, declared in sorted(mode.sums.items())),
    ]
    return f"{hashed('; '.join(parts), 32):08x}"


def _text_of(value: Any, outer: tuple[int, ...] = (), names: frozenset[str] = frozenset()) -> str:
    """Text that is alike on all ranks for equal values; `outer` are values around it, which may contain themselves.

    `names` are those that functions around it have in their code.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray | Tensor):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype}{array.shape}{hashed(array.tobytes()):x}"
    if id(value) in outer:
        return "itself"
    names |= frozenset(_names_in(_code_of(value)))
    texts = [_text_of(part, (*outer, id(value)), names) for part in _parts_of(value, names)]
    ordered = sorted(texts) if isinstance(value, set | frozenset | dict) else texts
    return f"{type(value).__module__}.{type(value).__qualname__}({', '.join(ordered)})"


def _code_of(value: Any) -> CodeType | None:
    """The code of a function, of a method or of what a partial calls; of other objects None."""
    function = value.func if isinstance(value, functools.partial) else value
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _names_in(code: CodeType | None) -> Iterator[str]:
    """Names of globals and attributes in a code, and in that of functions inside it."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant if isinstance(constant, CodeType) else None)


def _parts_of(value: Any, names: frozenset[str]) -> list[Any]:
    """The values that a container, a function or its code is made of; of another object those of these names."""
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_consts, value.co_names]
    if hasattr(value, "__func__"):
        owner = value.__self__
        return [value.__func__, owner if isinstance(owner, type) else getattr(owner, "__dict__", owner)]
    if hasattr(value, "__code__"):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        known = value.__globals__
        of_module = {name: known[name] for name in _names_in(value.__code__) if name in known}
        of_module = {name: constant for name, constant in of_module.items() if isinstance(constant, _PLAIN)}
        return [value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, cells, of_module]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return []
    if callable(value):  # a mode may be an object: its numbers and texts are a function's captured values
        return [vars(value)]
    read = {name: attribute for name, attribute in vars(value).items() if name in names}
    return [{name: attribute for name, attribute in read.items() if isinstance(attribute, _COMPARED)}]
