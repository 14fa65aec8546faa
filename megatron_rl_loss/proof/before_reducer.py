"""What code does to losses between a loss function of this package and the reducer that averages them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl_loss.core.masks import Floats
from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.core.taps import SummedShare
from megatron_rl_loss.proof.outcomes import TOLERANCES

#: The largest relative difference of factors that are one number.
_ALIKE = TOLERANCES["bfloat16"]


@dataclass(frozen=True)
class Before:
    """What code does to losses between a loss function of this package and the reducer.

    Attributes:
        made_by: the loss functions.
        low, high: the factors of tokens by that code.
        division: the count that losses were divided by, which the reducer divides by again; "" for none.
        is_sure: the division cannot be a coefficient that somebody chose, or weights: it changes with the micro-batch.
        is_doubtful: tokens weigh one over the length of their sample, which somebody may want.
    """

    made_by: tuple[str, ...] = ()
    low: float = 1.0
    high: float = 1.0
    division: str = ""
    is_sure: bool = False
    is_doubtful: bool = False

    @property
    def is_one(self) -> bool:
        return max(abs(self.low - 1), abs(self.high - 1)) <= _ALIKE

    @property
    def _place(self) -> str:
        return f"between {' or '.join(self.made_by)} and the reducer"

    @property
    def fault(self) -> str:
        """The words for a division that is sure, where the reducer averages."""
        return (
            f"Losses are divided by {self.division} {self._place}, and the reducer averages them again. Pass "
            "per_token_loss to the reducer as the loss function returned it."
        )

    def __str__(self) -> str:
        is_alike = self.high - self.low <= 1e-5 * abs(self.high)
        factors = f"a factor of {self.high:.4g}" if is_alike else f"factors of {self.low:.3g} to {self.high:.3g}"
        division = f" (1 / {self.division})" * bool(self.division)
        return f"{factors}{division} on tokens {self._place}"


#: Counts that code before a reducer may divide losses by, of a micro-batch's tokens on a rank.
_COUNTS = (
    "the sum of the mask over each sample",
    "the sum of the mask over each sample's part on the CP rank",
    "the sum of the mask over the micro-batch",
    "the sum of the mask over the micro-batch's part on the CP rank",
    "the number of tokens of the micro-batch",
)
_OF_SAMPLES = _COUNTS[:2]


class FactorExtremes:
    """Extremes of what reached the outputs of loss functions, against what the share sends to its tokens.

    The first number is of that quotient, the others are of the quotient times each of `_COUNTS`.
    """

    def __init__(self) -> None:
        self.made_by = set[str]()
        self._low, self._high = np.full(1 + len(_COUNTS), math.inf), np.full(1 + len(_COUNTS), -math.inf)

    def add(self, share: SummedShare, tokens: LocalTokens) -> None:
        sent = share.gradient()
        for output in share.outputs:
            reached = output.gradient.total
            if sent is None or reached is None or reached.numel() != len(tokens):
                continue
            on = (sent != 0).cpu().numpy()
            factors = (reached.to(sent) / sent).cpu().numpy()[on]
            if not len(factors):
                continue
            self.made_by.add(output.made_by)
            self._extend(0, factors)
            for number, count in enumerate(_counts_of(tokens), 1):
                self._extend(number, factors * count[on])

    def _extend(self, number: int, values: Floats) -> None:
        self._low[number] = np.minimum(self._low[number], values.min())
        self._high[number] = np.maximum(self._high[number], values.max())

    def numbers(self) -> list[float]:
        return [*(-self._low).tolist(), *self._high.tolist()]


def _counts_of(tokens: LocalTokens) -> Iterator[Floats]:
    """`_COUNTS` at each local token, one after the other."""
    mask, sample, whole = np.asarray(tokens.mask, np.float64), tokens.sample_index, tokens.samples.mask_sums
    yield whole[sample]
    yield np.bincount(sample, mask, len(whole))[sample]
    for count in (whole.sum(), mask.sum(), len(mask)):
        yield np.broadcast_to(np.float64(count), mask.shape)


def before_of(numbers: Sequence[float], made_by: set[str]) -> Before:
    """What the extremes of all ranks show: a division where the factors of tokens, times a count, are one number.

    If the factors are one number themselves, then the count is one too. Losses were divided by it if the product is 1.
    A factor of two digits at most may be somebody's coefficient: 0.1, say, where each sample has ten tokens. So may be
    any factor of samples of one length, and weights of 1 / length may be wanted; none of a micro-batch is.
    """
    if not made_by:
        return Before()
    low, high = -np.array(numbers[: 1 + len(_COUNTS)]), np.array(numbers[1 + len(_COUNTS) :])
    is_alike = high - low <= _ALIKE * np.abs(high)
    factor = float(high[0])
    division, is_sure, is_doubtful = "", False, False
    for name, alike, product in zip(_COUNTS, is_alike[1:], high[1:], strict=True):
        if alike and not division and (not is_alike[0] or (abs(product - 1) <= _ALIKE and factor < 0.5)):
            division = name
            is_of_sample = name in _OF_SAMPLES
            is_doubtful = is_of_sample and not is_alike[0]
            is_odd = not is_alike[0] or not math.isclose(factor, float(f"{factor:.2g}"), rel_tol=1e-5)
            is_sure = is_odd and not is_of_sample
    return Before(tuple(sorted(made_by)), float(low[0]), factor, division, is_sure, is_doubtful)
