"""What Megatron logs of the reports that a schedule stored."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def logged_means(stored: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """As `megatron.training.training.train_step` sums reports of two elements, over micro-batches, DP and CP."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    means = {}
    for name in stored[0]:
        total = torch.stack([report[name] for report in stored]).sum(0)
        dist.all_reduce(total, group=group)
        means[name] = float(total[0] / total[1])
    return means
