"""Scans along a sequence whose tokens lie on several context-parallel (CP) ranks: from tokens to tokens, with gradient.

A scan is a tree: tokens are joined to pairs, pairs to fours, and so on; then what is before a block is joined to its
first half. That is O(local tokens) work in 2 log2(local tokens) rounds of whole-tensor operations, for any associative
way to join two states. Nothing is subtracted or divided again, so nothing cancels and no power of a discount overflows.
Where tokens are cut, one collective exchanges the last states of the ranks' chunks; each rank then scans those of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_choice, check_within, first_order
from megatron_rl_loss.losses.place import OfTokens, Place, exchange_group, given_rows, located, units_of
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.masks import ints_on
from megatron_rl_loss.step.samples import LocalTokens
from megatron_rl_loss.step.totals import StepTotals

Scan = Literal["sum", "max", "min"]
#: What the tokens up to a token come to: two rows of numbers, [..., num_tokens].
_State = tuple[Tensor, ...]
_Join = Callable[[_State, _State], _State]


def segment_scan(
    values: Tensor | Sequence[Tensor],
    local: Place,
    cp_group: Group | None = None,
    *,
    kind: Scan = "sum",
    gamma: float = 1.0,
    reverse: bool = False,
    exclusive: bool = False,
    empty: float | None = None,
    per: Literal["sample", "rollout"] = "sample",
    totals: StepTotals | None = None,
) -> OfTokens:
    """At every token what its sequence comes to up to there: ``S_t = m_t v_t + gamma S_{t-1}``, or a running extreme.

    >>> local = Samples([torch.tensor([1, 1, 0, 1]), torch.tensor([1])]).local(0, 1)
    >>> values = torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0])
    >>> segment_scan(values, local)
    tensor([1., 3., 0., 7., 5.])
    >>> segment_scan(values, local, gamma=0.5, reverse=True)  # 1 + 0.5 * 2 + 0.25 * 4, and so on
    tensor([3., 4., 0., 4., 5.])
    >>> segment_scan(values, local, kind="max", exclusive=True, empty=0)
    tensor([0., 1., 0., 2., 0.])

    A scan steps from one active token to the next: t - 1 is the active token before, however many masked ones lie
    between. A sum weighs a token by its mask entry; an extreme does not. The gradient of a sum up to each token is a
    sum from each token on. Tokens that tie for an extreme share its gradient evenly, as those of `torch.amax` do.

    All ranks of the CP group must call it together, and go backward through its result together. Each way takes one
    collective of 16 bytes per chunk of a sequence for one tensor, 8 more for each further one (16 of extremes).

    Args:
        values: of the tokens this rank holds, in the shape of its losses; or several such tensors, which then share one
            collective. NaN and Inf at masked positions are ignored.
        local, cp_group, totals: as in `segment_sum`.
        kind: ``sum``, ``max`` or ``min``.
        gamma: discount of a sum at each step, in [0, 1].
        reverse: from the last token to the first.
        exclusive: without the token's own value: S_{t-1}.
        empty: what masked tokens get, by default 0; in an exclusive max or min also what the first token gets, and then
            it must be stated.
        per: with ``rollout``, samples that share a rollout id are one sequence, in the order of the micro-batch.

    Returns:
        In the shape of the values, or [len(values), ...] for several; computed in float64 and rounded to float32
        (float64 if a value is float64).

    Raises:
        ValueError: as `segment_sum`; a discount of an extreme, or one outside [0, 1]; an exclusive extreme without
            ``empty``.
    """
    check_choice("kind of a scan", kind, get_args(Scan))
    check_choice("unit of a scan", per, ("sample", "rollout"))
    check_within("gamma", gamma, "[0, 1]", "1 is a plain sum")
    if kind != "sum" and gamma != 1:
        raise ValueError(f"gamma={gamma} of a running {kind}: only sums are discounted. Leave gamma out.")
    if kind != "sum" and exclusive and empty is None:
        raise ValueError(
            f"an exclusive running {kind} without empty: a sequence's first token has nothing before it. Say what it "
            "gets, empty=1.0 for ratios, say."
        )
    tokens, cp_group, totals = located(local, cp_group, totals)
    rows, shape, dtype = given_rows("a segment scan's values", values, tokens)
    if not rows:
        return OfTokens(torch.zeros(0, len(tokens)))
    runs = _Runs.of(tokens, units_of(tokens.samples, per, totals), exchange_group(tokens, cp_group), reverse)
    mask = tokens.mask.to(rows[0].device, non_blocking=True).double()
    stacked = torch.stack([row.reshape(-1).double() for row in rows])
    if kind == "sum":
        found, given = _sums(stacked, mask, gamma, runs, exclusive), mask != 0
    else:
        found, given = _extremes(stacked, mask != 0, -1 if kind == "min" else 1, runs, exclusive)
    return OfTokens(torch.where(given, found, empty or 0.0).to(dtype).view(shape))


def _sums(values: Tensor, mask: Tensor, gamma: float, runs: "_Runs", exclusive: bool) -> Tensor:
    active = mask != 0
    discounts, own = torch.ones_like(mask).masked_fill(active, gamma), torch.where(active, values * mask, 0)
    before = _SumBefore.apply(runs, discounts, None, own)  # type: ignore[no-untyped-call]
    return before if exclusive else discounts * before + own


def _extremes(values: Tensor, active: Tensor, sign: int, runs: "_Runs", exclusive: bool) -> tuple[Tensor, Tensor]:
    """The extremes, and where there is one.

    An extreme is the mean of the tokens that tie for it: their sum since a better one came, by their number. So its
    gradient is that of a sum that a better token breaks off.
    """
    own = torch.where(active, sign * values.detach(), -torch.inf), active.double().expand_as(values).contiguous()
    before = _before(own, _join_maxima, (-torch.inf, 0.0), runs)
    here = _join_maxima(before, tuple(row.clone() for row in own))
    stays, ties = ~(active & (own[0] > before[0])), before[1] if exclusive else here[1]
    tied = torch.where(active & ~(own[0] < here[0]), values, 0)  # NaN too
    known = torch.where(before[1] > 0, sign * before[0] * before[1], 0)
    sums = _SumBefore.apply(runs, stays.double(), known, tied)  # type: ignore[no-untyped-call]
    return (sums if exclusive else torch.where(stays, sums, 0) + tied) / ties.clamp(min=1), active & (ties > 0)


class _SumBefore(torch.autograd.Function):
    """What comes before each token, ``s_t = a_{t-1} s_{t-1} + b_{t-1}``, the gradient of b: what comes after it."""

    @staticmethod
    def forward(ctx: Any, runs: "_Runs", discounts: Tensor, known: Tensor | None, own: Tensor) -> Tensor:
        ctx.runs, ctx.discounts = runs, discounts
        return _before((discounts, own), _join_sums, (1.0, 0.0), runs)[1] if known is None else known.clone()

    @staticmethod
    @first_order("segment_scan")
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        turned = replace(ctx.runs, reverse=not ctx.runs.reverse)
        return None, None, None, _before((ctx.discounts, gradient), _join_sums, (1.0, 0.0), turned)[1]


def _join_sums(x: _State, y: _State) -> _State:
    """(product of discounts, discounted sum), in place of y."""
    y[1].addcmul_(x[1], y[0])
    return y[0].mul_(x[0]), y[1]


def _join_maxima(x: _State, y: _State) -> _State:
    """(largest value, how many have it), in place of y; NaN is the largest."""
    best = torch.maximum(x[0], y[0])
    y[1].mul_(y[0].lt(best).logical_not_()).add_(x[1] * x[0].lt(best).logical_not_())
    return y[0].copy_(best), y[1]


@dataclass(frozen=True)
class _Runs:
    """Where this rank's runs of tokens are in their sequences, on the host."""

    lengths: list[int]  # of this rank's, in the order of its tokens
    places: list[int]  # of these among the runs of all ranks
    units: list[int]  # the sequence of each run of all ranks, in the order of the sequences
    group: Group | None
    reverse: bool

    @classmethod
    def of(cls, tokens: LocalTokens, units: Tensor | None, group: Group | None, reverse: bool) -> "_Runs":
        unit = list(range(max(len(tokens.samples), 1))) if units is None else units.tolist() or [0]
        every = sorted((unit[i], start) for start, _, i in tokens.runs_of_ranks)
        place = {start: k for k, (_, start) in enumerate(every)}
        mine = tokens.runs
        lengths, places = [length for _, length, _ in mine], [place[start] for start, _, _ in mine]
        return cls(lengths, places, [one for one, _ in every], group, reverse)


def _before(x: _State, join: _Join, identity: tuple[float, ...], runs: _Runs) -> _State:
    """What each token finds: the joined states of those before it in its sequence, on all ranks."""
    if runs.reverse:
        last = len(runs.units) - 1
        turned = _Runs(runs.lengths[::-1], [last - k for k in runs.places[::-1]], runs.units[::-1], runs.group, False)
        return _flip(_before(_flip(x), join, identity, turned))
    device, ends = x[0].device, list(accumulate(runs.lengths))
    done, firsts = _scan(x, [0, *ends[:-1]], join, identity)
    found = _shifted(done, firsts, identity)
    if len(set(runs.units)) == len(runs.units):  # each sequence is one run
        return found
    lasts, lengths, places = (ints_on(device, ints) for ints in ([end - 1 for end in ends], runs.lengths, runs.places))
    totals = [row[..., lasts].reshape(-1, len(ends)) for row in done]
    every = totals[0].new_zeros(sum(map(len, totals)), len(runs.units)).index_copy_(1, places, torch.cat(totals))
    if runs.group is not None:
        dist.all_reduce(every, group=runs.group)  # a run is one rank's: all others add 0 to it
    parts = every.split([len(total) for total in totals])
    of_runs = tuple(part.view(*row.shape[:-1], -1) for part, row in zip(parts, done, strict=True))
    begins = [k for k, unit in enumerate(runs.units) if not k or unit != runs.units[k - 1]]
    carried = _shifted(*_scan(of_runs, begins, join, identity), identity)
    spread = (row[..., places].repeat_interleave(lengths, -1, output_size=len(firsts)) for row in carried)
    return join(tuple(spread), found)


def _scan(x: _State, begins: list[int], join: _Join, identity: tuple[float, ...]) -> tuple[_State, Tensor]:
    """The joined states up to each place from the beginning before it, and where beginnings are."""
    x, number = tuple(row.clone() for row in x), x[0].shape[-1]
    firsts = torch.zeros(number, dtype=torch.bool, device="cpu")
    if number:
        firsts[begins] = True
    firsts = firsts.to(x[0].device, non_blocking=True)
    cut = firsts.clone()  # whether a beginning is among the places that a state is of

    def step(earlier: int, later: int, stride: int) -> None:
        """Nothing passes a beginning, NaN and Inf neither."""
        fresh = cut[later::stride]
        rows = (row[..., earlier::stride][..., : len(fresh)] for row in x)
        passed = tuple(row.masked_fill(fresh, one) for row, one in zip(rows, identity, strict=True))
        join(passed, tuple(row[..., later::stride] for row in x))

    half = 1
    while 2 * half <= number:  # of blocks of so many places twice as many
        step(half - 1, 2 * half - 1, 2 * half)
        cut[2 * half - 1 :: 2 * half].logical_or_(cut[half - 1 :: 2 * half][: number // (2 * half)])
        half *= 2
    while half > 1:  # what is before a block is done: it goes to the block's first half
        half //= 2
        step(2 * half - 1, 3 * half - 1, 2 * half)
    return x, firsts


def _flip(x: _State) -> _State:
    return tuple(row.flip(-1) for row in x)


def _shifted(x: _State, firsts: Tensor, identity: tuple[float, ...]) -> _State:
    """The state of the place before; the identity in the first place."""
    return tuple(row.roll(1, -1).masked_fill(firsts, one) for row, one in zip(x, identity, strict=True))
