"""Terms that tests add to the loss function in a copy of an engine's code, which calls `added`.

None has a slope at every special point: p log p has none at a log-prob of -1, k2, k3 and (ratio - 1)^2 none at a ratio
of 1, and exp(log-prob - old) * log-prob, by which NeMo-RL reports an entropy, none where both hold.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "p log p": lambda log_probs, old: log_probs.exp() * log_probs,
    "k2 to the old policy": lambda log_probs, old: (log_probs - old) ** 2 / 2,
    "k3 to the old policy": lambda log_probs, old: (old - log_probs).exp() - (old - log_probs) - 1,
    "(ratio - 1)^2": lambda log_probs, old: ((log_probs - old).exp() - 1) ** 2,
    "ratio * log-prob": lambda log_probs, old: (log_probs - old).exp() * log_probs,
    "max(ratio - 1, 0)": lambda log_probs, old: ((log_probs - old).exp() - 1).relu(),
    "log-prob": lambda log_probs, old: 0.01 * log_probs,
}
#: What stands in a copy of an engine's code, with the names of its variables.
CALL = '__import__("added_terms").added({log_probs}, {old}, {mask})'
_CHOSEN = ""


def choose(term: str) -> None:
    """Let the code of this process add that term; none if empty."""
    global _CHOSEN
    _CHOSEN = term


def added(log_probs: Tensor, old: Tensor, mask: Tensor) -> Any:
    """The mean of the chosen term over a micro-batch, masked tokens as 0, times 0.1."""
    if not _CHOSEN:
        return 0.0
    log_probs, old = (values.masked_fill(mask == 0, -1.0) for values in (log_probs, old))
    return 0.1 * (TERMS[_CHOSEN](log_probs, old) * mask).mean()
