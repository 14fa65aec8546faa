"""A whole optimizer step of a small GPT stated a second time: float64, plain torch, one process, sample by sample.

Nothing here comes from the package or from Megatron: no packing, no sharding, no micro-batches. Parameters have the
names and shapes of Megatron's unsharded ones, so that gathered tensors can be compared one by one.
"""

import functools
import math
import random
from dataclasses import dataclass, field, replace

import oracle
import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, FFN, VOCAB = 16, 32, 32
HEADS, GROUPS, CHANNELS = 4, 2, 8  # Transformer Engine wants a multiple of 8
EPSILON = 1e-5
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
DIVISOR = 3.0  # constant must not come out near another mode, or its bfloat16 cases would show nothing
# Adam's epsilon is of the size of the gradients: with a tiny one the first step is lr * sign(gradient), and rounding
# errors of gradients near zero would be all that a comparison of weights sees.
LEARNING_RATE, BETA1, BETA2, ADAM_EPSILON = 0.05, 0.9, 0.95, 0.1
CLIP_GRAD = 2.3  # below the norm of some steps: a wrong norm then makes wrong weights


@dataclass(frozen=True)
class GptShape:
    num_layers: int
    tied: bool  # the output layer is the embedding
    bf16: bool  # weights that bfloat16 holds exactly


@dataclass(frozen=True)
class Rollout:
    """One sample of the step's data; lists, so that it travels to other processes exactly."""

    tokens: list[int]
    labels: list[int]
    mask: list[float]
    advantages: list[float]
    log_ratios: list[float]  # of the policy at its first weights to the old one
    rollout_id: str
    prompt_id: str
    old_log_probs: list[float] = field(default_factory=list)


def weights_of(shape: GptShape) -> dict[str, Tensor]:
    """The first weights by name, float64, exact in the dtype of the model."""
    sizes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    for i in range(shape.num_layers):
        sizes |= {
            f"decoder.layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"decoder.layers.{i}.self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * CHANNELS, HIDDEN),
            f"decoder.layers.{i}.self_attention.linear_proj.weight": (HIDDEN, HEADS * CHANNELS),
            f"decoder.layers.{i}.pre_mlp_layernorm.weight": (HIDDEN,),
            f"decoder.layers.{i}.mlp.linear_fc1.weight": (FFN, HIDDEN),
            f"decoder.layers.{i}.mlp.linear_fc2.weight": (HIDDEN, FFN),
        }
    sizes["decoder.final_layernorm.weight"] = (HIDDEN,)
    if not shape.tied:
        sizes["output_layer.weight"] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(shape.num_layers)
    weights = {}
    for name, size in sizes.items():
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        drawn = 1 + 0.2 * drawn if "norm" in name else 0.3 * drawn
        weights[name] = drawn.to(torch.bfloat16 if shape.bf16 else torch.float32).double()
    return weights


@functools.cache
def rollouts_without_old_policy() -> tuple[Rollout, ...]:
    """Ragged samples, the same for every layout: 19, which no number of data-parallel ranks divides."""
    rng = random.Random(20)
    lengths = [1, 24, 3, 7, 2, 11, 1, 5, 16, 4, 1, 9, 6, 2, 13, 3, 8, 1, 10]
    prompts = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4, 5]  # groups of 7, 3, 1, 5, 2 and 1
    joined = {2: 1, 5: 4, 9: 8, 13: 12, 14: 12}  # samples that are parts of an earlier sample's rollout
    # 4: part of a rollout with active tokens; 6 and 15: a whole rollout; 10 and 18: a whole prompt group
    fully_masked = {4, 6, 10, 15, 18}
    samples = []
    for i, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        tokens = [rng.randrange(VOCAB) for _ in range(length + 1)]
        first = rng.randrange(max(length // 2, 1))
        mask = [0.0 if t < first else rng.choice([1.0, 1.0, 0.5, 0.3, 0.0]) for t in range(length)]
        mask[-1] = 1.0
        if i in fully_masked:
            mask = [0.0] * length
        advantage = rng.choice([-1, 1]) * rng.uniform(0.5, 2)
        samples.append(
            Rollout(
                tokens=tokens[:-1],
                labels=tokens[1:],
                mask=mask,
                advantages=[advantage + rng.uniform(-0.3, 0.3) for _ in range(length)],
                # Well inside or well outside the clip range of log(0.8) to log(1.28): no rounding moves them across.
                log_ratios=[rng.choice([-0.6, -0.1, 0.1, 0.6]) + rng.uniform(-0.05, 0.05) for _ in range(length)],
                rollout_id=f"r{joined.get(i, i)}",
                prompt_id=f"p{prompt}",
            )
        )
    return tuple(samples)


def log_probs_of(shape: GptShape, weights: dict[str, Tensor], tokens: list[int], labels: list[int]) -> Tensor:
    """Log-probability of each label, float64 [length]."""
    return distributions_of(shape, weights, tokens)[torch.arange(len(tokens)), torch.tensor(labels)]


def distributions_of(shape: GptShape, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Log-probabilities of the whole vocabulary, float64 [length, VOCAB]."""
    length = len(tokens)
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[torch.tensor(tokens)]
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (
        torch.arange(0, CHANNELS, 2, dtype=torch.float64) / CHANNELS
    )
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for i in range(shape.num_layers):
        layer = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"decoder.layers.{i}.")}
        qkv = normed(x, layer["input_layernorm.weight"]) @ layer["self_attention.linear_qkv.weight"].T
        # Rows go group by group: the group's query heads, its key, its value.
        qkv = qkv.view(length, GROUPS, HEADS // GROUPS + 2, CHANNELS)
        heads = []
        for head in range(HEADS):
            group, place = divmod(head, HEADS // GROUPS)
            q, k = rotated(qkv[:, group, place, None])[:, 0], rotated(qkv[:, group, -2, None])[:, 0]
            scores = (q @ k.T / math.sqrt(CHANNELS)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ qkv[:, group, -1])
        x = x + torch.cat(heads, -1) @ layer["self_attention.linear_proj.weight"].T
        inner = normed(x, layer["pre_mlp_layernorm.weight"]) @ layer["mlp.linear_fc1.weight"].T
        x = x + F.gelu(inner) @ layer["mlp.linear_fc2.weight"].T
    x = normed(x, weights["decoder.final_layernorm.weight"])
    logits = x @ (embedding if shape.tied else weights["output_layer.weight"]).T
    return logits.log_softmax(-1)


@dataclass(frozen=True)
class _Forward:
    weights: dict[str, Tensor]
    log_probs: list[Tensor]
    rollouts: list[Rollout]


@functools.cache
def _forward(shape: GptShape) -> _Forward:
    weights = {name: weight.requires_grad_() for name, weight in weights_of(shape).items()}
    rollouts, log_probs = [], []
    for rollout in rollouts_without_old_policy():
        log_probs.append(log_probs_of(shape, weights, rollout.tokens, rollout.labels))
        old = log_probs[-1].detach() - torch.tensor(rollout.log_ratios, dtype=torch.float64)
        rollouts.append(replace(rollout, old_log_probs=old.float().tolist()))
    return _Forward(weights, log_probs, rollouts)


def rollouts_of(shape: GptShape) -> list[Rollout]:
    """The step's samples, with log-probs of an old policy that some tokens are clipped against."""
    return _forward(shape).rollouts


@dataclass(frozen=True)
class Step:
    """The right results of one optimizer step."""

    gradients: dict[str, Tensor]
    grad_norm: float
    metrics: dict[str, float]
    scales: dict[str, float]  # metrics of absolute values: what their rounding errors are relative to
    weights: dict[str, Tensor]  # afterwards
    first_weights: dict[str, Tensor]


@functools.cache
def step_of(shape: GptShape, mode: str, units: str) -> Step:
    forward = _forward(shape)
    losses, clipped, kl = [], [], []
    for rollout, log_probs in zip(forward.rollouts, forward.log_probs, strict=True):
        advantages = torch.tensor(rollout.advantages).double()  # float32 is what the model's side is given
        log_ratios = log_probs - torch.tensor(rollout.old_log_probs, dtype=torch.float64)
        ratios = log_ratios.exp()
        bounded = ratios.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        losses.append(-torch.minimum(ratios * advantages, bounded * advantages))
        clipped.append((bounded * advantages < ratios * advantages).double())
        kl.append(-log_ratios.detach())

    def samples(values: list[Tensor]) -> list[oracle.Sample]:
        return [
            oracle.Sample(value, torch.tensor(rollout.mask), rollout.rollout_id, rollout.prompt_id)
            for value, rollout in zip(values, forward.rollouts, strict=True)
        ]

    divisor = oracle.divisor_of(mode, DIVISOR)
    loss = oracle.step_loss(mode, samples(losses), divisor, units)
    names = list(forward.weights)
    gradients = torch.autograd.grad(loss, [forward.weights[name] for name in names], retain_graph=True)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    factor = min(1.0, CLIP_GRAD / (norm + 1e-6))
    after = {}
    for name, gradient in zip(names, gradients, strict=True):
        first = (1 - BETA1) * gradient * factor / (1 - BETA1)
        second = (1 - BETA2) * (gradient * factor).square() / (1 - BETA2)
        after[name] = forward.weights[name].detach() - LEARNING_RATE * first / (second.sqrt() + ADAM_EPSILON)
    means = {"clip_fraction": clipped, "ppo_kl": kl}
    return Step(
        gradients=dict(zip(names, gradients, strict=True)),
        grad_norm=norm,
        metrics={
            "pg_loss": loss.item(),
            **{name: float(oracle.step_loss("sample_mean", samples(v), None, "active")) for name, v in means.items()},
        },
        scales={
            "pg_loss": oracle.step_scale(mode, samples([loss.detach() for loss in losses]), divisor, units),
            **{name: oracle.step_scale("sample_mean", samples(v), None, "active") for name, v in means.items()},
        },
        weights=after,
        first_weights={name: weight.detach() for name, weight in forward.weights.items()},
    )
