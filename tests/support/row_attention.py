"""Attention over rows (BSHD) under context parallelism: the example's attention over packed sequences, row by row."""

from typing import Any

import packed_attention
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor


class RowAttention(packed_attention.PackedAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`query` [local tokens, rows, heads, channels] -> [local tokens, rows, heads * channels]."""
        bounds = torch.tensor([0, len(query) * self.cp_group.size()], dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, bounds, bounds)
        rows = [super(RowAttention, self).forward(q, k, v, None, packed_seq_params=packed)
                for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)]  # fmt: skip
        return torch.stack(rows, 1)


def layer_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """`packed_attention.layer_spec` for rows."""
    spec = packed_attention.layer_spec(model_config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = RowAttention
    return spec
