"""A term's measured weights against the asked ones, and their difference in words."""

import math
from dataclasses import dataclass
from itertools import combinations

from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.proof.before_reducer import Before
from megatron_rl_loss.proof.factor import Factor


@dataclass(frozen=True)
class Compared:
    """A term's weights on all ranks against the asked ones."""

    totals: StepTotals
    deviation: float  # the largest relative difference; NaN where gradients are not finite
    low: float  # the smallest measured / asked of an active token
    high: float
    surplus: float  # the largest weight of a token that should have none, by the step's largest
    where: str  # the place of the largest difference
    sizes: dict[str, int]  # of the step's split
    before: Before
    after: Before  # what is done from the reducer on to losses that were trained on
    averages: bool  # the asked mode reads numbers of tokens

    @property
    def is_one_number(self) -> bool:
        """True if all weights are the asked ones times one number."""
        return self.high - self.low <= 1e-3 * abs(self.high)

    @property
    def unevenness(self) -> float:
        """How far tokens' weights are from being one multiple of the asked ones; no factor of the step is in it."""
        largest = max(abs(self.low), abs(self.high))
        if not math.isfinite(largest) or not largest:
            return 0.0 if largest == 0 and not self.surplus else self.deviation
        return max((self.high - self.low) / 2, self.surplus) / largest

    def is_as_asked(self, level_tolerance: float, each_tolerance: float) -> bool:
        """True within these tolerances: of what all weights are multiplied by, and of each against the others."""
        return self.deviation <= level_tolerance and not self.unevenness > each_tolerance

    @property
    def gap(self) -> str:
        """What is not known to be meant, in words; empty where losses are as their function returned them."""
        before = self.before
        if before.is_one:
            return ""
        is_coef = before.is_constant and not before.division
        meant = f"{named(before.high, self.sizes)}: if it is meant, make it the coef of a Term; else leave it out"
        return f"not covered: {before}{only_if(is_coef, meant)}"

    def __str__(self) -> str:
        return in_words(self)


def in_words(compared: Compared) -> str:
    """Where tokens weigh what, of weights that are not those that were asked."""
    where = f"furthest off: {compared.where}"
    if max(abs(compared.low - 1), abs(compared.high - 1)) < compared.deviation / 2:  # weights of 0 are furthest off
        return f"masked tokens weigh up to {compared.deviation:.3g} times what the heaviest token should; {where}"
    if compared.high - compared.low > 1e-5 * abs(compared.high):
        low, high = _apart(compared.low, compared.high)
        return f"tokens weigh {low} to {high} times what they should{compared.after.as_if}; {where}"
    times = f"{compared.low:.4g}" if abs(compared.low - 1) > 1e-3 else f"{compared.low:.8g}"
    why = named(compared.high, compared.sizes) or compared.after.as_if
    return f"tokens weigh {times} times what they should{why}; {where}"


def _apart(*numbers: float) -> list[str]:
    """The numbers with as many digits as tell them apart from each other and from 1; three at least."""
    for digits in range(3, 9):
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len({*texts, "1"}) == len({*numbers, 1.0}):
            break
    return texts


def may_be_clipped(compared: Compared, factor: Factor) -> str:
    """Why weights that are all too small by one number may be as asked; empty where that number has another reason.

    Gradients that were clipped inside the measured step are multiplied by a number that is no product of the step's
    counts, and so are the factor and all weights. A loss that is multiplied by such a number leaves the factor alone.
    Masked tokens that weigh something have another reason.
    """
    totals = compared.totals
    tokens = {"tokens": totals.step_active_tokens, "mask tokens": round(totals.step_tokens)}
    is_below = 0 < compared.high < 1 - 1e-3
    are_masked_right = compared.deviation <= 1.01 * (1 - compared.low)
    if not (compared.is_one_number and is_below and are_masked_right) or named(compared.high, compared.sizes):
        return ""
    rounding = max(1e-4, factor.rounding)
    if named(factor.value, compared.sizes | tokens, rounding) or abs(factor.value - 1) < rounding:
        return ""
    return "Gradients may have been clipped inside the measured step: clip them after it, and this can be told."


def named(value: float, sizes: dict[str, int], rounding: float = 1e-4) -> str:
    """The counts whose product or inverse a constant factor is: `` (0.5 = 1/CP = 1/DP)``."""
    known = {name: size for name, size in sizes.items() if size > 1}
    products = [
        ("*".join(names), math.prod(known[name] for name in names))
        for length in range(1, len(known) + 1)
        for names in combinations(known, length)
    ]
    texts = [name for name, size in products if math.isclose(value, size, rel_tol=rounding)]
    texts += [
        f"1/{name}" if "*" not in name else f"1/({name})"
        for name, size in products
        if math.isclose(value * size, 1, rel_tol=rounding)
    ]
    return f" ({value:.4g} = {' = '.join(texts)})" if texts else ""
