"""Ids of rollouts, prompts and other groups of samples: ints, or strings that every rank hashes alike."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_rl_loss.core.errors import check_one_each, is_int, is_unordered

Ids = Sequence[int | str] | Tensor | npt.NDArray[Any]
#: By name, an id per sample; or per sample a row, with an id per mask entry.
IdsByName = Mapping[str, Ids | Sequence[Ids]]
Ints = npt.NDArray[np.int64]
_LIMIT = 2**61
_PER_TOKEN = "per token"
_WITH_ARGUMENT = ("rollout", "prompt")  # keys whose ids are an argument of `Samples`, one per sample


class Parts(NamedTuple):
    """The parts of one key's units: a part is one sample's tokens of one unit, in the order of samples and tokens.

    Attributes:
        ids: id of each part's unit, int64 [num_parts]; where ids are given per sample, each sample is a part.
        sample: of each part, int64 [num_parts].
        entry_parts: the part of each mask entry, end to end; -1 in no unit. None where ids are given per sample.
    """

    ids: Ints
    sample: Ints
    entry_parts: Ints | None = None


def argument_of(key: str) -> str:
    """What a user writes for ids of that name."""
    return f"{key}_ids" if key in _WITH_ARGUMENT else f"ids[{key!r}]"


def example_of(key: str) -> str:
    """How a user passes ids of that name to `Samples`."""
    return f"{key}_ids=[...]" if key in _WITH_ARGUMENT else f'ids={{"{key}": [...]}}'


def parts_of(key: str, ids: Ids | Sequence[Ids], lengths: Sequence[int]) -> Parts:
    """The parts by ids per sample, or per token of masks of these lengths: a negative id or "" is no unit."""
    name = argument_of(key)
    if key in _WITH_ARGUMENT or not is_per_token(ids):
        sample_ids = as_ids(name, ids, len(lengths))  # type: ignore[arg-type]
        for i in np.flatnonzero(~_is_unit(sample_ids))[:1]:
            raise ValueError(
                f"{name} with a negative or empty id for sample {i}: such an id names no unit, and each sample must be "
                f"in a {key}. Give the sample an id of its own; pass signed hashes as strings."
            )
        return Parts(sample_ids, np.arange(len(lengths)))
    check_one_each(name, len(ids), "loss masks", len(lengths))
    rows = [_plain(row) for row in ids]
    if (sizes := [len(row) if _is_row(row) else None for row in rows]) != list(lengths):
        raise ValueError(
            f"{name} with rows of {sizes[:8]} entries for loss masks of {lengths[:8]}: each row must be as long as its "
            "sample's mask. Pass one id per entry, -1 where a token is in no unit."
        )
    entry_ids = as_ids(name, [entry for row in rows for entry in row], sum(lengths))
    named = np.flatnonzero(_is_unit(entry_ids))
    unique, number = np.unique(entry_ids[named], return_inverse=True)
    sample = np.arange(len(lengths)).repeat(lengths)
    _, first, part = np.unique(sample[named] * len(unique) + number, return_index=True, return_inverse=True)
    order, entry_parts = first.argsort(), np.full(len(entry_ids), -1)
    entry_parts[named] = order.argsort()[part]
    firsts = named[first[order]]
    return Parts(entry_ids[firsts], sample[firsts], entry_parts)


def _is_unit(ids: Ints) -> npt.NDArray[np.bool_]:
    return (ids >= 0) & (ids != _NO_UNIT)


def check_units(parts: Mapping[str, Parts], entries: npt.NDArray[Any]) -> None:
    """Raise ValueError for a nonzero mask entry, of masks end to end, that is in no unit."""
    for name, unit_parts in parts.items():
        if unit_parts.entry_parts is not None and entries[unit_parts.entry_parts < 0].any():
            raise ValueError(
                f"a token with a nonzero mask and a negative or empty {name} id: every token that counts must be in a "
                f"{name}. Mask the token, or give it the id of its {name}."
            )


def _plain(ids: Any) -> Any:
    """A tensor or an array as a list, another sequence as it is."""
    return ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids


def is_per_token(ids: Any) -> bool:
    if isinstance(ids, Tensor | np.ndarray):
        return ids.ndim == 2
    return isinstance(ids, Sequence) and len(ids) > 0 and _is_row(ids[0])


def _is_row(entry: Any) -> bool:
    return getattr(entry, "ndim", 0) == 1 or (isinstance(entry, Sequence) and not isinstance(entry, str | bytes))


def as_ids(name: str, ids: Ids, num_samples: int, beside: str = "loss masks") -> Ints:
    """One id per sample, int64 [num_samples]; strings by a 61-bit BLAKE2b hash, which is the same on every rank.

    Raises:
        TypeError: something else than ints and strings.
        ValueError: a wrong number of ids; an int beyond 61 bits; an int and its own string, which would be two ids.
    """
    is_scalar = isinstance(ids, Tensor | np.ndarray) and not ids.ndim
    if is_scalar or isinstance(ids, str | bytes) or is_unordered(ids) or not isinstance(ids, Collection):  # read twice
        raise TypeError(f"{name} is {ids!r}: there must be one id per sample. Pass a list of ints or strings.")
    values: list[Any] = list(_plain(ids))
    check_one_each(name, len(values), beside, num_samples)
    if set(map(type, values)) - {int}:
        texts = {value for value in values if isinstance(value, str)}
        for value in values:
            if not isinstance(value, str) and not is_int(value):
                raise TypeError(
                    f"{name} holds {value!r} ({type(value).__name__}): an id must be an int or a str. Pass one each."
                )
            if not isinstance(value, str) and str(int(value)) in texts:
                raise ValueError(f"{name} holds {value} and '{value}': these are two ids. Write every id one way.")
        if texts and len(texts) < len(set(values)) and not all(isinstance(value, str) for value in values):
            number = next(value for value in values if not isinstance(value, str))
            raise ValueError(
                f"{name} mix strings and ints, {min(texts)!r} and {number!r}: ids of one kind must be written one way, "
                'or the same unit may have two. Pass str(...) of each, and "" for no unit.'
            )
        hashes = {text: hashed(text) for text in texts}
        values = [hashes[value] if isinstance(value, str) else int(value) for value in values]
    if values and not -_LIMIT < min(values) <= max(values) < _LIMIT:
        raise ValueError(f"{name} go beyond 61 bits: ranks exchange ids as 61-bit ints. Pass such ids as strings.")
    return np.array(values, np.int64)


def type_of_ids(ids: Ids | Sequence[Ids]) -> str:
    """``int`` or ``str``: an id that is an int on one rank and its own string on another would be two ids.

    Of ids per token ``int per token`` or ``str per token``, and ``per token`` alone where no token is in a unit.
    """
    if not is_per_token(ids):
        return "str" if any(isinstance(entry, str) for entry in _plain(ids)) else "int"
    rows = [_plain(row) for row in ids]
    if any(isinstance(entry, str) and entry for row in rows for entry in row):
        return f"str {_PER_TOKEN}"
    has_unit = any(not isinstance(entry, str) and entry >= 0 for row in rows for entry in row)
    return f"int {_PER_TOKEN}" if has_unit else _PER_TOKEN


def join_types(microbatch_types: Iterable[Sequence[tuple[str, str]]]) -> dict[str, str] | None:
    """The type of each name's ids in all micro-batches, sorted by name; None where micro-batches differ."""
    by_name = [dict(types) for types in microbatch_types]
    if len({tuple(types) for types in by_name}) > 1:
        return None
    joined = dict[str, str]()
    for name in by_name[0] if by_name else ():
        types = {id_types[name] for id_types in by_name}
        known = types - {_PER_TOKEN} or types
        if len(known) > 1 or len({id_type.endswith(_PER_TOKEN) for id_type in types}) > 1:
            return None
        joined[name] = known.pop()
    return joined


def hashed(data: str | bytes, bits: int = 61) -> int:
    """A hash of the given number of bits, the same on every rank."""
    data = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % 2**bits


_NO_UNIT = hashed("")  # the id of tokens in no unit, among strings
