"""Megatron's Mamba-2 layer without a GPU: plain torch in the place of what it takes from the package mamba_ssm.

Of `MambaMixer` everything stays that makes parameters, marks them, cuts them over ranks and reduces their gradients.
Replaced are the fused kernel of convolution and scan, by the recurrence that it computes, the norm behind it, and
Transformer Engine's indices of a context-parallel rank's tokens, by the cut that they describe.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Give `MambaMixer` what it asks mamba_ssm for. A second call does nothing."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    vars(mamba_context_parallel).update(
        tex=SimpleNamespace(thd_get_partitioned_indices=indices_of_rank), is_te_min_version=lambda *_: True
    )
    vars(mamba_mixer).update(
        HAVE_MAMBA_SSM=True,
        mamba_split_conv1d_scan_combined=split_conv1d_scan,
        ExtendedRMSNorm=GroupedRMSNorm,
        _check_mamba_sequence_packing_support=lambda for_inference_not_training=True: (True, None),
    )


def indices_of_rank(cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """Of each sequence in 2 * CP chunks, the tokens of chunk `cp_rank` and of the one that is as far from the end."""
    assert total_tokens == cu_seqlens[-1]
    sequence_chunks = [torch.arange(*bounds).chunk(2 * cp_size) for bounds in pairwise(cu_seqlens.tolist())]
    held = [part for chunks in sequence_chunks for part in (chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank])]
    return torch.cat(held).int()


def split_conv1d_scan(
    zxBCdt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """[b, l, z + x + B + C + dt] -> [b, l, heads * headdim]: of each head, y = C h + D x, gated by silu(z), where

    h(t) = exp(dt A) h(t - 1) + dt B(t) x(t), and h begins at 0 in every sequence (`seq_idx` [b, l] numbers them).
    """
    batch, length, _ = zxBCdt.shape
    heads, inner = len(A), len(A) * headdim
    states = (zxBCdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, mixed, dt = zxBCdt.split([inner, inner + 2 * ngroups * states, heads], dim=-1)
    numbers = zxBCdt.new_zeros(batch, length, dtype=torch.int64) if seq_idx is None else seq_idx.long()
    convolved = F.silu(_causal_conv(mixed, conv_weight, conv_bias, numbers))
    x, B, C = convolved.split([inner, ngroups * states, ngroups * states], dim=-1)
    x = x.view(batch, length, heads, headdim)
    B, C = (each.view(batch, length, ngroups, states).repeat_interleave(heads // ngroups, dim=2) for each in (B, C))
    dt = F.softplus(dt + dt_bias)
    h, outputs = x.new_zeros(batch, heads, headdim, states), []
    for t in range(length):
        goes_on = torch.zeros_like(numbers[:, 0]) if t == 0 else numbers[:, t] == numbers[:, t - 1]
        decay = torch.exp(dt[:, t] * A) * goes_on[:, None]
        h = decay[..., None, None] * h + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outputs.append((h * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    y = torch.stack(outputs, dim=1).reshape(batch, length, inner)
    return y * F.silu(z)


def _causal_conv(values: Tensor, weight: Tensor, bias: Tensor, numbers: Tensor) -> Tensor:
    """Of each channel the weighted sum of the last entries of its own sequence."""
    (width, length), total = (weight.shape[1], values.shape[1]), bias.expand_as(values)
    for back in range(min(width, length)):
        is_of_same = numbers == F.pad(numbers, (back, 0), value=-1)[:, :length]
        shifted = F.pad(values, (0, 0, back, 0))[:, :length]
        total = total + shifted * weight[:, width - 1 - back] * is_of_same[..., None]
    return total


class GroupedRMSNorm(torch.nn.Module):
    """RMSNorm over groups of channels, which tensor parallelism does not cut."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, y: Tensor) -> Tensor:
        grouped = y.unflatten(-1, (-1, self.group_size))
        return (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight
