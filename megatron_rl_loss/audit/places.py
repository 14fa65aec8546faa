"""Weight in the wrong places, and tokens or places that weigh apart from all others: facts, before any fit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_rl_loss.audit.comparison import Comparison, Flags
from megatron_rl_loss.audit.tokens import CELL, Floats, Ints, StepTokens, extremes

Shape = Literal["factor", "microbatch", "rank", "cp_place", "sample", "rollout", "prompt", "token"]
Places = tuple[tuple[str, float], ...]


#: How tokens are grouped, coarsest first: the shape of what differs, by which ids, and how a place is written.
PARTITIONS: tuple[tuple[Shape, tuple[str, ...], str], ...] = (
    ("cp_place", ("cp_rank",), "CP {}"),
    ("rank", ("dp_rank",), "DP {}"),
    ("microbatch", ("microbatch",), "micro-batch {} of each DP rank"),
    ("rank", ("dp_rank", "cp_rank"), "DP {}, CP {}"),
    ("microbatch", ("dp_rank", "microbatch"), "DP {}, micro-batch {}"),
    ("cp_place", ("dp_rank", "microbatch", "cp_rank"), "DP {}, micro-batch {}, CP {}"),
    ("prompt", ("prompt",), "prompt {}"),
    ("rollout", ("rollout",), "rollout {}"),
    ("sample", ("sample",), "sample {}"),
    ("sample", ("sample", "cp_rank"), "sample {}, CP {}"),
)
#: What each deviation is, in words.
_TEXTS = {
    "nan_empty": "NaN as of 0/0, where a part of the step has no active token and is divided by its own count",
    "nan_masked": "NaN as of a masked token's NaN times its mask: 0 x NaN is NaN, where(mask, loss, 0) is not",
    "nan": "weights are NaN or infinite",
    "stray": "weight lies on padding, or on other samples' slots",
    "missing": "active tokens have no weight",
    "shift": "weights are off by one, as if masks and losses were",
    "mask_ignored": "all masked tokens are trained, as if no mask were applied",
    "masked_samples_trained": "fully masked samples are trained",
    "prompt_trained": "tokens before the response are trained",
    "masked_trained": "some masked tokens are trained",
    "misaligned": "weights lie on other tokens, as if masks and losses were cut or laid out differently",
    "sign": "the sign is turned: what was to be minimised is maximised",
    "fraction_ignored": "fractional masks act as if they were 1",
    "mask_squared": "fractional masks act as if they were multiplied twice",
    "odd_tokens": "a few tokens weigh apart from the others of their sample",
}


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A fact about where weight lies: on no token, on masked ones, not where it should be, turned around."""

    name: str  # of the kind, such as "masked_trained"
    text: str  # in a sentence
    factors: Places = ()  # places, and the measured / asked that this accounts for at each
    tokens: int | None = None  # how many tokens it concerns; None for all


def deviation(name: str, text: str = "", **facts: object) -> Deviation:
    return Deviation(name=name, text=f"{_TEXTS[name]}{text}", **facts)  # type: ignore[arg-type]


@dataclass
class Kept:
    """What is left to be judged on once misplaced weight is taken off."""

    step: Comparison
    entries: Ints  # of the tokens, [num_kept]
    weights: Floats  # what they weigh; where masks were moved, what the mask entry of the token weighs
    deviations: list[Deviation] = field(default_factory=list)  # what was taken off

    @property
    def expected(self) -> Floats:
        return self.step.expected[self.entries]

    @property
    def ratio(self) -> Floats:
        """Measured/asked, [num_kept]."""
        return self.weights / self.expected


def take_off(step: Comparison) -> Kept:
    """Weight in the wrong places, turned signs and odd tokens, in this order; the rest is one number for each cell."""
    kept = _take_off_misplaced(step)
    if len(kept.entries):
        _take_off_signs(kept)
        _take_off_odd_tokens(kept)
    return kept


def _take_off_misplaced(step: Comparison) -> Kept:
    """NaN, stray weight, shifts, masked tokens with weight and active ones without, in this order."""
    tokens, weights = step.tokens, step.weights
    deviations: list[Deviation] = []
    bad = ~np.isfinite(weights)
    if bad.any():
        deviations.append(_not_finite(tokens, bad, step.wanted))
    places, size = step.measured.stray
    if places and size:
        share = size / (size + float(np.abs(weights[~bad]).sum()))
        deviations.append(deviation("stray", f": {places} places, {100 * share:.1f} % of all weight", tokens=places))
    sizes = np.abs(np.where(bad, 0.0, weights))
    support = sizes > step.tolerance * _likely(step, sizes)
    support[bad] = step.wanted[bad]
    extra, lost = support & ~step.wanted, step.wanted & ~support
    if extra.any() or lost.any():
        for words, source, inside in _shifts(tokens) if sizes.any() else ():
            if (support == step.wanted[source] & inside).all():
                text = f": weights lie {words}"
                deviations.append(deviation("shift", text, tokens=int(extra.sum() + lost.sum())))
                moved = np.flatnonzero(support & ~bad)
                return Kept(step, source[moved], weights[moved], deviations)
        masked = _masked(step, extra) if extra.any() else None
        missing = _missing(step, lost) if lost.any() else None
        if masked and missing and masked.name == "masked_trained":
            text = f": {int(extra.sum())} masked tokens have weight, {int(lost.sum())} active ones have none"
            deviations.append(deviation("misaligned", text, tokens=int(extra.sum() + lost.sum())))
        else:
            deviations += [one for one in (masked, missing) if one]
    entries = np.flatnonzero(support & step.wanted & ~bad)
    return Kept(step, entries, weights[entries], deviations)


def _likely(step: Comparison, sizes: Floats) -> Floats:
    """What a weight is likely to be, [num_entries]: far below is none."""
    positive = sizes > 0
    likely = np.full(len(sizes), float(np.median(sizes[positive])) if positive.any() else 0.0)
    trained = step.wanted & positive
    if trained.any():
        wanted = np.abs(step.expected)
        likely[step.wanted] = wanted[step.wanted] * float(np.median(sizes[trained] / wanted[trained]))
    return likely


def _not_finite(tokens: StepTokens, bad: Flags, wanted: Flags) -> Deviation:
    number = int(bad.sum())
    empty = []  # parts that have no active token
    for words, names in (
        ("CP ranks' pieces of a micro-batch", ("dp_rank", "microbatch", "cp_rank")),
        ("micro-batches", ("dp_rank", "microbatch")),
        ("rollouts", ("rollout",)),
        ("samples", ("sample",)),
    ):
        group = tokens.groups(names)
        without = np.bincount(group, weights=wanted) == 0
        if without.any():
            empty.append(f"{int(without.sum())} {words}")
            if without[group[bad]].all():
                return deviation("nan_empty", f": all of it in {words} that are fully masked", tokens=number)
    if not (bad[wanted].all() and wanted.any()):
        return deviation("nan", f": {number} of {len(bad)}", tokens=number)
    if not empty:
        return deviation("nan_masked", "; no part of the step is fully masked", tokens=number)
    text = f"; either {_TEXTS['nan_empty']} ({', '.join(empty)} are fully masked), or {_TEXTS['nan_masked']}"
    return deviation("nan", text, tokens=number)


def _shifts(tokens: StepTokens) -> Iterator[tuple[str, Ints, Flags]]:
    """Where each entry's mask would come from if masks were moved by one against losses, and whether it comes at all.

    Both [num_entries]. What falls off one end comes back at the other (`torch.roll`) or does not.
    """
    everywhere = np.arange(len(tokens))
    for within, names in (
        ("in its sample", ("sample",)),
        ("in the micro-batch", ("dp_rank", "microbatch")),
        ("in its CP rank's piece", ("dp_rank", "microbatch", "cp_rank")),
    ):
        group = tokens.groups(names)
        by_group = np.argsort(group, kind="stable")
        sizes = np.bincount(group)
        begin = (sizes.cumsum() - sizes)[group[by_group]]
        size = sizes[group[by_group]]
        for move, words in ((1, "one token later"), (-1, "one token earlier")):
            source, inside = np.empty_like(everywhere), np.zeros(len(tokens), np.bool_)
            source[by_group] = by_group[begin + (everywhere - begin - move) % size]
            inside[by_group] = (everywhere - begin - move) // size == 0
            yield f"{words} {within}", source, inside
            yield f"{words} {within}, around its end", source, np.ones_like(inside)


def _masked(step: Comparison, extra: Flags) -> Deviation:
    tokens = step.tokens
    number, masked = int(extra.sum()), ~step.wanted
    of_wanted, positions = tokens.sample[step.wanted], tokens.position[step.wanted].astype(np.float64)
    first = extremes(of_wanted, positions, int(tokens.sample.max()) + 1)[0][tokens.sample]  # inf: fully masked
    if np.isinf(first[extra]).all():
        name = "masked_samples_trained"
    elif (np.isfinite(first) & (tokens.position < first))[extra].all():
        name = "prompt_trained"
    else:
        name = "mask_ignored" if extra[masked].all() else "masked_trained"
    share = float(np.abs(step.weights[extra]).sum() / np.nansum(np.abs(step.weights)))
    text = f": {number} of {int(masked.sum())} masked tokens have weight, {100 * share:.1f} % of all"
    relative = float(step.weights[extra].mean() / step.scale) if step.scale else np.inf
    place = "a masked token, to the mean asked weight of an active one"
    return deviation(name, text, factors=((place, relative),), tokens=number)


def _missing(step: Comparison, lost: Flags) -> Deviation:
    tokens, number = step.tokens, int(lost.sum())
    if (lost == step.wanted).all():
        return deviation("missing", ": none of them has any", factors=(("all", 0.0),), tokens=number)
    for _, names, pattern in PARTITIONS:
        group = tokens.groups(names)
        hit = np.bincount(group, weights=lost) > 0
        whole = np.bincount(group, weights=step.wanted & ~lost) == 0
        if whole[hit].all():
            places = _named(tokens, np.unique(group, return_index=True)[1][hit], names, pattern)
            factors = tuple((place, 0.0) for place in places)
            return deviation("missing", f": {number}, all of {shown(places)}", factors=factors, tokens=number)
    return deviation("missing", f": {number} of {int(step.wanted.sum())}", tokens=number)


def _named(tokens: StepTokens, entries: Ints, names: tuple[str, ...], pattern: str) -> list[str]:
    """The places that entries are in."""
    return [pattern.format(*ids) for ids in zip(*(getattr(tokens, name)[entries] for name in names), strict=True)]


def shown(places: list[str]) -> str:
    """The first few of them."""
    return "; ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


# ---- places that weigh apart


def _take_off_signs(kept: Kept) -> None:
    """Where whole places pull the other way, their sign is turned back."""
    negative = kept.ratio < 0
    if not negative.any():
        return
    shape, factors = places_of(kept, np.where(negative, -1.0, 1.0), 0.0)
    factors = tuple((place, sign) for place, sign in factors if sign < 0)
    if shape == "token":
        return
    text = "" if negative.all() else f" at {shown([place for place, _ in factors])}"
    kept.deviations.append(deviation("sign", text, factors=factors, tokens=int(negative.sum())))
    kept.weights = np.where(negative, -kept.weights, kept.weights)


def _take_off_odd_tokens(kept: Kept) -> None:
    """Leaves out tokens that weigh apart from the others of their cell, if these are few."""
    ratio, tokens, tolerance = kept.ratio, kept.step.tokens, 2 * kept.step.tolerance
    cell = tokens.groups(CELL)[kept.entries]
    by_cell = np.lexsort((ratio, cell))
    sizes = np.bincount(cell)
    middle = by_cell[(sizes.cumsum() - sizes + (sizes - 1) // 2).clip(0, len(cell) - 1)]
    usual = ratio[middle][cell]
    odd = np.abs(ratio - usual) > tolerance * np.abs(usual)
    if not odd.any() or odd.mean() > 0.4 or (usual <= 0).any():
        return
    times = ratio[odd] / usual[odd]
    at = kept.entries[odd]
    whole = np.abs(times - np.round(times)).max() <= tolerance * np.abs(times).max() and times.min() > 1
    if len(np.unique(np.round(times, 5))) > 1 and not whole and odd.mean() > 0.05:
        return  # each weighs something else: that is no few among others
    places = _named(tokens, at, ("sample", "position"), "sample {}, token {}")
    text = f": {len(at)} of {len(odd)}, {shown(places)}" + ", as if counted several times" * bool(whole)
    factors = tuple(zip(places, times.tolist(), strict=True))
    kept.deviations.append(deviation("odd_tokens", text, factors=factors, tokens=len(at)))
    kept.entries, kept.weights = kept.entries[~odd], kept.weights[~odd]


def places_of(kept: Kept, values: Floats, tolerance: float) -> tuple[Shape, Places]:
    """The coarsest partition over which values of what is kept are constant, and the value at each place."""
    tokens, entries = kept.step.tokens, kept.entries
    if not len(values) or np.ptp(values) <= tolerance * np.abs(values).max():
        return "factor", (("all", float(np.median(values))),) if len(values) else ()
    one_row_each = (tokens.groups(("rollout",)) == tokens.groups(("sample",))).all()
    for shape, names, pattern in PARTITIONS:
        if shape == "rollout" and one_row_each:
            continue
        _, first, group = np.unique(tokens.groups(names)[entries], return_index=True, return_inverse=True)
        low, high = extremes(group.reshape(-1), values, len(first))
        if (high - low <= tolerance * np.maximum(np.abs(low), np.abs(high))).all():
            places = _named(tokens, entries[first], names, pattern)
            return shape, tuple(zip(places, ((low + high) / 2).tolist(), strict=True))
    return "token", (("the smallest", float(values.min())), ("the largest", float(values.max())))
