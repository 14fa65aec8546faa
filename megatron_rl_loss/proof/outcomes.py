"""The outcomes of a measured step: a table from what was seen of it to what the proof does.

A step is `wrong` only on positive evidence: token weights that were measured through a certified factor and are not
those asked, or a plan that knows that none of its micro-batches was trained on. What was not seen is `unknown`.
"""

from typing import Literal, NamedTuple, get_args

#: The largest relative difference of sound weights, by the type that gradients were rounded to. float32 allows for some
#: ten products on either side and the residual of a measurement, half precision for a few roundings of a gradient.
TOLERANCES = {"float32": 64 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}
#: Gradients at the reference parameters of the last pipeline stage; ``unseen``: there is no such parameter.
Gradient = Literal["finite", "zero", "overflow", "unseen"]
#: The factor between backward and finalised gradients: measured on a parameter, or not.
FactorState = Literal["certified", "unknown"]
#: Losses that went through a reducer or a tap; ``untrained``: none did, though a plan or an engine expects it.
Losses = Literal["seen", "unseen", "untrained"]
#: Measured weights of the terms; ``unknown`` without a mode, a coefficient, masks, or a certified tap; ``none``: no
#: token of the step is active.
Weights = Literal["as asked", "other", "unknown", "none"]
#: ``wait`` and ``overflow`` measure the next step; ``overflow`` for as long as a loss scale takes to settle.
Outcome = Literal["wait", "overflow", "unknown", "wrong", "proved"]


class Seen(NamedTuple):
    """What was seen of a step; None, in a row of the table, for anything."""

    gradient: Gradient | None
    factor: FactorState | None
    losses: Losses | None
    weights: Weights | None


#: Every combination matches one row (`tests/unit` tries all).
OUTCOMES: dict[Seen, Outcome] = {
    # gradient, factor, losses, weights
    Seen("overflow", None, None, None): "overflow",
    Seen("zero", None, None, None): "wait",
    Seen("unseen", None, None, None): "unknown",
    Seen("finite", None, "untrained", None): "wrong",
    Seen("finite", None, "unseen", None): "unknown",
    Seen("finite", "unknown", "seen", None): "unknown",
    Seen("finite", "certified", "seen", "as asked"): "proved",
    Seen("finite", "certified", "seen", "other"): "wrong",
    Seen("finite", "certified", "seen", "unknown"): "unknown",
    Seen("finite", "certified", "seen", "none"): "wait",
}


def outcome_of(seen: Seen) -> Outcome:
    """The outcome of the row that fits."""
    (outcome,) = {
        outcome
        for row, outcome in OUTCOMES.items()
        if all(field in (None, value) for field, value in zip(row, seen, strict=True))
    }
    return outcome


#: The strictest first: where ranks see differently, this order decides.
ORDER: tuple[Outcome, ...] = ("wrong", "unknown", "overflow", "wait", "proved")
assert set(ORDER) == set(get_args(Outcome))
