"""The least that a script of your own needs: random packed responses, a clipped policy loss, a mode by flag."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

from megatron_rl_loss import Samples, ZigzagTHD, ppo_clip_loss
from megatron_rl_loss.arguments import add_loss_aggregation_args
from megatron_rl_loss.megatron import LossAggregation, next_microbatch


def batches(seq_length: int, vocab_size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Your data: here two random samples a micro-batch, packed; the same on all ranks but the data-parallel ones."""
    generator = torch.Generator().manual_seed(seed)
    half = seq_length // 2
    for number in itertools.count():
        tokens = torch.randint(vocab_size, (seq_length,), generator=generator)
        yield {
            "tokens": tokens,
            "labels": tokens.roll(-1),
            "position_ids": torch.arange(half).repeat(2),
            "loss_masks": [(torch.arange(half) >= 4).float() for _ in range(2)],  # by label; no prompt
            "prompt_ids": [f"{seed}/{number}"] * 2,  # two responses to one prompt, of this micro-batch alone
            "advantages": torch.tensor([1.0, -1.0]).repeat_interleave(half),
            "old_log_probs": torch.full((seq_length,), -3.0),
            "cu_seqlens_padded": torch.tensor([0, half, seq_length], dtype=torch.int32),
        }


def provide_batches(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
    args = get_args()
    return batches(args.seq_length, args.vocab_size, seed=mpu.get_data_parallel_rank()), None, None


provide_batches.is_distributed = True  # type: ignore[attr-defined]  # every rank reads: totals need all masks


def samples_of(batch: dict[str, Any]) -> Samples:
    """Describes a micro-batch: masks at full length, never cut for context parallelism."""
    layout = ZigzagTHD(batch["cu_seqlens_padded"])
    return Samples(batch["loss_masks"], layout=layout, prompt_ids=batch["prompt_ids"], tokens=batch["tokens"])


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    microbatch = next_microbatch(data_iterator)
    batch = microbatch.data  # what your iterator gave

    def local(name: str) -> Tensor:  # this context-parallel rank's part
        return microbatch.local(batch[name])[None].cuda(non_blocking=True)

    cu_seqlens = batch["cu_seqlens_padded"].cuda(non_blocking=True)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    lengths = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), int(batch["cu_seqlens_padded"][1]))
    packed = PackedSeqParams(qkv_format="thd", **dict.fromkeys(names, cu_seqlens), **lengths)
    output = model(local("tokens"), local("position_ids"), None, labels=local("labels"), packed_seq_params=packed)

    def loss_func(negative_log_probs: Tensor) -> Any:  # of the tokens this rank holds
        policy = ppo_clip_loss(-negative_log_probs, local("old_log_probs"), local("advantages"), clip_high=0.28)
        metrics = {"clip_fraction": policy.clipped, "ppo_kl": policy.ppo_kl}
        return microbatch.loss(policy.per_token_loss, metrics)  # return it as it is: Megatron scales it

    return output, loss_func


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=add_loss_aggregation_args)
    aggregation = LossAggregation.from_args(args, samples_of)  # before the model's config is made
    config = gpt_config_from_args(args)
    with aggregation.attached():
        pretrain(
            pretrain_cfg_container_from_args(args, config), provide_batches, ModelType.encoder_or_decoder, forward_step
        )


if __name__ == "__main__":  # saving a checkpoint starts helper processes that import this file again
    main()
