"""What adapters of engines that train on a token mean share: a factor for each token, and prompts told apart."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.modes.weights import token_weights
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.ids import Ids
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals, UnitCounting


def token_mean_factors(
    mode: str | ModeFunction,
    loss_masks: Sequence[Tensor],
    *,
    dp_group: Group | None,
    prompt_ids: Ids,
    divisor: float | None = None,
    units: UnitCounting | None = None,
) -> tuple[list[Tensor], float]:
    """``w * T`` for each token of each sample of this rank, and T, the active tokens of the step.

    The mean over T tokens of factor * loss is the step loss of the mode. Raises as `StepTotals.from_loss_masks`.
    """
    totals = StepTotals.from_loss_masks(loss_masks, prompt_ids=prompt_ids, dp_group=dp_group)
    samples = Samples(loss_masks, prompt_ids=prompt_ids)
    active = float(totals.step_active_tokens or 0)
    factors = token_weights(mode, samples, totals, divisor=divisor, units=units) * active
    return list(factors.split(samples.mask_lengths)), active


def prompts_of(token_ids: Iterable[Sequence[int]], trained: Iterable[Sequence[bool]]) -> list[str]:
    """An id for each sample: its tokens before the first that is trained on, or all where none is."""
    pairs = zip(token_ids, trained, strict=True)
    return [str(list(ids[: list(of_sample).index(True)]) if any(of_sample) else list(ids)) for ids, of_sample in pairs]


def check_even(factors: Sequence[Tensor], loss_masks: Sequence[Tensor], remedy: str) -> None:
    """Refuse factors that differ within a sample, where an engine takes means of samples."""
    for factor, mask in zip(factors, loss_masks, strict=True):
        if factor.numel() and bool((factor != factor.amax() * (mask != 0)).any()):
            raise ValueError(
                "weights that differ within a sample, or a token mask that is not 0 and 1, for a loss that takes means "
                f"of samples: one factor must do for a sample. {remedy}, or choose another mode."
            )
