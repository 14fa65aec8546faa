"""A flat table of causes: known wrong aggregations, each as the weight that it gives a token.

A row has words and one expression over masks and ids. A row fits if the measured weights are a constant times the
expression, within rounding, at every token of every given step. Constants are products of the step's sizes and counts.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rl_loss.audit.tokens import CP_PIECE, MICROBATCH, Floats, Ints, Split, StepTokens, group_by
from megatron_rl_loss.core.errors import only_if

STEP: tuple[str, ...] = ()
DP_RANK = ("dp_rank",)
#: Parts of a step in words.
PARTS = {
    "the micro-batch": MICROBATCH,
    "the CP rank's piece of the micro-batch": CP_PIECE,
    "the DP rank": DP_RANK,
    "the CP rank's pieces of all its micro-batches": ("dp_rank", "cp_rank"),
    "this micro-batch of all DP ranks": ("microbatch",),
}
#: The contribution of a member of a group (a sample, a rollout, a piece), from its mask's sum, entries and nonzeros.
COUNTED: dict[str, Any] = {
    "tokens": lambda tokens, entries, nonzero: tokens,
    "all": lambda tokens, entries, nonzero: np.ones_like(tokens),
    "active": lambda tokens, entries, nonzero: (tokens > 0).astype(float),
    "entries": lambda tokens, entries, nonzero: entries,
    "nonzero": lambda tokens, entries, nonzero: nonzero,
    "clamped": lambda tokens, entries, nonzero: np.maximum(tokens, 1),
    "shifted": lambda tokens, entries, nonzero: tokens + (tokens > 0),
}
#: Tokens that are counted wrongly, in words.
MISCOUNTS = {
    "entries": "all mask entries, masked ones too",
    "nonzero": "the tokens whose mask is not 0, fractions as 1",
    "clamped": "the tokens, and one for each fully masked sample",
    "shifted": "the tokens, and one more for each sample that has any",
}


class Counts:
    """Counts of a step at each cell, [num_cells]. A cell is the part of a sample, or turn, that one CP rank holds."""

    def __init__(self, tokens: StepTokens, split: Split) -> None:
        self.split, self.per_token = split, sorted(tokens.per_token)
        self.entry_cells = tokens.groups("sample", "cp_rank", *self.per_token)
        first = np.unique(self.entry_cells, return_index=True)[1]
        names = ("sample", "cp_rank", "dp_rank", "microbatch", "rollout", *tokens.ids)
        self.column = {name: tokens.column(name)[first] for name in names}
        self.num_tokens = np.bincount(self.entry_cells, weights=tokens.mask, minlength=len(first))
        self.num_entries = np.bincount(self.entry_cells, minlength=len(first)).astype(float)
        self.num_nonzero = np.bincount(self.entry_cells, weights=tokens.mask != 0, minlength=len(first))
        self._groups: dict[tuple[str, ...], Ints] = {}

    def group(self, *within: str) -> Ints:
        """The group of each cell: cells that agree in these columns."""
        if within not in self._groups:
            self._groups[within] = group_by([self.column[name] for name in within], len(self.num_tokens))
        return self._groups[within]

    def count(self, what: str, *, of: tuple[str, ...] = ("sample",), within: tuple[str, ...] = STEP) -> Floats:
        """The sum over members (samples, rollouts, ...) `within` the cell's group; each counts as `COUNTED` says."""
        outer, member = self.group(*within), self.group(*within, *of)
        sums = [np.bincount(member, each) for each in (self.num_tokens, self.num_entries, self.num_nonzero)]
        first = np.unique(member, return_index=True)[1]
        for name in set(of) & set(self.per_token):
            first = first[self.column[name][first] >= 0]
        numbers = COUNTED[what](*(column[member[first]] for column in sums))
        counted: Floats = np.bincount(outer[first], numbers, len(outer))[outer]
        return counted

    def tokens(self, *within: str) -> Floats:
        return self.count("tokens", within=within)

    def parts(self, within: tuple[str, ...]) -> float:
        """Number of parts of the step, parts without a mask entry included."""
        by_cp = len(np.unique(self.column["cp_rank"])) > 1  # else every rank holds every token
        sizes = {"dp_rank": self.split.dp_size, "microbatch": self.split.num_microbatches}
        sizes["cp_rank"] = self.split.cp_size if by_cp else 1
        with_entries = int(self.group(*within).max(initial=-1)) + 1
        return float(max(with_entries, math.prod(sizes.get(name, 1) for name in within)))

    def width(self, *within: str, multiple: int = 1) -> Floats:
        """The longest sample of each group, padded to a multiple."""
        outer, sample = self.group(*within), self.group("sample")
        longest = np.zeros(int(outer.max(initial=-1)) + 1)
        np.maximum.at(longest, outer, np.bincount(sample, self.num_entries)[sample])
        return np.asarray(np.ceil(longest / multiple) * multiple)[outer]

    @cached_property
    def units(self) -> list[str]:
        """The ids that tell samples apart otherwise than an earlier one does: sample, rollout, prompt, further ids."""
        by_cells: dict[bytes, str] = {}
        for name in (*self.per_token, "sample", "rollout", *self.column):
            if name not in ("cp_rank", "dp_rank", "microbatch"):
                group = self.group(name)
                by_cells.setdefault(
                    np.unique(group, return_index=True)[1][group].tobytes(), name
                )  # by their first cell
        return list(by_cells.values())

    @cached_property
    def real_parts(self) -> dict[str, tuple[str, ...]]:
        """The `PARTS` that differ from the whole step and from earlier parts."""
        by_cells = {self.group().tobytes(): ("the step", STEP)}
        for words, part in PARTS.items():
            by_cells.setdefault(self.group(*part).tobytes(), (words, part))
        return dict([*by_cells.values()][1:])


Row = tuple[str, Floats, str]
#: Likely constants of a row: sizes of the split S, tokens T, units and the divisor U, ratios of units R.
NONE, SIZES, TOKENS, UNITS, ANY = "", "S", "ST", "STU", "STUR"


def rows(t: Counts) -> Iterator[Row]:
    """The table: words; a token's weight without its mask at each cell, [num_cells]; likely constants."""
    yield "not divided by any count of tokens", np.ones(len(t.num_tokens)), UNITS
    yield "divided by the tokens of the step", 1 / t.tokens(), SIZES
    for words, part in t.real_parts.items():
        own, number, samples = t.tokens(*part), t.parts(part), t.count("all", within=part)
        yield f"divided by the tokens of {words}, not of the step", 1 / own / number, TOKENS
        yield f"divided by the tokens of {words} twice", 1 / own**2, SIZES
        yield f"token means of {words}, weighted by its samples", samples / own / t.count("all"), SIZES
        yield f"divided by the samples of {words}, and by no tokens", 1 / samples / number, UNITS
        yield f"token means of {words}, averaged over micro-batches alone", 1 / own / t.split.num_microbatches, SIZES
    filled = t.count("active", of=MICROBATCH, within=DP_RANK) * t.parts(DP_RANK)
    words = "token means of micro-batches, over those of the DP rank that have tokens"
    yield words, 1 / t.tokens(*MICROBATCH) / filled, NONE
    for unit, (what, tail) in itertools.product(t.units, (("all", ""), ("active", " that have tokens"))):
        whole, step_count = t.tokens(unit), t.count(what, of=(unit,))
        yield f"{unit} means, over the {unit}s of the step{tail}", 1 / whole / step_count, SIZES
        for words, part in t.real_parts.items():
            part_count = t.count(what, of=(unit,), within=part) * t.parts(part)
            yield f"{unit} means, over the {unit}s of {words}{tail}, not of the step", 1 / whole / part_count, SIZES
            if t.group(*part, unit).max() > t.group(unit).max():  # units that lie in several parts
                inside = t.tokens(*part, unit)
                yield f"{unit} means inside {words}, over its {unit}s{tail}", 1 / inside / part_count, SIZES
                yield f"{unit} means inside {words}, over the {unit}s of the step{tail}", 1 / inside / step_count, SIZES
        for group in t.units[t.units.index(unit) + 1 :]:
            inner, outer = t.count(what, of=(unit,), within=(group,)), t.count(what, of=(group,))
            yield f"{group} means of {unit} means, over those{tail or ' of the step'}", 1 / whole / inner / outer, SIZES
            yield f"{unit} means, over the {group}s of the step{tail}", 1 / whole / outer, SIZES
            for words, part in t.real_parts.items():
                inner = t.count(what, of=(unit,), within=(*part, group))
                outer = t.count(what, of=(group,), within=part) * t.parts(part)
                yield f"{group} means of {unit} means inside {words}{tail}", 1 / whole / inner / outer, SIZES
        yield (
            f"{unit} means over lengths, masked tokens too",
            1 / t.count("entries", within=(unit,)) / step_count,
            SIZES,
        )
    for words, part in {"the step": STEP, **t.real_parts}.items():
        likely = SIZES if part else NONE  # of the step it is one number, which others are by chance
        for what, miscount in MISCOUNTS.items():
            yield f"divided by {miscount}, of {words}", 1 / t.count(what, within=part) / t.parts(part), likely
        for multiple in {1, 2 * t.split.cp_size if t.split.cp_size > 1 else 1}:
            width, tail = (
                t.width(*part, multiple=multiple),
                only_if(multiple > 1, f", padded to a multiple of {multiple}"),
            )
            area = width * t.count("all", within=part) * t.parts(part)
            yield f"divided by rows x longest row of {words}{tail}", 1 / area, likely
            yield f"samples divided by the longest row of {words}{tail}", 1 / width / t.count("all"), likely
    for words, part in t.real_parts.items():
        empty = t.parts(part) - t.count("active", of=part)
        yield f"divided by the step's tokens, and one for {words} wherever it has none", 1 / (t.tokens() + empty), NONE


@dataclass(frozen=True)
class Cause:
    """A row of the table that fits, and its constant."""

    row: str  # its words; empty for the weights that were asked
    constant: str  # a product of sizes and counts, such as CP/K; empty for 1, and where it has no name
    factor: float  # the constant as a number, in the first step
    price: float  # the simplest cause is the cheapest
    is_size: bool = False  # the asked weights times a product of sizes, which a number in the loss's code may equal

    @property
    def named(self) -> bool:
        """False where the constant is neither 1 nor a product of sizes and counts."""
        return self.price < _UNNAMED

    def __str__(self) -> str:
        return self.describe(HINTS | MEGATRON_HINTS)

    def describe(self, hints: Mapping[tuple[bool | None, str], str]) -> str:
        """The cause in words, with the frequent reason of its constant."""
        if not self.named:
            row = f"{self.row}, and one further factor" if self.row else "one factor for all tokens"
            return f"{row}, {self.factor:.6g}, which is no product of the step's sizes and counts"
        hint = hints.get((bool(self.row), self.constant)) or hints.get((None, self.constant), "")
        constant = f", x {self.factor:.6g} = {self.constant}" if self.constant else ""
        return (self.row or "every token alike") + constant + only_if(hint, f": {hint}")


#: Frequent reasons of a constant: with the asked weights (False), with another row (True), or with either (None).
HINTS: dict[tuple[bool | None, str], str] = {
    (False, "DP"): "gradients of ranks are summed, or their mean was undone already",
    (False, "CP"): "the loss is multiplied by CP once too often, or CP ranks' gradients are summed, not averaged",
    (False, "1/CP"): "gradients of CP ranks are summed and then averaged, or CP ranks that hold all tokens were added",
    (True, "1/CP"): "gradients of CP ranks are averaged",
    (None, "1/DP"): "DDP's mean over its ranks was not undone",
    (False, "1/DP²"): "a denominator is multiplied by DP, and should be divided by DP",
    (False, "K"): "micro-batches are summed, and should be averaged",
    (None, "1/K"): "nothing undoes the trainer's division by micro-batches, or the loss was divided once more",
    (False, "1/T"): "divided by the number of tokens twice",
    (True, "K"): "the parts' means are summed, not averaged",
    (True, "DP·K"): "the parts' means are summed, not averaged",
    (False, "N"): "never divided by the number of units",
    (False, "N/rows"): "rows were counted, not rollouts",
    (False, "N/N_active"): "fully masked units were left out",
    (False, "N_active/N"): "fully masked units were counted",
}
#: Reasons in a loss function of Megatron's schedule.
MEGATRON_HINTS: dict[tuple[bool | None, str], str] = {
    (
        False,
        "CP",
    ): "you multiply by CP, and Megatron multiplies a 2-tuple by CP again, or sums gradients (per token)",
    (True, "CP"): "a 2-tuple is multiplied by CP, and under per-token loss no num_tokens divides it",
    (True, "1/CP"): "a 3-tuple is not multiplied by CP, or gradients of CP ranks are averaged",
    (None, "1/K"): "nothing undoes the schedule's division by micro-batches, or the loss was divided once more",
    (True, "CP/K"): "a 2-tuple under per-token loss returns no token count, so nothing divides by one",
}
#: Prices: of a row other than the asked one, of a miscount or of units that have tokens, of a count, of a ratio of two
#: counts, of a constant without a name.
_LATER = 1.0
_ROW, _RARER, _COUNT, _RATIO, _UNNAMED = 0.4, 0.3, 1.9, 1.2, 6.0
_SHOWN, _AS_SIMPLE = 3, 0.25
Powers = dict[str, int]


def constants(t: Counts, divisor: float | None) -> Iterator[tuple[str, str, float, float]]:
    """Kind, name, price and log of each product of sizes, to powers from -2 to 2, and at most one count or ratio."""
    fields = {"DP": "dp_size", "CP": "cp_size", "K": "num_microbatches", "TP": "tp_size", "PP": "pp_size"}
    sizes = {name: size for name, field in fields.items() if (size := getattr(t.split, field)) > 1}
    letters = {"rollout": "N", "sample": "rows" if "rollout" in t.units else "N", "prompt": "P"}
    units = {}
    for unit, (what, tail) in itertools.product(t.units, (("all", ""), ("active", "_active"))):
        units[letters.get(unit, unit) + tail] = float(t.count(what, of=(unit,))[0])
    divisors = {} if divisor is None else {"L": divisor}
    values = sizes | units | divisors | {"T": float(t.tokens()[0])}
    # kind, largest sum of sizes' powers beside it, price, powers
    amounts: list[tuple[str, int, float, Powers]] = [(SIZES, 3, 0.0, {})]
    amounts += [("T", 2, _COUNT, {"T": power}) for power in (1, -1)]
    amounts += [("U", 1, _COUNT, {name: power}) for name in units | divisors for power in (1, -1)]
    amounts += [("U", 1, _COUNT, {"L": -1, name: -1}) for name in units if divisors]
    pairs = [pair for pair in itertools.permutations(units, 2) if (pair[0][0] == "P") == (pair[1][0] == "P")]
    amounts += [("R", 0, _RATIO, {above: 1, below: -1}) for above, below in pairs]
    for powers in itertools.product(range(-2, 3), repeat=len(sizes)):
        spent, squared = sum(map(abs, powers)), max(map(abs, powers), default=0) > 1
        for kind, most, price, amount in amounts:
            if spent > (min(most, 2) if squared else most):
                continue
            product = {name: power for name, power in zip(sizes, powers, strict=True) if power} | amount
            log = sum(power * math.log(values[name]) for name, power in product.items())
            if not product or abs(log) > 1e-9:
                name = _formula(product)
                yield kind if product else NONE, name, spent + price + _RARER * ("_active" in name), log


def _formula(powers: Powers) -> str:
    """The powers as a formula such as ``CP·T/K``."""
    above = [name + only_if(power == 2, "²") for name, power in powers.items() if power > 0]
    below = [name + only_if(power == -2, "²") for name, power in powers.items() if power < 0]
    bottom = f"({'·'.join(below)})" if len(below) > 1 else "".join(below)
    return ("·".join(above) or only_if(below, "1")) + (f"/{bottom}" if below else "")


@dataclass(frozen=True)
class Ratios:
    """The weights of a step in the right places, one number per cell."""

    counts: Counts
    active: Ints  # the cells, [num_active]
    weights: Floats  # without the mask, [num_active]
    expected: Floats  # the asked ones
    by_token: bool = False  # True if the asked weights of a cell's tokens differ; `weights` are measured / asked then

    def rows(self) -> Iterator[Row]:
        """The weights that were asked, and the table's other rows."""
        yield "", self.expected, ANY
        for words, weights, likely in () if self.by_token else rows(self.counts):
            if not np.allclose(weights[self.active], self.expected, rtol=1e-9, atol=0):
                yield words, weights[self.active], likely


Fits = dict[tuple[str, str], Cause]


def fits(step: Ratios, divisor: float | None, tolerance: float) -> Fits:
    """All causes that fit one step, by row and constant."""
    table, causes = list(constants(step.counts, divisor)), Fits()
    for number, (words, weights, likely) in enumerate(step.rows()):
        ratio = step.weights / weights
        if not np.isfinite(ratio).all() or ratio.min() <= 0 or np.ptp(ratio) > tolerance * ratio.max():
            continue
        rarer = _RARER * (likely == NONE or "that have tokens" in words)
        # Later rows give this step's tokens the weights of an earlier row, times a constant.
        later = _LATER * any(row for row, _ in causes)
        factor, row_price = float(np.median(ratio)), (_ROW + number / 1000 + rarer + later if words else 0.0)
        causes[words, "?"] = Cause(words, "", factor, _UNNAMED + row_price)
        for kind, name, price, log in table:
            if kind in likely and abs(log - math.log(factor)) <= tolerance / math.sqrt(len(ratio)):  # a median
                causes[words, name] = Cause(words, name, factor, price + row_price, kind == SIZES and not words)
    return causes


def fitting(steps: Sequence[Ratios], divisor: float | None, tolerance: float) -> list[Cause]:
    """The causes that fit every step, the simplest first: at most three of about equal price."""
    first, *others = (fits(step, divisor, tolerance) for step in steps)
    for other in others:  # a constant without a name must be the same number
        shared = [key for key in first if key in other]
        factors = {key: abs(other[key].factor / first[key].factor - 1) for key in shared if key[1] == "?"}
        first = {key: first[key] for key in shared if factors.get(key, 0.0) <= tolerance}
    simplest = sorted(first.values(), key=lambda cause: cause.price)
    causes = [cause for cause in simplest if cause.price <= simplest[0].price + _AS_SIMPLE]
    return causes[: _SHOWN if causes and causes[0].named else 1]
