"""Who sees whom among a tree's slots, and attention by it: for FlexAttention, for torch's own, and by runs.

Slot k is visible to slot q if and only if ``k <= q < ends[k]``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl_loss.core.masks import Array
from megatron_rl_loss.core.transfers import on_device
from megatron_rl_loss.trees.building import Ints

#: (batch, head, query slot, key slot) -> bool, as FlexAttention takes it.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: [begin, end) of a run of slots without a branch, and the number of the run that it follows, -1 for none.
Run = tuple[int, int, int]

#: Queries of a run that are worked on at a time: their mask is [queries, keys].
QUERIES = 1024


def visible(ends: Ints, device: torch.device | str | None) -> Tensor:
    """bool [num_slots, num_slots], True where the row's slot sees the column's."""
    slots, until = torch.arange(len(ends), device=device), on_device(ends, device)
    return (slots <= slots[:, None]) & (slots[:, None] < until)


def mask_mod(ends: Ints, device: torch.device | str | None) -> MaskMod:
    until = on_device(ends, device)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until[key])

    return is_visible


def block_mask(ends: Ints, device: torch.device | str | None, block_size: int) -> Any:
    """FlexAttention's `BlockMask`, from the least and the largest end of each block of keys.

    A block of keys before a block of queries is seen at all where its largest end lies beyond the first query, and
    wholly where its least end lies beyond the last one. A block sees itself in part.
    """
    from torch.nn.attention.flex_attention import BlockMask

    number = -(-len(ends) // block_size)
    padded = np.concatenate([ends, np.zeros(number * block_size - len(ends), np.int64)]).reshape(number, block_size)
    most = padded.max(1, initial=0)
    least = np.where(np.arange(1, number + 1) * block_size > len(ends), 0, padded.min(1, initial=len(ends)))
    first = np.arange(number) * block_size
    is_before = np.arange(number) < np.arange(number)[:, None]
    is_full = is_before & (least >= first[:, None] + block_size)
    is_partial = is_before & (most > first[:, None]) & ~is_full | np.eye(number, dtype=bool)
    return BlockMask.from_kv_blocks(
        *_ordered(is_partial, device),
        *_ordered(is_full, device),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod(ends, device),
        seq_lengths=(len(ends), len(ends)),
    )


def _ordered(blocks: Array, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Of each block of queries the number of its blocks of keys, and these, the others behind them."""
    indices = (~blocks).argsort(1, kind="stable").astype(np.int32)
    counts = blocks.sum(1, dtype=np.int32)
    return on_device(counts[None, None], device), on_device(indices[None, None], device)


def attend_by_runs(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Run], scale: float | None = None) -> Tensor:
    """Attention of each run to its path alone: the runs before it, whole, and itself, causally.

    Args:
        q, k, v: [batch, heads, num_slots, size]; k and v may have fewer heads, each for a group of those of q.
        runs: of the tree; slots behind the last one are padding, which sees itself alone.
        scale: of the products, by default ``1 / sqrt(size)``.

    Returns:
        [batch, heads, num_slots, size of v].
    """
    attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    parts = list[Tensor]()
    for number, (begin, end, _) in enumerate(runs):
        pieces = _path(runs, number)
        keys, values = (_joined(x, pieces) for x in (k, v))
        before = keys.shape[2] - (end - begin)
        if not before:
            queries = q[:, :, begin:end]
            parts.append(attend(queries, keys, values, is_causal=True))
            continue
        for first in range(begin, end, QUERIES):
            queries = q[:, :, first : min(first + QUERIES, end)]
            seen = before + first - begin + queries.shape[2]
            mask = torch.ones(queries.shape[2], seen, dtype=torch.bool, device=q.device).tril(seen - queries.shape[2])
            parts.append(attend(queries, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask))
    padding = v[:, :, runs[-1][1] if runs else 0 :]
    parts.append(padding.repeat_interleave(q.shape[1] // v.shape[1], 1))
    return torch.cat(parts, 2)


def _path(runs: Sequence[Run], number: int) -> list[tuple[int, int]]:
    """[begin, end) of the slots that a run sees, in order; pieces that lie side by side are one."""
    pieces = list[tuple[int, int]]()
    while number >= 0:
        begin, end, before = runs[number]
        pieces[-1:] = [(begin, pieces[-1][1])] if pieces and end == pieces[-1][0] else [*pieces[-1:], (begin, end)]
        number = before
    return pieces[::-1]


def _joined(x: Tensor, pieces: Sequence[tuple[int, int]]) -> Tensor:
    parts = [x[:, :, begin:end] for begin, end in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
