"""Facts of a whole step that slime's and miles's hooks need, in the `args` of the launch.

A hook's four arguments do not tell the step, and no other object reaches both a hook and what runs before the step.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_rl_loss.errors import check_count
from megatron_rl_loss.step.collectives import StepGroups, attempt
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import count_step


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Counts of the whole step, over all DP ranks, for a hook. Raises ValueError for what is no count.

    Attributes:
        step_tokens: sum of all mask entries, as they are before any rejection.
        num_samples, num_masked_samples: samples, and those without a mask entry above 0, the phantom tokens.
        global_batch_size: what their loss function divides by: the step's rollouts.
        padded_length: tokens of a row of this rank, where rows are padded (``qkv_format bshd``).
    """

    step_tokens: float
    num_samples: int
    num_masked_samples: int
    global_batch_size: int
    padded_length: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "padded_length" or value is not None:
                check_count(name, value)


def begin(args: Namespace, counts: Mapping[str, Any] | None) -> None:
    """Tell the hooks of this launch which step begins: the fields of its `StepCounts`, or None.

    Plain numbers, since Megatron saves `args` in checkpoints.
    """
    args.megatron_rl_loss_step = counts


def counts_of_this_step() -> StepCounts | None:
    """The counts of the step that is being trained; None where nobody counted it."""
    global_vars = sys.modules.get("megatron.training.global_vars")  # miles's FSDP backend starts no Megatron
    counts = getattr(getattr(global_vars, "_GLOBAL_ARGS", None), "megatron_rl_loss_step", None)
    return counts and StepCounts(**counts)


def count_masks(
    masks_of_step: Callable[[], list[Tensor]], global_batch_size: int, padded_length: int | None = None
) -> dict[str, Any]:
    """The fields of a step's `StepCounts`, from the masks this rank holds: a collective round over Megatron's groups.

    Raises BadBatchError on every rank, if one cannot count its samples.
    """
    from megatron.core import parallel_state

    groups = StepGroups(
        parallel_state.get_data_parallel_group(with_context_parallel=False),
        parallel_state.get_context_parallel_group(),
        [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()],
    )
    totals = count_step(attempt(lambda: [Samples(masks_of_step())]), groups)
    num_samples = totals.units["rollout"].all or 0
    return {
        "step_tokens": totals.step_tokens or 0.0,
        "num_samples": num_samples,
        "num_masked_samples": num_samples - (totals.units["rollout"].active or 0),
        "global_batch_size": global_batch_size,
        "padded_length": padded_length,
    }
