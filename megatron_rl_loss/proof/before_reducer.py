"""What code does to losses between a loss function of this package and the reducer that averages them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl_loss.proof.outcomes import TOLERANCES
from megatron_rl_loss.reduction.taps import HookedShare
from megatron_rl_loss.step.masks import Floats
from megatron_rl_loss.step.samples import LocalTokens


@dataclass(frozen=True)
class Before:
    """What code does to losses between a loss function of this package and the reducer.

    Attributes:
        made_by: the loss functions.
        low, high: the factors of tokens by that code.
        division: the count that losses were divided by, which the reducer divides by again; "" for none.
    """

    made_by: tuple[str, ...] = ()
    low: float = 1.0
    high: float = 1.0
    division: str = ""

    @property
    def is_one(self) -> bool:
        return max(abs(self.low - 1), abs(self.high - 1)) <= TOLERANCES["bfloat16"]

    def __str__(self) -> str:
        place = f"between {' or '.join(self.made_by)} and the reducer"
        if self.division:
            return (
                f"Losses are divided by {self.division} {place}, and the reducer averages them again. Pass "
                "per_token_loss to the reducer as the loss function returned it."
            )
        return f"factors of {self.low:.3g} to {self.high:.3g} on tokens {place}"


#: Counts that code before a reducer may divide losses by, of a micro-batch's tokens on a rank.
_COUNTS = (
    "the mask's sum of each sample",
    "the mask's sum of each sample's part on the CP rank",
    "the mask's sum of the micro-batch",
    "the mask's sum of the micro-batch's part on the CP rank",
    "the number of tokens of the micro-batch",
)


class BeforeEnds:
    """Extremes of what reached the outputs of loss functions, against what the share sends to its tokens.

    The first number is of that quotient, the others are of the quotient times each of `_COUNTS`.
    """

    def __init__(self) -> None:
        self.made_by = set[str]()
        self._low, self._high = np.full(1 + len(_COUNTS), math.inf), np.full(1 + len(_COUNTS), -math.inf)

    def add(self, share: HookedShare, tokens: LocalTokens) -> None:
        sent = share.gradient
        for output in share.outputs:
            if sent is None or output.gradient is None or output.gradient.numel() != len(tokens):
                continue
            on = (sent != 0).cpu().numpy()
            factors = (output.gradient.to(sent) / sent).cpu().numpy()[on]
            if not len(factors):
                continue
            self.made_by.add(output.made_by)
            self._extend(0, factors.min(), factors.max())
            is_direct = np.abs(factors - 1).max() <= TOLERANCES["bfloat16"]
            for number, count in enumerate([] if is_direct else _counts_of(tokens), 1):
                times = factors * count[on]
                self._extend(number, times.min(), times.max())
            if is_direct:  # nothing was divided here
                self._low[1:], self._high[1:] = -math.inf, math.inf

    def _extend(self, number: int, low: float, high: float) -> None:
        self._low[number] = min(self._low[number], low)
        self._high[number] = max(self._high[number], high)

    def numbers(self) -> list[float]:
        return [*(-self._low).tolist(), *self._high.tolist()]


def _counts_of(tokens: LocalTokens) -> list[Floats]:
    """`_COUNTS` at each local token."""
    mask, sample, whole = np.asarray(tokens.mask, np.float64), tokens.sample_index, tokens.samples.mask_sums
    of_parts = np.bincount(sample, mask, len(whole))
    constant = [float(whole.sum()), float(mask.sum()), float(len(mask))]
    return [whole[sample], of_parts[sample], *(np.full(len(mask), count) for count in constant)]


def before_of(numbers: Sequence[float], made_by: set[str]) -> Before:
    """What the extremes of all ranks show; a division where it alone makes the factors of tokens one number."""
    if not made_by:
        return Before()
    half = len(numbers) // 2
    low, high = -np.array(numbers[:half]), np.array(numbers[half:])
    is_constant = np.isfinite(high)  # infinite where some rank divided by nothing
    is_constant[is_constant] = (high - low <= TOLERANCES["bfloat16"] * np.abs(high))[is_constant]
    divisions = [
        name
        for name, constant, value in zip(_COUNTS, is_constant[1:], high[1:], strict=True)
        if constant and (not is_constant[0] or (abs(value - 1) <= TOLERANCES["bfloat16"] and high[0] < 0.5))
    ]
    return Before(tuple(sorted(made_by)), float(low[0]), float(high[0]), divisions[0] if divisions else "")
