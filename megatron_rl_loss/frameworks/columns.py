"""What adapters that weigh advantages share: a factor for each token, prompts told apart, checks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.table import ModeFunction, OwnMode
from megatron_rl_loss.modes.weights import token_weights
from megatron_rl_loss.step.collectives import Group, agree_on, attempt, raise_together
from megatron_rl_loss.step.counting import reduce_step_totals
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import UnitCounting

_MARK = "_aggregated_by_megatron_rl_loss"


def token_mean_factors(
    mode: str | ModeFunction,
    describe: Callable[[], Samples],
    *,
    dp_group: Group | None,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    even: str = "",
) -> tuple[list[Tensor], float]:
    """``w * T`` for each token of each sample of this rank, and T, the active tokens of the step.

    The mean over T tokens of factor * loss is the step loss of the mode. With `even`, a remedy, factors that differ
    within a sample are refused. What one rank refuses raises on all ranks of the group.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    described = attempt(describe)
    totals = reduce_step_totals(
        described if isinstance(described, Exception) else [described],
        dp_group=dp_group,
        statistics=aggregation.mode.statistics if isinstance(aggregation.mode, OwnMode) else None,
        settings=aggregation.describe(),
    )
    assert isinstance(described, Samples)  # else it was raised
    tokens = float(totals.step_active_tokens or 0)
    weights = token_weights(mode, described, totals, divisor=divisor, units=units)
    factors = list((weights * tokens).split(described.mask_lengths))
    if even:
        failure = attempt(lambda: check_even(factors, described.loss_masks, even))
        groups = [group for group in (dp_group,) if group is not None]
        raise_together(any(agree_on(["failed"] if failure else [], ["failed"], groups)), failure, groups)
    return factors, tokens


def prompts_of(token_ids: Iterable[Sequence[int]], trained: Iterable[Sequence[bool]]) -> list[str]:
    """An id for each sample: its tokens before the first that is trained on, or all where none is."""
    pairs = zip(token_ids, trained, strict=True)
    return [str(list(ids[: list(of_sample).index(True)]) if any(of_sample) else list(ids)) for ids, of_sample in pairs]


def check_text(mode: str | ModeFunction, divisor: float | None, has_media: bool) -> None:
    """Refuse a mode by prompt where tokens do not tell prompts apart."""
    known = resolve(mode, divisor=divisor).mode
    if has_media and not isinstance(known, OwnMode) and known.unit == "prompt":
        raise ValueError(
            f"loss aggregation {known.name!r} and prompts with images or other media: they are told apart by their "
            "tokens, which are placeholders there. Choose a mode that does not group by prompt."
        )


def check_even(factors: Sequence[Tensor], loss_masks: Sequence[Tensor], remedy: str) -> None:
    """Refuse factors that differ within a sample, where an engine takes means of samples."""
    for factor, mask in zip(factors, loss_masks, strict=True):
        if factor.numel() and bool((factor != factor.amax() * (mask != 0)).any()):
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
