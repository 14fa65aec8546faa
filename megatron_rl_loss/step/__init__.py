"""The parts of an optimizer step: its samples, their layout, and the counts of the whole step."""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
