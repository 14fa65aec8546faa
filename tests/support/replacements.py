"""Functions of an engine that a test replaces, and puts back."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl_loss.frameworks import replacing


@contextmanager
def undone() -> Iterator[None]:
    """Undo at the end whatever was replaced within."""
    before = list(replacing._ACTIVE)
    try:
        yield
    finally:
        for one in [one for one in replacing._ACTIVE if one not in before]:
            if isinstance(one, replacing.Replaced):
                one.undo()
