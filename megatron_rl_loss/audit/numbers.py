"""Names for a number: which sizes and counts of the step multiply to it?"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl_loss.audit.causes import FACTORS
from megatron_rl_loss.audit.counts import Cells, Count
from megatron_rl_loss.audit.tokens import Split


@dataclass(frozen=True)
class Named:
    """A number by name: what causes it, as a formula, its exact value, and how far-fetched that is."""

    cause: str
    formula: str
    value: float
    cost: float
    rows: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return FACTORS[self.cause].text if self.cause in FACTORS else ""


@dataclass(frozen=True)
class Amount:
    """A ratio of counts that may turn up beside sizes; `cause` names it where it stands alone."""

    cause: str
    formula: str
    value: float
    cost: float


#: Sizes of a split, as they are written in formulas and in the names of causes.
SIZES = (("dp", "DP", "dp_size"), ("cp", "CP", "cp_size"), ("microbatches", "K", "num_microbatches"))
_MOST = 2  # the largest power of a size
_AS_LIKELY = 1.22  # costs that far apart are both told
#: Sizes that seldom scale a loss, and how far-fetched they are.
_SELDOM = (("tp", "TP", "tp_size", 1.5), ("pp", "PP", "pp_size", 1.5))
_BEHIND = 0.3  # so much later a whole number that means nothing is told than what has a name


def name_number(number: float, split: Split, amounts: list[Amount], tolerance: float) -> list[Named]:
    """All names of a number within a relative tolerance, the simplest first; none far more far-fetched than the first.

    >>> [named.formula for named in name_number(0.25, Split(cp_size=4, num_microbatches=3), [], 1e-6)]
    ['1/CP']
    """
    if abs(number - 1) <= tolerance or not math.isfinite(number) or number <= 0:
        return []
    products = _products(split)
    choices = [Amount("", "", 1.0, 0.0), *(amount for amount in amounts if abs(amount.value - 1) > tolerance)]
    logs = np.add.outer([amount.value for amount in choices], np.zeros(len(products)))
    logs = np.log(logs) + np.log([product[1] for product in products])
    found = []
    for i, j in np.argwhere(np.abs(logs - math.log(number)) <= tolerance).tolist():
        amount, (powers, size, cost) = choices[i], products[j]
        cause = _cause(powers, amount)
        rows = FACTORS[cause].rows if cause in FACTORS else ()
        # A count beside sizes is a chance, unless somebody had that very product.
        cost += amount.cost + (bool(powers) and bool(amount.cause) and cause not in FACTORS)
        found.append(Named(cause, _formula(powers, amount.formula), size * amount.value, cost - 0.1 * bool(rows), rows))
    found.sort(key=lambda named: named.cost + _BEHIND * (named.cause == "other_count"))
    unique = {named.cause + named.formula: named for named in found if named.cost <= found[0].cost + _AS_LIKELY}
    return list(unique.values())[:6]


def amounts_of(cells: Cells, facts: Mapping[str, Any], unit: str) -> list[Amount]:
    """Ratios of the step's counts: what a wrong count in a denominator leaves over.

    Args:
        unit: what the asked mode averages over: ``rollout``, ``prompt``, or ``step``.
    """
    tokens = cells.total("mask")
    amounts = [
        Amount("tokens", "T", tokens, 2),
        Amount("tokens", "1/T", 1 / tokens, 2),
    ]
    if (active := cells.total("active")) != tokens:
        amounts += [Amount("tokens", "T_active", active, 2.2), Amount("tokens", "1/T_active", 1 / active, 2.2)]
    units = [unit] if unit != "step" else ["rollout", "sample"] + (["prompt"] if cells.has_prompts else [])
    letters = {"rollout": "N", "sample": "rows", "prompt": "P"}
    for name in units:
        for counting in ("all", "active"):
            number = float(cells.values(Count(name, counting=counting))[0])
            if number > 1:
                letter = letters[name] + ("" if counting == "all" else "_active")
                amounts += [Amount("units", letter, number, 2.1), Amount("units", f"1/{letter}", 1 / number, 2.1)]
    if "steps_per_generation" in facts:
        ratio = cells.split.num_microbatches / float(facts["steps_per_generation"])
        amounts.append(Amount("generation", "K/steps_per_generation", ratio, 0.5))
    return amounts


def _products(split: Split) -> list[tuple[dict[str, int], float, float]]:
    """Powers, value and cost of every product of sizes."""
    sizes = [(name, letter, float(getattr(split, field)), 1.0) for name, letter, field in SIZES]
    sizes += [(name, letter, float(getattr(split, field)), cost) for name, letter, field, cost in _SELDOM]
    real = [size for size in sizes if size[2] > 1]
    seldom = {name for name, *_ in _SELDOM}
    ranges = [range(-1, 2) if name in seldom else range(-_MOST, _MOST + 1) for name, *_ in real]
    products = []
    for powers in itertools.product(*ranges):
        value = math.prod(size[2] ** power for size, power in zip(real, powers, strict=True))
        cost = sum(size[3] * abs(power) for size, power in zip(real, powers, strict=True))
        named = {size[0]: power for size, power in zip(real, powers, strict=True) if power}
        products.append((named, value, cost))
    return products


_ORDER = ("dp", "tp", "pp", "cp", "tokens", "units", "microbatches")


def _cause(powers: dict[str, int], amount: Amount) -> str:
    """``times_dp_over_cp_squared`` and such."""
    every = dict(powers)
    if amount.cause in ("tokens", "units"):
        every[amount.cause] = -1 if amount.formula.startswith("1/") else 1
    elif amount.cause and not powers:
        return amount.cause
    words = {1: "", 2: "_squared"}
    above = [name + words[every[name]] for name in _ORDER if every.get(name, 0) > 0]
    below = [name + words[-every[name]] for name in _ORDER if every.get(name, 0) < 0]
    parts = [amount.cause] if amount.cause not in ("tokens", "units", "") else []
    parts += ["times", *above] if above else []
    parts += ["over", *below] if below else []
    return "_".join(parts)


def _formula(powers: dict[str, int], amount: str) -> str:
    """``CP·T/K`` and such."""
    letters = {name: letter for name, letter, *_ in (*SIZES, *_SELDOM)}
    marks = {1: "", 2: "²"}
    above = [letters[name] + marks[power] for name, power in powers.items() if power > 0]
    below = [letters[name] + marks[-power] for name, power in powers.items() if power < 0]
    if amount.startswith("1/"):
        below.append(amount[2:])
    elif amount:
        above.append(f"({amount})" if "/" in amount and powers else amount)
    if not below:
        return "·".join(above)
    bottom = "·".join(below)
    return f"{'·'.join(above) or '1'}/{f'({bottom})' if len(below) > 1 else bottom}"
