"""Steps of an optimizer as plain data, counted by hand: what a formula for a token's weight is written in.

Nothing here is counted by the package: from it come the types that a `MeasuredStep` is made of. A formula is evaluated
in float64 and rounded to float32, as an audit would measure it. Nothing is trained.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl_loss import Samples
from megatron_rl_loss.audit.tokens import MeasuredStep, PlacedSamples, Split

Array = NDArray[Any]


@dataclass(frozen=True)
class Row:
    """One sample: its mask, and the units it belongs to."""

    mask: tuple[float, ...]
    rollout: int = 0
    prompt: int = 0


@dataclass(frozen=True)
class Step:
    """``rows[dp_rank][microbatch]`` are samples.

    `length` is what every row is padded to where rows are not packed (BSHD), None where they are.
    """

    rows: Sequence[Sequence[Sequence[Row]]]
    cp_size: int = 1
    tp_size: int = 1
    length: int | None = None

    def holder(self, position: int, length: int) -> int:
        """The CP rank of a position in its row: the zigzag."""
        chunk = -(-(self.length or length) // (2 * self.cp_size))
        return min(position // chunk, 2 * self.cp_size - 1 - position // chunk)

    @cached_property
    def counted(self) -> "Counted":
        return Counted(self)


class Counted:
    """Counts around each entry of the step's masks, [num_entries], and in capitals numbers of the whole step.

    Attributes:
        m: the entry of the mask; d, k, c, i: its DP rank, micro-batch, CP rank and sample.
        M, length: mask tokens and entries of its sample; R: mask tokens of its rollout; G: of its prompt.
        n, rows, width: of its micro-batch: mask tokens, samples, longest row.
        n_here: mask tokens of its micro-batch on its CP rank; M_here: of its sample there.
        n_rank, rows_rank, filled: of its DP rank: mask tokens, samples, micro-batches with a token.
        T, N, ROWS, P, LENGTHS, MASKED: mask tokens, rollouts, samples, prompts, entries, and fully masked samples.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.D, self.K, self.C, self.TP = len(step.rows), len(step.rows[0]), step.cp_size, step.tp_size
        self.samples = [row for rank in step.rows for chosen in rank for row in chosen]
        where = [(d, k) for d, rank in enumerate(step.rows) for k, chosen in enumerate(rank) for _ in chosen]
        entries = [(i, t) for i, row in enumerate(self.samples) for t in range(len(row.mask))]
        self.i, self.t = (np.array([entry[column] for entry in entries], np.int64) for column in (0, 1))
        self.m = np.array([self.samples[i].mask[t] for i, t in entries])
        self.d, self.k = (np.array([place[column] for place in where], np.int64)[self.i] for column in (0, 1))
        self.c = np.array([step.holder(t, len(self.samples[i].mask)) for i, t in entries], np.int64)
        self.rollout = np.array([row.rollout for row in self.samples], np.int64)[self.i]
        self.prompt = np.array([row.prompt for row in self.samples], np.int64)[self.i]
        ones, first = np.ones(len(entries)), (self.t == 0).astype(float)
        self.M, self.length = self.over(self.m, self.i), self.over(ones, self.i)
        self.R, self.G = self.over(self.m, self.rollout), self.over(self.m, self.prompt)
        self.n, self.rows = self.over(self.m, self.d, self.k), self.over(first, self.d, self.k)
        self.width = np.array([max(self.length[(self.d == d) & (self.k == k)]) for d, k in zip(self.d, self.k)])  # noqa: B905
        self.n_here, self.M_here = self.over(self.m, self.d, self.k, self.c), self.over(self.m, self.i, self.c)
        self.n_rank, self.rows_rank = self.over(self.m, self.d), self.over(first, self.d)
        filled = {(d, k) for d, k, n in zip(self.d.tolist(), self.k.tolist(), self.n, strict=True) if n}
        self.filled = np.array([sum(d == rank for d, _ in filled) for rank in self.d.tolist()])
        self.T, self.LENGTHS, self.ROWS = float(self.m.sum()), len(entries), len(self.samples)
        self.N, self.P = len({row.rollout for row in self.samples}), len({row.prompt for row in self.samples})
        self.MASKED = sum(not any(row.mask) for row in self.samples)

    def over(self, values: Array, *ids: Array) -> Array:
        """The sum of values over entries that agree in ids, for each entry."""
        keys = list(zip(*(column.tolist() for column in ids), strict=True))
        sums: dict[tuple[int, ...], float] = {}
        for key, value in zip(keys, values.tolist(), strict=True):
            sums[key] = sums.get(key, 0.0) + value
        return np.array([sums[key] for key in keys])

    def at(self, places: str, values: Array) -> dict[str, float]:
        """Values at each place that has an active token, as reports write them; ``"dk"``: by micro-batch."""
        words = {
            "d": "DP {}", "dk": "DP {}, micro-batch {}", "dkc": "DP {}, micro-batch {}, CP {}", "c": "CP {}",
            "i": "sample {}", "ic": "sample {}, CP {}",
        }[places]  # fmt: skip
        ids = zip(*(getattr(self, letter).tolist() for letter in places), strict=True)
        return {words.format(*place): float(v) for place, v, m in zip(ids, values, self.m, strict=True) if m}


#: A token's weight, mask included, from counts.
Formula = Callable[[Counted], Array]


def _by_default(t: Counted) -> dict[str, Any]:
    return {"rollout_ids": [row.rollout for row in t.samples], "prompt_ids": [row.prompt for row in t.samples]}


def measured(
    step: Step, weights: Array | Formula, described: Callable[[Counted], dict[str, Any]] = _by_default, **facts: Any
) -> MeasuredStep:
    """The step with these weights, or those of a formula.

    `described`: arguments of `Samples` beside the masks, lists with an entry for each sample, or dicts of them.
    """
    of = step.counted
    if callable(weights):
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = weights(of)
    bounds = np.cumsum([0, *(len(row.mask) for row in of.samples)]).tolist()

    def of_rows(values: Any, rows: range) -> Any:
        if isinstance(values, dict):
            return {name: of_rows(column, rows) for name, column in values.items()}
        return [values[i] for i in rows]

    microbatches, begin = [], 0
    for d, rank in enumerate(step.rows):
        for k, chosen in enumerate(rank):
            rows = range(begin, begin + len(chosen))
            samples = Samples([np.array(row.mask, np.float64) for row in chosen], **of_rows(described(of), rows))
            cp_rank = of.c[bounds[rows.start] : bounds[rows.stop]]
            microbatches.append(PlacedSamples(dp_rank=d, microbatch=k, samples=samples, cp_rank=cp_rank))
            begin = rows.stop
    split = Split(num_microbatches=of.K, dp_size=of.D, cp_size=of.C, tp_size=of.TP)
    rounded = np.asarray(weights, np.float64).astype(np.float32).astype(np.float64)
    return MeasuredStep(microbatches=tuple(microbatches), weights=rounded, split=split, facts=facts)


@cache
def ragged(
    seed: int,
    *,
    D: int = 3,
    C: int = 2,
    K: int = 5,
    TP: int = 1,
    samples: Sequence[int] = (1, 2, 3),
    split_rollouts: bool = False,
    fractional: bool = False,
    masked: float = 0.12,
    empty: Sequence[tuple[int, int]] = (),
    responses: bool = False,
    longest: int = 30,
    length: int | None = None,
    uneven_prompts: bool = False,
) -> Step:
    """A random step: masks of any kind, some samples fully masked, some micro-batches empty, rollouts apart or split.

    Prompts have three rollouts each, or uneven numbers.
    `responses`: masks are 0 up to a place and 1 from there on; otherwise they have holes.
    """
    rng = random.Random(seed)
    number = 0
    rows: list[list[list[Row]]] = []
    for d in range(D):
        rows.append([])
        for k in range(K):
            chosen = []
            for _ in range(rng.choice(samples)):
                n = length or rng.randrange(6, longest)
                if rng.random() < masked or (d, k) in empty:
                    mask = [0.0] * n
                elif responses:
                    prompt = rng.randrange(1, n - 2)
                    mask = [0.0] * prompt + [1.0] * (n - prompt)
                else:
                    mask = [float(rng.random() < 0.7) for _ in range(n)]
                    mask[rng.randrange(n)] = 1.0
                if fractional:
                    mask = [entry * rng.choice([1.0, 0.5, 0.25]) for entry in mask]
                rollout = number - 1 if split_rollouts and number and rng.random() < 0.4 else number
                number = max(number, rollout + 1)
                prompt_id = int(rollout**0.5) if uneven_prompts else rollout // 3
                chosen.append(Row(tuple(mask), rollout, prompt_id))
            rows[-1].append(chosen)
    return Step(rows, C, TP, length)
