"""Other makers of log-probs behind `log_probs_from_logits`, against float64.

Liger runs where liger-kernel and Triton are installed, in Triton's interpreter, so without a GPU. Transformer Engine's
and flash-attn's need a GPU, and run with TEST_DEVICE=cuda where they are installed.
"""

import importlib.util
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import begin, finish
from kernel_check import check
from refusals import refusal_tests, refusals
from repository import ROOT
from torch import Tensor

from megatron_rl_loss import log_probs_from_logits
from megatron_rl_loss.logprobs import kernels


def plain(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """A kernel of the test's own."""
    assert labels.dtype == torch.int64
    return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]


def test_a_kernel_of_ones_own() -> None:
    check(plain)
    with pytest.raises(AssertionError):  # negative control
        check(lambda logits, labels, group: plain(logits * 1.001, labels, group))


IN_THE_INTERPRETER = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests" / "support")!r}, {str(ROOT)!r}]
from kernel_check import check
from megatron_rl_loss.logprobs import kernels
check(kernels.liger)
print("the same")
"""


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_ligers_kernel_in_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = finish(begin(IN_THE_INTERPRETER))
    assert done.stdout.strip().endswith("the same"), done.stderr[-3000:]


@pytest.mark.gpus
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_kernels_on_a_gpu(name: str) -> None:
    if os.environ.get("TEST_DEVICE") != "cuda":
        pytest.skip("needs a GPU and TEST_DEVICE=cuda")
    if importlib.util.find_spec({"liger": "liger_kernel"}.get(name, name)) is None:
        pytest.skip(f"{name} is not installed")
    check(kernels.KERNELS[name], "cuda", 1e-5)


LOGITS, LABELS = torch.zeros(2, 4), torch.tensor([0, 3])
TWO_RANKS = SimpleNamespace(size=lambda: 2)  # the part of a group that the kernel uses
REFUSALS = {
    **refusals(
        partial(log_probs_from_logits, LOGITS, LABELS, kernel=plain),
        ({"temperature": 0.5}, "a kernel with a temperature", {}),
        ({"entropy": True, "keep": LOGITS == 0}, "a kernel with a temperature, kept ids", {}),
    ),
    "Liger on two ranks": (
        partial(kernels.liger, LOGITS, LABELS, TWO_RANKS),
        ValueError,
        "liger with a vocabulary on 2 ranks",
        partial(plain, LOGITS, LABELS, TWO_RANKS),
    ),
    **refusals(
        lambda name: kernels._look_up(f"megatron_rl_loss.{name}", "KERNELS"),
        (("no_such",), "no_such: it does not import here", ("logprobs.kernels",)),
        error=RuntimeError,
    ),
}

test_refusals = refusal_tests(REFUSALS)
