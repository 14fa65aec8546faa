"""Megatron-LM's `train_rl.py` with another aggregation of its policy loss; no file of Megatron-LM is edited.

    PYTHONPATH=$MEGATRON_LM torchrun ... examples/train_rl_with_loss_aggregation.py <the flags of train_rl.py> \\
        --loss-aggregation token_mean

`MEGATRON_LM` is a checkout of Megatron-LM, 0.19 or main, with `train_rl.py` at its root. The lines of megatron_rl_loss
are marked (1) to (4); the rest does the same as `train_rl.py`. Without a flag of megatron_rl_loss the launch trains as
stock, on the mean over bins (or micro-batches) of their token means.
"""

import inspect
from argparse import ArgumentParser
from contextlib import AbstractContextManager, nullcontext
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

from megatron_rl_loss import add_loss_aggregation_args
from megatron_rl_loss.engines.megatron_rl import is_asked_for, loss_aggregation, with_loss_aggregation


def add_args(parser: ArgumentParser) -> ArgumentParser:
    return add_loss_aggregation_args(add_inference_args(parser))  # (1) the flags, chained


def build_model(args: Any, *positionals: Any, **keywords: Any) -> Any:
    builder = train_rl.hybrid_builder if is_hybrid_model(args) else train_rl._gpt_builder
    return builder(args, *positionals, **keywords)


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=add_args, args_defaults={})
    # main's refuses it where it is run itself, 0.19's takes it.
    if args.reset_attention_mask and "args.reset_attention_mask" in inspect.getsource(train_rl):
        raise ValueError("--reset-attention-mask: train_rl.py masks by sequence boundaries. Drop the flag.")
    forward_step: Any = train_rl.forward_step
    attached: AbstractContextManager[None] = nullcontext()
    if is_asked_for(args):
        aggregation = loss_aggregation(args)  # (2) validates the flags, before the model's config is made
        attached = aggregation.attached()  # (3) every step looks ahead at its data before the pipeline starts
        forward_step = with_loss_aggregation(forward_step)  # (4) its forward_step, our loss_func
        print_rank_0(aggregation.settings.modes.describe())
    else:
        print_rank_0("no --loss-aggregation: stock train_rl.py, the mean over bins of their token means")
    config_of = hybrid_config_from_args if is_hybrid_model(args) else gpt_config_from_args
    with attached:
        pretrain(
            pretrain_cfg_container_from_args(args, config_of(args)),
            None,  # the rollouts are the data
            ModelType.encoder_or_decoder,
            forward_step,
            partial(model_provider, build_model),
        )


if __name__ == "__main__":
    main()
