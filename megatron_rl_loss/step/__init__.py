"""The parts of an optimizer step: its samples, their layout, and the counts of the whole step."""

from megatron_rl_loss import refuse_names
from megatron_rl_loss.step.layouts import Contiguous, Gathered, Layout, ZigzagBSHD, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import Sum, Units

__all__ = [
    "Contiguous",
    "Gathered",
    "Layout",
    "LocalTokens",
    "Samples",
    "StepTotals",
    "Sum",
    "Units",
    "ZigzagBSHD",
    "ZigzagResponse",
    "ZigzagTHD",
]

__getattr__ = refuse_names(__name__)
