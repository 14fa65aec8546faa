"""The audit: measures the weight that a loss gives each token, and compares it with the weight that was asked for.

Use it to check a loss function, a mode or a launch. `audit.megatron` measures a step of a real Megatron run.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
