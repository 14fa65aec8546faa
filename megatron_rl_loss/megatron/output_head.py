"""The output layer of a Megatron model in chunks of tokens, by the hook that `GPTModel.forward` has for it.

    head = OutputHead(chunk_tokens=1024, temperature=1.0, entropy=True)
    log_probs, entropy = model(tokens, positions, None, labels=labels, output_processor=head)  # [b, s] each

On the last pipeline stage the model calls its ``output_processor`` in place of output layer and cross-entropy
(`core/models/gpt/gpt_model.py` `_postprocess`). What the output layer (`core/tensor_parallel/layers.py`) would do under
its settings is read off it, and done by `logprobs.hidden`. MuP's scale of logits is a part of the temperature.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_rl_loss.errors import check_int
from megatron_rl_loss.logprobs.hidden import (
    CHUNK_TOKENS,
    PerTokenLoss,
    TensorParallel,
    add_product,
    log_probs_from_hidden,
    loss_from_hidden,
)
from megatron_rl_loss.logprobs.kept_ids import Keep, KeptIds
from megatron_rl_loss.megatron.versions import check_output_processor, remat_size
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.reduction.sums import WeightedSum


@dataclass(frozen=True)
class Tokens:
    """What an `OutputHead` needs of a micro-batch beside its labels: the ``output_processor_context``.

    Attributes:
        mask: [b, s]: tokens with 0 are passed over; their log-prob and entropy are 0. Best on the host.
        keep: bool [b, s, vocabulary / TP], or `KeptIds` in the order of [s, b]: which ids sampling kept.
    """

    mask: Tensor | None = None
    keep: Keep | None = None


@dataclass(frozen=True)
class Folded(Tokens):
    """A loss to be made in the same pass: the model then gives (share, values).

    Attributes:
        reducer: of the tokens of this rank, in the order of [b, s]: `Microbatch.pg_loss`, or `make_pg_loss_reducer`.
        per_token_loss, inputs: as in `loss_from_hidden`; inputs are [b, s].
    """

    reducer: WeightedSum = field(kw_only=True)
    per_token_loss: PerTokenLoss = field(kw_only=True)
    inputs: Mapping[str, Tensor] = field(kw_only=True, default_factory=dict)

    @classmethod
    def of(
        cls,
        microbatch: Microbatch,
        per_token_loss: PerTokenLoss,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        mask: Tensor | None = None,
        keep: Keep | None = None,
    ) -> "Folded":
        """Of a micro-batch, aggregated as its launch asks. Reduce `values` with ``microbatch.sample_mean``, and give
        Megatron ``microbatch.carry(share, report)``.
        """
        return cls(mask, keep, reducer=microbatch.pg_loss, per_token_loss=per_token_loss, inputs=inputs or {})


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """An ``output_processor`` of a Megatron model that never holds the logits of more than a chunk of tokens.

    With labels [b, s] the model gives (log_probs, entropy), float32 [b, s], of the labels this context-parallel rank
    holds; without ``entropy=True`` the entropy is None. With ``output_processor_context=Folded(...)`` the model gives
    (share, values) of `loss_from_hidden`, but for the losses.

    Attributes:
        chunk_tokens, temperature, entropy, vocab_size: as in `log_probs_from_hidden`.

    Raises:
        ValueError: Megatron-Core before 0.18, whose models take no ``output_processor``.
    """

    chunk_tokens: int = CHUNK_TOKENS
    temperature: float = 1.0
    entropy: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_output_processor()
        check_int("chunk_tokens", self.chunk_tokens, at_least=1, remedy=f"The default is {CHUNK_TOKENS}")

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor | None,
        context: Tokens | None = None,
        scale_logits: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, dict[str, Tensor]]:
        """Of hidden states [s, b, h], or [s / TP, b, h] under sequence parallelism."""
        if labels is None:
            raise ValueError(
                "a model called with output_processor=OutputHead(...) and without labels: the head makes log-probs of "
                "labels. Pass labels=..., or leave the output_processor out for logits."
            )
        weight = output_layer.weight if output_weight is None else output_weight
        refuse_other_layers(output_layer, weight)
        run_pre_hooks(output_layer, hidden_states)
        context = context or Tokens()
        fused = output_layer.gradient_accumulation_fusion and hasattr(weight, "main_grad")
        mup = 1.0 if scale_logits is None else float(scale_logits(torch.ones((), device="cpu")))
        common: dict[str, Any] = {
            "bias": output_layer.bias,
            "tensor_parallel": TensorParallel(
                group=output_layer.tp_group,
                sequence_parallel=output_layer.sequence_parallel,
                sum_gradient=not output_layer.disable_grad_reduce,
            ),
            "temperature": self.temperature / mup,
            "keep": _sequence_first(context.keep),
            "vocab_size": self.vocab_size,
            "entropy": self.entropy,
            "token_mask": None if context.mask is None else context.mask.reshape(labels.shape).t(),
            "chunk_tokens": self.chunk_tokens,
            "main_gradient": FusedMainGradient(weight) if fused else None,
        }
        if not isinstance(context, Folded):
            log_probs, entropy = log_probs_from_hidden(hidden_states, weight, labels.t(), **common)
            return log_probs.t(), None if entropy is None else entropy.t()
        share, values = loss_from_hidden(
            hidden_states,
            weight,
            labels.t(),
            context.reducer.weights_on(hidden_states.device).view(labels.shape).t(),
            context.per_token_loss,
            {name: one.reshape(labels.shape).t() for name, one in context.inputs.items()},
            **common,
        )
        context.reducer.report_not_finite(None, values.pop("losses").t(), share)
        if (scale := context.reducer.gradient_scale) != 1:
            share = share + (scale - 1) * (share - share.detach())
        return share, {name: one.t() for name, one in values.items()}


def _sequence_first(keep: Keep | None) -> Keep | None:
    return keep if keep is None or isinstance(keep, KeptIds) or keep.dim() < 3 else keep.transpose(0, 1)


def refuse_other_layers(output_layer: Any, weight: Tensor) -> None:
    """Refuse output layers that do what is not done here."""
    if type(output_layer).forward is not layers.ColumnParallelLinear.forward:
        raise _other_layer(type(output_layer).__name__)
    config, fused = output_layer.config, output_layer.gradient_accumulation_fusion
    refused = {
        "one whose weight is sharded further (GTP)": remat_size(output_layer) > 1,
        "one with defer_embedding_wgrad_compute": config.defer_embedding_wgrad_compute,
        "one with skip_bias_add": output_layer.skip_bias_add and output_layer.bias is not None,
        "one under CPU offloading": config.cpu_offloading,
        "one of Megatron-FSDP with gradient-accumulation fusion": fused and hasattr(weight, "__fsdp_param__"),
    }
    for kind, present in refused.items():
        if present:
            raise _other_layer(kind)


def run_pre_hooks(output_layer: Any, hidden_states: Tensor) -> None:
    """What runs before the layer's forward: with `--overlap-param-gather` it waits for the weight."""
    for hook in output_layer._forward_pre_hooks.values():
        if hook(output_layer, (hidden_states,)) is not None:
            raise _other_layer("one with a hook that changes its input")


def _other_layer(kind: str) -> ValueError:
    return ValueError(
        f"an output layer of another kind, {kind}: the chunked head does what Megatron's ColumnParallelLinear does, "
        "and this one does more. Leave the output_processor out there (--log-probs stock in the example)."
    )


class FusedMainGradient:
    """The weight's gradient goes to `weight.main_grad`, by Megatron's kernel where there is one."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight
        self._main_grad: Tensor = weight.main_grad

    def add_product(self, of_logits: Tensor, hidden: Tensor) -> None:
        total = self._main_grad
        kernel = getattr(layers, "fused_weight_gradient_mlp_cuda", None) if total.is_cuda else None
        if kernel is None or hidden.dtype == total.dtype:
            add_product(total, of_logits, hidden)
        elif total.dtype == torch.float32:
            kernel.wgrad_gemm_accum_fp32(hidden, of_logits, total)
        else:
            kernel.wgrad_gemm_accum_fp16(hidden, of_logits, total)

    def add_scaled(self, gradient: Tensor, scale: Tensor) -> None:
        self._main_grad.addcmul_(gradient, scale)

    def placeholder(self) -> Tensor | None:
        """Something that makes the hooks of `DistributedDataParallel` run; zeros if it is added to what is there."""
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        new = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return new(weight.shape, dtype=weight.dtype, device=weight.device)
