"""Sums of weight times loss: shares of the step loss, its terms and metrics; and weights folded into advantages."""

from megatron_rl_loss import refuse_names
from megatron_rl_loss.reduction.folding import fold_into_advantages
from megatron_rl_loss.reduction.metrics import Metric
from megatron_rl_loss.reduction.sums import Reducer, Term, WeightedSum, make_pg_loss_reducer
from megatron_rl_loss.reduction.tap import tap

__all__ = ["Metric", "Reducer", "Term", "WeightedSum", "fold_into_advantages", "make_pg_loss_reducer", "tap"]

__getattr__ = refuse_names(__name__)
