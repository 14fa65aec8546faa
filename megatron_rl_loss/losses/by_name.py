"""The policy losses by name, as data: for flags, and for checks of loss and mode.

A loss of single tokens goes with every mode. A loss of sequences gives each token its sequence's one value, so only the
mode that averages within the sequence, or that the paper names, makes it the paper's loss.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import Group, size_of
from megatron_rl_loss.core.errors import check_choice
from megatron_rl_loss.losses.ratio import Formula, Masked, PolicyInputs, PolicyLoss, largest_exponent
from megatron_rl_loss.losses.sequence import gmpo_loss, gspo_loss, vespo_loss
from megatron_rl_loss.losses.token import (
    cfpo,
    cfpo_loss,
    cispo,
    cispo_loss,
    dppo,
    dppo_loss,
    ppo,
    ppo_clip_loss,
    sapo,
    sapo_loss,
)


@dataclass(frozen=True)
class NamedLoss:
    """One row of the table."""

    name: str
    compute: Callable[..., PolicyLoss]
    formula: Callable[..., Formula] | None = None  # of a loss of single tokens, by its settings
    per_sequence: bool = False  # each token has its sequence's number, and compute takes the CP group
    mode: str | None = None  # the only one that makes it its paper's loss, or None where any does
    divisor: float | None = None


_IPO: dict[str, Any] = {"divergence": "tv", "both_directions": True}
POLICY_LOSSES = {
    loss.name: loss
    for loss in (
        NamedLoss("ppo", ppo_clip_loss, ppo),
        NamedLoss("cispo", cispo_loss, cispo),
        NamedLoss("sapo", sapo_loss, sapo),
        NamedLoss("cfpo", cfpo_loss, cfpo),
        NamedLoss("dppo_tv", partial(dppo_loss, divergence="tv"), partial(dppo, divergence="tv")),
        NamedLoss("dppo_kl", partial(dppo_loss, divergence="kl"), partial(dppo, divergence="kl")),
        NamedLoss("ipo", partial(dppo_loss, **_IPO), partial(dppo, **_IPO)),
        NamedLoss("gspo", partial(gspo_loss, level="sequence"), None, True, "sample_mean"),
        NamedLoss("gspo_token", partial(gspo_loss, level="token"), None, True),
        NamedLoss("luspo", partial(gspo_loss, level="sequence"), None, True, "constant", 1),
        NamedLoss("gmpo", gmpo_loss, None, True, "sample_mean"),
        NamedLoss("vespo", vespo_loss, None, True),
    )
}


def policy_loss(
    name: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Masked,
    cp_group: Group | None = None,
    **settings: Any,
) -> PolicyLoss:
    """The policy loss of that name: one value per token that this rank holds, to be aggregated.

    Args:
        name: of `POLICY_LOSSES`.
        local: the `Microbatch`, or this rank's tokens of it; for losses of single tokens also their mask.
        cp_group: as in `segment_mean`; losses of single tokens do not use it.
        settings: keywords of the loss's own function; None stands for its default.

    Raises ValueError for an unknown name, a setting that the loss does not have, and as its own function; TypeError for
    a `cp_group` that is no group.
    """
    loss = _named(name, settings)
    size_of(cp_group)  # refuses what is no group, such as a setting without its name
    place = (local, cp_group) if loss.per_sequence else (local,)
    own = {key: value for key, value in settings.items() if value is not None}
    return loss.compute(log_probs, old_log_probs, advantages, *place, **own)


def formula_of(
    name: str, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``(log_probs, old_log_probs, advantages) -> losses`` of a loss of single tokens: torch operations alone.

    For others' loops: `torch.fx.symbolic_trace` takes it, as Tinker's custom losses need. It checks and masks nothing:
    give it finite log-probs of active tokens, of the dtype. Settings are those of `policy_loss`, but for importance
    weights, by which the losses may be multiplied.

    Raises ValueError as `policy_loss`, and for a loss of sequences, whose tokens depend on each other.
    """
    loss = _named(name, settings)
    if loss.formula is None or "importance_weights" in settings:
        traced = [other.name for other in POLICY_LOSSES.values() if other.formula is not None]
        raise ValueError(
            f"the formula of {name} with {', '.join(settings) or 'no settings'}: only losses of single tokens have "
            f"one, without importance weights. Choose one of {', '.join(traced)}; multiply the losses by the weights."
        )
    formula = loss.formula(**{key: value for key, value in settings.items() if value is not None})
    largest = largest_exponent(dtype)

    def losses(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
        log_ratio = log_probs - old_log_probs
        return formula(PolicyInputs(log_probs, old_log_probs, log_ratio, advantages, None, largest)).per_token_loss

    return losses


def check_goes_with(name: str, aggregation: Aggregation, **settings: Any) -> None:
    """Raise ValueError for a policy loss with a built-in mode that changes it, and for settings that it lacks."""
    loss = _named(name, settings)
    mode, divisor = aggregation.mode.name, aggregation.divisor
    if loss.mode is None or not aggregation.mode.is_built_in or (mode, divisor) == (loss.mode, loss.divisor):
        return
    right = loss.mode if loss.divisor is None else f"{loss.mode} with divisor {loss.divisor:g}"
    raise ValueError(
        f"the policy loss {name} aggregated by {mode}, divisor {divisor or 'none'}: this loss has one value per "
        f"sequence, and is its paper's by {right} alone. Aggregate by {right}, or take gspo_token or a loss of single "
        "tokens, which go with every mode."
    )


def _named(name: str, settings: dict[str, Any]) -> NamedLoss:
    check_choice("policy loss", name, POLICY_LOSSES)
    loss = POLICY_LOSSES[name]
    fixed, parameters = getattr(loss.compute, "keywords", ()), inspect.signature(loss.compute).parameters.values()
    takes = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in fixed
    ]
    for key, value in settings.items():
        if value is not None and key not in takes:
            raise ValueError(
                f"{key}={value!r} for the policy loss {name}: this loss takes {', '.join(takes)}. Drop {key}, or "
                "choose another loss."
            )
    return loss
