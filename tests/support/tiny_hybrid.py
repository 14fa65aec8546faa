"""A HybridModel of Megatron's own layers, without Transformer Engine: attention (*), MLPs (-) and experts (E).

Megatron-Core builds these models from 0.18 on, and names GPTModel deprecated from 0.19 on. The pattern "*-*-" is a GPT
of two blocks: `name_in_gpt` gives its parameters' names there, so that `gpt_oracle` holds for both.
"""

from typing import Any

#: Sizes of Mamba layers that two ranks can cut.
MAMBA: dict[str, Any] = {"mamba_state_dim": 8, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_num_heads": 4}


def hybrid_spec(config: Any) -> Any:
    """The stack of layers, with packed attention and a norm that sequence parallelism may have."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
    from packed_attention import _RMSNorm, layer_spec

    # The stack takes Transformer Engine's norm for its last layer by name, whatever its submodules are.
    vars(hybrid_block)["TENorm"] = _RMSNorm
    block = layer_spec(_Transformer(config)).layer_specs[0].submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=_RMSNorm, self_attention=block.self_attention, self_attn_bda=get_bias_dropout_add
    )

    def feed_forward(num_experts: int | None) -> Any:
        mlp = get_gpt_layer_local_spec(num_experts=num_experts).submodules.mlp
        return TransformerLayerSubmodules(pre_mlp_layernorm=_RMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add)

    submodules = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=feed_forward(None)),
        mtp_block_spec=_mtp_spec(_RMSNorm),
    )
    if config.mamba_state_dim:
        submodules.mamba_layer = _mamba_spec(_RMSNorm)
    if config.num_moe_experts:
        submodules.moe_layer = ModuleSpec(module=TransformerLayer, submodules=feed_forward(config.num_moe_experts))
    return ModuleSpec(module=HybridStack, submodules=submodules)


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
    return ".".join(parts)


class _Transformer:
    """What `layer_spec` reads a configuration from."""

    def __init__(self, config: Any) -> None:
        self.transformer = config


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
