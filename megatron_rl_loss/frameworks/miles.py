"""miles: steps counted for the hooks of `megatron_rl_loss.frameworks.slime`, to which miles hands no counts.

    --custom-megatron-init-path megatron_rl_loss.frameworks.miles.count_steps

With it `token_mean` is exact whatever is masked or rejected, the padded rows of ``--qkv-format bshd`` may be cut for
context parallelism, and `sample_mean` refuses rollouts that are split over samples.
"""

import functools
import inspect
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_rl_loss.frameworks import step_counts

__all__ = ["count_steps"]

_NEEDED = ("args", "data_iterator", "num_microbatches", "num_rollouts")
_NO_COUNTS_NEEDED = "Drop --custom-megatron-init-path; ...slime.sample_mean and ...slime.constant_40960 need no counts."


def count_steps(args: Namespace) -> None:
    """Have each step counted before its first micro-batch, for ``--custom-megatron-init-path`` of miles.

    miles calls it once on every rank. It puts one collective round per step before `train_one_step`, where the step's
    data are. Masks are counted as they are before any rejection. If your own function has that flag, call this from it.

    Raises ValueError for a miles whose `train_one_step` has other parameters, multi-LoRA, and at a step for independent
    data-parallel replicas; BadBatchError at a step, on every rank, if one cannot count its samples.
    """
    from miles.backends.megatron_utils import model
    from miles.utils.multi_lora import is_multi_lora_enabled

    if is_multi_lora_enabled(args):
        raise ValueError(
            "steps to be counted with multi-LoRA: every adapter has a batch of its own, and miles divides by that. "
            f"{_NO_COUNTS_NEEDED}"
        )
    parameters = tuple(inspect.signature(model.train_one_step).parameters)
    if missing := [name for name in _NEEDED if name not in parameters]:
        raise ValueError(
            f"a miles whose train_one_step has no {', '.join(missing)} ({', '.join(parameters)}): steps are counted "
            "from them. Use a miles like 31f1ca96 (2026-08-21), or leave out --custom-megatron-init-path."
        )
    if not hasattr(model.train_one_step, "counted_by_megatron_rl_loss"):
        model.train_one_step = _counting(model.train_one_step)
    if os.environ.get("RANK", "0") == "0":
        print("megatron_rl_loss counts every step of miles before it is trained.", flush=True)


def _counting(train_one_step: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(train_one_step)

    @functools.wraps(train_one_step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        launch, iterators, num_microbatches, num_rollouts = (arguments[name] for name in _NEEDED)
        step_counts.begin(launch, _counts(iterators[0], num_microbatches, num_rollouts))
        try:
            return train_one_step(*args, **kwargs)
        finally:
            step_counts.begin(launch, None)

    counted.counted_by_megatron_rl_loss = True  # type: ignore[attr-defined]
    return counted


def _counts(iterator: Any, num_microbatches: int, num_rollouts: int) -> dict[str, Any]:
    """The counts of the step that miles's `DataIterator` stands before."""
    from miles.backends.training_utils.parallel import get_parallel_state

    if get_parallel_state().indep_dp.size > 1:
        raise ValueError(
            "steps to be counted with independent data-parallel replicas: Megatron's groups end at a replica, so a "
            f"part of the step would be counted. {_NO_COUNTS_NEEDED}"
        )

    def masks_of_step() -> list[Tensor]:
        masks: list[Tensor] = iterator.rollout_data["loss_masks"]
        if iterator.micro_batch_indices is None:
            return masks[iterator.offset : iterator.offset + num_microbatches * iterator.micro_batch_size]
        microbatches = iterator.micro_batch_indices[iterator.offset : iterator.offset + num_microbatches]
        return [masks[i] for indices in microbatches for i in indices]

    rows = iterator.rollout_data.get("max_seq_lens")  # a rank pads all its rows alike
    return step_counts.count_masks(masks_of_step, num_rollouts, int(rows[0]) if rows else None)
