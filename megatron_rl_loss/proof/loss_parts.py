"""The ways by which a loss depends on the model: all of them must lead through parts that somebody measures."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_rl_loss.core.taps import LossPart

#: How what is said of a loss with further terms begins.
MORE_TERMS = "The loss has more than the terms that the config names"
#: A graph between a loss and the parts that it is made of has a few nodes; behind more lies the model.
_MOST_NODES = 4096


def has_more(loss: Any, output: Any, parts: Sequence[LossPart]) -> bool:
    """True if the loss depends on the model's output beside its parts, or a part beside its inputs."""
    if not isinstance(loss, Tensor) or not isinstance(output, Tensor):
        return False
    whole = LossPart(loss.grad_fn, [part.node for part in parts])
    for node, inputs in (whole, *parts):
        # What a node saved is read only where a way was found: a checkpoint computes it anew.
        if inputs is not None and _reaches(node, output, inputs) and _reaches(node, output, inputs, _is_times_zero):
            return True
    return False


def _reaches(
    node: Any, output: Tensor, passed_by: Sequence[Any], ends_at: Callable[[Any], bool] = lambda node: False
) -> bool:
    """True if a way leads from the node to the output, or to a parameter, through no node that is passed by."""
    nodes, seen = [node], set[Any](passed_by)
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen or ends_at(node):
            continue
        if node is output.grad_fn or type(node).__name__ == "AccumulateGrad":
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return bool(nodes)


def _is_times_zero(node: Any) -> bool:
    """True for a product with the number 0, by which engines keep a graph without a gradient."""
    if type(node).__name__ != "MulBackward0":
        return False
    factors = [factor for factor in (node._saved_self, node._saved_other) if factor is not None and not factor.dim()]
    return any(not factor.requires_grad and not factor for factor in factors)
