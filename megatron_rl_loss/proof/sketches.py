"""Sketches of gradients: a few numbers of each, which add up over micro-batches, ranks and shards.

The sketch of a tensor G is <G, r> for a few fixed patterns r of signs, and |G|^2. A pattern's sign of an entry is the
product of one sign for each of the entry's indices, so a shard along any dimension, and a slice of the entries in
order, have their parts of the sum. Products with signs are exact, and sums are float64: a sketch is that of the
gradient's very numbers. It reads a gradient once and keeps nothing of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.transfers import to_device

#: Entries that are cast to float64 at a time, on a device so many that it is not kept waiting for launches; and the
#: entries of a gradient that waits for others of its shape.
_CHUNK, _DEVICE_CHUNK, _SMALL = 2**20, 2**24, 2**14
#: Numbers of patterns: at least 2, and so many that a model of few parameters has this many numbers in all.
_FEWEST, _NUMBERS = 2, 64


def num_patterns(num_parameters: int) -> int:
    """How many patterns are taken for a model: fewer parameters need more, since all parameters have one factor."""
    return max(_FEWEST, -(-_NUMBERS // max(1, num_parameters)))


class Signs:
    """The patterns, by dimension; the same on all ranks.

    Args:
        patterns: the number of patterns.
    """

    def __init__(self, patterns: int) -> None:
        self.patterns = patterns
        self._dimension_signs: dict[tuple[int, int, torch.device], Tensor] = {}
        self._shape_signs: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def dimension_signs(self, number: int, size: int, device: torch.device) -> Tensor:
        """float64 [patterns, size]: the signs of the indices of a dimension."""
        key = number, size, device
        if key not in self._dimension_signs:
            generator = torch.Generator().manual_seed(20 + number)
            drawn = torch.randint(2, (self.patterns, size), generator=generator, dtype=torch.int8)
            self._dimension_signs[key] = to_device((2 * drawn - 1).double(), device)
        return self._dimension_signs[key]

    def block_signs(
        self, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device
    ) -> Tensor:
        """float64 [patterns, product of sizes]: the signs of a block of a tensor of that shape, in order."""
        signs = torch.ones(self.patterns, 1, dtype=torch.float64, device=device)
        for number, (whole, begin, size) in enumerate(zip(shape, offsets, sizes, strict=True)):
            own = self.dimension_signs(number, whole, device)[:, begin : begin + size]
            signs = (signs[:, :, None] * own[:, None, :]).flatten(1)
        return signs

    def shape_signs(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """`block_signs` of a whole small tensor, kept."""
        shape = shape or (1,)  # of a number
        if (shape, device) not in self._shape_signs:
            self._shape_signs[shape, device] = self.block_signs(shape, [0] * len(shape), shape, device)
        return self._shape_signs[shape, device]

    @torch.no_grad()
    def sketch(self, block: Tensor, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None) -> Tensor:
        """float64 [patterns + 1]: of a block of a tensor of that shape; by default, of the whole tensor."""
        shape, offsets = shape or block.shape, offsets or [0] * block.dim()
        if not block.dim():
            return self.sketch(block[None])
        if not block.numel():  # a shard may be empty
            return torch.zeros(self.patterns + 1, dtype=torch.float64, device=block.device)
        leading = self.block_signs(shape[:-1], offsets[:-1], block.shape[:-1], block.device)
        last = self.dimension_signs(len(shape) - 1, shape[-1], block.device)
        return _sketched_rows(
            block.reshape(-1, block.shape[-1]), leading, last[:, offsets[-1] : offsets[-1] + block.shape[-1]]
        )

    @torch.no_grad()
    def sketch_slice(self, values: Tensor, shape: Sequence[int], first: int) -> Tensor:
        """float64 [patterns + 1]: of the entries of a tensor of that shape from the first one on, in their order."""
        shape = [*shape] or [1]
        leading = self.block_signs(shape[:-1], [0] * (len(shape) - 1), shape[:-1], values.device)
        last, width = self.dimension_signs(len(shape) - 1, shape[-1], values.device), shape[-1]
        total = values.new_zeros(self.patterns + 1, dtype=torch.float64)
        at, end = first, first + len(values)
        while at < end:  # a part of a row, whole rows, a part of a row
            row, column = divmod(at, width)
            rows = 1 if column else max(1, (end - at) // width)
            stop = min(end, at - column + rows * width)
            part = values[at - first : stop - first].view(rows, -1)
            total += _sketched_rows(part, leading[:, row : row + rows], last[:, column : column + part.shape[1]])
            at = stop
        return total


def _sketched_rows(rows: Tensor, leading: Tensor, last: Tensor) -> Tensor:
    """The sketch of rows, whose signs are `leading` [patterns, rows] times `last` [patterns, width]."""
    total = torch.zeros(len(last) + 1, dtype=torch.float64, device=rows.device)
    step = max(1, (_CHUNK if rows.is_cpu else _DEVICE_CHUNK) // max(1, rows.shape[1]))
    for begin in range(0, len(rows) if rows.numel() else 0, step):
        part = rows[begin : begin + step].double()
        total[:-1] += ((part @ last.T) * leading[:, begin : begin + step].T).sum(0)
        total[-1] += torch.linalg.vector_norm(part) ** 2
    return total


@dataclass
class Backward:
    """Sums over backward passes of the sketches of what each parameter's hook was given.

    Small gradients wait until there are many, which are then sketched together: a step has hundreds of parameters
    times dozens of micro-batches, and a launch on a device for each would take longer than their sums.

    Attributes:
        table: float64 [parameters, patterns + 1], on the device.
        num_terms: of each parameter, how many gradients came.
        changed: parameters whose gradient somebody changed in place after it was seen.
    """

    signs: Signs
    table: Tensor
    num_terms: list[int]
    changed: set[int] = field(default_factory=set)
    _seen: dict[int, Any] = field(default_factory=dict)  # of parameters whose gradient is not taken yet
    _waiting: list[tuple[int, Tensor, int]] = field(default_factory=list)
    _held: int = 0  # bytes of the storages of those that wait

    @classmethod
    def of(cls, signs: Signs, num_parameters: int, device: torch.device) -> "Backward":
        table = torch.zeros(num_parameters, signs.patterns + 1, dtype=torch.float64, device=device)
        return cls(signs, table, [0] * num_parameters)

    def see(self, number: int, gradient: Tensor, leaf: Any = None) -> None:
        """Look at a gradient of the parameter of that number, which `take` then adds.

        Args:
            leaf: the tensor of whose hooks this is the first; another of them may change the gradient in place.
        """
        # A small one is held itself: autograd then copies it, instead of adding the next gradient into it.
        is_large = gradient.numel() > _SMALL or gradient.untyped_storage().nbytes() > _CHUNK
        is_now = is_large or len(getattr(leaf, "_backward_hooks", None) or ()) > 1
        self._seen[number] = self.signs.sketch(gradient) if is_now else (gradient, gradient._version)

    def take(self, number: int) -> None:
        """Add the gradient of the parameter that was seen last."""
        seen = self._seen.pop(number, None)
        if seen is None:
            return
        self.num_terms[number] += 1
        if isinstance(seen, Tensor):
            self.table[number] += to_device(seen, self.table.device)
            return
        self._waiting.append((number, *seen))
        self._held += seen[0].untyped_storage().nbytes()
        if self._held > 16 * _CHUNK:
            self.flush()

    def see_sketch(self, number: int, sketch: Tensor) -> None:
        """As `see`, of a gradient of which this rank has a part, sketched by the caller."""
        self._seen[number] = sketch

    @torch.no_grad()
    def flush(self) -> None:
        """Add up all that wait."""
        waiting, self._waiting, self._held = self._waiting, [], 0
        self.changed |= {number for number, gradient, version in waiting if gradient._version != version}
        alike: dict[Any, list[tuple[int, Tensor]]] = {}
        for number, gradient, _ in waiting:
            alike.setdefault((gradient.dtype, gradient.device, tuple(gradient.shape)), []).append((number, gradient))
        for (_, device, shape), gradients in alike.items():
            rows = torch.stack([gradient.reshape(-1) for _, gradient in gradients]).double()
            norms2 = torch.linalg.vector_norm(rows, dim=1, keepdim=True) ** 2
            sums = torch.cat([rows @ self.signs.shape_signs(shape, device).T, norms2], 1)
            numbers = to_device(torch.tensor([number for number, _ in gradients]), self.table.device)
            self.table.index_add_(0, numbers, to_device(sums, self.table.device))
