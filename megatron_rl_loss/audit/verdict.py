"""`judge`: are a step's measured weights what was asked, and if not, what are they and why?

It goes from the outside in: NaN; weight on other tokens than asked; tokens counted several times; then the weights
beside the mask, which are compared with every hypothesis that `hypotheses.py` knows. What is found is taken off, and
the rest is judged on; so several bugs at once are all said, and the factors of all multiply to measured/asked.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_rl_loss.aliases import Aggregation, resolve
from megatron_rl_loss.audit.causes import FACTORS, OTHERS, PARTS, Cause
from megatron_rl_loss.audit.counts import COUNTINGS, SCOPES, Cells, Count
from megatron_rl_loss.audit.hypotheses import (
    Hypothesis,
    aliases,
    asked_weights,
    countable,
    divided_again,
    hypothesis_of,
    is_close,
    library,
)
from megatron_rl_loss.audit.numbers import Amount, Named, amounts_of, name_number
from megatron_rl_loss.audit.report import Deviation, Piece, Shape, Verdict
from megatron_rl_loss.audit.tokens import Floats, Ints, MeasuredStep, StepTokens
from megatron_rl_loss.modes import MODES, Mode, available_modes

Flags = NDArray[np.bool_]

#: A weight that is measured and one that is asked for differ by at most so many roundings of the gradient's type: of
#: float32 both are products of some ten factors, of a half-precision gradient only what it is stored in counts.
TOLERANCES = {"float32": 32 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}


def judge(measured: MeasuredStep, asked: Aggregation | None = None) -> Verdict:
    """The verdict on a measured step.

    Args:
        measured: the step's tokens and what each was found to weigh.
        asked: what it should be; None takes the nearest mode of the table without a divisor, and says so.
    """
    tokens = measured.tokens
    if measured.unknown:
        words = "nothing" if asked is None else _in_words(asked)
        return Verdict(asked=words, sound=False, unknown=measured.unknown, notes=measured.notes)
    tolerance = TOLERANCES[measured.facts.get("rounding", "float32")]
    notes = measured.notes
    if asked is None:
        asked = _nearest(measured, tolerance)
        notes = (*notes, f"nothing was asked for: compared with the nearest mode, {asked.mode.name}")
    expected = asked_weights(tokens, asked)
    step = _Step(measured, asked, expected, tolerance)
    ratio = step.ratio
    finite = bool(np.isfinite(measured.weights).all())
    deviation = step.deviation()
    sound = deviation <= tolerance
    common = {
        "asked": _in_words(asked),
        "sound": sound,
        "deviation": deviation,
        "misplaced": step.misplaced() if finite else math.nan,
        "low": float(ratio.min()) if finite and ratio.size else math.nan,
        "high": float(ratio.max()) if finite and ratio.size else math.nan,
        "tokens": int(step.wanted.sum()),
        "total": float(measured.weights.sum() + measured.stray[1]),
        "asked_total": float(expected.sum()),
        "pieces": step.pieces(),
        "notes": notes,
    }
    found = _Finder(step)
    found.look()
    return Verdict(**common, what_it_is=tuple(found.what_it_is), deviations=() if sound else tuple(found.deviations))


def _in_words(asked: Aggregation) -> str:
    divisor = "" if asked.divisor is None else f" with divisor {asked.divisor:g}"
    counting = f", unit counting {asked.units}" if isinstance(asked.mode, Mode) and asked.mode.unit != "step" else ""
    return f"{asked.mode.name}{divisor}{counting}"


def _nearest(measured: MeasuredStep, tolerance: float) -> Aggregation:
    """The mode without a divisor that misplaces least."""
    names = [mode.name for mode in MODES.values() if not mode.takes_divisor]
    if not (measured.tokens.prompt >= 0).all() or not len(measured.tokens):
        names.remove("prompt_mean")
    choices = [resolve(name, units=units) for name in names for units in ("all", "active")]  # type: ignore[arg-type]
    steps = [_Step(measured, one, asked_weights(measured.tokens, one), tolerance) for one in choices]
    keys = [(round(step.misplaced(), 6), step.deviation()) for step in steps]
    best = min(range(len(keys)), key=lambda i: (math.inf if math.isnan(keys[i][0]) else keys[i][0], keys[i][1]))
    # Where nothing tells two apart (a step of one sample) the plainest is meant: token_mean.
    plain = [i for i, one in enumerate(choices) if one.mode.name == "token_mean" and keys[i] == keys[best]]
    return choices[plain[0] if plain else best]


class _Step:
    """Measured beside asked."""

    def __init__(self, measured: MeasuredStep, asked: Aggregation, expected: Floats, tolerance: float) -> None:
        self.measured, self.asked, self.expected, self.tolerance = measured, asked, expected, tolerance
        self.tokens, self.weights = measured.tokens, measured.weights
        self.wanted: Flags = expected != 0

    @property
    def ratio(self) -> Floats:
        """Measured/asked of the tokens that should weigh something."""
        return self.weights[self.wanted] / self.expected[self.wanted]

    @property
    def scale(self) -> float:
        """What a token weighs, on average."""
        return float(np.abs(self.expected[self.wanted]).mean()) if self.wanted.any() else 0.0

    def deviation(self) -> float:
        """The largest relative difference of a weight; of one that should be 0, relative to what others are."""
        if not np.isfinite(self.weights).all():
            return math.inf
        off = np.abs(self.ratio - 1).max(initial=0.0)
        beside = np.abs(self.weights[~self.wanted]).max(initial=0.0) + abs(self.measured.stray[1])
        scale = self.scale or 1.0
        return float(max(off, beside / scale))

    def misplaced(self) -> float:
        """Half of what the shares of all tokens, measured and asked, differ by."""
        sizes, wanted = np.abs(self.weights), np.abs(self.expected)
        total = float(sizes.sum()) + abs(self.measured.stray[1])
        if not math.isfinite(total):
            return math.nan
        if total == 0 or wanted.sum() == 0:
            return 0.0 if total == wanted.sum() else 1.0
        # A share with the wrong sign is on the wrong side.
        sign = np.sign((self.weights * self.expected).sum()) or 1.0
        shares, asked = self.weights * sign / total, self.expected / wanted.sum()
        return min(1.0, float(np.abs(shares - asked).sum() + abs(self.measured.stray[1]) / total) / 2)

    def pieces(self) -> tuple[Piece, ...]:
        tokens = self.tokens
        where = np.stack([tokens.dp_rank, tokens.microbatch, tokens.cp_rank], 1)
        unique, piece = np.unique(where, axis=0, return_inverse=True)
        piece = piece.reshape(-1)[self.wanted]
        low, high = np.full(len(unique), np.inf), np.full(len(unique), -np.inf)
        np.minimum.at(low, piece, self.ratio)
        np.maximum.at(high, piece, self.ratio)
        counts = np.bincount(piece, minlength=len(unique))
        return tuple(
            Piece(
                dp_rank=dp,
                microbatch=k,
                cp_rank=cp,
                tokens=int(n),
                low=float(a) if n else math.nan,
                high=float(b) if n else math.nan,
            )
            for (dp, k, cp), n, a, b in zip(unique.tolist(), counts, low, high, strict=True)
        )


class _Finder:
    def __init__(self, step: _Step) -> None:
        self.step = step
        self.what_it_is: list[str] = []
        self.deviations: list[Deviation] = []

    def look(self) -> None:
        pass
