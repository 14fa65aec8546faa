"""The place of a loss's tokens: this rank's part of a micro-batch, and the sequences that the tokens belong to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, ranks_of, size_of
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.ids import Ints, argument_of, example_of
from megatron_rl_loss.core.masks import Floats, on_device
from megatron_rl_loss.core.samples import LocalTokens, Samples, check_values


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


#: A value of each token, or several, which then share one collective.
Values = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Sequences:
    """Values of this rank's tokens, and the sequences that the tokens belong to.

    Attributes:
        rows: the values, float64 [num_local_tokens] each.
        mask: float64 [num_local_tokens], on the device of the values.
        counts: the number of this rank's tokens of each sample, or part of a unit per token, int64 [num_samples].
        order: this rank's tokens sorted by part, on the host; None where ids are per sample, and tokens lie so.
        units: the number of each sample's (part's) sequence, int64 [num_samples] on the host; None if each is one.
        mask_sums: of each sample's (part's) whole sequence, float64 [num_samples].
        group: to exchange over; None where this rank has all tokens.
        dtype: of results.
    """

    tokens: LocalTokens
    rows: list[Tensor]
    mask: Tensor
    counts: Ints
    order: Ints | None
    units: Ints | None
    mask_sums: Floats
    group: Group | None
    dtype: torch.dtype

    @classmethod
    def of(cls, what: str, values: Values, local: Place, cp_group: Group | None, per: str) -> "Sequences":
        tokens = tokens_of(local)
        rows = list(values) if isinstance(values, Sequence) else [values]
        if not rows:
            raise ValueError(f"{what} of no values: there must be a tensor at least. Pass one, or a list of several.")
        for row in rows:
            check_values(f"a value of {what}", row, tokens)
        if isinstance(local, LocalTokens):
            of_place, totals = tokens.samples.cp_group, None
        else:
            of_place, totals = local.cp_group, local.totals
        units, sums = _units_of(tokens.samples, per, totals), tokens.samples.mask_sums_by(per)
        return cls(
            tokens,
            [row.reshape(-1).double() for row in rows],
            on_device(tokens.mask, rows[0].device).double(),
            *tokens.by_part(per),
            units,
            sums if units is None else np.bincount(units, sums)[units],
            _exchange_group(tokens, of_place, cp_group),
            torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32,
        )


def _exchange_group(tokens: LocalTokens, of_place: Group | None, stated: Group | None) -> Group | None:
    cp_group = of_place if stated is None else stated
    if cp_group is not None and size_of(cp_group) != tokens.cp_size:
        raise ValueError(
            f"a cp_group of {size_of(cp_group)} ranks: the micro-batch is cut for {tokens.cp_size} ranks. Pass the "
            "group of these ranks."
        )
    if stated is not None and of_place is not None and (here := ranks_of(of_place)) != (asked := ranks_of(stated)):
        raise ValueError(
            f"a cp_group of the ranks {asked}, and a micro-batch that is cut for {here}: sums over other ranks would "
            "be of other samples. Leave cp_group out; the micro-batch brings its own."
        )
    if tokens.copies == tokens.cp_size:
        return None
    if cp_group is None:
        raise ValueError(
            f"no cp_group: a sample's tokens lie on {tokens.cp_size} ranks, whose sums must be all-reduced. Pass "
            "cp_group=, the context-parallel group."
        )
    return cp_group


def _units_of(samples: Samples, per: str, totals: StepTotals | None) -> Ints | None:
    """`Sequences.units`; ValueError for a unit that, by the step's totals, has tokens outside the micro-batch."""
    parts = samples.parts.get(per)
    if per == "sample" or (per == "rollout" and parts is None):
        return None
    if parts is None:
        raise ValueError(
            f"per={per!r} of samples with ids of: {', '.join(samples.parts) or 'none'}: {per} ids must say which "
            f"samples are one {per}. Pass Samples(..., {example_of(per)})."
        )
    ids, units = np.unique(parts.ids, return_inverse=True)
    if totals is not None and per in totals.units and totals.units[per].have_ids:
        here = np.bincount(units, samples.mask_sums_by(per), len(ids))
        whole = totals.units[per].at("tokens", ids, argument_of(per))
        missing = whole * (1 - 1e-9) - here  # sums of fractional masks may differ in the last bit
        if (missing > 0).any():
            i = int(missing.argmax())
            raise ValueError(
                f"the {per} of sample {parts.sample[(units == i).argmax()]}, {here[i]:g} of whose {whole[i]:g} mask "
                f"tokens are in this micro-batch: per={per!r} needs all of a {per} in one micro-batch. Keep a {per}'s "
                "samples together in a micro-batch, or pass per='sample'."
            )
    return units
