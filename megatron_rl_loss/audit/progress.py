"""`Progress`: a line on a terminal that says how far a long computation is, and how long the rest will take."""

import sys
import time
from types import TracebackType

_QUIET_SECONDS = 2.0  # a computation that is over by then says nothing


class Progress:
    """Counts equal parts of a computation, inside a ``with``; writes to standard error, and only to a terminal.

    >>> with Progress("check_loss", 3) as progress:
    ...     for _ in range(3):
    ...         progress.advance()
    """

    def __init__(self, what: str, parts: int) -> None:
        self._what, self._parts, self._done, self._shown = what, parts, 0, False
        self._begun = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def advance(self) -> None:
        """One more part is done."""
        self._done += 1
        elapsed = time.monotonic() - self._begun
        if sys.stderr is None or not sys.stderr.isatty() or elapsed < _QUIET_SECONDS:
            return
        left = elapsed * max(self._parts - self._done, 0) / self._done
        share = 100 * min(self._done, self._parts) // self._parts
        sys.stderr.write(f"\r{self._what}: {share} %, {left:.0f} s left\x1b[K")
        sys.stderr.flush()
        self._shown = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")  # the line disappears
            sys.stderr.flush()
