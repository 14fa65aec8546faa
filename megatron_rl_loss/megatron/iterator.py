"""The iterator over a step's micro-batches that replaces the user's in Megatron's schedule."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_rl_loss.core.microbatch import Microbatch

#: The user's iterator, Megatron's rerun iterator, a list of them (virtual stages), or None where no data is read.
DataIterator = Iterator[Any] | list[Iterator[Any] | None] | None


class MicrobatchIterator(Iterator[Microbatch]):
    """A step's micro-batches, one by one. The iterator drops its reference to each one that was read.

    Attributes:
        position: number of micro-batches that were read.
        last: the micro-batch that was read last.
    """

    def __init__(self, microbatches: Iterable[Microbatch]) -> None:
        self._left = deque(microbatches)
        self.position = 0
        self.last: Microbatch | None = None

    def first(self) -> list[Microbatch]:
        """The micro-batch that is read next; empty at the end."""
        return [*self._left][:1]

    def __next__(self) -> Microbatch:
        if not self._left:
            raise StopIteration
        self.position += 1
        self.last = microbatch = self._left.popleft()
        return microbatch


def batches_of(data_iterator: Iterator[Any]) -> Iterator[Any]:
    """What an iterator gives: Megatron's `RerunDataIterator` has no ``__iter__``, which a ``for`` needs."""
    while True:
        try:
            batch = next(data_iterator)
        except StopIteration:
            return
        yield batch


def next_microbatch(data_iterator: Iterator[Any]) -> Microbatch:
    """The next micro-batch of a step.

    Raises TypeError for any other iterator: the schedule was not wrapped, so the step was not counted.
    """
    if not hasattr(data_iterator, "__next__"):
        raise TypeError(
            f"data_iterator is a {type(data_iterator).__name__}: it must be the iterator that the schedule passes to "
            "forward_step. Pass that on."
        )
    microbatch = next(data_iterator)
    if not isinstance(microbatch, Microbatch):
        raise TypeError(
            f"a data iterator that gives {type(microbatch).__name__}: next_microbatch needs the iterator of a wrapped "
            "schedule. Run pretrain inside `with aggregation.attached():`, or pass the schedule to "
            "aggregation.wrap_schedule."
        )
    return microbatch
