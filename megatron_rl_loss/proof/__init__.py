"""The proof of a training step: each rank compares the measured weights of its own tokens with those asked for.

A default launch imports this folder. `audit/` gathers a step and explains it; nothing here imports that.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
