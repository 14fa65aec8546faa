"""The policy losses by name, as data: for flags, and for checks of what goes together.

A loss of single tokens goes with every mode. A loss of sequences gives each token its sequence's one number, so it is
what its paper says only in the mode that averages within the sequence, or that the paper names.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron_rl_loss.errors import check_choice
from megatron_rl_loss.losses.place import Place
from megatron_rl_loss.losses.ratio import PolicyLoss
from megatron_rl_loss.losses.sequence import gmpo_loss, gspo_loss, gspo_token_loss
from megatron_rl_loss.losses.token import cispo_loss, dppo_loss, ppo_clip_loss, sapo_loss
from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.modes.table import OwnMode
from megatron_rl_loss.step.collectives import Group

#: Settings that no flag sets: each is a tensor or an object of the step.
_OF_THE_STEP = ("importance_weights", "mean_log_ratio", "per", "totals")


@dataclass(frozen=True)
class NamedLoss:
    """One row of the table."""

    name: str
    compute: Callable[..., PolicyLoss]
    of_sequence: bool = False  # whether each token has its sequence's number; compute then takes the CP group too
    mode: str | None = None  # the one that makes it what its paper says, or None where any does
    divisor: float | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """The keywords that a flag can set."""
        fixed = (*_OF_THE_STEP, *getattr(self.compute, "keywords", ()))
        parameters = inspect.signature(self.compute).parameters.values()
        return tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in fixed)


_ROWS = (
    NamedLoss("ppo", ppo_clip_loss),
    NamedLoss("cispo", cispo_loss),
    NamedLoss("sapo", sapo_loss),
    NamedLoss("dppo_tv", partial(dppo_loss, divergence="tv")),
    NamedLoss("dppo_kl", partial(dppo_loss, divergence="kl")),
    NamedLoss("gspo", gspo_loss, True, "sample_mean"),
    NamedLoss("gspo_token", gspo_token_loss, True),
    NamedLoss("luspo", gspo_loss, True, "constant", 1),
    NamedLoss("gmpo", gmpo_loss, True, "sample_mean"),
)
POLICY_LOSSES = {loss.name: loss for loss in _ROWS}


def policy_loss(
    name: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: Place | Tensor | None,
    cp_group: Group | None = None,
    **settings: Any,
) -> PolicyLoss:
    """The policy loss of that name: one value per token that this rank holds, to be aggregated.

    Args:
        name: of `POLICY_LOSSES`.
        local: the `Microbatch`, or what this rank holds of it. Losses of single tokens take None too, of a chunk of
            tokens, say.
        cp_group: as in `segment_mean`; losses of single tokens do not use it.
        settings: what the loss's own function takes by keyword; None stands for its default.

    Raises ValueError for an unknown name, a setting that the loss does not have, and as its own function.
    """
    loss = named_loss(name, **settings)
    place = (local, cp_group) if loss.of_sequence else (local,)
    own = {key: value for key, value in settings.items() if value is not None}
    return loss.compute(log_probs, old_log_probs, advantages, *place, **own)


def named_loss(name: str, **settings: Any) -> NamedLoss:
    """The row of a name; refuses settings that the loss does not have."""
    check_choice("policy loss", name, POLICY_LOSSES)
    loss = POLICY_LOSSES[name]
    takes = (*loss.settings, *(_OF_THE_STEP if loss.of_sequence else ("importance_weights",)))
    for key, value in settings.items():
        if value is not None and key not in takes:
            raise ValueError(
                f"{key}={value!r} for the policy loss {name}: it takes {', '.join(takes)}. Drop it, or choose another "
                "loss."
            )
    return loss


def check_goes_with(name: str, aggregation: Aggregation, **settings: Any) -> None:
    """Refuse a policy loss with a mode that makes something else of it, and settings that it does not have.

    Modes that users register are taken at their word.
    """
    loss = named_loss(name, **settings)
    mode, divisor = aggregation.mode.name, aggregation.divisor
    if loss.mode is None or isinstance(aggregation.mode, OwnMode) or (mode, divisor) == (loss.mode, loss.divisor):
        return
    right = loss.mode if loss.divisor is None else f"{loss.mode} with divisor {loss.divisor:g}"
    raise ValueError(
        f"the policy loss {name} aggregated by {mode}, divisor {divisor or 'none'}: it gives every token its "
        f"sequence's one number, and is what its paper says by {right} alone. Aggregate by {right}, or take gspo_token "
        "or a loss of single tokens, which go with every mode."
    )
