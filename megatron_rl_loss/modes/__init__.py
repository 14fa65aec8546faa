"""The weight of a token, w = m / (D * U), for each mode by name and for modes of your own."""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
