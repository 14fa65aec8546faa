"""What an audit found, for a person (`str`) and as JSON."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_rl_loss.audit.fit import Reading

Shape = Literal["factor", "microbatch", "rank", "cp_place", "sample", "rollout", "prompt", "token"]
Places = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A fact about where weight lies: on no token, on masked ones, not where it should be, turned around."""

    name: str  # of the kind, such as "masked_trained"
    text: str  # in a sentence
    factors: Places = ()  # places, and the measured / asked that this accounts for at each
    tokens: int | None = None  # how many tokens it concerns; None for all


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one CP rank holds of one micro-batch: its active tokens, and the lowest and highest measured / asked."""

    dp_rank: int
    microbatch: int
    cp_rank: int
    tokens: int
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a loss does to the tokens of a step, against what was asked."""

    expected: str  # what was asked for, in words
    sound: bool  # every weight is what was asked, within rounding; False where there is no verdict
    deviation: float = math.nan  # the largest relative difference of a weight
    misplaced: float = math.nan  # share of the gradient's weight on the wrong tokens, 0 to 1; of a factor 0
    low: float = math.nan  # the smallest measured / asked of an active token
    high: float = math.nan  # the largest
    deviations: tuple[Deviation, ...] = ()  # weight in the wrong places; what follows is about the rest
    shape: Shape = "factor"  # the coarsest parts of the step over which measured / asked is one number
    factors: Places = ()  # that number at each place; the smallest and the largest where tokens of a sample differ
    readings: tuple[Reading, ...] = ()  # what these numbers could be, the simplest first; none if nothing fits
    unknown: tuple[str, ...] = ()  # why there is no verdict; empty if there is one
    notes: tuple[str, ...] = ()  # what the measurement can and cannot tell
    tokens: int = 0  # active tokens of the step
    total: float = math.nan  # the sum of all measured weights
    expected_total: float = math.nan  # of those asked
    pieces: tuple[Piece, ...] = ()  # a row for each micro-batch and CP rank

    def to_dict(self, **more: Any) -> dict[str, Any]:
        """Everything, and more, as plain data; numbers that are not finite are None."""
        plain: dict[str, Any] = _finite(asdict(self) | more)
        return plain

    def to_json(self, **more: Any) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(**more), indent=1)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.unknown:
            return f"NO VERDICT: {self.unknown[0]}"
        if self.sound:
            return f"SOUND: {self.expected}, every token within {self.deviation:.1e} of its weight"
        return f"NOT SOUND: asked {self.expected}; {self.extent}"

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
        lines += [line for reason in self.unknown[1:] for line in _wrapped(f"  also: {reason}", 4)]
        if not self.sound and not self.unknown:
            lines += self._numbers()
            for number, one in enumerate(self.deviations, 1):
                lines += _wrapped(f"{number}. {one.text}", 3)
            beside = " the rest" if self.deviations else ""
            for reading in self.readings:
                lines += _wrapped(f"A reading that fits{beside}: {reading.text}", 2)
            if not self.readings and self.factors:
                lines.append("No reading fits: the numbers above are what is known.")
        lines += [line for note in self.notes for line in _wrapped(f"note: {note}", 6)]
        return "\n".join(lines)

    def _numbers(self) -> list[str]:
        """measured / asked, by micro-batch and CP rank, and place by place where that table does not show it."""
        lines = []
        if not self.uniform and not math.isnan(self.low):
            lines += ["measured / asked, by micro-batch and CP rank:", *_table(self.pieces)]
        if self.shape in ("sample", "rollout", "prompt"):
            (least, low), *_, (most, high) = sorted(self.factors, key=lambda one: one[1])
            one_each = f"one number for each {self.shape}"
            lines += _wrapped(f"{one_each}: {low:.4g} ({least}) to {high:.4g} ({most}), {len(self.factors)} in all", 2)
        return lines


_WIDTH = 112


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _table(pieces: Sequence[Piece]) -> list[str]:
    ranks = sorted({(piece.dp_rank, piece.cp_rank) for piece in pieces})
    rows = sorted({piece.microbatch for piece in pieces})
    if len(ranks) > 8 or len(rows) > 16:
        return [f"  ({len(pieces)} pieces; they are in the JSON)"]
    several = len({cp for _, cp in ranks}) > 1
    table = [["micro-batch", *(f"DP {dp}" + f", CP {cp}" * (several and cp >= 0) for dp, cp in ranks)]]
    at = {(piece.dp_rank, piece.cp_rank, piece.microbatch): piece for piece in pieces}
    for row in rows:
        cells = [f"{row}"]
        for rank in ranks:
            piece = at.get((*rank, row))
            ends = [] if piece is None or not piece.tokens else [f"{piece.low:.3g}", f"{piece.high:.3g}"]
            cells.append("..".join(dict.fromkeys(ends)) or "-")
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in table]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
