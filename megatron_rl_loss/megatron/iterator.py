"""The iterator of a step's micro-batches that Megatron's schedule reads in the place of the user's."""

from collections.abc import Iterator
from typing import Any

from megatron_rl_loss.plan.microbatch import Microbatch


class MicrobatchIterator(Iterator[Microbatch]):
    """A step's micro-batches, one by one.

    Attributes:
        microbatches: all of them.
        position: how many were read.
    """

    def __init__(self, microbatches: list[Microbatch]) -> None:
        self.microbatches = microbatches
        self.position = 0

    def __next__(self) -> Microbatch:
        if self.position == len(self.microbatches):
            raise StopIteration
        self.position += 1
        return self.microbatches[self.position - 1]


def next_microbatch(data_iterator: Iterator[Any]) -> Microbatch:
    """The next micro-batch of a step.

    Raises TypeError for an iterator of anything else: the schedule was not wrapped, and there are no totals.
    """
    microbatch = next(data_iterator)
    if not isinstance(microbatch, Microbatch):
        raise TypeError(
            f"a data iterator that gives {type(microbatch).__name__}: the step's totals were not made. Run pretrain "
            "inside `with aggregation.attached():`, or the schedule through aggregation.wrap_schedule."
        )
    return microbatch
