"""Log-probs and entropy of labels: from logits whose vocabulary lies on several ranks, or from hidden states in chunks.

For models whose logits do not fit in memory, and for tensor parallelism. `reading` has the arithmetic in plain torch,
and `triton_kernels` the same for a GPU; `choice` says which of them reads, and `first_launch` compares each compiled
program with plain torch. `kernels` holds other projects' kernels,
which `log_probs_from_logits` and `log_probs_from_hidden` can call instead.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
