"""Parse Megatron's flags and start `pretrain`, under any megatron-core from 0.17: its head changed twice.

| version | flags | the model |
|---|---|---|
| 0.19 on | `parse_and_validate_args` | a config, `gpt_config_from_args` or `hybrid_config_from_args` |
| 0.18 | `parse_and_validate_args` | a function that builds it |
| 0.17 | `parse_args` and `validate_args`; `pretrain` parses the command line again | a function that builds it |
"""

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.training import argument_utils, arguments, get_args, pretrain

AddArgs = Callable[[ArgumentParser], ArgumentParser]
TAKES_CONFIG = hasattr(argument_utils, "gpt_config_from_args")
PARSES_FIRST = hasattr(arguments, "parse_and_validate_args")


def parse_args(add_args: AddArgs, args_defaults: dict[str, Any]) -> Namespace:
    if PARSES_FIRST:
        args = arguments.parse_and_validate_args(extra_args_provider=add_args, args_defaults=args_defaults)
    else:
        args = arguments.validate_args(arguments.parse_args(add_args), args_defaults)
    return args


def build_model(
    layer_spec: Any, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **groups: Any
) -> GPTModel:
    """Build a GPT from the flags, for versions that take no config of the model."""
    args = get_args()
    config = groups.pop("config", None) or arguments.core_transformer_config_from_args(args)
    return GPTModel(
        config,
        layer_spec(SimpleNamespace(transformer=config), vp_stage),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        **groups,
    )


def pretrain_gpt(
    args: Namespace, add_args: AddArgs, args_defaults: dict[str, Any], layer_spec: Any, provider: Any, forward_step: Any
) -> None:
    """`pretrain` with these flags; `layer_spec` is None for Megatron's own choice, which versions before 0.19 lack.

    With --hybrid-layer-pattern the model is a HybridModel, and `layer_spec` the spec of its stack.
    """
    is_hybrid = bool(getattr(args, "hybrid_layer_pattern", None))
    if TAKES_CONFIG:
        make = argument_utils.hybrid_config_from_args if is_hybrid else argument_utils.gpt_config_from_args
        model_config = make(args)
        if layer_spec is not None:
            setattr(model_config, "hybrid_stack_spec" if is_hybrid else "transformer_layer_spec", layer_spec)
        config = argument_utils.pretrain_cfg_container_from_args(args, model_config)
        pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)
        return
    if is_hybrid:
        raise ValueError("--hybrid-layer-pattern needs megatron-core 0.19 here. Drop it for a GPT.")
    if layer_spec is None:
        raise ValueError(f"--transformer-impl {args.transformer_impl} needs megatron-core 0.19. Give local.")
    build = functools.partial(build_model, layer_spec)
    if PARSES_FIRST:
        config = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(config, provider, build, ModelType.encoder_or_decoder, forward_step)
    else:
        more = {"extra_args_provider": add_args, "args_defaults": args_defaults}
        pretrain(provider, build, ModelType.encoder_or_decoder, forward_step, **more)
