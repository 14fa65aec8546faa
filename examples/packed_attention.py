"""Attention over packed (THD) sequences under context parallelism, in plain torch, without Transformer Engine.

Megatron's own `DotProductAttention` rejects packing and context parallelism; its `WrappedTorchNorm` rejects sequence
parallelism. `layer_spec` makes a GPT block, and `hybrid_stack_spec` a HybridModel's stack, that supports all three,
with more memory and a loop over sequences: every context-parallel rank gathers keys and values of the whole pack.
"""

import itertools
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_rl_loss import ZigzagTHD


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each packed sequence; a drop-in for a layer spec's ``core_attention``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout if attention_dropout is None else attention_dropout:
            raise ValueError("PackedAttention with dropout: it has none. Launch with --attention-dropout 0.")
        self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """`query` [local tokens, heads, channels] and its keys and values -> [local tokens, heads * channels]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention without packed sequences: it runs no others. Pass packed_seq_params.")
        bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
        own_group = getattr(packed_seq_params, "cp_group", None)  # where groups change; megatron-core 0.15 has none
        cp_group = own_group or self.cp_group
        layout, cp_size = ZigzagTHD(bounds), cp_group.size()
        cuts = [layout.pieces(rank, cp_size) for rank in range(cp_size)]
        held = [torch.cat([torch.arange(*piece, device=query.device) for piece in pieces]) for pieces in cuts]
        if cp_size > 1:
            in_order = torch.cat(held).argsort()
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=cp_group)[in_order] for x in (key, value)
            )
        queries_per_key = query.size(1) // key.size(1)
        if queries_per_key > 1:
            key, value = (x.repeat_interleave(queries_per_key, dim=1) for x in (key, value))
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        mine = held[cp_group.rank()]
        outputs = []
        for start, end in itertools.pairwise(bounds):
            local = slice(start // cp_size, end // cp_size)
            visible = mine[local][:, None] >= torch.arange(start, end, device=query.device)
            keys, values = k[:, start:end], v[:, start:end]
            outputs.append(
                F.scaled_dot_product_attention(q[:, local], keys, values, attn_mask=visible, scale=self.softmax_scale)
            )
        return torch.cat(outputs, dim=1).transpose(0, 1).reshape(query.size(0), -1)


class _RMSNorm(torch.nn.RMSNorm):
    """Torch's norm, its weight marked so that Megatron reduces its gradient under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """A GPT block of Megatron's local layers with `PackedAttention`: for ``GPTModelConfig.transformer_layer_spec``."""
    if model_config.transformer.normalization != "RMSNorm":
        raise ValueError("layer_spec without RMSNorm: it has no other norm. Launch with --normalization RMSNorm.")
    num_layers = get_num_layers_to_build(model_config.transformer, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[_packed_layer()] * num_layers, layer_norm=_RMSNorm)


def hybrid_stack_spec(num_experts: int | None = None) -> ModuleSpec:
    """The same layers as a stack of attention (``*``), MLPs (``-``) and experts (``E``): for ``HybridModelConfig``."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block  # from megatron-core 0.18 on
    from megatron.core.ssm.mlp_layer import MLPLayer

    # The stack takes Transformer Engine's norm for its last layer by name, whatever its submodules are.
    vars(hybrid_block)["TENorm"] = _RMSNorm
    attention = TransformerLayerSubmodules(
        input_layernorm=_RMSNorm,
        self_attention=_packed_layer().submodules.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )

    def feed_forward(num_experts: int | None) -> TransformerLayerSubmodules:
        mlp = get_gpt_layer_local_spec(num_experts=num_experts).submodules.mlp
        return TransformerLayerSubmodules(pre_mlp_layernorm=_RMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add)

    kinds = [field.name for field in fields(hybrid_block.HybridStackSubmodules) if field.name.endswith("_layer")]
    submodules = hybrid_block.HybridStackSubmodules(**dict.fromkeys(kinds, ModuleSpec(module=_NotHere)))
    submodules.attention_layer = ModuleSpec(module=TransformerLayer, submodules=attention)
    submodules.mlp_layer = ModuleSpec(module=MLPLayer, submodules=feed_forward(None))
    if num_experts:
        submodules.moe_layer = ModuleSpec(module=TransformerLayer, submodules=feed_forward(num_experts))
    return ModuleSpec(module=hybrid_block.HybridStack, submodules=submodules)


class _NotHere(torch.nn.Module):
    """In the place of the layers that Megatron has for GPUs alone."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "a layer pattern with another layer than attention (*), MLP (-) and, in a launch with --num-experts, "
            "experts (E): there are no others without Transformer Engine. Take these; a launch on a GPU with "
            "--transformer-impl transformer_engine has all."
        )


def _packed_layer() -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer
