"""Core attention of a batch of padded rows in plain torch: cut for context parallelism, or over cached keys and values.

Megatron's `DotProductAttention` rejects context parallelism, and Transformer Engine needs a GPU. This attention runs on
any machine and layout, in training and sampling alike, so both compute the same log-probs.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from packed_attention import layer_spec
from torch import Tensor

from megatron_rl_loss import ZigzagBSHD


class RowAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention in each row; a drop-in for a layer spec's ``core_attention``.

    In training a context-parallel rank holds a zigzag part of every row and gathers the keys and values of the others.
    In inference mode every rank has whole rows: the queries are the last positions of the cached keys.
    """

    def __init__(self, config: Any, *positionals: Any, pg_collection: Any = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self.scale = config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **keywords: Any) -> Tensor:
        """`query` [local positions, rows, heads, channels] and its keys and values -> [.., rows, heads * channels]."""
        if InferenceMode.is_active():
            key_places = torch.arange(key.size(0), device=key.device)
            query_places = key_places[-query.size(0) :]
        else:
            key, value, key_places, query_places = self._gathered(key, value)
        visible = query_places[:, None] >= key_places
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        return output.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All keys and values in the order they were gathered, their positions, and those of this rank's queries."""
        rank, size = self.cp_group.rank(), self.cp_group.size()
        row = ZigzagBSHD(1, key.size(0) * size)
        cuts = [row.pieces(each, size) for each in range(size)]
        held = [torch.cat([torch.arange(*piece, device=key.device) for piece in pieces]) for pieces in cuts]
        if size > 1:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (key, value)
            )
        return key, value, torch.cat(held), held[rank]


def row_layer_spec(config: Any) -> TransformerBlockSubmodules:
    """A GPT block of Megatron's local layers with `RowAttention`."""
    block = layer_spec(SimpleNamespace(transformer=config))
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = RowAttention
    return block
