"""Per-token policy losses, and their parts: KL, advantages, importance weights, sums over sequences.

Each is a function of tensors, by formula or by name, for use in loss functions. None of them aggregates: that is
`megatron_rl_loss.core`.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
