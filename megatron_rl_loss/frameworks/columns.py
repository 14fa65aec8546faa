"""Shared by adapters that weigh advantages: a step's weights, prompts told apart, checks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.plan.checks import check_samples
from megatron_rl_loss.plan.plan import Plan, make_plan
from megatron_rl_loss.step.collectives import Group, StepGroups, attempt, check_together
from megatron_rl_loss.step.samples import Samples

_MARK = "_aggregated_by_megatron_rl_loss"


def plan_of(
    modes: LossModes, describe: Callable[[], list[Samples]], dp_group: Group | None, term_masks: Sequence[str] = ()
) -> Plan:
    """`plan_step` of uncut samples, one for each micro-batch; errors of one rank raise on all of the group."""
    groups = StepGroups(dp_group)
    samples = attempt(lambda: check_samples(describe(), None, modes, groups, term_masks))
    return make_plan(samples, modes, groups, term_masks=term_masks)


def token_mean_factors(
    modes: LossModes, describe: Callable[[], list[Samples]], *, dp_group: Group | None, even: str = ""
) -> tuple[list[Tensor], float]:
    """``w * T`` for the tokens of each micro-batch of this rank, 1-D on the host, and T, the step's active tokens.

    The mean over T tokens of factor * loss is the step loss of the policy's mode. With `even`, a remedy, factors that
    differ within a sample are refused, on all ranks of the group.
    """
    plan = plan_of(modes, describe, dp_group)
    tokens = float(plan.totals.step_active_tokens or 0)
    factors = [one.weights * tokens for one in plan]

    def check() -> None:
        for one, flat in zip(plan, factors, strict=True):
            check_even(flat.split(one.samples.mask_lengths), one.samples.loss_masks, even)

    if even:
        check_together(check, [] if dp_group is None else [dp_group])
    return factors, tokens


def prompts_of(token_ids: Iterable[Sequence[int]], trained: Iterable[Sequence[bool]]) -> list[str]:
    """An id for each sample: its tokens before the first that is trained on, or all where none is."""
    pairs = zip(token_ids, trained, strict=True)
    return [str(list(ids[: list(of_sample).index(True)]) if any(of_sample) else list(ids)) for ids, of_sample in pairs]


def check_text(modes: LossModes, samples: Sequence[Samples], has_media: bool) -> None:
    """Refuse a mode by prompt where tokens do not tell prompts apart."""
    if has_media and any("prompt" in modes.rehearse(one) for one in samples):
        raise ValueError(
            f"{modes.describe()}, and prompts with images or other media: they are told apart by their tokens, which "
            "are placeholders there. Choose a mode that does not group by prompt."
        )


def check_even(factors: Sequence[Tensor], loss_masks: Sequence[Any], remedy: str) -> None:
    """Refuse factors that differ within a sample, where an engine takes means of samples."""
    for factor, mask in zip(map(np.asarray, factors), map(np.asarray, loss_masks), strict=True):
        if factor.size and (factor != factor.max() * (mask != 0)).any():
            raise ValueError(
                "weights that differ within a sample, or a token mask that is not 0 and 1, for a loss that takes means "
                f"of samples: one factor must do for a sample. {remedy}, or choose another mode."
            )


def mark(ours: Any, theirs: Any) -> None:
    """Refuse to wrap a function of an engine that is wrapped already: its weights would count twice."""
    if hasattr(theirs, _MARK):
        raise ValueError(
            "aggregate, where a loss aggregation is in force already: its weights would count twice. Call it once, for "
            "a class or for its subclass."
        )
    setattr(ours, _MARK, True)
