"""The weights that a loss gives to tokens, measured, beside those that were asked for.

For whoever doubts a loss function, a mode or a launch. `audit.megatron` measures a step of a real Megatron run.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
