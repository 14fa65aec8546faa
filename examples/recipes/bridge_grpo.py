"""Megatron-Bridge: the clipped policy loss in a forward step of your own, under Bridge's `pretrain`.

    config = qwen3_600m_pretrain_1gpu_h100_bf16_config()  # or another recipe of megatron.bridge.recipes
    config.validation.eval_iters = 0
    train(config, read, "prompt_mean")

in a script that torchrun launches. ``read(dp_rank)`` is yours: an iterator of micro-batches, a dict each, with
`COLUMNS` [rows, length] and for each row a mask in ``loss_masks`` and an id in ``prompt_ids``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config import DatasetProvider
from megatron.core import mpu

from megatron_rl_loss import LossAggregation, Samples, ZigzagBSHD, next_microbatch, ppo_clip_loss
from megatron_rl_loss.engines.bridge import attached
from megatron_rl_loss.megatron.flags import AggregationSettings

Batch = dict[str, Any]
COLUMNS = ("tokens", "labels", "positions", "old_log_probs", "advantages")


@dataclass(kw_only=True)
class Rollouts(DatasetProvider):  # type: ignore[misc]
    """What Bridge's iterator gives: every rank reads, all but data-parallel ones the same."""

    read: Callable[[int], Iterator[Batch]]
    dataloader_type: str = "external"  # passed on as it is

    def build_datasets(self, context: Any) -> tuple[Iterator[Batch], None, None]:
        return self.read(mpu.get_data_parallel_rank()), None, None


def samples_of(batch: Batch) -> Samples:
    layout = ZigzagBSHD(*batch["tokens"].shape)  # [rows, length]
    masks = batch["loss_masks"]  # one per row, uncut: 1 where the label is a token of the response
    return Samples(masks, layout=layout, prompt_ids=batch["prompt_ids"], tokens=batch["tokens"])


def forward_step(data_iterator: Any, model: Any) -> Any:
    microbatch = next_microbatch(data_iterator)
    columns = (microbatch.local(microbatch.data[name]).cuda() for name in COLUMNS)  # of this context-parallel rank
    tokens, labels, positions, old, advantages = columns
    output = model(tokens, positions, None, labels=labels)  # with labels the model returns -log p
    return output, lambda loss: microbatch.loss(ppo_clip_loss(-loss, old, advantages, microbatch).per_token_loss)


def train(config: Any, read: Callable[[int], Iterator[Batch]], mode: str, divisor: float | None = None) -> None:
    """Bridge's `pretrain` on these micro-batches; the mode is exact with per-token loss, too."""
    from megatron.bridge.training.pretrain import pretrain

    config.dataset = Rollouts(read=read)
    settings = AggregationSettings.resolve(mode, divisor, with_per_token_loss=True)
    with attached(LossAggregation(settings, samples_of)):
        pretrain(config, forward_step)
