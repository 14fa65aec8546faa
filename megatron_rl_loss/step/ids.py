"""Ids of rollouts and prompts: ints, or strings that every rank hashes alike."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.errors import check_one_each, is_int

Ids = Sequence[int | str] | Tensor

#: Ids travel between ranks as int64 with one bit for their kind and one for the sign.
_ID_LIMIT = 2**61


def as_ids(name: str, ids: Ids, num_samples: int) -> Tensor:
    """One id per sample as int64 [num_samples] on the host; strings by a 61-bit BLAKE2b hash, the same on every rank.

    Raises TypeError for other types, ValueError for a wrong count or an int beyond 61 bits.
    """
    scalar = isinstance(ids, Tensor) and not ids.dim()
    if scalar or isinstance(ids, str | bytes | set | dict) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} is {ids!r}: there must be one id per sample. Pass a list of ints or strings.")
    values: list[Any] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    check_one_each(name, len(values), "loss masks", num_samples)
    if set(map(type, values)) != {int}:
        odd = [value for value in values if not isinstance(value, str) and not is_int(value)]
        if odd:
            raise TypeError(
                f"{name} holds {odd[0]!r} ({type(odd[0]).__name__}): an id must be an int or a str. Pass one each."
            )
        _check_spelling(name, values)
        values = [_hashed(value) if isinstance(value, str) else int(value) for value in values]
    if values and not -_ID_LIMIT < min(values) <= max(values) < _ID_LIMIT:
        raise ValueError(f"{name} go beyond 61 bits: such ids cannot be exchanged. Pass them as strings.")
    return torch.from_numpy(np.array(values, np.int64))


def _check_spelling(name: str, values: list[int | str]) -> None:
    """Refuse an id that comes as an int and as its string: they would be two units."""
    texts = {value for value in values if isinstance(value, str)}
    both = [value for value in values if not isinstance(value, str) and str(int(value)) in texts]
    if both:
        raise ValueError(
            f"{name} holds {int(both[0])} and '{int(both[0])}': an int and its string are two ids. Spell ids one way."
        )


def _hashed(text: str) -> int:
    return (
        int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
        % _ID_LIMIT
    )
