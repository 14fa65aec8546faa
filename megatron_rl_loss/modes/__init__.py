"""The weight of a token, w = m / (D * U), for each mode by name and for modes of your own."""

from megatron_rl_loss import refuse_names
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeInputs, available_modes, register_pg_loss_reducer
from megatron_rl_loss.modes.weights import token_weights, unit_weights, weights_column

__all__ = [
    "Aggregation",
    "Mode",
    "ModeInputs",
    "available_modes",
    "register_pg_loss_reducer",
    "resolve",
    "token_weights",
    "unit_weights",
    "weights_column",
]

__getattr__ = refuse_names(__name__)
