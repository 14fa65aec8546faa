"""Megatron-LM's `train_rl.py` with another aggregation of its policy loss; no file of Megatron-LM is edited.

    PYTHONPATH=$MEGATRON_LM torchrun ... examples/train_rl_with_loss_aggregation.py <the flags of train_rl.py> \\
        --loss-aggregation token_mean

`MEGATRON_LM` is a checkout of Megatron-LM, 0.19 or main: `train_rl.py` lies at its root. What is particular to
megatron_rl_loss is marked (1) to (4); the rest does what `train_rl.py` does when it is run itself.
"""

from argparse import ArgumentParser
from functools import partial
from typing import Any

import train_rl
from megatron.core.enums import ModelType
from megatron.inference.utils import add_inference_args
from megatron.training import pretrain, print_rank_0
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_hybrid_model
from model_provider import model_provider

from megatron_rl_loss.arguments import add_loss_aggregation_args
from megatron_rl_loss.frameworks.megatron_rl import loss_aggregation, with_loss_aggregation


def add_args(parser: ArgumentParser) -> ArgumentParser:
    return add_loss_aggregation_args(add_inference_args(parser))  # (1) the flags, chained


def build_model(args: Any, *positionals: Any, **keywords: Any) -> Any:
    builder = train_rl.hybrid_builder if is_hybrid_model(args) else train_rl._gpt_builder
    return builder(args, *positionals, **keywords)


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=add_args, args_defaults={})
    if args.reset_attention_mask:
        raise ValueError("--reset-attention-mask: train_rl.py masks by sequence boundaries. Drop it.")
    aggregation = loss_aggregation(args)  # (2) validates the flags, before the model's config is made
    print_rank_0(aggregation.settings.describe())
    config_of = hybrid_config_from_args if is_hybrid_model(args) else gpt_config_from_args
    with aggregation.attached():  # (3) every step looks ahead at its data before the pipeline starts
        pretrain(
            pretrain_cfg_container_from_args(args, config_of(args)),
            None,  # the rollouts are the data
            ModelType.encoder_or_decoder,
            with_loss_aggregation(train_rl.forward_step),  # (4) its forward_step, our loss_func
            partial(model_provider, build_model),
        )


if __name__ == "__main__":
    main()
