"""Counting a step: every rank's tally is gathered over the data-parallel group, and each rank adds up all of them.

A tally has a table for each key, with a row for each id that the rank holds, and what ranks must have alike.
Every rank makes the same sums of the same rows, to the bit.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_rl_loss.core.collectives import (
    Group,
    StepGroups,
    attempt,
    failure_of,
    gather_objects,
    is_first_rank,
    raise_together,
    ranks_of,
    several,
    size_of,
    stated_dp_group,
    warn_on_one_rank,
)
from megatron_rl_loss.core.errors import BadBatchError
from megatron_rl_loss.core.ids import Ints, hashed, join_types
from megatron_rl_loss.core.masks import Floats, Mask, to_array
from megatron_rl_loss.core.samples import Samples, as_samples, read_masks
from megatron_rl_loss.core.segments import Segments, segments_by

#: The name of a unit counting, one of `COUNTINGS`.
UnitCounting = str


class Counting(NamedTuple):
    """A way to count units: each unit counts of which a segment counts.

    Attributes:
        name: what users pass as ``units=``.
        units: which units count, in words.
        counts: segments by a key -> True for each that counts, bools [num_segments].
        labels: names of the samples' labels that `counts` reads. Steps are counted by it, and judged by it in an audit,
            where the samples have these.
    """

    name: str
    units: str
    counts: Callable[[Segments], npt.NDArray[np.bool_]]
    labels: tuple[str, ...] = ()

    def can_count(self, samples: Samples) -> bool:
        """True for samples that have the labels."""
        return all(name in samples.labels for name in self.labels)

    def segment_values(self, segments: Segments) -> Floats:
        """1 for each segment that counts, else 0, float64 [num_segments]; NaN where the samples lack the labels."""
        if not self.can_count(segments.samples):
            return np.full(len(segments), np.nan)
        return self.counts(segments).astype(np.float64)


def _has_label(segments: Segments) -> npt.NDArray[np.bool_]:
    """True for each segment of a sample whose label ``counted`` is true."""
    label = segments.samples.label("counted")
    entries = list(label) if isinstance(label, list | tuple) else to_array(label).tolist()
    if not all(getattr(entry, "ndim", 0) == 0 and entry in (0, 1) for entry in entries):
        raise ValueError(
            f"the label 'counted' of {entries[:8]}: it must be True or False for each sample, and says which ones "
            'units="counted" counts. Pass Samples(..., labels={"counted": [True, ...]}), or rename the label.'
        )
    return segments.spread(np.array(entries, np.bool_))


#: The first one is that of a mode for which nobody says another.
COUNTINGS = {
    row.name: row
    for row in (
        Counting(
            "all",
            "every one, fully masked or not",
            lambda segments: np.ones(len(segments), np.bool_),
        ),
        Counting("active", "those with a token whose loss mask is not 0", lambda segments: segments.active),
        # A unit that is trained on counts, whatever its label: weights would else add up to more than 1.
        Counting(
            "counted",
            "active ones, and those with a sample whose label `counted` is true",
            lambda segments: segments.active | _has_label(segments),
            labels=("counted",),
        ),
    )
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sum:
    """A sum over the step, by key, that a mode declares; it is counted with the step's tokens and units.

    Counts hold the values under the `Sum` object itself, so two sums cannot be confused.

    Attributes:
        of: one finite number per sample, [num_samples], of samples with the masks that the mode aggregates by.
        by: the unit of each sum: ``step``, ``rollout``, ``prompt`` or another name of the samples' ids.
    """

    of: Callable[[Samples], Any]
    by: str = "step"

    def values(self, samples: Samples) -> Floats:
        """The values of each sample, float64 [num_samples]."""
        values = to_array(self.of(samples)).astype(np.float64)
        if values.shape != (len(samples),) or not np.isfinite(values).all():
            raise ValueError(
                f"a declared sum of {values.tolist()} for {len(samples)} samples: it must be one finite number per "
                "sample, fully masked samples included. Return 0 where there is nothing to add."
            )
        return values

    def segment_values(self, segments: Segments) -> Floats:
        """The values of each segment's sample, float64 [num_segments]."""
        return segments.spread(self.values(segments.samples))


#: What is counted of units: ``tokens``, a unit counting (the number of each unit's samples that count), or a `Sum`.
Counted = str | Sum


@dataclass(frozen=True, eq=False)
class Units:
    """The step's units by one key: rollouts, prompt groups, ...

    Attributes:
        number: by unit counting, how many there are.
        ids: theirs, sorted, int64 [num_units]; none of units without ids: samples, and rollouts that are samples.
        counts: of each unit with an id, float64 [num_units].
    """

    number: Mapping[UnitCounting, int]
    ids: Ints
    counts: Mapping[Counted, Floats]

    @classmethod
    def of(cls, ids: Ints, counts: Mapping[Counted, Floats]) -> "Units":
        """Units with ids; a counting whose labels some samples lack has no number."""
        number = {name: int(np.count_nonzero(counts[name])) for name in COUNTINGS if name in counts}
        return cls(number, ids, counts)

    @property
    def have_ids(self) -> bool:
        return bool(self.counts)

    def at(self, counted: Counted, ids: Ints, name: str, sample: Ints | None = None) -> Floats:
        """The count of each id's unit; ValueError for an unknown id, with its sample and the name of the ids."""
        values = self.counts[counted]
        if not len(ids):
            return np.zeros(0)
        places = self.ids.searchsorted(ids).clip(max=max(len(self.ids) - 1, 0))
        unknown = self.ids[places] != ids if len(self.ids) else np.ones(len(ids), np.bool_)
        if unknown.any():
            first = int(unknown.argmax())
            raise ValueError(
                f"the {name} of sample {first if sample is None else sample[first]} has no count in the step's totals: "
                "totals must count every unit of the step. Make them from the whole step, with the same ids."
            )
        return values[places]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTotals:
    """Denominators of one optimizer step. They are counted, by `of` or by a plan, never made by hand.

    Attributes:
        step_tokens: sum of all mask entries, fractional weights included.
        step_active_tokens: number of tokens of nonzero weight. For Megatron's per-token-loss carrier.
        step_entries: number of mask entries of any weight. For the log alone.
        units: by the name of their ids, ``rollout`` and ``prompt`` for instance: ``units["rollout"].number["all"]`` is
            the number of rollouts. None on a pipeline stage that reads no data.
        by_mask: the same counts by each of the samples' further masks, for terms of the loss that have their own.
        dp_size: ranks of the data-parallel group that the counts were summed over.
        dynamic_cp: true if some micro-batches of the step have a context-parallel group of their own.
    """

    step_tokens: float
    step_active_tokens: int
    step_entries: int
    units: Mapping[str, Units]
    by_mask: Mapping[str, "StepTotals"] = field(default_factory=dict)
    dp_size: int = 1
    dynamic_cp: bool = False

    def with_mask(self, name: str | None) -> "StepTotals":
        """These totals by one of the further masks, for None unchanged; ValueError for an unknown mask."""
        if name is not None and name not in self.by_mask:
            raise ValueError(
                f"a term has the mask {name!r}, and the totals count the masks: {', '.join(self.by_mask) or 'none'}: "
                f"the step must count the mask of each term. Declare it: plan_step(..., term_masks=[{name!r}])."
            )
        return self if name is None else self.by_mask[name]

    @classmethod
    def of(
        cls,
        samples: Samples | Iterable[Mask],
        *,
        sums: Sequence[Sum] = (),
        dp_group: Group | EllipsisType | None = ...,
        replica_groups: Sequence[Group] = (),
    ) -> "StepTotals":
        """Totals of a step from all samples that this DP rank holds in it, over all micro-batches.

        >>> StepTotals.of([torch.tensor([1, 1, 0]), torch.tensor([1])]).step_tokens
        3.0

        Args:
            samples: with ids and labels where the mode needs some, else their full masks (not CP-sliced) alone; none if
                the rank has no sample. Units may straddle micro-batches and DP ranks.
            sums: those that a mode declares (``list(mode.sums.values())``), in the same order on every rank.
            dp_group: the data-parallel group *without* context parallelism; None where this rank alone holds the whole
                step. Required where `torch.distributed` has several ranks.
            replica_groups: groups whose ranks hold the same samples (context, tensor, pipeline parallel); their ranks
                are checked to agree.

        Raises:
            TypeError, ValueError: as `Samples`; no dp_group argument in a job of several ranks.
            BadBatchError: with groups, on every rank, naming the rank that failed and why.
        """
        groups = StepGroups(stated_dp_group(dp_group, "totals"), replica_groups=replica_groups)
        return count_step(attempt(lambda: [as_samples(samples)]), groups, sums=sums)


#: Units that every rank knows by name, with samples or without; there is one step.
_KNOWN = ("step", "rollout", "prompt")
#: A row for each id: ``id``, of rollouts ``prompt`` (both int64), and a float64 for each `Column` by its name.
Rows = npt.NDArray[np.void]
#: Ranks of a micro-batch's own context-parallel group, and the digest of its samples.
InCpGroup = tuple[tuple[int, ...], bytes]


class Column(NamedTuple):
    """What is counted of the units of a key, by a mask.

    Attributes:
        name: of the field in `Rows`.
        mask: one of the samples' further masks; None for the loss mask.
        counted: the name in `Units.counts`, or in the step's numbers.
        segment_values: segments by that mask -> the number of each, float64 [num_segments].
    """

    name: str
    mask: str | None
    counted: Counted
    segment_values: Callable[[Segments], Floats]


class Tally(NamedTuple):
    """What one rank holds of a step, as it is sent to the other ranks of its data-parallel group.

    Attributes:
        settings: a digest of what ranks must ask for alike.
        failed: the rank raised an error; it then has nothing else.
        has_data: False on a pipeline stage that reads none.
        id_types: the type of the samples' ids by name; None without a sample.
        countings: names of the unit countings whose labels the samples have; None without a sample to count.
        tables: `Rows` of the units by each key, as bytes.
        data: a digest of the samples; 0 without any, or where nobody compares it.
        has_identity: its samples can be recognised on another rank: they have ids or tokens, and some token counts.
        in_cp_groups: of micro-batches that have a context-parallel group of several ranks of their own.
        dynamic_cp: some micro-batch names a context-parallel group of its own.
    """

    settings: int
    failed: bool = False
    has_data: bool = False
    id_types: Mapping[str, str] | None = None
    countings: tuple[str, ...] | None = None
    tables: Mapping[str, bytes] = {}
    data: int = 0
    has_identity: bool = False
    in_cp_groups: Sequence[InCpGroup] = ()
    dynamic_cp: bool = False


def count_step(
    microbatches: Sequence[Samples] | Exception | None,
    groups: StepGroups,
    *,
    masks: Sequence[str] = (),
    sums: Sequence[Sum] = (),
    settings: str = "",
) -> StepTotals:
    """The totals of a step from this rank's micro-batches, by the loss masks and by each further mask.

    One all-gather over the data-parallel group where all ranks hold little, else two; then one over each group of
    replicas.

    Args:
        microbatches: one `Samples` per micro-batch; None if this rank, and so its whole data-parallel group, reads no
            data (a pipeline stage that needs none); or the exception that this rank raised.
        masks: names of the further masks that are counted too; the same on every rank.
        sums: further sums by key; the same on every rank, in the same order.
        settings: further settings that must be the same on every rank, such as the mode.

    Returns:
        The totals; on a stage without data they have no units.

    Raises:
        BadBatchError: on all ranks of the groups, if any failed or they do not agree, with each failing rank's reason.
    """
    masks = list(dict.fromkeys(masks))
    columns_of = cache(partial(_columns, masks=masks, sums=sums))
    counted = [*(f"mask {name}" for name in masks), *(f"sum by {declared.by}" for declared in sums)]
    settings = "; ".join([settings, *counted])

    def tally() -> Tally:
        _check_disjoint(groups)
        return _tally(microbatches, groups, columns_of, hashed(settings))

    attempted = attempt(tally)
    failure = failure_of(attempted)
    mine = attempted if isinstance(attempted, Tally) else Tally(0, failed=True)
    plain: tuple[Any, ...] = tuple(mine)  # a class takes several times as long to read, from thousands of ranks
    tallies = [mine]
    # A rank with an error joins this and every later collective, in which the others would wait for it. What was
    # wrong is raised on all ranks together, below.
    for group in several(groups.dp_group):
        tallies = [Tally(*fields) for fields in gather_objects(plain, group)]
    joined = attempt(lambda: _join(tallies, mine, settings, masks, sums, columns_of, groups))
    broken = [] if isinstance(joined, _Joined) else [f"{type(joined).__name__}: {joined}"]
    nothing: dict[str, set[Any]] = {name: set() for name in _SEEN}
    added, disagreement, seen = joined if isinstance(joined, _Joined) else _Joined(joined, None, nothing)
    failure, has_data = disagreement or failure, any(tally.has_data for tally in tallies)
    # Last, so that what one data-parallel group has counted, or an error in it, reaches the ranks of all others.
    for group in groups.replicas:
        gathered = gather_objects((seen, broken), group)
        seen = {name: set().union(*(seen_there[name] for seen_there, _ in gathered)) for name in seen}
        broken = [text for _, texts in gathered for text in texts]
    if broken:  # on values that are the same on all ranks of the data-parallel group, so no other rank is told
        raise BadBatchError(f"the counts of the step could not be added up. {broken[0]}") from failure_of(joined)
    if len(seen["settings"]) > 1:
        seen["failed"], failure = {True}, failure or _other_settings(settings)
    raise_together(True in seen["failed"], failure, groups.all)
    if not seen["data"]:
        raise BadBatchError(
            "no rank reads data for this step: a step needs micro-batches. Give every rank a data iterator "
            "(is_distributed = True)."
        )
    if len(seen["data"]) > 1:
        raise BadBatchError(
            "ranks of one context, tensor or pipeline parallel group were given different samples for this step, or "
            "layouts that differ: these ranks must read the same data and cut it alike. Shard and seed the loader by "
            "DP rank only, and pass masks uncut: whole rows on every CP rank, not 0 where another rank holds the token."
        )
    (numbers,) = seen["numbers"]
    totals = (
        added
        if has_data and isinstance(added, StepTotals)
        else _without_units(numbers, masks, size_of(groups.dp_group))
    )
    if is_first_rank(groups.all) and (text := _twins(tallies, by_rollouts=False)) is not None:
        warn_on_one_rank(text)
    return replace(totals, dynamic_cp=True in seen["dynamic_cp"])


#: What replicas compare, by name.
_SEEN = ("failed", "settings", "data", "numbers", "dynamic_cp")


class _Joined(NamedTuple):
    """What one data-parallel group has counted: the totals, why they do not hold, and what other groups must have."""

    added: StepTotals | Exception
    disagreement: Exception | None
    seen: dict[str, set[Any]]


def _join(
    tallies: Sequence[Tally],
    mine: Tally,
    settings: str,
    masks: Sequence[str],
    sums: Sequence[Sum],
    columns_of: "ColumnsOf",
    groups: StepGroups,
) -> _Joined:
    """Add up the tallies of a data-parallel group, each rank by itself."""
    failed, has_data = any(tally.failed for tally in tallies), any(tally.has_data for tally in tallies)
    id_types = join_types(tuple(tally.id_types.items()) for tally in tallies if tally.id_types is not None)
    disagreement = None if failed else next(_disagreements(tallies, mine, id_types, settings), None)
    is_apart = disagreement is not None
    if not all(tally.has_data for tally in tallies) and mine.has_data:
        disagreement = None  # where some ranks have no data, these alone give the reason
    failed |= is_apart
    added: StepTotals | Exception
    try:
        added = _add_up([] if failed else tallies, id_types or {}, masks, columns_of, groups.dp_group)
    except ValueError as error:  # of the samples, so all ranks of the group have it
        failed, disagreement, added = True, error, error
    numbers = () if isinstance(added, Exception) else tuple(map(_numbers, (added, *added.by_mask.values())))
    seen: dict[str, set[Any]] = {
        "failed": {failed},
        "settings": {tally.settings for tally in tallies if not tally.failed},
        # Nothing on a stage without data; 0 where there is data and no replica to compare it with.
        "data": {_digest(tallies, sums) if groups.replicas else 0} if has_data else set(),
        "numbers": {numbers} if has_data else set(),
        "dynamic_cp": {any(tally.dynamic_cp for tally in tallies)},
    }
    return _Joined(added, disagreement, seen)


def _tally(
    microbatches: Sequence[Samples] | Exception | None,
    groups: StepGroups,
    columns_of: "ColumnsOf",
    settings: int,
) -> Tally:
    if isinstance(microbatches, Exception):
        raise microbatches
    read_masks(microbatches or ())
    filled = [samples for samples in microbatches or () if len(samples)]
    id_types = join_types(samples.id_types for samples in filled)
    if id_types is None:
        shown = " and of ".join(str(dict(id_types)) for id_types in sorted({samples.id_types for samples in filled}))
        raise ValueError(
            f"micro-batches with ids of {shown}: each kind of id must be given on all or none, as ints on all or "
            "as strings on all, per sample or per token. Pass the same ids with every micro-batch."
        )
    counted = [samples for samples in filled if samples.counts_here]
    countings = tuple(row.name for row in COUNTINGS.values() if all(map(row.can_count, counted)))
    # Equal masks alone may be chance; engines fill up ranks with copies of one row that is fully masked.
    is_told_apart = bool(id_types) or any(samples.tokens is not None for samples in counted)
    return Tally(
        settings,
        has_data=microbatches is not None,
        id_types=id_types if filled else None,
        countings=countings if counted else None,
        tables={
            key: _table(key, counted, columns_of(key, countings)).tobytes() for key in ("step", *id_types) if counted
        },
        data=hashed(b"".join(samples.digest() for samples in counted)) if counted and groups.all else 0,
        has_identity=is_told_apart and any(samples.mask_sums.any() for samples in counted),
        in_cp_groups=[
            _in_cp_group(samples, groups.dp_group) for samples in microbatches or () if size_of(samples.cp_group) > 1
        ],
        dynamic_cp=any(samples.cp_group is not None for samples in microbatches or ()),
    )


#: A key and the names of unit countings -> what is counted of the units, the same on every rank.
ColumnsOf = Callable[[str, tuple[str, ...]], list[Column]]


def _columns(key: str, countings: Sequence[str], masks: Sequence[str], sums: Sequence[Sum]) -> list[Column]:
    functions: list[tuple[str, Counted, Callable[[Segments], Floats]]] = [
        ("tokens", "tokens", lambda segments: segments.mask_sums),
        *((name, name, COUNTINGS[name].segment_values) for name in countings),
    ]
    if key == "step":
        functions += [
            ("active_tokens", "active_tokens", lambda segments: segments.samples.active_tokens),
            ("entries", "entries", lambda segments: np.array(segments.samples.mask_lengths, np.float64)),
        ]
    functions += [
        (f"sum {number}", declared, declared.segment_values)
        for number, declared in enumerate(sums)
        if declared.by == key
    ]
    return [
        Column(name if mask is None else f"{name} by {mask}", mask, counted, segment_values)
        for mask in (None, *masks)
        for name, counted, segment_values in functions
    ]


def _table(key: str, counted: Sequence[Samples], columns: Sequence[Column]) -> Rows:
    """This rank's rows of the units by a key."""
    by_mask = {
        mask: [segments_by(key, samples.with_mask(mask), "a step") for samples in counted]
        for mask in {None, *(column.mask for column in columns)}
    }
    ids = np.concatenate([segments.ids for segments in by_mask[None]])
    values = {
        column.name: np.concatenate([column.segment_values(segments) for segments in by_mask[column.mask]])
        for column in columns
    }
    prompts = np.zeros_like(ids)
    if key == "rollout" and "prompt" in counted[0].parts:
        prompts = np.concatenate([samples.parts["prompt"].ids for samples in counted])
    return sum_by_id(ids, values, prompts)


def _fields(columns: Iterable[str]) -> np.dtype[np.void]:
    return np.dtype([("id", np.int64), ("prompt", np.int64), *((name, np.float64) for name in columns)])


def sum_by_id(ids: Ints, columns: Mapping[str, Floats], prompts: Ints) -> Rows:
    """The sums of the columns by id, sorted; ValueError for an id that came with two prompts."""
    unique, at = np.unique(ids, return_inverse=True)
    rows = np.zeros(len(unique), _fields(columns))
    rows["id"], rows["prompt"][at] = unique, prompts
    if (rows["prompt"][at] != prompts).any():
        raise ValueError(
            "one rollout id is used under two prompt ids: rollout ids must be unique in the step, not only within a "
            "prompt. Join prompt and rollout index into one id."
        )
    # bincount adds in the order of the rows, which all ranks have alike: their sums agree to the bit.
    for name, values in columns.items():
        rows[name] = np.bincount(at, values, len(unique))
    return rows


def _add_up(
    tallies: Sequence[Tally],
    id_types: Iterable[str],
    masks: Sequence[str],
    columns_of: ColumnsOf,
    dp_group: Group | None,
) -> StepTotals:
    """The totals of all ranks' tables; ValueError where a rollout came under two prompts."""
    units_by_mask: dict[str | None, dict[str, Units]] = {mask: {} for mask in (None, *masks)}
    countings_held = {tally.countings for tally in tallies if tally.countings is not None}
    # A rank whose samples have a label that others lack has a column more than they, which counts nothing then.
    countings = tuple(name for name in COUNTINGS if all(name in held for held in countings_held))
    for key in dict.fromkeys((*_KNOWN, *id_types)):
        columns = columns_of(key, countings)
        joined = [
            np.frombuffer(
                b"".join(tally.tables[key] for tally in tallies if tally.countings == held and key in tally.tables),
                _fields(column.name for column in columns_of(key, held)),
            )
            for held in sorted(countings_held)
        ]
        names = ["id", "prompt", *(column.name for column in columns)]
        ids, prompts, *lines = (np.concatenate([rows[name] for rows in joined] or [np.zeros(0)]) for name in names)
        if not len(ids) and key not in id_types:
            continue
        rows = sum_by_id(ids.astype(np.int64), dict(zip(names[2:], lines, strict=True)), prompts)
        for mask, units in units_by_mask.items():
            # Copies: a column of `rows` is a view with strides, which would keep the whole table.
            values = {column.counted: rows[column.name].copy() for column in columns if column.mask == mask}
            units[key] = Units.of(rows["id"].copy(), values)
    step_counts = {mask: units["step"].counts for mask, units in units_by_mask.items() if "step" in units}
    none: dict[Counted, Floats] = dict.fromkeys(("tokens", "active_tokens", "entries", *COUNTINGS), np.zeros(1))
    totals = {
        mask: _totals(step_counts.get(mask, none), units, size_of(dp_group)) for mask, units in units_by_mask.items()
    }
    by_loss_mask = totals.pop(None)
    further = {mask: mask_totals for mask, mask_totals in totals.items() if mask is not None}
    return replace(by_loss_mask, by_mask=further)


def _totals(step_counts: Mapping[Counted, Floats], units: Mapping[str, Units], dp_size: int) -> StepTotals:
    """The totals by one mask, of the counts of the one unit ``step``, and of units with ids."""
    samples = Units(
        {name: int(step_counts[name][0]) for name in COUNTINGS if name in step_counts}, np.zeros(0, np.int64), {}
    )
    return StepTotals(
        step_tokens=float(step_counts["tokens"][0]),
        step_active_tokens=int(step_counts["active_tokens"][0]),
        step_entries=int(step_counts["entries"][0]),
        units={"sample": samples, "rollout": samples, **units},
        dp_size=dp_size,
    )


def _numbers(totals: StepTotals) -> tuple[float, int, int]:
    return totals.step_tokens, totals.step_active_tokens, totals.step_entries


def _without_units(numbers: Sequence[tuple[float, int, int]], masks: Sequence[str], dp_size: int) -> StepTotals:
    """The totals on a stage without data, of the numbers by the loss masks and by each further mask."""
    by_loss_masks, *further = (
        StepTotals(step_tokens=tokens, step_active_tokens=active, step_entries=entries, units={}, dp_size=dp_size)
        for tokens, active, entries in numbers
    )
    return replace(by_loss_masks, by_mask=dict(zip(masks, further, strict=True)))


def _digest(tallies: Sequence[Tally], sums: Sequence[Sum]) -> int:
    """A digest of all ranks' data; with declared sums also of the tables, which hold what users' functions returned."""
    return hashed(repr([(tally.data, tally.id_types, tally.tables if sums else {}) for tally in tallies]))


def _other_settings(settings: str) -> ValueError:
    return ValueError(
        f"this rank asks for {settings}, another rank for something else: all ranks must aggregate alike. Pass the "
        "same mode, divisor, units, terms, per_token_loss and empty_step on every rank."
    )


def _disagreements(
    tallies: Sequence[Tally], mine: Tally, id_types: Mapping[str, str] | None, settings: str
) -> Iterator[ValueError]:
    """This rank's errors about tallies that do not agree."""
    if len({tally.settings for tally in tallies}) > 1:
        yield _other_settings(settings)
    if len({tally.has_data for tally in tallies}) > 1:
        yield ValueError(
            "this rank has no data iterator, while other DP ranks of its pipeline stage have one: all must read data. "
            "Give every rank a data iterator (is_distributed = True)."
        )
    if id_types is None:
        yield ValueError(
            f"samples with ids of {list(mine.id_types or ())}, and other ids on other ranks: each kind of id must be "
            "given on all DP ranks or none, as ints on all or as strings on all. Pass the same ids on every rank."
        )
    if not _are_alike_in_cp_groups(tallies):
        yield ValueError(
            "ranks of a micro-batch's cp_group were given different samples, or the same in another order: each rank "
            "of the group must have all samples of the micro-batch. Make the same Samples on every rank of the group."
        )
    if (text := _twins(tallies, by_rollouts=True)) is not None:  # a rollout's id is its own
        yield ValueError(text)


def _twins(tallies: Sequence[Tally], *, by_rollouts: bool) -> str | None:
    """The first two DP ranks that hold the same samples, told apart by rollout ids or, if not asked, by anything."""
    first: dict[int, int] = {}
    for rank, tally in enumerate(tallies):
        is_compared = tally.has_identity and tally.data and ("rollout" in (tally.id_types or ()) or not by_rollouts)
        if is_compared and first.setdefault(tally.data, rank) != rank:
            return (
                f"DP ranks {first[tally.data]} and {rank} hold samples with the same masks, ids and tokens: these "
                "samples count twice. Shard the loader by DP rank, and leave CP ranks out of the dp_group."
            )
    return None


def _in_cp_group(samples: Samples, dp_group: Group | None) -> InCpGroup:
    ranks = tuple(ranks_of(samples.cp_group))
    if not set(ranks) <= set(ranks_of(dp_group)):
        raise ValueError(
            f"a micro-batch with a cp_group of the ranks {list(ranks)}, and a dp_group of {ranks_of(dp_group)}: "
            "the dp_group must contain the cp_groups of all micro-batches. Pass the group over DP x CP as "
            "dp_group, and no cp_group to the plan."
        )
    return ranks, samples.digest()


def _are_alike_in_cp_groups(tallies: Sequence[Tally]) -> bool:
    """True if the k-th micro-batch of each context-parallel group has the same samples on all ranks of the group."""
    digests: dict[tuple[tuple[int, ...], int], list[bytes]] = {}
    for tally in (tally for tally in tallies if tally.in_cp_groups):
        turns = Counter[tuple[int, ...]]()
        for ranks, digest in tally.in_cp_groups:
            turns[ranks] += 1
            digests.setdefault((ranks, turns[ranks]), []).append(digest)
    return all(
        len(rank_digests) == len(ranks) and len({*rank_digests}) == 1 for (ranks, _), rank_digests in digests.items()
    )


def _check_disjoint(groups: StepGroups) -> None:
    """Raise ValueError for a data-parallel group that shares ranks with a group of replicas, beside this rank."""
    for group in groups.replicas if several(groups.dp_group) else []:
        if len(shared := set(ranks_of(groups.dp_group)) & set(ranks_of(group))) > 1:
            raise ValueError(
                f"a dp_group that shares the ranks {sorted(shared)} with a cp_group or replica group: ranks of those "
                "hold the same samples, which would count more than once. Pass the data-parallel group without context "
                "parallelism."
            )
