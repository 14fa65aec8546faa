"""An error inside the pipeline on one rank ends all ranks of the step, which would wait in their next collective.

The rank leaves its reason in the store through which `torch.distributed` was started. A thread on each other rank looks
there once a second (less often beyond 1000 ranks) while the step runs, since a rank that waits in a collective can do
nothing itself.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.step.collectives import world_rank, world_size

#: Seconds between looks; for others to have read the reason; and for a rank to leave the step by itself, after which
#: its process is ended.
_INTERVAL, _TO_READ, _TO_LEAVE = 1.0, 5.0, 5.0


@contextmanager
def ending_together(step: str) -> Iterator[None]:
    """For the duration of a step, whose name all ranks share.

    Raises BadBatchError, with the first failed rank's reason, where a collective failed because that rank is gone.
    """
    if world_size() == 1:
        yield
        return
    watch = _Watch(step)
    try:
        yield
    except Exception as error:
        watch.left.set()
        first = watch.publish(f"rank {world_rank()}: {type(error).__name__}: {error}")
        if first is not None and isinstance(error, RuntimeError):  # such as "Connection closed by peer"
            raise BadBatchError(f"The step was ended, no weight was changed. {first}") from error
        raise
    finally:
        watch.left.set()


class _Watch:
    def __init__(self, step: str) -> None:
        self.left = threading.Event()
        self._store = dist.distributed_c10d._get_default_store()
        self._reason_at, self._read_at = f"{step}/reason", f"{step}/ranks that read it"
        self._first: str | None = None
        threading.Thread(target=self._look, daemon=True).start()

    def publish(self, reason: str) -> str | None:
        """Leave the reason for the other ranks, and wait until they have read it; or what another rank left before."""
        if self._first is None:
            with suppress(RuntimeError):  # the store may be gone, with the rank that kept it
                first = self._store.compare_set(self._reason_at, "", reason[:4000]).decode()
                self._first = first if first != reason[:4000] else None
                self._store.add(self._read_at, 1)
                until = time.monotonic() + (_TO_READ if self._first is None else 0)
                while time.monotonic() < until and self._store.add(self._read_at, 0) < world_size():
                    time.sleep(0.05)
        return self._first

    def _look(self) -> None:
        interval = _INTERVAL * max(1.0, world_size() / 1000)  # one process serves all looks: at most 1000 a second
        with suppress(RuntimeError):
            while not self.left.wait(interval):
                if self._store.check([self._reason_at]):
                    self._first = self._store.get(self._reason_at).decode()
                    print(f"rank {world_rank()}: no rank can end its step. {self._first}", file=sys.stderr, flush=True)
                    self._store.add(self._read_at, 1)
                    break
        if self._first is not None and not self.left.wait(_TO_LEAVE):
            os._exit(1)  # the main thread waits in a collective, which nothing else ends
