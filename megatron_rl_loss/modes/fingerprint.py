"""A digest of a user's function, for ranks to compare: two lambdas, or two partials of one function, have one name."""

import functools
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl_loss.modes.table import Mode
from megatron_rl_loss.step.ids import hashed

#: Values whose text says all of them.
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)


def fingerprint(mode: Mode) -> str:
    """Eight hexadecimal digits of the mode's function and of the functions of its declared sums.

    They depend on the code, its constants, defaults, captured values and bound arguments: numbers, text, arrays,
    containers, functions and objects that are called. Of other objects the type counts alone, global names by name.
    """
    parts = [
        _text_of(mode.function),
        *(f"{name} {one.by} {_text_of(one.of)}" for name, one in sorted(mode.sums.items())),
    ]
    return f"{hashed('; '.join(parts), 32):08x}"


def _text_of(value: Any, outer: tuple[int, ...] = ()) -> str:
    """Text that is alike on all ranks for equal values; `outer` are values around it, which may contain themselves."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray | Tensor):
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype}{array.shape}{hashed(array.tobytes()):x}"
    if id(value) in outer:
        return "itself"
    texts = [_text_of(part, (*outer, id(value))) for part in _parts_of(value)]
    ordered = sorted(texts) if isinstance(value, set | frozenset | dict) else texts
    return f"{type(value).__module__}.{type(value).__qualname__}({', '.join(ordered)})"


def _parts_of(value: Any) -> list[Any]:
    """The values that a container, a function or its code is made of; none of another object."""
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
        return [value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    # A mode may be an object that is called: its numbers and texts are a function's captured values.
    return [vars(value)] if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__") else []
