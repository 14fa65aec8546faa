"""The wing that imports Megatron: aggregates the policy loss of a Megatron launch as its flags ask.

| file          | holds                                                                                     |
|---------------|-------------------------------------------------------------------------------------------|
| `aggregation` | `LossAggregation`: what a launch makes once; a step reads straight down in `begin_step`    |
| `lookahead`   | fetching and describing a step's micro-batches before the first one is trained on         |
| `microbatch`  | `Microbatch`, and the carriers: how a share of the step loss gets past Megatron's scaling |
| `forward_pass`| log-probs of the old or a reference policy, by a forward pass before a step               |
| `output_head` | the output layer in chunks of tokens, by the model's `output_processor`                   |
| `handover`    | what reaches Megatron must be what a micro-batch handed out                               |
| `probe`       | whether the installed Megatron, this model and this configuration are safe                |
| `audit`       | `Audit`: what a step does to each token, measured as it runs                              |
| `patch`       | the two names of `megatron.training.training` that `attached()` replaces                  |
"""

try:
    import megatron.core  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"megatron_rl_loss.megatron needs Megatron-Core: {error}. pip install 'megatron-rl-loss[megatron]', "
        "or put your own checkout on PYTHONPATH; the rest of megatron_rl_loss works without it."
    ) from error

from megatron_rl_loss.errors import ContractError
from megatron_rl_loss.megatron.aggregation import LossAggregation
from megatron_rl_loss.megatron.flags import (
    AggregationSettings,
    add_loss_aggregation_args,
    validate_loss_aggregation_args,
)
from megatron_rl_loss.megatron.forward_pass import ForwardPass
from megatron_rl_loss.megatron.handover import next_microbatch
from megatron_rl_loss.megatron.microbatch import Microbatch
from megatron_rl_loss.megatron.output_head import Folded, OutputHead, Tokens

__all__ = [
    "AggregationSettings",
    "ContractError",
    "Folded",
    "ForwardPass",
    "LossAggregation",
    "Microbatch",
    "OutputHead",
    "Tokens",
    "add_loss_aggregation_args",
    "next_microbatch",
    "validate_loss_aggregation_args",
]
