"""Functions of an engine that a test replaces, and puts back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl_loss.frameworks import replacing, token_mean


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


@contextmanager
def aggregated(owner: Any, case: dict[str, Any]) -> Iterator[None]:
    """A step of an engine that trains on its token mean, in the mode of the case; as it is where that says "stock".

    The proof of the step must come out as the case says. The KL penalty keeps the token mean of the engine: ``kl`` is a setting of the oracle alone.
    """
    with undone():
        if not case.get("stock"):
            settings = {name: value for name, value in case["settings"].items() if name != "kl"}
            proof = token_mean.aggregate(owner, case["mode"], **settings).proof
        yield
        assert case.get("stock") or proof.outcome == case.get("outcome", "proved")
