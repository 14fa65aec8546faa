"""`torch.distributed.nn.functional.all_gather` for gloo, where torch's own backward fails in a group without rank 0."""

from typing import Any

import torch
import torch.distributed as dist


def all_gather(values: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    gathered: tuple[torch.Tensor, ...] = _Gather.apply(values, group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        gathered = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(gathered, values.contiguous(), group=group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = torch.stack(gradients)
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank()], None
