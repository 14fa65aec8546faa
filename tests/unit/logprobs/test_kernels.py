"""Other makers of log-probs behind `log_probs_from_logits`, against plain torch and float64.

Liger runs where liger-kernel and Triton are installed, in Triton's interpreter, so without a GPU. Transformer Engine's
and flash-attn's need a GPU, and run with TEST_DEVICE=cuda where they are installed.
"""

import importlib.util
import os
from typing import Any

import pytest
import torch
from interpreter import begin, finish
from kernel_check import check
from refusals import Call, Refusal, check_refusal, each_of
from repository import ROOT
from torch import Tensor

from megatron_rl_loss.logprobs import kernels, log_probs_from_logits


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
from megatron_rl_loss.logprobs.kernels import liger
check(liger)
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


class TwoRanks:
    """The part of a group that the kernel uses."""

    def size(self) -> int:
        return 2


LOGITS, LABELS = torch.zeros(2, 4), torch.tensor([0, 3])


def with_plain(**more: Any) -> Call:
    return lambda: log_probs_from_logits(LOGITS, LABELS, kernel=plain, **more)


def module(name: str) -> Call:
    return lambda: kernels._module(f"megatron_rl_loss.{name}", "no_such")


REFUSALS: dict[str, Refusal] = {
    "a temperature": (with_plain(temperature=0.5), ValueError, "a kernel with temperature", with_plain()),
    "entropy and kept ids": (
        with_plain(entropy=True, keep=LOGITS == 0),
        ValueError,
        "a kernel with keep, entropy",
        with_plain(),
    ),
    "Liger on two ranks": (
        lambda: kernels.liger(LOGITS, LABELS, TwoRanks()),  # type: ignore[arg-type]
        ValueError,
        "liger with a vocabulary on 2 ranks",
        with_plain(),
    ),
    "not installed": (module("no_such"), RuntimeError, "no_such does not import here", module("logprobs.kernels")),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
