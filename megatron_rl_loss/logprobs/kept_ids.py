"""Which ids of the vocabulary count for each token: those that sampling kept."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptIds:
    """The ids of the vocabulary that sampling kept for each token (top-p, top-k), as a rollout engine records them.

    Attributes:
        ids: int64 [all kept], those of the first token, then of the second, and so on.
        offsets: int64 [tokens + 1]; token t has ``ids[offsets[t]:offsets[t + 1]]``.
    """

    ids: Tensor
    offsets: Tensor

    def mask(self, tokens: Tensor, first: int, last: int) -> Tensor:
        """bool [len(tokens), last - first]: which of the ids first to last are kept."""
        counts = self.offsets[tokens + 1] - self.offsets[tokens]
        row = torch.repeat_interleave(torch.arange(len(tokens), device=counts.device), counts)
        before = counts.cumsum(0) - counts
        columns = self.ids[self.offsets[tokens][row] + torch.arange(len(row), device=row.device) - before[row]] - first
        here = (columns >= 0) & (columns < last - first)
        kept = torch.zeros(len(tokens), last - first, dtype=torch.bool, device=columns.device)
        kept[row[here], columns[here]] = True
        return kept


#: Which ids count: bool [tokens..., vocabulary / TP] or [vocabulary / TP], or `KeptIds`. A label always does.
Keep = Tensor | KeptIds


def check_keep(keep: Keep | None, shape: torch.Size, columns: int) -> Keep | None:
    """A mask becomes bool [tokens, columns], or [1, columns] for all."""
    if isinstance(keep, KeptIds):
        if keep.offsets.shape != (shape.numel() + 1,):
            raise ValueError(
                f"KeptIds with offsets of shape {tuple(keep.offsets.shape)} for {shape.numel()} tokens: there must be "
                "one offset more than tokens. Give tokens that keep nothing an empty range."
            )
        return keep
    if keep is None:
        return None
    if keep.dtype != torch.bool or tuple(keep.shape) not in ((*shape, columns), (columns,)):
        raise ValueError(
            f"a keep-mask of {keep.dtype}, shape {tuple(keep.shape)}: it must be bool, {(*shape, columns)} or "
            f"[{columns}]. Cut it over the vocabulary as the logits are, or pass KeptIds."
        )
    return keep.reshape(-1, columns)
