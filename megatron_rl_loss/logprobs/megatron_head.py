"""The output layer of a Megatron model, run in chunks of tokens through a hook of `GPTModel.forward`.

    head = OutputHead(temperature=1.0, entropy=True)
    log_probs, entropy = model(tokens, positions, None, labels=labels, output_processor=head)  # [b, s] each

On the last pipeline stage the model calls its ``output_processor`` instead of output layer and cross-entropy
(`core/models/gpt/gpt_model.py` `_postprocess`). `logprobs.hidden` follows the settings of the output layer
(`core/tensor_parallel/layers.py`). MuP's scale of logits is folded into the temperature.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_rl_loss.core.errors import check_int
from megatron_rl_loss.core.masks import Array
from megatron_rl_loss.core.microbatch import Microbatch, Summed
from megatron_rl_loss.logprobs.hidden import (
    PerTokenLoss,
    divergence_from_hidden,
    log_probs_from_hidden,
    loss_from_hidden,
)
from megatron_rl_loss.logprobs.kept_ids import Keep
from megatron_rl_loss.logprobs.layer import OutputLayer, TensorParallel, WeightGradient
from megatron_rl_loss.logprobs.teacher import Teacher, check_teacher
from megatron_rl_loss.megatron.versions import check_output_processor, has_plain_forward, remat_size


@dataclass(frozen=True)
class Tokens:
    """The ``output_processor_context`` of an `OutputHead` that needs more of a micro-batch than the labels.

    Attributes:
        mask: [b, s], or flat in that order: tokens with 0 are skipped; their log-prob and entropy are 0. Best on the
            host, as ``microbatch.tokens.mask`` is: the host waits for a mask on a device.
        keep: bool [b, s, vocabulary / TP], or `KeptIds` in the order of [s, b]: the ids that sampling kept.
        teacher: makes the model return (log_probs, entropy, divergence). The teacher's hidden states are
            [b, s, teacher width], such as ``microbatch.local(column)``, or this rank's part of s under sequence
            parallelism.
        rest_without: bool [b, s, K], of labels [b, s, K], as in `log_probs_from_logits`.
    """

    mask: Tensor | Array | None = None
    keep: Keep | None = None
    teacher: Teacher | None = None
    rest_without: Tensor | None = None


@dataclass(frozen=True)
class Folded:
    """An ``output_processor_context`` that computes the loss in the same pass: the model returns (summed, values).

    Give Megatron ``microbatch.loss(summed, values)``.

    Attributes:
        microbatch: aggregates the losses as its step asks.
        per_token_loss, inputs: as in `loss_from_hidden`; inputs are [b, s] or [b, s, ...].
        mask, keep, teacher, rest_without: as in `Tokens`; the default mask is the loss mask.
    """

    microbatch: Microbatch
    per_token_loss: PerTokenLoss
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    _: KW_ONLY
    mask: Tensor | Array | None = None
    keep: Keep | None = None
    teacher: Teacher | None = None
    rest_without: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """An ``output_processor`` of a Megatron model that holds the logits of one chunk of tokens at a time.

    With labels [b, s] the model returns (log_probs, entropy), float32 [b, s], for the labels that this context-parallel
    rank holds; with labels [b, s, K] the log-probs are [b, s, K]. Without ``entropy=True`` the entropy is None. With
    ``output_processor_context=Folded(...)`` the model returns (share, values) of `loss_from_hidden`, without losses.
    Nothing is read back from a device.

    Attributes:
        chunk_tokens, temperature, vocab_size: as in `OutputLayer`.
        entropy, kernel: as in `log_probs_from_hidden`.

    Raises:
        ValueError: Megatron-Core before 0.18, whose models take no ``output_processor``. In a call: an output layer
            that does more than Megatron's ColumnParallelLinear, also by a hook; a kernel with unsupported inputs.
    """

    chunk_tokens: int | None = None
    temperature: float = 1.0
    entropy: bool = False
    vocab_size: int | None = None
    kernel: str | None = None

    def __post_init__(self) -> None:
        check_output_processor()
        if self.chunk_tokens is not None:
            check_int("chunk_tokens", self.chunk_tokens, at_least=1, remedy="Leave it out for a default")

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor | None,
        context: Tokens | Folded | None = None,
        scale_logits: Any = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...] | tuple[Summed, dict[str, Tensor]]:
        """Run on hidden states [s, b, h], or [s / TP, b, h] under sequence parallelism."""
        if labels is None:
            raise ValueError(
                "a model called with output_processor=OutputHead(...) and without labels: the head computes log-probs "
                "of labels. Pass labels=..., or leave the output_processor out for logits."
            )
        batch = labels.shape[:2]
        weight = output_layer.weight if output_weight is None else output_weight
        check_layer(output_layer, weight)
        run_pre_hooks(output_layer, hidden_states, weight)
        context = context or Tokens()
        mask = context.microbatch.tokens.mask if isinstance(context, Folded) and context.mask is None else context.mask
        keep, teacher = context.keep, context.teacher
        is_foreign = self.kernel is not None and self.kernel != "torch"
        if is_foreign and (teacher is not None or isinstance(context, Folded)):
            raise ValueError(
                f"OutputHead(kernel={self.kernel!r}) with a teacher or Folded: a kernel computes log-probs and entropy "
                "only. Leave the kernel out, or the teacher and Folded."
            )
        if teacher is not None:
            check_teacher(teacher)
            its_temperature = self.temperature if teacher.temperature is None else teacher.temperature
            teacher = replace(teacher, hidden=teacher.hidden.transpose(0, 1), temperature=its_temperature)
        # Megatron's own layer adds the gradient to `main_grad` under the same two conditions.
        fused = output_layer.gradient_accumulation_fusion and hasattr(weight, "main_grad")
        # MuP multiplies the logits by a number, which `scale_logits` gives of 1: on the host, where it is read.
        mup = 1.0 if scale_logits is None else float(scale_logits(torch.ones((), device="cpu")))
        layer = OutputLayer(
            weight,
            output_layer.bias,
            tensor_parallel=TensorParallel(
                group=output_layer.tp_group,
                sequence_parallel=output_layer.sequence_parallel,
                sum_gradient=not output_layer.disable_grad_reduce,
            ),
            temperature=self.temperature / mup,
            vocab_size=self.vocab_size,
            chunk_tokens=self.chunk_tokens,
            main_gradient=FusedMainGradient(weight) if fused else None,
        )
        # Megatron's hidden states are [s, b, h], its labels [b, s]; the functions below take one order of tokens.
        labels = labels.transpose(0, 1)
        reading: dict[str, Any] = {
            "keep": keep.transpose(0, 1) if isinstance(keep, Tensor) and keep.dim() == 3 else keep,
            "entropy": self.entropy,
            "token_mask": None if mask is None else mask.reshape(batch).T,
            "rest_without": None if context.rest_without is None else context.rest_without.transpose(0, 1),
        }
        if not isinstance(context, Folded):
            values: tuple[Tensor | None, ...]
            if teacher is None:
                values = log_probs_from_hidden(hidden_states, layer, labels, kernel=self.kernel, **reading)
            else:
                values = divergence_from_hidden(hidden_states, layer, labels, teacher=teacher, **reading)
            return tuple(None if value is None else value.transpose(0, 1) for value in values)
        weights = context.microbatch.weights_on(hidden_states.device).view(batch).t()
        inputs = {
            name: column.reshape(*batch, *column.shape[2:]).transpose(0, 1) for name, column in context.inputs.items()
        }
        loss_of = context.per_token_loss
        kernel: Any = self.kernel
        share, by_name = loss_from_hidden(
            hidden_states, layer, labels, weights, loss_of, inputs, teacher=teacher, kernel=kernel, **reading
        )
        by_name = {name: value.transpose(0, 1) for name, value in by_name.items()}
        return context.microbatch.summed(share, by_name.pop("losses")), by_name


def check_layer(output_layer: Any, weight: Tensor) -> None:
    """Reject output layers that do more than the chunked head."""
    config, fused = output_layer.config, output_layer.gradient_accumulation_fusion
    hooks = [*output_layer._forward_hooks.values(), *output_layer._backward_hooks.values()]
    hooks += output_layer._backward_pre_hooks.values()
    refused = {
        type(output_layer).__name__: not has_plain_forward(output_layer),
        "one whose weight is sharded further (GTP)": remat_size(output_layer) > 1,
        "one with defer_embedding_wgrad_compute": config.defer_embedding_wgrad_compute,
        "one with skip_bias_add": output_layer.skip_bias_add and output_layer.bias is not None,
        "one under CPU offloading": config.cpu_offloading,
        "one of Megatron-FSDP with gradient-accumulation fusion": fused and hasattr(weight, "__fsdp_param__"),
        # Megatron-FSDP's own hook that is let through frees memory, and changes nothing.
        "one with a forward or backward hook": any(
            getattr(hook, "__name__", "") != "_release_module_fp8_transpose_cache" for hook in hooks
        ),
    }
    for layer, is_present in refused.items():
        if is_present:
            raise _other_layer(layer)


def run_pre_hooks(output_layer: Any, hidden_states: Tensor, weight: Tensor) -> None:
    """Run the layer's forward pre-hooks: with `--overlap-param-gather` one of them waits for the weight."""
    for key, hook in output_layer._forward_pre_hooks.items():
        takes_kwargs = key in output_layer._forward_pre_hooks_with_kwargs
        kwargs = ({"weight": weight},) if takes_kwargs else ()
        if hook(output_layer, (hidden_states,), *kwargs) is not None:
            raise _other_layer("one with a hook that changes its input")


def _other_layer(layer: str) -> ValueError:
    return ValueError(
        f"an OutputHead on an unsupported output layer, {layer}: the head replaces Megatron's plain "
        "ColumnParallelLinear alone. Leave the output_processor out (in the example: --log-probs stock)."
    )


class FusedMainGradient(WeightGradient):
    """Adds the weight's gradient to `weight.main_grad`, with Megatron's kernel if it is installed."""

    def __init__(self, weight: Any) -> None:
        super().__init__(weight.main_grad)
        self._weight = weight

    def add_product(self, of_logits: Tensor, hidden: Tensor) -> None:
        kernel = getattr(layers, "fused_weight_gradient_mlp_cuda", None) if self.total.is_cuda else None
        # torch adds a product of the sum's own dtype in place; only for another one is Megatron's kernel needed.
        if kernel is None or hidden.dtype == self.total.dtype:
            super().add_product(of_logits, hidden)
        elif self.total.dtype == torch.float32:
            kernel.wgrad_gemm_accum_fp32(hidden, of_logits, self.total)
        else:
            kernel.wgrad_gemm_accum_fp16(hidden, of_logits, self.total)

    def for_autograd(self) -> Tensor | None:
        """A gradient that triggers the hooks of `DistributedDataParallel`; zeros if Megatron would add it."""
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        new = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return new(weight.shape, dtype=weight.dtype, device=weight.device)
