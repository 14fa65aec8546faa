"""Discounted sums along a sequence whose tokens lie on several context-parallel (CP) ranks: from tokens to tokens.

Each of log2(local tokens) rounds joins every token's state to that of the token 1, 2, 4, ... before it. Nothing is
subtracted or divided again, so nothing cancels and no power of a discount overflows. Where tokens are cut, one
collective exchanges the last states of the ranks' chunks; each rank then scans those of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.collectives import Group, reduce_in_place
from megatron_rl_loss.core.errors import check_bool, check_choice, check_within, first_order, is_number, require
from megatron_rl_loss.core.masks import Array
from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.core.transfers import on_device, to_device
from megatron_rl_loss.losses.place import Place, Sequences, Values

#: A number for all samples, or one for each sample of the micro-batch: a tensor, an array or a list.
Discount = float | Tensor | Array | Sequence[float]


def segment_scan(
    values: Values,
    local: Place,
    cp_group: Group | None = None,
    *,
    gamma: Discount = 1.0,
    steps: Literal["active", "all"] = "active",
    reverse: bool = False,
    exclusive: bool = False,
    per: str = "sample",
) -> Tensor:
    """``S_t = m_t v_t + gamma S_{t-1}`` at every active token of a sequence, 0 at masked ones.

    >>> local = Samples([torch.tensor([1, 1, 0, 1]), torch.tensor([1])]).local(0, 1)
    >>> values = torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0])
    >>> segment_scan(values, local)
    tensor([1., 3., 0., 7., 5.])
    >>> segment_scan(values, local, gamma=0.5, reverse=True)  # 1 + 0.5 * 2 + 0.25 * 4, and so on
    tensor([3., 4., 0., 4., 5.])
    >>> segment_scan(values, local, gamma=0.5, reverse=True, steps="all")  # 1 + 0.5 * 2 + 0.125 * 4
    tensor([2.5000, 3.0000, 0.0000, 4.0000, 5.0000])

    All ranks of the CP group must call it together, and go backward through its result together. Each way takes one
    collective of 16 bytes per chunk of a sequence for one tensor, 8 more for each further one.

    Args:
        values, local, cp_group: as in `segment_sum`.
        gamma: discount of each step, in [0, 1]; or of each sample's steps, [num_samples].
        steps: t - 1 is the ``active`` token before, however many masked ones lie between (as in GAE); or ``all``
            entries of the mask are steps (as in FIPO's future KL).
        reverse: from the last token to the first.
        exclusive: without the token's own value: S_{t-1}.
        per: as in `segment_sum`; samples of one unit follow one another in the order of the micro-batch.

    Returns:
        In the shape of the values, or [len(values), ...] for several; computed in float64 and rounded to float32
        (float64 if a value is float64).

    Raises as `segment_sum`, and ValueError for a discount outside [0, 1] or unknown steps.
    """
    check_choice("steps", steps, ("active", "all"))
    check_bool("reverse", reverse)
    check_bool("exclusive", exclusive)
    sequences = Sequences.of("segment_scan", values, local, cp_group, per)
    discount = check_discount("gamma", gamma, sequences.tokens, "1 is a plain sum")
    if sequences.segments.entry_segments is not None:
        raise ValueError(f"a scan per={per!r} with ids per token: a scan runs along samples. Pass ids per sample.")
    masked = sequences.mask == 0
    discounted = ~masked
    if steps == "all":  # padding is no step
        samples = sequences.tokens.samples
        entries = samples.in_buffer([np.ones(length) for length in samples.mask_lengths]).reshape(-1)
        discounted = on_device(sequences.tokens.of(entries), sequences.mask.device) != 0
    at_tokens = discount_at_tokens(discount, sequences.tokens, sequences.mask.device)
    discounts = torch.where(discounted, at_tokens, torch.ones_like(sequences.mask))
    own = (torch.stack(sequences.rows) * sequences.mask).masked_fill(masked, 0)
    before: Tensor = _Before.apply(_Chunks.of(sequences), reverse, discounts, own)
    scanned = before if exclusive else discounts * before + own
    shape = (len(values), *values[0].shape) if isinstance(values, Sequence) else values.shape
    return scanned.masked_fill(masked, 0).to(sequences.dtype).view(shape)


def check_discount(name: str, discount: Discount, tokens: LocalTokens, usual: str) -> float | Tensor:
    """The discount as a number or, for each sample, float64 [num_samples], on the device that it came on.

    Raises ValueError for one outside [0, 1], of any kind, and for another number of them.
    """
    if is_number(discount):
        check_within(name, discount, "[0, 1]", usual)
        return discount
    number = len(tokens.samples)
    try:
        discounts = torch.as_tensor(discount, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        discounts = None
    if discounts is None or discounts.shape not in ((), (number,)):
        shown = f"is {discount!r}" if discounts is None else f"of shape {tuple(discounts.shape)}"
        raise ValueError(
            f"{name} {shown} for {number} samples: it must be a number in [0, 1], or one for each sample of the "
            f"micro-batch. {usual}."
        )
    if discounts.numel():
        require(
            ((discounts >= 0) & (discounts <= 1)).all(),
            lambda: f"{name} from {discounts.amin():.3g} to {discounts.amax():.3g}",
            f"it must be in [0, 1]. {usual}.",
        )
    return discounts


def discount_at_tokens(discount: float | Tensor, tokens: LocalTokens, device: torch.device) -> float | Tensor:
    """A checked discount at each of a rank's tokens, [num_local_tokens], or one number for all."""
    if not isinstance(discount, Tensor):
        return discount
    discounts = to_device(discount, device)
    if not discounts.ndim:
        return discounts
    if not len(discounts):  # padding of a filler
        return discounts.new_zeros(len(tokens))
    return discounts.repeat_interleave(on_device(tokens.counts, device), output_size=len(tokens))


@dataclass(frozen=True)
class _Chunks:
    """Runs of tokens of one sequence, on the host: this rank's, and those of all ranks in the order of sequences."""

    lengths: list[int]  # of this rank's, in the order of its tokens
    places: list[int]  # of these among those of all ranks
    sequences: list[int]  # the sequence of each of all ranks' chunks
    group: Group | None

    @classmethod
    def of(cls, sequences: Sequences) -> "_Chunks":
        unit = sequences.segments.unit.tolist()
        every = sorted((unit[i], start) for start, _, i in sequences.tokens.runs_of_ranks)
        place = {start: k for k, (_, start) in enumerate(every)}
        runs = sequences.tokens.runs
        lengths, places = [n for _, n, _ in runs], [place[start] for start, _, _ in runs]
        return cls(lengths, places, [sequence for sequence, _ in every], sequences.group)

    def reversed(self) -> "_Chunks":
        last = len(self.sequences) - 1
        return _Chunks(self.lengths[::-1], [last - k for k in self.places[::-1]], self.sequences[::-1], self.group)


class _Before(torch.autograd.Function):
    """``s_t = a_{t-1} s_{t-1} + b_{t-1}`` within each sequence; the gradient of b is the same, the other way round."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, reverse: bool, discounts: Tensor, own: Tensor) -> Tensor:
        ctx.chunks, ctx.reverse, ctx.discounts = chunks, reverse, discounts
        return _before(discounts, own, chunks, reverse)

    @staticmethod
    @first_order("segment_scan")
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, _before(ctx.discounts, gradient, ctx.chunks, not ctx.reverse)


def _before(discounts: Tensor, own: Tensor, chunks: _Chunks, reverse: bool) -> Tensor:
    """Discounts a [num_tokens] and values b [num_rows, num_tokens] -> s [num_rows, num_tokens]."""
    if reverse:
        return _before(discounts.flip(-1), own.flip(-1), chunks.reversed(), False).flip(-1)
    lengths = np.array(chunks.lengths, np.int64)
    firsts = _flags(len(discounts), lengths.cumsum() - lengths, own.device)
    products, sums = _scan(discounts, own, firsts)
    before = sums.roll(1, -1).masked_fill(firsts, 0)
    if len(set(chunks.sequences)) == len(chunks.sequences):  # each sequence is one chunk
        return before
    places, lasts = (on_device(x, own.device) for x in (np.array(chunks.places, np.int64), lengths.cumsum() - 1))
    # Of each chunk the product of its discounts, then its sums: a sequence of chunks is scanned as one of tokens.
    every = own.new_zeros(1 + len(own), len(chunks.sequences))
    every.index_copy_(1, places, torch.cat([products[None], sums])[:, lasts])
    if chunks.group is not None:
        reduce_in_place(every, chunks.group)  # a chunk is one rank's: all others add 0 to it
    begins = np.flatnonzero(np.diff(chunks.sequences, prepend=-1))
    starts = _flags(every.shape[1], begins, own.device)
    carried = _scan(every[0], every[1:], starts)[1].roll(1, -1).masked_fill(starts, 0)[:, places]
    carried = carried.repeat_interleave(on_device(lengths, own.device), -1, output_size=own.shape[1])
    # What the chunks before carry is discounted by this chunk's tokens before each token.
    return before + products.roll(1).masked_fill(firsts, 1) * carried


def _scan(products: Tensor, sums: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Products of discounts and discounted sums from the last first place up to each place."""
    cut, stride = firsts, 1
    while stride < len(cut):  # places so far before are cut off where a first one lies between
        sums = sums.roll(stride, -1).masked_fill(cut, 0) * products + sums
        products = products.roll(stride).masked_fill(cut, 1) * products
        cut, stride = cut | cut.roll(stride), 2 * stride
    return products, sums


def sums_within(values: Tensor, unit: Tensor) -> Tensor:
    """Running sums that begin anew with each unit, whose values lie side by side.

    A unit's sums have the same bits wherever it lies, and whatever lies before it.
    """
    firsts = unit.diff(prepend=unit.new_full((1,), -1)) != 0
    return _scan(torch.ones_like(values), values[None], firsts)[1][0]


def _flags(number: int, places: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    flags = np.zeros(number, bool)
    flags[places] = True
    return on_device(flags, device)
