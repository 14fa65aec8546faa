"""What weights could be, as data: modes over the step's counts, or over those of a part of it.

A hypothesis is the weight of a token beside its mask, up to one number:

    v = times / (D * U),   D the size of the token's unit, U the number of units, each counted somewhere, somehow.

`MODES` says which D and U belong together; a mode of the table is a hypothesis whose scopes are the whole step. Bugs
are the same products over a micro-batch, a rank or a CP place, and other ways of counting.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl_loss.audit.counts import COUNTINGS, SCOPES, WIDTHS, Cells, Count
from megatron_rl_loss.audit.tokens import Floats, StepTokens
from megatron_rl_loss.modes.names import NAMES, Aggregation
from megatron_rl_loss.modes.table import MODES, Mode, OwnMode
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.counting import reduce_step_totals
from megatron_rl_loss.step.samples import Samples

#: Parts that are seldom counted over by mistake.
_SELDOM = ("microbatch_over_dp", "rank")
#: How units of the step are counted where the tokens' own counts are asked about.
_LOCAL_COUNTINGS = (
    "active",
    "length",
    "response",
    "total",
    "clamped",
    "masked_length",
    "shifted",
    "rectangle",
    "padded_rectangle",
)


@dataclass(frozen=True)
class Hypothesis:
    """A shape of weights.

    Attributes:
        mode: the row of the table of modes that this is when every scope is the step.
        size, units: D and U; None for a constant.
        times: what it is multiplied by (rows of the micro-batch, say).
        again: asked weights divided once more by this count, or multiplied by it (`again_power` -1 or 1).
    """

    mode: str
    size: Count | None = None
    units: Count | None = None
    times: Count | None = None
    again: Count | None = None
    again_power: int = -1

    @property
    def part(self) -> str:
        """The finest scope that anything is counted in."""
        scopes = [count.scope for count in (self.size, self.units, self.times) if count is not None]
        return max(scopes, key=list(SCOPES).index, default="step")

    @property
    def kind(self) -> tuple[str, ...]:
        """What it counts and where, but not how; of the step's units also which count."""
        counts = (self.size, self.units, self.times, self.again)
        units = "" if self.units is None or self.local else self.units.counting
        named = [f"{one.what} of {one.unit} in {one.scope}" if one is not None else "" for one in counts]
        return (self.mode, *named, units, str(self.again_power))

    @property
    def by_width(self) -> bool:
        """Whether a padded width stands where a divisor should."""
        return self.size is not None and self.size.counting in WIDTHS

    @property
    def local(self) -> bool:
        return self.part != "step" or (self.units is not None and self.units.unit != "scope")

    def shape(self, number: int, value: Callable[[Count], Floats]) -> Floats:
        """v up to one number, for so many cells; `value` gives a count for each of them."""
        values = np.ones(number)
        for count, power in ((self.size, -1), (self.units, -1), (self.times, 1), (self.again, self.again_power)):
            if count is not None:
                values = values * value(count) if power > 0 else values / value(count)
        return values

    def of_the_step(self) -> "Hypothesis":
        """The same with every count over the whole step: a mode of the table."""
        size = None if self.size is None or self.by_width else replace(self.size, scope="step", counting="mask")
        units = None
        if self.units is not None and self.units.what != "microbatch":
            counting = "all" if self.units.scope != "step" or self.units.unit != "scope" else self.units.counting
            units = replace(self.units, scope="step", unit="scope", counting=counting)
        return Hypothesis(self.mode, size, units)

    def counted_plainly(self) -> "Hypothesis":
        """The same with tokens counted by the mask."""
        return self if self.size is None or self.by_width else replace(self, size=replace(self.size, counting="mask"))

    def natural(self, cells: Cells) -> float:
        """What it would be divided by if the parts were averaged: their number, or the total of `times`."""
        if self.times is not None:
            return float(cells.values(replace(self.times, scope="step"))[0])
        return averages_of_parts(self, cells, "all")

    def words(self, cells: Cells, divisor: float | None = None) -> str:
        """As a sentence's subject, with the names that other frameworks have for it."""
        base = MODES[self.mode]
        counting = "all" if self.units is None else self.units.counting
        by = "" if divisor is None else f" with divisor {divisor:g}"
        units = f", unit counting {counting}" if base.unit != "step" and not self.local else ""
        known = aliases(self.mode, counting, divisor)
        if self.again is not None:
            verb = "divided" if self.again_power < 0 else "multiplied"
            return f"{self.mode}{by}, {verb} once more by {self.again.words}"
        odd = [COUNTINGS[count.counting] for count in (self.size,) if count is not None and count.counting != "mask"]
        counted = f", tokens counted as {odd[0]}" if odd else ""
        counts = [count for count in (self.size, self.units) if count is not None]
        if any("sample" in (count.unit, count.what) for count in counts) and not cells.rollouts_are_samples:
            counted += ", each row a rollout"
        if not self.local:
            also = f" ({', '.join(known[:3])})" if known and not odd else ""
            return f"{self.mode}{by}{units}{counted}{also}"
        if self.units is not None and self.units.unit != "scope":
            return f"the mean over {self.units.unit}s of the mean over their {self.units.what}s"
        if self.by_width and self.size is not None:
            return f"{self.mode} with {self.size.words} for its divisor"
        inexact = [peer.alias for peer in NAMES if peer.nearest == self.mode and not peer.names_a_loss]
        names = inexact if self.part == "microbatch" and self.size is not None and self.size.unit == "scope" else []
        names += [f"{alias} over these counts" for alias in known[:1]]
        also = f" ({', '.join(names)})" if names else ""
        average = (
            "their sum weighted by rows"
            if self.times is not None
            else f"the mean of all {averages_of_parts(self, cells, 'all'):g}"
        )
        return f"{self.mode}{by} over the own counts of {SCOPES[self.part][0]}{counted}, {average}{also}"

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        counts = [count for count in (self.size, self.units) if count is not None]
        odd = [count for count in counts if count.what == "tokens" and count.counting != "mask"]
        parts = (
            1.5 * self.local
            + 0.3 * (self.part in _SELDOM)
            + 0.5 * (len({count.scope for count in counts if count.scope != "step"}) > 1)
        )
        return parts + len(odd) + (self.times is not None) + 2.5 * (self.again is not None)


def averages_of_parts(hypothesis: Hypothesis, cells: Cells, counting: str) -> float:
    """Over how many parts a mean would be taken, counted as in `Cells.number_of_parts`."""
    size, units = hypothesis.size, hypothesis.units
    if units is not None and units.what == "microbatch":
        names: tuple[str, ...] = ("dp_rank", "cp_rank") if hypothesis.part == "cp_place" else ("dp_rank",)
    elif units is not None and units.unit != "scope":
        names = (units.unit,)
    elif size is not None and size.unit == "scope" and not hypothesis.by_width:
        names = SCOPES[hypothesis.part][1]
    elif units is not None and units.scope != "step":
        names = SCOPES[units.scope][1]
        if size is not None and size.scope == "cp_place" and "cp_rank" not in names:
            names = (*names, "cp_rank")
    elif size is not None and size.scope in ("cp_place", "rank"):
        names = ("cp_rank",)  # the mean over CP ranks of each one's mean
    else:
        names = ()
    return float(cells.number_of_parts(names, counting))


class StepSamples:
    """The step's micro-batches and totals, to ask modes for weights."""

    def __init__(self, tokens: StepTokens) -> None:
        starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
        lengths = np.diff(np.append(starts, len(tokens)))
        masks = torch.from_numpy(np.ascontiguousarray(tokens.mask)).split(lengths.tolist())
        microbatch = tokens.groups(("dp_rank", "microbatch"))[starts]
        cuts = [0, *(np.flatnonzero(np.diff(microbatch)) + 1).tolist(), len(starts)]
        rollouts = tokens.rollout[starts]
        split_rollouts = len(np.unique(rollouts)) < len(starts)
        prompts = tokens.prompt[starts] if (tokens.prompt >= 0).all() else None
        self.microbatches = [
            Samples(
                masks[begin:end],
                rollout_ids=rollouts[begin:end].tolist() if split_rollouts else None,
                prompt_ids=None if prompts is None else prompts[begin:end].tolist(),
            )
            for begin, end in itertools.pairwise(cuts)
            if end > begin
        ]
        self.totals = reduce_step_totals(self.microbatches)

    def weights(self, aggregation: Aggregation) -> Floats:
        """The weight of every entry that an aggregation asks for, mask included, [num_entries].

        Raises ValueError for a mode of one's own that looks at what masks and ids do not say (labels).
        """
        totals, mode = self.totals, aggregation.mode
        if isinstance(mode, OwnMode) and mode.statistics:
            totals = reduce_step_totals(self.microbatches, statistics=mode.statistics)
        weights = [weigh(aggregation, samples.local(0, 1), totals) for samples in self.microbatches]
        return torch.cat(weights).double().numpy() if weights else np.zeros(0)


def hypothesis_of(aggregation: Aggregation) -> Hypothesis | None:
    """A mode of the table as a hypothesis; None for a mode of one's own."""
    mode = aggregation.mode
    return _over(mode, aggregation.units) if isinstance(mode, Mode) else None


def _over(mode: Mode, counting: str) -> Hypothesis:
    unit = "scope" if mode.unit == "step" else mode.unit
    size = None if mode.takes_divisor else Count("tokens", unit=unit)
    units = None if mode.unit == "step" else Count(mode.unit, counting=counting)
    return Hypothesis(mode.name, size, units)


def library(cells: Cells, counting: str) -> Iterator[Hypothesis]:
    """Everything that is tried, modes of the table first.

    Args:
        counting: how the asked mode counts units, all or active.
    """
    parts = [scope for scope in cells.scopes() if scope != "step"]
    modes = [mode for mode in MODES.values() if mode.unit != "prompt" or cells.has_prompts]
    for mode in modes:
        yield _over(mode, counting)
        if mode.unit != "step":
            yield _over(mode, "active" if counting == "all" else "all")
    for mode in modes:
        if mode.unit == "step" and not mode.takes_divisor:
            yield from _means_of_parts(mode, parts)
        elif mode.unit != "step":
            yield from _units_of_parts(mode, parts, cells)


def _means_of_parts(mode: Mode, parts: list[str]) -> Iterator[Hypothesis]:
    for part in parts:
        size = Count("tokens", part)
        yield Hypothesis(mode.name, size)
        for rows in ("all", "active"):
            yield Hypothesis(mode.name, size, times=Count("sample", part, rows))
        for counting in _LOCAL_COUNTINGS:
            yield Hypothesis(mode.name, replace(size, counting=counting))
        if part in ("microbatch", "cp_place"):  # the mean over those of a rank that are not empty
            yield Hypothesis(mode.name, size, Count("microbatch", "dp_rank", "active"))


def _units_of_parts(mode: Mode, parts: list[str], cells: Cells) -> Iterator[Hypothesis]:
    """Means over units where the units' tokens, their number, or both are counted in a part."""
    rows_too = mode.unit == "rollout" and not cells.rollouts_are_samples
    for unit in ("rollout", "sample") if rows_too else (mode.unit,):
        sizes: list[Count | None] = [None]
        if not mode.takes_divisor:
            of_unit = Count("tokens", unit=unit)
            whole = ("cp_place",) if unit == "sample" or (unit == "rollout" and not rows_too) else tuple(parts)
            sizes = [of_unit, *(replace(of_unit, scope=part) for part in parts if part in whole)]
            sizes += [
                replace(of_unit, counting=counting) for counting in _LOCAL_COUNTINGS if "rectangle" not in counting
            ]
        elif "microbatch" in parts:
            for width in WIDTHS:
                yield Hypothesis(mode.name, Count("tokens", "microbatch", width), Count(unit, counting="all"))
        for size in sizes:
            for part in ("step", *parts):
                for counting in ("all", "active") if part != "step" else ("all",):
                    yield Hypothesis(mode.name, size, Count(unit, part, counting))
    if mode.name == "sample_mean" and cells.has_prompts:  # the mean over prompts of the mean over their samples
        for unit in ("rollout", "sample") if rows_too else ("rollout",):
            for counting in ("all", "active"):
                yield Hypothesis(mode.name, Count("tokens", unit=unit), Count(unit, "step", counting, "prompt"))


def divided_again(asked: Hypothesis, cells: Cells) -> Iterator[Hypothesis]:
    """The asked weights, multiplied or divided by a further count."""
    parts = [scope for scope in cells.scopes() if scope != "step"]
    counts = [Count("tokens", part) for part in parts]
    counts += [Count("sample", part, counting) for part in parts for counting in ("all", "active")]
    counts += [Count("tokens", counting=counting, unit="sample") for counting in ("mask", *_LOCAL_COUNTINGS)]
    if not cells.rollouts_are_samples:
        counts += [Count("tokens", unit="rollout")]
    if cells.has_prompts:
        counts += [
            Count("tokens", unit="prompt"),
            *(Count("sample", counting=c, unit="prompt") for c in ("all", "active")),
        ]
    for count in counts:
        if not (count.counting in COUNTINGS and count.counting in ("response", "total")) or (
            count.counting in cells.lengths_known
        ):
            for power in (-1, 1):
                yield replace(asked, again=count, again_power=power)


def countable(hypothesis: Hypothesis, cells: Cells) -> bool:
    """Whether its counts are known: response and total lengths may not be."""
    counts = [count for count in (hypothesis.size, hypothesis.units) if count is not None]
    return all(count.counting not in ("response", "total") or count.counting in cells.lengths_known for count in counts)


def aliases(mode: str, counting: str, divisor: float | None = None) -> list[str]:
    """What other frameworks call a mode with that unit counting and divisor."""
    return [
        peer.alias
        for peer in NAMES
        if peer.mode == mode
        and not peer.names_a_loss
        and (MODES[mode].unit == "step" or peer.units in (None, counting))
        and (divisor is None or peer.divisor == divisor or (isinstance(peer.divisor, str) and divisor != 1))
    ]


def is_close(values: Floats, tolerance: float) -> bool:
    """Whether positive numbers are all the same."""
    low, high = float(values.min()), float(values.max())
    return low > 0 and math.isfinite(high) and high - low <= tolerance * low
