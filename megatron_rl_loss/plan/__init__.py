"""A step, planned before its first micro-batch: the denominators of the whole step, and its micro-batches with weights.

`plan_step` serves any training loop that sums or averages gradients over ranks, with or without Megatron. `open_plan`
does so for samples that arrive call by call. A carrier is the form in which a micro-batch returns its share, so that
the trainer's own scaling cancels.
"""

from megatron_rl_loss.plan.carriers import CARRIERS, Carrier, Form
from megatron_rl_loss.plan.late_counts import ClosedPlan
from megatron_rl_loss.plan.measure import Measurement
from megatron_rl_loss.plan.microbatch import Microbatch
from megatron_rl_loss.plan.open_plan import OpenPlan, open_plan
from megatron_rl_loss.plan.plan import Plan, plan_step

__all__ = [
    "CARRIERS",
    "Carrier",
    "ClosedPlan",
    "Form",
    "Measurement",
    "Microbatch",
    "OpenPlan",
    "Plan",
    "open_plan",
    "plan_step",
]
