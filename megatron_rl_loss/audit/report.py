"""What an audit found, for a person (`str`) and as JSON."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_rl_loss.audit.causes import MUSEUM

Shape = Literal[
    "factor",  # one for all tokens
    "microbatch",
    "rank",
    "cp_place",
    "sample",
    "rollout",
    "prompt",
    "token",
    "masked",  # weight where the mask is 0
    "missing",  # none where it is not
    "twice",
    "shift",
    "nan",
    "stray",
    "mask",  # the mask's values
]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One way in which measured weights differ from those asked for; all of them multiplied give measured/asked.

    Attributes:
        shape: over what it is constant, or what kind of places it concerns.
        causes: names of what causes it (`causes.py`), the most likely first; several where numbers coincide.
        factors: places and the measured/asked of each that this deviation accounts for; one factor for all has one.
        formulas: the factor by name, a formula a cause; empty where a cause is not a formula.
        text: in a sentence.
        rows: rows of `causes.MUSEUM` that had one of these causes.
        tokens: how many tokens it concerns; None for all.
    """

    shape: Shape
    causes: tuple[str, ...]
    factors: tuple[tuple[str, float], ...] = ()
    formulas: tuple[str, ...] = ()
    text: str = ""
    rows: tuple[int, ...] = ()
    tokens: int | None = None

    @property
    def cause(self) -> str:
        return self.causes[0]

    @property
    def factor(self) -> float:
        """The one factor; NaN where there are several."""
        return self.factors[0][1] if len(self.factors) == 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one CP rank holds of one micro-batch: its active tokens, and the lowest and highest measured/asked."""

    dp_rank: int
    microbatch: int
    cp_rank: int
    tokens: int
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a loss does to the tokens of a step, against what was asked.

    Attributes:
        asked: what was asked for, in words.
        sound: every weight is what was asked, within rounding. False where there is no verdict.
        deviation: the largest relative difference of a weight.
        misplaced: share of the gradient's weight that lies on the wrong tokens, 0 to 1; a factor misplaces nothing.
        low, high: the smallest and largest measured/asked of an active token.
        what_it_is: what the measured weights are, exactly, the simplest first.
        deviations: what is wrong, in order: all factors multiplied are measured/asked.
        unknown: why there is no verdict; empty if there is one.
        notes: what the measurement can and cannot tell.
        tokens: active tokens of the step.
        total: the sum of all measured weights, and `asked_total` of those asked.
        pieces: a row a micro-batch and CP rank.
    """

    asked: str
    sound: bool
    deviation: float = math.nan
    misplaced: float = math.nan
    low: float = math.nan
    high: float = math.nan
    what_it_is: tuple[str, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tokens: int = 0
    total: float = math.nan
    asked_total: float = math.nan
    pieces: tuple[Piece, ...] = ()

    def to_json(self) -> str:
        """Everything; numbers that are not finite are written as null."""
        return json.dumps(_finite(asdict(self)), indent=1)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.unknown:
            return "NO VERDICT"
        if self.sound:
            return f"SOUND: {self.asked}, every token within {self.deviation:.1e} of its weight"
        return f"NOT SOUND: asked {self.asked}; {self.extent}"

    @property
    def uniform(self) -> bool:
        """Whether all tokens weigh the same multiple of what was asked."""
        return self.high - self.low <= 1e-5 * abs(self.high)

    @property
    def extent(self) -> str:
        """How far off, in words."""
        if math.isnan(self.low):
            return "weights are not finite"
        apart = f"{self.low:.4g}" if self.uniform else f"{self.low:.3g} to {self.high:.3g}"
        of_asked = f"tokens weigh {apart} of what was asked"
        return f"{of_asked}, {100 * self.misplaced:.1f} % of the gradient's weight is on the wrong tokens"

    def __str__(self) -> str:
        lines = _wrapped(self.headline, 2)
        lines += [line for reason in self.unknown for line in _wrapped(f"  because {reason}", 4)]
        if not self.sound and not self.unknown:
            names = ("It is  ", *["   or  "] * (_ALSO - 1))
            for name, words in zip(names, self.what_it_is, strict=False):
                lines += _wrapped(f"{name}{words}", 7)
        for number, deviation in enumerate(self.deviations, 1):
            lines += _told(number, deviation)
        if not self.sound and not self.unknown and not self.uniform:
            lines += ["measured/asked, by micro-batch and CP rank:", *_table(self.pieces)]
        lines += [line for note in self.notes for line in _wrapped(f"note: {note}", 6)]
        return "\n".join(lines)


_SHAPES: dict[Shape, str] = {
    "factor": "one factor for all tokens",
    "microbatch": "a factor a micro-batch",
    "rank": "a factor a rank",
    "cp_place": "a factor a CP place",
    "sample": "a factor a sample",
    "rollout": "a factor a rollout",
    "prompt": "a factor a prompt",
    "token": "a factor a token",
    "masked": "weight where the mask is 0",
    "missing": "no weight where the mask is not 0",
    "twice": "tokens that count several times",
    "shift": "a shift by one",
    "nan": "NaN",
    "stray": "weight on no token",
    "mask": "the mask's values",
}
_SHOWN = 4  # places of a deviation
_ALSO = 4  # readings
_KNOWN = 4  # bugs that a cause is known from
_WIDTH = 112


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _told(number: int, deviation: Deviation) -> list[str]:
    by = ""
    if len(deviation.factors) == 1:
        place, factor = deviation.factors[0]
        formulas = "".join(f" = {formula}" for formula in deviation.formulas)
        by = f", x {factor:.6g}{formulas}" if place == "all" else ""
    lines = _wrapped(f"{number}. {_SHAPES[deviation.shape]}{by}: {deviation.text}", 3)
    places = sorted(deviation.factors, key=lambda one: one[1])
    if len(places) > _SHOWN:
        (least, low), (most, high) = places[0], places[-1]
        lines.append(f"   x {low:.4g} ({least}) to x {high:.4g} ({most}), {len(places)} places")
    elif not by:
        lines += [f"   {place}: x {factor:.4g}" for place, factor in places]
    known = [MUSEUM[row] for row in deviation.rows if MUSEUM[row] != "habit"]
    if known:
        more = f" and {len(known) - _KNOWN} more" if len(known) > _KNOWN else ""
        lines += _wrapped(f"   known from {'; '.join(known[:_KNOWN])}{more}", 6)
    return lines


def _table(pieces: Sequence[Piece]) -> list[str]:
    ranks = list(dict.fromkeys((piece.dp_rank, piece.cp_rank) for piece in pieces))
    ranks.sort()
    rows = sorted({piece.microbatch for piece in pieces})
    if len(ranks) > 8 or len(rows) > 16:
        return [f"  ({len(pieces)} pieces; they are in the JSON)"]
    at = {(piece.dp_rank, piece.cp_rank, piece.microbatch): piece for piece in pieces}

    def cell(piece: Piece | None) -> str:
        if piece is None or not piece.tokens:
            return "-"
        low, high = f"{piece.low:.3g}", f"{piece.high:.3g}"
        return low if low == high else f"{low}..{high}"

    def named(rank: tuple[int, int]) -> str:
        return f"DP {rank[0]}" + (f", CP {rank[1]}" if rank[1] >= 0 and len({cp for _, cp in ranks}) > 1 else "")

    head = ["micro-batch", *map(named, ranks)]
    body = [[str(row), *(cell(at.get((*rank, row))) for rank in ranks)] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return [
        "  " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in (head, *body)
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
