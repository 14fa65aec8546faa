"""The autograd graph that a loss holds on to."""

import torch


def graph_nodes(loss: torch.Tensor) -> int:
    """Nodes of the autograd graph that `loss` holds on to."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(parent for parent, _ in node.next_functions)
    return len(seen)
