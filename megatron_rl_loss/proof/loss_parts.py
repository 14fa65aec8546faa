"""The ways by which a loss depends on the model: all of them must lead through parts that somebody measures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.taps import LossPart, is_of_model, nodes_before

#: How what is said of a loss with further terms begins.
MORE_TERMS = "The loss has more than the terms that the config names"


def has_more(loss: Any, output: Any, parts: Sequence[LossPart]) -> bool:
    """True if the loss depends on the model's output beside its parts, or a part beside its inputs.

    The output is a tensor, or dicts, lists and tuples of tensors.
    """
    if not isinstance(loss, Tensor):
        return False
    ends = {tensor.grad_fn for tensor in _tensors(output)}
    whole = LossPart(loss.grad_fn, [part.node for part in parts])
    for node, inputs in (whole, *parts):
        # What a node saved is read only where a way was found: a checkpoint computes it anew.
        if inputs is not None and _reaches(node, ends, inputs) and _reaches(node, ends, inputs, _is_times_zero):
            return True
    return False


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _reaches(
    node: Any, ends: set[Any], passed_by: Sequence[Any], stops_at: Callable[[Any], bool] = lambda node: False
) -> bool:
    """True if a way leads from the node to an end, or to a parameter, through no node that is passed by."""
    passed = {*passed_by}

    def is_passed(node: Any) -> bool:
        return node in passed or stops_at(node)

    ways = nodes_before(node, is_passed)
    return any(is_of_model(node) or (node in ends and not is_passed(node)) for node in ways)


def _is_times_zero(node: Any) -> bool:
    """True for a product with the number 0, by which engines keep a graph without a gradient.

    Torch saves a number as a tensor of its own type on the host. A tensor that is 0 may be another value later.
    """
    if type(node).__name__ != "MulBackward0":
        return False
    factors = [factor for factor in (node._saved_self, node._saved_other) if factor is not None and not factor.dim()]
    return any(factor.dtype in (torch.int64, torch.float64) and factor.is_cpu and not factor for factor in factors)
