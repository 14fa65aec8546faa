"""Counts of a step's units (rollouts, prompt groups, ...), and further sums by key that modes declare."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from megatron_rl_loss.errors import check_count
from megatron_rl_loss.step.ids import Keys, as_ids
from megatron_rl_loss.step.masks import Floats, to_array
from megatron_rl_loss.step.samples import Samples

UnitCounting = Literal["all", "active"]


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


class ByKey:
    """One number for each key: sorted int64 keys [num_keys], float64 values."""

    def __init__(self, keys: Keys, values: Floats) -> None:
        self._keys, self.values = keys, values

    @classmethod
    def from_mapping(cls, values: Mapping[int | str, float]) -> "ByKey":
        for unit, count in values.items():
            check_count(f"the token count of id {unit!r}", count)
        keys = as_ids("the ids of token counts", list(values), len(values))
        order = keys.argsort()
        return cls(keys[order], np.array(list(values.values()), np.float64)[order])

    @cached_property
    def total(self) -> float:
        return float(self.values.sum())

    def __repr__(self) -> str:
        return f"<{len(self._keys)} keys, {self.total:g} in all>"

    @property
    def largest(self) -> float:
        return float(self.values.max(initial=0))

    def of(self, name: str, keys: Keys, sample: Keys | None = None) -> Floats:
        """The value of each key; ValueError for one that is not known, which names its sample."""
        places = np.searchsorted(self._keys, keys).clip(max=max(len(self._keys) - 1, 0))
        unknown = self._keys[places] != keys if len(self._keys) else np.ones(len(keys), bool)
        if unknown.any():
            first = int(unknown.argmax())
            raise ValueError(
                f"the {name} of sample {first if sample is None else sample[first]} has no count in the step's totals: "
                "totals must count every unit of the step. Make them from the whole step, with the same ids."
            )
        return self.values[places] if len(keys) else np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class Units:
    """The step's units of one kind: rollouts, prompt groups, ... Give the counts that the mode needs.

    Attributes:
        all: how many there are, fully masked ones included.
        active: how many have a token of nonzero weight.
        tokens: mask tokens of each unit, by id (a mapping is accepted).
        samples, active_samples: how many samples each unit has (have a token of nonzero weight of it), by id.
        sums: values by id of each declared sum.
    """

    all: int | None = None
    active: int | None = None
    tokens: ByKey | Mapping[int | str, float] | None = None
    samples: ByKey | Mapping[int | str, float] | None = None
    active_samples: ByKey | Mapping[int | str, float] | None = None
    sums: Mapping[Sum, ByKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("all", "active"):
            if getattr(self, name) is not None:
                check_count(f"Units.{name}", getattr(self, name))
        if self.all is not None and self.active is not None and self.active > self.all:
            raise ValueError(
                f"Units(active={self.active}, all={self.all}): active units are some of all units. Count the whole "
                "step."
            )
        for name in ("tokens", "samples", "active_samples"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, ByKey.from_mapping(value))
            elif not isinstance(value, ByKey | None):
                raise TypeError(f"Units.{name} is {value!r}: it must map ids to counts. Pass a dict.")

    def counted(self, counting: UnitCounting) -> int | None:
        return self.all if counting == "all" else self.active
