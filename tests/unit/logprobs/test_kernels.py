"""Other makers of log-probs behind `log_probs_from_logits`, against float64.

Liger runs where liger-kernel and Triton are installed, in Triton's interpreter, so without a GPU. Transformer Engine's
and flash-attn's need a GPU, and run with TEST_DEVICE=cuda where they are installed.
"""

import importlib.util
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device import DEVICE
from head_oracle import BOUNDS
from interpreter import begin, finish
from kernel_check import check, errors_from_hidden, fallback_on_rank
from ranks import run_ranks
from refusals import refusal_tests, refusals
from repository import ROOT
from torch import Tensor

from megatron_rl_loss import OutputLayer, log_probs_from_hidden, log_probs_from_logits
from megatron_rl_loss.logprobs import choice, kernels


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


needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed"
)


@needs_liger
def test_ligers_kernel_in_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = finish(begin(IN_THE_INTERPRETER))
    assert done.stdout.strip().endswith("the same"), done.stderr[-3000:]


@pytest.mark.gpus
@pytest.mark.parametrize("name", [None, "torch", *kernels.KERNELS])
def test_kernels_on_a_gpu(name: str | None) -> None:
    """None is our own kernels."""
    if DEVICE != "cuda":
        pytest.skip("needs a GPU and TEST_DEVICE=cuda")
    if name in (None, "torch"):
        check(name, DEVICE, 1e-5)
        for dtype, bound in BOUNDS.items():
            assert max(errors_from_hidden(name, device=DEVICE, dtype=dtype)) <= bound
        assert choice.failure() == ""
        return
    if importlib.util.find_spec({"liger": "liger_kernel"}.get(name, name)) is None:
        pytest.skip(f"{name} is not installed")
    check(kernels.KERNELS[name], DEVICE, 1e-5)
    if name in kernels.FROM_HIDDEN:
        dtype = torch.bfloat16  # the only one of Liger's kernel for Hopper
        assert max(errors_from_hidden(name, device=DEVICE, dtype=dtype)) <= BOUNDS[dtype]


@needs_liger
def test_ligers_fallback_from_hidden_states_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP 2 and 1, on the CPU; with -s the test prints the errors to float64."""
    errors_by_way = {
        f"{name}, rank {n}": of[name] for n, of in enumerate(run_ranks(2, fallback_on_rank)) for name in of
    }
    monkeypatch.setattr(kernels, "_unsupported", lambda *_: [])
    errors_by_way |= {"liger, one rank": errors_from_hidden("liger"), "None, one rank": errors_from_hidden(None)}
    for name, errors in errors_by_way.items():
        print(f"{name}: log-probs {errors[0]:.1e}, entropy {errors[1]:.1e}, gradients {max(errors[2:]):.1e}")
        assert max(errors) <= 2e-5


LOGITS, LABELS = torch.zeros(2, 4), torch.tensor([0, 3])
HIDDEN, WEIGHT = torch.zeros(2, 6), torch.zeros(4, 6)
TWO_RANKS: Any = SimpleNamespace(size=lambda: 2)  # the part of a group that the kernel uses


def by_liger(labels: Tensor = LABELS, kernel: str | None = "liger", keep: Any = None, **layer_options: Any) -> Any:
    return log_probs_from_hidden(HIDDEN, OutputLayer(WEIGHT, **layer_options), labels, kernel=kernel, keep=keep)


def test_a_kernel_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.KERNELS, "flash_attn", plain)
    log_probs = log_probs_from_logits(LOGITS, LABELS, kernel="flash_attn").log_probs
    assert log_probs.tolist() == pytest.approx([-math.log(4)] * 2)


REFUSALS: dict[str, Any] = {
    **refusals(
        partial(log_probs_from_logits, LOGITS, LABELS, kernel=plain),
        ({"temperature": 0.5}, "a kernel with a temperature", {}),
        ({"entropy": True, "keep": LOGITS == 0}, "a kernel with a temperature, kept ids", {}),
        ({"kernel": "cuda"}, "kernel 'cuda': there is no such kernel", {}),
    ),
    **refusals(
        by_liger,
        ({}, "kernel='liger' with tensors on the CPU: ", {"kernel": None}),
        ({"labels": LABELS[:, None]}, "with labels of K ids, tensors", {"labels": LABELS[:, None], "kernel": None}),
        ({"bias": WEIGHT[:, 0], "vocab_size": 4}, "with a bias, vocab_size", {"bias": WEIGHT[:, 0], "kernel": None}),
        ({"keep": WEIGHT[:, 0] == 0}, "with kept ids", {"keep": WEIGHT[:, 0] == 0, "kernel": None}),
        ({"kernel": "cuda"}, "kernel 'cuda': there is no such kernel", {"kernel": None}),
    ),
    "Liger on two ranks": (
        partial(kernels.liger, LOGITS, LABELS, TWO_RANKS),
        ValueError,
        "liger with a vocabulary on 2 ranks",
        partial(plain, LOGITS, LABELS, TWO_RANKS),
    ),
    **refusals(
        lambda name: kernels._look_up(f"megatron_rl_loss.{name}", "KERNELS"),
        (("no_such",), "no_such: the module does not import here", ("logprobs.kernels",)),
        error=RuntimeError,
    ),
}

test_refusals = refusal_tests(REFUSALS)
