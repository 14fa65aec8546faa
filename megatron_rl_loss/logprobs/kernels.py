"""Other projects' fused cross-entropy kernels as makers of log-probs, where they are installed.

    log_probs_from_logits(logits, labels, tp_group=group, kernel=flash_attn)
    log_probs_from_hidden(hidden, output_layer, labels, entropy=True, kernel="liger")

Plain torch (no kernel) is the default, and the reference in tests. All are for a GPU, read float32, bfloat16 or
float16, and sum in float32. Those of logits are Triton kernels that make log-probs alone. They are looked up when
called.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, rank_in, size_of, unwrapped
from megatron_rl_loss.core.errors import check_choice
from megatron_rl_loss.logprobs.layer import Gradients, OutputLayer, TensorParallel, make_log_probs
from megatron_rl_loss.logprobs.reading import LogProbs, Reading


def liger(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """Liger-Kernel's cross-entropy, of one rank; it copies the logits, which it would overwrite."""
    if size_of(tp_group) > 1:
        raise ValueError(
            f"the kernel liger with a vocabulary on {size_of(tp_group)} ranks: this kernel supports one rank only. "
            "Take transformer_engine or flash_attn, or leave the kernel out."
        )
    loss = _look_up("liger_kernel.transformers.functional", "liger_cross_entropy")
    return -loss(logits + 0, labels, reduction="none")


def transformer_engine(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """Transformer Engine's parallel cross-entropy; the gradient overwrites the logits."""
    loss = _look_up("transformer_engine.pytorch.cross_entropy", "parallel_cross_entropy")
    return -loss(logits[:, None], labels[:, None], 0.0, False, _known(tp_group)).reshape(-1)


def flash_attn(logits: Tensor, labels: Tensor, tp_group: Group | None) -> Tensor:
    """flash-attn's Triton cross-entropy, which returns the losses first."""
    return -_look_up("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")(
        logits, labels, process_group=_known(tp_group)
    )[0]


def _known(tp_group: Group | None) -> Group | None:
    return None if tp_group is None else unwrapped(tp_group)


def liger_from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: Group | None, temperature: float, entropy: bool
) -> LogProbs:
    """Liger-Kernel's fused linear scaled cross-entropy (0.8.5) of hidden states [n, hidden], the same on all TP ranks.

    Backward gives the hidden states' gradient summed over the ranks, and the weight's summed in the weight's dtype.
    """
    if size_of(tp_group) > 1:
        sharded = _look_up("liger_kernel.transformers.functional", "liger_fused_linear_scaled_cross_entropy_tp")
        losses = sharded(hidden, weight, labels, tp_group, temperature, return_entropy=entropy)
    else:
        module = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
        whole: Any = _look_up(module, "LigerFusedLinearScaledCrossEntropyFunction")
        losses = whole.apply(hidden, weight, labels, temperature, return_entropy=entropy)
    losses, entropies = losses if entropy else (losses, None)
    return LogProbs(-losses.float(), None if entropies is None else entropies.float())


def run_from_hidden(kernel: str, read: Reading, leaves: Sequence[Any], output_layer: OutputLayer) -> LogProbs:
    """Log-probs by a kernel of hidden states; ValueError for settings that the kernel lacks. It has its own chunks."""
    check_choice("kernel", kernel, FROM_HIDDEN)
    if unsupported := _unsupported(read, leaves, output_layer):
        raise ValueError(
            f"kernel={kernel!r} with {', '.join(unsupported)}: this kernel makes one log-prob per token, of equal "
            "vocabulary shards, on a GPU. Leave these out, or the kernel: plain torch does the same."
        )
    if not len(read.labels):  # which Liger does not take
        return make_log_probs(read, leaves, output_layer.tensor_parallel)[0]
    hidden, weight, _ = leaves
    tokens = hidden.flatten(0, -2)
    if output_layer.tensor_parallel.sequence_parallel:
        tokens = _Gathered.apply(hidden, output_layer.tensor_parallel)
    tokens = tokens if read.rows is None else tokens[read.rows]
    log_probs, entropy = FROM_HIDDEN[kernel](
        tokens.contiguous(), weight, read.labels, read.tp_group, output_layer.temperature, read.entropy
    )
    return LogProbs(read.spread(log_probs), None if entropy is None else read.spread(entropy))


def _unsupported(read: Reading, leaves: Sequence[Any], output_layer: OutputLayer) -> list[str]:
    """Names of the settings of this call that kernels of hidden states do not support."""
    (hidden, _, bias), parallel = leaves, output_layer.tensor_parallel
    is_set = {
        "labels of K ids": read.labels.dim() > 1,
        "a bias": bias is not None,
        "kept ids": read.keep is not None,
        "vocab_size": output_layer.vocab_size is not None,
        "main_gradient (gradient-accumulation fusion)": output_layer.main_gradient is not None,
        "sum_gradient=False": read.tp_group is not None and not (parallel.sequence_parallel or parallel.sum_gradient),
        "float64": hidden.dtype == torch.float64,
        "tensors on the CPU": not hidden.is_cuda,
    }
    return [name for name, value in is_set.items() if value]


class _Gathered(torch.autograd.Function):
    """The hidden states of all tokens, whose gradient has been summed over the ranks: each takes its part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.shape, ctx.rank = hidden.shape, rank_in(parallel.group)
        return parallel.gather(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return gradient.view(-1, *ctx.shape)[ctx.rank], None


def _look_up(module: str, name: str) -> Callable[..., Tensor]:
    try:
        function: Callable[..., Tensor] = getattr(import_module(module), name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # a CUDA library that is missing: OSError
        raise RuntimeError(
            f"a kernel of {module}: the module does not import here ({error}). Install it, or leave the kernel out: "
            "plain torch does the same."
        ) from error
    return function


#: By name.
KERNELS = {"liger": liger, "transformer_engine": transformer_engine, "flash_attn": flash_attn}
FROM_HIDDEN = {"liger": liger_from_hidden}
