"""A step's measured weights beside the asked ones: how far apart they are."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_rl_loss.audit.tokens import Floats, MeasuredStep, StepTokens, extremes
from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.collectives import StepGroups
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import count_step

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Piece:
    """What one CP rank holds of one micro-batch: its active tokens, and the lowest and highest measured / asked."""

    dp_rank: int
    microbatch: int
    cp_rank: int
    tokens: int
    low: float
    high: float


class Comparison:
    """Measured beside asked: the weights that an aggregation gives, `expected`."""

    def __init__(self, measured: MeasuredStep, aggregation: Aggregation, expected: Floats, tolerance: float) -> None:
        self.measured, self.aggregation, self.expected, self.tolerance = measured, aggregation, expected, tolerance
        self.tokens, self.weights = measured.tokens, measured.weights
        self.wanted: Flags = expected != 0

    @property
    def ratio(self) -> Floats:
        """Measured/asked of the tokens that should weigh something."""
        return self.weights[self.wanted] / self.expected[self.wanted]

    @property
    def scale(self) -> float:
        """What a token weighs, on average."""
        return float(np.abs(self.expected[self.wanted]).mean()) if self.wanted.any() else 0.0

    def deviation(self) -> float:
        """The largest relative difference of a weight; of one that should be 0, relative to what others are."""
        if not np.isfinite(self.weights).all():
            return math.inf
        off = np.abs(self.ratio - 1).max(initial=0.0)
        beside = np.abs(self.weights[~self.wanted]).max(initial=0.0) + abs(self.measured.stray[1])
        return float(max(off, beside / (self.scale or 1.0)))

    def misplaced(self) -> float:
        """Half of what the shares of all tokens, measured and asked, differ by."""
        stray, wanted = abs(self.measured.stray[1]), np.abs(self.expected).sum()
        total = float(np.abs(self.weights).sum()) + stray
        if not math.isfinite(total):
            return math.nan
        if total == 0 or wanted == 0:
            return 0.0 if total == wanted else 1.0
        # A share with the wrong sign is on the wrong side.
        sign = np.sign((self.weights * self.expected).sum()) or 1.0
        apart = np.abs(self.weights * sign / total - self.expected / wanted).sum()
        return min(1.0, float(apart + stray / total) / 2)

    def pieces(self) -> tuple[Piece, ...]:
        """A row per micro-batch and CP rank."""
        names = ("dp_rank", "microbatch", "cp_rank")
        group = self.tokens.groups(names)
        first = np.unique(group, return_index=True)[1]
        of_wanted = group[self.wanted]
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            low, high = extremes(of_wanted, self.ratio, len(first))
        counts = np.bincount(of_wanted, minlength=len(first))
        low[counts == 0] = high[counts == 0] = math.nan
        columns = (*(getattr(self.tokens, name)[first] for name in names), counts, low, high)
        return tuple(Piece(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


class StepSamples:
    """The step's micro-batches and totals, to ask modes for weights."""

    def __init__(self, tokens: StepTokens) -> None:
        starts = np.flatnonzero(np.diff(tokens.sample, prepend=-1))
        masks = np.split(tokens.mask, starts[1:])
        microbatch = tokens.groups(("dp_rank", "microbatch"))[starts]
        cuts = [0, *(np.flatnonzero(np.diff(microbatch)) + 1).tolist(), len(starts)]
        rollouts = tokens.rollout[starts]
        split_rollouts = len(np.unique(rollouts)) < len(starts)
        prompts = tokens.prompt[starts] if (tokens.prompt >= 0).all() else None
        self.microbatches = [
            Samples(
                masks[begin:end],
                rollout_ids=rollouts[begin:end].tolist() if split_rollouts else None,
                prompt_ids=None if prompts is None else prompts[begin:end].tolist(),
            )
            for begin, end in itertools.pairwise(cuts)
            if end > begin
        ]
        self.totals = count_step(self.microbatches, StepGroups())

    def weights(self, aggregation: Aggregation) -> Floats:
        """The weight of every entry that an aggregation asks for, mask included, [num_entries].

        Raises ValueError for a mode of one's own that looks at what masks and ids do not say (labels).
        """
        totals, sums = self.totals, list(aggregation.mode.sums.values())
        if sums:
            totals = count_step(self.microbatches, StepGroups(), sums=sums)
        weights = [weigh(aggregation, samples.local(0, 1), totals) for samples in self.microbatches]
        return np.concatenate([np.zeros(0), *weights])
