"""ms-swift (Megatron-SWIFT): any mode for GRPO's policy loss, by a plugin file of two lines.

    from megatron_rl_loss.frameworks.ms_swift import aggregate

    aggregate("prompt_mean")  # megatron rlhf --rlhf_type grpo --loss_type dapo --external_plugins plugin.py ...

With ``--loss_type dapo`` or ``cispo`` Megatron-SWIFT sums loss * mask over a micro-batch and divides by a count of
tokens that it hands to each micro-batch. Before each optimizer step the count becomes the step's tokens T, and each
token's advantage is multiplied by its weight in the mode * T; a KL penalty in the loss is then the token mean.
Megatron's schedule divides by the number of micro-batches: 4.6.0 multiplies by it first; for older trainers the count
is T over it. Source: ms-swift 4.6.0, 3602360a, swift/megatron/trainers/grpo_trainer.py (loss_func), rollout_mixin.py.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from megatron_rl_loss.frameworks.columns import check_text, mark, prompts_of, token_mean_factors
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import UnitCounting

__all__ = ["aggregate"]


def aggregate(
    mode: str | Mode | ModeFunction, *, divisor: float | None = None, units: UnitCounting | None = None
) -> None:
    """From now on ms-swift's `MegatronGRPOTrainer` trains on the mode.

    Args:
        mode, divisor, units: as in `make_pg_loss_reducer`. Prompts are told apart by their tokens.

    Raises:
        ValueError, TypeError: a trainer with an aggregation; settings that are unusable. When a step is trained on,
            fewer tokens than micro-batches or ranks, which Megatron-SWIFT would count as more.
        BadBatchError: on every rank, when a step is trained on: another ``--loss_type`` than dapo and cispo; a mode by
            prompt with images.
    """
    from swift.megatron.trainers import grpo_trainer

    modes = LossModes.resolve(mode, divisor=divisor, units=units)
    trainer, collate = grpo_trainer.MegatronGRPOTrainer, grpo_trainer.collate_to_grpo_micro_batch
    on_step = trainer._on_train_step_batch
    undoes_mean = "loss * self.args.num_microbatches" in inspect.getsource(trainer.loss_func)

    @functools.wraps(collate)
    def collate_with_prompts(samples: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        encoded = [sample.encoded for sample in samples]
        trained = [[label != -100 for label in one["labels"]] for one in encoded]
        prompts = prompts_of([one["input_ids"] for one in encoded], trained)  # before these are padded in place
        inputs, batch = collate(samples, *args, **kwargs)
        batch.prompts = prompts
        batch.has_media = any(getattr(one, name, None) for one in samples for name in ("images", "videos", "audios"))
        return inputs, batch

    @functools.wraps(on_step)
    def weigh_step(self: Any, microbatches: Sequence[dict[str, Any]]) -> None:
        on_step(self, microbatches)
        _weigh([one["grpo_batch"] for one in microbatches], self, modes, undoes_mean=undoes_mean)

    mark(weigh_step, on_step)
    grpo_trainer.collate_to_grpo_micro_batch = collate_with_prompts
    trainer._on_train_step_batch = weigh_step


def _weigh(batches: Sequence[Any], trainer: Any, modes: LossModes, *, undoes_mean: bool) -> None:
    from megatron.core import mpu

    def describe() -> list[Samples]:
        if trainer.loss_type not in ("dapo", "cispo"):
            raise ValueError(
                f"--loss_type {trainer.loss_type} beside a loss aggregation: the loss must be a sum over a token "
                "count. Use --loss_type dapo, which has the loss of grpo, bnpo and dr_grpo, or cispo."
            )
        described = []
        for batch in batches:
            dropped = batch.truncated_mask & trainer.args.overlong_filter
            masks = (batch.completion_mask & ~dropped[:, None]).float()
            described.append(Samples(list(masks), prompt_ids=batch.prompts))
        check_text(modes, described, any(batch.has_media for batch in batches))
        return described

    factors, tokens = token_mean_factors(modes, describe, dp_group=mpu.get_data_parallel_group())
    parts = 1 if undoes_mean else len(batches)
    shares = parts * mpu.get_data_parallel_world_size()
    if 0 < tokens < shares:
        raise ValueError(
            f"{tokens:g} tokens in {shares} parts of the step: Megatron-SWIFT counts at least one in each. Use fewer "
            "ranks or micro-batches."
        )
    for batch, of_batch in zip(batches, factors, strict=True):
        of_tokens = of_batch.to(batch.advantages.device).view_as(batch.completion_mask)
        batch.advantages = batch.advantages * of_tokens
        batch.num_items_in_batch = batch.advantages.new_tensor(tokens / parts)
