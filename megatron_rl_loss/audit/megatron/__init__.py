"""The weight of every token in a step of Megatron, measured as the step runs.

For launches: `Audit` around a step, or `python -m megatron_rl_loss audit` around a script.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
