"""slime and miles: hooks for ``--custom-pg-loss-reducer-function-path``; the path alone carries mode and divisor.

    --custom-pg-loss-reducer-function-path megatron_rl_loss.frameworks.slime.constant_40960

Both call a hook for each micro-batch. After their scaling and Megatron's, the step's policy loss is the sum of what its
closure returned, over micro-batches and ranks, divided by G, the step's rollouts, or with ``calculate_per_token_loss``
by the step's tokens, in which a fully masked sample is a phantom token unless `count_steps` is there. So a closure
returns a share of the sum of means (`sample_mean`), of sum / L (`constant`), or of the sum over tokens (`token_mean`).
The layout is `ZigzagResponse`, as in their `cp_utils.py`; all-gather context parallelism comes back to it before the
loss.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl_loss.frameworks.replacing import announce
from megatron_rl_loss.frameworks.step_counts import StepCounts, count_steps, counts_of_this_step, running_engine
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.weights import unit_weights
from megatron_rl_loss.reduction.sums import Reducer, WeightedSum
from megatron_rl_loss.step.collectives import world_rank
from megatron_rl_loss.step.layouts import IntList, ZigzagResponse
from megatron_rl_loss.step.samples import Samples

__all__ = ["Hook", "count_steps", "make_hook", "sample_mean", "token_mean"]

_COUNT_STEPS = "add --custom-megatron-init-path megatron_rl_loss.frameworks.slime.count_steps"
_HOOKS = (
    "there are ...slime.sample_mean, ...slime.token_mean and ...slime.constant_40960 (your divisor for 40960, a whole "
    "number of tokens above 0). Other modes' weights need more of the step than a hook's four arguments carry: fold "
    "them into the advantages (fold_into_advantages), multiply by the global batch size, and use ...slime.constant_1."
)


@dataclass(frozen=True, eq=False)
class Hook:
    """``hook(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> closure``; see `make_hook`."""

    aggregation: Aggregation

    @property
    def mode(self) -> str:
        return self.aggregation.mode.name

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.aggregation.divisor is None else f' {self.aggregation.divisor:.15g}'}"

    def __call__(
        self,
        total_lengths: IntList,
        response_lengths: IntList,
        loss_masks: Sequence[Tensor],
        calculate_per_token_loss: bool = False,
    ) -> Reducer:
        """The reducer of one micro-batch, to be scaled by slime or miles.

        Args:
            total_lengths, response_lengths: tokens of each sample, with and without its prompt.
            loss_masks: masks over the whole response (never cut for a CP rank), one 1-D tensor per sample.
            calculate_per_token_loss: as Megatron's flag.

        Raises ValueError and TypeError for a mode that ``calculate_per_token_loss`` contradicts, a step that four
        arguments do not suffice for, masks and lengths that disagree.
        """
        if not isinstance(calculate_per_token_loss, bool):
            raise TypeError(
                f"calculate_per_token_loss is a {type(calculate_per_token_loss).__name__}: the fourth argument must be "
                "a bool. Pass the flag."
            )
        counts = counts_of_this_step()
        self._check_flag(calculate_per_token_loss, counts)
        padded = None if counts is None else counts.padded_length
        cp_rank, cp_size, is_first = _place(padded is not None)
        rows = None if padded is None else [padded] * len(total_lengths)
        samples = Samples(loss_masks, layout=ZigzagResponse(total_lengths, response_lengths, rows))
        local = samples.local(cp_rank, cp_size)
        divisor = self.aggregation.divisor
        if self.mode == "token_mean":
            divisor = _token_divisor(samples, counts, calculate_per_token_loss)
        elif self.mode == "sample_mean" and counts is not None and counts.num_samples != counts.num_rollouts:
            raise ValueError(
                f"a step of {counts.num_samples} samples and {counts.num_rollouts} rollouts: four arguments do not "
                "tell which samples are parts of one rollout. Run without the hook: their own reducer averages whole "
                "rollouts by rollout_mask_sums."
            )
        weights = unit_weights(local, None if divisor is None else [divisor] * len(samples))
        engine, theirs = running_engine(), "token" if calculate_per_token_loss else "sample"
        announce(f"{engine}: policy loss by {self}; KL and entropy keep {engine}'s own {theirs} mean", is_first)
        return WeightedSum(weights, local, self.aggregation)

    def _check_flag(self, per_token: bool, counts: StepCounts | None) -> None:
        if self.mode != "token_mean":
            if per_token:
                raise ValueError(
                    f"{self} with calculate_per_token_loss on: the sum would be divided by the step's tokens, not by "
                    "its rollouts. Drop --calculate-per-token-loss, or use ...slime.token_mean."
                )
        elif _fsdp_of_miles() is not None:
            raise ValueError(
                f"{self} on miles's FSDP backend: it never divides by the step's tokens, and nothing counts them "
                "there. Use ...slime.sample_mean or ...slime.constant_40960 (your divisor), or --train-backend "
                "megatron."
            )
        elif not per_token and counts is None:
            raise ValueError(
                f"{self} with calculate_per_token_loss off: the sum would be divided by the step's rollouts, and the "
                f"hook does not know the step's tokens. Add --calculate-per-token-loss, or {_COUNT_STEPS}."
            )


def _token_divisor(samples: Samples, counts: StepCounts | None, per_token: bool) -> float:
    """The factor to the mask that makes a token mean, where slime or miles divide by tokens or by rollouts."""
    if counts is None:
        for i in np.flatnonzero(samples.mask_sums < 1)[:1]:
            raise ValueError(
                f"sample {i} has {samples.mask_sums[i]:g} mask tokens: they may count it as 1 token; a hook sees only "
                "what rejection (TIS) left. Leave samples without a token out of the batch; with rejection, or if you "
                f"cannot, {_COUNT_STEPS}."
            )
        return 1.0
    return 1.0 if per_token else counts.step_tokens / max(counts.num_rollouts, 1)


def make_hook(mode: str, *, divisor: float | None = None) -> Hook:
    """A hook for a module of your own; `sample_mean`, `token_mean` and `constant_<L>` of this module are made by it.

    >>> constant_1_5 = make_hook("constant", divisor=1.5)

    Raises ValueError and TypeError for another mode, a divisor that is missing, unusable or without effect.
    """
    if mode not in ("sample_mean", "token_mean", "constant"):
        raise ValueError(f"a slime or miles hook for {getattr(mode, 'name', mode)}: {_HOOKS}")
    return Hook(resolve(mode, divisor=divisor))


sample_mean = make_hook("sample_mean")
token_mean = make_hook("token_mean")


def __getattr__(name: str) -> Hook:
    """`constant_<L>`, for any L; an AttributeError with the way out for every other name."""
    if match := re.fullmatch(r"constant_([1-9]\d*)", name):
        return _constant(int(match[1]))
    raise AttributeError(f"megatron_rl_loss.frameworks.slime.{name}: {_HOOKS}")


@cache
def _constant(divisor: int) -> Hook:
    return make_hook("constant", divisor=divisor)


def _fsdp_of_miles() -> Any:
    """The parallel state of miles's FSDP backend, which has no Megatron to ask; None elsewhere."""
    parallel = sys.modules.get("miles.backends.training_utils.parallel")
    state = getattr(parallel, "_parallel_state", None)
    return state if state is not None and "fsdp" in state.meshes else None


def _place(row_length_is_known: bool) -> tuple[int, int, bool]:
    """(cp_rank, cp_size, first of the ranks with a loss); refuses padded rows of unknown length where they are cut."""
    if (fsdp := _fsdp_of_miles()) is not None:
        return fsdp.cp.rank, fsdp.cp.size, world_rank() == 0
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        raise ValueError(
            "no parallel state in Megatron: the hook asks it for the context-parallel rank and size. Initialise it "
            "before."
        )
    cp_size = state.get_context_parallel_world_size()
    if cp_size > 1 and not row_length_is_known:
        from megatron.training.global_vars import get_args

        qkv_format = getattr(get_args(), "qkv_format", "thd")
        if qkv_format != "thd":
            raise ValueError(
                f"qkv_format {qkv_format!r} with a context-parallel size of {cp_size}: rows are cut by their padded "
                f"length, which the hook's four arguments do not carry. Use --qkv-format thd, or {_COUNT_STEPS}, "
                "which tells it."
            )
    is_first = state.get_data_parallel_rank(with_context_parallel=True) == state.get_tensor_model_parallel_rank() == 0
    return state.get_context_parallel_rank(), cp_size, is_first
