"""What an engine was told about a step, or says about it, against what came: group sizes, counts of its data."""

import math
from typing import Any, NamedTuple

import numpy as np

from megatron_rl_loss.core.aggregation import Aggregation, rehearse
from megatron_rl_loss.core.collectives import attempt
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.errors import check_int
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.proof.difference import Compared


class Misgrouped(NamedTuple):
    """Findings on prompt ids: `faults` cannot be right; of `doubts` a sound step may be the reason.

    `assumptions` are of groups of which nobody said what they should be.
    """

    faults: list[str]
    doubts: list[str]
    assumptions: list[str]


class Promises(NamedTuple):
    """What an engine or a script said about its step; the proof compares it with what came.

    Attributes:
        group_size: number of samples of each prompt that the engine was told to generate, if known.
        is_group_size_sure: larger groups are a fault: no prompt comes twice.
        group_remedy: the remedy for impossible groups, for the author of the ids.
        data: mask tokens and samples of the step's data, if known: losses of others are a fault.
        ask_size: text that asks for the group size where it is unknown.
    """

    group_size: int | None = None
    is_group_size_sure: bool = False
    group_remedy: str = ""
    data: tuple[float, int] | None = None
    ask_size: str = ""

    @staticmethod
    def checked_size(size: Any, what: str = "group_size") -> int | None:
        """A group size that a caller gave. Raises ValueError for what is no number of samples, nor None."""
        if size is not None:
            check_int(what, size, 1, "Pass the number of samples that are generated for each prompt, or None")
        return None if size is None else int(size)

    def misgrouped(self, totals: StepTotals, asked: Aggregation) -> Misgrouped:
        """Groups that the promised number of samples of each prompt cannot explain, for a mode by prompt.

        Where a rollout has several samples, such as turns, samples are not what was promised, and nothing is found.
        Where a mode leaves out fully masked units, so does this: engines fill up batches with them.

        Filters only make groups smaller. A shuffled mini-batch may have one sample of each prompt. Unless the number is
        sure, it may be meant for something else, or a prompt may have come several times. Without the number, one
        group, or groups of one sample, are no groups.
        """
        findings, remedy, size = Misgrouped([], [], []), f" {self.group_remedy}".rstrip(), self.group_size
        if not (size or self.ask_size) or "prompt" not in totals.units:
            return findings
        keys = attempt(lambda: rehearse(asked, Samples([np.ones(1)], prompt_ids=["0"])).asked)  # others need more ids
        if isinstance(keys, Exception) or "prompt" not in keys:
            return findings
        rollouts, prompts = totals.units["rollout"], totals.units["prompt"]
        if rollouts.have_ids and rollouts.counts["all"].max(initial=0) > 1:
            return findings
        sizes = prompts.counts["all"][prompts.counts[asked.units] > 0]
        if not size:
            if len(sizes) == 1 < sizes.max():
                findings.doubts.append(f"All {sizes.max():g} samples have one prompt id. {self.ask_size}")
            elif len(sizes) > 1 and sizes.max() == 1:
                findings.doubts.append(f"Each of {len(sizes)} prompts has one sample. {self.ask_size}")
            elif len(sizes) > 1:
                findings.assumptions.append(f"groups of prompts are as given: {self.ask_size}")
            return findings
        if sizes.max(initial=0) > size:
            says = f"A prompt has {sizes.max():g} samples where {size} are generated: "
            if self.is_group_size_sure:
                findings.faults.append(f"{says}prompts share an id.{remedy}")
            else:
                findings.doubts.append(f"{says}prompts share an id, or a prompt came several times.{remedy}")
        if sizes.max(initial=0) == 1 < size and len(sizes) > 1:
            findings.doubts.append(
                f"Each of {len(sizes)} prompts has one sample where {size} are generated: ids differ within a group, "
                f"or the mini-batch was shuffled.{remedy}"
            )
        return findings


def other_data(data: tuple[float, int] | None, totals: StepTotals) -> list[str]:
    """The fault of losses that are not those of the step's data, of which an engine knows mask tokens and samples."""
    seen = totals.step_tokens, totals.units["sample"].number["all"]
    if data is None or (math.isclose(data[0], seen[0], rel_tol=1e-5) and data[1] == seen[1]):
        return []
    had, came = (f"{tokens:g} mask tokens of {samples} samples" for tokens, samples in (data, seen))
    return [f"The step's data has {had}, and its losses had {came}: each micro-batch must be trained on once."]


def other_count(count: float | None, compared: Compared) -> str:
    """The reason if weights differ by just the samples that an engine divides by and those that came; else empty."""
    came = compared.totals.units["sample"].number["all"] if "sample" in compared.totals.units else 0
    if not came or count is None:
        return ""
    factor = came / count
    if count == came or not all(math.isclose(end, factor, rel_tol=1e-5) for end in (compared.low, compared.high)):
        return ""
    return (
        f"the engine divides by {count:g} samples, and the step has {came}, so that tokens weigh {factor:.4g} times "
        "what they should. Make mini-batches of one size."
    )
