"""A small GPT in plain PyTorch, with a cache of keys and values for sampling."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = dict[int, list[Tensor]]  # keys and values by layer


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.3)
        self.heads, self.qkv, self.out, self.mlp = heads, nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            self.qkv.append(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width)))
            self.out.append(nn.Linear(width, width))
            wide = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
            self.mlp.append(nn.Sequential(nn.LayerNorm(width), *wide))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None, at: int = 0) -> Tensor:
        """Logits [rows, tokens, vocabulary] of tokens at positions from `at` on; the cache has those before."""
        x = self.tokens(tokens) + self.positions.weight[at : at + tokens.size(1)]
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv(x).chunk(3, -1))
            if cache is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(cache[i], (k, v), strict=True)) if at else (k, v)
                cache[i] = [k, v]
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=at == 0).transpose(1, 2).flatten(-2))
            x = x + mlp(x)
        return self.head(self.norm(x))
