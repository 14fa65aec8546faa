"""slime and miles: hooks for ``--custom-pg-loss-reducer-function-path``; the path alone carries mode and divisor.

    --custom-pg-loss-reducer-function-path megatron_rl_loss.frameworks.slime.constant_40960

Both call a hook for each micro-batch. After their scaling and Megatron's, the step's policy loss is the sum of what its
closure returned, over micro-batches and ranks, divided by G, their global batch size (rollouts of the step), or with
``calculate_per_token_loss`` by T' = sum_i max(M_i, 1), in which a fully masked sample is a phantom token. So a closure
returns a share of the sum of means (`sample_mean`), of sum / L (`constant`), or of the sum over tokens (`token_mean`).
Four arguments show neither the step nor the masks before rejection: `StepCounts` do. The layout is `ZigzagResponse`, as
in their `cp_utils.py`; all-gather context parallelism comes back to it before the loss.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_rl_loss.errors import check_cp, check_one_each
from megatron_rl_loss.frameworks import step_counts
from megatron_rl_loss.frameworks.step_counts import StepCounts, counts_of_this_step
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.weights import unit_weights
from megatron_rl_loss.reduction.sums import Reducer, WeightedSum
from megatron_rl_loss.step.layouts import IntList, ZigzagResponse
from megatron_rl_loss.step.masks import Floats, to_array
from megatron_rl_loss.step.samples import LocalTokens, Samples

__all__ = ["Hook", "StepCounts", "begin_step", "count_steps", "make_hook", "sample_mean", "token_mean"]

_HAVE_STEPS_COUNTED = (
    "have steps counted: under slime by --rollout-data-postprocess-path megatron_rl_loss.frameworks.slime.count_steps "
    "--custom-megatron-before-train-step-hook-path megatron_rl_loss.frameworks.slime.begin_step, under miles by "
    "--custom-megatron-init-path megatron_rl_loss.frameworks.miles.count_steps."
)
_HOOKS = (
    "there are ...slime.sample_mean, ...slime.token_mean and ...slime.constant_40960 (your divisor for 40960, a whole "
    "number of tokens above 0). Other modes' weights need more of the step than a hook's four arguments carry: fold "
    "them into the advantages (fold_into_advantages), multiply by the global batch size, and use ...slime.constant_1."
)


@dataclass(frozen=True, eq=False)
class Hook:
    """``hook(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> closure``; see `make_hook`."""

    aggregation: Aggregation
    cp: tuple[int, int] | None
    step_counts: Callable[[], StepCounts | None]

    @property
    def mode(self) -> str:
        return self.aggregation.mode.name

    def __repr__(self) -> str:
        divisor = self.aggregation.divisor
        return f"<slime and miles hook: {self.mode}{'' if divisor is None else f', divisor {divisor:g}'}>"

    def __call__(
        self,
        total_lengths: IntList,
        response_lengths: IntList,
        loss_masks: Sequence[Tensor],
        calculate_per_token_loss: bool = False,
        *,
        rollout_mask_sums: Sequence[Tensor] | Sequence[float] | Tensor | None = None,
    ) -> Reducer:
        """The reducer of one micro-batch, to be scaled by slime or miles.

        Args:
            total_lengths, response_lengths: tokens of each sample, with and without its prompt.
            loss_masks: masks over the whole response (never cut for a CP rank), one 1-D tensor per sample.
            calculate_per_token_loss: as Megatron's flag.
            rollout_mask_sums: mask sum of each sample's whole rollout, for `sample_mean` of rollouts that are split
                over samples. Neither framework passes it; your own loss may.

        Raises ValueError and TypeError for a mode that ``calculate_per_token_loss`` contradicts, a step that four
        arguments do not suffice for, masks and lengths that disagree.
        """
        if not isinstance(calculate_per_token_loss, bool):
            raise TypeError(
                f"calculate_per_token_loss is a {type(calculate_per_token_loss).__name__}: the fourth argument must be "
                "a bool. Pass the flag; denominators go by name, as rollout_mask_sums."
            )
        counts = self.step_counts()
        self._check_flag(calculate_per_token_loss, counts)
        padded = None if counts is None else counts.padded_length
        cp_rank, cp_size = self.cp or _context_parallel_place(padded is not None)
        rows = None if padded is None else [padded] * len(total_lengths)
        samples = Samples(loss_masks, layout=ZigzagResponse(total_lengths, response_lengths, rows))
        local = samples.local(cp_rank, cp_size)
        if self.mode == "sample_mean":
            weights = _weights_in_rollouts(local, counts, rollout_mask_sums)
        elif self.mode == "token_mean":
            weights = _weights_in_step(local, counts, calculate_per_token_loss)
        else:
            weights = unit_weights(local, [self.aggregation.divisor or 0] * len(samples))
        return WeightedSum(weights, local, self.aggregation)

    def _check_flag(self, per_token: bool, counts: StepCounts | None) -> None:
        if self.mode != "token_mean":
            if per_token:
                raise ValueError(
                    f"{self!r} with calculate_per_token_loss on: the sum would be divided by the step's tokens, not by "
                    "its rollouts. Drop --calculate-per-token-loss, or use ...slime.token_mean."
                )
        elif (per_token or counts is None) and _fsdp_of_miles() is not None:
            raise ValueError(
                f"{self!r} on miles's FSDP backend: it never divides by the step's tokens, and nothing counts them "
                "there. Use ...slime.sample_mean or ...slime.constant_40960 (your divisor), or --train-backend "
                "megatron."
            )
        elif not per_token and counts is None:
            raise ValueError(
                f"{self!r} with calculate_per_token_loss off: the sum would be divided by the step's rollouts, and the "
                f"hook does not know the step's tokens. Add --calculate-per-token-loss, or {_HAVE_STEPS_COUNTED}"
            )


def _weights_in_rollouts(
    local: LocalTokens,
    counts: StepCounts | None,
    rollout_mask_sums: Sequence[Tensor] | Sequence[float] | Tensor | None,
) -> Tensor:
    """``m / M`` of each token's rollout: slime and miles divide by the number of rollouts."""
    samples = local.samples
    if rollout_mask_sums is None:
        if counts is not None and counts.num_samples != counts.global_batch_size:
            raise ValueError(
                f"a step of {counts.num_samples} samples and {counts.global_batch_size} rollouts: four arguments do "
                "not tell which samples are parts of one rollout. Run without the hook: their own reducer averages "
                "whole rollouts by rollout_mask_sums."
            )
        return unit_weights(local)
    given = list(rollout_mask_sums)
    sizes: Floats = to_array(torch.stack(given) if given and isinstance(given[0], Tensor) else given)  # one copy
    check_one_each("rollout_mask_sums", len(sizes), "loss masks", len(samples), "Pass those of one micro-batch")
    for i in np.flatnonzero(~(sizes >= samples.mask_sums))[:1]:
        raise ValueError(
            f"sample {i} has {samples.mask_sums[i]:g} mask tokens, its rollout {sizes[i]:g}: a rollout has all its "
            "samples' tokens. Sum the masks of the whole step."
        )
    return unit_weights(local, sizes.tolist())


def _weights_in_step(local: LocalTokens, counts: StepCounts | None, per_token: bool) -> Tensor:
    """``m / T`` times what slime and miles divide by themselves: T' or G."""
    mask_sums = local.samples.mask_sums

    def refuse(found: npt.NDArray[np.bool_], rule: str) -> None:
        for i in np.flatnonzero(found)[:1]:
            raise ValueError(f"sample {i} has {mask_sums[i]:g} mask tokens: {rule}")

    if per_token:
        rule = "they count it as 1 token, in a sum over the step that the hook cannot correct. Use masks of 0 and 1."
        refuse((mask_sums > 0) & (mask_sums < 1), rule)
    if counts is None:
        refuse(
            mask_sums == 0,
            "they count it as 1 token if it was masked from the start, and as the tokens it had if rejection (TIS) "
            "emptied it; a hook sees only what is left. Leave samples without a token out of the batch; with "
            f"rejection, or if you cannot, {_HAVE_STEPS_COUNTED}",
        )
        return unit_weights(local, [1.0] * len(mask_sums))
    if (here := float(mask_sums.sum())) > counts.step_tokens * (1 + 1e-6):
        raise ValueError(
            f"a micro-batch of {here:g} active tokens, and a step whose step_tokens are {counts.step_tokens:g}: counts "
            "must be of the whole step. Count the masks of all ranks, as they are before any rejection."
        )
    divided_by = counts.step_tokens + counts.num_masked_samples if per_token else counts.global_batch_size
    size = counts.step_tokens / divided_by if divided_by else 0.0
    return unit_weights(local, [size] * len(mask_sums))


def make_hook(
    mode: str,
    *,
    divisor: float | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
    step_counts: Callable[[], StepCounts | None] | None = None,
) -> Hook:
    """A hook for a module of your own; `sample_mean`, `token_mean` and `constant_<L>` of this module are made by it.

    >>> dr_grpo = make_hook("constant", divisor=40960)

    Args:
        mode, divisor: ``sample_mean``, ``token_mean``, or ``constant`` with its L in tokens.
        cp_rank, cp_size: this rank's place in its context-parallel group; default: as Megatron says at each call.
        step_counts: returns the counts of the step that is being trained, or None; default: those that `count_steps` of
            this module or of `miles` made.

    Raises ValueError and TypeError for another mode, a divisor that is missing, unusable or without effect, half a CP
    place.
    """
    if mode not in ("sample_mean", "token_mean", "constant"):
        raise ValueError(f"a slime or miles hook for {getattr(mode, 'name', mode)}: {_HOOKS}")
    cp = None
    if cp_rank is not None and cp_size is not None:
        check_cp(cp_rank, cp_size)
        cp = (cp_rank, cp_size)
    elif (cp_rank, cp_size) != (None, None):
        raise ValueError(
            f"cp_rank={cp_rank!r}, cp_size={cp_size!r}: both or neither must be given. Leave both out to ask Megatron."
        )
    return Hook(resolve(mode, divisor=divisor), cp, step_counts or counts_of_this_step)


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


def count_steps(args: Namespace, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """Count each step of a rollout, for ``--rollout-data-postprocess-path`` of slime: one collective round per step.

    With `begin_step` it makes `token_mean` exact whatever is masked, and lets `sample_mean` refuse rollouts that are
    split over samples. Counts masks as they are before any rejection. Raises BadBatchError on every rank, if one cannot
    count its samples.
    """
    microbatches, masks = iter(rollout_data["micro_batch_indices"]), rollout_data["loss_masks"]
    args.megatron_rl_loss_steps = steps = {}
    sizes = zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True)
    for step_id, (num_microbatches, global_batch_size) in enumerate(sizes):
        mine = list(chain.from_iterable(islice(microbatches, num_microbatches)))
        counts = step_counts.count_masks(lambda mine=mine: [masks[i] for i in mine], global_batch_size)  # type: ignore[misc]
        steps[rollout_id, step_id] = counts


def begin_step(
    args: Namespace, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Tell the hooks which step begins, for ``--custom-megatron-before-train-step-hook-path``.

    A step that `count_steps` did not count has no counts: never those of an earlier one.
    """
    step_counts.begin(args, getattr(args, "megatron_rl_loss_steps", {}).get((rollout_id, step_id)))


def _fsdp_of_miles() -> Any:
    """The parallel state of miles's FSDP backend, which has no Megatron to ask; None elsewhere."""
    parallel = sys.modules.get("miles.backends.training_utils.parallel")
    state = getattr(parallel, "_parallel_state", None)
    return state if state is not None and "fsdp" in state.meshes else None


def _context_parallel_place(row_length_is_known: bool) -> tuple[int, int]:
    """(cp_rank, cp_size) by their parallel state; refuses padded rows of unknown length where they are cut."""
    if (fsdp := _fsdp_of_miles()) is not None:
        return fsdp.cp.rank, fsdp.cp.size
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "no parallel state in Megatron: the hook asks it for the context-parallel rank and size. Initialise it "
            "before, or give both: make_hook(..., cp_rank=..., cp_size=...)."
        )
    cp_size = parallel_state.get_context_parallel_world_size()
    if cp_size > 1 and not row_length_is_known:
        from megatron.training.global_vars import get_args

        qkv_format = getattr(get_args(), "qkv_format", "thd")
        if qkv_format != "thd":
            raise ValueError(
                f"qkv_format {qkv_format!r} with a context-parallel size of {cp_size}: rows are cut by their padded "
                "length, which the hook's four arguments do not carry. Use --qkv-format thd, or add "
                "--custom-megatron-init-path megatron_rl_loss.frameworks.miles.count_steps, which tells it."
            )
    return parallel_state.get_context_parallel_rank(), cp_size
