"""The outcomes of a measured step, a table from what was seen to what the proof says; and the levels of the proof.

A step is `wrong` only on positive evidence: token weights that were measured through a certified factor and are not
those asked, or a plan that knows that none of its micro-batches was trained on. A parameter that has another factor may
be meant to: that only keeps the step from being `proved`. What was not seen is `unknown`. A level says what the proof
does about a step that is not `proved`.
"""

import os
from typing import Any, Literal, NamedTuple, get_args

from megatron_rl_loss.core.errors import check_choice

#: The largest relative difference of sound weights, by the type that gradients were rounded to. float32 allows for some
#: ten products on either side and the residual of a measurement, half precision for a few roundings of a gradient.
TOLERANCES = {"float32": 64 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}
#: Gradients of the trainable parameters; ``unseen``: they are not measured; ``failed``: the measurement has an error.
Gradient = Literal["finite", "zero", "overflow", "unseen", "failed"]
#: The factor between backward and final gradients: that of most parameters, or none.
FactorState = Literal["certified", "unknown"]
#: Losses that went through a reducer or a tap; ``untrained``: none did, though a plan or an engine expects it.
Losses = Literal["seen", "unseen", "untrained"]
#: Measured weights of the terms; ``unknown`` without a mode, a coefficient, masks, or a certified tap; ``none``: no
#: token of the step is active.
Weights = Literal["as asked", "other", "unknown", "none"]
#: Whether the factor is that of every parameter that was measured, on all ranks.
Parameters = Literal["alike", "unlike"]
#: ``wait`` and ``overflow`` measure the next step; ``overflow`` for as long as a loss scale takes to settle.
#: ``unlike``: weights are as asked, by the factor of most parameters, and some parameters have another.
Outcome = Literal["wait", "overflow", "unknown", "unlike", "wrong", "proved"]


class Seen(NamedTuple):
    """What was seen of a step; None, in a row of the table, for anything."""

    gradient: Gradient | None
    factor: FactorState | None
    losses: Losses | None
    weights: Weights | None
    parameters: Parameters | None


#: Every combination matches one row (`tests/unit` tries all).
OUTCOMES: dict[Seen, Outcome] = {
    # gradient, factor, losses, weights, parameters
    Seen("failed", None, None, None, None): "unknown",
    Seen("overflow", None, None, None, None): "overflow",
    Seen("zero", None, None, None, None): "wait",
    Seen("unseen", None, None, None, None): "unknown",
    Seen("finite", None, "untrained", None, None): "wrong",
    Seen("finite", None, "unseen", None, None): "unknown",
    Seen("finite", "unknown", "seen", None, None): "unknown",
    Seen("finite", "certified", "seen", "as asked", "alike"): "proved",
    Seen("finite", "certified", "seen", "as asked", "unlike"): "unlike",
    Seen("finite", "certified", "seen", "other", None): "wrong",
    Seen("finite", "certified", "seen", "unknown", None): "unknown",
    Seen("finite", "certified", "seen", "none", None): "wait",
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
ORDER: tuple[Outcome, ...] = ("wrong", "unlike", "unknown", "overflow", "wait", "proved")
assert set(ORDER) == set(get_args(Outcome))

#: What the proof does about a step that it does not prove; the strictest first: where ranks differ, this order decides.
ProofLevel = Literal["strict", "error", "warn", "off"]
#: An environment variable: the level of the first step's proof where nobody passes one.
PROOF_VARIABLE = "MEGATRON_RL_LOSS_PROOF"


def proof_level(asked: str | None = None) -> ProofLevel:
    """The level asked for, else that of the environment, else ``error``. Raises ValueError for an unknown level."""
    level: Any = asked or os.environ.get(PROOF_VARIABLE) or "error"
    check_choice("proof level" if asked else f"{PROOF_VARIABLE} level", level, get_args(ProofLevel))
    return level
