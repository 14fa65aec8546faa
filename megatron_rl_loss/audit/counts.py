"""What a loss may have counted: tokens, samples, rollouts and prompts, of the step or of a part, in several ways."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rl_loss.audit.tokens import CELL, Floats, Ints, Split, StepTokens, group_by

#: Parts of a step, coarsest first: in words, by what they are numbered, and how far-fetched they are.
SCOPES: dict[str, tuple[str, tuple[str, ...], float]] = {
    "step": ("the whole step", (), 0.0),
    "dp_rank": ("the data-parallel rank", ("dp_rank",), 0.0),
    "microbatch_over_dp": ("this micro-batch of all data-parallel ranks together", ("microbatch",), 0.2),
    "microbatch": ("the micro-batch", ("dp_rank", "microbatch"), 0.0),
    "rank": ("the rank (its CP place, over its micro-batches)", ("dp_rank", "cp_rank"), 0.2),
    "cp_place": ("what the CP rank holds of the micro-batch", ("dp_rank", "microbatch", "cp_rank"), 0.0),
}

#: How tokens are counted, in words.
COUNTINGS = {
    "mask": "mask tokens",
    "active": "tokens of nonzero mask",
    "length": "mask entries, masked ones too",
    "response": "response lengths, masked tokens too",
    "total": "total lengths, prompts too",
    "clamped": "mask tokens, and one for each fully masked sample",
    "clamped_pieces": "mask tokens, and one for each CP rank's piece without any",
    "clamped_microbatches": "mask tokens, and one for each micro-batch without any",
    "masked_length": "mask tokens, and the whole length of fully masked samples",
    "shifted": "mask tokens, and one more for each sample that has any",
    "rectangle": "rows x the longest row, padding too",
    "padded_rectangle": "rows x the longest row, padded to a multiple of 2 x CP",
    "width": "longest row, padding too,",
    "padded_width": "longest row, padded to a multiple of 2 x CP,",
}
#: Countings of a row's padded width: lengths that stand in the place of a divisor, not of a number of tokens.
WIDTHS = ("width", "padded_width")
#: What a part counts as, by its mask tokens and its entries.
_OF_PARTS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "mask": lambda tokens, _: tokens,
    "length": lambda _, length: length,
    "all": lambda tokens, _: np.ones_like(tokens),
    "active": lambda tokens, _: np.where(tokens > 0, 1.0, 0.0),
    "clamped": lambda tokens, _: np.maximum(tokens, 1),
    "masked_length": lambda tokens, length: np.where(tokens > 0, tokens, length),
    "shifted": lambda tokens, _: tokens + (tokens > 0),
}


@dataclass(frozen=True)
class Count:
    """One quantity within a scope: the ``tokens`` of a unit (or of the scope itself), or how many units there are."""

    what: str  # tokens, or which units: prompt, rollout, sample, microbatch
    scope: str = "step"  # a key of SCOPES
    counting: str = "mask"  # of tokens a key of COUNTINGS; of units all, or active for those with a token there
    unit: str = "scope"  # whose tokens (or samples) they are: scope for all in the scope, or a unit's part of it

    @property
    def within(self) -> tuple[str, ...]:
        """What tells the parts apart that it is counted in."""
        return SCOPES[self.scope][1] + (() if self.unit == "scope" else (self.unit,))

    @property
    def words(self) -> str:
        where = f" of {SCOPES[self.scope][0]}" if self.scope != "step" or self.unit == "scope" else ""
        whose = "" if self.unit == "scope" else f" of the {self.unit}"
        if self.what != "tokens":
            units = "micro-batches" if self.what == "microbatch" else f"{self.what}s"
            return f"the number of {'' if self.counting == 'all' else 'active '}{units}{whose}{where}"
        counted = "tokens" if self.counting == "mask" else f"tokens ({COUNTINGS[self.counting]})"
        return f"the {COUNTINGS[self.counting] if self.counting in WIDTHS else counted}{whose}{where}"


class Cells:
    """The step in cells; arrays [num_cells], in the order of samples."""

    def __init__(self, tokens: StepTokens, split: Split) -> None:
        self.split = split
        self.of_entry = tokens.groups(CELL)  # the cell of each entry of the masks, [num_entries]
        first = np.unique(self.of_entry, return_index=True)[1]
        names = ("sample", "cp_rank", "dp_rank", "microbatch", "rollout", "prompt")
        self.ids = {name: getattr(tokens, name)[first] for name in names}
        columns = (tokens.mask, tokens.mask != 0, np.ones(len(tokens)))
        self.tokens, self.active, self.length = (_sums(self.of_entry, column) for column in columns)
        lengths = {"response": tokens.response_lengths, "total": tokens.total_lengths}
        self.lengths_known = {name: known for name, known in lengths.items() if known is not None}
        self._groups: dict[tuple[str, ...], tuple[Ints, int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def has_prompts(self) -> bool:
        return bool((self.ids["prompt"] >= 0).all()) and len(self) > 0

    @cached_property
    def units(self) -> list[str]:
        """Those that there are: prompts if all samples have one, samples where some rollout has several."""
        one_each = self.groups(("rollout",))[1] == self.groups(("sample",))[1]
        return ["rollout", *["sample"] * (not one_each), *["prompt"] * self.has_prompts]

    def scopes(self) -> list[str]:
        """The parts that the step was really split into."""
        dp, k, cp = (self.groups((name,))[1] > 1 for name in ("dp_rank", "microbatch", "cp_rank"))
        real = {
            "step": True,
            "dp_rank": dp and k,  # with one micro-batch a rank it is the micro-batch
            "microbatch_over_dp": dp and k,
            "microbatch": dp or k,
            "rank": cp and k,
            "cp_place": cp,
        }
        return [scope for scope in SCOPES if real[scope]]

    def groups(self, names: tuple[str, ...]) -> tuple[Ints, int]:
        """Cells that share these ids: the group of each cell, [num_cells], and how many groups there are."""
        if names not in self._groups:
            group = group_by([self.ids[name] for name in names], len(self))
            self._groups[names] = group, int(group.max(initial=-1)) + 1
        return self._groups[names]

    def number_of_parts(self, names: tuple[str, ...]) -> int:
        """How many parts the step was split into that differ in these ids, also where a part got no entry of a mask."""
        split = {
            "dp_rank": self.split.dp_size,
            "microbatch": self.split.num_microbatches,
            "cp_rank": self.split.cp_size if self.groups(("cp_rank",))[1] > 1 else 1,  # else all hold every token
        }
        return max(self.groups(names)[1], math.prod(split.get(name, 1) for name in names))

    def features(self) -> Iterator[tuple[float, Count]]:
        """What a factor may be made of, and how far-fetched each is."""
        scopes = self.scopes()
        parts = [scope for scope in scopes if scope != "step"]
        units = self.units
        for scope in parts:
            yield SCOPES[scope][2], Count("tokens", scope)
        for unit in units:
            yield 0.0, Count("tokens", unit=unit)
            for counting in ("all", "active"):
                for scope in parts:
                    yield 0.2 + SCOPES[scope][2] + 0.1 * (counting == "active"), Count(unit, scope, counting)
                if self.has_prompts and unit != "prompt":
                    yield 0.7, Count(unit, "step", counting, "prompt")
            for scope in parts:
                yield 0.4 + SCOPES[scope][2], Count("tokens", scope, unit=unit)
        if "microbatch" in parts and self.groups(("dp_rank",))[1] > 1:
            yield 0.7, Count("microbatch", "dp_rank", "active")
        for counting in COUNTINGS:
            unknown = counting in ("response", "total") and counting not in self.lengths_known
            if unknown or counting in ("mask", "clamped_pieces", "clamped_microbatches"):
                continue
            for scope in parts:
                yield 0.8, Count("tokens", scope, counting)
            for unit in units if "rectangle" not in counting and counting not in WIDTHS else ():
                yield 0.8, Count("tokens", "step", counting, unit)

    def average(self, count: Count) -> float:
        """What a part of the step holds of it on average: the step's own count over the number of parts."""
        if count.what == "tokens":
            of_step = self.total("mask")
        elif count.what == "microbatch":
            of_step = self.number_of_parts(("dp_rank", "microbatch"))
        else:
            of_step = float(self.values(Count(count.what, counting="all"))[0])
        return of_step / self.number_of_parts(count.within)

    def total(self, counting: str) -> float:
        """Tokens of the step, counted so."""
        return float(self.values(Count("tokens", counting=counting))[0]) if len(self) else 0.0

    def values(self, count: Count) -> Floats:
        """The quantity, for each cell, [num_cells]."""
        group, counting = self.groups(count.within)[0], count.counting
        if count.what == "tokens" and counting == "active":
            return _sums(group, self.active)[group]
        # Of a sample what lies in the scope: the whole sample unless that is a CP place.
        names: tuple[str, ...] = (*SCOPES[count.scope][1], "sample")
        if count.what != "tokens":
            names = tuple(dict.fromkeys((*count.within, count.what)))
        elif counting in ("clamped_pieces", "clamped_microbatches"):
            names, counting = SCOPES["cp_place" if counting == "clamped_pieces" else "microbatch"][1], "clamped"
        part = self.groups(names)[0]
        if counting in _OF_PARTS or counting in self.lengths_known:
            return self._over_parts(group, part, counting)
        longest = np.zeros(int(group.max(initial=-1)) + 1)
        np.maximum.at(longest, group, _sums(part, self.length)[part])
        multiple = 2 * self.split.cp_size if counting.startswith("padded") and self.split.cp_size > 1 else 1
        width = (np.ceil(longest / multiple) * multiple)[group]
        return width if counting in WIDTHS else width * self._over_parts(group, part, "all")

    def _over_parts(self, group: Ints, part: Ints, counting: str) -> Floats:
        """Sums over a group's parts of what each counts as."""
        first = np.unique(part, return_index=True)[1]
        if counting in self.lengths_known:
            of_part = self.lengths_known[counting][self.ids["sample"][first]]
        else:
            of_part = _OF_PARTS[counting](_sums(part, self.tokens), _sums(part, self.length))
        return _sums(group[first], of_part)[group]


def _sums(group: Ints, values: Any) -> Floats:
    """Values added up in each group."""
    return np.bincount(group, weights=values, minlength=int(group.max(initial=-1)) + 1)
