"""Each compiled program of the kernels beside plain torch, before its first launch in a process.

Triton compiles a program of its own for each kind of call: with a mask, kept ids, padding or entropy, for another
number of labels, for rows that do not begin at multiples of 16 bytes. A compiler may be wrong in one of them, on a
device that no test ran on. So the kernel first runs on a few rows of the call, with the strides and the alignment of
the whole, and the host waits for the difference: once for each program.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.errors import only_if

#: What float32 may differ by, relative to the sums that are compared.
DIFFERENCE = 1e-4
#: Rows that count and, where a mask leaves some out, rows of these.
COUNTED, LEFT_OUT = 6, 2
#: Bytes between the rows of a copy: beyond it one row is compared.
_FAR = 2**24

#: What tells programs apart, as `program_of` gives it.
Program = tuple[Any, ...]

#: Programs that were compared in this process, and whether they agreed.
compared: dict[Program, bool] = {}


#: Tensors whose rows' length and stride a program knows; of gradients of log-probs it knows the step in a row.
_KNOWN_ROWS = ("logits", "into", "keep", "labels")


def program_of(step: str, arguments: Mapping[str, Any]) -> Program:
    """What Triton compiles anew for: types, alignment, numbers that are 1 or that 16 divides; sometimes a bit more."""
    return step, *((name, _facts(value, name)) for name, value in sorted(arguments.items()))


def _facts(value: Any, name: str = "") -> Any:
    if isinstance(value, Tensor):
        sizes = [value.shape[-1], value.stride(0)] if name in _KNOWN_ROWS else only_if(name == "g", [value.stride(-1)])
        return value.device, value.dtype, value.data_ptr() % 16 == 0, *map(_facts, sizes)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if value <= 128 and value & (value - 1) == 0 else value % 16 == 0, value >= 2**31
    return tuple(map(_facts, value)) if isinstance(value, tuple) else type(value)


def in_words(program: Program) -> str:
    """The step, the dtype, and the arguments that are not left out."""
    step, *arguments = program
    by_name: dict[str, Any] = dict(arguments)
    of: Any = by_name.get("logits", by_name.get("tables"))
    said = [name for name in ("mask", "keep", "kept", "entropy", "h", "check_first_row") if by_name.get(name)]
    return f"the kernel of {step} ({', '.join([str(of[1]).removeprefix('torch.'), *said])})"


def few_of(mask: Tensor | None, like: Tensor) -> Tensor:
    """Places of the rows that are compared, each once, on the device; the host waits for nothing."""
    most = COUNTED + LEFT_OUT if like.stride(0) * like.element_size() <= _FAR else 1
    if mask is None:
        return torch.arange(min(len(like), most), device=like.device)
    counted_first = (mask != 0).to(torch.uint8).argsort(descending=True, stable=True)
    return torch.cat([counted_first[:COUNTED], counted_first[max(COUNTED, len(like) - LEFT_OUT) :]])[:most]


def rows_of(values: Tensor, at: Tensor, fill: float | None = None) -> Tensor:
    """A copy of rows, at the strides and with the alignment of the whole, so that Triton runs the same program.

    With `fill` all entries are that number.
    """
    rows, strides = (len(at), *values.shape[1:]), values.stride()
    size = 1 + sum((number - 1) * stride for number, stride in zip(rows, strides, strict=True) if number)
    begin = values.data_ptr() % 16 // values.element_size()
    if fill is not None:
        return values.new_full((begin + size,), fill)[begin:].as_strided(rows, strides)
    if strides[0] == 0:
        return values[: len(at)]
    return values.new_empty(begin + size)[begin:].as_strided(rows, strides).copy_(values[at])


def excess(
    values: Tensor,
    right: Tensor,
    eps: float = 0,
    floor: float = 0,
    terms: Tensor | None = None,
    row_floor: float = 0,
) -> Tensor:
    """How far rows differ, by their sums and by their largest entries, as a part of what they may.

    `floor` and the size of `terms`, whose sum an entry is, are added to the size of each entry, and `row_floor` to that
    of each row. NaN differs from a number, and not from NaN.
    """
    is_same = (values == right) | (values.isnan() & right.isnan())
    off = (values.double() - right.double()).abs().masked_fill(is_same, 0)
    size = right.double().abs().masked_fill(is_same & ~right.isfinite(), 0) + floor
    if terms is not None:
        size += terms.double().abs()
    parts = [off.sum(-1) / (size.sum(-1) + row_floor), off.amax(-1) / (size.amax(-1) + row_floor)]
    worst = torch.stack([part.masked_fill((off == 0).all(-1), 0).amax() for part in parts]).amax()
    return worst.nan_to_num(math.inf, math.inf) / (DIFFERENCE + 2 * eps)
