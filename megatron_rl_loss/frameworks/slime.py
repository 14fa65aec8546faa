"""slime and miles: hooks for ``--custom-pg-loss-reducer-function-path``; the path alone carries mode and divisor.

    --custom-pg-loss-reducer-function-path megatron_rl_loss.frameworks.slime.constant_40960

Both frameworks call the hook with four arguments for every micro-batch and scale what its closure returns themselves.
After their scaling and Megatron's, the step's policy loss is (sums over every micro-batch, CP and DP rank)

| ``calculate_per_token_loss`` | step loss                     | so the closure returns a share of                |
|------------------------------|-------------------------------|--------------------------------------------------|
| False                        | sum of returned values / G    | `sample_mean`: sum of means; `constant`: sum / L |
| True                         | sum of returned values / T'   | `token_mean`: sum over tokens                    |

with G their global batch size (rollouts of the step) and T' = sum_i max(M_i, 1): a fully masked sample adds a phantom
token to T'. Four arguments cannot show the step, nor what masks were before rejection, so `token_mean` refuses a sample
without a token, unless `StepCounts` say how many the step had: `count_steps` and `begin_step` see to it under slime,
`megatron_rl_loss.frameworks.miles.count_steps` under miles.

The layout under context parallelism is `ZigzagResponse`, as in their `cp_utils.py`; all-gather context parallelism of
both comes back to it before the loss. miles's padded rows (``qkv_format bshd``) need their length from `StepCounts`.
miles's FSDP backend is asked for its own place.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from megatron_rl_loss.errors import check_choice, check_cp, check_one_each, require
from megatron_rl_loss.frameworks import step_counts
from megatron_rl_loss.frameworks.step_counts import StepCounts, counts_of_this_step
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import check_no_declared_sums
from megatron_rl_loss.reduction.sums import Reducer, reducer_of
from megatron_rl_loss.step.layouts import IntList, ZigzagResponse
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals, UnitCounts

_MODES = ("sample_mean", "token_mean", "constant")


class Hook:
    """``hook(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> closure``; see `make_hook`."""

    def __init__(
        self,
        aggregation: Aggregation,
        cp: tuple[int, int] | None,
        step_counts: Callable[[], StepCounts | None],
    ) -> None:
        self.aggregation = aggregation
        self.mode = aggregation.mode.name
        self._cp = cp
        self._step_counts = step_counts

    def __repr__(self) -> str:
        return f"<slime and miles hook: {self.mode}{self._divisor}>"

    @property
    def _divisor(self) -> str:
        return "" if self.aggregation.divisor is None else f", divisor {self.aggregation.divisor:g}"

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
            loss_masks: masks over the whole response (never cut for a CP rank), one 1-D tensor a sample.
            calculate_per_token_loss: as Megatron's flag.
            rollout_mask_sums: mask sum of each sample's whole rollout, as in their batch of that name; for
                `sample_mean` of rollouts that are split over samples. Neither framework passes it; your own loss may.

        Raises:
            ValueError, TypeError: a mode that ``calculate_per_token_loss`` contradicts, a step that four arguments do
                not suffice for, masks and lengths that disagree.
        """
        if not isinstance(calculate_per_token_loss, bool):
            raise TypeError(
                f"calculate_per_token_loss is a {type(calculate_per_token_loss).__name__}: the fourth argument must be "
                "a bool. Pass the flag; denominators go by name, as rollout_mask_sums."
            )
        counts = self._step_counts()
        self._check_flag(calculate_per_token_loss, counts)
        padded = None if counts is None else counts.padded_length
        cp_rank, cp_size = _context_parallel_place(padded is not None) if self._cp is None else self._cp
        if self.mode != "sample_mean":
            rollout_mask_sums = None  # has no part in the other modes
        samples = Samples(
            loss_masks,
            layout=ZigzagResponse(
                total_lengths, response_lengths, None if padded is None else [padded] * len(total_lengths)
            ),
            rollout_ids=None if rollout_mask_sums is None else range(len(loss_masks)),
        )
        totals = self._totals(samples, calculate_per_token_loss, counts, rollout_mask_sums)
        samples.check_masks()
        return reducer_of(self.aggregation, samples.local(cp_rank, cp_size), totals)

    def _check_flag(self, per_token: bool, counts: StepCounts | None) -> None:
        if self.mode != "token_mean" and per_token:
            raise ValueError(
                f"{self!r} with calculate_per_token_loss on: the sum would be divided by the step's tokens, not by its "
                "rollouts. Drop --calculate-per-token-loss, or use ...slime.token_mean."
            )
        if self.mode == "token_mean" and (per_token or counts is None) and _fsdp_of_miles() is not None:
            raise ValueError(
                f"{self!r} on miles's FSDP backend: it never divides by the step's tokens, nor has it a place where a "
                "step could be counted. Use ...slime.sample_mean or ...slime.constant_40960 (your divisor), or "
                "--train-backend megatron."
            )
        if self.mode == "token_mean" and not per_token and counts is None:
            raise ValueError(
                f"{self!r} with calculate_per_token_loss off: the sum would be divided by the step's rollouts, and the "
                "hook does not know the step's tokens. Add --calculate-per-token-loss, or have steps counted: under "
                "slime by --rollout-data-postprocess-path megatron_rl_loss.frameworks.slime.count_steps "
                "--custom-megatron-before-train-step-hook-path megatron_rl_loss.frameworks.slime.begin_step, under "
                "miles by --custom-megatron-init-path megatron_rl_loss.frameworks.miles.count_steps."
            )

    def _totals(
        self,
        samples: Samples,
        per_token: bool,
        counts: StepCounts | None,
        rollout_mask_sums: Sequence[Tensor] | Sequence[float] | Tensor | None,
    ) -> StepTotals:
        """Totals whose denominators leave out what slime and miles divide by themselves."""
        if self.mode == "token_mean":
            return StepTotals(step_tokens=_tokens_to_divide_by(samples, per_token, counts))
        if rollout_mask_sums is not None:
            return StepTotals(rollouts=UnitCounts(all=1, tokens=_by_sample(samples, rollout_mask_sums)))
        # Sums over a constant need no care: a rollout's is that of its samples.
        if self.mode == "sample_mean" and counts is not None and counts.num_samples != counts.global_batch_size:
            raise ValueError(
                f"a step of {counts.num_samples} samples and {counts.global_batch_size} rollouts: four arguments do "
                "not tell which samples are parts of one rollout. Run without the hook: their own reducer averages "
                "whole rollouts by rollout_mask_sums."
            )
        return StepTotals(rollouts=UnitCounts(all=1))


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
        mode: ``sample_mean``, ``token_mean`` or ``constant``.
        divisor: L of ``constant``, in tokens.
        cp_rank, cp_size: this rank's place in its context-parallel group; default: Megatron's parallel state, read at
            every call.
        step_counts: returns the counts of the step that is being trained, or None; default: those that `count_steps` of
            this module or of `miles` made.

    Raises:
        ValueError, TypeError: ``prompt_mean``, a mode that declares sums over the step, or an unknown mode, a divisor
            that is missing, unusable or without effect, half a CP place.
    """
    if mode == "prompt_mean":
        raise ValueError(
            "a slime or miles hook for prompt_mean: its weights need the prompt of every sample, which the hook's four "
            "arguments do not carry. Fold its weights into the advantages (fold_into_advantages), multiply them by the "
            "global batch size, and use ...slime.constant_1."
        )
    check_no_declared_sums(mode, "slime or miles")
    check_choice("slime or miles hook", mode, _MODES)
    aggregation = resolve(mode, divisor=divisor)
    if (cp_rank is None) != (cp_size is None):
        raise ValueError(
            f"cp_rank={cp_rank!r}, cp_size={cp_size!r}: both or neither must be given. Leave both out to ask Megatron."
        )
    cp = None
    if cp_rank is not None and cp_size is not None:
        check_cp(cp_rank, cp_size)
        cp = (cp_rank, cp_size)
    return Hook(aggregation, cp, step_counts or counts_of_this_step)


def __getattr__(name: str) -> Hook:
    """`constant_<L>`, for any L; an AttributeError with the way out for every other name."""
    if found := re.fullmatch(r"constant_([1-9]\d*)", name):
        return _constant(int(found[1]))
    given = f"megatron_rl_loss.frameworks.slime.{name}"
    if name == "prompt_mean":
        raise AttributeError(
            f"{given}: its weights need the prompt of every sample, which the hook's four arguments do not carry. Fold "
            "its weights into the advantages (fold_into_advantages), multiply them by the global batch size, and use "
            "...slime.constant_1."
        )
    if name.startswith("constant"):
        raise AttributeError(
            f"{given}: the divisor is part of the name, a whole number of tokens above 0. Write "
            "...slime.constant_40960 (your divisor for 40960)."
        )
    raise AttributeError(
        f"{given}: there is no such hook. Write ...slime.sample_mean, ...slime.token_mean or ...slime.constant_40960 "
        "(your divisor for 40960)."
    )


@cache
def _constant(divisor: int) -> Hook:
    return make_hook("constant", divisor=divisor)


# --- what four arguments do not tell: the step

_counted: dict[tuple[int, int], StepCounts] = {}


def count_steps(args: Namespace, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """Count every step of a rollout, for ``--rollout-data-postprocess-path`` of slime: a collective round a step.

    With `begin_step` it makes `token_mean` exact whatever is masked, with or without ``calculate_per_token_loss``, and
    lets `sample_mean` refuse rollouts that are split over samples. Counts masks as they are before any rejection.

    Raises:
        BadBatchError: on every rank, if one cannot count its samples.
    """
    _counted.clear()
    begun = 0
    microbatches, masks = rollout_data["micro_batch_indices"], rollout_data["loss_masks"]
    for step_id, (num_microbatches, global_batch_size) in enumerate(
        zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True)
    ):
        chosen = [i for indices in microbatches[begun : begun + num_microbatches] for i in indices]
        begun += num_microbatches
        _counted[rollout_id, step_id] = step_counts.count_step(
            lambda chosen=chosen: [masks[i] for i in chosen],  # type: ignore[misc]
            global_batch_size,
        )


def begin_step(
    args: Namespace, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Tell the hooks which step begins, for ``--custom-megatron-before-train-step-hook-path``.

    A step that `count_steps` did not count has no counts: never those of an earlier one.
    """
    step_counts.begin(_counted.get((rollout_id, step_id)))


def _tokens_to_divide_by(samples: Samples, per_token: bool, counts: StepCounts | None) -> float:
    """What is left to divide a token sum by, so that the step's is the sum / step_tokens after their scaling."""
    if per_token:
        mask_sums = samples.mask_sums
        light, masked = (mask_sums > 0) & (mask_sums < 1), mask_sums == 0
        require(
            ~light.any(),
            lambda: _first_of(light, mask_sums),
            "they count it as 1 token, in a sum over the step that the hook cannot correct. Use masks of 0 and 1.",
        )
        if counts is None:
            require(~masked.any(), lambda: _first_of(masked, mask_sums), _PHANTOM_TOKEN)
    if counts is None:
        return 1.0
    divided_by = counts.step_tokens + counts.num_masked_samples if per_token else counts.global_batch_size
    return counts.step_tokens / divided_by if divided_by else 0.0


_PHANTOM_TOKEN = (
    "they count it as 1 token if it was masked from the start, and as the tokens it had if rejection (TIS) emptied it; "
    "a hook sees only what is left, and cannot correct their sum over the step. Leave samples without a token out of "
    "the batch; with rejection, or if you cannot, have steps counted: under slime by --rollout-data-postprocess-path "
    "megatron_rl_loss.frameworks.slime.count_steps --custom-megatron-before-train-step-hook-path "
    "megatron_rl_loss.frameworks.slime.begin_step, under miles by --custom-megatron-init-path "
    "megatron_rl_loss.frameworks.miles.count_steps."
)


def _first_of(found: Tensor, mask_sums: Tensor) -> str:
    i = int(found.nonzero()[0])
    return f"sample {i} has {float(mask_sums[i]):g} mask tokens"


def _by_sample(
    samples: Samples, rollout_mask_sums: Sequence[Tensor] | Sequence[float] | Tensor
) -> dict[int | str, float]:
    sums = [float(value) for value in rollout_mask_sums]
    check_one_each("rollout_mask_sums", len(sums), "loss masks", len(samples), "Pass those of one micro-batch")
    for i, (of_rollout, of_sample) in enumerate(zip(sums, samples.mask_sums.tolist(), strict=True)):
        if not of_rollout >= of_sample:
            raise ValueError(
                f"sample {i} has {of_sample:g} mask tokens, its rollout {of_rollout:g}: a rollout has all its samples' "
                "tokens. Sum the masks of the whole step."
            )
    return dict(enumerate(sums))


# --- where this rank is


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
                "length, which the hook's four arguments do not carry. Add --custom-megatron-init-path "
                "megatron_rl_loss.frameworks.miles.count_steps, which tells it; or use --qkv-format thd."
            )
    return parallel_state.get_context_parallel_rank(), cp_size


sample_mean = make_hook("sample_mean")
token_mean = make_hook("token_mean")
