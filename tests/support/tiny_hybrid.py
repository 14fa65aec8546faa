"""A HybridModel of Megatron's own layers, without Transformer Engine: attention (*), MLPs (-) and experts (E).

Megatron-Core builds these models from 0.18 on, and names GPTModel deprecated from 0.19 on. The pattern "*-*-" is a GPT
of two blocks: `name_in_gpt` gives its parameters' names there, so that `gpt_oracle` holds for both.
"""

from typing import Any

import torch

#: Sizes of Mamba layers that two ranks can cut.
MAMBA: dict[str, Any] = {"mamba_state_dim": 8, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_num_heads": 4}
#: Sizes of layers of the gated delta net that two tensor-parallel ranks and two context-parallel ones can cut.
DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


def sizes_of(pattern: str) -> dict[str, Any]:
    """What a configuration says of a pattern's layers that have a state."""
    silu = {"activation_func": torch.nn.functional.silu}  # the only one that these layers take
    return {**MAMBA, **DELTA_NET, **(silu if "G" in pattern else {})}


def hybrid_spec(config: Any) -> Any:
    """The stack of the examples, with Mamba layers, gated delta nets and multi-token prediction."""
    from packed_attention import _RMSNorm, hybrid_stack_spec

    stack = hybrid_stack_spec(config.num_moe_experts)
    stack.submodules.mtp_block_spec = _mtp_spec(_RMSNorm)
    if config.mamba_state_dim:
        stack.submodules.mamba_layer = _mamba_spec(_RMSNorm)
    if getattr(config, "linear_num_key_heads", None) == DELTA_NET["linear_num_key_heads"]:
        stack.submodules.gdn_layer = _delta_net_spec(_RMSNorm)
    return stack


def tiny_hybrid(config: Any, pattern: str, vp_stage: int | None = None, **options: Any) -> Any:
    """This rank's part of the model; "|" in the pattern divides stages, and "/" begins multi-token prediction."""
    import gpt_oracle
    from megatron.core import parallel_state as mpu
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    stage: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_spec(config),
        vocab_size=gpt_oracle.VOCAB,
        max_sequence_length=64,
        hybrid_layer_pattern=pattern,
        pre_process=mpu.is_pipeline_first_stage(**stage),
        post_process=mpu.is_pipeline_last_stage(**stage),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
        **{"position_embedding_type": "rope", **options},
    )


def name_in_gpt(name: str) -> str:
    """The name that a parameter of "*-*-" has in a GPTModel: a block is two layers, and the last norm has another."""
    parts = name.replace("decoder.final_norm", "decoder.final_layernorm").split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) // 2)
    if parts[0] == "mtp" and "mtp_model_layer" in parts:  # one block a depth
        del parts[4:6]
    return ".".join(parts)


def _mamba_spec(norm: Any) -> Any:
    import mamba_on_cpu
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    mamba_on_cpu.install()
    products = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = ModuleSpec(module=MambaMixer, submodules=products)
    layer = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    return ModuleSpec(module=MambaLayer, submodules=layer)


def _delta_net_spec(norm: Any) -> Any:
    import gdn_on_cpu
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    gdn_on_cpu.install()
    products = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear)
    mixer = ModuleSpec(module=GatedDeltaNet, submodules=products)
    layer = TransformerLayerSubmodules(input_layernorm=norm, self_attention=mixer, self_attn_bda=get_bias_dropout_add)
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _mtp_spec(norm: Any) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    layer_spec = ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[layer_spec])
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=block)
