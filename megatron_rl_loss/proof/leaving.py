"""How ranks leave a measured step: all of them measure, or an error of one, caught there, reaches the others.

A rank with an error cannot take part in a collective to say so, for the others may be in one of the training. It leaves
word in the store of torch.distributed, which every rank reads before the measurement's first collective.
"""

from collections.abc import Sequence

import torch.distributed as dist

from megatron_rl_loss.core.collectives import Group, gather_objects, several, world_rank
from megatron_rl_loss.core.errors import BadBatchError

_DONE = "done"


class Leaving:
    """The door of one model's measured steps.

    Args:
        groups: of the ranks that measure a step together. All of them call this together.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._number, self._has_left = 0, True
        self._store = dist.distributed_c10d._get_default_store() if several(*groups) else None
        # Several models may be proved by the same ranks, each with a door of its own: its number is the largest of its
        # ranks, which may have opened others without each other.
        mine = f"megatron_rl_loss/doors of rank {world_rank()}"
        numbers = {world_rank(): 0 if self._store is None else self._store.add(mine, 1)}
        for group in several(*groups):
            numbers = {rank: number for part in gather_objects(numbers, group) for rank, number in part.items()}
        number, self._ranks = max(numbers.values()), len(numbers)
        if self._store is not None:
            self._store.add(mine, number - numbers[world_rank()])
        self._name = f"megatron_rl_loss/proof of ranks {min(numbers)} to {max(numbers)}/{number}"

    def begin(self) -> None:
        """Enter a step."""
        self._number, self._has_left = self._number + 1, False

    def leave(self, error: BaseException | None) -> None:
        """Leave a step, once. Raises BadBatchError if another rank left it with an error."""
        if self._store is None or self._has_left:
            return
        self._has_left = True
        step = f"{self._name}/step {self._number}"
        if error is not None:
            self._store.set(step, f"rank {world_rank()}: {type(error).__name__}: {error}"[:600])
            return
        if self._store.add(f"{step}/ranks", 1) == self._ranks:
            self._store.set(step, _DONE)
        if (left := self._store.get(step).decode()) != _DONE:
            raise BadBatchError(
                f"Another rank left the measured step with an error, and this one would wait for it: {left}. Mend that "
                "error; one that you catch must be caught on all ranks, or outside of the `with`."
            )
