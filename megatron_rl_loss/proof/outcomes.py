"""The tolerances of the proof, and its levels: what it does about a step that is not proved."""

import os
from typing import Any, Literal, get_args

from megatron_rl_loss.core.errors import check_choice

#: The largest relative difference of sound weights, by the type that gradients were rounded to. float32 allows for some
#: ten products on either side and the residual of a measurement, half precision for a few roundings of a gradient.
TOLERANCES = {"float32": 64 * 2.0**-24, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}
#: Gradients of the trainable parameters; ``unseen``: they are not measured; ``failed``: the measurement has an error.
Gradient = Literal["finite", "zero", "overflow", "unseen", "failed"]
#: What the proof does about a step that it does not prove; the strictest first: where ranks differ, this order decides.
ProofLevel = Literal["strict", "error", "warn", "off"]
#: An environment variable: the level of the first step's proof where nobody passes one.
PROOF_VARIABLE = "MEGATRON_RL_LOSS_PROOF"


def proof_level(asked: str | None = None) -> ProofLevel:
    """The level asked for, else that of the environment, else ``error``. Raises ValueError for an unknown level."""
    level: Any = asked or os.environ.get(PROOF_VARIABLE) or "error"
    check_choice("proof level" if asked else f"{PROOF_VARIABLE} level", level, get_args(ProofLevel))
    return level
