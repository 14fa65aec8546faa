"""What a loss does to each token: the weights it gives, measured, beside those that were asked for.

For whoever doubts a loss function, a mode or a launch. `audit.megatron` measures a step of a real Megatron run.
"""

from megatron_rl_loss import refuse_names
from megatron_rl_loss.audit.fit import Reading
from megatron_rl_loss.audit.log_prob_gap import GapPattern, LogProbGap, compare_log_probs
from megatron_rl_loss.audit.loss_check import LossReport, check_loss
from megatron_rl_loss.audit.picture import draw, in_terminal
from megatron_rl_loss.audit.places import Deviation
from megatron_rl_loss.audit.search import Finding
from megatron_rl_loss.audit.simulation import CALLS, GIVEN, LossCall
from megatron_rl_loss.audit.tokens import MeasuredStep, Split, StepTokens
from megatron_rl_loss.audit.verdict import Verdict, judge

__all__ = [
    "CALLS",
    "GIVEN",
    "Deviation",
    "Finding",
    "GapPattern",
    "LogProbGap",
    "LossCall",
    "LossReport",
    "MeasuredStep",
    "Reading",
    "Split",
    "StepTokens",
    "Verdict",
    "check_loss",
    "compare_log_probs",
    "draw",
    "in_terminal",
    "judge",
]

__getattr__ = refuse_names(__name__)
