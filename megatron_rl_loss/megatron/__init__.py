"""For launches under Megatron: aggregates the policy loss of a training run as its flags ask.

`LossAggregation` looks ahead at each step and hands `Microbatch` objects to the loss function, whose `loss` gets past
Megatron's scaling. `OutputHead` and `ForwardPass` make log-probs; all of it needs Megatron-Core.
"""

try:
    import megatron.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"megatron_rl_loss.megatron needs Megatron-Core: {error}. pip install 'megatron-rl-loss[megatron]', "
        "or put your own checkout on PYTHONPATH; the rest of megatron_rl_loss works without it."
    ) from error

from megatron_rl_loss.errors import ContractError
from megatron_rl_loss.megatron.flags import (
    AggregationSettings,
    add_loss_aggregation_args,
    validate_loss_aggregation_args,
)
from megatron_rl_loss.megatron.forward_pass import ForwardPass
from megatron_rl_loss.megatron.groups import from_first_tp_rank
from megatron_rl_loss.megatron.iterator import next_microbatch
from megatron_rl_loss.megatron.launch import LossAggregation
from megatron_rl_loss.megatron.open_plan import OpenMegatronPlan, open_plan
from megatron_rl_loss.megatron.output_head import Folded, OutputHead, Tokens
from megatron_rl_loss.megatron.planning import plan_step
from megatron_rl_loss.plan import Microbatch, Plan

__all__ = [
    "AggregationSettings",
    "ContractError",
    "Folded",
    "ForwardPass",
    "LossAggregation",
    "Microbatch",
    "OpenMegatronPlan",
    "OutputHead",
    "Plan",
    "Tokens",
    "add_loss_aggregation_args",
    "from_first_tp_rank",
    "next_microbatch",
    "open_plan",
    "plan_step",
    "validate_loss_aggregation_args",
]
