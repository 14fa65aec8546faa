"""The groups that a step is counted over, and what is refused or warned of before its first micro-batch."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl_loss.errors import BadBatchError, check_int
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.weights import missing_counts
from megatron_rl_loss.step.collectives import Group, rank_in, size_of, world_rank
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals

logger = logging.getLogger(__name__)

EmptyStep = Literal["warn", "error"]


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The process groups that a step is spread over.

    Attributes:
        dp_group, cp_group, replica_groups: as in `plan_step`.
    """

    dp_group: Group | None
    cp_group: Group | None
    replica_groups: Sequence[Group] = ()

    @property
    def replicas(self) -> list[Group]:
        """All groups whose ranks hold the same samples."""
        return [group for group in (self.cp_group, *self.replica_groups) if group is not None]

    @property
    def of_plan(self) -> dict[str, Any]:
        """The fields of a `Plan` that say where this rank is."""
        return {
            "cp_rank": rank_in(self.cp_group),
            "cp_size": size_of(self.cp_group),
            "dp_size": size_of(self.dp_group),
            "cp_group": self.cp_group,
            "dp_group": self.dp_group,
            "replica_groups": self.replica_groups,
        }


def check_samples(
    samples: Sequence[Samples] | None,
    num_microbatches: int | None,
    modes: LossModes,
    groups: StepGroups,
    term_masks: Sequence[str] = (),
) -> Sequence[Samples] | None:
    """The samples of a rank's micro-batches; refuses what the modes, the layouts or the schedule cannot use."""
    if num_microbatches is not None:
        check_int("num_microbatches", num_microbatches, 1, "Pass what the schedule is called with")
    if samples is None:
        if num_microbatches is None:
            raise ValueError(
                "neither samples nor num_microbatches: a pipeline stage that reads no data must say how many "
                "micro-batches there are. Pass num_microbatches."
            )
        return None
    if isinstance(samples, Samples) or not isinstance(samples, Sequence):
        raise TypeError(
            f"samples is a {type(samples).__name__}: it must be a list with one Samples for each micro-batch. Pass "
            "[Samples(...), ...]."
        )
    if num_microbatches not in (None, len(samples)):
        raise ValueError(
            f"{len(samples)} Samples for {num_microbatches} micro-batches: there must be one for each. Pass empty ones "
            "for filler micro-batches."
        )
    if not samples:
        raise ValueError(
            "an empty list of samples: every rank has at least one micro-batch. Pass an empty Samples for a rank "
            "without data."
        )
    for number, one in enumerate(samples):
        if not isinstance(one, Samples):
            raise TypeError(
                f"the samples of micro-batch {number} are a {type(one).__name__}: they must be "
                "megatron_rl_loss.Samples. Wrap the masks in Samples."
            )
        if modes.needs_prompt_ids and one.prompt_ids is None and len(one):
            raise ValueError(
                f"loss aggregation {modes.by_prompt} and samples without prompt_ids: it averages inside each "
                "prompt group. Give the Samples prompt_ids."
            )
        if one.cp_group is not None and size_of(groups.cp_group) > 1:
            raise ValueError(
                f"the samples of micro-batch {number} with a cp_group of their own, in a plan with a cp_group of "
                f"{size_of(groups.cp_group)} ranks: these would each count them. Pass the group over DP x CP as "
                "dp_group, and no cp_group to the plan."
            )
        one.local(*one.place_in(groups.cp_group))  # raises if the layout cannot be cut so
        for name in term_masks:
            one.with_mask(name)  # raises if there is none of that name
    return samples


def check_totals(
    totals: object,
    samples: Sequence[Samples] | None,
    modes: LossModes,
    term_masks: Sequence[str],
    *,
    per_token: bool,
    empty_step: EmptyStep,
) -> StepTotals:
    """Totals that a user stated; refuses those that miss what a mode, the carrier or an empty step will need."""
    if not isinstance(totals, StepTotals):
        raise TypeError(
            f"totals is {totals!r}: the denominators are those of the whole step, and never guessed from a "
            "micro-batch. Pass StepTotals.from_loss_masks(...) of all the step's masks."
        )
    if samples is None:
        return totals
    with_rollout_ids = any(one.rollout_ids is not None for one in samples)
    missing = missing_counts(modes.policy, totals, with_rollout_ids=with_rollout_ids)
    for aggregation in modes.terms.values():
        for name in (None, *term_masks):
            missing += missing_counts(aggregation, totals.with_mask(name), with_rollout_ids=with_rollout_ids)
    user = modes.policy.describe()
    if totals.step_active_tokens is None and (per_token or empty_step == "error"):
        missing = [*missing, "step_active_tokens"]
        user = "per-token loss" if per_token else "empty step handling 'error'"
    if missing:
        raise ValueError(
            f"totals without {', '.join(missing)}: {user} needs it. Give these counts of the whole step too."
        )
    for one in samples:
        if one.cp_group is not None and not totals.dynamic_cp:
            raise ValueError(
                "totals that say nothing of Samples with a cp_group of their own: ranks without such samples would "
                "scale as in other steps. Give all ranks StepTotals(..., dynamic_cp=True)."
            )
        one.check_masks()
        totals.check_covers(one)
    return totals


def look_at_prompts(totals: StepTotals) -> None:
    """Warn of prompt ids that collide or that group nothing."""
    prompts, rollouts = totals.prompts.all, totals.rollouts.all
    if prompts and rollouts and rollouts > 1 and prompts in (1, rollouts) and world_rank() == 0:
        warnings.warn(
            "every prompt group of the step has one rollout: a mean over groups is then one over rollouts. Look at the "
            "prompt ids, which must be equal for the responses to one prompt."
            if prompts == rollouts
            else "all rollouts of the step are one prompt group: ids that are counted anew in each micro-batch, or on "
            "each rank, collide. Look at the prompt ids, which must tell the prompts of the whole step apart.",
            stacklevel=4,
        )


def check_tokens(totals: StepTotals, *, per_token: bool, empty_step: EmptyStep) -> None:
    """Warn of a step without an active token, or refuse it; refuse more tokens than Megatron can count."""
    tokens = totals.step_tokens if totals.step_active_tokens is None else totals.step_active_tokens
    if tokens == 0:
        if empty_step == "error":
            raise BadBatchError(
                "a step without one active token: empty_step, or --loss-aggregation-empty-step, asks to stop there. "
                "Look at the masks of the data."
            )
        if world_rank() == 0:
            logger.warning("a step without one active token: its policy gradient is zero. Look at the masks.")
    if per_token and tokens is not None and tokens >= 2**31:
        raise BadBatchError(
            f"{tokens} active tokens with per-token loss: Megatron sums token counts as int32. Use smaller steps."
        )
