"""Policy-gradient loss aggregation for Megatron-Core, exact in every parallel layout.

Everything here is torch and NumPy. `megatron_rl_loss.arguments` holds the flags, `megatron_rl_loss.megatron` is the
adapter.
"""

from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.folding import fold_into_advantages, is_folded
from megatron_rl_loss.invariance import ModeReport, check_reducer
from megatron_rl_loss.layouts import Contiguous, Gathered, Layout, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.losses import (
    PolicyLoss,
    group_relative_advantages,
    kl_estimate,
    ppo_clip_loss,
    truncated_importance_weights,
)
from megatron_rl_loss.modes import MODES, Mode, ModeInputs, available_modes, register_pg_loss_reducer
from megatron_rl_loss.reduction import Reducer, make_pg_loss_reducer
from megatron_rl_loss.samples import LocalTokens, Samples
from megatron_rl_loss.segments import segment_mean, segment_sum, to_tokens
from megatron_rl_loss.totals import StepTotals, UnitCounts
from megatron_rl_loss.weights import token_weights

__version__ = "0.1.0"

__all__ = [
    "MODES",
    "BadBatchError",
    "Contiguous",
    "Gathered",
    "Layout",
    "LocalTokens",
    "Mode",
    "ModeInputs",
    "ModeReport",
    "PolicyLoss",
    "Reducer",
    "Samples",
    "StepTotals",
    "UnitCounts",
    "ZigzagBSHD",
    "ZigzagResponse",
    "ZigzagTHD",
    "available_modes",
    "check_reducer",
    "fold_into_advantages",
    "group_relative_advantages",
    "is_folded",
    "kl_estimate",
    "make_pg_loss_reducer",
    "ppo_clip_loss",
    "register_pg_loss_reducer",
    "segment_mean",
    "segment_sum",
    "to_tokens",
    "token_weights",
    "truncated_importance_weights",
]
