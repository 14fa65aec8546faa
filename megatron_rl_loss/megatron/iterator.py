"""The iterator of a step's micro-batches that Megatron's schedule reads in the place of the user's."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_rl_loss.plan.microbatch import Microbatch

#: The user's iterator, Megatron's rerun iterator, a list of them (virtual stages), or None where no data is read.
DataIterator = Iterator[Any] | list[Iterator[Any] | None] | None


class MicrobatchIterator(Iterator[Microbatch]):
    """A step's micro-batches, one by one; each is let go as it is read.

    Attributes:
        position: how many were read.
        last: the one that was read last.
    """

    def __init__(self, microbatches: Iterable[Microbatch]) -> None:
        self._left = deque(microbatches)
        self.position = 0
        self.last: Microbatch | None = None

    def __next__(self) -> Microbatch:
        if not self._left:
            raise StopIteration
        self.position += 1
        self.last = microbatch = self._left.popleft()
        return microbatch


def next_microbatch(data_iterator: Iterator[Any]) -> Microbatch:
    """The next micro-batch of a step.

    Raises TypeError for an iterator of anything else: the schedule was not wrapped, and the step was not counted.
    """
    microbatch = next(data_iterator)
    if not isinstance(microbatch, Microbatch):
        raise TypeError(
            f"a data iterator that gives {type(microbatch).__name__}: the step was not counted. Run pretrain inside "
            "`with aggregation.attached():`, or the schedule through aggregation.wrap_schedule."
        )
    return microbatch
