"""Hooks of a parameter's gradient: before others may change it, and once it is taken for training."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Failure = Callable[[Exception], None]


def watch(leaf: Any, see: Callable[[Tensor], None], take: Callable[[], None], fail: Failure) -> Callable[[], None]:
    """Have a leaf's gradients seen, and then, of those that are added to its `.grad`, taken; returns what undoes it.

    ``torch.autograd.grad`` of a parameter calls the first hook alone. An error would end the backward pass: it goes to
    `fail` instead.
    """

    def see_safely(gradient: Tensor) -> None:
        try:
            see(gradient)
        except Exception as error:
            fail(error)

    def take_safely(_: Tensor) -> None:
        try:
            take()
        except Exception as error:
            fail(error)

    remove, handle = put_first(leaf, see_safely), leaf.register_post_accumulate_grad_hook(take_safely)

    def undo() -> None:
        remove()
        handle.remove()

    return undo


def put_first(leaf: Any, hook: Callable[[Tensor], None]) -> Callable[[], None]:
    """Register a hook before those that a leaf has; returns the function that removes it."""
    handle = leaf.register_hook(hook)
    hooks = leaf._backward_hooks
    # torch calls them in the order in which they were put into this dict, and does not heed OrderedDict.move_to_end.
    for other in [number for number in hooks if number != handle.id]:
        hooks[other] = hooks.pop(other)
    remove: Callable[[], None] = handle.remove
    return remove
