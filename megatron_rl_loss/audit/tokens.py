"""The tokens of one optimizer step, with the weight that was measured for each: what an audit is about.

A token's *effective weight* is the derivative of what the optimizer gets, the reduced and finalised gradient, with
respect to that token's unreduced loss. How it is measured is others' affair (`audit.megatron`, `check_loss`).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
#: What one context-parallel rank holds of one sample: nothing that a loss counts differs within a cell.
CELL = ("sample", "cp_rank")


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the step was split."""

    num_microbatches: int = 1
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    per_token: bool = False


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Every entry of the step's loss masks, masked ones too; arrays of one length, [num_entries].

    Entries are in order: data-parallel rank, micro-batch, sample, position.
    """

    mask: Floats
    sample: Ints  # number of the sample (a row of data) in the step, over all ranks and micro-batches
    position: Ints  # within the sample's mask
    dp_rank: Ints
    microbatch: Ints  # numbered on each data-parallel rank from 0
    cp_rank: Ints  # that holds the token; -1 where all of them do
    rollout: Ints  # number of the unit it belongs to
    prompt: Ints  # the same; -1 where no ids were given
    response_lengths: Ints | None = None  # of each sample, [num_samples], where they are known
    total_lengths: Ints | None = None

    def __len__(self) -> int:
        return len(self.mask)

    def groups(self, names: tuple[str, ...]) -> Ints:
        """Entries that share these attributes: the group of each, numbered from 0 in their order, [num_entries]."""
        return group_by([getattr(self, name) for name in names], len(self))


def group_by(columns: Sequence[Ints], length: int) -> Ints:
    """Rows that agree in all columns: the group of each, numbered from 0 in lexicographic order, [length]."""
    group = np.zeros(length, np.int64)
    for ids in columns:
        low, high = ids.min(initial=0), ids.max(initial=0)
        group = np.unique(group * (high - low + 1) + ids - low, return_inverse=True)[1].reshape(-1)
    return group


def extremes(group: Ints, values: Floats, number: int) -> tuple[Floats, Floats]:
    """The lowest and the highest value of each group, [number]; inf and -inf where it has none."""
    low, high = np.full(number, np.inf), np.full(number, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return low, high


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step's tokens and the effective weight of each.

    Facts by name: ``rounding``, "float32" (also where it is left out), "float16" or "bfloat16", is the type that
    gradients were rounded to; ``steps_per_generation`` is tried as a factor; of a declared term ``coefficient`` is a
    factor of its weights that is meant, and ``expected`` its own mode, divisor and unit counting.
    """

    tokens: StepTokens
    weights: Floats  # of each entry, [num_entries]; NaN where the gradient was
    split: Split = field(default_factory=Split)
    stray: tuple[int, float] = (0, 0.0)  # on no entry (padding, other samples' slots): places, and the sum of sizes
    unknown: tuple[str, ...] = ()  # why there can be no verdict, in sentences; empty if there can be one
    notes: tuple[str, ...] = ()  # what the measurement can and cannot tell, in sentences
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Everything, as JSON; numbers as they are, NaN as ``NaN``."""
        return json.dumps(asdict(self), default=lambda values: values.tolist())

    @classmethod
    def from_json(cls, text: str) -> "MeasuredStep":
        """What `to_json` wrote."""
        data = json.loads(text)
        for name, values in data["tokens"].items():
            data["tokens"][name] = None if values is None else np.array(values, float if name == "mask" else np.int64)
        data |= {name: tuple(data[name]) for name in ("stray", "unknown", "notes")}
        data |= {"tokens": StepTokens(**data["tokens"]), "split": Split(**data["split"])}
        return cls(**data | {"weights": np.array(data["weights"], np.float64)})
