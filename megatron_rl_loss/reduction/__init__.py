"""Sums of weight times loss: shares of the step loss, of its terms and of metrics; and weights folded into advantages.

For loss functions. An audit hears here what reaches each token.
"""

from megatron_rl_loss.reduction.folding import fold_into_advantages, is_folded
from megatron_rl_loss.reduction.metrics import Metric
from megatron_rl_loss.reduction.sums import Reducer, Term, WeightedSum, make_pg_loss_reducer
from megatron_rl_loss.reduction.tap import tap

__all__ = [
    "Metric",
    "Reducer",
    "Term",
    "WeightedSum",
    "fold_into_advantages",
    "is_folded",
    "make_pg_loss_reducer",
    "tap",
]
