"""Loss masks: validation of what users pass, and their way into one buffer on the host."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.errors import is_unordered

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
#: One per sample: a 1-D tensor on any device, a 1-D array, or a list of numbers.
Mask = Tensor | Array | Sequence[float]

#: Beyond these the float32 weight of a token could vanish, or a step's sum of masks be too large to count in float64.
SMALLEST, LARGEST = 1e-30, 1e9
#: The bounds, rounded to float32, may lie a little beyond themselves.
_ROUNDED = 1 + 1e-6
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
#: Entries that are worked on at a time, so that what is written and read between fits into a core's cache.
IN_CACHE = 2**15
#: Torch joins none of them with another dtype.
_WIDE_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
_UNSIGNED = {bits // 8: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
_USUAL = _FLOATS | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def check_masks(loss_masks: Iterable[Mask]) -> tuple[list[Tensor], list[int]]:
    """The masks as tensors on their own devices, and their lengths; raises unless all are real and 1-D."""
    if not isinstance(loss_masks, list):
        is_whole = isinstance(loss_masks, Tensor | np.ndarray)
        if is_whole or isinstance(loss_masks, str) or is_unordered(loss_masks) or not isinstance(loss_masks, Iterable):
            raise TypeError(
                f"loss_masks is one {type(loss_masks).__name__}: it must be a list of 1-D masks, one per sample. Pass "
                f"{'list(loss_masks)' if is_whole else '[mask, ...]'}."
            )
    masks = [mask if isinstance(mask, Tensor) else _as_tensor(i, mask) for i, mask in enumerate(loss_masks)]
    for i, mask in enumerate(masks):
        if mask.is_nested:
            raise TypeError(
                f"the loss mask of sample {i} is a nested tensor: it must be one sample's. Pass mask.unbind()."
            )
        if mask.dim() != 1:
            raise ValueError(
                f"the loss mask of sample {i} has shape {tuple(mask.shape)}: it must be 1-D, one entry per token. Pass "
                "one mask per sample."
            )
        if mask.layout != torch.strided:
            raise TypeError(
                f"the loss mask of sample {i} is {mask.layout}: it must have an entry per token. Pass mask.to_dense()."
            )
    lengths = [mask.numel() for mask in masks]  # faster than by their shapes
    if (dtypes := {mask.dtype for mask in masks}) <= _USUAL:
        return masks, lengths
    for dtype in dtypes & _COMPLEX:
        raise TypeError(f"loss masks of {dtype}: each must hold one real number per token. Pass 0/1 or weights.")
    for dtype in [dtype for dtype in dtypes - _FLOATS if dtype.is_floating_point]:
        raise TypeError(
            f"loss masks of {dtype}: weights must be float16, bfloat16, float32 or float64, which can be summed. Cast "
            "the masks, or pass 0/1 as ints or bools."
        )
    if dtypes & _WIDE_UNSIGNED:
        masks = [mask.to(torch.int64) if mask.dtype in _WIDE_UNSIGNED else mask for mask in masks]
    return masks, lengths


def _as_tensor(i: int, mask: Any) -> Tensor:
    if isinstance(mask, list | tuple) and mask and all(isinstance(entry, Tensor) and not entry.dim() for entry in mask):
        return torch.stack(list(mask)).detach()
    if isinstance(mask, np.ma.MaskedArray):
        raise TypeError(
            f"the loss mask of sample {i} is a MaskedArray: entries that it masks would count by what lies under them. "
            "Pass mask.filled(0)."
        )
    try:
        array = np.asarray(mask)
    except (ValueError, TypeError, RuntimeError):  # ragged, or with tensors that NumPy cannot read
        array = np.empty(0, object)
    if array.dtype.kind not in "biufc" or isinstance(mask, int | float):
        raise TypeError(
            f"the loss mask of sample {i} is a {type(mask).__name__}: it must hold one real number per token. Pass 0/1 "
            "or weights."
        )
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # long double, which torch does not have
        array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.size or not array.flags.writeable or array.strides < (0,):  # which torch warns of, or refuses
        array = array.astype(array.dtype if array.size else np.float32)
    return torch.from_numpy(array)


def to_array(values: Any) -> Array:
    """On the host, for NumPy, which has no bfloat16; waits for a device."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    if values.is_meta:
        raise ValueError(
            f"a tensor of shape {tuple(values.shape)} on the meta device: it must have values, which are read here. "
            "Pass a tensor with data."
        )
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)


def join_on_host(masks: Sequence[Tensor]) -> Array:
    """The masks end to end, on the host, with their dtypes promoted: one transfer for each device.

    A single mask that is on the host is not copied.
    """
    if not masks:
        return np.zeros(0, np.float32)
    if len(masks) == 1:
        return to_array(masks[0])
    devices = {mask.device for mask in masks}
    if len(devices) == 1:
        return to_array(torch.cat(list(masks)))
    parts = {device: join_on_host([mask for mask in masks if mask.device == device]) for device in devices}
    ends = dict.fromkeys(devices, 0)
    joined = []
    for mask in masks:
        begin, ends[mask.device] = ends[mask.device], ends[mask.device] + len(mask)
        joined.append(parts[mask.device][begin : ends[mask.device]])
    return np.concatenate(joined)


def check_entries(joined: Array, masks: Sequence[Tensor]) -> bool:
    """True where all masks are ints or bools, whose entries must be 0 or 1; ValueError for an unusable weight."""
    if joined.dtype.kind in "biu" and is_sound(joined, 1):  # the usual case
        return True
    has_floats = {dtype.is_floating_point for dtype in {mask.dtype for mask in masks if mask.shape[0]}}
    holds_flags = True not in has_floats
    if len(has_floats) < 2 and is_sound(joined, 1 if holds_flags else LARGEST):
        return holds_flags
    ends = np.cumsum([0, *map(len, masks)])
    for i, (begin, end) in enumerate(pairwise(ends.tolist())):
        largest = LARGEST if masks[i].dtype.is_floating_point else 1
        if not is_sound(mask := joined[begin:end], largest):
            values = (mask.view(np.uint8) if mask.dtype == np.bool_ else mask).astype(np.float64)
            sound = (values == 0) | ((values >= SMALLEST) & (values <= largest * _ROUNDED))
            raise ValueError(
                f"the loss mask of sample {i} holds {float(values[~sound][0])}: token weights must be finite and >= 0 "
                "(0, or from 1e-30 to 1e+9), and those of integer masks 0 or 1. Pass 0 for tokens that do not count, "
                "1 or a float weight for those that do."
            )
    return holds_flags


def is_sound(mask: Array, largest: float) -> bool:
    """True if every entry is a usable weight, which NaN is not."""
    if not mask.size:
        return True
    if mask.dtype.kind in "biu":  # as unsigned ones, negative ints are the largest
        return bool(np.maximum.reduce(mask.view(_UNSIGNED[mask.itemsize])) <= largest)
    # float16 has no 1e9
    in_range = mask.min() >= 0 and float(mask.max()) <= largest * _ROUNDED
    return bool(in_range) and (largest == 1 or not ((mask < SMALLEST) & (mask != 0)).any())


def groups_in_cache(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[first, last) of whole samples, as many as fit into a cache; one at least."""
    first = entries = 0
    for number, length in enumerate(lengths):
        if entries + length > IN_CACHE and number > first:
            yield first, number
            first, entries = number, 0
        entries += length
    if first < len(lengths):
        yield first, len(lengths)


def place(joined: Array, places: Sequence[tuple[int, int]], total_tokens: int) -> Array:
    """Rows that lie end to end -> a buffer [total_tokens] that has them at their [begin, end), 0 elsewhere."""
    if len(joined) == total_tokens:
        return joined
    buffer, at = np.zeros(total_tokens, joined.dtype), 0
    for begin, end in places:
        buffer[begin:end] = joined[at : at + end - begin]
        at += end - begin
    return buffer


def sum_each(joined: Array, lengths: Sequence[int]) -> Floats:
    """The sum of each row, of rows with these numbers of entries, float64 [num_rows]."""
    # Ints are added as ints: a cast of each entry would take longer than the sum.
    dtype = np.float64 if joined.dtype.kind == "f" else np.int64 if joined.itemsize > 4 else np.int32
    starts = [0, *accumulate(lengths[:-1])] if len(lengths) > 1 else [0]
    if lengths and all(lengths):
        return np.add.reduceat(joined, starts, dtype=dtype).astype(np.float64, copy=False)
    sums, filled = np.zeros(len(lengths)), np.array(lengths) > 0
    if filled.any():
        sums[filled] = np.add.reduceat(joined, np.array(starts)[filled], dtype=dtype)
    return sums
