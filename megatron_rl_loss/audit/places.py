"""Weight in the wrong places: NaN, an off-by-one shift, masked tokens that are trained, active ones that are not."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron_rl_loss.audit.causes import OTHERS
from megatron_rl_loss.audit.comparison import Comparison, Flags
from megatron_rl_loss.audit.report import Deviation, Shape
from megatron_rl_loss.audit.tokens import Floats, Ints, StepTokens


@dataclass
class Placed:
    """What is left once misplaced weight is taken off.

    Attributes:
        kept: tokens that are judged on, [num_entries].
        mask: the mask that the losses were multiplied by, as far as it can be seen, [num_entries].
        deviations: what was found.
    """

    kept: Flags
    mask: Floats
    deviations: list[Deviation] = field(default_factory=list)


#: How tokens are grouped, coarsest first: the shape of a deviation, by which ids, and how a place is written.
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


def found(cause: str, shape: Shape, text: str = "", **facts: object) -> Deviation:
    """A deviation of a cause in `causes.OTHERS`."""
    row = OTHERS[cause]
    return Deviation(shape=shape, causes=(cause,), text=f"{row.text}{text}", rows=row.rows, **facts)  # type: ignore[arg-type]


def take_off_misplaced(step: Comparison) -> Placed:
    """NaN, shifts, masked tokens with weight and active ones without, in this order."""
    tokens, weights = step.tokens, step.weights
    placed = Placed(kept=step.wanted & np.isfinite(weights), mask=tokens.mask)
    bad = ~np.isfinite(weights)
    if bad.any():
        placed.deviations.append(_not_finite(tokens, bad, step.wanted))
    places, size = step.measured.stray
    if places and size:
        share = size / (size + float(np.abs(weights[~bad]).sum()))
        text = f": {places} places, {100 * share:.1f} % of all weight"
        placed.deviations.append(found("stray", "stray", text, tokens=places))
    sizes = np.abs(np.where(bad, 0.0, weights))
    if not sizes.any():
        if step.wanted.any() and not bad.any():
            number = int(step.wanted.sum())
            text = ": none of them has any"
            placed.deviations.append(found("missing", "missing", text, factors=(("all", 0.0),), tokens=number))
            placed.kept = np.zeros_like(placed.kept)
        return placed
    support = sizes > step.tolerance * _likely(step, sizes)
    support[bad] = step.wanted[bad]
    extra, lost = support & ~step.wanted, step.wanted & ~support
    if not extra.any() and not lost.any():
        return placed
    for words, order, inside in _shifts(tokens):
        if (support == step.wanted[order] & inside).all():
            number = int(extra.sum() + lost.sum())
            placed.deviations.append(found("shift", "shift", f": weights lie {words}", tokens=number))
            placed.mask = np.where(support, tokens.mask[order], 0.0)
            placed.kept = support & ~bad
            return placed
    placed.kept = support & step.wanted & ~bad
    masked = _masked(step, extra) if extra.any() else None
    missing = _missing(step, lost) if lost.any() else None
    if masked and missing and masked.cause == "masked_trained":
        text = f": {int(extra.sum())} masked tokens have weight, {int(lost.sum())} active ones have none"
        placed.deviations.append(found("misaligned", "masked", text, tokens=int(extra.sum() + lost.sum())))
    else:
        placed.deviations += [one for one in (masked, missing) if one]
    return placed


def _likely(step: Comparison, sizes: Floats) -> Floats:
    """What a weight is likely to be, [num_entries]: far below is none."""
    positive = sizes > 0
    likely = np.full(len(sizes), float(np.median(sizes[positive])))
    trained = step.wanted & positive
    if trained.any():
        wanted = np.abs(step.expected)
        likely[step.wanted] = wanted[step.wanted] * float(np.median(sizes[trained] / wanted[trained]))
    return likely


def _not_finite(tokens: StepTokens, bad: Flags, wanted: Flags) -> Deviation:
    number = int(bad.sum())
    empty = []  # names of parts that have no active token
    inside = None
    for words, names in (
        ("samples", ("sample",)),
        ("rollouts", ("rollout",)),
        ("micro-batches", ("dp_rank", "microbatch")),
        ("CP ranks' pieces of a micro-batch", ("dp_rank", "microbatch", "cp_rank")),
    ):
        group = tokens.groups(names)
        without = np.bincount(group, weights=wanted) == 0
        if without.any():
            empty.append(f"{int(without.sum())} {words}")
            inside = words if without[group[bad]].all() else inside
    if inside is not None:
        return found("nan_empty", "nan", f"; NaN in {inside} that are fully masked", tokens=number)
    if bad[wanted].all() and wanted.any():
        nan_empty, nan_masked = OTHERS["nan_empty"], OTHERS["nan_masked"]
        if not empty:
            return found("nan_masked", "nan", "; no part of the step is fully masked", tokens=number)
        text = f"every weight is NaN: {nan_empty.text} ({', '.join(empty)} are fully masked); or {nan_masked.text}"
        causes, rows = ("nan_empty", "nan_masked"), (*nan_empty.rows, *nan_masked.rows)
        return Deviation(shape="nan", causes=causes, text=text, rows=rows, tokens=number)
    return found("nan", "nan", f": {number} of {len(bad)}", tokens=number)


def _shifts(tokens: StepTokens) -> Iterator[tuple[str, Ints, Flags]]:
    """Where each entry's mask would come from if masks were moved by one against losses, and whether it comes at all.

    Both [num_entries]. What falls off one end comes back at the other (`torch.roll`) or does not.
    """
    everywhere = np.arange(len(tokens))
    orders = (
        ("in its sample", ("sample",)),
        ("in the micro-batch", ("dp_rank", "microbatch")),
        ("in its CP rank's piece", ("dp_rank", "microbatch", "cp_rank")),
    )
    for within, names in orders:
        group = tokens.groups(names)
        by_group = np.argsort(group, kind="stable")
        sizes = np.bincount(group)
        begin = (sizes.cumsum() - sizes)[group[by_group]]
        size = sizes[group[by_group]]
        for move, words in ((1, "one token later"), (-1, "one token earlier")):
            rolled = begin + (everywhere - begin - move) % size
            order = np.empty_like(everywhere)
            order[by_group] = by_group[rolled]
            wrapped = np.zeros(len(tokens), np.bool_)
            wrapped[by_group] = (everywhere - begin - move) // size != 0
            yield f"{words} {within}", order, ~wrapped
            yield f"{words} {within}, around its end", order, np.ones_like(wrapped)


def _masked(step: Comparison, extra: Flags) -> Deviation:
    tokens = step.tokens
    number = int(extra.sum())
    masked = ~step.wanted
    active = np.bincount(tokens.sample, weights=step.wanted)
    in_masked_sample = active[tokens.sample] == 0
    first = np.full(len(active), np.iinfo(np.int64).max)
    np.minimum.at(first, tokens.sample[step.wanted], tokens.position[step.wanted])
    before = tokens.position < first[tokens.sample]
    if in_masked_sample[extra].all():
        cause = "masked_samples_trained"
    elif (before & ~in_masked_sample)[extra].all():
        cause = "prompt_trained"
    elif extra[masked].all():
        cause = "mask_ignored"
    else:
        cause = "masked_trained"
    share = float(np.abs(step.weights[extra]).sum() / np.nansum(np.abs(step.weights)))
    text = f": {number} of {int(masked.sum())} masked tokens have weight, {100 * share:.1f} % of all"
    relative = float(step.weights[extra].mean() / step.scale) if step.scale else np.inf
    place = "a masked token, to the mean asked weight of an active one"
    return found(cause, "masked", text, factors=((place, relative),), tokens=number)


def _missing(step: Comparison, lost: Flags) -> Deviation:
    tokens, number = step.tokens, int(lost.sum())
    for _, names, pattern in PARTITIONS:
        group = tokens.groups(names)
        hit = np.bincount(group, weights=lost) > 0
        whole = np.bincount(group, weights=step.wanted & ~lost) == 0
        if (whole[hit]).all():
            first = np.unique(group, return_index=True)[1]
            ids = np.stack([getattr(tokens, name)[first] for name in names], 1)[hit].tolist()
            places = [pattern.format(*one) for one in ids]
            shown = "; ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
            factors = tuple((place, 0.0) for place in places)
            return found("missing", "missing", f": {number}, all of {shown}", factors=factors, tokens=number)
    last = np.zeros(int(tokens.sample.max()) + 1, np.int64)
    np.maximum.at(last, tokens.sample[step.wanted], tokens.position[step.wanted])
    ends = step.wanted & (tokens.position == last[tokens.sample])
    text = ", the last of each sample" if (lost == ends).all() else ""
    factors = (("these tokens", 0.0),)
    return found("missing", "missing", f": {number} of {int(step.wanted.sum())}{text}", factors=factors, tokens=number)
