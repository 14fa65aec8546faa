"""The edges of a tree that a rank reads, and the way of their values to the tokens of samples and back."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.core.masks import Array, to_array
from megatron_rl_loss.core.transfers import on_device

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges that some sample's mask asks for, each once; `log_probs_from_hidden` takes them in the place of labels.

    Attributes:
        sources: the place of each edge's source among the slots that this rank computes, int64 [num_edges]; a branch
            point is the source of several edges.
        labels: the token that each edge leads to, int64 [num_edges], or K ids each, [num_edges, K].
        token_edges: the edge that each of this rank's tokens reads, int64 [num_local_tokens]; -1 for a masked one.
        first: the first token that reads each edge, int64 [num_edges].
        num_slots: the number of slots that this rank computes.
    """

    sources: Ints
    labels: Ints | Tensor
    token_edges: Ints
    first: Ints
    num_slots: int

    def __len__(self) -> int:
        return len(self.sources)

    def to_tokens(self, edge_values: Tensor) -> Tensor:
        """Values of edges, [num_edges, ...] -> the value of each local token, [num_local_tokens, ...]; 0 if masked.

        Differentiable: the gradient of an edge is the sum over the samples that run through it.
        """
        if len(edge_values) != len(self):
            raise ValueError(
                f"{len(edge_values)} values for {len(self)} edges: each edge must have one. Compute log-probs of "
                "edges.sources and edges.labels."
            )
        index = on_device(np.where(self.token_edges < 0, len(self), self.token_edges), edge_values.device)
        return torch.cat([edge_values, edge_values.new_zeros(1, *edge_values.shape[1:])])[index]

    def with_ids(self, ids: Tensor | Array) -> "Edges":
        """The same edges with K ids for each token, [num_local_tokens, K], in the place of its label.

        Tokens of one edge whose ids differ become edges of their own.
        """
        edges = self.split(ids)
        return replace(edges, labels=edges.from_tokens(ids))

    def from_tokens(self, column: Any) -> Any:
        """The entry of each edge's first token, of a column of this rank's tokens, [num_local_tokens, ...]."""
        return column[on_device(self.first, column.device)] if isinstance(column, Tensor) else column[self.first]

    def split(self, *columns: Any) -> "Edges":
        """Edges whose tokens agree in all of these columns, [num_local_tokens, ...].

        A token that differs from the first of its edge gets an edge of its own. Columns are compared on the host.
        """
        reading = np.flatnonzero(self.token_edges >= 0)
        first = self.first[self.token_edges[reading]]
        differs = np.zeros(len(reading), bool)
        for column in columns:
            values = to_array(column)
            if len(values) != len(self.token_edges):
                raise ValueError(
                    f"a column of {len(values)} entries for {len(self.token_edges)} tokens: each of this rank's tokens "
                    "must have one, in the order of the samples. Pass microbatch.local(column)."
                )
            unequal = values[reading] != values[first]
            differs |= unequal.reshape(len(reading), -1).any(1)
        return self.split_at(reading[differs])

    def split_at(self, tokens: Ints) -> "Edges":
        """The same with an edge of its own for each of these tokens, none of which is the first of an edge."""
        if not len(tokens):
            return self
        copied, token_edges = self.token_edges[tokens], self.token_edges.copy()
        token_edges[tokens] = len(self) + np.arange(len(tokens))
        labels = torch.cat([self.labels, self.labels[on_device(copied, self.labels.device)]]) if isinstance(
            self.labels, Tensor
        ) else np.concatenate([self.labels, self.labels[copied]])  # fmt: skip
        sources = np.concatenate([self.sources, self.sources[copied]])
        first = np.concatenate([self.first, tokens])
        return replace(self, sources=sources, labels=labels, token_edges=token_edges, first=first)

    def apart(self) -> "Edges":
        """The same with an edge of its own for each token that reads one, in the order of the tokens."""
        reading = np.flatnonzero(self.token_edges >= 0)
        others = reading[self.first[self.token_edges[reading]] != reading]
        edges = self.split_at(others)
        order = edges.first.argsort()
        token_edges = edges.token_edges.copy()
        token_edges[edges.first[order]] = np.arange(len(order))
        labels = edges.labels[torch.from_numpy(order)] if isinstance(edges.labels, Tensor) else edges.labels[order]
        return replace(
            edges, sources=edges.sources[order], labels=labels, token_edges=token_edges, first=edges.first[order]
        )
