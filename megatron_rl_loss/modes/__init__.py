"""What a token weighs: w = m / (D * U), for each mode by name and for modes of your own.

For whoever asks for an aggregation, by our name, another framework's, or a function.
"""

from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.papers import (
    adapter_token_mean,
    balanced,
    length_to_the_minus,
    turn_mean,
    vl_norm,
    vl_norm_undivided,
    weighted_token_mean,
)
from megatron_rl_loss.modes.table import (
    MODES,
    Mode,
    ModeInputs,
    available_modes,
    register_pg_loss_reducer,
    with_statistics,
)
from megatron_rl_loss.modes.weights import token_weights, unit_weights

__all__ = [
    "MODES",
    "Aggregation",
    "Mode",
    "ModeInputs",
    "adapter_token_mean",
    "available_modes",
    "balanced",
    "length_to_the_minus",
    "register_pg_loss_reducer",
    "resolve",
    "token_weights",
    "turn_mean",
    "unit_weights",
    "vl_norm",
    "vl_norm_undivided",
    "weighted_token_mean",
    "with_statistics",
]
