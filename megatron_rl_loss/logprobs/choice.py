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

#: Whether programs are compared with plain torch at their first launch (`first_launch`). Tests may leave it out.
COMPARES = True


class Choice(NamedTuple):
    """The module of the kernels, None for plain torch, the reason, and whether programs are compared first."""

    kernels: ModuleType | None
    why: str
    compares: bool = True


def choose(logits: Tensor, ids: int, *, kernel: str | None, rest: bool = False, teacher: bool = False) -> Choice:
    """Who reads logits with `ids` labels per token; the reason is logged once.

    Args:
        logits: or a tensor of their device and dtype.
        kernel: "torch" asks for plain torch, "triton" for kernels that are not compared with it first.
        rest, teacher: whether a rest of ids, or a divergence from a teacher, is asked for.

    Raises ValueError for "triton" where the kernels do not read.
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
    if kernel == "triton" and kernels is None:
        raise ValueError(
            f"kernel='triton', and {why}: the kernels do not read these logits. Leave the kernel out: plain torch does."
        )
    choice = Choice(kernels, why or "kernels are the default on a GPU", COMPARES and kernel != "triton")
    made_by = f"log-probs are made by {'plain torch' if kernels is None else 'Triton kernels'}: {choice.why}"
    is_unexpected = kernels is None and kernel is None and logits.device.type in DEVICES and not failure()  # was told
    _say(made_by, is_unexpected)
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


def fall_back(what: str, excess: float) -> None:
    """Warn of a program that differs from plain torch, which does its step from now on."""
    logger.warning(
        "%s differs from plain torch by %.1e of what it may: plain torch does this step from now on, and other kernels "
        "go on. Results are those of plain torch. Report the GPU and the version of Triton, or pass kernel='torch'.",
        what,
        excess,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say(text: str, is_unexpected: bool) -> None:
    """Say it once in a process: a warning where a user expects kernels."""
    _said(text, is_unexpected)


@cache
def _said(text: str, is_unexpected: bool) -> None:
    logger.log(logging.WARNING if is_unexpected else logging.INFO, text)
