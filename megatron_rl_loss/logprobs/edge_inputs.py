"""Hidden states, logits and what goes with them, of the sources of a tree's edges: one row for each edge.

A branch point is the source of several edges, and has a row for each. Under sequence parallelism the hidden states of
all slots are gathered first, since a source may lie on any rank; their gradient is summed and scattered once.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import size_of
from megatron_rl_loss.core.transfers import on_device, to_device
from megatron_rl_loss.logprobs.kept_ids import Keep, KeptIds
from megatron_rl_loss.logprobs.layer import OutputLayer, TensorParallel
from megatron_rl_loss.logprobs.reading import TokenMask
from megatron_rl_loss.logprobs.teacher import Teacher
from megatron_rl_loss.trees.edges import Edges


@dataclass(frozen=True, eq=False)
class EdgeInputs:
    """A tree's edges with the further columns of a call, of this rank's tokens, in which an edge's tokens agree.

    Attributes:
        edges: those that are read.
        labels: on the device of what they are read of.
        keep, rest_without: of each edge.
    """

    edges: Edges
    labels: Tensor
    keep: Keep | None = None
    rest_without: Tensor | None = None

    @classmethod
    def of(
        cls,
        edges: Edges,
        device: torch.device,
        keep: Keep | None,
        token_mask: TokenMask | None,
        rest_without: Tensor | None,
        *,
        is_each_apart: bool = False,
    ) -> "EdgeInputs":
        """Split edges whose tokens differ in what they keep; ValueError for a token mask, which edges bring along."""
        if token_mask is not None:
            raise ValueError(
                "a token_mask together with the edges of a tree: these are the ones that the samples' masks ask for. "
                "Leave the token_mask out."
            )
        is_mask_of_tokens = isinstance(keep, Tensor) and keep.dim() > 1
        # Ranks of a vocabulary each see their part of a mask alone: whether tokens agree in it, none of them knows.
        edges = edges.apart() if is_each_apart or is_mask_of_tokens else edges
        if rest_without is not None:
            edges = edges.split(rest_without)
            rest_without = edges.from_tokens(rest_without)
        if isinstance(keep, KeptIds):
            edges = edges.split_at(_differing(edges, keep))
            keep = _first_kept(keep, edges)
        elif isinstance(keep, Tensor) and is_mask_of_tokens:
            keep = edges.from_tokens(keep.reshape(-1, keep.shape[-1]))
        labels = edges.labels
        labels = to_device(labels, device) if isinstance(labels, Tensor) else on_device(labels, device)
        return cls(edges, labels, keep, rest_without)

    def rows_of(self, values: Tensor) -> Tensor:
        """The row of each edge's source: [..., size], of all slots of this rank -> [num_edges, size]."""
        rows = values.reshape(-1, values.shape[-1])
        if len(rows) != self.edges.num_slots:
            raise ValueError(
                f"hidden states or logits of {len(rows)} tokens for a tree's {self.edges.num_slots} slots on this "
                "rank: the model must have run on these. Pass tree.inputs(...) to the model, and edges of this tree."
            )
        return rows.index_select(0, on_device(self.edges.sources, values.device))

    def hidden_of(self, hidden: Tensor, layer: OutputLayer) -> tuple[Tensor, OutputLayer]:
        """The hidden states of each edge's source, [num_edges, hidden], and the layer that takes them."""
        parallel = layer.tensor_parallel
        if size_of(parallel.group) == 1:
            return self.rows_of(hidden), layer
        whole = _Gathered.apply(hidden, parallel)
        return self.rows_of(whole), replace(layer, sequence_parallel=False, sum_gradient=False)

    def teacher_of(self, teacher: Teacher, hidden: Tensor, parallel: TensorParallel) -> Teacher:
        """The teacher at each edge's source; hidden states that are a part, as the student's are, are gathered."""
        values = teacher.hidden.detach()
        is_part = teacher.weight is not None and values.shape[:-1] == hidden.shape[:-1]
        return replace(teacher, hidden=self.rows_of(parallel.gather(values) if is_part else values))

    def to_tokens(self, values: Any) -> Any:
        return None if values is None else self.edges.to_tokens(values)


class _Gathered(torch.autograd.Function):
    """The hidden states of all slots; their gradient, of which each rank of the vocabulary has a part, is summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.parallel = parallel
        return parallel.gather(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        # A copy: a sum in place would write into what autograd may hand to others, too.
        return ctx.parallel.sum(gradient.clone(), hidden), None


def _differing(edges: Edges, keep: KeptIds) -> Any:
    """Tokens that keep other ids than the first of their edge."""
    if len(keep.offsets) != len(edges.token_edges) + 1:
        raise ValueError(
            f"KeptIds with offsets of shape {tuple(keep.offsets.shape)} for {len(edges.token_edges)} tokens: with the "
            "edges of a tree they are of this rank's tokens, in the order of the samples. Give a token that keeps no "
            "id an empty range."
        )
    reading = np.flatnonzero(edges.token_edges >= 0)
    first = edges.first[edges.token_edges[reading]]
    reading, first = reading[first != reading], first[first != reading]
    (begins, ends), (others, until) = keep.bounds(reading), keep.bounds(first)
    is_equal = ends - begins == until - others
    # Of pairs that keep equally many ids, these are compared; a pair with one that differs is one that differs.
    counts = np.where(is_equal, ends - begins, 0)
    pair = np.repeat(np.arange(len(reading)), counts)
    within = np.arange(len(pair)) - (counts.cumsum() - counts)[pair]
    ids = keep.ids.numpy(force=True)
    unequal = ids[begins[pair] + within] != ids[others[pair] + within]
    is_equal[pair[unequal]] = False
    return reading[~is_equal]


def _first_kept(keep: KeptIds, edges: Edges) -> KeptIds:
    """The ids that the first token of each edge keeps."""
    begins, ends = keep.bounds(edges.first)
    counts = ends - begins
    offsets = np.concatenate([[0], counts.cumsum()])
    places = np.repeat(begins - offsets[:-1], counts) + np.arange(offsets[-1])
    return KeptIds(keep.ids[on_device(places, keep.ids.device)], offsets)
