"""The policy losses by name, as data: for flags, and for checks of what goes together.

A loss of a token goes with every mode. A loss of a sequence gives each token its sequence's one number, so it is what
its paper says only in the mode that averages within the sequence, or that the paper names.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron_rl_loss.errors import check_choice
from megatron_rl_loss.losses.sequence import gmpo_loss, gspo_loss, gspo_token_loss
from megatron_rl_loss.losses.token import PolicyLoss, cispo_loss, dppo_loss, ppo_clip_loss, sapo_loss
from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.modes.table import OwnMode
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.samples import LocalTokens


@dataclass(frozen=True, kw_only=True)
class NamedLoss:
    """One row of the table.

    Attributes:
        formula: of a token, r its ratio, s its sequence's, A its advantage, sg a stop of the gradient.
        source: the paper.
        compute: the function; one of a sequence takes `LocalTokens` and the CP group too.
        of_sequence: whether a token has its sequence's number.
        mode: the one mode that makes it what its paper says, or None where any does.
        divisor: of that mode.
    """

    name: str
    formula: str
    source: str
    compute: Callable[..., PolicyLoss]
    of_sequence: bool = False
    mode: str | None = None
    divisor: float | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """What can be set, by keyword."""
        own = ("importance_weights", "mean_log_ratio", "per", "totals", *getattr(self.compute, "keywords", ()))
        given = inspect.signature(self.compute).parameters.values()
        return tuple(one.name for one in given if one.kind is one.KEYWORD_ONLY and one.name not in own)


POLICY_LOSSES = {
    loss.name: loss
    for loss in (
        NamedLoss(
            name="ppo",
            formula="max(-A r, -A clip(r)), at most -c A where A < 0",
            source="arXiv:1707.06347",
            compute=ppo_clip_loss,
        ),
        NamedLoss(
            name="cispo", formula="-sg(min(r, 1 + high)) A log pi", source="arXiv:2506.13585", compute=cispo_loss
        ),
        NamedLoss(name="sapo", formula="-A 4/tau sigmoid(tau (r - 1))", source="arXiv:2511.20347", compute=sapo_loss),
        NamedLoss(
            name="dppo_tv",
            formula="-A r, 0 where |p - q| > d and A (p - q) > 0",
            source="arXiv:2602.04879",
            compute=partial(dppo_loss, divergence="tv"),
        ),
        NamedLoss(
            name="dppo_kl",
            formula="-A r, 0 where kl(q, p) > d and A (p - q) > 0",
            source="arXiv:2602.04879",
            compute=partial(dppo_loss, divergence="kl", threshold=0.05),
        ),
        NamedLoss(
            name="gspo",
            formula="max(-A s, -A clip(s)), s = exp(mean_t log r_t)",
            source="arXiv:2507.18071",
            compute=gspo_loss,
            of_sequence=True,
            mode="sample_mean",
        ),
        NamedLoss(
            name="gspo_token",
            formula="the same of sg(s) pi / sg(pi)",
            source="arXiv:2507.18071",
            compute=gspo_token_loss,
            of_sequence=True,
        ),
        NamedLoss(
            name="luspo",
            formula="gspo's, times the sequence's tokens",
            source="arXiv:2602.05261",
            compute=gspo_loss,
            of_sequence=True,
            mode="constant",
            divisor=1,
        ),
        NamedLoss(
            name="gmpo",
            formula="-A exp(mean_t clip(log r_t))",
            source="arXiv:2507.20673",
            compute=gmpo_loss,
            of_sequence=True,
            mode="sample_mean",
        ),
    )
}


def policy_loss(
    name: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    local: LocalTokens,
    cp_group: Group | None = None,
    **settings: Any,
) -> PolicyLoss:
    """The policy loss of that name: a value a token that this rank holds, to be aggregated.

    Args:
        name: of `POLICY_LOSSES`.
        local, cp_group: as in `segment_mean`; losses of a token do not look at them.
        settings: what the loss's own function takes by keyword; None is left out, so that its default holds.

    Raises ValueError for an unknown name, a setting that the loss does not have, and as its own function.
    """
    loss = named_loss(name, **settings)
    given = {key: value for key, value in settings.items() if value is not None}
    place = (local, cp_group) if loss.of_sequence else ()
    return loss.compute(log_probs, old_log_probs, advantages, *place, **given)


def named_loss(name: str, **settings: Any) -> NamedLoss:
    """The row of a name, once the settings that are not None were found to be its own."""
    check_choice("policy loss", name, POLICY_LOSSES)
    loss = POLICY_LOSSES[name]
    takes = (*loss.settings, *(("mean_log_ratio", "per", "totals") if loss.of_sequence else ()), "importance_weights")
    for key, value in settings.items():
        if value is not None and key not in takes:
            raise ValueError(
                f"{key}={value!r} for the policy loss {name}: it takes {', '.join(takes)}. Drop it, or choose another "
                "loss."
            )
    return loss


def check_goes_with(name: str, aggregation: Aggregation, **settings: Any) -> None:
    """Refuse a policy loss with a mode that makes something else of it, and settings that it does not have.

    A mode of one's own is taken at its word.
    """
    loss = named_loss(name, **settings)
    if loss.mode is None or isinstance(aggregation.mode, OwnMode):
        return
    asked = aggregation.mode.name, aggregation.divisor
    if asked != (loss.mode, loss.divisor):
        divisor = "" if loss.divisor is None else f" with divisor {loss.divisor:g}"
        raise ValueError(
            f"the policy loss {name} aggregated by {asked[0]}, divisor {asked[1] or 'none'}: it gives every token its "
            f"sequence's one number, and is what its paper says by {loss.mode + divisor} alone. Aggregate by "
            f"{loss.mode + divisor}, or take gspo_token or a loss of a token, which go with every mode."
        )
