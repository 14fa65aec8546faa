"""Policy-gradient loss aggregation for Megatron-Core, exact in every parallel layout.

Everything here is torch and NumPy. `megatron_rl_loss.arguments` holds the flags, `megatron_rl_loss.megatron` is the
adapter.
"""

from megatron_rl_loss.audit.check_loss import LossReport, check_loss
from megatron_rl_loss.audit.trainers import Trainer
from megatron_rl_loss.errors import BadBatchError
from megatron_rl_loss.folding import fold_into_advantages, is_folded
from megatron_rl_loss.invariance import ModeReport, check_reducer
from megatron_rl_loss.layouts import Contiguous, Gathered, Layout, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.losses import (
    PolicyLoss,
    cispo_loss,
    distillation_advantages,
    dppo_loss,
    group_relative_advantages,
    kl_estimate,
    ppo_clip_loss,
    sapo_loss,
    value_loss,
)
from megatron_rl_loss.metrics import Metric
from megatron_rl_loss.modes import (
    MODES,
    Mode,
    ModeInputs,
    available_modes,
    register_pg_loss_reducer,
    with_statistics,
)
from megatron_rl_loss.off_policy import (
    importance_weights,
    keep_sequences,
    surviving_masks,
    truncated_importance_weights,
)
from megatron_rl_loss.policy_losses import POLICY_LOSSES, policy_loss
from megatron_rl_loss.reduction import Reducer, make_pg_loss_reducer
from megatron_rl_loss.samples import LocalTokens, Samples
from megatron_rl_loss.segments import segment_mean, segment_sum, to_tokens
from megatron_rl_loss.sequence_losses import gmpo_loss, gspo_loss, gspo_token_loss
from megatron_rl_loss.terms import Term
from megatron_rl_loss.totals import Statistic, StepTotals, UnitCounts
from megatron_rl_loss.weights import token_weights

__version__ = "0.1.0"

__all__ = [
    "MODES",
    "POLICY_LOSSES",
    "BadBatchError",
    "Contiguous",
    "Gathered",
    "Layout",
    "LocalTokens",
    "LossReport",
    "Metric",
    "Mode",
    "ModeInputs",
    "ModeReport",
    "PolicyLoss",
    "Reducer",
    "Samples",
    "Statistic",
    "StepTotals",
    "Term",
    "Trainer",
    "UnitCounts",
    "ZigzagBSHD",
    "ZigzagResponse",
    "ZigzagTHD",
    "available_modes",
    "check_loss",
    "check_reducer",
    "cispo_loss",
    "distillation_advantages",
    "dppo_loss",
    "fold_into_advantages",
    "gmpo_loss",
    "group_relative_advantages",
    "gspo_loss",
    "gspo_token_loss",
    "importance_weights",
    "is_folded",
    "keep_sequences",
    "kl_estimate",
    "make_pg_loss_reducer",
    "policy_loss",
    "ppo_clip_loss",
    "register_pg_loss_reducer",
    "sapo_loss",
    "segment_mean",
    "segment_sum",
    "surviving_masks",
    "to_tokens",
    "token_weights",
    "truncated_importance_weights",
    "value_loss",
    "with_statistics",
]
