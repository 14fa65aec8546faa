"""`first_order`: for functions whose gradient is made by hand, and has no gradient itself."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a backward function whose gradient has no graph: create_graph=True raises ValueError."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def call(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise ValueError(
                    f"create_graph=True through {name}: its gradient has no graph, so a loss made from that gradient "
                    "(a gradient penalty) would not train the model. Write that term with plain torch operations."
                )
            return backward(ctx, *gradients)

        return call

    return decorate
