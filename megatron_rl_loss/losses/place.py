"""The place of a loss's tokens: this rank's part of a micro-batch."""

from typing import Protocol

from megatron_rl_loss.core.collectives import Group
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.samples import LocalTokens, Samples


class InMicrobatch(Protocol):
    """The part of a `Microbatch` that places its tokens."""

    @property
    def tokens(self) -> LocalTokens: ...
    @property
    def cp_group(self) -> Group | None: ...
    @property
    def totals(self) -> StepTotals: ...


#: A `Microbatch`, or this rank's tokens of one: ``Samples(...).local(cp_rank, cp_size)``.
Place = LocalTokens | InMicrobatch


def tokens_of(local: Place) -> LocalTokens:
    """This rank's tokens at that place."""
    if isinstance(local, LocalTokens):
        return local
    if isinstance(local, Samples) or not hasattr(local, "tokens"):
        raise TypeError(
            f"local is a {type(local).__name__}: it must say which tokens this rank holds. Pass the micro-batch of a "
            "plan, or Samples(...).local(cp_rank, cp_size)."
        )
    return local.tokens
