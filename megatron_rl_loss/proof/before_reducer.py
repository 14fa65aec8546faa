"""What code does to losses between a loss function of this package and the reducer that averages them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl_loss.core.errors import only_if
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
        division: the count that losses were divided by; "" for none.
        varies: the factor is not one number.
        is_odd: the factor is one number, and none that somebody would choose.
        lacks: some losses, or a term added to them, were made by no loss function of this package.
    """

    made_by: tuple[str, ...] = ()
    low: float = 1.0
    high: float = 1.0
    division: str = ""
    varies: bool = False
    is_odd: bool = False
    lacks: bool = False

    @property
    def is_one(self) -> bool:
        return max(abs(self.low - 1), abs(self.high - 1)) <= _ALIKE

    @property
    def _place(self) -> str:
        return f"between {' or '.join(self.made_by)} and the reducer"

    def fault(self, *, averages: bool) -> str:
        """The words for a division that no deliberate set-up explains; empty for none.

        A number of the micro-batch is no coefficient in any mode: with it, the loss depends on how the step is cut. One
        of each sample is none where the mode averages; elsewhere somebody may average samples so. One number may be
        somebody's coefficient, unless it is an odd one and the mode averages what it has divided.
        """
        if not self.division or not (averages or (self.varies and not self._is_of_sample)):
            return ""
        return self._divided(averages=averages) if self.varies or (self.is_odd and not self._is_of_sample) else ""

    @property
    def _is_of_sample(self) -> bool:
        """True for a count of each sample by itself, by which somebody may weigh on purpose."""
        return self.division in _SAMPLE_COUNTS

    def _divided(self, *, averages: bool) -> str:
        if self.division == _OWN_WEIGHTS:
            what = f"Losses are multiplied by {self.division} {self._place}, which multiplies by them again"
        else:
            again = (
                ", and the reducer averages them again" if averages else f": {self._factors}, by the cut of the step"
            )
            what = f"Losses are divided by {self.division} {self._place}{again}"
        return f"{what}. Pass per_token_loss to the reducer as the loss function returned it."

    @property
    def is_constant(self) -> bool:
        return self.high - self.low <= 1e-5 * abs(self.high)

    @property
    def _factors(self) -> str:
        if self.is_constant:
            return f"a factor of {self.high:.4g}"
        return f"factors of {self.low:.3g} to {self.high:.3g}"

    @property
    def as_if(self) -> str:
        """What code would do that changes weights so, in words; empty where it may be somebody's coefficient."""
        verb = "multiplied" if self.division == _OWN_WEIGHTS else "divided"
        return only_if(self.division and (self.varies or self.is_odd), f", as if {verb} by {self.division}")

    def __str__(self) -> str:
        division = only_if(self.division, f" ({only_if(self.division != _OWN_WEIGHTS, '1 / ')}{self.division})")
        return f"{self._factors}{division} on tokens {self._place}"


#: Counts that code before a reducer may divide losses by, of a micro-batch's tokens on a rank.
_COUNTS = (
    "the sum of the mask over each sample",
    "the sum of the mask over each sample's part on the CP rank",
    "the sum of the mask over the micro-batch",
    "the sum of the mask over the micro-batch's part on the CP rank",
    "the number of tokens of the micro-batch",
    "the number of samples of the micro-batch",
    "the weights of the mode",
)
_SAMPLE_COUNTS, _OWN_WEIGHTS = _COUNTS[:1], _COUNTS[-1]


class FactorExtremes:
    """Extremes of what reached the outputs of loss functions, against what the share sends to its tokens.

    The first number is of that quotient, the others are of the quotient times each of `_COUNTS`.
    """

    def __init__(self) -> None:
        self.made_by, self._lacks = set[str](), False
        self._low, self._high = np.full(1 + len(_COUNTS), math.inf), np.full(1 + len(_COUNTS), -math.inf)

    def add(self, share: SummedShare | None, tokens: LocalTokens) -> None:
        """Add a term's losses of a micro-batch; None for losses that no reducer summed."""
        if share is None or not share.outputs:
            self._lacks = True
            return
        self._lacks |= share.is_beside
        sent = share.gradient()
        for output in share.outputs:
            reached = output.gradient.total
            if sent is None or reached is None or reached.numel() != len(tokens):
                continue
            on = (sent != 0).cpu().numpy()
            factors = (reached.to(sent) / sent).cpu().numpy()[on]
            if len(factors):
                self.made_by.add(output.made_by)
                self.add_factors(factors, on, tokens, share.reducer.weights.cpu().numpy())

    def add_factors(self, factors: Floats, on: npt.NDArray[np.bool_], tokens: LocalTokens, weights: Floats) -> None:
        """Add the factors of those local tokens that are `on`, of a micro-batch with these weights."""
        if not len(factors):
            return
        self._extend(0, factors)
        for number, count in enumerate(_counts_of(tokens, weights), 1):
            self._extend(number, factors * count[on])

    def _extend(self, number: int, values: Floats) -> None:
        self._low[number] = np.minimum(self._low[number], values.min())
        self._high[number] = np.maximum(self._high[number], values.max())

    def numbers(self) -> list[float]:
        return [*(-self._low).tolist(), *self._high.tolist(), float(self._lacks)]


def _counts_of(tokens: LocalTokens, weights: Floats) -> Iterator[Floats]:
    """`_COUNTS` at each local token, one after the other; of weights, that multiply, the inverse."""
    mask, sample, whole = np.asarray(tokens.mask, np.float64), tokens.sample_index, tokens.samples.mask_sums
    yield whole[sample]
    yield np.bincount(sample, mask, len(whole))[sample]
    for count in (whole.sum(), mask.sum(), len(mask), len(whole)):
        yield np.broadcast_to(np.float64(count), mask.shape)
    yield np.divide(1.0, weights, out=np.zeros(mask.shape), where=weights != 0)


def before_of(numbers: Sequence[float], made_by: set[str], *, is_plain: bool = False) -> Before:
    """What the extremes of all ranks show: a division where the factors of tokens, times a count, are one number.

    If the factors are one number themselves, then the count is one too. Losses were divided by it if the product is 1.
    A factor of two digits at most may be somebody's coefficient: 0.1, say, where each sample has ten tokens. So may be
    any factor of samples of one length. One that varies with a count is none, unless it makes a loss larger.

    Args:
        is_plain: a division has no coefficient beside it.
    """
    *extremes, lacks = numbers
    if not made_by:
        return Before(lacks=bool(lacks))
    low, high = -np.array(extremes[: 1 + len(_COUNTS)]), np.array(extremes[1 + len(_COUNTS) :])
    is_alike = high - low <= _ALIKE * np.abs(high)
    factor, varies = float(high[0]), not bool(is_alike[0])
    division, is_odd = "", False
    for name, alike, product in zip(_COUNTS, is_alike[1:], high[1:], strict=True):
        is_one, is_smaller = abs(product - 1) <= _ALIKE, 0 < factor <= 1
        if (
            alike
            and not division
            and ((varies and is_smaller and not is_plain) or (is_one and (varies or factor < 0.5)))
        ):
            division = name
            has_digits = not math.isclose(factor, float(f"{factor:.2g}"), rel_tol=1e-5)
            is_odd = not varies and has_digits
    return Before(
        tuple(sorted(made_by)), float(low[0]), factor, division, bool(division) and varies, is_odd, bool(lacks)
    )
