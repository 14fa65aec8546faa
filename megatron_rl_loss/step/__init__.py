"""What an optimizer step is made of: its samples, where their tokens lie, and how many there are in all.

For whoever describes a batch. A weight is made from nothing else.
"""

from megatron_rl_loss.step.layouts import Contiguous, Gathered, Layout, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import Statistic, StepTotals, UnitCounts

__all__ = [
    "Contiguous",
    "Gathered",
    "Layout",
    "LocalTokens",
    "Samples",
    "Statistic",
    "StepTotals",
    "UnitCounts",
    "ZigzagBSHD",
    "ZigzagResponse",
    "ZigzagTHD",
]
