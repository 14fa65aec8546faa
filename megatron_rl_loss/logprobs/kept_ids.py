"""Ids of the vocabulary that count for each token: those that sampling kept."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.errors import only_if, require
from megatron_rl_loss.core.masks import Array
from megatron_rl_loss.core.transfers import on_device, to_device
from megatron_rl_loss.logprobs.flags import KEPT_RULE

#: Stands for an id that the token has named before.
NO_ID = -(2**31)


class Kept(NamedTuple):
    """What kernels read: of token t the ids from bounds[0, t] to bounds[1, t] of `ids`, each once, or `NO_ID`."""

    ids: Tensor
    bounds: Tensor


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
        # A copy: backward reads them too.
        offsets = np.array(self.offsets.numpy(force=True) if isinstance(self.offsets, Tensor) else self.offsets)
        object.__setattr__(self, "offsets", offsets)
        ids, are_ids = self.ids, False
        if isinstance(ids, Tensor):
            are_ids = ids.ndim == 1 and ids.dtype != torch.bool and not ids.is_floating_point()
        if not are_ids or offsets.ndim != 1 or (offsets.size and offsets.dtype.kind not in "iu"):
            shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            shape = only_if(offsets.ndim != 1, f" {offsets.shape}")
            raise TypeError(
                f"KeptIds with ids of {shown} and offsets of {offsets.dtype}{shape}: ids must be a tensor of "
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

    def for_kernels(self, tokens: npt.NDArray[np.intp] | slice, size: int, device: torch.device) -> Kept:
        """The ids of these tokens on a device, where an id that a token names twice counts once."""
        ids = to_device(self.ids, device)
        ids = ids if ids.dtype in (torch.int32, torch.int64) else ids.to(torch.int32)
        if not self._are_ascending():
            counts = on_device(np.diff(np.asarray(self.offsets, np.int64)), device)
            row = torch.repeat_interleave(torch.arange(len(counts), device=device), counts, output_size=len(ids))
            key, order = (row * (size + 2) + 1 + ids.clamp(-1, size)).sort()
            ids = ids[order]  # a copy, to which no other has written
            ids[1:].masked_fill_(key[1:] == key[:-1], NO_ID)
        return Kept(ids.contiguous(), on_device(self.bounds(tokens), device))

    def _are_ascending(self) -> bool:
        """True where the host knows that each token's ids ascend, so that none is named twice."""
        if not self.ids.is_cpu or torch.compiler.is_compiling():
            return not len(self.ids)
        ids: Any = self.ids.numpy(force=True)
        is_higher, firsts = ids[1:] > ids[:-1], np.asarray(self.offsets[1:-1])
        is_higher[firsts[(firsts > 0) & (firsts < len(ids))] - 1] = True
        return bool(is_higher.all())

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
        column = to_device(self.ids[on_device(places, self.ids.device)], device).long() - first
        width = last - first
        column = column.where((column >= 0) & (column < width), width)  # ids of other ranks have a column of their own
        # Rows begin at multiples of 16 bytes, which a kernel reads at a time.
        kept = torch.zeros(len(tokens), -(-(width + 1) // 16) * 16, dtype=torch.bool, device=device)
        kept[on_device(rows, device), column] = True
        return kept[:, :width]


def kept_mask(kept: Kept, first: int, width: int) -> Tensor:
    """bool [tokens, width]: True for the ids that count from `first` on, made on their device; for a few tokens."""
    place = torch.arange(len(kept.ids), device=kept.ids.device)
    column = kept.ids.long() - first
    is_here = (column >= 0) & (column < width)
    is_kept = (place >= kept.bounds[0, :, None]) & (place < kept.bounds[1, :, None]) & is_here
    columns = column.clamp(0, max(width - 1, 0)).expand(len(is_kept), -1)
    counts = torch.zeros(len(is_kept), width, dtype=torch.int32, device=kept.ids.device)
    return counts.scatter_add_(1, columns, is_kept.int()) > 0


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
