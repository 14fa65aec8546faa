"""Log-probs at ids with the rest that they leave, where a test has these alone: in float64, and differentiable."""

import torch
from torch import Tensor

from megatron_rl_loss import AtIds


def with_rest(log_probs: Tensor, other: Tensor | None = None) -> AtIds:
    """With the log of 1 less the probabilities at ids that the other side gave, at least half an epsilon."""
    at_ids = log_probs.double().nan_to_num(nan=-torch.inf).clamp(max=1)  # anything stands at masked tokens
    if other is not None:
        at_ids = at_ids.masked_fill(other == -torch.inf, -torch.inf)
    rest = 1 - at_ids.exp().sum(-1)
    least = torch.finfo(torch.promote_types(torch.float32, log_probs.dtype)).eps / 2
    return AtIds(log_probs, (rest + (rest.detach().clamp(min=least) - rest.detach())).log())
