"""`Verdict`: a step's measured weights against those that were asked, as a report of 15 lines and as plain data."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rl_loss.audit.causes import Cause
from megatron_rl_loss.audit.misplaced import Misplaced
from megatron_rl_loss.audit.tokens import Floats, MeasuredStep, StepTokens

_LINES, _WIDTH, _BAR = 15, 112, 60


@dataclass(frozen=True)
class Place:
    """One micro-batch of one DP rank: the lowest and highest measured / asked on each CP rank, and its tokens drawn."""

    dp_rank: int
    microbatch: int
    ratios: tuple[tuple[float, float], ...]  # by CP rank; NaN where it holds no active token
    bar: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The weights of a step's tokens against those that were asked."""

    expected: str  # what was asked, in words
    sound: bool  # every weight is what was asked, within rounding; False where there is no verdict
    unknown: tuple[str, ...] = ()  # why there is no verdict; empty if there is one
    deviation: float = math.nan  # the largest relative difference of a weight
    wrong_share: float = math.nan  # share of the gradient's weight on the wrong tokens, 0 to 1; 0 of a factor
    low: float = math.nan  # the smallest measured / asked of an active token
    high: float = math.nan  # the largest
    tokens: int = 0  # active tokens of the step
    misplaced: tuple[Misplaced, ...] = ()  # weight in the wrong places; the causes are about the rest
    causes: tuple[Cause, ...] = ()  # what fits within rounding, the simplest first; none if nothing does
    places: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self, **more: Any) -> dict[str, Any]:
        """Everything, and more, as plain data; numbers that are not finite are None."""
        plain = asdict(self) | {"causes": [str(cause) for cause in self.causes], "headline": self.headline} | more
        return _finite(plain)

    @property
    def headline(self) -> str:
        """The verdict in a sentence."""
        if self.unknown:
            return f"NO VERDICT: {self.unknown[0]}"
        if self.sound:
            return (
                f"SOUND: {self.expected}; each of {self.tokens} tokens weighs what was asked, to {self.deviation:.1e}"
            )
        if math.isnan(self.low):
            return f"NOT SOUND: asked {self.expected}; weights are not finite"
        apart = f"{self.low:.4g}" if self.is_factor else f"{self.low:.3g} to {self.high:.3g}"
        share = (
            "" if self.wrong_share < 0.0005 else f", {100 * self.wrong_share:.1f} % of all weight is on wrong tokens"
        )
        return f"NOT SOUND: asked {self.expected}; tokens weigh {apart} times what was asked{share}"

    @property
    def is_factor(self) -> bool:
        """True where all tokens weigh the same multiple of what was asked."""
        return self.high - self.low <= 1e-5 * abs(self.high)

    def __str__(self) -> str:
        """At most 15 lines."""
        said = [f"also: {reason}" for reason in self.unknown[1:]]
        said += [f"In the wrong place: {one.text}." for one in self.misplaced]
        if len(self.causes) > 1:
            said.append("Each of these fits; a step of sizes that differ can tell them apart:")
        said += [f"Fits: {cause}." for cause in self.causes]
        if not (self.sound or self.unknown or self.causes or self.low == self.high == 1):
            said.append("No known cause fits: these numbers are what is known.")
        head, tail = _wrapped([self.headline, *said]), _wrapped([f"note: {note}" for note in self.notes])
        return "\n".join([*head, *self._table(_LINES - len(head) - len(tail)), *tail][:_LINES])

    def _table(self, room: int) -> list[str]:
        """Micro-batches that are furthest off, in order."""
        if self.sound or self.unknown or (self.is_factor and not self.misplaced) or room < 3:
            return []
        far = sorted(range(len(self.places)), key=lambda i: -_distance(self.places[i]))[: room - 1]
        chosen = [self.places[i] for i in sorted(far)]
        ratios = [list(map(_shown, place.ratios)) for place in chosen]
        by_cp = any(len(set(of_place)) > 1 for of_place in ratios)
        left = len(self.places) - len(chosen)
        head = "measured / asked" + " by CP rank" * by_cp + f", {left} more in the JSON" * (left > 0)
        cells = [
            [f"DP {place.dp_rank}, micro-batch {place.microbatch}", *(of_place if by_cp else of_place[:1]), place.bar]
            for place, of_place in zip(chosen, ratios, strict=True)
        ]
        widths = [max(map(len, column)) for column in itertools.zip_longest(*cells, fillvalue="")]
        lines = ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)) for row in cells]
        legend = "▄ as asked, █ twice or more, - nothing, ! masked but trained"
        return [f"{head} ({legend}):", *(f"  {line}".rstrip() for line in lines)]


def places_of(measured: MeasuredStep, wanted: Floats) -> tuple[Place, ...]:
    """Each micro-batch of each DP rank."""
    tokens, weights = measured.tokens, measured.weights
    group, on = tokens.groups("dp_rank", "microbatch"), wanted != 0
    ranks = np.unique(tokens.cp_rank)
    found = []
    for first, here in zip(*_members(group), strict=True):
        active = here[on[here]]
        ratio, rank = weights[active] / wanted[active], tokens.cp_rank[active]
        ends = [(ratio[rank == one].min(), ratio[rank == one].max()) if (rank == one).any() else None for one in ranks]
        ratios = tuple((math.nan, math.nan) if end is None else (float(end[0]), float(end[1])) for end in ends)
        bar = _bar(tokens, weights, wanted, here[on[here] | (weights[here] != 0)])
        found.append(Place(int(tokens.dp_rank[first]), int(tokens.microbatch[first]), ratios, bar))
    return tuple(found)


def _members(group: Any) -> tuple[Any, list[Any]]:
    """The first entry of each group, and all entries of each."""
    order = np.argsort(group, kind="stable")
    first = np.unique(group[order], return_index=True)[1]
    return order[first], np.split(order, first[1:])


_BLOCKS = " ▁▂▃▄▅▆▇█"


def _bar(tokens: StepTokens, weights: Floats, wanted: Floats, entries: Any) -> str:
    """A character per token that has or should have weight; where they are too many, the mean of several tokens."""
    if not len(entries):
        return ""
    pieces = [piece for _, piece in zip(*_members(tokens.sample[entries]), strict=True)]
    together = max(1, -(-len(entries) // max(_BAR - len(pieces), 8)))
    bars = []
    for piece in pieces[:_BAR]:
        marks = []
        for begin in range(0, len(piece), together):
            part = entries[piece[begin : begin + together]]
            weight, asked = float(weights[part].sum()), float(wanted[part].sum())
            if not math.isfinite(weight) or asked == 0 or weight == 0:
                marks.append("?" if not math.isfinite(weight) else "!" if asked == 0 else "-")
            else:
                marks.append(_BLOCKS[min(max(round(4 * weight / asked), 1), 8)])
        bars.append("".join(marks))
    return "|".join(bars)


def _distance(place: Place) -> float:
    ends = [abs(end - 1) for ratio in place.ratios for end in ratio]
    return max((math.inf if math.isnan(end) else end for end in ends), default=0.0)


def _shown(ratio: tuple[float, float]) -> str:
    return "-" if math.isnan(ratio[0]) else "..".join(dict.fromkeys(f"{end:.3g}" for end in ratio))


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ")]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
