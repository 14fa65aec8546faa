"""Who reads the logits: this package's Triton kernels, or plain torch; and why."""

import logging
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

#: Types of devices whose tensors the kernels take. Tests add the host, for Triton's interpreter.
DEVICES = {"cuda"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_IDS = 128  # backward compares each with each

#: Why no kernel runs in this process any more.
_failures: list[str] = []

#: Where kernels were compared with plain torch in this process (`Reading.compare_once`).
compared: set[tuple[torch.device, torch.dtype]] = set()


class Choice(NamedTuple):
    """The module of the kernels, None for plain torch, and the reason."""

    kernels: ModuleType | None
    why: str


def choose(logits: Tensor, ids: int, *, kernel: str | None, rest: bool = False, teacher: bool = False) -> Choice:
    """Who reads logits with `ids` labels per token; the reason is logged once.

    Args:
        logits: or a tensor of their device and dtype.
        kernel: "torch" asks for plain torch.
        rest, teacher: whether a rest of ids, or a divergence from a teacher, is asked for.
    """
    reasons = {
        "kernel='torch' asks for it": kernel == "torch",
        f"the logits are on {logits.device.type}": logits.device.type not in DEVICES,
        "the kernels were compiled for NVIDIA's GPUs alone": logits.is_cuda and torch.version.hip is not None,
        f"the kernels do not read {logits.dtype}": logits.dtype not in _DTYPES,
        "the kernels know no rest of ids": rest,
        "the kernels know no teacher": teacher,
        f"the kernels take 1 to {_MOST_IDS} ids per token, not {ids}": not 1 <= ids <= _MOST_IDS,
        "the vocabulary is not the last dimension in memory": logits.stride(-1) != 1 and logits.shape[-1] > 1,
        "torch.compile traces the call": torch.compiler.is_compiling(),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    kernels = None if why else _kernels()
    if kernels is None:
        why = why or failure()
    choice = Choice(kernels, why or "kernels are the default on a GPU")
    if not torch.compiler.is_compiling():
        _say(f"log-probs are made by {'plain torch' if kernels is None else 'Triton kernels'}: {choice.why}")
    return choice


def give_up(error: Exception) -> None:
    """Have plain torch read from now on, in this process, and log the reason."""
    if not _failures:
        _failures.append(f"Triton failed ({type(error).__name__}: {str(error)[:500]})")
        logger.warning(
            "%s: plain torch makes log-probs and entropy in this process from now on. Results are the same, and take "
            "longer. Mend Triton (it needs a C compiler and a cache folder it can write to), or pass kernel='torch'.",
            _failures[0],
        )


def failure() -> str:
    """Why Triton does not run in this process any more; "" where it does."""
    return _failures[0] if _failures else ""


def _kernels() -> ModuleType | None:
    if not _failures:
        try:
            from megatron_rl_loss.logprobs import triton_kernels  # needs Triton, which not every torch brings

            return triton_kernels
        except Exception as error:  # ImportError, or whatever a broken installation raises
            give_up(error)
    return None


@cache
def _say(text: str) -> None:
    logger.info(text)
