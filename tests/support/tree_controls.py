"""What a model and a loss function read of a tree, and faults of it that must not go unseen.

`CONTROLS` change what the model reads, and `OF_SUMS` the weight of a loss where a loop adds losses up itself.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss import PrefixTree
from megatron_rl_loss.trees.edges import Edges


class Slots:
    """What a model and a loss function read of a tree, which a control changes."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tokens, self.depths = torch.tensor(tree.tokens), torch.tensor(tree.depths)
        self.visible, self.tree = tree.visible(), tree
        self.edges: Callable[[Edges], Edges] = lambda edges: edges


def branches(slots: Slots) -> list[int]:
    """Slots with several slots behind them, at which an error concerns some samples alone."""
    children = np.bincount(slots.tree.parents[slots.tree.parents >= 0], minlength=slots.tree.num_slots)
    return [int(slot) for slot in np.flatnonzero(children > 1)]


def read_by_one_alone(slots: Slots) -> None:
    """Samples but the first do not see the slot that they share."""
    for slot in branches(slots):
        (first, *others) = np.flatnonzero(slots.tree.parents == slot)
        for other in others:
            slots.visible[other : slots.tree.ends[other], slot] = False
        assert first < others[0]


def another_branch(slots: Slots) -> None:
    """At a branch, the first edge has the label of the second."""

    def change(edges: Edges) -> Edges:
        labels = np.array(edges.labels)
        for source in np.unique(edges.sources):
            at = np.flatnonzero(edges.sources == source)
            labels[at] = np.roll(labels[at], 1)
        return replace(edges, labels=labels)

    slots.edges = change


def one_deeper(slots: Slots) -> None:
    for slot in branches(slots):
        slots.depths[slot + 1 : slots.tree.ends[slot]] += 1


def counted_twice(slots: Slots) -> None:
    """Each edge's gradient is that of two."""
    to_tokens = Edges.to_tokens

    class Twice(Edges):
        def to_tokens(self, of_edges: Tensor) -> Tensor:
            return to_tokens(self, 2 * of_edges - of_edges.detach())

    slots.edges = lambda edges: Twice(**vars(edges))


#: Faults of the model, or of what lies between it and the losses.
CONTROLS: list[Callable[[Slots], None]] = [read_by_one_alone, another_branch, one_deeper, counted_twice]


def summed_for_one_alone(edges: Edges) -> Tensor:
    """A factor of each token's loss: an edge counts for the first sample through it alone."""
    factors = torch.zeros(len(edges.token_edges), dtype=torch.float64)
    factors[torch.from_numpy(edges.first)] = 1
    return factors


def summed_twice(edges: Edges) -> Tensor:
    """A factor of each token's loss: an edge that several samples share counts twice."""
    readers = np.bincount(edges.token_edges[edges.token_edges >= 0], minlength=len(edges))
    return torch.from_numpy(1.0 + ((edges.token_edges >= 0) & (readers[edges.token_edges.clip(0)] > 1)))


#: Faults of a sum of losses.
OF_SUMS: list[Callable[[Edges], Tensor]] = [summed_for_one_alone, summed_twice]
