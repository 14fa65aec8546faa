"""A step, planned before its first micro-batch: the denominators of the whole step, and its micro-batches with weights.

A carrier is the form in which a micro-batch returns its share, so that the trainer's own scaling cancels.
"""

from megatron_rl_loss import refuse_names
from megatron_rl_loss.plan.carriers import CARRIERS, Carrier, Form
from megatron_rl_loss.plan.measure import Measurement
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.plan.plan import Plan, make_plan

__all__ = ["CARRIERS", "Carrier", "Form", "Measurement", "Microbatch", "Plan", "make_plan"]

__getattr__ = refuse_names(__name__)
