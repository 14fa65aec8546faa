"""Sums over sequences whose tokens lie on several context-parallel (CP) ranks: one number per sample, differentiable.

    from tokens to samples   segment_sum, segment_mean     forward a sum over CP, backward a sum over CP
    from samples to tokens   to_tokens                     no exchange

All statistics of one call share one collective of one float64 per sample, whatever the samples' lengths. Those that
require grad take one more on the way back. CP 1, and layouts where every rank holds every token, take none.

The types say what a tensor is over the ranks of a CP group. `OfTokens`: each rank has values of its own tokens.
`Partial`: the ranks' tensors add up to the value. `Replicated`: every rank has the same value. Every rank uses a
replicated statistic for its own share of the loss, so the statistic's gradient is Partial: it must be summed over CP
before it goes back to tokens. Without that backward sum the values are right and the gradient is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_choice, first_order, require
from megatron_rl_loss.reduction.sums import check_values
from megatron_rl_loss.step.collectives import Group, size_of
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals, TokensById

#: Values of the tokens that this rank holds.
OfTokens = NewType("OfTokens", Tensor)
#: To be added over the CP group.
Partial = NewType("Partial", Tensor)
#: The same on every rank of the CP group; its gradient is Partial.
Replicated = NewType("Replicated", Tensor)

Per = Literal["sample", "rollout"]


class InMicrobatch(Protocol):
    """What a `Microbatch` says of the place of its tokens."""

    @property
    def tokens(self) -> LocalTokens: ...
    @property
    def cp_group(self) -> Group | None: ...
    @property
    def totals(self) -> StepTotals: ...


#: Where the tokens of a loss lie: a `Microbatch`, or what this rank holds of one.
Place = LocalTokens | InMicrobatch


def located(
    local: Place, cp_group: Group | None = None, totals: StepTotals | None = None
) -> tuple[LocalTokens, Group | None, StepTotals | None]:
    """What this rank holds, the group and the totals: a `Microbatch` knows all three."""
    if isinstance(local, LocalTokens):
        return local, local.samples.cp_group if cp_group is None else cp_group, totals
    if isinstance(local, Samples) or not hasattr(local, "tokens"):
        raise TypeError(
            f"local is a {type(local).__name__}: it says where tokens lie. Pass the micro-batch of a plan, or "
            "Samples(...).local(cp_rank, cp_size)."
        )
    return local.tokens, local.cp_group if cp_group is None else cp_group, totals or local.totals


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
        per: with ``rollout``, samples that share a rollout id are one: each gets the sum of all of them.
        totals: of the step. If given, a rollout that lies in several micro-batches is refused; otherwise its sum is
            that of its part in this micro-batch.

    Returns:
        [num_samples], or [len(values), num_samples] for several values; the same on every rank of the group, added in
        float64 and rounded to float32 (float64 if a value is float64). On the device of the values.

    Raises:
        ValueError: values that are not this rank's part of the layout; no CP group, or one of another size; a rollout
            that lies in several micro-batches.
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


def to_tokens(of_samples: Tensor, local: Place) -> OfTokens:
    """A statistic [num_samples] -> each sample's number at every token this rank holds, [num_local_tokens].

    Differentiable, without a collective: the gradient of a rank's tokens is that rank's part of a Partial, which
    `segment_sum` completes. Padding has the number of a sample beside it. Raises ValueError for another shape.
    """
    local = located(local)[0]
    if of_samples.shape != (len(local.samples),):
        raise ValueError(
            f"a statistic of shape {tuple(of_samples.shape)}: it must have one number for each of the micro-batch's "
            f"{len(local.samples)} samples. Pass what segment_sum or segment_mean returned."
        )
    counts = local.counts.to(of_samples.device, non_blocking=True)
    return OfTokens(_ToTokens.apply(of_samples, counts, len(local)))  # type: ignore[no-untyped-call]


def _statistics(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None,
    per: Per,
    totals: StepTotals | None,
    *,
    mean: bool,
) -> Replicated:
    check_choice("unit of a segment sum", per, get_args(Per))
    rows = [values] if isinstance(values, Tensor) else list(values)
    local, cp_group, totals = located(local, cp_group, totals)
    group = exchange_group(local, cp_group)
    samples = local.samples
    shapes = samples.loss_shapes(len(local), local.cp_size)
    for row in rows:
        check_values("a segment sum's values", row, shapes, len(local), samples)
    if not rows:
        return Replicated(torch.zeros(0, len(samples)))
    device = rows[0].device
    mask, counts, tokens = (one.to(device, non_blocking=True) for one in (local.mask, local.counts, samples.mask_sums))
    sums: Tensor = _SegmentSums.apply(_Segments(mask, counts, group), *rows)  # type: ignore[no-untyped-call]
    if per == "rollout" and samples.rollout_ids is not None:
        ids, rollout = samples.rollout_ids.unique(return_inverse=True)
        _check_whole(samples, ids, rollout, totals)
        rollout = rollout.to(device, non_blocking=True)
        sums, tokens = (
            one.new_zeros(*one.shape[:-1], len(ids)).index_add(-1, rollout, one)[..., rollout] for one in (sums, tokens)
        )
    if mean:
        sums = sums / torch.where(tokens == 0, 1, tokens)
    sums = sums.to(torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32)
    return Replicated(sums[0] if isinstance(values, Tensor) else sums)


def exchange_group(local: LocalTokens, cp_group: Group | None) -> Group | None:
    """The group to add sums over, or None where this rank has all tokens."""
    if cp_group is not None and size_of(cp_group) != local.cp_size:
        raise ValueError(
            f"a cp_group of {size_of(cp_group)} ranks: the micro-batch is cut for {local.cp_size}. Pass the group that "
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


def _check_whole(samples: Samples, ids: Tensor, rollout: Tensor, totals: StepTotals | None) -> None:
    """Refuse a rollout that has tokens in another micro-batch or on another data-parallel rank."""
    if totals is None or not isinstance(totals.rollouts.tokens, TokensById):
        return
    sums = samples.mask_sums
    here = sums.new_zeros(len(ids)).index_add_(0, rollout.to(sums.device), sums)
    whole = totals.rollouts.tokens.of("rollout_ids", ids).to(sums.device, non_blocking=True)
    missing = whole * (1 - 1e-9) - here  # sums of fractional masks may differ in the last bit

    def given() -> str:
        i = int(missing.argmax())
        tokens = f"{float(here[i]):g} of whose {float(whole[i]):g} mask tokens are in this micro-batch"
        return f"the rollout of sample {int((rollout == i).nonzero()[0])}, {tokens}"

    require(
        (missing <= 0).all(),
        given,
        "a sum over a rollout needs all of it in one micro-batch. Keep a rollout's samples together, or sum per "
        "sample.",
    )


@dataclass(frozen=True)
class _Segments:
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
    def forward(ctx: Any, segments: _Segments, *values: Tensor) -> Tensor:
        ctx.segments = segments
        ctx.like = [(row.shape, row.dtype) for row in values]
        mask, masked = segments.mask.double(), segments.mask == 0
        rows = [(row.detach().reshape(-1) * mask).masked_fill_(masked, 0) for row in values]
        return segments.add_over_cp(Partial(torch.stack([_sum_segments(row, segments.counts) for row in rows])))

    @staticmethod
    @first_order("segment_sum or segment_mean")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        segments: _Segments = ctx.segments
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        of_samples = segments.add_over_cp(Partial(gradient[wanted].contiguous()))
        gradients: list[Tensor | None] = [None] * len(ctx.like)
        for k, row in zip(wanted, of_samples, strict=True):
            shape, dtype = ctx.like[k]
            of_tokens = _repeat(row, segments.counts, len(segments.mask)) * segments.mask
            gradients[k] = of_tokens.to(dtype).view(shape)
        return None, *gradients


class _ToTokens(torch.autograd.Function):
    """Each sample's number at its tokens; the way back adds in order, where autograd's own would scatter."""

    @staticmethod
    def forward(ctx: Any, of_samples: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
        ctx.counts, ctx.dtype = counts, of_samples.dtype
        return _repeat(of_samples, counts, num_tokens)

    @staticmethod
    @first_order("to_tokens")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_segments(gradient.double(), ctx.counts).to(ctx.dtype), None, None


def _sum_segments(values: Tensor, counts: Tensor) -> Tensor:
    """The sums of the first ``counts[0]`` values, of the next ``counts[1]``, and so on; float64."""
    if not values.numel():
        return values.new_zeros(len(counts))
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


def _repeat(values: Tensor, counts: Tensor, num_tokens: int) -> Tensor:
    if not len(counts):
        return values.new_zeros(num_tokens)
    return values.repeat_interleave(counts, output_size=num_tokens)
