"""Sums over sequences whose tokens lie on several context-parallel (CP) ranks: one number a sample, differentiable.

    from tokens to samples   segment_sum, segment_mean     forward a sum over CP, backward a sum over CP
    from samples to tokens   to_tokens                     nothing is exchanged

One collective of one float64 a sample for all statistics that are asked for together, whatever the length of the
samples; one more on the way back for those that require grad; none at CP 1, nor where every rank holds every token.

What a tensor is over the ranks of a CP group is said in its type. `OfTokens` varies: each rank has values of its own
tokens. `Partial`: the ranks' tensors add up to the value. `Replicated`: it is the same on every rank. As every rank
goes on to its own share of the loss with a replicated statistic, the statistic's gradient is Partial: it must be summed
over CP before it goes back to tokens. A sum without that backward sum has a wrong gradient and right values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_loss.errors import check_choice, require
from megatron_rl_loss.reduction.sums import check_values
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals, TokensById

#: Values of the tokens that this rank holds.
OfTokens = NewType("OfTokens", Tensor)
#: To be added over the CP group.
Partial = NewType("Partial", Tensor)
#: The same on every rank of the CP group; its gradient is Partial.
Replicated = NewType("Replicated", Tensor)

Per = Literal["sample", "rollout"]


@overload
def segment_sum(
    values: Tensor,
    local: LocalTokens,
    cp_group: Group | None = ...,
    *,
    per: Per = ...,
    totals: StepTotals | None = ...,
) -> Replicated: ...
@overload
def segment_sum(
    values: Sequence[Tensor],
    local: LocalTokens,
    cp_group: Group | None = ...,
    *,
    per: Per = ...,
    totals: StepTotals | None = ...,
) -> tuple[Replicated, ...]: ...
def segment_sum(
    values: Tensor | Sequence[Tensor],
    local: LocalTokens,
    cp_group: Group | None = None,
    *,
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Replicated | tuple[Replicated, ...]:
    """``S_i = sum_t m_it v_it`` of every sample of the micro-batch, over all CP ranks, differentiable.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_sum(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([3., 6.])

    All ranks of the CP group must call it together, and go backward through what it gives together.

    Args:
        values: of the tokens this rank holds, in the shape of its losses; or several such tensors (all statistics of
            the micro-batch), which then share one collective. NaN and Inf at masked positions are ignored.
        local: what this rank holds of the micro-batch.
        cp_group: the context-parallel group; may be left out where nothing is to be exchanged.
        per: with ``rollout``, samples that share a rollout id are one: each has the sum of all of them.
        totals: of the step. Given, a rollout that lies in several micro-batches is refused; otherwise its sum is that
            of its part in this micro-batch.

    Returns:
        [num_samples], the same on every rank of the group, added in float64 and rounded to float32 (float64 for float64
        values); a tuple of such tensors for several values. On the device of the values.

    Raises:
        ValueError: values that are not this rank's part of the layout; no CP group, or one of another size; a rollout
            that lies in several micro-batches.
    """
    return _statistics(values, local, cp_group, per, totals, mean=False)


@overload
def segment_mean(
    values: Tensor,
    local: LocalTokens,
    cp_group: Group | None = ...,
    *,
    per: Per = ...,
    totals: StepTotals | None = ...,
) -> Replicated: ...
@overload
def segment_mean(
    values: Sequence[Tensor],
    local: LocalTokens,
    cp_group: Group | None = ...,
    *,
    per: Per = ...,
    totals: StepTotals | None = ...,
) -> tuple[Replicated, ...]: ...
def segment_mean(
    values: Tensor | Sequence[Tensor],
    local: LocalTokens,
    cp_group: Group | None = None,
    *,
    per: Per = "sample",
    totals: StepTotals | None = None,
) -> Replicated | tuple[Replicated, ...]:
    """``S_i / M_i``, `segment_sum` by the sample's mask sum over its whole length; 0 for a fully masked sample.

    >>> samples = Samples([torch.tensor([1, 1, 0]), torch.tensor([1])])
    >>> segment_mean(torch.tensor([1.0, 2.0, 9.0, 6.0]), samples.local(0, 1))
    tensor([1.5000, 6.0000])

    M_i is known on every rank: it is not exchanged. Everything else as in `segment_sum`.
    """
    return _statistics(values, local, cp_group, per, totals, mean=True)


def to_tokens(of_samples: Tensor, local: LocalTokens) -> OfTokens:
    """A statistic, [num_samples] -> its sample's number at every token this rank holds, [num_local_tokens].

    Differentiable, without a collective: the gradient of a rank's tokens is that rank's part of a Partial, which
    `segment_sum` completes. Padding has the number of a sample beside it. Raises ValueError for another shape.
    """
    if of_samples.shape != (len(local.samples),):
        raise ValueError(
            f"a statistic of shape {tuple(of_samples.shape)}: it must have one number for each of the micro-batch's "
            f"{len(local.samples)} samples. Pass what segment_sum or segment_mean returned."
        )
    counts = local.counts.to(of_samples.device, non_blocking=True)
    return OfTokens(_ToTokens.apply(of_samples, counts, len(local)))  # type: ignore[no-untyped-call]


def _statistics(
    values: Tensor | Sequence[Tensor],
    local: LocalTokens,
    cp_group: Group | None,
    per: Per,
    totals: StepTotals | None,
    *,
    mean: bool,
) -> Replicated | tuple[Replicated, ...]:
    check_choice("unit of a segment sum", per, get_args(Per))
    rows = [values] if isinstance(values, Tensor) else list(values)
    group = _exchanging(local, cp_group)
    samples = local.samples
    shapes = samples.loss_shapes(len(local), local.cp_size)
    for row in rows:
        check_values("a segment sum's values", row, shapes, len(local), samples)
    if not rows:
        return ()
    device = rows[0].device
    mask, counts = (tensor.to(device, non_blocking=True) for tensor in (local.mask, local.counts))
    sums: Tensor = _SegmentSums.apply(_Segments(mask, counts, group), *rows)  # type: ignore[no-untyped-call]
    tokens = samples.mask_sums.to(device, non_blocking=True)
    if per == "rollout" and samples.rollout_ids is not None:
        rollouts, rollout = samples.rollout_ids.unique(return_inverse=True)
        _check_whole(samples, rollouts, rollout, totals)
        rollout = rollout.to(device, non_blocking=True)
        sums, tokens = (_joined(of, rollout, len(rollouts)) for of in (sums, tokens))
    if mean:
        sums = sums / torch.where(tokens == 0, 1, tokens)
    found = [of.to(torch.promote_types(row.dtype, torch.float32)) for of, row in zip(sums, rows, strict=True)]
    return Replicated(found[0]) if isinstance(values, Tensor) else tuple(map(Replicated, found))


def _joined(of_samples: Tensor, rollout: Tensor, num_rollouts: int) -> Tensor:
    """The sum over each sample's rollout, [..., num_samples]."""
    zeros = of_samples.new_zeros(*of_samples.shape[:-1], num_rollouts)
    return zeros.index_add(-1, rollout, of_samples)[..., rollout]


def _exchanging(local: LocalTokens, cp_group: Group | None) -> Group | None:
    """The group that sums must be exchanged over, or None where this rank has all tokens."""
    if cp_group is not None and cp_group.size() != local.cp_size:
        raise ValueError(
            f"a cp_group of {cp_group.size()} ranks: the micro-batch is cut for {local.cp_size}. Pass the group that "
            "it is cut for."
        )
    if local.copies == local.cp_size:
        return None
    if cp_group is None:
        raise ValueError(
            f"no cp_group: a sample's tokens lie on {local.cp_size} ranks, and their sums must be added up. Pass "
            "cp_group=, the context-parallel group."
        )
    return cp_group


#: Sums of fractional masks may differ in the last bit.
_SLACK = 1 - 1e-9


def _check_whole(samples: Samples, rollouts: Tensor, rollout: Tensor, totals: StepTotals | None) -> None:
    """Refuse a rollout that has tokens in another micro-batch or on another data-parallel rank."""
    if totals is None or not isinstance(totals.rollouts.tokens, TokensById):
        return
    sums = samples.mask_sums
    here = sums.new_zeros(len(rollouts)).index_add_(0, rollout.to(sums.device), sums)
    whole = totals.rollouts.tokens.of("rollout_ids", rollouts).to(sums.device, non_blocking=True)
    missing = whole * _SLACK - here

    def given() -> str:
        i = int(missing.argmax())
        sample = int((rollout == i).nonzero()[0])
        tokens = f"{float(here[i]):g} of whose {float(whole[i]):g} mask tokens are in this micro-batch"
        return f"the rollout of sample {sample}, {tokens}"

    require(
        (missing <= 0).all(),
        given,
        "a sum over a rollout needs all of it in one micro-batch. Keep a rollout's samples together, or "
        "sum per sample.",
    )


@dataclass(frozen=True)
class _Segments:
    """What a rank holds of each sample, on the device of the values, and with whom its sums are exchanged."""

    mask: Tensor  # float32 [num_local_tokens]
    counts: Tensor  # int64 [num_samples]: the rank's tokens lie in the order of the samples
    group: Group | None

    def partial_sums(self, values: Sequence[Tensor]) -> Partial:
        """Masked sums over this rank's tokens, float64 [len(values), num_samples]."""
        left_out = self.mask == 0
        rows = [(row.detach().reshape(-1) * self.mask.double()).masked_fill_(left_out, 0) for row in values]
        return Partial(torch.stack([_sum_in_order(row, self.counts) for row in rows]))

    def over_cp(self, sums: Partial) -> Replicated:
        """The one collective: in place, where there is one."""
        if self.group is not None and sums.numel():
            dist.all_reduce(sums, group=self.group)
        return Replicated(sums)


class _SegmentSums(torch.autograd.Function):
    """Sums of several rows of values over samples and CP ranks: Partial -> Replicated, forward and backward."""

    @staticmethod
    def forward(ctx: Any, segments: _Segments, *values: Tensor) -> Tensor:
        ctx.segments = segments
        ctx.like = [(row.shape, row.dtype) for row in values]
        return segments.over_cp(segments.partial_sums(values))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        segments: _Segments = ctx.segments
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        own = Partial(gradient[wanted].contiguous())  # each rank's share adds its own
        found: list[Tensor | None] = [None] * len(ctx.like)
        for k, of_samples in zip(wanted, segments.over_cp(own), strict=True):
            shape, dtype = ctx.like[k]
            of_tokens = _repeat(of_samples, segments.counts, len(segments.mask)) * segments.mask
            found[k] = of_tokens.to(dtype).view(shape)
        return None, *found


class _ToTokens(torch.autograd.Function):
    """Each sample's number at its tokens; the way back adds in order, where autograd's own would scatter."""

    @staticmethod
    def forward(ctx: Any, of_samples: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
        ctx.counts, ctx.dtype = counts, of_samples.dtype
        return _repeat(of_samples, counts, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_in_order(gradient.double(), ctx.counts).to(ctx.dtype), None, None


def _sum_in_order(values: Tensor, counts: Tensor) -> Tensor:
    """Of so many values after each other, float64."""
    if not values.numel():
        return values.new_zeros(len(counts))
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


def _repeat(values: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
    if not len(counts):
        return values.new_zeros(num_tokens)
    return values.repeat_interleave(counts, output_size=num_tokens)
