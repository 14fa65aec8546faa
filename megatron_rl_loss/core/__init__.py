"""From masks to a share: samples, counts, modes, weights, reducers, plans; torch and NumPy alone."""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
