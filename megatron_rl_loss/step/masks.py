"""Loss masks on their way into a buffer on the host: what may be given, and which entries are usable weights."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
#: One per sample: a 1-D tensor on any device, a 1-D array, or a list of numbers.
Mask = Tensor | Array | Sequence[float]

#: Beyond these the float32 weight of a token could vanish or be infinite.
SMALLEST, LARGEST = 1e-30, 1e30
_ROUNDED = 1 + 1e-6
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def check_masks(loss_masks: Iterable[Mask]) -> list[Tensor | Array]:
    """The masks as arrays, or as tensors where they lie on a device; refuses what is no list of real 1-D masks."""
    if isinstance(loss_masks, Tensor | np.ndarray | str) or not isinstance(loss_masks, Iterable):
        raise TypeError(
            f"loss_masks is one {type(loss_masks).__name__}: it must be a list of 1-D masks, one per sample. Pass "
            "list(loss_masks)."
        )
    masks = list[Tensor | Array]()
    for i, given in enumerate(loss_masks):
        try:
            mask = given if isinstance(given, Tensor) and not given.is_cpu else to_array(given)
        except ValueError:  # ragged
            mask = np.empty(0, object)
        is_empty = isinstance(given, Sequence) and not len(given)
        if mask.dtype in _COMPLEX if isinstance(mask, Tensor) else mask.dtype.kind not in "biuf" and not is_empty:
            shown = given.dtype if isinstance(given, Tensor | np.ndarray) else f"a {type(given).__name__}"
            raise TypeError(
                f"the loss mask of sample {i} is {shown}: it must hold one real number per token. Pass 0/1 or weights."
            )
        if mask.ndim != 1:
            raise ValueError(
                f"the loss mask of sample {i} has shape {tuple(mask.shape)}: it must be 1-D, one entry per token. Pass "
                "one mask per sample."
            )
        masks.append(mask)
    return masks


def to_array(values: Any) -> Array:
    """On the host, for NumPy, which has no bfloat16; waits for a device."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)


def read_together(masks: Sequence[Tensor | Array]) -> list[Array]:
    """The masks on the host: one transfer for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for mask in masks:
        if isinstance(mask, Tensor):
            kinds.setdefault((mask.device, mask.dtype), []).append(mask.detach())
    read = {
        kind: iter(np.split(to_array(torch.cat(some)), np.cumsum([len(mask) for mask in some])[:-1]))
        for kind, some in kinds.items()
    }
    return [next(read[mask.device, mask.dtype]) if isinstance(mask, Tensor) else mask for mask in masks]


def fill_buffer(masks: Sequence[Array], places: Sequence[tuple[int, int]], total_tokens: int) -> tuple[Array, bool]:
    """The buffer [total_tokens] that has the masks at their [begin, end), 0 elsewhere; True where all are ints.

    float32, or float64 where a mask is. Raises ValueError for entries that are no usable weights.
    """
    kinds = {mask.dtype.kind for mask in masks if len(mask)}
    holds_flags = "f" not in kinds
    dtype = np.float64 if any(mask.dtype == np.float64 for mask in masks) else np.float32
    buffer = np.zeros(total_tokens, dtype)
    for (begin, end), mask in zip(places, masks, strict=True):
        buffer[begin:end] = mask
    is_mixed = len(kinds) > 1 and not holds_flags
    if is_mixed or not _is_sound(buffer, 1 if holds_flags else LARGEST):
        for i, mask in enumerate(masks):
            if not _is_sound(mask, LARGEST if mask.dtype.kind == "f" else 1):
                raise ValueError(
                    f"the loss mask of sample {i} holds {_first_unsound(mask)}: token weights must be finite and "
                    ">= 0 (0, or from 1e-30 to 1e+30), and those of integer masks 0 or 1. Pass 0 for tokens that do "
                    "not count, 1 or a float weight for those that do."
                )
    return buffer, holds_flags


def _is_sound(mask: Array, largest: float) -> bool:
    """True if every entry is a usable weight; NaN is none."""
    if not mask.size:
        return True
    # float16 has no 1e30, float32 one that is rounded up
    in_range = mask.min() >= 0 and float(mask.max()) <= largest * _ROUNDED
    return bool(in_range) and (largest == 1 or not ((mask < SMALLEST) & (mask != 0)).any())


def _first_unsound(mask: Array) -> float:
    values, largest = mask.astype(np.float64), LARGEST if mask.dtype.kind == "f" else 1
    sound = (values == 0) | ((values >= SMALLEST) & (values <= largest * _ROUNDED))
    return float(values[~sound][0])
