"""Log-probs and entropy of labels: from logits whose vocabulary lies on several ranks, or from hidden states in chunks.

For models whose logits do not fit in memory, and for tensor parallelism. `kernels` holds other projects' kernels, which
`log_probs_from_logits` can call in place of plain torch.
"""

from megatron_rl_loss import refuse_names
from megatron_rl_loss.logprobs.hidden import log_probs_from_hidden, loss_from_hidden
from megatron_rl_loss.logprobs.kept_ids import KeptIds
from megatron_rl_loss.logprobs.layer import TensorParallel
from megatron_rl_loss.logprobs.logits import log_probs_from_logits
from megatron_rl_loss.logprobs.reading import LogProbs

__all__ = [
    "KeptIds",
    "LogProbs",
    "TensorParallel",
    "log_probs_from_hidden",
    "log_probs_from_logits",
    "loss_from_hidden",
]

__getattr__ = refuse_names(__name__)
