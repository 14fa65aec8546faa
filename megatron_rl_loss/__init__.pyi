from collections.abc import Callable
from typing import Any

from megatron_rl_loss.audit import check_loss as check_loss
from megatron_rl_loss.audit import compare_log_probs as compare_log_probs
from megatron_rl_loss.audit.megatron import Audit as Audit
from megatron_rl_loss.errors import BadBatchError as BadBatchError
from megatron_rl_loss.errors import ContractError as ContractError
from megatron_rl_loss.logprobs import log_probs_from_hidden as log_probs_from_hidden
from megatron_rl_loss.logprobs import log_probs_from_logits as log_probs_from_logits
from megatron_rl_loss.logprobs import loss_from_hidden as loss_from_hidden
from megatron_rl_loss.losses import group_relative_advantages as group_relative_advantages
from megatron_rl_loss.losses import kl_estimate as kl_estimate
from megatron_rl_loss.losses import policy_loss as policy_loss
from megatron_rl_loss.losses import ppo_clip_loss as ppo_clip_loss
from megatron_rl_loss.megatron import AggregationSettings as AggregationSettings
from megatron_rl_loss.megatron import Folded as Folded
from megatron_rl_loss.megatron import ForwardPass as ForwardPass
from megatron_rl_loss.megatron import LossAggregation as LossAggregation
from megatron_rl_loss.megatron import OutputHead as OutputHead
from megatron_rl_loss.megatron import Tokens as Tokens
from megatron_rl_loss.megatron import add_loss_aggregation_args as add_loss_aggregation_args
from megatron_rl_loss.megatron import from_first_tp_rank as from_first_tp_rank
from megatron_rl_loss.megatron import next_microbatch as next_microbatch
from megatron_rl_loss.megatron import validate_loss_aggregation_args as validate_loss_aggregation_args
from megatron_rl_loss.modes import Mode as Mode
from megatron_rl_loss.modes import ModeInputs as ModeInputs
from megatron_rl_loss.modes import register_pg_loss_reducer as register_pg_loss_reducer
from megatron_rl_loss.modes import resolve as resolve
from megatron_rl_loss.modes import token_weights as token_weights
from megatron_rl_loss.modes import weights_column as weights_column
from megatron_rl_loss.plan import Microbatch as Microbatch
from megatron_rl_loss.planning import plan_step as plan_step
from megatron_rl_loss.reduction import Metric as Metric
from megatron_rl_loss.reduction import Term as Term
from megatron_rl_loss.reduction import fold_into_advantages as fold_into_advantages
from megatron_rl_loss.reduction import make_pg_loss_reducer as make_pg_loss_reducer
from megatron_rl_loss.reduction import tap as tap
from megatron_rl_loss.step import Contiguous as Contiguous
from megatron_rl_loss.step import Gathered as Gathered
from megatron_rl_loss.step import Layout as Layout
from megatron_rl_loss.step import Samples as Samples
from megatron_rl_loss.step import StepTotals as StepTotals
from megatron_rl_loss.step import Sum as Sum
from megatron_rl_loss.step import Units as Units
from megatron_rl_loss.step import ZigzagBSHD as ZigzagBSHD
from megatron_rl_loss.step import ZigzagResponse as ZigzagResponse
from megatron_rl_loss.step import ZigzagTHD as ZigzagTHD

__version__: str

def refuse_names(module: str) -> Callable[[str], Any]: ...
