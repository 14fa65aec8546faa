"""What is done with loss masks where they are: in NumPy on the host, in torch on a device.

Both do the same under the same names, with arrays or tensors of their own. On the host a small NumPy operation costs a
third of torch's, and sums and repetitions are faster too; on a device nothing waits and launches do not grow with
samples. Lengths, starts and counts are plain ints, always.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.step.layouts import Ints, concatenated_ranges, starts_of

#: Beyond these the float32 weight of a token could vanish or be infinite.
SMALLEST, LARGEST = 1e-30, 1e30
#: Values a sample or a token: an array on the host, a tensor on a device.
Values = Any


def join(values: list[Tensor], starts: Ints, lengths: Ints, total_tokens: int) -> Tensor:
    """One 1-D tensor a sample -> the buffer that has them at their starts, [total_tokens], 0 elsewhere.

    On the values' device; their dtypes are promoted together.
    """
    if not values:
        return torch.zeros(total_tokens, device="cpu")
    joined = torch.cat(values)  # a copy of one too: masks may be changed later
    if joined.numel() < total_tokens:
        ends = [0, *(start + length for start, length in zip(starts, lengths, strict=True))]
        gaps = [start - end for start, end in zip([*starts, total_tokens], ends, strict=True)]
        padding = joined.new_zeros(max(gaps))
        paddings = [padding[:gap] for gap in gaps]
        joined = torch.cat([part for pair in zip(paddings, values, strict=False) for part in pair] + paddings[-1:])
    return joined.detach() if joined.requires_grad else joined


class HostMasks:
    """Masks in their buffer, [total_tokens], on the host."""

    def __init__(self, buffer: Tensor) -> None:
        # NumPy has no bfloat16, and compares float16 in float16.
        half = buffer.dtype.is_floating_point and buffer.dtype.itemsize < 4
        self._buffer = (buffer.float() if half else buffer).numpy()
        self._kind = self._buffer.dtype.kind
        self.holds_flags = self._kind != "f"

    def sums(self, starts: Ints, lengths: Ints) -> Values:
        """Of each mask, float64."""
        return self._sums(self._buffer, starts, lengths)

    def active(self, starts: Ints, lengths: Ints) -> Values:
        """Number of entries other than 0 of each mask, float64."""
        return self._sums(self._buffer != 0, starts, lengths)

    def _sums(self, buffer: Values, starts: Ints, lengths: Ints) -> Values:
        if starts and 0 not in lengths:
            return np.add.reduceat(buffer, starts, dtype=np.float64)  # what lies between masks is 0
        filled = [i for i, length in enumerate(lengths) if length]
        sums = np.zeros(len(starts))
        if filled:
            sums[filled] = np.add.reduceat(buffer, [starts[i] for i in filled], dtype=np.float64)
        return sums

    def total(self, sums: Values) -> Any:
        """Of all samples."""
        return sum(sums.tolist())  # of few, NumPy's takes four times as long

    def num_filled(self, sums: Values) -> Any:
        """How many are not 0."""
        return len(sums) - sums.tolist().count(0)

    def sound(self) -> bool:
        """Whether every entry is a usable weight; flags must be 0 or 1."""
        values = self._buffer
        if self._kind == "b" or not values.size:
            return True
        if self.holds_flags:
            return int(np.bitwise_or.reduce(values)) in (0, 1)  # a bit that any of them has, the sign's too, is seen
        low, high = np.minimum.reduce(values), np.maximum.reduce(values)
        largest = np.float32(LARGEST)  # NumPy 1 would compare in float64, NumPy 2 in float16
        return bool(low >= 0 and high <= largest and not ((values < SMALLEST) & (values != 0)).any())  # NaN is neither

    def cut(self, starts: Ints, lengths: Ints) -> Values:
        """Pieces of the buffer, one after the other, float32."""
        buffer, pieces = self._buffer, zip(starts, lengths, strict=True)
        parts = [buffer[start : start + length] for start, length in pieces] or [buffer[:0]]
        return np.concatenate(parts, dtype=np.float32, casting="unsafe")

    def repeat(self, values: Values, counts: Ints) -> Values:
        """Each value as often as its count says."""
        return values.repeat(counts)

    def grouped(self, values: Values, group: Tensor, num_groups: int) -> Values:
        """The sum of the values of each group, float64 [num_groups]."""
        return np.bincount(group.numpy(), weights=values, minlength=num_groups)

    def positions(self, starts: Ints, lengths: Ints) -> Values:
        """Where the pieces are in the buffer, int64."""
        return concatenated_ranges(starts, lengths)

    def inverse(self, sizes: Values, number: float) -> Values:
        """``1 / (sizes * number)``, and something finite for 0, float32."""
        return np.array([1 / max(size * number, SMALLEST) for size in sizes.tolist()], np.float32)

    def keep_all(self, weights: Values, flags: Values) -> Any:
        """Whether no token lost its weight to rounding."""
        return np.count_nonzero(weights) == np.count_nonzero(flags)

    def to_bytes(self) -> bytes:
        """The same for the same masks, whatever integer type holds flags."""
        values = np.packbits(self._buffer != 0) if self.holds_flags else self._buffer.astype(np.float32)
        return values.tobytes()

    def from_host(self, values: Tensor) -> Values:
        return values.numpy()

    def from_tensor(self, values: Tensor) -> Values:
        return values.float().numpy(force=True)

    def tensor(self, values: Values) -> Tensor:
        return torch.from_numpy(values)


class DeviceMasks:
    """Masks in their buffer, [total_tokens], on a device, which is never waited for."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self.holds_flags = not buffer.is_floating_point()

    def sums(self, starts: Ints, lengths: Ints) -> Values:
        return self._sums(self._buffer.float() if self.holds_flags else self._buffer.double(), starts)

    def active(self, starts: Ints, lengths: Ints) -> Values:
        return self._sums((self._buffer != 0).float(), starts)

    def _sums(self, buffer: Tensor, starts: Ints) -> Values:
        """Exact for fewer than 2**24 float32 zeros and ones a sample."""
        if not starts:
            return buffer.new_zeros(0, dtype=torch.float64)
        lengths = [end - start for start, end in pairwise([*starts, len(buffer)])]  # what lies between masks is 0
        return torch.segment_reduce(buffer[starts[0] :], "sum", lengths=self._moved(lengths), unsafe=True).double()

    def total(self, sums: Tensor) -> Any:
        return sums.sum()

    def num_filled(self, sums: Tensor) -> Any:
        return sums.count_nonzero()

    def sound(self) -> Tensor:
        values = self._buffer
        if not values.numel() or values.dtype == torch.bool:
            return torch.ones((), dtype=torch.bool, device=values.device)
        low, high = values.aminmax()
        if self.holds_flags:
            return (low >= 0) & (high <= 1)
        return (low >= 0) & (high <= LARGEST) & ((values == 0) | (values >= SMALLEST)).all()

    def cut(self, starts: Ints, lengths: Ints) -> Values:
        whole = sum(lengths) == len(self._buffer)
        return (self._buffer if whole else self._buffer[self.positions(starts, lengths)]).float()

    def repeat(self, values: Tensor, counts: Ints) -> Values:
        return values.repeat_interleave(self._moved(counts), output_size=sum(counts))

    def grouped(self, values: Tensor, group: Tensor, num_groups: int) -> Values:
        return values.new_zeros(num_groups).index_add_(0, self.from_host(group), values)

    def positions(self, starts: Ints, lengths: Ints) -> Values:
        shifts = self._moved([start - held for start, held in zip(starts, starts_of(lengths), strict=True)])
        return torch.arange(sum(lengths), device=shifts.device) + self.repeat(shifts, lengths)

    def inverse(self, sizes: Tensor, number: float) -> Values:
        return (1 / (sizes * float(number)).clamp(min=SMALLEST)).float()

    def keep_all(self, weights: Tensor, flags: Tensor) -> Any:
        return ((weights == 0) == (flags == 0)).all()

    def to_bytes(self) -> bytes:
        values = (self._buffer != 0).cpu() if self.holds_flags else self._buffer.float().cpu()
        return HostMasks(values).to_bytes()

    def from_host(self, values: Tensor) -> Values:
        return values.to(self._buffer.device, non_blocking=True)

    def from_tensor(self, values: Tensor) -> Values:
        return values.detach().float().to(self._buffer.device, non_blocking=True)

    def tensor(self, values: Tensor) -> Tensor:
        return values

    def _moved(self, values: Ints) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self._buffer.device, non_blocking=True)
