"""A loss function of your own in a Megatron pretrain script, with a mode by flag.

The rows have one length (BSHD), and the data is random.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

from megatron_rl_loss import (
    LossAggregation,
    Samples,
    ZigzagBSHD,
    add_loss_aggregation_args,
    next_microbatch,
)


def batches(rows: int, length: int, vocab_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two batches respond to a prompt: values [rows, length], and for each row a mask and an id."""
    generator, at = torch.Generator().manual_seed(seed), torch.arange(length)
    for number in itertools.count():
        tokens = torch.randint(vocab_size, (rows, length), generator=generator)
        advantages = torch.randn((rows, 1), generator=generator).expand(rows, length)
        values = {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": at.expand(rows, length)}
        values |= {"old_log_probs": torch.full((rows, length), -3.0), "advantages": advantages}
        ends = torch.randint(8, length, (rows, 1), generator=generator)
        masks = list((at >= 4) & (at < ends))  # by label: neither prompt nor padding
        yield values | {"loss_masks": masks, "prompt_ids": [f"{seed}/{number // 2}"] * rows}


def samples_of(batch: dict[str, Any]) -> Samples:
    layout = ZigzagBSHD(*batch["tokens"].shape)  # [rows, length]
    # For each row, uncut: 1 where the label is a token of the response.
    masks, prompts = batch["loss_masks"], batch["prompt_ids"]
    return Samples(masks, layout=layout, prompt_ids=prompts, tokens=batch["tokens"])


def provide(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
    args = get_args()
    sizes = (args.micro_batch_size, args.seq_length, args.vocab_size)
    return batches(*sizes, seed=mpu.get_data_parallel_rank()), None, None


# Every rank reads, because every rank counts the step before it trains.
provide.is_distributed = True  # type: ignore[attr-defined]  # those of one data-parallel rank read the same


def my_losses(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """A loss for each token that this rank holds, neither masked nor averaged."""
    ratio = (log_probs.detach() - old).exp().clamp(max=4.0)
    return -ratio * advantages * log_probs


def forward_step(data_iterator: Any, model: Any) -> Any:
    microbatch = next_microbatch(data_iterator)
    batch = microbatch.data  # what `batches` gave; `local` cuts this context-parallel rank's part
    names = ("tokens", "labels", "positions", "old_log_probs", "advantages")
    tokens, labels, positions, old, advantages = (microbatch.local(batch[name]).cuda() for name in names)
    output = model(tokens, positions, None, labels=labels)

    def loss_func(loss: Tensor) -> Any:
        log_probs = -loss  # Megatron's loss is minus that of each label
        losses = my_losses(log_probs, old, advantages)
        return microbatch.loss(losses, {"log_prob": log_probs})

    return output, loss_func


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=add_loss_aggregation_args)
    aggregation = LossAggregation.from_args(args, samples_of)  # before the model's config is made
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    with aggregation.attached():
        pretrain(config, provide, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":  # saving a checkpoint starts helper processes that import this file again
    main()
