"""Packed sequences (THD) in a Megatron pretrain script of your own, with a mode by flag. The data is random."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_rl_loss import (
    LossAggregation,
    Samples,
    ZigzagTHD,
    add_loss_aggregation_args,
    next_microbatch,
    packed_seq_params,
    ppo_clip_loss,
)


def packs(length: int, vocab_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two responses to a prompt a pack: values of all tokens, their slots, and for each sample a mask and an id."""
    generator, half, flat = torch.Generator().manual_seed(seed), length // 2, torch.ones(length // 2)
    at, bounds = torch.arange(half), torch.tensor([0, half, length], dtype=torch.int32)
    for number in itertools.count():
        tokens = torch.randint(vocab_size, (length,), generator=generator)
        values = {"tokens": tokens, "labels": tokens.roll(-1), "positions": at.repeat(2), "bounds": bounds}
        values |= {"old_log_probs": -3 * flat.repeat(2), "advantages": torch.cat([flat, -flat])}
        masks = list((at >= 4) & (at < torch.randint(8, half, (2, 1), generator=generator)))  # by label: the response
        yield values | {"loss_masks": masks, "prompt_ids": [f"{seed}/{number}"] * 2}


def samples_of(pack: dict[str, Any]) -> Samples:
    # Where samples lie in the buffer: [0, 128, 256] for two of 128 tokens.
    layout = ZigzagTHD(pack["bounds"])
    # For each sample, uncut: 1 where the label is a token of the response.
    masks, prompts = pack["loss_masks"], pack["prompt_ids"]
    tokens = pack["tokens"]
    return Samples(masks, layout=layout, prompt_ids=prompts, tokens=tokens)


def provide(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
    return packs(get_args().seq_length, get_args().vocab_size, seed=mpu.get_data_parallel_rank()), None, None


# Every rank reads, because every rank counts the step before it trains.
provide.is_distributed = True  # type: ignore[attr-defined]  # those of one data-parallel rank read the same


def forward_step(data_iterator: Any, model: Any) -> Any:
    microbatch = next_microbatch(data_iterator)
    batch = microbatch.data  # what `packs` gave; `local` cuts this context-parallel rank's part
    names = ("tokens", "labels", "positions", "old_log_probs", "advantages")
    tokens, labels, positions, old, advantages = (microbatch.local(batch[name])[None].cuda() for name in names)
    packed = packed_seq_params(batch["bounds"], model)
    output = model(tokens, positions, None, labels=labels, packed_seq_params=packed)

    def loss_func(loss: torch.Tensor) -> Any:
        # Megatron's loss is minus the log-prob of each label. The old
        # log-probs and the advantages are columns of the batch.
        policy = ppo_clip_loss(-loss, old, advantages, microbatch)
        return microbatch.loss(policy.per_token_loss)

    return output, loss_func


def main() -> None:
    args = parse_and_validate_args(
        extra_args_provider=add_loss_aggregation_args,
    )
    aggregation = LossAggregation.from_args(args, samples_of)  # before the model's config is made
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    with aggregation.attached():
        pretrain(config, provide, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":  # saving a checkpoint starts helper processes that import this file again
    main()
