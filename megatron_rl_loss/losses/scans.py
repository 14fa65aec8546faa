"""Scans along a sequence whose tokens lie on several context-parallel (CP) ranks: from tokens to tokens, with gradient.

Each of log2(local tokens) rounds joins every token's state to that of the token 1, 2, 4, ... before it, for any
associative way to join. Nothing is subtracted or divided again, so nothing cancels and no power of a discount
overflows. Where tokens are cut, one collective exchanges the last states of the ranks' chunks; each rank then scans
those of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_choice, check_within, first_order
from megatron_rl_loss.losses.place import Place, Sequences
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.masks import ints_on
from megatron_rl_loss.step.totals import StepTotals

Scan = Literal["sum", "max", "min"]
#: (states of earlier places, of later ones) -> of both. A state is a column of numbers: [numbers, places].
_Join = Callable[[Tensor, Tensor], Tensor]


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
) -> Tensor:
    """At every token what its sequence comes to up to there: ``S_t = m_t v_t + gamma S_{t-1}``, or a running extreme.

    >>> local = Samples([torch.tensor([1, 1, 0, 1]), torch.tensor([1])]).local(0, 1)
    >>> values = torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0])
    >>> segment_scan(values, local)
    tensor([1., 3., 0., 7., 5.])
    >>> segment_scan(values, local, gamma=0.5, reverse=True)  # 1 + 0.5 * 2 + 0.25 * 4, and so on
    tensor([3., 4., 0., 4., 5.])
    >>> segment_scan(values, local, kind="max", exclusive=True, empty=0)
    tensor([0., 1., 0., 2., 0.])

    t - 1 is the active token before, however many masked ones lie between. A sum weighs a token by its mask entry; an
    extreme does not, and tokens that tie for it share its gradient evenly.

    All ranks of the CP group must call it together, and go backward through its result together. Each way takes one
    collective of 16 bytes per chunk of a sequence for one tensor, 8 more for each further one (16 of extremes).

    Args:
        values, local, cp_group, totals: as in `segment_sum`.
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

    Raises ValueError as `segment_sum`, for a discount of an extreme or outside [0, 1], and for an exclusive extreme
    without ``empty``.
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
    given = Sequences.of("scan", values, local, cp_group, per, totals)
    if given.rows is None:
        return torch.zeros(0, len(given.tokens))
    runs, active = _Runs.of(given, reverse), given.mask != 0
    if kind == "sum":
        found, some = _sums(given.rows, given.mask, gamma, runs, exclusive), active
    else:
        found, some = _extremes(given.rows, active, -1 if kind == "min" else 1, runs, exclusive)
    return torch.where(some, found, empty or 0.0).to(given.dtype).view(given.shape)


def _sums(values: Tensor, mask: Tensor, gamma: float, runs: "_Runs", exclusive: bool) -> Tensor:
    active = mask != 0
    discounts, own = torch.ones_like(mask).masked_fill(active, gamma)[None], torch.where(active, values * mask, 0)
    before = _SumBefore.apply(runs, discounts, None, own)  # type: ignore[no-untyped-call]
    return before if exclusive else discounts * before + own


def _extremes(values: Tensor, active: Tensor, sign: int, runs: "_Runs", exclusive: bool) -> tuple[Tensor, Tensor]:
    """The extremes, and where there is one.

    An extreme is the mean of the tokens that tie for it: their sum since a better one came, by their number. So its
    gradient is that of a sum that a better token breaks off.
    """
    own = torch.cat([torch.where(active, sign * values.detach(), -torch.inf), active.double().expand_as(values)])
    identity = torch.cat([values.new_full((len(values), 1), -torch.inf), values.new_zeros(len(values), 1)])
    before = _before(own, _join_maxima, identity, runs)
    (best, number), here, mine = before.chunk(2), _join_maxima(before, own), own[: len(values)]
    stays, ties = ~(active & (mine > best)), number if exclusive else here[len(values) :]
    tied = torch.where(active & ~(mine < here[: len(values)]), values, 0)  # NaN too
    known = torch.where(number > 0, sign * best * number, 0)
    sums = _SumBefore.apply(runs, stays.double(), known, tied)  # type: ignore[no-untyped-call]
    return (sums if exclusive else torch.where(stays, sums, 0) + tied) / ties.clamp(min=1), active & (ties > 0)


class _SumBefore(torch.autograd.Function):
    """What comes before each token, ``s_t = a_{t-1} s_{t-1} + b_{t-1}``, the gradient of b: what comes after it."""

    @staticmethod
    def forward(ctx: Any, runs: "_Runs", discounts: Tensor, known: Tensor | None, own: Tensor) -> Tensor:
        ctx.runs, ctx.discounts = runs, discounts
        return _sums_before(discounts, own, runs) if known is None else known.clone()

    @staticmethod
    @first_order("segment_scan")
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, _sums_before(ctx.discounts, gradient, replace(ctx.runs, reverse=not ctx.runs.reverse))


def _sums_before(discounts: Tensor, own: Tensor, runs: "_Runs") -> Tensor:
    """Of discounts [rows or 1, num_tokens] and [rows, num_tokens]."""
    number = len(own)

    def join(x: Tensor, y: Tensor) -> Tensor:
        """(products of discounts, discounted sums)"""
        return torch.cat([x[:-number] * y[:-number], x[-number:] * y[:-number] + y[-number:]])

    states = torch.cat([discounts, own])
    identity = states.new_zeros(len(states), 1)
    identity[:-number] = 1
    return _before(states, join, identity, runs)[-number:]


def _join_maxima(x: Tensor, y: Tensor) -> Tensor:
    """(largest values, how many have them); NaN is the largest."""
    (best_x, number_x), (best_y, number_y) = x.chunk(2), y.chunk(2)
    best = torch.maximum(best_x, best_y)
    return torch.cat([best, number_x * ~(best_x < best) + number_y * ~(best_y < best)])


@dataclass(frozen=True)
class _Runs:
    """Where this rank's runs of tokens are in their sequences, on the host."""

    lengths: list[int]  # of this rank's, in the order of its tokens
    places: list[int]  # of these among the runs of all ranks
    units: list[int]  # the sequence of each run of all ranks, in the order of the sequences
    group: Group | None
    reverse: bool

    @classmethod
    def of(cls, given: Sequences, reverse: bool) -> "_Runs":
        tokens = given.tokens
        unit = list(range(max(len(tokens.samples), 1))) if given.units is None else given.units.tolist() or [0]
        every = sorted((unit[i], start) for start, _, i in tokens.runs_of_ranks)
        place = {start: k for k, (_, start) in enumerate(every)}
        lengths, places = [length for _, length, _ in tokens.runs], [place[start] for start, _, _ in tokens.runs]
        return cls(lengths, places, [one for one, _ in every], given.group, reverse)


def _before(states: Tensor, join: _Join, identity: Tensor, runs: _Runs) -> Tensor:
    """What each token finds: the joined states of those before it in its sequence, on all ranks."""
    if runs.reverse:
        last = len(runs.units) - 1
        turned = _Runs(runs.lengths[::-1], [last - k for k in runs.places[::-1]], runs.units[::-1], runs.group, False)
        return _before(states.flip(-1), join, identity, turned).flip(-1)
    device, ends = states.device, list(accumulate(runs.lengths))
    found, done = _scan(states, [0, *ends[:-1]], join, identity)
    if len(set(runs.units)) == len(runs.units):  # each sequence is one run
        return found
    lasts, lengths, places = (ints_on(device, ints) for ints in ([end - 1 for end in ends], runs.lengths, runs.places))
    every = states.new_zeros(len(states), len(runs.units)).index_copy_(1, places, done[:, lasts])
    if runs.group is not None:
        dist.all_reduce(every, group=runs.group)  # a run is one rank's: all others add 0 to it
    begins = [k for k, unit in enumerate(runs.units) if not k or unit != runs.units[k - 1]]
    carried, _ = _scan(every, begins, join, identity)
    return join(carried[:, places].repeat_interleave(lengths, -1, output_size=states.shape[1]), found)


def _scan(states: Tensor, begins: list[int], join: _Join, identity: Tensor) -> tuple[Tensor, Tensor]:
    """The joined states from the beginning before each place on: without its own, and with it."""
    firsts = torch.zeros(states.shape[1], dtype=torch.bool, device="cpu")
    if len(firsts):
        firsts[begins] = True
    cut = firsts = firsts.to(states.device, non_blocking=True)
    stride = 1
    while stride < len(firsts):  # what is so far before a place is not of its sequence where it is cut
        states = join(torch.where(cut, identity, states.roll(stride, -1)), states)
        cut, stride = cut | cut.roll(stride), 2 * stride
    return torch.where(firsts, identity, states.roll(1, -1)), states
