"""Sums of weight times loss: shares of the step loss, its terms and metrics; and weights folded into advantages."""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
