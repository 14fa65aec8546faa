"""Weight in the wrong places: NaN, padding, masked tokens, lost active tokens, shifted masks, a flipped sign."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl_loss.audit.tokens import (
    CP_PIECE,
    MICROBATCH,
    Flags,
    Floats,
    Ints,
    MeasuredStep,
    StepTokens,
    extremes,
)
from megatron_rl_loss.core.errors import only_if

#: Parts of a step, coarsest first, and their names in reports.
PLACES = {
    ("cp_rank",): "CP {}",
    ("dp_rank",): "DP {}",
    ("microbatch",): "micro-batch {} of each DP rank",
    ("dp_rank", "cp_rank"): "DP {}, CP {}",
    MICROBATCH: "DP {}, micro-batch {}",
    CP_PIECE: "DP {}, micro-batch {}, CP {}",
    ("prompt",): "prompt {}",
    ("sample",): "sample {}",
    ("sample", "cp_rank"): "sample {}, CP {}",
}


@dataclass(frozen=True)
class Misplaced:
    """A fact about weight in the wrong places: the name of its kind, a sentence, and its number of tokens."""

    name: str
    text: str
    tokens: int


@dataclass
class Kept:
    """Entries with weight in the right places, left to be compared with the asked weights."""

    entries: Ints  # of the mask that each weight follows, [num_kept]
    weights: Floats  # [num_kept]
    misplaced: list[Misplaced]


def take_off(measured: MeasuredStep, expected: Floats, tolerance: float) -> Kept:
    """Remove, in this order: NaN, stray weight, shifts, weight on masked tokens, lost active tokens, flipped signs."""
    tokens, weights, wanted = measured.tokens, measured.weights, expected != 0
    misplaced: list[Misplaced] = []
    bad = ~np.isfinite(weights)
    if bad.any():
        misplaced.append(_not_finite(tokens, bad, wanted))
    sizes = np.abs(np.where(bad, 0.0, weights))
    places, size = measured.stray
    if places and size:
        share = f"{100 * size / (size + sizes.sum()):.1f} % of all" if np.isfinite(size) else "NaN or infinite"
        misplaced.append(Misplaced("stray", f"{share} weight lies on padding or other samples' slots", places))
    support = sizes > tolerance * _usual(sizes, np.abs(expected))
    support[bad] = wanted[bad]
    extra, lost = support & ~wanted, wanted & ~support
    differing = int(extra.sum() + lost.sum())
    for words, source, inside in _shifts(tokens) if extra.any() else ():
        if (support == wanted[source] & inside).all():
            misplaced.append(Misplaced("shift", f"weights are off by one against masks: each lies {words}", differing))
            entries = np.flatnonzero(support & ~bad)
            return _without_signs(Kept(source[entries], weights[entries], misplaced), tokens, expected)
    if extra.any():
        misplaced.append(_masked(measured, expected, extra))
    if lost.any():
        misplaced.append(_missing(tokens, wanted, lost))
    if extra.any() and wanted.any() and (extra == ~wanted).all() and (lost == wanted).all():
        misplaced[-2:] = [
            Misplaced("inverted", "the mask is inverted: masked tokens are trained, active ones are not", differing)
        ]
    if [place.name for place in misplaced[-2:]] == ["masked_trained", "missing"]:
        text = "weights lie on the wrong tokens, as if masks and losses were cut or laid out differently"
        numbers = f"{int(extra.sum())} masked tokens have weight, {int(lost.sum())} active ones have none"
        misplaced[-2:] = [Misplaced("misaligned", f"{text}: {numbers}", differing)]
    entries = np.flatnonzero(support & wanted & ~bad)
    return _without_signs(Kept(entries, weights[entries], misplaced), tokens, expected)


#: Facts by what they explain, the surest first.
RANKED = (
    *("inverted", "shift", "prompt_trained", "mask_ignored", "masked_samples_trained", "stray"),
    *("sign", "copies", "misaligned", "masked_trained", "missing"),
)
#: Facts that say which tokens are trained instead; they hold in every step of a function, or in none.
FACTS_OF_ALL_STEPS = frozenset(RANKED[:5])


def trained_instead(steps: Sequence[tuple[MeasuredStep, Floats]], tolerance: float) -> tuple[str, str] | None:
    """Name and text of the first fact of `FACTS_OF_ALL_STEPS` that says which tokens have weight in all of these steps.

    None where no fact does, or where the right tokens have weight in all of them. A single small step may look like
    several: a mask of one sort, inverted, like one that is shifted or missing.
    """
    fits_by_step = []
    is_right = True
    for measured, expected in steps:
        sizes, wanted = np.abs(measured.weights), expected != 0
        support = sizes > tolerance * _usual(sizes, np.abs(expected))
        is_right &= bool((support == wanted).all())
        fits_by_step.append(
            {words: (name, bool((support == flags).all())) for name, words, flags in _trained(measured.tokens, wanted)}
        )
    if is_right or not fits_by_step:
        return None
    for words, (name, _) in fits_by_step[0].items():
        if all(words in step and step[words][1] for step in fits_by_step):
            return name, words
    return None


_NO_MASK = "as if no mask were applied (or, in a loop with `tap`, before it), all masked tokens are"


def _trained(tokens: StepTokens, wanted: Flags) -> Iterator[tuple[str, str, Flags]]:
    """Name and text of each fact, and the tokens that it says have weight, [num_entries]."""
    yield "inverted", "the mask is inverted: masked tokens are trained, active ones are not", ~wanted
    for words, source, inside in _shifts(tokens):
        yield "shift", f"weights are off by one against masks: each lies {words}", wanted[source] & inside
    position = tokens.position.astype(np.float64)
    number = int(tokens.sample.max(initial=-1)) + 1
    first = extremes(tokens.sample[wanted], position[wanted], number)[0][tokens.sample]
    yield "prompt_trained", "tokens before the response are trained", wanted | (np.isfinite(first) & (position < first))
    yield "mask_ignored", f"{_NO_MASK} trained", np.ones_like(wanted)
    yield "masked_samples_trained", "fully masked samples are trained", wanted | ~np.isfinite(first)


def _without_signs(kept: Kept, tokens: StepTokens, expected: Floats) -> Kept:
    """Flip the sign of whole places whose weights all have the wrong sign."""
    negative = kept.weights * expected[kept.entries] < 0
    if negative.any() and (places := _whole_places(tokens, kept.entries, negative)):
        where = "" if negative.all() else f" at {places}"
        text = f"the sign is flipped{where}: the loss is maximised there, not minimised"
        kept.misplaced.append(Misplaced("sign", text, int(negative.sum())))
        kept.weights = np.where(negative, -kept.weights, kept.weights)
    return kept


def without_copies(kept: Kept, tokens: StepTokens, expected: Floats, tolerance: float) -> Kept:
    """Remove the few samples that weigh a whole multiple of all others, if nothing else differs."""
    ratio, sample = kept.weights / expected[kept.entries], tokens.sample[kept.entries]
    times = ratio / np.median(ratio) if len(ratio) else ratio
    again = times > 1 + tolerance
    whole = np.round(times)
    if not again.any() or (np.abs(times - whole) > tolerance * whole).any() or not (times[~again] > 0.5).all():
        return kept
    samples = np.unique(sample[again])
    if 3 * len(samples) > len(np.unique(sample)):
        return kept
    often = " or ".join(f"{x:g}" for x in np.unique(whole[again]))
    text = f"weigh {often} times as much as all others, as if they were in the step {often} times"
    shown = ", ".join(map(str, samples[:4])) + only_if(len(samples) > 4, " and more")
    copies = Misplaced("copies", f"samples {shown} {text}", int(again.sum()))
    return Kept(kept.entries[~again], kept.weights[~again], [*kept.misplaced, copies])


def _usual(sizes: Floats, wanted: Floats) -> Floats:
    """The usual size of a weight, [num_entries]; a weight far below counts as 0."""
    positive, active = sizes > 0, wanted > 0
    usual = np.full(len(sizes), float(np.median(sizes[positive])) if positive.any() else 0.0)
    if (trained := active & positive).any():
        usual[active] = wanted[active] * float(np.median(sizes[trained] / wanted[trained]))
    return usual


def _not_finite(tokens: StepTokens, bad: Flags, wanted: Flags) -> Misplaced:
    number = int(bad.sum())
    text = f"NaN or infinite weights at {number} of {len(bad)} tokens"
    parts = {"CP ranks' pieces of micro-batches": CP_PIECE, "micro-batches": MICROBATCH, "samples": ("sample",)}
    for words, names in parts.items():
        group = tokens.groups(*names)
        if (np.bincount(group, weights=wanted) == 0)[group[bad]].all():
            return Misplaced("nan_empty", f"{text}, all in {words} without an active token, as from 0/0", number)
    if bad[wanted].all() and wanted.any():
        why = "as from 0/0, or from a masked token's NaN times its mask (use where(mask, loss, 0))"
        text += f", all active ones included, {why}"
    return Misplaced("nan", text, number)


def _shifts(tokens: StepTokens) -> Iterator[tuple[str, Ints, Flags]]:
    """Candidate shifts of masks by one token: words, the source entry of each mask, and True where there is one.

    Sources and flags are [num_entries]. With and without wrapping around the end, as `torch.roll` does.
    """
    everywhere = np.arange(len(tokens))
    parts = {"in its sample": ("sample",), "in its micro-batch": MICROBATCH, "in its CP rank's piece": CP_PIECE}
    for within, names in parts.items():
        group = tokens.groups(*names)
        order, sizes = np.argsort(group, kind="stable"), np.bincount(group)
        begin, size = (sizes.cumsum() - sizes)[group[order]], sizes[group[order]]
        for move, words in ((1, "later"), (-1, "earlier")):
            source, inside, moved = everywhere.copy(), np.zeros(len(tokens), np.bool_), everywhere - begin - move
            source[order], inside[order] = order[begin + moved % size], moved // size == 0
            yield f"one token {words} {within}", source, inside
            yield f"one token {words} {within}, wrapping around the end", source, np.ones_like(inside)


def _masked(measured: MeasuredStep, expected: Floats, extra: Flags) -> Misplaced:
    tokens, wanted, sizes = measured.tokens, expected != 0, np.abs(measured.weights)
    positions = tokens.position.astype(np.float64)
    first = extremes(tokens.sample[wanted], positions[wanted], int(tokens.sample.max()) + 1)[0][tokens.sample]
    if np.isinf(first)[extra].all():
        name, what = "masked_samples_trained", "fully masked samples are"
    elif (np.isfinite(first) & (positions < first))[extra].all():
        name, what = "prompt_trained", "tokens before the response are"
    elif extra[~wanted].all():
        name, what = "mask_ignored", _NO_MASK
    else:
        name, what = "masked_trained", "some masked tokens are"
    number, share = int(extra.sum()), 100 * float(sizes[extra].sum() / np.nansum(sizes))
    text = f"{what} trained: {number} of {int((~wanted).sum())} masked tokens have {share:.1f} % of all weight"
    return Misplaced(name, text, number)


def _missing(tokens: StepTokens, wanted: Flags, lost: Flags) -> Misplaced:
    number, of = int(lost.sum()), int(wanted.sum())
    where = "" if number == of else _whole_places(tokens, np.flatnonzero(wanted), lost[wanted])
    text = f"{number} of {of} active tokens have no weight" + only_if(where, f", all of {where}")
    return Misplaced("missing", text, number)


def _whole_places(tokens: StepTokens, entries: Ints, hit: Flags) -> str:
    """The coarsest places that `hit` [num_entries] covers wholly, the first few in words; empty if there are none."""
    for names, pattern in PLACES.items():
        if names == ("prompt",) and "prompt" not in tokens.ids:
            continue
        columns = [tokens.column(name)[entries] for name in names]
        group = tokens.groups(*names)[entries]
        if (extremes(group, hit.astype(float), int(group.max()) + 1)[0][group] == hit).all():
            first = np.unique(group[hit], return_index=True)[1]
            shown = [pattern.format(*ids) for ids in zip(*(column[hit][first[:4]] for column in columns), strict=True)]
            return "; ".join(shown) + only_if(len(first) > 4, f" and {len(first) - 4} more")
    return ""
