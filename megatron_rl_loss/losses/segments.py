"""Sums over sequences whose tokens lie on several context-parallel (CP) ranks: one number per sample, differentiable.

    from tokens to samples    segment_sum, segment_mean     forward a sum over CP, backward a sum over CP
                              segment_quantile              a sum over CP of a number per token, no gradient
    from samples to tokens    to_tokens                     no exchange

All statistics of one call share one collective of one float64 per sample, whatever the samples' lengths. Those that
require grad take one more on the way back. CP 1, and layouts where every rank holds every token, take none.

Every rank uses a statistic for its own share of the loss, so the statistic's gradient is one rank's part: it is summed
over CP before it goes back to tokens. Without that sum the values are right and the gradient is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, reduce_in_place
from megatron_rl_loss.core.errors import check_bool, check_within, first_order
from megatron_rl_loss.core.ids import Ints
from megatron_rl_loss.core.masks import Floats
from megatron_rl_loss.core.transfers import on_device
from megatron_rl_loss.losses.place import Place, Sequences, Values, segments_per, tokens_of
from megatron_rl_loss.losses.scans import sums_within


def segment_sum(values: Values, local: Place, cp_group: Group | None = None, *, per: str = "sample") -> Tensor:
    """``S_i = sum_t m_it v_it`` of every sample of the micro-batch, over all CP ranks, differentiable.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_sum(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([3., 6.])

    All ranks of the CP group must call it together, and go backward through its result together.

    Args:
        values: of the tokens this rank holds, in the shape of its losses; or several such tensors, which then share one
            collective. NaN and Inf at masked positions are ignored.
        local: the `Microbatch`, or this rank's tokens of it.
        cp_group: the context-parallel group; a `Microbatch` brings its own. May be left out where the ranks need not
            exchange anything.
        per: with ``rollout``, ``prompt`` or another name of the samples' ids, samples that share such an id are one:
            each gets the sum of all of them. With ids per token (``turn``) there is a number for each turn that a
            sample has a part of, in the order of samples and of the turns' first tokens. A `Microbatch` knows the
            step's totals: a unit with tokens in another micro-batch raises ValueError. With tokens alone the sum is
            that of the part in this micro-batch.

    Returns:
        [num_samples] (by ids per token [num_parts]), or [len(values), num_samples] for several values; the same on
        every rank of the group, added in float64 and rounded to float32 (float64 if a value is float64). On the device
        of the values.

    Raises TypeError for values that are no float tensors; ValueError for values that are not this rank's part of the
    layout; no CP group, or one of another size; a unit without ids, or that lies in several micro-batches.
    """
    return _statistic("segment_sum", values, local, cp_group, per)


def segment_mean(values: Values, local: Place, cp_group: Group | None = None, *, per: str = "sample") -> Tensor:
    """``S_i / M_i``: `segment_sum` divided by the mask sum of the whole sample; 0 for a fully masked sample.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_mean(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([1.5000, 6.0000])

    Every rank knows M_i without a collective. All else is as in `segment_sum`.
    """
    return _statistic("segment_mean", values, local, cp_group, per)


@torch.inference_mode(False)
def segment_quantile(
    values: Values,
    local: Place,
    cp_group: Group | None = None,
    *,
    q: float,
    interpolates: bool = False,
    per: str = "sample",
) -> Tensor:
    """The smallest active value of every sample that at least a share q of its mask does not exceed; detached.

    >>> samples = Samples([torch.tensor([1, 1, 0, 1]), torch.tensor([1])])
    >>> segment_quantile(torch.tensor([1.0, 2.0, 9.0, 4.0, 6.0]), samples.local(0, 1), q=0.5)
    tensor([2., 6.])

    Of M tokens that count 1 it is the ceil(q M)-th smallest, never a mean of two; 1.0 gives the largest. 0 for a fully
    masked sample. With `interpolates`, each active token counts 1, and the quantile lies between the two values nearest
    to the place ``q (M - 1)``, as that of `torch.quantile`. Takes one collective of a float64 per token of the
    micro-batch. All else is as in `segment_sum`. Raises ValueError for a q outside (0, 1], and as there.
    """
    check_within("q", q, "(0, 1]", "0.5 is the median, 1 the largest")
    check_bool("interpolates", interpolates)
    sequences = Sequences.of("segment_quantile", values, local, cp_group, per)
    segments, device = sequences.segments, sequences.mask.device
    masked = torch.stack(sequences.rows).detach().masked_fill(sequences.mask == 0, 0)
    whole = masked.new_zeros(len(masked), segments.samples.total_tokens)
    whole[:, on_device(sequences.tokens.positions, device)] = masked
    if sequences.group is not None and whole.numel():
        reduce_in_place(whole, sequences.group)
    places = segments.active_places
    if not len(places):
        segment_quantiles = masked.new_zeros(len(masked), len(segments))
    else:
        unit = segments.unit[segments.in_buffer[places]]
        entries = segments.samples.buffer[places].astype(np.float64)
        units = _SortedUnits.of(unit, None if (entries == 1).all() else entries, segments.num_units, device)
        unit_quantiles = torch.stack(
            [units.quantile(row, q, interpolates) for row in whole[:, on_device(places, device)]]
        )
        segment_quantiles = unit_quantiles[:, on_device(segments.unit, device)]
    return (segment_quantiles if isinstance(values, Sequence) else segment_quantiles[0]).to(sequences.dtype)


@dataclass(frozen=True)
class _SortedUnits:
    """Active tokens, to be sorted within their units: each unit's lie side by side, and are as they would be alone.

    Attributes:
        unit: of each token as it comes, int64 [num_tokens].
        entries: their mask, float64; None where each counts 1.
        filled: the number of tokens of each unit, int64 [num_units].
        begins: the place of each unit's first token among the sorted ones, int64 [num_units].
        sorted_units: the unit of each sorted token, int64 [num_tokens].
    """

    unit: Tensor
    entries: Tensor | None
    filled: Tensor
    begins: Tensor
    sorted_units: Tensor

    @classmethod
    def of(cls, unit: Ints, entries: Floats | None, number: int, device: torch.device) -> "_SortedUnits":
        filled = np.bincount(unit, minlength=number)
        begins, sorted_units = filled.cumsum() - filled, np.arange(number).repeat(filled)
        weights = None if entries is None else on_device(entries, device)
        numbers = (on_device(array, device) for array in (filled, begins, sorted_units))
        return cls(on_device(unit, device), weights, *numbers)

    def quantile(self, row: Tensor, q: float, interpolates: bool) -> Tensor:
        """The quantile of each unit, [num_units]; 0 of one without a token."""
        order = row.argsort(stable=True)
        order = order[self.unit[order].argsort(stable=True)]
        ascending, last = row[order], (self.filled - 1).clamp(min=0)
        if interpolates:
            place = q * last.double()
            below, share = place.long(), place.frac()
            above = torch.minimum(below + 1, last)
            quantiles = self._at(ascending, below).lerp(self._at(ascending, above), share)
        else:
            quantiles = self._at(ascending, torch.minimum(self._below_share(order, q), last))
        return quantiles.masked_fill(self.filled == 0, 0)

    def _below_share(self, order: Tensor, q: float) -> Tensor:
        """Of each unit, how many of its sorted tokens come before the one at which a share q of its mask is reached."""
        share = q * (1 - 1e-12)  # in floating point 0.07 * 100 is above 7
        if self.entries is None:
            return (share * self.filled.double()).ceil().long() - 1
        # Added up within each unit: a sum over all, less what came before, would keep the rounding of others.
        sums = sums_within(self.entries[order], self.sorted_units)
        wanted = share * self._at(sums, (self.filled - 1).clamp(min=0))
        below = (sums < wanted[self.sorted_units]).to(self.filled.dtype)
        return torch.zeros_like(self.filled).index_add_(0, self.sorted_units, below)

    def _at(self, ascending: Tensor, place: Tensor) -> Tensor:
        """The value at a place of each unit; of a unit without a token, any."""
        return ascending[(self.begins + place).clamp(max=len(ascending) - 1)]


def to_tokens(statistic: Tensor, local: Place, *, per: str = "sample") -> Tensor:
    """A statistic [num_samples] -> each sample's number at every token this rank holds, [num_local_tokens].

    Of a statistic per turn, or by other ids per token, say ``per`` here too: each token has its turn's number, or 0.
    Differentiable, without a collective: the gradient of a rank's tokens is that rank's part of it, which `segment_sum`
    completes. Padding has the number of a sample beside it. Raises ValueError for another shape.
    """
    tokens, device = tokens_of(local), statistic.device
    counts, order = segments_per(per, tokens).sort(tokens)
    if statistic.shape != counts.shape:
        raise ValueError(
            f"a statistic of shape {tuple(statistic.shape)}: it must have one number for each of the micro-batch's "
            f"{len(counts)} samples (parts by {per}). Pass the result of segment_sum or segment_mean, with its per=."
        )
    sorted_by = None if order is None else on_device(order, device)
    spread: Tensor = _ToTokens.apply(statistic, on_device(counts, device), sorted_by, len(tokens))
    return spread


def _statistic(what: str, values: Values, local: Place, cp_group: Group | None, per: str) -> Tensor:
    sequences = Sequences.of(what, values, local, cp_group, per)
    divisor = None
    if what == "segment_mean":
        divisor = on_device(np.where(sequences.mask_sums == 0, 1, sequences.mask_sums), sequences.mask.device)
    statistic: Tensor = _SampleSums.apply(sequences, divisor, *sequences.rows)
    return (statistic if isinstance(values, Sequence) else statistic[0]).to(sequences.dtype)


class _SampleSums(torch.autograd.Function):
    """Rows of tokens -> a number per sample of each, the same on all CP ranks; the gradient is added up over CP."""

    @staticmethod
    def forward(ctx: Any, sequences: Sequences, divisor: Tensor | None, *rows: Tensor) -> Tensor:
        ctx.sequences, ctx.divisor = sequences, divisor
        ctx.counts = on_device(sequences.counts, sequences.mask.device)
        ctx.order = None if sequences.order is None else on_device(sequences.order, sequences.mask.device)
        values = (torch.stack(rows) * sequences.mask).masked_fill(sequences.mask == 0, 0)
        return _over_sequences(_segments(values, ctx.counts, ctx.order), sequences, divisor)

    @staticmethod
    @first_order("segment_sum or segment_mean")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        sequences: Sequences = ctx.sequences
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        sample_gradients = _over_sequences(torch.stack([gradient[k] for k in wanted]), sequences, ctx.divisor)
        token_gradients = _at_tokens(sample_gradients, ctx.counts, ctx.order, len(sequences.tokens)) * sequences.mask
        gradients = dict(zip(wanted, token_gradients.masked_fill(sequences.mask == 0, 0), strict=True))
        return None, None, *(gradients.get(k) for k in range(len(sequences.rows)))


def _over_sequences(sample_sums: Tensor, sequences: Sequences, divisor: Tensor | None) -> Tensor:
    """Parts of samples [num_rows, num_samples] -> at each sample its sequence's sum, or mean; its own transpose."""
    if sequences.group is not None and sample_sums.numel():
        reduce_in_place(sample_sums, sequences.group)
    if sequences.joined is not None:
        units = on_device(sequences.joined, sample_sums.device)
        sample_sums = torch.zeros_like(sample_sums).index_add(-1, units, sample_sums)[:, units]
    return sample_sums if divisor is None else sample_sums / divisor


class _ToTokens(torch.autograd.Function):
    """Each sample's number at its tokens; the way back adds in order, where autograd's own would scatter."""

    @staticmethod
    def forward(ctx: Any, sample_values: Tensor, counts: Tensor, order: Tensor | None, num_tokens: int) -> Tensor:
        ctx.counts, ctx.order, ctx.dtype = counts, order, sample_values.dtype
        return _at_tokens(sample_values, counts, order, num_tokens)

    @staticmethod
    @first_order("to_tokens")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _segments(gradient.double()[None], ctx.counts, ctx.order)[0].to(ctx.dtype), None, None, None


def _segments(rows: Tensor, counts: Tensor, order: Tensor | None) -> Tensor:
    """The sums of each row's first ``counts[0]`` values (in that order), of its next ``counts[1]``, and so on."""
    rows = rows if order is None else rows[:, order]
    if not rows.numel():
        return rows.new_zeros(len(rows), len(counts))
    # It adds in order, so every run has the same bits; `unsafe` skips checks of the lengths that wait for the device.
    return torch.stack([torch.segment_reduce(row, "sum", lengths=counts, unsafe=True, initial=0.0) for row in rows])


def _at_tokens(sample_values: Tensor, counts: Tensor, order: Tensor | None, num_tokens: int) -> Tensor:
    """[..., num_samples] -> [..., num_tokens]"""
    token_values = sample_values.new_zeros(*sample_values.shape[:-1], num_tokens)
    if not len(counts):
        return token_values
    spread = sample_values.repeat_interleave(counts, -1, output_size=num_tokens if order is None else len(order))
    return spread if order is None else token_values.index_copy(-1, order, spread)
