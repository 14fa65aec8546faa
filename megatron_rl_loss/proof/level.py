"""What the proof does about a step that it does not prove: the levels, and the variable that sets one."""

import os
from typing import Any, Literal, get_args

from megatron_rl_loss.core.errors import check_choice

#: The strictest first: where ranks have different levels, this order decides.
ProofLevel = Literal["strict", "error", "warn", "off"]
#: An environment variable: the level of the first step's proof where nobody passes one.
PROOF_VARIABLE = "MEGATRON_RL_LOSS_PROOF"


def proof_level(asked: str | None = None) -> ProofLevel:
    """The level asked for, else that of the environment, else ``error``. Raises ValueError for an unknown level."""
    level: Any = asked or os.environ.get(PROOF_VARIABLE) or "error"
    check_choice("proof level" if asked else f"{PROOF_VARIABLE} level", level, get_args(ProofLevel))
    return level
