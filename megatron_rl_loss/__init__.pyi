from collections.abc import Callable
from typing import Any

from megatron_rl_loss.audit.assertion import assert_exact as assert_exact
from megatron_rl_loss.audit.log_prob_gap import compare_log_probs as compare_log_probs
from megatron_rl_loss.audit.loss_check import check_loss as check_loss
from megatron_rl_loss.audit.megatron.audit import Audit as Audit
from megatron_rl_loss.audit.megatron.packing import check_packing as check_packing
from megatron_rl_loss.core.columns import fold_into_advantages as fold_into_advantages
from megatron_rl_loss.core.columns import weights_column as weights_column
from megatron_rl_loss.core.counting import StepTotals as StepTotals
from megatron_rl_loss.core.counting import Sum as Sum
from megatron_rl_loss.core.layouts import Contiguous as Contiguous
from megatron_rl_loss.core.layouts import Gathered as Gathered
from megatron_rl_loss.core.layouts import ZigzagBSHD as ZigzagBSHD
from megatron_rl_loss.core.layouts import ZigzagResponse as ZigzagResponse
from megatron_rl_loss.core.layouts import ZigzagTHD as ZigzagTHD
from megatron_rl_loss.core.measure import keep_tokens as keep_tokens
from megatron_rl_loss.core.measure import measure_tokens as measure_tokens
from megatron_rl_loss.core.measure import pass_gap as pass_gap
from megatron_rl_loss.core.metrics import Metric as Metric
from megatron_rl_loss.core.microbatch import Microbatch as Microbatch
from megatron_rl_loss.core.modes import Mode as Mode
from megatron_rl_loss.core.modes import register_loss_mode as register_loss_mode
from megatron_rl_loss.core.modes import register_pg_loss_reducer as register_pg_loss_reducer
from megatron_rl_loss.core.reducers import Term as Term
from megatron_rl_loss.core.samples import Samples as Samples
from megatron_rl_loss.core.taps import tap as tap
from megatron_rl_loss.core.totals_by_hand import make_pg_loss_reducer as make_pg_loss_reducer
from megatron_rl_loss.logprobs.hidden import log_probs_from_hidden as log_probs_from_hidden
from megatron_rl_loss.logprobs.hidden import loss_from_hidden as loss_from_hidden
from megatron_rl_loss.logprobs.layer import OutputLayer as OutputLayer
from megatron_rl_loss.logprobs.logits import log_probs_from_logits as log_probs_from_logits
from megatron_rl_loss.logprobs.megatron_head import Folded as Folded
from megatron_rl_loss.logprobs.megatron_head import OutputHead as OutputHead
from megatron_rl_loss.logprobs.megatron_head import Tokens as Tokens
from megatron_rl_loss.logprobs.teacher import Teacher as Teacher
from megatron_rl_loss.losses.advantages import gae as gae
from megatron_rl_loss.losses.advantages import group_relative_advantages as group_relative_advantages
from megatron_rl_loss.losses.advantages import whiten_advantages as whiten_advantages
from megatron_rl_loss.losses.at_ids import AtIds as AtIds
from megatron_rl_loss.losses.by_name import policy_loss as policy_loss
from megatron_rl_loss.losses.centering import score_centering as score_centering
from megatron_rl_loss.losses.divergence import divergence_at_ids as divergence_at_ids
from megatron_rl_loss.losses.gates import Gate as Gate
from megatron_rl_loss.losses.off_policy import importance_weights as importance_weights
from megatron_rl_loss.losses.off_policy import surviving_masks as surviving_masks
from megatron_rl_loss.losses.scans import segment_scan as segment_scan
from megatron_rl_loss.losses.segments import segment_mean as segment_mean
from megatron_rl_loss.losses.segments import segment_quantile as segment_quantile
from megatron_rl_loss.losses.segments import segment_sum as segment_sum
from megatron_rl_loss.losses.segments import to_tokens as to_tokens
from megatron_rl_loss.losses.token import ppo_clip_loss as ppo_clip_loss
from megatron_rl_loss.losses.value_and_kl import kl_estimate as kl_estimate
from megatron_rl_loss.losses.value_and_kl import value_loss as value_loss
from megatron_rl_loss.megatron.flags import add_loss_aggregation_args as add_loss_aggregation_args
from megatron_rl_loss.megatron.iterator import next_microbatch as next_microbatch
from megatron_rl_loss.megatron.launch import LossAggregation as LossAggregation
from megatron_rl_loss.megatron.packing import packed_seq_params as packed_seq_params
from megatron_rl_loss.planning import plan_step as plan_step
from megatron_rl_loss.planning import prove_step as prove_step
from megatron_rl_loss.trees.layout import PrefixTree as PrefixTree

__version__: str

FURTHER_TABLES: list[str]

def load_further_tables() -> None: ...
def plot_plan(plan: Any, path: Any, title: str) -> None: ...
def refuse_names(module: str) -> Callable[[str], Any]: ...
