"""`PrefixTree`: samples that share prefixes, each prefix computed once, as a layout.

The layout's buffer holds each sample's own tokens, one sample after the other: masks, ids, advantages and losses are
per sample, and the weights are those of samples that share nothing. The model sees slots: a token that several samples
have in common, with the same tokens before it, is one slot. An edge is a slot with a parent, whose logits predict its
token. The log-prob of an edge is read by every sample that runs through it, and autograd adds up what they ask of it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megatron_rl_loss.core.errors import check_bool, check_int
from megatron_rl_loss.core.layouts import Layout, Pieces, check_cp
from megatron_rl_loss.core.masks import Array
from megatron_rl_loss.core.notebook import SHOWN_ROWS, first_numbers, html_table
from megatron_rl_loss.core.samples import LocalTokens, Samples
from megatron_rl_loss.core.transfers import on_device
from megatron_rl_loss.trees import attention
from megatron_rl_loss.trees.building import Ints, JoinedRows, Row, build_slots
from megatron_rl_loss.trees.edges import Edges
from megatron_rl_loss.trees.models import check_serves_trees, rotary_by_depth
from megatron_rl_loss.trees.packs import pack_rows


def _chunks(model: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    chunks = [model] if isinstance(model, nn.Module) else model
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise TypeError(f"a model of type {type(model).__name__}: it must be a module or a list of them. Pass yours.")
    return chunks


class PrefixTree(Layout):
    """Samples whose common prefixes are computed once: the model runs on slots, masks and losses stay per sample.

    Slots stand in the order of a walk through the tree, depth first, so that slot k is visible to slot q if and only
    if ``k <= q < ends[k]``. A sample's mask is as long as its row, and 0 at its last token, which predicts nothing.
    Losses: ``[num_local_tokens]`` or ``[1, num_local_tokens]``, in the order of the samples; under context parallelism
    (CP) those of the tokens at whose slots a rank computes logits.

    >>> tree = PrefixTree([[5, 6, 7], [5, 6, 8, 9]])
    >>> tree.tokens.tolist(), tree.depths.tolist(), tree.parents.tolist(), tree.ends.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3], [-1, 0, 1, 1, 3], [5, 5, 3, 5, 5])

    Args:
        rows: token ids of each sample, prompt and response, without padding: 1-D tensors, arrays or lists of ints.
        multiple: the number of slots is padded to a multiple of it, such as TP with sequence parallelism, 2 * cp_size,
            or 128 for FlexAttention on a GPU.
        zigzag: CP ranks hold chunk r and chunk 2 * cp_size - 1 - r of the slots; else one of cp_size equal pieces.
        cp_attention: the statement that your attention under context parallelism sees slots by `ends`. Megatron's and
            Transformer Engine's do not, so that a cut over several ranks is refused without it.

    Attributes:
        num_slots: with padding, which sees itself alone.
        tokens, depths, parents, ends: of each slot, int64 [num_slots]: its token, its place in every sample through it
            (for position ids), the slot before it (-1 for none), and the first slot that does not lie behind it.
        slots: the slot of each token of each sample, samples end to end, int64 [total_tokens].
        lengths: the number of tokens of each sample.

    Raises:
        TypeError: rows that are not ints in one dimension each.
        ValueError: a negative id, an empty row; of masks: another length, or an entry at a sample's last token; of a
            cut: CP ranks that the slots do not divide into, or without `cp_attention`.
    """

    cut = "tree"

    def __init__(
        self, rows: Sequence[Row], *, multiple: int = 1, zigzag: bool = True, cp_attention: bool = False
    ) -> None:
        check_int("multiple", multiple, 1, "Pass what the number of slots must be a multiple of")
        check_bool("zigzag", zigzag)
        check_bool("cp_attention", cp_attention)
        joined = JoinedRows.of(rows)
        self.lengths = self.total_lengths = joined.lengths
        self.zigzag, self.cp_attention = zigzag, cp_attention
        self._bounds = joined.bounds
        table = build_slots(joined, multiple)
        self.tokens, self.depths, self.parents, self.ends, self.slots = table
        self.num_slots = len(self.tokens)

    @staticmethod
    def pack(rows: Sequence[Row], max_slots: int, *, dp_size: int = 1, multiple: int = 1) -> list[list[list[int]]]:
        """Deal rows out into trees of at most that many slots, for each data-parallel rank: ``[rank][micro-batch]``.

        Each entry lists the numbers of the rows of one tree: ``PrefixTree([rows[i] for i in numbers])``. Rows go, in
        the order of their prefixes, to the tree where they share most, among those where they fit; ranks get equal
        numbers of trees, and about equal numbers of slots. A rank may get an empty list, of no row.

        Args:
            max_slots: of a tree, its padding to a `multiple` included.

        Raises ValueError for a row that is longer, and what `PrefixTree` raises for rows.
        """
        check_int("max_slots", max_slots, 1, "Pass the most slots that a micro-batch may have")
        check_int("dp_size", dp_size, 1, "Pass the number of data-parallel ranks")
        check_int("multiple", multiple, 1, "Pass the multiple that trees are padded to")
        return pack_rows(JoinedRows.of(rows), max_slots - max_slots % multiple, dp_size)

    # --- what the library asks of a layout

    @property
    def total_tokens(self) -> int:
        return len(self.slots)

    def mask_starts(self, mask_lengths: list[int]) -> list[int]:
        if mask_lengths != self.lengths:
            unequal = [
                f"sample {i} has {length} entries for {expected} tokens"
                for i, (length, expected) in enumerate(zip(mask_lengths, self.lengths, strict=False))
                if length != expected
            ]
            shown = (unequal or [f"{len(mask_lengths)} masks for {len(self.lengths)} rows"])[0]
            raise ValueError(
                f"masks of a PrefixTree, of which {shown}: each must have an entry per token of its row, in order. "
                "Append a 0 for the last token to masks of labels."
            )
        return self._bounds[:-1]

    def check_masks(self, buffer: Array) -> None:
        last = np.array(self._bounds[1:], np.int64) - 1
        for number in np.flatnonzero(buffer[last])[:1].tolist():
            raise ValueError(
                f"the loss mask of sample {number} has {float(buffer[last[number]]):g} at its last token: the mask "
                "belongs to the labels, and the last token predicts none. Shift the mask by one: it ends with 0."
            )

    def pieces(self, cp_rank: int, cp_size: int) -> Pieces:
        check_cp(cp_rank, cp_size)
        if cp_size == 1:
            return [(0, self.total_tokens)]
        held = np.concatenate([[False], self.held(cp_rank, cp_size)[self.slots], [False]])
        edges = np.flatnonzero(held[1:] != held[:-1])
        return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]

    def model_tokens(self, cp_rank: int, cp_size: int) -> Array:
        return self.tokens[self.local_slots(cp_rank, cp_size)]

    def describe(self) -> str:
        return f"PrefixTree {self.zigzag} {self._digest}"

    @cached_property
    def _digest(self) -> str:
        digest = blake2b(digest_size=8)
        for values in (self.tokens, self.ends, self.slots):
            digest.update(values.tobytes())
        return digest.hexdigest()

    # --- what a model and a loss function take of it

    def held(self, cp_rank: int, cp_size: int) -> npt.NDArray[np.bool_]:
        """True for each slot that the rank holds, [num_slots]."""
        check_cp(cp_rank, cp_size)
        if cp_size == 1:
            return np.ones(self.num_slots, bool)
        if not self.cp_attention:
            raise ValueError(
                f"a PrefixTree cut over {cp_size} context-parallel ranks: their attention must exchange keys and "
                "values by the tree, which Megatron's and Transformer Engine's does not. Leave context parallelism "
                "out, or state that yours does: PrefixTree(..., cp_attention=True)."
            )
        chunks = (2 if self.zigzag else 1) * cp_size
        if self.num_slots % chunks:
            raise ValueError(
                f"a PrefixTree of {self.num_slots} slots for {cp_size} context-parallel ranks: it must be a multiple "
                f"of {chunks}. Pass PrefixTree(..., multiple={chunks})."
            )
        chunk = np.arange(self.num_slots) // (self.num_slots // chunks)
        return (chunk == cp_rank) | (chunk == chunks - 1 - cp_rank) if self.zigzag else chunk == cp_rank

    def local_slots(self, cp_rank: int = 0, cp_size: int = 1) -> Ints:
        """The slots that the rank holds, in order, int64 [num_local_slots]."""
        return np.flatnonzero(self.held(cp_rank, cp_size))

    def inputs(
        self, device: torch.device | str | None = None, *, cp_rank: int = 0, cp_size: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Input ids and position ids of the rank's model, int64 [1, num_local_slots]: the tokens and their depths."""
        local = self.local_slots(cp_rank, cp_size)
        tokens, depths = (on_device(values[local][None], device) for values in (self.tokens, self.depths))
        return tokens, depths

    def edges(self, tokens: LocalTokens) -> Edges:
        """The edges that a rank reads: those that some mask of its samples asks for, the loss mask or a term's.

        Args:
            tokens: ``microbatch.tokens``, or without a plan ``samples.local(cp_rank, cp_size)``.

        Raises ValueError for tokens of samples with another layout.
        """
        samples = tokens.samples
        if samples.layout is not self:
            raise ValueError(
                f"tokens of samples with {type(samples.layout).__name__}: a tree reads the edges of its own samples. "
                "Pass Samples(..., layout=tree), and microbatch.tokens of it."
            )
        wanted = samples.buffer != 0
        for masked in samples.by_mask.values():
            wanted = wanted | (masked.buffer != 0)
        positions = tokens.positions
        asking = np.flatnonzero(wanted[positions])
        children = self.slots[positions[asking] + 1]  # never of a sample's last token, whose mask is 0
        place = np.cumsum(self.held(tokens.cp_rank, tokens.cp_size)) - 1
        is_read = np.zeros(self.num_slots, bool)
        is_read[children] = True
        number = np.cumsum(is_read) - 1
        token_edges = np.full(len(positions), -1, np.int64)
        token_edges[asking] = number[children]
        first = np.empty(int(is_read.sum()), np.int64)
        first[number[children][::-1]] = asking[::-1]  # the last write is that of the first token
        read = np.flatnonzero(is_read)
        return Edges(place[self.parents[read]], self.tokens[read], token_edges, first, int(place[-1]) + 1)

    # --- attention

    def visible(self, device: torch.device | str | None = None) -> Tensor:
        """True where the row's slot sees the column's, bool [num_slots, num_slots], as torch's attention takes it.

        Megatron's `attention_mask` is True where attention is forbidden: ``~tree.visible()[None, None]``.
        """
        return attention.visible(self.ends, device)

    def mask_mod(self, device: torch.device | str | None = None) -> attention.MaskMod:
        """`visible` as FlexAttention's ``mask_mod``."""
        return attention.mask_mod(self.ends, device)

    def block_mask(self, device: torch.device | str | None = None, block_size: int = 128) -> Any:
        """The `BlockMask` of FlexAttention, made from the ends: no tensor of [num_slots, num_slots] is made.

        ``flex_attention(q, k, v, block_mask=tree.block_mask(q.device))``. It needs torch 2.6.
        """
        return attention.block_mask(self.ends, device, block_size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention in plain torch, with backward on any device: each run of slots attends to its path alone.

        Args:
            q, k, v: [batch, heads, num_slots, size]; k and v may have fewer heads, each for a group of those of q.
            scale: of the products, by default ``1 / sqrt(size)``.

        Returns:
            [batch, heads, num_slots, size of v].

        Raises ValueError for another number of slots.
        """
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4 or tensor.shape[2] != self.num_slots:
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} for a tree of {self.num_slots} slots: it must be [batch, "
                    "heads, num_slots, size], of all slots. Gather a sequence that is cut over ranks."
                )
        return attention.attend_by_runs(q, k, v, self.runs, scale)

    # --- models

    @staticmethod
    def check_model(model: nn.Module | Sequence[nn.Module]) -> None:
        """Raise ValueError for a model with layers that a tree does not fit: Mamba, gated delta nets, recurrences.

        Warns of dropout, which a slot draws once for all samples. `plan_step` does this once with its model.
        """
        check_serves_trees(_chunks(model))

    def rotary_by_depth(self, model: nn.Module | Sequence[nn.Module]) -> AbstractContextManager[None]:
        """A ``with`` in which a Megatron model's rotary embeddings are those of the slots' depths."""
        return rotary_by_depth(_chunks(model), torch.tensor(self.depths))

    # --- its shape

    @property
    def paths(self) -> list[Ints]:
        """Of each sample the slots of its tokens, views of `slots`."""
        return [self.slots[begin:end] for begin, end in zip(self._bounds, self._bounds[1:], strict=False)]

    @cached_property
    def runs(self) -> list[attention.Run]:
        """[begin, end) of each run of slots without a branch, and the number of the run that it follows, -1 for none.

        Padding is in no run.
        """
        slots = np.arange(self.num_slots)
        used = int(self.slots.max()) + 1 if len(self.slots) else 0
        starts = np.flatnonzero(self.parents[:used] != slots[:used] - 1)
        children = np.bincount(self.parents[:used][self.parents[:used] >= 0], minlength=self.num_slots)
        branched = np.flatnonzero(children > 1) + 1
        bounds = np.unique(np.concatenate([[0], starts, branched[branched < used], [used]]))
        begins = bounds[:-1]
        before = np.searchsorted(begins, self.parents[begins], "right") - 1
        return list(zip(begins.tolist(), bounds[1:].tolist(), before.tolist(), strict=True)) if used else []

    def __repr__(self) -> str:
        return (
            f"PrefixTree({len(self.lengths)} samples, {self.total_tokens:,} tokens in {self.num_slots:,} slots, "
            f"{len(self.runs)} runs)"
        )

    def _repr_html_(self) -> str:
        """A notebook's table: of each run of slots its length, the run before it, and the samples through it."""
        through = np.zeros(self.num_slots + 1, np.int64)
        np.add.at(through, self.slots, 1)
        rows = [
            [number, f"{end - begin:,}", before if before >= 0 else "", int(through[begin]), first_numbers(
                self.tokens[begin:end].tolist()
            )]
            for number, (begin, end, before) in enumerate(self.runs[:SHOWN_ROWS])
        ]  # fmt: skip
        head = ["run", "slots", "follows", "samples", "first tokens"]
        return html_table(repr(self), head, rows, len(self.runs))


#: Models whose layers fit a tree, and whether they trained when they were looked at: dropout is of such models.
_FITTING: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def check_trees(samples: Sequence[Samples] | None, model: Any) -> None:
    """`PrefixTree.check_model` of a Megatron model, a chunk or several, where some of the samples are trees.

    A model is walked once, and once more when it trains after an evaluation; one that is refused, in every step.
    """
    layouts = [getattr(each, "layout", None) for each in samples] if isinstance(samples, Sequence) else []
    if model is None or not any(isinstance(layout, PrefixTree) for layout in layouts):
        return
    for chunk in [model] if isinstance(model, nn.Module) else model:
        if chunk not in _FITTING or (chunk.training and not _FITTING[chunk]):
            PrefixTree.check_model(chunk)
            _FITTING[chunk] = chunk.training
