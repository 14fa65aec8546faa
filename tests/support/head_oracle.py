"""Log-probs, entropy and a weighted loss of an output layer, stated a second time: float64, naive, one process."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A batch of tokens, exact in the dtype it is made for; everything float64 but ids and masks."""

    hidden: Tensor  # [tokens, hidden]
    weight: Tensor  # [vocabulary, hidden]
    bias: Tensor  # [vocabulary]
    labels: Tensor  # [tokens]
    mask: Tensor  # bool [tokens]: ragged, with stretches that no chunk of a few tokens has one in
    keep: Tensor  # bool [tokens, vocabulary]; some rows empty, some without the label
    weights: Tensor  # [tokens], of a loss; 0 where the mask is, and at some more
    old_log_probs: Tensor
    advantages: Tensor


def batch_of(
    tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype = torch.float32, seed: int = 0, sharp: float = 1.0
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    mask = torch.rand(tokens, generator=generator) < 0.6
    mask[tokens // 4 : tokens // 2] = False
    mask[-1] = True
    keep = torch.rand(tokens, vocabulary, generator=generator) < 0.3
    keep[0] = False
    return Batch(
        hidden=(sharp * draw(tokens, hidden)).to(dtype).double(),
        weight=(draw(vocabulary, hidden) / math.sqrt(hidden)).to(dtype).double(),
        bias=draw(vocabulary).to(dtype).double(),
        labels=torch.randint(vocabulary, (tokens,), generator=generator),
        mask=mask,
        keep=keep,
        weights=mask
        * torch.rand(tokens, generator=generator).double().float().double()
        * (draw(tokens) > -1.5)
        / tokens,
        old_log_probs=(-3 - draw(tokens).abs()).float().double(),
        advantages=draw(tokens).float().double(),
    )


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    keep: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Of logits [tokens, vocabulary], float64; one token after the other, over the ids that count."""
    log_probs, entropies = [], []
    for t, label in enumerate(labels.tolist()):
        ids = range(logits.shape[1]) if vocab_size is None else range(vocab_size)
        if keep is not None:
            ids = [j for j in ids if keep[t, j] or j == label]  # type: ignore[assignment]
        row = logits[t, list(ids)] / temperature
        log_q = row - row.max().detach() - (row - row.max().detach()).exp().sum().log()
        log_probs.append(log_q[list(ids).index(label)])
        entropies.append(-(log_q.exp() * log_q).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def policy_loss(log_probs: Tensor, entropy: Tensor, batch: Batch, entropy_bonus: float) -> Tensor:
    """sum_t weight_t (clipped surrogate - bonus * entropy), float64."""
    ratio = (log_probs - batch.old_log_probs).exp()
    clipped = ratio.clamp(0.8, 1.28)
    losses = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages) - entropy_bonus * entropy
    return (batch.weights * losses).sum()


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest entry; infinite if anything is NaN."""
    error = float((actual.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())
    return math.inf if math.isnan(error) else error
