"""What the hooks of slime and miles must know of a whole step, counted in one collective round.

`slime.count_steps` with `slime.begin_step`, or `miles.count_steps`, see to it before a step's first micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_rl_loss.errors import check_count
from megatron_rl_loss.step.collectives import attempt
from megatron_rl_loss.step.counting import reduce_step_totals
from megatron_rl_loss.step.samples import Samples


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What a hook must know of the whole step, and four arguments do not tell. Counts are over all DP ranks.

    Attributes:
        step_tokens: sum of all mask entries, as they are before any rejection.
        num_samples: samples, fully masked ones included.
        num_masked_samples: samples without a mask entry above 0: the phantom tokens of their token count.
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


_this_step: StepCounts | None = None


def counts_of_this_step() -> StepCounts | None:
    """Of the step that is being trained; None where nobody has counted it."""
    return _this_step


def begin(counts: StepCounts | None) -> None:
    """Tell the hooks which step begins."""
    global _this_step
    _this_step = counts


def count_step(
    masks_of_step: Callable[[], list[Tensor]], global_batch_size: int, padded_length: int | None = None
) -> StepCounts:
    """The counts of a step from the masks this rank holds in it: a collective round over Megatron's groups.

    Raises:
        BadBatchError: on every rank, if one cannot count its samples.
    """
    from megatron.core import parallel_state

    totals = reduce_step_totals(
        attempt(lambda: [Samples(masks_of_step())]),
        dp_group=parallel_state.get_data_parallel_group(with_context_parallel=False),
        replica_groups=[
            parallel_state.get_context_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ],
    )
    tokens, num_samples, active = totals.step_tokens, totals.rollouts.all, totals.rollouts.active
    assert None not in (tokens, num_samples, active)  # counted, where samples have no ids
    return StepCounts(
        step_tokens=tokens,  # type: ignore[arg-type]
        num_samples=num_samples,  # type: ignore[arg-type]
        num_masked_samples=num_samples - active,  # type: ignore[operator]
        global_batch_size=global_batch_size,
        padded_length=padded_length,
    )
