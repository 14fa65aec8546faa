"""What a loss does to each token: the weights it gives, measured, beside those that were asked.

For whoever doubts a loss function or a launch. `audit.megatron` measures a step of a real Megatron run.
"""

from megatron_rl_loss.audit.check_loss import LossReport, check_loss
from megatron_rl_loss.audit.invariance import ModeReport, check_reducer
from megatron_rl_loss.audit.report import Deviation, Verdict
from megatron_rl_loss.audit.tokens import MeasuredStep, Split, StepTokens
from megatron_rl_loss.audit.trainers import Trainer
from megatron_rl_loss.audit.trainers import Trainer as LossCall
from megatron_rl_loss.audit.verdict import judge

__all__ = [
    "Deviation",
    "LossCall",
    "LossReport",
    "MeasuredStep",
    "ModeReport",
    "Split",
    "StepTokens",
    "Trainer",
    "Verdict",
    "check_loss",
    "check_reducer",
    "judge",
]
