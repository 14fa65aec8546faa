"""The weight of every token in a step of Megatron, measured as the step runs: `Audit` around the schedule's call."""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
