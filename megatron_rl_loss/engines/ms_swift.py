"""ms-swift (Megatron-SWIFT): any mode for GRPO's policy loss, by a plugin file of two lines, with ``--use_ray`` too.

    from megatron_rl_loss.engines.ms_swift import aggregate

    aggregate("prompt_mean")  # megatron rlhf --rlhf_type grpo --loss_type dapo --external_plugins plugin.py ...

With ``--loss_type dapo`` or ``cispo`` Megatron-SWIFT sums loss * mask over a micro-batch and divides by a count of
tokens that each micro-batch carries. Before each optimizer step this adapter sets the count so that the loss is the
mean over the step's tokens T, and multiplies each token's advantage by its weight in the mode * T. A KL penalty in the
loss is then the token mean. The adapter measures if the loss function undoes Megatron's division by the number of
micro-batches, as 4.6.0 does, refuses any other factor, and proves the first step, the KL penalty of ``--beta`` too.
Prompts are identified by their messages, as in ms-swift without Megatron.
Source: ms-swift 4.6.0, 3602360a, swift/megatron/trainers/grpo_trainer.py (loss_func), swift/ray/megatron.
"""

import copy
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.modes import Mode
from megatron_rl_loss.engines.loss_trials import Beside, LossPaths
from megatron_rl_loss.engines.places import swapped
from megatron_rl_loss.engines.prompt_tokens import MEDIA
from megatron_rl_loss.engines.proving import prove
from megatron_rl_loss.engines.replacing import Function, Replaced
from megatron_rl_loss.engines.weighed_batches import FACTORS, BatchEngine, StepArguments
from megatron_rl_loss.extend import LossModes, ModeFunction, UnitCounting, resolve, tap_output

__all__ = ["aggregate"]


def aggregate(
    mode: str | Mode | ModeFunction, *, divisor: float | None = None, units: UnitCounting | None = None
) -> Replaced:
    """Make ms-swift's `MegatronGRPOTrainer` and its Ray workers train on the mode.

    Args:
        mode, divisor, units: as in `make_pg_loss_reducer`.

    Raises:
        ValueError, TypeError: a trainer that has an aggregation; unusable settings; in a step, fewer tokens than
            Megatron-SWIFT's divisor allows, or a loss function with an unknown factor.
        BadBatchError: on every rank, in a step: another ``--loss_type`` than dapo and cispo; a mode by prompt with
            images; a first step in which a token has a weight that the mode does not ask for.
    """
    if "swift.megatron" not in sys.modules:
        raise ValueError(
            "aggregate(...) in a process without Megatron-SWIFT: the trainers of swift rlhf, and swift rollout, would "
            "run without the aggregation. Name its plugin in --external_plugins of megatron rlhf alone."
        )
    from swift.megatron.trainers import grpo_trainer
    from swift.rlhf_trainers import utils

    modes = LossModes.resolve(mode, divisor=divisor, units=units)

    def with_ids(stock: Any, arguments: dict[str, Any]) -> Any:
        """Before generation, the messages of a sample are its prompt."""
        samples = stock()
        for sample in samples:
            sample.prompt_id = sample.prompt_id or json.dumps(sample.messages, default=str)
        return samples

    def collate(stock: Any, arguments: dict[str, Any]) -> Any:
        inputs, batch = stock()
        samples = arguments["samples"]
        has_media = any(getattr(sample, name) for sample in samples for name in ("images", "videos", "audios"))
        unknown = (
            "" if all(sample.prompt_id for sample in samples) else "samples without prompt_id, which identifies prompts"
        )
        batch.prompts = MEDIA if has_media else unknown or [sample.prompt_id for sample in samples]
        batch.prompt_tokens = [_prompt_tokens(sample) for sample in samples]
        return inputs, batch

    def weigh(trainer: Any, microbatches: Sequence[Any]) -> None:
        batches = [microbatch["grpo_batch"] for microbatch in microbatches]
        step = {"self": trainer, "batches": batches}
        _, columns, tokens = ENGINE.weigh(modes, step, replaced.proof)
        count = _count(trainer, batches, tokens)
        for batch, own in zip(batches, columns, strict=True):
            vars(batch).update(own, num_items_in_batch=own["advantages"].new_tensor(count))

    def step(stock: Any, arguments: dict[str, Any]) -> Any:
        weigh(arguments["self"], arguments["encoded_batches"])
        return stock()

    def ray_step(stock: Any, arguments: dict[str, Any]) -> Any:
        if not isinstance(arguments["self"], trainer):  # that of a Ray worker, whose loss function has a trainer too
            microbatches = list(arguments["train_data_iterator"])
            arguments["train_data_iterator"] = iter(microbatches)
            weigh(arguments["self"].forward_step.__self__._dummy, microbatches)
        return stock()

    trainer = grpo_trainer.MegatronGRPOTrainer
    functions = [
        Function(trainer, "_preprocess_inputs", ["samples"], with_ids),
        Function(utils, "collate_to_grpo_micro_batch", ["samples"], collate, lambda name: name.startswith("swift.")),
        Function(trainer, "_on_train_step_batch", ["encoded_batches"], step),
        Function(trainer, "loss_func", ["output_tensor", "data"], _loss),
        Function(grpo_trainer, "compute_logps_and_entropy_from_logits", ["logits"], _tap_logits),
    ]
    if "swift.ray.megatron" in sys.modules:  # with --use_ray: one in the driver, one in the workers
        from swift.megatron.trainers.rlhf_mixin import MegatronRLHFTrainer
        from swift.ray.megatron.grpo_trainer import GRPOTrainer

        functions.append(Function(GRPOTrainer, "expand_for_generation", ["prompt_batch"], with_ids))
        functions.append(Function(MegatronRLHFTrainer, "train_step", ["train_data_iterator"], ray_step))
    replaced = Replaced(ENGINE.name, ENGINE.versions, functions)
    beside = "ms-swift aggregates MoE and MTP losses"
    never = "No policy loss had our weights. Train with MegatronGRPOTrainer; with --use_ray, use ms-swift 3602360a."
    replaced.proof = prove(ENGINE.name, modes.policy, beside=beside, never=never)
    return replaced


def _prompt_tokens(sample: Any) -> str:
    """The tokens of a sample before the first one to train on."""
    ids, labels = sample.encoded["input_ids"], sample.encoded["labels"]
    return str(ids[: next((i for i, label in enumerate(labels) if label != -100), len(ids))])


def _tap_logits(stock: Any, arguments: dict[str, Any]) -> Any:
    arguments["logits"] = tap_output(arguments["logits"])
    return stock()


def _loss(stock: Any, arguments: dict[str, Any]) -> Any:
    """ms-swift's loss, measured where the batch has what it was weighed by."""
    is_measured = hasattr(arguments["data"]["grpo_batch"], FACTORS)
    return ENGINE.tap(arguments, stock, arguments) if is_measured else stock()


def _mask(step: StepArguments, batch: Any) -> Sequence[Tensor]:
    """The mask of the tokens that Megatron-SWIFT trains on."""
    dropped = batch.truncated_mask & step["self"].args.overlong_filter
    return list((batch.completion_mask & ~dropped[:, None]).float())


def _refusals(step: StepArguments) -> Sequence[tuple[bool, str, str]]:
    kind = step["self"].loss_type
    remedy = "Use --loss_type dapo (the clipped loss of grpo, bnpo and dr_grpo) or cispo"
    return [(kind not in ("dapo", "cispo"), f"--loss_type {kind}", remedy)]


def _beside(step: StepArguments, batch: Any) -> Mapping[str, Beside]:
    trainer = step["self"]
    has_kl = trainer.beta and not trainer.kl_in_reward and batch.ref_per_token_logps is not None
    return {"kl": Beside(trainer.beta, resolve("token_mean"))} if has_kl else {}


ENGINE = BatchEngine(
    "ms-swift", versions="4.6.0 or 3602360a",
    refusals=_refusals,
    batches=lambda step: step["batches"],
    masks=_mask,
    prompts=lambda step, batch: batch.prompts,
    prompt_tokens=lambda batch: batch.prompt_tokens,
    group_size=lambda step: step["self"].num_generations,
    ask_size="set --num_generations",
    loss=LossPaths(
        "output_tensor", "data.grpo_batch.advantages",
        {
            "data.grpo_batch.old_per_token_logps": "old", "data.grpo_batch.rollout_per_token_logps?": "old",
            "data.per_token_entropy?": "none",  # the loss without the filters that drop tokens by ratio or entropy
            "data.grpo_batch.ref_per_token_logps?": "reference", "self._flush_log_completions?": "none",
        },
        silent=["self._metrics?"],
        clamps=True,  # cispo and delta
    ),
    batch="data.grpo_batch",
    beside=_beside,
)  # fmt: skip


def _count(trainer: Any, batches: Sequence[Any], tokens: float) -> float:
    """The count of a micro-batch that makes the loss the mean over that many tokens of a step."""
    from megatron.core import parallel_state

    ranks, num_microbatches = parallel_state.get_data_parallel_world_size(), len(batches)
    scale = -_loss_of_a_token(trainer, batches[0], ranks) / math.exp(-10)
    if scale == 0:
        raise ValueError(
            "a loss function that is 0 for a token to train on whose advantage is 1: weights that are multiplied into "
            f"advantages would not reach the loss. Use the loss_func of ms-swift {ENGINE.versions}."
        )
    if not any(math.isclose(scale, known, rel_tol=2.0**-6) for known in (1, num_microbatches)):
        raise ValueError(
            f"a loss function that multiplies the policy loss by {scale:.4g}: that must be 1 or the number of "
            f"micro-batches, {num_microbatches}, or a KL penalty would have another weight. Use ms-swift "
            f"{ENGINE.versions}."
        )
    count = tokens * scale / num_microbatches
    if 0 < count < ranks:
        raise ValueError(
            f"{tokens:g} tokens in a step of {num_microbatches} micro-batches on {ranks} ranks: Megatron-SWIFT divides "
            "each micro-batch by at least one token per rank. Use fewer ranks or micro-batches."
        )
    return count


def _loss_of_a_token(trainer: Any, batch: Any, ranks: int) -> float:
    """ms-swift's loss of one token with count 1, of log-prob 1 where the old one was 11, so that nothing is clipped."""
    trial = copy.copy(batch)
    token = batch.advantages.new_ones(1, 1)
    vars(trial).update(
        completion_mask=token.bool(), truncated_mask=token[0] == 0, seq_lengths=token[0].long(),
        advantages=token, old_per_token_logps=11 * token, rollout_per_token_logps=None, ref_per_token_logps=None,
        num_items_in_batch=torch.tensor(float(ranks)),
    )  # fmt: skip
    with torch.no_grad(), swapped({"self": trainer}, {"self._flush_log_completions?": None}, ["self._metrics?"]):
        loss, _ = trainer.loss_func(token, data={"grpo_batch": trial})
    return float(loss)
