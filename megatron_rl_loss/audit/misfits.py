"""Weights that no hypothesis fits: a few that weigh unlike all others, copies, ranks scaled apart, a law.

What is found is taken off, and what is left is read again. So each of these is a deviation, and beside it there may be
a reading of the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_rl_loss.audit.causes import OTHERS
from megatron_rl_loss.audit.comparison import Flags
from megatron_rl_loss.audit.counts import Count
from megatron_rl_loss.audit.hypotheses import Hypothesis, countable, is_close, library
from megatron_rl_loss.audit.places import PARTITIONS, found
from megatron_rl_loss.audit.readings import UNNAMED, Reader, Reading
from megatron_rl_loss.audit.report import Deviation
from megatron_rl_loss.audit.tokens import Floats, Ints, StepTokens

_COPIES = 1.5  # cost of samples that are counted several times
_ONE_PLACE = 3.0  # cost of one place that is off by a number without a name
_RANKS_APART = 4.0
_SIMPLE = 2.0  # the most that a hypothesis beside these may cost
_MOST_COPIES = 8
_FEW = 0.25  # the largest share of tokens that are a few


@dataclass
class Explanation:
    """Readings of what is left of measured/asked, the simplest first, when some deviations are taken off.

    `cost` says how far-fetched all of it is.
    """

    deviations: list[Deviation]
    ratio: Floats
    readings: list[Reading]
    cost: float


# ---- of cells


def explain(reader: Reader, ratio: Floats) -> Explanation:
    """The simplest explanation of measured/asked, [num_active]; at least the partition that it follows."""
    readings = reader.readings(ratio)
    choices = [Explanation([], ratio, readings, readings[0].cost)] if readings else []
    if not reader.sound and not (readings and readings[0].cost <= _ONE_PLACE):
        choices += _one_place_off(reader, ratio)
        if not readings:
            choices += _with_copies(reader, ratio)
    if not choices:
        choices += _with_ranks_apart(reader, ratio)
    return min(choices, key=lambda one: one.cost) if choices else _by_partition(reader, ratio)


def _one_place_off(reader: Reader, ratio: Floats) -> Iterator[Explanation]:
    """A single rank, micro-batch or sample, with a factor that all others have not."""
    shape, factors = reader.places(ratio)
    values = np.array([factor for _, factor in factors])
    usual = float(np.median(values)) if len(values) > 2 else 1.0
    off = np.flatnonzero(np.abs(values - usual) > reader.tolerance * usual)
    if len(off) != 1 or len(values) < 2:
        return
    place, factor = factors[off[0]][0], float(values[off[0]]) / usual
    there = np.abs(ratio - usual) > reader.tolerance * usual
    left = np.where(there, ratio / factor, ratio)
    text = f"{OTHERS['no_law'].text}: {place} alone"
    deviation = Deviation(shape=shape, causes=("no_law",), factors=((place, factor),), text=text)
    readings = reader.readings(left)
    if readings:
        yield Explanation([deviation], left, readings, _ONE_PLACE + readings[0].cost)


def _with_copies(reader: Reader, ratio: Floats) -> Iterator[Explanation]:
    """Samples that weigh a whole number of times what a hypothesis says are counted several times."""
    for hypothesis in _simple(reader):
        left = ratio if hypothesis is None else ratio * reader.asked_of_cell / reader.shape_of(hypothesis)
        times = left / float(np.median(left))
        whole = np.round(times)
        close = (np.abs(times - whole) <= reader.tolerance * np.maximum(whole, 1)).all()
        if not close or whole.min() != 1 or not 1 < whole.max() <= _MOST_COPIES or (whole > 1).mean() >= 0.5:
            continue
        readings = reader.readings(ratio / whole)
        if readings and readings[0].cost < UNNAMED:
            shape, factors = reader.places(whole)
            concerned = int(reader.cells.active[reader.active][whole > 1].sum())
            several = tuple((place, factor) for place, factor in factors if factor > 1)
            text = f": a {shape} or more of them"
            deviation = found("twice", "twice", text, factors=several, tokens=concerned)
            yield Explanation([deviation], ratio / whole, readings, _COPIES + readings[0].cost)
            return


def _with_ranks_apart(reader: Reader, ratio: Floats) -> Iterator[Explanation]:
    """A hypothesis over counts of a part, and beside it a factor a CP place or DP rank that follows nothing."""
    if reader.asked_varies:
        return

    def one_a_rank(values: Floats) -> bool:
        return is_close(values / values[first][rank], reader.tolerance)

    for shape, names, pattern in PARTITIONS[:2]:
        group = reader.cells.groups(names)[0][reader.active]
        _, first, inverse = np.unique(group, return_index=True, return_inverse=True)
        rank = inverse.reshape(-1)
        if len(first) < 2 or np.bincount(rank).min() < 2 or one_a_rank(ratio):
            continue  # a plain partition, if anything
        for hypothesis in _simple(reader):
            if hypothesis is None or not hypothesis.local:
                continue
            left = ratio * reader.asked_of_cell / reader.shape_of(hypothesis)
            if not one_a_rank(left):
                continue
            # The rank whose number has the simplest name is the one that is right.
            costs = [reader.cost_of_factor(hypothesis, ratio, left[at] / left[first[0]]) for at in first]
            scale = left[first] / left[first[int(np.argmin(costs))]]
            ids = reader.cells.ids[names[0]][reader.active][first].tolist()
            factors = tuple((pattern.format(one), float(value)) for one, value in zip(ids, scale, strict=True))
            text = f"{OTHERS['no_law'].text}: ranks are scaled apart"
            deviation = Deviation(shape=shape, causes=("no_law",), factors=factors, text=text)
            readings = reader.readings(ratio / scale[rank])
            if readings:
                yield Explanation([deviation], ratio / scale[rank], readings, _RANKS_APART + readings[0].cost)
            return


def _simple(reader: Reader) -> Iterator[Hypothesis | None]:
    yield reader.asked
    if not reader.asked_varies:
        modes = library(reader.cells, reader.step.asked.units)
        yield from (one for one in modes if one.cost <= _SIMPLE and countable(one, reader.cells))


def _by_partition(reader: Reader, ratio: Floats) -> Explanation:
    """No hypothesis: the partition that measured/asked follows, and its law."""
    shape, factors = reader.places(ratio)
    law = _law(reader, ratio)
    if law is None:
        deviation = found("no_law", shape, factors=factors)
    else:
        count, power = law
        cause = "power_of_length" if count.what == "tokens" and count.unit == "sample" else "law"
        formula = f"({count.words})^{power:.4g}"
        deviation = found(cause, shape, f": {formula}", factors=factors, formulas=(formula,))
    return Explanation([deviation], ratio, [], UNNAMED)


def _law(reader: Reader, ratio: Floats) -> tuple[Count, float] | None:
    """The count whose power measured/asked is, and the power."""
    logs = np.log(ratio)
    for count in _lawful(reader):
        values = np.log(reader.value(count))
        if len(np.unique(values)) < 3:  # two points are on every line
            continue
        power = float(np.cov(values, logs)[0, 1] / values.var(ddof=1))
        left = logs - power * values
        if power and float(np.ptp(left)) <= 2 * reader.tolerance:
            return count, power
    return None


def _lawful(reader: Reader) -> Iterator[Count]:
    """What a factor may follow."""
    cells = reader.cells
    prompts = ("prompt",) if cells.has_prompts else ()
    lengths = [counting for counting in ("response", "total") if counting in cells.lengths_known]
    for scope in cells.scopes():
        for unit in ("scope", *prompts, "sample", "rollout"):
            for counting in ("mask", "length", *lengths):
                yield Count("tokens", scope, counting, unit)
    for scope in cells.scopes():
        for unit in ("scope", *prompts):
            for what in ("rollout", "sample", *prompts):
                for counting in ("all", "active") if what != unit else ():
                    yield Count(what, scope, counting, unit)


# ---- of tokens


def odd_tokens(cell: Ints, ratio: Floats, tolerance: float) -> tuple[Flags, Floats]:
    """Which of these entries weigh unlike all others, if only a few do, and how many times as much.

    Unlike the others of the step, or else unlike the others of their cell. Both [num_entries].
    """
    of_step = np.full(len(ratio), abs(float(np.median(ratio))))
    by_cell = np.lexsort((ratio, cell))
    sizes = np.bincount(cell)
    middle = by_cell[(sizes.cumsum() - sizes + (sizes - 1) // 2).clip(0, len(cell) - 1)]
    of_cell = np.abs(ratio[middle][cell])
    for usual in (of_step, of_cell):
        odd = np.abs(ratio - usual) > tolerance * usual
        if 0 < odd.mean() <= _FEW:
            return odd, ratio / usual
    return np.zeros(len(ratio), np.bool_), np.ones(len(ratio))


def say_odd(tokens: StepTokens, entries: Ints, odd: Flags, factor: Floats, tolerance: float) -> Deviation:
    """These tokens, as samples where whole samples are odd."""
    sample = tokens.sample[entries]
    factors: list[tuple[str, float]] = []
    whole = True
    for number in np.unique(sample[odd]).tolist():
        here = sample == number
        if odd[here].all() and np.ptp(factor[here]) <= tolerance * np.abs(factor[here]).max():
            factors.append((f"sample {number}", float(np.median(factor[here]))))
        else:
            whole = False
            at = np.flatnonzero(here & odd)
            places = tokens.position[entries[at]].tolist()
            factors += [(f"sample {number}, token {t}", float(factor[i])) for t, i in zip(places, at, strict=True)]
    shown = "; ".join(place for place, _ in factors[:4]) + (f" and {len(factors) - 4} more" if len(factors) > 4 else "")
    text = f": {int(odd.sum())} of {len(odd)}, {'all of ' if whole else ''}{shown}"
    return found("odd_tokens", "sample" if whole else "token", text, factors=tuple(factors), tokens=int(odd.sum()))
