"""Validation of a step before its first micro-batch: errors and warnings."""

import logging
from collections.abc import Sequence, Set
from typing import Literal

import numpy as np

from megatron_rl_loss.errors import BadBatchError, check_int
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.step.collectives import StepGroups, size_of, warn_on_one_rank, world_rank
from megatron_rl_loss.step.samples import Samples, read_masks
from megatron_rl_loss.step.totals import StepTotals

logger = logging.getLogger(__name__)

EmptyStep = Literal["warn", "error"]


def check_samples(
    samples: Sequence[Samples] | None,
    num_microbatches: int | None,
    modes: LossModes,
    groups: StepGroups,
    term_masks: Sequence[str],
) -> Sequence[Samples] | None:
    """The samples of a rank's micro-batches, validated for the modes, the layouts and the schedule."""
    if num_microbatches is not None:
        check_int("num_microbatches", num_microbatches, 1, "Pass what the schedule is called with")
    if samples is None:
        if num_microbatches is None:
            raise ValueError(
                "neither samples nor num_microbatches: a pipeline stage that reads no data must give the number of "
                "micro-batches. Pass num_microbatches."
            )
        return None
    if isinstance(samples, Samples) or not isinstance(samples, Sequence):
        raise TypeError(
            f"samples is a {type(samples).__name__}: it must be a list with one Samples for each micro-batch. Pass "
            "[Samples(...), ...]."
        )
    if num_microbatches not in (None, len(samples)) or not samples:
        raise ValueError(
            f"{len(samples)} Samples for {num_microbatches or 'one or more'} micro-batches: each micro-batch must have "
            "one Samples. Pass Samples([]) for filler micro-batches, and for a rank without data."
        )
    for number, microbatch in enumerate(samples):
        if not isinstance(microbatch, Samples):
            raise TypeError(
                f"the samples of micro-batch {number} are a {type(microbatch).__name__}: they must be "
                "megatron_rl_loss.Samples. Wrap the masks in Samples."
            )
        if microbatch.cp_group is not None and size_of(groups.cp_group) > 1:
            raise ValueError(
                f"the samples of micro-batch {number} with a cp_group of their own, in a plan with a cp_group of "
                f"{size_of(groups.cp_group)} ranks: each of these ranks would count the samples. Pass the group over "
                "DP x CP as dp_group, and no cp_group to the plan."
            )
        microbatch.local(*microbatch.place_in(groups.cp_group))  # raises if the layout cannot be cut so
    read_masks(samples)
    for microbatch in samples:
        modes.rehearse(microbatch, term_masks)
    return samples


def check_ids(totals: StepTotals, asked: Set[str], filled: Sequence[Samples]) -> None:
    """Warn, on the first rank, where ids that a mode uses collide, and where every prompt group has one rollout."""
    if world_rank() != 0:
        return
    rollouts, samples = (totals.units[key].number["all"] for key in ("rollout", "sample"))
    for key in sorted(asked & {"rollout", "session"}) if len(filled) > 1 else ():
        of_microbatches = [set(microbatch.ids.get(key, np.arange(0)).tolist()) for microbatch in filled]
        if of_microbatches[0] and all(ids == of_microbatches[0] for ids in of_microbatches):
            warn_on_one_rank(
                f"all {len(filled)} micro-batches have the same {key} ids, so the step has {len(of_microbatches[0])} "
                f"{key}s on this rank: ids that start again in each micro-batch collide. Make {key} ids unique in the "
                "whole step."
            )
    for key in sorted(asked & {"rollout", "session", "turn"}) if totals.dp_size > 1 else ():
        of_each = [microbatch.parts[key].ids for microbatch in filled if key in microbatch.parts]
        ids, here = np.unique(np.concatenate([np.zeros(0, np.int64), *of_each]), return_counts=True)
        if len(ids) > 1 and (totals.units[key].at("all", ids, f"{key} id") > here).all():
            warn_on_one_rank(
                f"each of the {len(ids)} {key}s of this rank has samples on other ranks too: {key} ids that start "
                f"again on each rank collide. Make {key} ids unique in the whole step."
            )
    if rollouts == 1 < samples and "rollout" in asked:
        warn_on_one_rank(
            f"all {samples} samples of the step have one rollout id, so the step has 1 rollout: rollout ids say which "
            "samples are parts of one rollout. Give each rollout its own id, or leave rollout_ids out."
        )
    for key in sorted(asked - {"step", "sample", "rollout"}) if rollouts > 1 else ():
        units = totals.units[key]
        if units.counts["all"].max(initial=0) == samples:  # ids per token may name no unit at all
            warn_on_one_rank(
                f"one {key} has tokens of all {samples} samples of the step: {key} ids that start again in each "
                f"sample, micro-batch or rank collide. Make {key} ids unique in the whole step."
            )
        elif key == "prompt" and units.number["all"] == rollouts:
            warn_on_one_rank(
                "every prompt group of the step has one rollout: a mean over prompts is then a mean over rollouts. "
                "Check the prompt ids: all responses to a prompt must share its id."
            )
    prompts = totals.units["prompt"].number["all"] if "prompt" in totals.units else None
    if prompts == rollouts < samples and "rollout" in asked:
        warn_on_one_rank(
            f"each of the {rollouts} rollouts of the step is a whole prompt group, of {samples} samples in all: a mean "
            "over rollouts is then a mean over prompts. Check the rollout ids: responses to a prompt are rollouts of "
            "their own."
        )


def check_active_tokens(totals: StepTotals, *, per_token_loss: bool, empty_step: EmptyStep) -> None:
    """Warn of a step without an active token, or raise; raise for more tokens than Megatron can count."""
    tokens = totals.step_active_tokens
    if tokens == 0:
        if empty_step == "error":
            raise BadBatchError(
                "a step without one active token: empty_step='error', or --loss-aggregation-empty-step, aborts it. "
                "Check the loss masks."
            )
        if world_rank() == 0:
            logger.warning("a step without one active token: its policy gradient is zero. Check the loss masks.")
    if per_token_loss and tokens >= 2**31:
        raise BadBatchError(
            f"{tokens} active tokens with per-token loss: Megatron sums token counts as int32. Use smaller steps."
        )
