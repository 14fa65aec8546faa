"""Megatron's gated delta net without a GPU: plain torch in the place of what it takes from the package fla.

Of `GatedDeltaNet` everything stays that makes parameters, marks them, cuts them over ranks and sends heads between
context-parallel ranks. Replaced are its three kernels, by what they compute.
"""

import importlib
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Give Megatron's modules what they ask fla for. A second call does nothing."""
    package = "megatron.core.ssm.gated_delta_net"
    kernels = {"causal_conv1d": causal_conv1d, "l2norm": l2norm, "chunk_gated_delta_rule": gated_delta_rule}
    for name in (package, f"{package}.common", f"{package}.gdn"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # 0.18 has one file
        vars(module).update(HAVE_FLA=True, **kernels)


def l2norm(values: Tensor) -> Tensor:
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + 1e-6)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, cu_seqlens: Tensor | None, **unused: Any
) -> tuple[Tensor, None]:
    """[b, l, channels]: of each channel the weighted sum of the last entries of its own sequence, by SiLU."""
    assert activation in ("silu", "swish")
    convolved = []
    for begin, end in _sequences(x, cu_seqlens):
        padded = F.pad(x[:, begin:end].transpose(1, 2), (weight.shape[1] - 1, 0))
        convolved.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2))
    return F.silu(torch.cat(convolved, dim=1)), None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **unused: Any
) -> tuple[Tensor, None]:
    """[b, l, heads, size] -> [b, l, heads, value size]: o(t) = S(t)' q(t) / sqrt(size), where S begins at 0 and

    S(t) = S~ + k(t) (beta(t) (v(t) - S~' k(t)))', with S~ = exp(g(t)) S(t - 1), in every sequence.
    """
    outputs, scale = [], q.shape[-1] ** -0.5
    for begin, end in _sequences(q, cu_seqlens):
        state = q.new_zeros(q.shape[0], *k.shape[2:], v.shape[-1])
        for t in range(begin, end):
            state = g[:, t, :, None, None].exp() * state
            correction = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
            state = state + k[:, t, ..., None] * correction[..., None, :]
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outputs, dim=1), None


def _sequences(values: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    return list(pairwise([0, values.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()))
