"""The Triton kernels of log-probs on the CPU, in Triton's interpreter, on a rank: in a process of its own."""

import importlib.util
import os
import sys
from collections import Counter
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def import_triton_anew() -> None:
    """On a rank: Triton's functions are made for the interpreter when they are imported, which Megatron has done."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]


def use_kernels(*, compare: bool = False, wide: bool = False) -> Counter[str]:
    """On a rank: the kernels read tensors of the host; returns their launches, counted from now on.

    Without `compare` they are not compared with plain torch first. With `wide` tiles hold a small vocabulary whole,
    which the interpreter reads in fewer operations.
    """
    import_triton_anew()
    torch.set_num_threads(1)
    import compare_kernels

    from megatron_rl_loss.logprobs import choice, triton_kernels

    choice.COMPARES = compare
    compare_kernels.use_interpreter()
    if wide:
        triton_kernels.FORWARD["LANES"], triton_kernels.BACKWARD["BLOCK"] = 64, 128
    counts = Counter[str]()
    for name in ("statistics", "combine", "differentiate"):
        launch = getattr(triton_kernels, name)

        def counted(*args: Any, name: str = name, launch: Any = launch, **more: Any) -> Any:
            counts[name] += 1
            return launch(*args, **more)

        setattr(triton_kernels, name, counted)
    return counts
