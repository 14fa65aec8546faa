"""The numbers that Megatron logs of the reports that a schedule stored."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def logged_means(stored: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Means over a rank's micro-batches, as `megatron.training.training.train_step` averages reports of one element."""
    for report in stored:
        assert all(value.numel() == 1 for value in report.values()), report
    return {name: float(torch.stack([report[name].view(-1) for report in stored]).mean()) for name in stored[0]}
