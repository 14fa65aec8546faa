"""What is done with loss masks, which lie in one buffer per micro-batch, on the host or on a device.

Everything takes and returns tensors. On the host NumPy works on them: a small operation takes a third of torch's time,
and sums and repetitions are faster too. On a device nothing waits and launches do not grow with samples.
Lengths, starts and counts are plain ints.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.step.layouts import Ints

#: Beyond these the float32 weight of a token could vanish or be infinite.
SMALLEST, LARGEST = 1e-30, 1e30
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def check_masks(loss_masks: Sequence[Tensor]) -> tuple[list[Tensor], Ints]:
    """The masks in a list, and their lengths; few facts of each are read, as function modes see every look."""
    if isinstance(loss_masks, Tensor) or not isinstance(loss_masks, Iterable):
        shape = tuple(loss_masks.shape) if isinstance(loss_masks, Tensor) else ()
        shown = f"one tensor of shape {shape}" if shape else f"one {type(loss_masks).__name__}"
        raise TypeError(
            f"loss_masks is {shown}: it must be a list of 1-D tensors, one per sample. Pass list(loss_masks)."
        )
    masks = list(loss_masks)
    for i, mask in enumerate(masks if set(map(type, masks)) != {Tensor} else []):
        if not isinstance(mask, Tensor):
            raise TypeError(
                f"the loss mask of sample {i} is a {type(mask).__name__}: it must be a 1-D tensor. Wrap it in "
                "torch.tensor."
            )
    shapes = [mask.shape for mask in masks]
    for i, shape in enumerate(shapes if set(map(len, shapes)) != {1} else []):
        if len(shape) != 1:
            raise ValueError(
                f"the loss mask of sample {i} has shape {tuple(shape)}: it must be 1-D, one entry per token. Pass one "
                "tensor per sample."
            )
    for dtype in {mask.dtype for mask in masks} & _COMPLEX:
        i = next(i for i, mask in enumerate(masks) if mask.dtype == dtype)
        raise TypeError(
            f"the loss mask of sample {i} is {dtype}: token weights must be real numbers. Pass 0/1, bool or float "
            "weights."
        )
    return masks, [length for (length,) in shapes]


def check_device(what: str, masks: Sequence[Tensor]) -> None:
    """Refuse masks on several devices; those without an entry may be anywhere."""
    if len(devices := {str(mask.device) for mask in masks if mask.numel()}) > 1:
        raise ValueError(f"{what} on {sorted(devices)}: they must share one device. Move them together.")


def join(values: Sequence[Tensor], starts: Ints, lengths: Ints, total_tokens: int) -> Tensor:
    """One 1-D tensor per sample -> the buffer that has them at their starts, [total_tokens], 0 elsewhere; a copy.

    On the values' device; their dtypes are promoted together.
    """
    if not values:
        return torch.zeros(total_tokens, device="cpu")
    joined = torch.cat(list(values))
    if joined.numel() < total_tokens:
        ends = [0, *(start + length for start, length in zip(starts, lengths, strict=True))]
        gaps = [start - end for start, end in zip([*starts, total_tokens], ends, strict=True)]
        padding = joined.new_zeros(max(gaps))
        paddings = [padding[:gap] for gap in gaps]
        joined = torch.cat([part for pair in zip(paddings, values, strict=False) for part in pair] + paddings[-1:])
    return joined.detach() if joined.requires_grad else joined


def on_host(values: Tensor) -> bool:
    """Whether NumPy can work on the values where they are, and nobody waits for one of them."""
    return values.is_cpu and values.dtype != torch.bfloat16  # which NumPy lacks


def cut(buffer: Tensor, starts: Ints, lengths: Ints) -> Tensor:
    """Pieces of the buffer, one after the other; they are in its order and apart."""
    if sum(lengths) == buffer.shape[0]:
        return buffer
    places = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    if on_host(buffer) and not buffer.requires_grad:
        array = buffer.numpy()
        return torch.from_numpy(np.concatenate([array[:0], *(array[start:end] for start, end in places)]))
    bounds = [0, *chain.from_iterable(places)]
    gaps_and_pieces = buffer.split([end - begin for begin, end in pairwise([*bounds, len(buffer)])])
    return torch.cat([buffer[:0], *gaps_and_pieces[1::2]])


def sum_each(buffer: Tensor, starts: Ints, lengths: Ints, flags: bool) -> Tensor:
    """The sum of each mask, float64 [num_samples]. Of flags in float32: below 2**24 of them are exact."""
    if on_host(buffer):
        sums, dtype = np.zeros(len(starts)), np.float32 if flags else np.float64
        if filled := [start for start, length in zip(starts, lengths, strict=True) if length]:
            is_filled = slice(None) if len(filled) == len(starts) else np.array(lengths) > 0
            sums[is_filled] = np.add.reduceat(buffer.numpy(), filled, dtype=dtype)
        return torch.from_numpy(sums)
    if not starts:
        return buffer.new_zeros(0, dtype=torch.float64)
    to_next = [end - start for start, end in pairwise([*starts, len(buffer)])]  # what lies between masks is 0
    values = buffer[starts[0] :] if flags else buffer[starts[0] :].double()
    return torch.segment_reduce(values, "sum", lengths=ints_on(buffer.device, to_next), unsafe=True).double()


def are_sound(buffer: Tensor, flags: bool) -> bool | Tensor:
    """Whether every entry is a usable weight: a bool on the host, else 0-dim; flags must be 0 or 1."""
    largest = 1 if flags else LARGEST
    if not buffer.numel():
        return True
    if on_host(buffer):
        array = buffer.numpy()
        sound = array.min() >= 0 and array.max() <= np.float32(largest)  # NaN is neither
        return bool(sound and (flags or not ((array < SMALLEST) & (array != 0)).any()))
    low, high = buffer.aminmax()
    in_range = (low >= 0) & (high <= largest)
    return in_range if flags else in_range & ((buffer == 0) | (buffer >= SMALLEST)).all()


def repeat(values: Tensor, counts: Ints) -> Tensor:
    """Each value as often as its count says."""
    if on_host(values):
        return torch.from_numpy(values.numpy().repeat(counts))
    return values.repeat_interleave(ints_on(values.device, counts), output_size=sum(counts))


def inverse(sizes: Tensor, number: float) -> Tensor:
    """``1 / (sizes * number)``, and something finite for 0, float32."""
    if on_host(sizes):
        inverses = [1 / max(size * number, SMALLEST) for size in sizes.tolist()]
        return torch.from_numpy(np.array(inverses, np.float32))
    return (1 / (sizes * float(number)).clamp(min=SMALLEST)).float()


def total(sums: Tensor) -> float | Tensor:
    """Of all samples: a number on the host, else 0-dim."""
    return sum(sums.tolist()) if on_host(sums) else sums.sum()


def count_active(sums: Tensor) -> int | Tensor:
    """How many are not 0: a number on the host, else 0-dim."""
    return sums.numel() - sums.tolist().count(0) if on_host(sums) else sums.count_nonzero()


def ints_on(device: torch.device, values: Ints) -> Tensor:
    """int64 on the device, which does not wait for them."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
