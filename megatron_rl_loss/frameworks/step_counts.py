"""Facts of a whole step that slime's and miles's hooks need, counted before its first micro-batch."""

import functools
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from megatron_rl_loss.frameworks.replacing import Function, Replaced
from megatron_rl_loss.step.collectives import StepGroups, attempt
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import count_step

#: Versions known, and the name of the step's rollouts in `train_one_step`.
_ENGINES = {
    "slime": ("624b824a (2026-08-21)", "step_global_batch_size"),
    "miles": ("31f1ca96 (2026-08-21)", "num_rollouts"),
}
_NO_COUNTS_NEEDED = "Drop --custom-megatron-init-path; ...slime.sample_mean and ...slime.constant_40960 need no counts."


class StepCounts(NamedTuple):
    """Counts of the step over all DP ranks, with masks as they are before any rejection.

    `num_rollouts` is what the engine divides by, `padded_length` the tokens of this rank's rows, where rows are padded.
    """

    step_tokens: float
    num_samples: int
    num_rollouts: int
    padded_length: int | None = None


_this_step: StepCounts | None = None


def counts_of_this_step() -> StepCounts | None:
    """The counts of the step that is being trained; None where nobody counts."""
    return _this_step


def running_engine() -> str:
    """The name of the engine of this process."""
    return "miles" if "miles" in sys.modules else "slime"


def count_steps(args: Namespace) -> None:
    """Have each step counted, for ``--custom-megatron-init-path`` of slime and of miles.

    They call it once on every rank. It puts one collective round before `train_one_step`. With per-token loss it also
    has them divide by the step's mask tokens, without one for each sample that has none. If your own function has that
    flag, call this from it.

    Raises ValueError for an engine whose functions have other parameters, multi-LoRA, and at a step for independent
    data-parallel replicas; BadBatchError at a step, on every rank, if one cannot count its samples.
    """
    if (engine := running_engine()) == "miles":
        from miles.utils.multi_lora import is_multi_lora_enabled

        if is_multi_lora_enabled(args):
            raise ValueError(
                "steps to be counted with multi-LoRA: every adapter has a batch of its own, and miles divides by that. "
                f"{_NO_COUNTS_NEEDED}"
            )
    _replace(engine)


@functools.cache
def _replace(engine: str) -> Replaced:
    versions, num_rollouts = _ENGINES[engine]
    model = importlib.import_module(f"{engine}.backends.megatron_utils.model")
    needed = ("data_iterator", "num_microbatches", num_rollouts)

    def counted(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
        global _this_step
        iterators, num_microbatches, rollouts = (given[name] for name in needed)
        _this_step = _counts(iterators[0], num_microbatches, rollouts)
        try:
            return stock()
        finally:
            _this_step = None

    functions = [
        Function(model, "train_one_step", needed, counted),
        Function(model, "loss_function", ("args", "batch"), _with_mask_tokens),
    ]
    return Replaced(engine, versions, functions)


def _with_mask_tokens(stock: Callable[[], Any], given: dict[str, Any]) -> Any:
    """Their scaled loss, with the micro-batch's mask tokens for Megatron and for their report to divide by."""
    loss, tokens, log = stock()
    if given["args"].calculate_per_token_loss and _this_step is not None:
        tokens = sum((mask.sum() for mask in given["batch"]["loss_masks"]), start=tokens * 0)
        log["values"][0] = tokens
    return loss, tokens, log


def _counts(iterator: Any, num_microbatches: int, num_rollouts: int) -> StepCounts:
    """The counts of the step that their `DataIterator` stands before."""
    from megatron.core import parallel_state

    if running_engine() == "miles":
        from miles.backends.training_utils.parallel import get_parallel_state

        if get_parallel_state().indep_dp.size > 1:
            raise ValueError(
                "steps to be counted with independent data-parallel replicas: Megatron's groups end at a replica, so a "
                f"part of the step would be counted. {_NO_COUNTS_NEEDED}"
            )

    def describe() -> list[Samples]:
        masks: list[Tensor] = iterator.rollout_data["loss_masks"]
        if iterator.micro_batch_indices is None:
            return [Samples(masks[iterator.offset : iterator.offset + num_microbatches * iterator.micro_batch_size])]
        microbatches = iterator.micro_batch_indices[iterator.offset : iterator.offset + num_microbatches]
        return [Samples([masks[i] for indices in microbatches for i in indices])]

    groups = StepGroups(
        parallel_state.get_data_parallel_group(with_context_parallel=False),
        parallel_state.get_context_parallel_group(),
        [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()],
    )
    totals, rows = count_step(attempt(describe), groups), iterator.rollout_data.get("max_seq_lens")
    padded_length = int(rows[0]) if rows else None  # a rank pads all its rows alike
    return StepCounts(totals.step_tokens or 0.0, totals.units["rollout"].all or 0, num_rollouts, padded_length)
