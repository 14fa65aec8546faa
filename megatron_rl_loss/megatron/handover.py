"""The hand-over: what reaches Megatron must be what this micro-batch handed out, in training and in evaluation.

A loss function that returns something else (its own mean, a tuple without the count, an earlier micro-batch's loss, a
term added on top) would train on another aggregation, in silence: Megatron scales whatever it is given.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_rl_loss.megatron.microbatch import Microbatch

ForwardStep = Callable[..., Any]


class Microbatches(Iterator[Microbatch]):
    """A step's micro-batches, one by one; knows them all, and remembers those that were taken."""

    def __init__(self, microbatches: list[Microbatch]) -> None:
        self.all = microbatches
        self._left = iter(microbatches)
        self.taken: list[Microbatch] = []

    def __next__(self) -> Microbatch:
        self.taken.append(next(self._left))
        return self.taken[-1]


def next_microbatch(data_iterator: Iterator[Any]) -> Microbatch:
    """The next micro-batch of a step that was looked ahead at.

    Raises TypeError for an iterator of anything else: the schedule was not wrapped, and there are no totals.
    """
    microbatch = next(data_iterator)
    if not isinstance(microbatch, Microbatch):
        raise TypeError(
            f"a data iterator that gives {type(microbatch).__name__}: the step's totals were not made. Run pretrain "
            "inside `with aggregation.attached():`, or the schedule through aggregation.wrap_schedule."
        )
    return microbatch


def checked(forward_step: ForwardStep) -> ForwardStep:
    """`forward_step` with a loss function that is checked: it must return what its micro-batch handed out."""

    @functools.wraps(forward_step)
    def call(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data_iterator, Microbatches):
            return forward_step(data_iterator, *args, **kwargs)  # a stage that reads no data computes no loss
        before = len(data_iterator.taken)
        output, loss_func = forward_step(data_iterator, *args, **kwargs)
        taken = data_iterator.taken[before:]
        if len(taken) != 1:
            raise ValueError(
                f"forward_step took {len(taken)} micro-batches from its iterator: each call computes the loss of one. "
                "Call next(data_iterator) once."
            )
        return output, _checked_loss_func(loss_func, taken[0])

    return call


def _checked_loss_func(loss_func: Callable[..., Any], microbatch: Microbatch) -> Callable[..., Any]:
    @functools.wraps(loss_func)
    def call(*args: Any, **kwargs: Any) -> Any:
        returned = loss_func(*args, **kwargs)
        if not kwargs.get("non_loss_data"):
            check_handed_out(returned, microbatch)
        return returned

    return call


def check_handed_out(returned: Any, microbatch: Microbatch) -> None:
    """Refuse what is not, object by object and unchanged, what `Microbatch.loss` or `carry` returned last."""
    if not isinstance(returned, tuple) or len(returned) != 3:
        shown = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise ValueError(
            f"loss_func returned {shown}: Megatron must be handed what this micro-batch's loss() or carry() returned, "
            "all of it. Return microbatch.loss(per_token_loss, metrics) as it is."
        )
    if microbatch.handed_out is None:
        raise ValueError(
            "loss_func returned a loss that this micro-batch did not hand out: neither its loss() nor its carry() was "
            "called. Return what microbatch.loss(...) or microbatch.carry(share, report) of this micro-batch returned, "
            "unchanged; put further terms into the share."
        )
    loss, num_tokens, _ = returned
    for part, value, handed in zip(("loss", "token count"), (loss, num_tokens), microbatch.handed_out, strict=False):
        if value is not handed.value:
            raise ValueError(
                f"loss_func returned a {part} that this micro-batch did not hand out: {_what_it_is(value)}. Return "
                "what microbatch.loss(...) or microbatch.carry(share, report) of this micro-batch returned, unchanged; "
                "put further terms into the share."
            )
        if value._version != handed.version:
            raise ValueError(
                f"loss_func returned a {part} that this micro-batch did not hand out: it was changed in place. Return "
                "what microbatch.loss(...) or microbatch.carry(share, report) of this micro-batch returned, unchanged; "
                "put further terms into the share."
            )


def _what_it_is(value: Any) -> str:
    """The likely mistake, in so far as the value shows it."""
    if not isinstance(value, Tensor):
        return f"it is a {type(value).__name__}"
    return "it is another aggregation, has a factor or a term on top, or is an earlier micro-batch's loss"
