"""Other projects' fused cross-entropy kernels as makers of log-probs, where they are installed.

    log_probs_from_logits(logits, labels, tp_group=group, kernel=flash_attn)

Plain torch (no kernel) is the default, and what these are compared with. All are Triton kernels, so for a GPU; all read
logits of float32, bfloat16 or float16, sum in float32 and make log-probs alone. They are looked up when called.
"""

from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_rl_loss.step.collectives import Group, size_of


def _module(name: str, kernel: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # a CUDA library that is missing is an OSError
        raise RuntimeError(
            f"the kernel {kernel}: {name} does not import here ({error}). Install it, or leave the kernel out: plain "
            "torch does the same."
        ) from error


def liger(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """Liger-Kernel's cross-entropy, of one rank; it copies the logits, which it would overwrite."""
    if size_of(tp_group) > 1:
        raise ValueError(
            f"the kernel liger with a vocabulary on {size_of(tp_group)} ranks: it knows one rank alone. Take "
            "transformer_engine or flash_attn, or leave the kernel out."
        )
    functional = _module("liger_kernel.transformers.functional", "liger")
    loss: Tensor = functional.liger_cross_entropy(logits + 0, labels, reduction="none")
    return -loss


def transformer_engine(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """Transformer Engine's parallel cross-entropy; the gradient overwrites the logits."""
    module = _module("transformer_engine.pytorch.cross_entropy", "transformer_engine")
    loss: Tensor = module.parallel_cross_entropy(logits[:, None], labels[:, None], 0.0, False, tp_group)
    return -loss.reshape(-1)


def flash_attn(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """flash-attn's Triton cross-entropy."""
    module = _module("flash_attn.ops.triton.cross_entropy", "flash_attn")
    losses: Tensor
    losses, _ = module.cross_entropy_loss(logits, labels, process_group=tp_group)
    return -losses


#: By name.
KERNELS = {"liger": liger, "transformer_engine": transformer_engine, "flash_attn": flash_attn}
