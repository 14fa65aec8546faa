"""Sums over sequences whose tokens lie on several context-parallel (CP) ranks: one number per sample, differentiable.

    from tokens to samples    segment_sum, segment_mean     forward a sum over CP, backward a sum over CP
                              segment_extreme               forward a maximum over CP, backward a sum over CP
    from samples to prompts   unit_reduce                   no exchange
    from samples to tokens    to_tokens                     no exchange

All statistics of one call share one collective of one float64 per sample, whatever the samples' lengths. Those that
require grad take one more on the way back. CP 1, and layouts where every rank holds every token, take none.

Every rank uses a `Replicated` statistic for its own share of the loss, so the statistic's gradient is `Partial`: it is
summed over CP before it goes back to tokens. Without that sum the values are right and the gradient is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_choice, first_order
from megatron_rl_loss.losses.place import (
    OfTokens,
    Partial,
    Per,
    Place,
    Replicated,
    exchange_group,
    given_rows,
    located,
    units_of,
)
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.samples import LocalTokens
from megatron_rl_loss.step.totals import StepTotals


def segment_sum(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None = None,
    *,
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Replicated:
    """``S_i = sum_t m_it v_it`` of every sample of the micro-batch, over all CP ranks, differentiable.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_sum(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([3., 6.])

    All ranks of the CP group must call it together, and go backward through its result together.

    Args:
        values: of the tokens this rank holds, in the shape of its losses; or several such tensors (all statistics of
            the micro-batch), which then share one collective. NaN and Inf at masked positions are ignored.
        local: the `Microbatch`, which brings its group and totals along; or what this rank holds of it.
        cp_group: the context-parallel group; may be left out where the ranks need not exchange anything.
        per: with ``rollout`` or ``prompt``, samples that share such an id are one: each gets the sum of all of them.
        totals: of the step. If given, a rollout or prompt that lies in several micro-batches is refused; otherwise its
            sum is that of its part in this micro-batch.

    Returns:
        [num_samples], or [len(values), num_samples] for several values; the same on every rank of the group, added in
        float64 and rounded to float32 (float64 if a value is float64). On the device of the values.

    Raises:
        ValueError: values that are not this rank's part of the layout; no CP group, or one of another size; a rollout
            or prompt that lies in several micro-batches; prompts without ids, or in totals that do not count them.
    """
    return _statistics(values, local, cp_group, per, totals, mean=False)


def segment_mean(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None = None,
    *,
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Replicated:
    """``S_i / M_i``: `segment_sum` divided by the mask sum of the whole sample; 0 for a fully masked sample.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_mean(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([1.5000, 6.0000])

    Every rank knows M_i without a collective. All else is as in `segment_sum`.
    """
    return _statistics(values, local, cp_group, per, totals, mean=True)


def segment_extreme(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None = None,
    *,
    kind: Literal["max", "min"] = "max",
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Replicated:
    """The largest (or smallest) value of a sample's active tokens, over all CP ranks; 0 for a fully masked sample.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_extreme(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([2., 6.])

    Mask entries do not weigh it. Tokens that tie share its gradient evenly, as those of `torch.amax` do, on whatever
    ranks they lie. One collective forward of 8 bytes per sample, one backward of 16. All else is as in `segment_sum`.
    """
    check_choice("kind of an extreme", kind, ("max", "min"))
    tokens, cp_group, totals = located(local, cp_group, totals)
    rows, _, dtype = given_rows("a segment extreme's values", values, tokens)
    if not rows:
        return Replicated(torch.zeros(0, len(tokens.samples)))
    device, sign = rows[0].device, -1 if kind == "min" else 1
    units = units_of(tokens.samples, per, totals)
    units = None if units is None else units.to(device, non_blocking=True)
    segments = segments_of(tokens, cp_group, device)
    stacked = torch.stack([sign * row.reshape(-1).double() for row in rows])
    found: Tensor = sign * _Extremes.apply(segments, units, stacked)  # type: ignore[no-untyped-call]
    without = add_over_units(tokens.samples.mask_sums.to(device, non_blocking=True), units) == 0
    found = found.masked_fill(without, 0).to(dtype)
    return Replicated(found[0] if isinstance(values, Tensor) else found)


def unit_reduce(
    of_samples: Tensor,
    local: Place,
    *,
    kind: Literal["sum", "logsumexp"] = "sum",
    per: Per = "prompt",
    totals: StepTotals | None = None,
) -> Replicated:
    """A statistic [num_samples] -> at each sample, the sum or log-sum-exp over the samples of its prompt (or rollout).

    >>> local = Samples([torch.ones(2), torch.ones(1), torch.ones(1)], prompt_ids=["a", "b", "a"]).local(0, 1)
    >>> unit_reduce(torch.tensor([1.0, 2.0, 5.0]), local)
    tensor([6., 2., 6.])

    Differentiable, without a collective. Fully masked samples are left out; 0 where there is no other. All of a prompt
    must lie in one micro-batch: with totals, which a `Microbatch` brings along, another one is refused.

    Raises ValueError for another shape, as `to_tokens`, and as `segment_sum`.
    """
    check_choice("kind of a sum over units", kind, ("sum", "logsumexp"))
    local, _, totals = located(local, None, totals)
    _check_statistic(of_samples, local)
    device, units = of_samples.device, units_of(local.samples, per, totals)
    units = torch.arange(len(local.samples), device="cpu") if units is None else units
    units, tokens = (one.to(device, non_blocking=True) for one in (units, local.samples.mask_sums))
    if kind == "sum":
        return Replicated(add_over_units(torch.where(tokens > 0, of_samples, 0), units))
    logs = torch.where(tokens > 0, of_samples, -torch.inf)
    top = torch.full_like(logs, -torch.inf).scatter_reduce(0, units, logs.detach(), "amax")[units]
    top = torch.where(top.isneginf(), 0, top)
    sums = add_over_units((logs - top).exp(), units)
    nothing = sums == 0
    found = (sums.masked_fill(nothing, 1).log() + top).masked_fill(nothing, -torch.inf)
    return Replicated(found.masked_fill(add_over_units(tokens, units) == 0, 0))


def to_tokens(of_samples: Tensor, local: Place) -> OfTokens:
    """A statistic [num_samples] -> each sample's number at every token this rank holds, [num_local_tokens].

    Differentiable, without a collective: the gradient of a rank's tokens is that rank's part of a Partial, which
    `segment_sum` completes. Padding has the number of a sample beside it. Raises ValueError for another shape.
    """
    local = located(local)[0]
    _check_statistic(of_samples, local)
    counts = local.counts.to(of_samples.device, non_blocking=True)
    return OfTokens(_ToTokens.apply(of_samples, counts, len(local)))  # type: ignore[no-untyped-call]


def _check_statistic(of_samples: Tensor, local: LocalTokens) -> None:
    if of_samples.shape != (len(local.samples),):
        raise ValueError(
            f"a statistic of shape {tuple(of_samples.shape)}: it must have one number for each of the micro-batch's "
            f"{len(local.samples)} samples. Pass what segment_sum or segment_mean returned."
        )


def _statistics(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None,
    per: Per,
    totals: StepTotals | None,
    *,
    mean: bool,
) -> Replicated:
    local, cp_group, totals = located(local, cp_group, totals)
    rows, _, dtype = given_rows("a segment sum's values", values, local)
    samples = local.samples
    if not rows:
        return Replicated(torch.zeros(0, len(samples)))
    device, units = rows[0].device, units_of(samples, per, totals)
    units = None if units is None else units.to(device, non_blocking=True)
    sums: Tensor = _SegmentSums.apply(segments_of(local, cp_group, device), *rows)  # type: ignore[no-untyped-call]
    sums = add_over_units(sums, units)
    if mean:
        tokens = add_over_units(samples.mask_sums.to(device, non_blocking=True), units)
        sums = sums / torch.where(tokens == 0, 1, tokens)
    sums = sums.to(dtype)
    return Replicated(sums[0] if isinstance(values, Tensor) else sums)


def add_over_units(of_samples: Tensor, units: Tensor | None) -> Tensor:
    """[..., num_samples] -> at each sample the sum over its unit; `units` on the device of the sums."""
    if units is None:
        return of_samples
    return torch.zeros_like(of_samples).index_add(-1, units, of_samples)[..., units]


def segments_of(local: LocalTokens, cp_group: Group | None, device: torch.device) -> "Segments":
    mask, counts = (one.to(device, non_blocking=True) for one in (local.mask, local.counts))
    return Segments(mask, counts, exchange_group(local, cp_group))


@dataclass(frozen=True)
class Segments:
    """What a rank holds of each sample, on the device of the values, and the group to add its sums over."""

    mask: Tensor  # float32 [num_local_tokens]
    counts: Tensor  # int64 [num_samples]: this rank's tokens lie in the order of the samples
    group: Group | None

    def add_over_cp(self, sums: Partial) -> Replicated:
        """The one collective, in place."""
        if self.group is not None and sums.numel():
            dist.all_reduce(sums, group=self.group)
        return Replicated(sums)


class _SegmentSums(torch.autograd.Function):
    """Sums of several rows of values over samples and CP ranks: Partial -> Replicated, forward and backward."""

    @staticmethod
    def forward(ctx: Any, segments: Segments, *values: Tensor) -> Tensor:
        ctx.segments = segments
        ctx.like = [(row.shape, row.dtype) for row in values]
        mask, masked = segments.mask.double(), segments.mask == 0
        rows = [(row.detach().reshape(-1) * mask).masked_fill_(masked, 0) for row in values]
        return segments.add_over_cp(Partial(torch.stack([sum_segments(row, segments.counts) for row in rows])))

    @staticmethod
    @first_order("segment_sum or segment_mean")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        segments: Segments = ctx.segments
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        of_samples = segments.add_over_cp(Partial(gradient[wanted].contiguous()))
        gradients: list[Tensor | None] = [None] * len(ctx.like)
        for k, row in zip(wanted, of_samples, strict=True):
            shape, dtype = ctx.like[k]
            of_tokens = repeat_each(row, segments.counts, len(segments.mask)) * segments.mask
            gradients[k] = of_tokens.to(dtype).view(shape)
        return None, *gradients


class _Extremes(torch.autograd.Function):
    """The largest of each sample: a maximum over CP forward; backward gradients and ties are added over CP."""

    @staticmethod
    def forward(ctx: Any, segments: Segments, units: Tensor | None, values: Tensor) -> Tensor:
        counts, active = segments.counts, segments.mask != 0
        rows = values.masked_fill(values.isnan(), torch.nan).masked_fill_(~active, -torch.inf)
        found = torch.stack([_largest(row, counts) for row in rows])
        if segments.group is not None and found.numel():
            keys = in_order(found.view(torch.int64))
            dist.all_reduce(keys, op=dist.ReduceOp.MAX, group=segments.group)
            found = in_order(keys).view(torch.float64)
        if units is not None:
            index = units.expand_as(found)
            found = torch.full_like(found, -torch.inf).scatter_reduce_(1, index, found, "amax").gather(1, index)
        at_tokens = torch.stack([repeat_each(row, counts, len(active)) for row in found])
        ctx.segments, ctx.units, ctx.is_best = segments, units, (at_tokens == rows) & active
        return found

    @staticmethod
    @first_order("segment_extreme")
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        counts, is_best = ctx.segments.counts, ctx.is_best
        ties = torch.stack([sum_segments(row.double(), counts) for row in is_best])
        slopes, ties = add_over_units(ctx.segments.add_over_cp(Partial(torch.stack([gradient, ties]))), ctx.units)
        shares = slopes / ties.clamp(min=1)
        return None, None, torch.stack([repeat_each(row, counts, is_best.shape[1]) for row in shares]) * is_best


def _largest(values: Tensor, counts: Tensor) -> Tensor:
    """Of the first ``counts[0]`` values, of the next ``counts[1]``, and so on; -inf of none."""
    if not values.numel():
        return values.new_full((len(counts),), -torch.inf)
    return torch.segment_reduce(values, "max", lengths=counts, unsafe=True, initial=-torch.inf)


def in_order(bits: Tensor) -> Tensor:
    """The bits of floats, as ints of their size, to ints in the floats' order, NaN largest; its own inverse.

    A collective's maximum of floats may lose a NaN.
    """
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


class _ToTokens(torch.autograd.Function):
    """Each sample's number at its tokens; the way back adds in order, where autograd's own would scatter."""

    @staticmethod
    def forward(ctx: Any, of_samples: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
        ctx.counts, ctx.dtype = counts, of_samples.dtype
        return repeat_each(of_samples, counts, num_tokens)

    @staticmethod
    @first_order("to_tokens")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_segments(gradient.double(), ctx.counts).to(ctx.dtype), None, None


def sum_segments(values: Tensor, counts: Tensor) -> Tensor:
    """The sums of the first ``counts[0]`` values, of the next ``counts[1]``, and so on; float64."""
    if not values.numel():
        return values.new_zeros(len(counts))
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


def repeat_each(values: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
    if not len(counts):
        return values.new_zeros(num_tokens)
    return values.repeat_interleave(counts, output_size=num_tokens)
