"""Sums over sequences whose tokens lie on several context-parallel (CP) ranks: one number per sample, differentiable.

    from tokens to samples    segment_sum, segment_mean     forward a sum over CP, backward a sum over CP
                              segment_extreme               forward a maximum over CP, backward a sum over CP
    from samples to prompts   unit_reduce                   no exchange
    from samples to tokens    to_tokens                     no exchange

All statistics of one call share one collective of one float64 per sample, whatever the samples' lengths. Those that
require grad take one more on the way back. CP 1, and layouts where every rank holds every token, take none.

Every rank uses a statistic for its own share of the loss, so the statistic's gradient is one rank's part: it is summed
over CP before it goes back to tokens. Without that sum the values are right and the gradient is wrong.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_choice, first_order
from megatron_rl_loss.losses.place import Per, Place, Sequences, located, units_of
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.samples import LocalTokens
from megatron_rl_loss.step.totals import StepTotals

_Statistic = Literal["sum", "mean", "max", "min"]


def segment_sum(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None = None,
    *,
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Tensor:
    """``S_i = sum_t m_it v_it`` of every sample of the micro-batch, over all CP ranks, differentiable.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_sum(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([3., 6.])

    All ranks of the CP group must call it together, and go backward through its result together.

    Args:
        values: of the tokens this rank holds, in the shape of its losses; or several such tensors, which then share one
            collective. NaN and Inf at masked positions are ignored.
        local: the `Microbatch`, which brings its group and totals along; or what this rank holds of it.
        cp_group: the context-parallel group; may be left out where the ranks need not exchange anything.
        per: with ``rollout`` or ``prompt``, samples that share such an id are one: each gets the sum of all of them.
        totals: of the step. If given, a rollout or prompt that lies in several micro-batches is refused; otherwise its
            sum is that of its part in this micro-batch.

    Returns:
        [num_samples], or [len(values), num_samples] for several values; the same on every rank of the group, added in
        float64 and rounded to float32 (float64 if a value is float64). On the device of the values.

    Raises ValueError for values that are not this rank's part of the layout; no CP group, or one of another size; a
    rollout or prompt that lies in several micro-batches; prompts without ids, or in totals that do not count them.
    """
    return _statistic("sum", values, Sequences.of("sum", values, local, cp_group, per, totals))


def segment_mean(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None = None,
    *,
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Tensor:
    """``S_i / M_i``: `segment_sum` divided by the mask sum of the whole sample; 0 for a fully masked sample.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_mean(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([1.5000, 6.0000])

    Every rank knows M_i without a collective. All else is as in `segment_sum`.
    """
    return _statistic("mean", values, Sequences.of("sum", values, local, cp_group, per, totals))


def segment_extreme(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None = None,
    *,
    kind: Literal["max", "min"] = "max",
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Tensor:
    """The largest (or smallest) value of a sample's active tokens, over all CP ranks; 0 for a fully masked sample.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_extreme(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([2., 6.])

    Mask entries do not weigh it. Tokens that tie share its gradient evenly, as those of `torch.amax` do, on whatever
    ranks they lie. One collective forward of 8 bytes per sample, one backward of 16. All else is as in `segment_sum`.
    """
    check_choice("kind of an extreme", kind, ("max", "min"))
    return _statistic(kind, values, Sequences.of("extreme", values, local, cp_group, per, totals))


def unit_reduce(
    of_samples: Tensor,
    local: Place,
    *,
    kind: Literal["sum", "logsumexp"] = "sum",
    per: Per = "prompt",
    totals: StepTotals | None = None,
) -> Tensor:
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
    units = units_of(local.samples, per, totals)
    tokens = local.samples.mask_sums.to(of_samples.device, non_blocking=True)
    if kind == "sum":
        return _over_units(torch.where(tokens > 0, of_samples, 0), units)
    logs = torch.where(tokens > 0, of_samples, -torch.inf)
    top = _over_units(logs.detach(), units, "amax")
    top = torch.where(top.isneginf(), 0, top)
    sums = _over_units((logs - top).exp(), units)
    nothing = sums == 0
    found = (sums.masked_fill(nothing, 1).log() + top).masked_fill(nothing, -torch.inf)
    return found.masked_fill(_over_units(tokens, units) == 0, 0)


def to_tokens(of_samples: Tensor, local: Place) -> Tensor:
    """A statistic [num_samples] -> each sample's number at every token this rank holds, [num_local_tokens].

    Differentiable, without a collective: the gradient of a rank's tokens is that rank's part of it, which `segment_sum`
    completes. Padding has the number of a sample beside it. Raises ValueError for another shape.
    """
    local = located(local)[0]
    _check_statistic(of_samples, local)
    counts = local.counts.to(of_samples.device, non_blocking=True)
    spread: Tensor = _ToTokens.apply(of_samples, counts, len(local))  # type: ignore[no-untyped-call]
    return spread


def _check_statistic(of_samples: Tensor, local: LocalTokens) -> None:
    if of_samples.shape != (len(local.samples),):
        raise ValueError(
            f"a statistic of shape {tuple(of_samples.shape)}: it must have one number for each of the micro-batch's "
            f"{len(local.samples)} samples. Pass what segment_sum or segment_mean returned."
        )


def _statistic(kind: _Statistic, values: Tensor | Sequence[Tensor], given: Sequences) -> Tensor:
    if given.rows is None:
        return torch.zeros(0, len(given.tokens.samples))
    found: Tensor = _OfSamples.apply(given, kind, given.rows)  # type: ignore[no-untyped-call]
    return (found[0] if isinstance(values, Tensor) else found).to(given.dtype)


class _OfSamples(torch.autograd.Function):
    """Rows of tokens -> a number per sample of each, the same on all CP ranks; backward, gradients are added over CP.

    A token's slope is its part of the sample's gradient: its mask entry, or for an extreme 1 where it ties for it.
    """

    @staticmethod
    def forward(ctx: Any, given: Sequences, kind: _Statistic, rows: Tensor) -> Tensor:
        active, group, units = given.mask != 0, given.group, given.units
        counts, tokens = (
            one.to(rows.device, non_blocking=True) for one in (given.tokens.counts, given.tokens.samples.mask_sums)
        )
        tokens = _over_units(tokens, units)
        ctx.given, ctx.counts, ctx.divisor, ctx.ties = given, counts, None, kind in ("max", "min")
        if not ctx.ties:
            ctx.slopes = given.mask.expand_as(rows)
            sums = _over_cp(_segments(torch.where(active, rows * given.mask, 0), counts), group)
            if kind == "mean":
                ctx.divisor = torch.where(tokens == 0, 1, tokens)
            return _over_units(sums, units) / (1 if ctx.divisor is None else ctx.divisor)
        rows = -rows if kind == "min" else rows
        rows = torch.where(active, rows.masked_fill(rows.isnan(), torch.nan), -torch.inf)
        keys = _over_cp(in_order(_segments(rows, counts, "max").view(torch.int64)), group, dist.ReduceOp.MAX)
        best = _over_units(in_order(keys).view(torch.float64), units, "amax")
        ctx.slopes = ((_at_tokens(best, counts, len(active)) == rows) & active).double()
        return (-best if kind == "min" else best).masked_fill(tokens == 0, 0)

    @staticmethod
    @first_order("segment_sum, segment_mean or segment_extreme")
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        given: Sequences = ctx.given
        slopes, wanted = ctx.slopes[given.wanted], gradient[given.wanted]
        if ctx.ties:
            wanted = torch.stack([wanted, _segments(slopes, ctx.counts)])
        wanted = _over_units(_over_cp(wanted, given.group), given.units)
        if ctx.ties:
            wanted = wanted[0] / wanted[1].clamp(min=1)
        elif ctx.divisor is not None:
            wanted = wanted / ctx.divisor
        of_tokens = torch.zeros_like(ctx.slopes)
        of_tokens[given.wanted] = torch.where(slopes != 0, _at_tokens(wanted, ctx.counts, len(given.mask)) * slopes, 0)
        return None, None, of_tokens


def _over_cp(of_samples: Tensor, group: Group | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The one collective, in place."""
    if group is not None and of_samples.numel():
        dist.all_reduce(of_samples, op=op, group=group)
    return of_samples


def _over_units(of_samples: Tensor, units: Tensor | None, how: Literal["sum", "amax"] = "sum") -> Tensor:
    """[..., num_samples] -> at each sample the sum or largest of its unit."""
    if units is None:
        return of_samples
    index = units.to(of_samples.device, non_blocking=True).expand_as(of_samples)
    start = torch.full_like(of_samples, 0 if how == "sum" else -torch.inf)
    return start.scatter_reduce(-1, index, of_samples, how).gather(-1, index)


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
        return _at_tokens(of_samples, counts, num_tokens)

    @staticmethod
    @first_order("to_tokens")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _segments(gradient.double()[None], ctx.counts)[0].to(ctx.dtype), None, None


def _segments(rows: Tensor, counts: Tensor, how: Literal["sum", "max"] = "sum") -> Tensor:
    """Of each row's first ``counts[0]`` values, of its next ``counts[1]``, and so on."""
    nothing = 0.0 if how == "sum" else -torch.inf
    if not rows.numel():
        return rows.new_full((len(rows), len(counts)), nothing)
    return torch.stack([torch.segment_reduce(row, how, lengths=counts, unsafe=True, initial=nothing) for row in rows])


def _at_tokens(of_samples: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
    """[..., num_samples] -> [..., num_tokens]"""
    if not len(counts):
        return of_samples.new_zeros(*of_samples.shape[:-1], num_tokens)
    return of_samples.repeat_interleave(counts, -1, output_size=num_tokens)
