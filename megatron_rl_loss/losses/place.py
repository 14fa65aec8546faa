"""The place of a loss's tokens: this rank's part of a micro-batch, and the sequences that the tokens belong to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, ranks_of, size_of
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.ids import Ints, argument_of, example_of
from megatron_rl_loss.core.masks import Floats
from megatron_rl_loss.core.samples import LocalTokens, Samples, check_values
from megatron_rl_loss.core.segments import Segments, segments_by
from megatron_rl_loss.core.transfers import on_device


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
        segments: of the micro-batch; segments of one unit are one sequence.
        counts: the number of this rank's tokens of each segment, int64 [num_segments].
        order: this rank's tokens sorted by segment, on the host; None where they lie so.
        group: to exchange over; None where this rank has all tokens.
        dtype: of results.
    """

    tokens: LocalTokens
    rows: list[Tensor]
    mask: Tensor
    segments: Segments
    counts: Ints
    order: Ints | None
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
        segments = segments_per(per, tokens)
        if isinstance(local, LocalTokens):
            own_group = tokens.samples.cp_group
        else:
            own_group = local.cp_group
            _check_known(segments, local.totals)
            _check_whole(segments, local.totals)
        return cls(
            tokens,
            [row.reshape(-1).double() for row in rows],
            on_device(tokens.mask, rows[0].device).double(),
            segments,
            *segments.sort(tokens),
            _exchange_group(tokens, own_group, cp_group),
            torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32,
        )

    @property
    def joined(self) -> Ints | None:
        """The number of each segment's sequence, int64 [num_segments] on the host; None if each is one."""
        return None if self.segments.num_units == len(self.segments) else self.segments.unit

    @property
    def mask_sums(self) -> Floats:
        """Of each segment's whole sequence, float64 [num_segments]."""
        return self.segments.unit_mask_sums[self.segments.unit]


def segments_per(per: str, tokens: LocalTokens) -> Segments:
    """The segments that ``per=`` of a statistic names."""
    if per == "step":
        raise ValueError(
            "per='step': a micro-batch holds a part of the step alone. Pass per='sample', or take measure_tokens."
        )
    return segments_by(per, tokens.samples, f"per={per!r}")


def _check_known(segments: Segments, totals: StepTotals | None) -> None:
    """Raise ValueError for units that no sample of the step has, on a filler's rank too, where others raise."""
    per = segments.key
    if totals is None or len(segments.samples) or per in {"sample", "rollout", *totals.units}:
        return
    if totals.units["sample"].number["all"]:
        raise ValueError(
            f"per={per!r}, and a step without {argument_of(per)} (it has {', '.join(totals.units)}): {per} ids must "
            f"say which samples are one {per}. Pass Samples(..., {example_of(per)})."
        )


def _check_whole(segments: Segments, totals: StepTotals | None) -> None:
    """Raise ValueError for a unit that, by the step's totals, has tokens outside the micro-batch."""
    per, units = segments.key, None if totals is None else totals.units.get(segments.key)
    if units is None or not units.have_ids or not segments.have_ids:
        return
    here = segments.unit_mask_sums[segments.unit]
    whole = units.at("tokens", segments.ids, argument_of(per), segments.sample)
    missing = whole * (1 - 1e-9) - here  # sums of fractional masks may differ in the last bit
    if (missing > 0).any():
        i = int(missing.argmax())
        raise ValueError(
            f"the {per} of sample {segments.sample[i]}, {here[i]:g} of whose {whole[i]:g} mask tokens are in this "
            f"micro-batch: per={per!r} needs all of a {per} in one micro-batch. Keep a {per}'s samples together in a "
            "micro-batch, or pass per='sample'."
        )


def _exchange_group(tokens: LocalTokens, own_group: Group | None, stated: Group | None) -> Group | None:
    cp_group = own_group if stated is None else stated
    if cp_group is not None and size_of(cp_group) != tokens.cp_size:
        raise ValueError(
            f"a cp_group of {size_of(cp_group)} ranks: the micro-batch is cut for {tokens.cp_size} ranks. Pass the "
            "group of these ranks."
        )
    if stated is not None and own_group is not None and (here := ranks_of(own_group)) != (asked := ranks_of(stated)):
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
