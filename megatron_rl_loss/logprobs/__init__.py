"""Log-probs and entropy of labels: from logits that are cut over the vocabulary, and from hidden states in chunks.

For models whose logits do not fit, and for tensor parallelism.
"""

from megatron_rl_loss.logprobs.hidden import FoldedLoss, log_probs_from_hidden, loss_from_hidden
from megatron_rl_loss.logprobs.logits import KeptIds, LogProbs, log_probs_from_logits

__all__ = ["FoldedLoss", "KeptIds", "LogProbs", "log_probs_from_hidden", "log_probs_from_logits", "loss_from_hidden"]
