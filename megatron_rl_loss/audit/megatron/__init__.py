"""The weight of every token in a step of Megatron, measured as the step runs.

For launches: `Audit` around a step, or `python -m megatron_rl_loss audit` around a script.
"""

from megatron_rl_loss.audit.megatron.audit import Audit, audited
from megatron_rl_loss.reduction.tap import tap

__all__ = ["Audit", "audited", "tap"]
