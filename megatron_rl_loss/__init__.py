"""Policy-gradient loss aggregation for Megatron-Core, exact in every parallel layout.

These are the names that a loss function needs. Losses come from `megatron_rl_loss.losses`, log-probs from `.logprobs`,
terms and metrics from `.reduction`, the Megatron adapter from `.megatron`, checks of any loss from `.audit`.
"""

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.table import ModeInputs, register_pg_loss_reducer, with_statistics
from megatron_rl_loss.modes.weights import token_weights, weights_column
from megatron_rl_loss.reduction.sums import make_pg_loss_reducer
from megatron_rl_loss.step.layouts import Contiguous, Gathered, Layout, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import Statistic, StepTotals, UnitCounts

__version__ = "0.1.0"

__all__ = [
    "BadBatchError",
    "Contiguous",
    "Gathered",
    "Layout",
    "ModeInputs",
    "Samples",
    "Statistic",
    "StepTotals",
    "UnitCounts",
    "ZigzagBSHD",
    "ZigzagResponse",
    "ZigzagTHD",
    "make_pg_loss_reducer",
    "register_pg_loss_reducer",
    "resolve",
    "token_weights",
    "weights_column",
    "with_statistics",
]
