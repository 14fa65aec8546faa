"""Ids of the vocabulary that count for each token: those that sampling kept."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.errors import require
from megatron_rl_loss.core.masks import Array, on_device
from megatron_rl_loss.logprobs.flags import KEPT_RULE


@dataclass(frozen=True)
class KeptIds:
    """The ids of the vocabulary that sampling kept for each token (top-p, top-k), as a rollout engine records them.

    Attributes:
        ids: ints [all kept], the first token's ids, then the second's, and so on; on the host or the device of the
            logits.
        offsets: ints [tokens + 1], on the host; token t has ``ids[offsets[t]:offsets[t + 1]]``. Offsets on a device
            are read when this is made.

    Raises TypeError for ids or offsets that are no ints in a row, and ValueError for offsets that decrease or do not go
    from 0 to the number of ids.
    """

    ids: Tensor
    offsets: Tensor | Array

    def __post_init__(self) -> None:
        offsets = self.offsets.numpy(force=True) if isinstance(self.offsets, Tensor) else np.asarray(self.offsets)
        object.__setattr__(self, "offsets", offsets)
        ids, are_ids = self.ids, False
        if isinstance(ids, Tensor):
            are_ids = ids.ndim == 1 and ids.dtype != torch.bool and not ids.is_floating_point()
        if not are_ids or offsets.ndim != 1 or (offsets.size and offsets.dtype.kind not in "iu"):
            given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            shape = f" {offsets.shape}" * (offsets.ndim != 1)
            raise TypeError(
                f"KeptIds with ids of {given} and offsets of {offsets.dtype}{shape}: ids must be a tensor of "
                "ints [all kept], offsets ints [tokens + 1]. Pass ids.flatten().long(), and cumulative counts."
            )
        steps = np.diff(np.concatenate([[0], offsets, [len(self.ids)]]))
        if (steps < 0).any() or (offsets.size and (steps[0] or steps[-1])):
            raise ValueError(
                f"KeptIds with offsets {offsets.tolist()[:8]} for {len(self.ids)} ids: they must never decrease, from "
                "0 to the number of ids. Pass the cumulative counts of ids, a leading 0 included."
            )

    def check_in_range(self, size: int) -> None:
        """Raise ValueError for an id beyond a vocabulary of that size; of ids on a device as `require`."""
        if not self.ids.numel() or torch.compiler.is_compiling():
            return
        ids: Any = self.ids.numpy(force=True) if self.ids.is_cpu else self.ids
        low, high = ids.min(), ids.max()
        require(
            (low >= 0) & (high < size),
            lambda: f"KeptIds with ids from {int(low)} to {int(high)} in a vocabulary of {size}",
            KEPT_RULE,
        )

    def bounds(self, tokens: npt.NDArray[np.intp] | slice) -> npt.NDArray[np.int64]:
        """The first entry of `ids` of each of these tokens, and the entry after the last: int64 [2, tokens]."""
        offsets = np.asarray(self.offsets, np.int64)
        return np.stack([offsets[:-1][tokens], offsets[1:][tokens]])

    def mask(self, tokens: npt.NDArray[np.intp], first: int, last: int, device: torch.device) -> Tensor:
        """bool [len(tokens), last - first]: True for those of the ids first to last that are kept."""
        begins, ends = self.bounds(tokens)
        counts = ends - begins
        rows = np.repeat(np.arange(len(tokens)), counts)
        places = np.arange(len(rows)) + (begins - (counts.cumsum() - counts))[rows]
        ids = self.ids[on_device(places, self.ids.device)]
        column = ids.to(device, non_blocking=ids.is_cpu).long() - first
        width = last - first
        column = column.where((column >= 0) & (column < width), width)  # ids of other ranks have a column of their own
        # Rows begin at multiples of 16 bytes, which a kernel reads at a time.
        kept = torch.zeros(len(tokens), -(-(width + 1) // 16) * 16, dtype=torch.bool, device=device)
        kept[on_device(rows, device), column] = True
        return kept[:, :width]


#: Ids that count: bool [tokens..., vocabulary / TP] or [vocabulary / TP], or `KeptIds`. A label always does.
Keep = Tensor | KeptIds


def check_keep(keep: Keep | None, shape: torch.Size, columns: int, size: int, *, by_kernels: bool) -> Keep | None:
    """A mask becomes bool [tokens, columns], or [1, columns] for all; `size` is that of the vocabulary.

    Ids on a device are left to `by_kernels`, which flag a wrong one.
    """
    if isinstance(keep, KeptIds):
        if keep.ids.is_cpu or not by_kernels:
            keep.check_in_range(size)
        if keep.offsets.shape != (shape.numel() + 1,):
            raise ValueError(
                f"KeptIds with offsets of shape {tuple(keep.offsets.shape)} for {shape.numel()} tokens: there must be "
                "one offset more than tokens. Give a token that keeps no id an empty range."
            )
        return keep
    if keep is None:
        return None
    if not isinstance(keep, Tensor):
        raise TypeError(f"keep is a {type(keep).__name__}: it must be a mask of bools or KeptIds. Pass either.")
    if keep.dtype != torch.bool or tuple(keep.shape) not in ((*shape, columns), (columns,)):
        raise ValueError(
            f"a keep-mask of {keep.dtype}, shape {tuple(keep.shape)}: it must be bool, {(*shape, columns)} or "
            f"[{columns}]. Cut it over the vocabulary as the logits are, or pass KeptIds."
        )
    return keep.reshape(-1, columns)
