"""`Verdict`: measured weights of a step compared with the asked ones, as a report of 15 lines and as plain data."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_rl_loss.audit.causes import Cause
from megatron_rl_loss.audit.misplaced import Misplaced
from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, StepTokens
from megatron_rl_loss.core.errors import only_if

_LINES, _WIDTH, _BAR = 15, 112, 60


@dataclass(frozen=True)
class Place:
    """One micro-batch of one DP rank: lowest and highest measured / asked on each CP rank, and a bar of its tokens."""

    dp_rank: int
    microbatch: int
    ratios: tuple[tuple[float, float], ...]  # by CP rank; NaN where it holds no active token
    bar: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The measured weights of a step's tokens, compared with the weights that were asked for."""

    expected: str  # the mode that was asked, in words
    is_nearest: bool = False  # no mode was asked: it is the nearest
    sound: bool  # every weight is as asked, within rounding; False if there is no verdict
    unknown: tuple[str, ...] = ()  # why there is no verdict; empty if there is one
    deviation: float = math.nan  # the largest relative difference of a weight
    wrong_share: float = math.nan  # share of the gradient's weight on the wrong tokens, 0 to 1; 0 of a factor
    low: float = math.nan  # the smallest measured / asked of an active token
    high: float = math.nan  # the largest
    tokens: int = 0  # active tokens of the step
    misplaced: tuple[Misplaced, ...] = ()  # weight in the wrong places; the causes are about the rest
    causes: tuple[Cause, ...] = ()  # causes that fit within rounding, the simplest first
    rest_is_asked: bool = False  # True if weight in the wrong places is the only fault
    places: tuple[Place, ...] = ()  # with the common factor divided out
    common: float = 1.0  # the factor that most tokens share, where it is far from 1
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain data; numbers that are not finite become None."""
        plain = asdict(self) | {"causes": [str(cause) for cause in self.causes], "headline": self.headline}
        return _finite(plain)

    @property
    def headline(self) -> str:
        """The verdict in a sentence."""
        if self.unknown:
            return f"NO VERDICT: {self.unknown[0]}"
        nearest = f"nearest mode {self.expected} (no mode is known: give --expect)"
        mode = nearest if self.is_nearest else self.expected
        if self.sound:
            says = f"each of {self.tokens} tokens weighs what it should, within {max(self.deviation, 2.0**-24):.1e}"
            return f"SOUND: {mode}; {says}"
        mode = mode if self.is_nearest else f"expected {mode}"
        if math.isnan(self.low):
            return f"NOT SOUND: {mode}; weights are not finite"
        apart = f"{self.low:.4g}" if self.is_factor else f"{self.low:.3g} to {self.high:.3g}"
        weigh = f"{'active tokens weigh' if apart == '1' else f'tokens weigh {apart} times'} what they should"
        says, wrong = f"NOT SOUND: {mode}; {weigh}", 100 * self.wrong_share
        return says if wrong < 0.05 else f"{says}, {wrong:.1f} % of all weight is on wrong tokens"

    @property
    def is_factor(self) -> bool:
        """True if all tokens weigh the same multiple of the asked weights."""
        return self.high - self.low <= 1e-5 * abs(self.high)

    def __str__(self) -> str:
        """The report, at most 15 lines."""
        said = [f"also: {reason}" for reason in self.unknown[1:]]
        said += [f"In the wrong place: {fact.text}." for fact in self.misplaced]
        is_size = self.is_factor and any(cause.is_size for cause in self.causes)
        own = f", or a factor of {self.low:.4g} in your own code" if is_size else ""
        if len(self.causes) > 1:
            sizes = "a step with other sizes (DP, CP, micro-batches) tells them apart"
            said.append(f"Each of these causes fits{own}; {sizes}:")
        said += [f"Fits: {cause}{own * (len(self.causes) == 1)}." for cause in self.causes]
        if not (self.sound or self.unknown or self.causes):
            said.append(self._rest)
        head, tail = _wrapped([self.headline, *said]), _wrapped([f"note: {note}" for note in self.notes])
        return "\n".join([*head, *self._table(_LINES - len(head) - len(tail)), *tail][:_LINES])

    @property
    def _rest(self) -> str:
        """The words for weights without a cause."""
        if [(fact.name, fact.tokens) for fact in self.misplaced] == [("missing", self.tokens)]:
            return "No gradient reached the tapped losses: the loss that was trained does not depend on them."
        return "All other weights are as expected." if self.rest_is_asked else "No known cause fits these weights."

    def _table(self, room: int) -> list[str]:
        """Lines for the micro-batches with the largest deviations, in order of the step."""
        if self.sound or self.unknown or not self.places or (self.is_factor and not self.misplaced) or room < 3:
            return []
        far = sorted(range(len(self.places)), key=lambda i: -_distance(self.places[i]))[: room - 1]
        chosen = [self.places[i] for i in sorted(far)]
        ratios = [list(map(_shown, place.ratios)) for place in chosen]
        by_cp = any(len(set(place_ratios)) > 1 for place_ratios in ratios)
        rows = [
            [
                f"DP {place.dp_rank}, micro-batch {place.microbatch}",
                *(place_ratios if by_cp else place_ratios[:1]),
                place.bar,
            ]
            for place, place_ratios in zip(chosen, ratios, strict=True)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        left = len(self.places) - len(chosen)
        factor = only_if(self.common != 1, f" / {self.common:.3g}")
        head = (
            f"measured / expected{factor}"
            + only_if(by_cp, " by CP rank")
            + only_if(left > 0, f", {left} more in the JSON")
        )
        legend = "▄ as expected, █ twice or more, - nothing, ~ negative, ! masked but trained"
        return [f"{head} ({legend}):", *(f"  {line}".rstrip() for line in lines)]


def places_of(measured: MeasuredStep, wanted: Floats) -> tuple[Place, ...]:
    """A `Place` for each micro-batch of each DP rank."""
    tokens, weights, active = measured.tokens, measured.weights, wanted != 0
    ranks = np.unique(tokens.cp_rank)
    places = []
    for here in _members(tokens.groups("dp_rank", "microbatch")):
        ratios = []
        for rank in ranks:
            held = here[active[here] & (tokens.cp_rank[here] == rank)]
            ratio = weights[held] / wanted[held]
            ratios.append((float(ratio.min()), float(ratio.max())) if len(held) else (math.nan, math.nan))
        bar = _bar(tokens, weights, wanted, here[active[here] | (weights[here] != 0)])
        places.append(Place(int(tokens.dp_rank[here[0]]), int(tokens.microbatch[here[0]]), tuple(ratios), bar))
    return tuple(places)


def _members(group: Ints) -> list[Ints]:
    """The entries of each group."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else []


_BLOCKS = " ▁▂▃▄▅▆▇█"


def _bar(tokens: StepTokens, weights: Floats, wanted: Floats, entries: Ints) -> str:
    """A character for each token that has or should have weight, or for several tokens if there are too many."""
    samples = [entries[members] for members in _members(tokens.sample[entries])]
    together = -(-len(entries) // max(_BAR - len(samples), 8))
    parts = [[sample[i : i + together] for i in range(0, len(sample), together)] for sample in samples[:_BAR]]
    return "|".join("".join(_mark(weights[part], wanted[part]) for part in sample) for sample in parts)


def _mark(weights: Floats, wanted: Floats) -> str:
    """The character of neighbouring tokens; masked ones count only if none of them is active."""
    if not np.isfinite(weights).all():
        return "?"
    asked, weight = wanted.sum(), weights[wanted != 0].sum()
    if asked == 0 or weight == 0:
        return "!" if asked == 0 else "-"
    return "~" if weight * asked < 0 else _BLOCKS[min(max(round(4 * weight / asked), 1), 8)]


def _distance(place: Place) -> float:
    ends = [abs(end - 1) for ratio in place.ratios for end in ratio]
    return max((math.inf if math.isnan(end) else end for end in ends), default=0.0)


def _shown(ratio: tuple[float, float]) -> str:
    """The ratio as text: one number, or low..high."""
    return "-" if math.isnan(ratio[0]) else "..".join(dict.fromkeys(f"{end:.3g}" for end in ratio))


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ")]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
