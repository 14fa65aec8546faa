"""Functions of an engine that a test replaces, and puts back."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import added_terms
import torch.distributed as dist

from megatron_rl_loss.engines import replacing, token_mean, weighed_batches


@contextmanager
def undone() -> Iterator[None]:
    """Undo at the end whatever was replaced within."""
    before = list(replacing._REGISTRY)
    try:
        yield
    finally:
        for entry in [entry for entry in replacing._REGISTRY if entry not in before]:
            if isinstance(entry, replacing.Replaced):
                entry.undo()


class _Few(dict[str, Any]):
    """Loaded modules but those of libraries that no engine's function is imported into."""

    def values(self) -> Any:
        libraries = {"torch", "sympy", "numpy", "megatron", "matplotlib", "hypothesis", "_pytest"}
        return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in libraries]


@contextmanager
def in_few_modules() -> Iterator[None]:
    """Look for functions of stand-ins in few modules; the search in all is in test_replacing.py and in `real`."""
    with patch.object(replacing, "sys", SimpleNamespace(modules=_Few())):
        yield


_FACTORS = weighed_batches.advantage_factors


def scale_weights(times: float) -> None:
    """Make the library's own weights wrong by that factor, in engines that take them as columns."""

    def scaled(*args: Any, **options: Any) -> Any:
        factors, divisor = _FACTORS(*args, **options)
        return [times * factor for factor in factors], divisor

    weighed_batches.advantage_factors = scaled


@contextmanager
def aggregated(owner: Any, case: dict[str, Any]) -> Iterator[None]:
    """A step of an engine that trains on its token mean, in the mode of the case; as it is where that says "stock".

    Other terms keep the engine's token mean: ``kl`` and ``entropy`` are settings of the oracle. The proof comes out as
    the case says, with the words that it "says" on the first rank; ``column`` makes our weights wrong by that factor.
    """
    printed = io.StringIO()
    added_terms.choose(case.get("term", ""))
    with undone(), contextlib.redirect_stdout(printed):
        if not case.get("stock"):
            settings = {name: value for name, value in case["settings"].items() if name not in ("kl", "entropy")}
            os.environ["MEGATRON_RL_LOSS_PROOF"] = case.get("level", "error")
            proof = token_mean.aggregate(owner, case["mode"], **settings).proof
            scale_weights(case.get("column", 1.0))
        yield
        assert case.get("stock") or proof.outcome == case.get("outcome", "proved"), printed.getvalue()
    print(printed.getvalue())
    assert dist.get_rank() or re.search(case.get("says", ""), printed.getvalue()), printed.getvalue()
