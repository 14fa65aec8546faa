"""Rows of values, one per sample, on their way into the layout's buffer; loaded by whoever has such values."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.errors import check_one_each, check_sized
from megatron_rl_loss.step.masks import place
from megatron_rl_loss.step.samples import Samples


def rows_in_buffer(samples: Samples, values: Sequence[Any] | Tensor) -> Any:
    """`Samples.in_buffer`."""
    check_sized("values", values)
    check_one_each("rows", len(values), "loss masks", len(samples))
    rows = [to_row(value, length) for value, length in zip(values, samples.mask_lengths, strict=True)]
    if (shapes := [tuple(row.shape) if hasattr(row, "shape") else np.shape(row) for row in rows]) != [
        (length,) for length in samples.mask_lengths
    ]:
        lengths = [shape[0] if len(shape) == 1 else shape for shape in shapes[:8]]
        raise ValueError(
            f"rows of {lengths} values for loss masks of {samples.mask_lengths[:8]}: a row must be as long as its "
            "sample's mask. Pass one value per mask entry."
        )
    flat = place_rows(rows, samples.places, samples.total_tokens)
    if isinstance(values, Tensor) and not rows:
        flat = values.new_zeros(samples.total_tokens)
    return flat if samples.layout is None else flat.reshape(samples.layout.rows(len(flat)))


def to_row(value: Any, length: int) -> Any:
    """A row of that length where the value is one number, else the value itself."""
    if np.ndim(value):
        return value
    if isinstance(value, Tensor):
        return value.expand(length)
    if not isinstance(value, (Real, np.generic)):
        raise TypeError(f"{value!r} for a sample: it must be a number, or a row as long as the mask. Pass either.")
    return np.full(length, value)


def place_rows(rows: Sequence[Any], places: Sequence[tuple[int, int]], total_tokens: int) -> Any:
    """`place` of rows that are not joined yet; of tensors a tensor, which stays differentiable and on their device."""
    like = next((row for row in rows if isinstance(row, Tensor)), None)
    if like is None:
        return place(np.concatenate([np.zeros(0), *rows]), places, total_tokens)
    rows = [row if isinstance(row, Tensor) else torch.as_tensor(row).to(like) for row in rows]
    parts, at = list[Tensor](), 0
    for (begin, end), row in zip(places, rows, strict=True):
        parts += [row.new_zeros(begin - at), row]
        at = end
    return torch.cat([*parts, parts[-1].new_zeros(total_tokens - at)])
