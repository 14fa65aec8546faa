"""Other projects' fused cross-entropy kernels as makers of log-probs, where they are installed.

    log_probs_from_logits(logits, labels, tp_group=group, kernel=flash_attn)

Plain torch (no kernel) is the default, and what these are compared with. All are Triton kernels, so for a GPU; all read
logits of float32, bfloat16 or float16, sum in float32 and make log-probs alone. They are looked up when called.
"""

from collections.abc import Callable
from importlib import import_module

from torch import Tensor

from megatron_rl_loss.step.collectives import Group, size_of


def liger(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """Liger-Kernel's cross-entropy, of one rank; it copies the logits, which it would overwrite."""
    if size_of(tp_group) > 1:
        raise ValueError(
            f"the kernel liger with a vocabulary on {size_of(tp_group)} ranks: it knows one rank alone. Take "
            "transformer_engine or flash_attn, or leave the kernel out."
        )
    loss = _look_up("liger_kernel.transformers.functional", "liger_cross_entropy")
    return -loss(logits + 0, labels, reduction="none")


def transformer_engine(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """Transformer Engine's parallel cross-entropy; the gradient overwrites the logits."""
    loss = _look_up("transformer_engine.pytorch.cross_entropy", "parallel_cross_entropy")
    return -loss(logits[:, None], labels[:, None], 0.0, False, tp_group).reshape(-1)


def flash_attn(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """flash-attn's Triton cross-entropy; the first of what it returns are the losses."""
    return -_look_up("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")(
        logits, labels, process_group=tp_group
    )[0]


def _look_up(module: str, name: str) -> Callable[..., Tensor]:
    try:
        function: Callable[..., Tensor] = getattr(import_module(module), name)
    except (ImportError, OSError, RuntimeError) as error:  # a CUDA library that is missing is an OSError
        raise RuntimeError(
            f"a kernel of {module}: it does not import here ({error}). Install it, or leave the kernel out: plain "
            "torch does the same."
        ) from error
    return function


#: By name.
KERNELS = {"liger": liger, "transformer_engine": transformer_engine, "flash_attn": flash_attn}
