"""Units of a step (rollouts, prompt groups, ...): which of them a mode counts, and the counts of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_rl_loss.step.ids import Ints
from megatron_rl_loss.step.masks import Floats, to_array
from megatron_rl_loss.step.samples import Samples

#: The name of a unit counting, one of `COUNTINGS`.
UnitCounting = str


class Counting(NamedTuple):
    """A way to count units: each unit counts of which a part counts. A part is what one sample has of a unit.

    Attributes:
        name: what users pass as ``units=``.
        units: which units count, in words.
        counts: samples and a key -> True for each part by that key that counts, bools [num_parts]. Where ids of that
            name are not given per token, each sample is a part.
        labels: names of the samples' labels that `counts` reads. Steps are counted by it, and judged by it in an audit,
            where the samples have these.
    """

    name: str
    units: str
    counts: Callable[[Samples, str], npt.NDArray[np.bool_]]
    labels: tuple[str, ...] = ()

    def can_count(self, samples: Samples) -> bool:
        """True for samples that have the labels."""
        return all(name in samples.labels for name in self.labels)

    def of_parts(self, samples: Samples, key: str) -> Floats:
        """1 for each part that counts, else 0, float64 [num_parts]; NaN where the samples lack the labels."""
        if not self.can_count(samples):
            return samples.at_parts(key, np.full(len(samples), np.nan))
        return self.counts(samples, key).astype(np.float64)


#: The first one is that of a mode for which nobody says another.
COUNTINGS = {
    row.name: row
    for row in (
        Counting(
            "all",
            "every one, fully masked or not",
            lambda samples, key: samples.at_parts(key, np.ones(len(samples), np.bool_)),
        ),
        Counting(
            "active", "those with a token whose loss mask is not 0", lambda samples, key: samples.mask_sums_by(key) > 0
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
        known = {name: values for name, values in counts.items() if not np.isnan(values).any()}
        number = {name: int(np.count_nonzero(known[name])) for name in COUNTINGS if name in known}
        return cls(number, ids, known)

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
