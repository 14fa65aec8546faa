"""ms-swift (Megatron-SWIFT): any mode for GRPO's policy loss, by a plugin file of two lines, with ``--use_ray`` too.

    from megatron_rl_loss.frameworks.ms_swift import aggregate

    aggregate("prompt_mean")  # megatron rlhf --rlhf_type grpo --loss_type dapo --external_plugins plugin.py ...

With ``--loss_type dapo`` or ``cispo`` Megatron-SWIFT sums loss * mask over a micro-batch and divides by a count of
tokens that it hands to each micro-batch. Before each optimizer step the count becomes the one that makes it the mean
over the step's tokens T, and each token's advantage is multiplied by its weight in the mode * T; a KL penalty in the
loss is then the token mean. Whether the loss function undoes Megatron's division by the number of micro-batches, as
4.6.0 does, is measured. Prompts are told apart by their messages, as ms-swift does outside of Megatron.
Source: ms-swift 4.6.0, 3602360a, swift/megatron/trainers/grpo_trainer.py (loss_func), swift/ray/megatron.
"""

import copy
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl_loss.frameworks.columns import MEDIA, samples_of, token_mean_factors
from megatron_rl_loss.frameworks.replacing import Function, Replaced
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.step.samples import Samples

__all__ = ["aggregate"]


def aggregate(mode: str | Mode | ModeFunction, **settings: Any) -> Replaced:
    """From now on ms-swift's `MegatronGRPOTrainer` and its Ray workers train on the mode.

    Args:
        mode, settings: the mode, its `divisor` and `units`, as in `make_pg_loss_reducer`.

    Raises:
        ValueError, TypeError: a trainer with an aggregation; settings that are unusable. When a step is trained on,
            fewer tokens than micro-batches or ranks, which Megatron-SWIFT would count as more.
        BadBatchError: on every rank, when a step is trained on: another ``--loss_type`` than dapo and cispo; a mode by
            prompt with images.
    """
    from swift.megatron.trainers import grpo_trainer
    from swift.rlhf_trainers import utils

    modes = LossModes.resolve(mode, **settings)

    def with_ids(stock: Any, given: dict[str, Any]) -> Any:
        """Before responses are generated, messages are the prompt."""
        samples = stock()
        for sample in samples:
            sample.prompt_id = sample.prompt_id or json.dumps(sample.messages, default=str)
        return samples

    def collate(stock: Any, given: dict[str, Any]) -> Any:
        inputs, batch = stock()
        samples = given["samples"]
        has_media = any(getattr(one, name) for one in samples for name in ("images", "videos", "audios"))
        unknown = "" if all(one.prompt_id for one in samples) else "samples of ms-swift without a prompt_id"
        batch.prompts = MEDIA if has_media else unknown or [one.prompt_id for one in samples]
        return inputs, batch

    def step(stock: Any, given: dict[str, Any]) -> Any:
        _weigh([one["grpo_batch"] for one in given["encoded_batches"]], given["self"], modes)
        return stock()

    def ray_step(stock: Any, given: dict[str, Any]) -> Any:
        if not isinstance(given["self"], trainer):  # the one of a Ray worker, whose loss function has a trainer too
            microbatches = list(given["train_data_iterator"])
            given["train_data_iterator"] = iter(microbatches)
            _weigh([one["grpo_batch"] for one in microbatches], given["self"].forward_step.__self__._dummy, modes)
        return stock()

    trainer = grpo_trainer.MegatronGRPOTrainer
    functions = [
        Function(trainer, "_preprocess_inputs", ["samples"], with_ids),
        Function(utils, "collate_to_grpo_micro_batch", ["samples"], collate, lambda name: name.startswith("swift.")),
        Function(trainer, "_on_train_step_batch", ["encoded_batches"], step),
    ]
    if "swift.ray.megatron" in sys.modules:  # with --use_ray: one in the driver, one in the workers
        from swift.megatron.trainers.rlhf_mixin import MegatronRLHFTrainer
        from swift.ray.megatron.grpo_trainer import GRPOTrainer

        functions.append(Function(GRPOTrainer, "expand_for_generation", ["prompt_batch"], with_ids))
        functions.append(Function(MegatronRLHFTrainer, "train_step", ["train_data_iterator"], ray_step))
    return Replaced("ms-swift", "4.6.0 or 3602360a", functions)


def _weigh(batches: Sequence[Any], trainer: Any, modes: LossModes) -> None:
    from megatron.core import mpu

    def describe() -> list[Samples]:
        if trainer.loss_type not in ("dapo", "cispo"):
            raise ValueError(
                f"--loss_type {trainer.loss_type} beside a loss aggregation: the loss must be a sum over a token "
                "count. Use --loss_type dapo, which has the loss of grpo, bnpo and dr_grpo, or cispo."
            )
        dropped = [one.truncated_mask & trainer.args.overlong_filter for one in batches]
        masks = [(one.completion_mask & ~row[:, None]).float() for one, row in zip(batches, dropped, strict=True)]
        return samples_of(modes, [list(one) for one in masks], [one.prompts for one in batches])

    factors, tokens = token_mean_factors(modes, describe, dp_group=mpu.get_data_parallel_group())
    ranks = mpu.get_data_parallel_world_size()
    count = tokens * _scale(trainer, batches[0], ranks) / len(batches)
    if 0 < count < ranks:
        raise ValueError(
            f"{tokens:g} tokens in a step of {len(batches)} micro-batches on {ranks} ranks: Megatron-SWIFT counts at "
            "least one in each part. Use fewer ranks or micro-batches."
        )
    for batch, of_batch in zip(batches, factors, strict=True):
        of_tokens = of_batch.to(batch.advantages.device).view_as(batch.completion_mask)
        batch.advantages = batch.advantages * of_tokens
        batch.num_items_in_batch = batch.advantages.new_tensor(count)


def _scale(trainer: Any, batch: Any, ranks: int) -> float:
    """The factor that its loss function has beside 1 / count: that of a token of known loss, where the count is 1."""
    probe, trial = copy.copy(trainer), copy.copy(batch)
    probe._metrics, probe._flush_log_completions = copy.deepcopy(trainer._metrics), lambda: None
    one = batch.advantages.new_ones(1, 1)
    vars(trial).update(
        completion_mask=one.bool(), truncated_mask=one[0] == 0, seq_lengths=one[0].long(), advantages=one,
        old_per_token_logps=4 * one, ref_per_token_logps=None, rollout_per_token_logps=None,
        num_items_in_batch=torch.tensor(float(ranks)),
    )  # fmt: skip
    with torch.no_grad():
        loss, _ = probe.loss_func(one, data={"grpo_batch": trial})
    return -float(loss) / math.exp(-3)  # of a log-prob of 1 where the old one was 4: nothing is clipped
