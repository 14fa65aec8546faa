"""Log-probs, entropy and a weighted loss of an output layer, stated a second time: float64, naive, one process."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A batch of tokens, exact in the dtype it is made for; everything float64 but ids and masks."""

    hidden: Tensor  # [tokens, hidden]
    weight: Tensor  # [vocabulary, hidden]
    bias: Tensor  # [vocabulary]
    labels: Tensor  # [tokens]
    ids: Tensor  # [tokens, 5]; some rows name an id twice
    taught: dict[str, Tensor]  # the teacher's hidden states [tokens, 6] and weight [vocabulary, 6]
    mask: Tensor  # bool [tokens]: ragged, with stretches that no chunk of a few tokens has one in
    keep: Tensor  # bool [tokens, vocabulary]; some rows empty, some without the label
    weights: Tensor  # [tokens], of a loss; 0 where the mask is, and at some more
    near: Tensor  # [tokens]


@functools.cache
def batch_of(tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    mask = torch.rand(tokens, generator=generator) < 0.6
    mask[tokens // 4 : tokens // 2] = False
    mask[-1] = True
    keep = torch.rand(tokens, vocabulary, generator=generator) < 0.3
    keep[0] = False
    weights = mask * torch.rand(tokens, generator=generator).double() * (draw(tokens) > -1.5) / tokens
    return Batch(
        hidden=draw(tokens, hidden).to(dtype).double(),
        weight=(draw(vocabulary, hidden) / math.sqrt(hidden)).to(dtype).double(),
        bias=draw(vocabulary).to(dtype).double(),
        labels=torch.randint(vocabulary, (tokens,), generator=generator),
        ids=torch.randint(vocabulary, (tokens, 5), generator=torch.Generator().manual_seed(1)),
        mask=mask,
        keep=keep,
        weights=weights.float().double(),
        near=draw(tokens).float().double(),
        taught={"hidden": draw(tokens, 6).to(dtype).double(), "weight": draw(vocabulary, 6).to(dtype).double() / 2},
    )


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    keep: Tensor | None = None,
    vocab_size: int | None = None,
    rest_without: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Oracle for logits [tokens, vocabulary] and labels [tokens] or [tokens, K], float64; over the ids that count."""
    size = labels.shape if rest_without is None else (len(labels), labels.shape[1] + 1)
    log_probs, entropies = [], []
    for t, token_ids in enumerate(labels.view(len(labels), -1).tolist()):
        ids = list(range(vocab_size or logits.shape[1]))
        if keep is not None:
            ids = [j for j in ids if keep[t, j] or j in token_ids]
        row = logits[t, ids] / temperature
        log_q = row - row.max().detach() - (row - row.max().detach()).exp().sum().log()
        log_probs.append(log_q[[ids.index(label) for label in token_ids]])
        if rest_without is not None:
            marked = labels[t][rest_without[t]].tolist()
            rest = [log_q[k] for k, j in enumerate(ids) if j not in marked]
            log_probs[-1] = torch.cat([log_probs[-1], torch.stack(rest).exp().sum().log()[None]])
        entropies.append(-(log_q.exp() * log_q).sum())
    return torch.stack(log_probs).view(size), torch.stack(entropies)


def divergence(
    logits: Tensor, taught: Tensor, labels: Tensor, kind: str, beta: float = 0.5, keep: Tensor | None = None
) -> Tensor:
    """Oracle for logits [tokens, vocabulary] over their temperatures, float64; over the ids that count, in turn."""
    values = []
    for t, token_ids in enumerate(labels.view(len(labels), -1).tolist()):
        ids = [j for j in range(logits.shape[1]) if keep is None or keep[t, j] or j in token_ids]
        p, q = (logits[t, ids].softmax(0), taught[t, ids].softmax(0))
        m = beta * q + (1 - beta) * p
        kl = {
            "forward_kl": q * (q / p).log(),
            "reverse_kl": p * (p / q).log(),
            "jsd": beta * q * (q / m).log() + (1 - beta) * p * (p / m).log(),
        }
        values.append(kl[kind].sum())
    return torch.stack(values)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest entry; infinite if anything is NaN."""
    error = float((actual.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())
    return math.inf if math.isnan(error) else error


# --- a loss in some cases

TOKENS, VOCABULARY, HIDDEN = 32, 24, 16
#: Sums over tokens, hidden and vocabulary; in bfloat16, products are rounded four times in a row.
BOUNDS = {torch.float64: 1e-12, torch.float32: oracle.chain_error(1, TOKENS), torch.bfloat16: 4 * 2.0**-8}
FP32 = BOUNDS[torch.float32]
assert FP32 < 2e-5
Outputs = dict[str, Tensor]
Wanted = tuple[float, float]
#: Of log-probs and entropy, in the loss.
WANTED = {"log-probs": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, -0.3)}
BOTH = WANTED["both"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold, bias": {"temperature": 0.3, "bias": True},
    "hot, all tokens": {"temperature": 1.7, "mask": True},
    "kept ids": {"keep": True, "temperature": 0.6},
    "kept ids, all tokens": {"keep": True, "mask": True},
    "padded vocabulary": {"vocab_size": 17, "bias": True},
    "padded to several ranks": {"vocab_size": 5},
    "no token counts": {"mask": False},
    "five ids": {"ids": 5, "bias": True, "temperature": 0.6},
    "five ids, kept ids": {"ids": 5, "keep": True},
    "five ids, padded vocabulary": {"ids": 5, "vocab_size": 17, "mask": True},
    "one id of a list": {"ids": 1},
    "a rest": {"ids": 5, "rest": True, "bias": True, "temperature": 0.6},
    "a rest, kept ids": {"ids": 5, "rest": True, "keep": True},
    "a rest, padded to several ranks": {"ids": 3, "rest": True, "vocab_size": 5, "mask": True},
    "forward KL": {"teacher": {"kind": "forward_kl"}, "bias": True, "temperature": 0.6},
    "reverse KL, kept ids": {"teacher": {"kind": "reverse_kl", "temperature": 1.7}, "keep": True},
    "JSD, padded vocabulary": {"teacher": {"kind": "jsd", "beta": 0.3}, "vocab_size": 17, "mask": True},
    "JSD, padded to several ranks": {"teacher": {"kind": "jsd"}, "vocab_size": 5, "ids": 5},
    "reverse KL of logits": {"teacher": {"kind": "reverse_kl"}, "logits": True},
    "forward KL, no token counts": {"teacher": {"kind": "forward_kl"}, "mask": False},
}


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[Batch, Tensor, Tensor, dict[str, Any]]:
    """The batch, labels, mask, and what both sides are told."""
    batch, case = batch_of(TOKENS, VOCABULARY, HIDDEN, dtype), CASES[name]
    mask = torch.full_like(batch.mask, case["mask"]) if "mask" in case else batch.mask
    options: dict[str, Any] = {key: case[key] for key in ("temperature", "vocab_size") if key in case}
    labels = batch.ids[:, : case["ids"]] if "ids" in case else batch.labels
    if "rest" in case:  # of one, two or no ids: the others are fillers, or name one of these again
        options["rest_without"] = (batch.ids[:, : case["ids"]] % 3 == 0) & (torch.arange(case["ids"]) % 2 == 0)
    return batch, labels % case.get("vocab_size", VOCABULARY), mask, options


def losses_of(
    log_probs: Tensor, entropy: Tensor | None, near: Tensor, divergence: Tensor | None = None, *, wanted: Wanted
) -> tuple[Tensor, Outputs]:
    """A loss whose slope depends on its values, and a metric."""
    if log_probs.dim() == 2:
        log_probs = log_probs @ torch.linspace(1, -0.5, log_probs.shape[1]).to(log_probs)
    mixed = wanted[0] * log_probs + (0 if entropy is None else wanted[1] * entropy)
    mixed = mixed if divergence is None else mixed + 0.7 * divergence
    return (mixed - near).square(), {"mixed": mixed}


@functools.cache
def expected_of(name: str, dtype: torch.dtype, wanted: Wanted = BOTH) -> Outputs:
    """The loss, its values and gradients."""
    (batch, labels, mask, options), case = inputs_of(name, dtype), CASES[name]
    leaves = {key: getattr(batch, key).clone().requires_grad_() for key in ("hidden", "weight", "bias")}
    logits = leaves["hidden"] @ leaves["weight"].T + leaves["bias"] * case.get("bias", False)
    keep = batch.keep if case.get("keep") else None
    both = log_probs_and_entropy(logits, labels, keep=keep, **options)
    log_probs, entropy = (column.masked_fill(~mask.view(-1, *[1] * (column.dim() - 1)), 0) for column in both)
    outputs = {"log_probs": log_probs, "entropy": entropy}
    if "teacher" in case:
        teacher, size = dict(case["teacher"]), options.get("vocab_size")
        temperature = options.get("temperature", 1.0)
        taught = batch.taught["hidden"] @ batch.taught["weight"].T / teacher.pop("temperature", temperature)
        both = (logits / temperature)[:, :size], taught[:, :size]
        outputs["divergence"] = divergence(*both, labels, keep=keep, **teacher) * mask
    losses = losses_of(log_probs, entropy, batch.near, outputs.get("divergence"), wanted=wanted)[0]
    outputs["share"] = share = (losses * batch.weights * mask).sum()
    share.backward()
    outputs |= {key: leaf.grad for key, leaf in leaves.items() if key != "bias" or case.get("bias")}
    return {key: tensor.detach() for key, tensor in outputs.items() if wanted[1] or key != "entropy"}
