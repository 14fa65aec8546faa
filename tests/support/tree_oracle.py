"""Whole samples beside a tree: a causal transformer that shares nothing, drawn forests, and losses by their formulas.

What a tree gives is compared with each sample on its own: its own tokens, positions 0, 1, 2, ... and a causal mask.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LONGEST = 11, 8, 2, 64


class Net(nn.Module):
    """A causal transformer of two layers on tokens, positions and what each token sees; attention may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Tensor | Callable[..., Tensor]) -> Tensor:
        """[tokens, WIDTH]. `attention`: bool [tokens, tokens], or a function of q, k, v [1, heads, tokens, size]."""
        x: Tensor = self.tokens(tokens) + self.positions(positions)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = (part.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            if isinstance(attention, Tensor):
                seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention)
            else:
                seen = attention(q, k, v)
            x = x + seen.transpose(1, 2).reshape(-1, WIDTH)
            x = x + mlp(x)
        return x

    def forward(self, tokens: Tensor, positions: Tensor, attention: Any) -> Tensor:
        return self.head(self.hidden(tokens, positions, attention))


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


@dataclass(eq=False)
class Forest:
    """Drawn samples; of each an entry per token, the last one masked."""

    rows: list[list[int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    old: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)

    def part(self, numbers: Sequence[int]) -> "Forest":
        return Forest(*([column[i] for i in numbers] for column in vars(self).values()))

    def columns(self) -> dict[str, Tensor]:
        return {name: torch.cat([torch.zeros(0), *getattr(self, name)]) for name in ("old", "advantages", "masks")}


def forest(seed: int, dtype: torch.dtype = torch.float64) -> Forest:
    """Ragged samples that branch: shared prompts and turns, copies, samples inside another and of one token."""
    rng, drawn = random.Random(seed), Forest()
    for prompt in range(rng.randint(1, 3)):
        head = [rng.randrange(WORDS) for _ in range(rng.randint(1, 4))]
        rows = [head + [rng.randrange(3) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 4))]
        rows += [list(rows[-1])] * (rng.random() < 0.5)  # the same response twice
        rows += [rows[-1][: rng.randint(1, len(rows[-1]))]] * (rng.random() < 0.5)  # one that ends inside another
        rows += [head[:1]] * (rng.random() < 0.2)
        drawn.rows += rows
        drawn.prompts += [prompt] * len(rows)
    rng.shuffle(drawn.rows)  # samples of a prompt need not lie side by side
    for row in drawn.rows:
        entries = [rng.choice([0.0, 1.0, 1.0, 0.5]) if t + 1 < len(row) else 0.0 for t in range(len(row))]
        drawn.masks.append(torch.tensor(entries, dtype=dtype))
        drawn.old.append(torch.tensor([rng.gauss(-2, 0.3) for _ in row], dtype=dtype))
        drawn.advantages.append(torch.full((len(row),), rng.uniform(-2, 2), dtype=dtype))
    return drawn


def whole(model: Net, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """Log-probs and entropies of each sample, computed alone: [length], 0 at the last token."""
    values = []
    for row in rows:
        n = len(row)
        logits = model(torch.tensor(row), torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())
        log_q = logits.log_softmax(-1)
        of_label = log_q[torch.arange(n - 1), torch.tensor(row[1:], dtype=torch.long)]
        entropy = -(log_q.exp() * log_q).sum(-1)[: n - 1]
        zero = of_label.new_zeros(1)
        values.append((torch.cat([of_label, zero]), torch.cat([entropy, zero])))
    return values


def ppo(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def cispo(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -(log_probs - old).exp().clamp(max=1.2).detach() * advantages * log_probs


def gspo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Of one sample: its ratio is the exponential of the mean log-ratio, and its gradient lies at its tokens."""
    mean = ((log_probs - old) * mask).sum() / mask.sum().clamp(min=1e-30)
    ratio = (mean.detach() + log_probs - log_probs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages)


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    return (reference - log_probs).exp() - (reference - log_probs) - 1


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    leaves = list(model.parameters())
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True))


def error(got: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest entry of the right ones."""
    scale = max(float(tensor.abs().max()) for tensor in right) or 1.0
    return max(float((a - b).abs().max()) for a, b in zip(got, right, strict=True)) / scale
