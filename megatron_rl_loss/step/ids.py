"""Ids of rollouts, prompts and whatever else samples are grouped by: ints, or strings that every rank hashes alike."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_rl_loss.errors import check_one_each, is_int

Ids = Sequence[int | str] | Tensor | npt.NDArray[Any]
Keys = npt.NDArray[np.int64]
_LIMIT = 2**61


def as_ids(name: str, ids: Ids, num_samples: int) -> Keys:
    """One id per sample, int64 [num_samples]; strings by a 61-bit BLAKE2b hash, which is the same on every rank.

    Raises:
        TypeError: something else than ints and strings.
        ValueError: a wrong number of ids; an int beyond 61 bits; an int beside its own string, which would be two ids.
    """
    is_scalar = isinstance(ids, Tensor | np.ndarray) and not ids.ndim
    if is_scalar or isinstance(ids, str | bytes | set | dict) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} is {ids!r}: there must be one id per sample. Pass a list of ints or strings.")
    values: list[Any] = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)
    check_one_each(name, len(values), "loss masks", num_samples)
    if set(map(type, values)) - {int}:
        texts = {value for value in values if isinstance(value, str)}
        for value in values:
            if not isinstance(value, str) and not is_int(value):
                raise TypeError(
                    f"{name} holds {value!r} ({type(value).__name__}): an id must be an int or a str. Pass one each."
                )
            if not isinstance(value, str) and str(int(value)) in texts:
                raise ValueError(f"{name} holds {value} and '{value}': they are two ids. Spell ids one way.")
        values = [hashed(value) if isinstance(value, str) else int(value) for value in values]
    if values and not -_LIMIT < min(values) <= max(values) < _LIMIT:
        raise ValueError(f"{name} go beyond 61 bits: such ids cannot be exchanged. Pass them as strings.")
    return np.array(values, np.int64)


def kind_of_ids(ids: Ids) -> str:
    """``int`` or ``str``: an id that is an int on one rank and its own string on another would be two ids."""
    values: Any = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids
    return "str" if any(isinstance(value, str) for value in values) else "int"


def hashed(text: str, bits: int = 61) -> int:
    """A hash of the text of so many bits, the same on every rank."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little") % 2**bits
