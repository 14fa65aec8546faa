"""A difference of weights in words; loaded where there is one."""

import math
from itertools import combinations

from megatron_rl_loss.proof.own_tokens import Compared


def in_words(compared: Compared) -> str:
    """Where tokens weigh what, of weights that are not those that were asked."""
    where = f"furthest off: {compared.where}"
    if max(abs(compared.low - 1), abs(compared.high - 1)) < compared.deviation / 2:  # weights of 0 are furthest off
        return f"masked tokens weigh up to {compared.deviation:.3g} times what the heaviest token should; {where}"
    if compared.high - compared.low > 1e-5 * abs(compared.high):
        return f"tokens weigh {compared.low:.3g} to {compared.high:.3g} times what they should; {where}"
    times = f"{compared.low:.4g}" if abs(compared.low - 1) > 1e-3 else f"{compared.low:.8g}"
    return f"tokens weigh {times} times what they should{named(compared.high, compared.sizes)}; {where}"


def named(value: float, sizes: dict[str, int]) -> str:
    """The counts whose product or inverse a constant factor is: `` (0.5 = 1/CP = 1/DP)``."""
    known = {name: size for name, size in sizes.items() if size > 1}
    products = [
        ("*".join(names), math.prod(known[name] for name in names))
        for length in range(1, len(known) + 1)
        for names in combinations(known, length)
    ]
    texts = [name for name, size in products if math.isclose(value, size, rel_tol=1e-4)]
    texts += [
        f"1/{name}" if "*" not in name else f"1/({name})"
        for name, size in products
        if math.isclose(value * size, 1, rel_tol=1e-4)
    ]
    return f" ({value:.4g} = {' = '.join(texts)})" if texts else ""
