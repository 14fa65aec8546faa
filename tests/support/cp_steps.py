"""Steps on real context-parallel (CP) groups over gloo: token losses and their gradient, to be compared with float64.

Four ranks hold a step: 4 / cp_size data-parallel ranks of two micro-batches each, laid out by `placements`, so that the
oracle says which tokens a rank holds. A loss is a function of a micro-batch's tokens, here and in the oracle; the
step's is the sum of its tokens' times fixed coefficients and mask entries. All in float64.

No `World`: there is neither a model nor Megatron, without which tests of the core must run.
"""

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import oracle
import torch
import torch.distributed as dist
from oracle import Token
from placements import CP_SIZES, PLACES, Place, bshd, laid_out
from ranks import start_process_group
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals
from megatron_rl_loss.core.samples import LocalTokens

RANKS = 4
NUM_MICROBATCHES = 2
DIVISOR = 7.0
CASES = list(itertools.product(PLACES, CP_SIZES))


@dataclass(frozen=True)
class Rollout:
    """One sample of a step: values a token, float64 numbers that float32 holds exactly."""

    mask: Tensor
    values: dict[str, Tensor]
    rollout_id: str
    prompt_id: str

    @property
    def turns(self) -> list[str]:
        """Turns of tokens: two of four tokens, which come again, also in the rollout's other sample; "" is none."""
        masked = self.mask.tolist()
        return ["" if not m and t % 3 else f"{self.rollout_id} {t // 4 % 2}" for t, m in enumerate(masked)]


def rollouts(seed: int = 3) -> list[Rollout]:
    """Ragged samples: fractional masks, two fully masked, log-ratios on both sides of every clip range.

    Samples 4 and 5 are one rollout, and so are 7 and 8; at masked positions anything finite.
    """
    rng = random.Random(seed)
    step = []
    for i, length in enumerate([5, 1, 12, 3, 8, 2, 17, 6, 1, 9, 4]):
        mask = [rng.choice([1, 0.5, 1, 0]) for _ in range(length)]
        if i in (1, 7):
            mask = [0] * length
        elif not any(mask):
            mask[-1] = 1

        def drawn(low: float, high: float, length: int = length) -> Tensor:
            return torch.tensor([rng.uniform(low, high) for _ in range(length)])

        old = drawn(-4, -1)
        width = rng.choice([0.002, 0.1, 0.8, 2])  # GSPO's ranges are narrow, PPO's are not
        values = {
            "log_probs": old + drawn(-width, width) + rng.uniform(-width, width) / 3,
            "old_log_probs": old,
            "rollout_log_probs": old + drawn(-0.6, 0.6),
            "advantages": rng.choice([-1, 1]) * rng.uniform(0.3, 2) * torch.ones(length),
            "token_advantages": drawn(-2, 2),
            "coefficients": drawn(-1, 1),
        }
        joined = {5: 4, 8: 7}.get(i, i)
        exact = {name: value.double() for name, value in values.items()}
        step.append(Rollout(torch.tensor(mask, dtype=torch.float32), exact, f"r{joined}", f"p{min(joined // 3, 2)}"))
    return step


@dataclass(frozen=True)
class Tokens:
    """A rank's part of a micro-batch, at hand for a loss."""

    local: LocalTokens
    cp_group: Any
    values: dict[str, Tensor]
    totals: StepTotals
    samples: Samples


#: A loss on a rank, and the same stated for one whole sample (values, mask) in float64: a value a token.
Loss = Callable[[Tokens], Tensor]
Formula = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    """A rank's share, and the slope at each token it holds, by (sample, position)."""

    share: float
    slopes: dict[Token, float]


def dealt(num_samples: int, dp_size: int) -> list[list[list[int]]]:
    """Samples of each micro-batch of each data-parallel rank: whole rollouts, uneven, one micro-batch empty."""
    hands: list[list[int]] = [[] for _ in range(dp_size * NUM_MICROBATCHES)]
    filled = hands[:-1]
    rng = random.Random(11)
    for i in range(num_samples):
        home = next((hand for hand in filled if i in (5, 8) and i - 1 in hand), None) or rng.choice(filled)
        home.append(i)
    return [hands[rank::dp_size] for rank in range(dp_size)]


def flat(step: Sequence[Rollout], chosen: Sequence[int], held: Sequence[Token], name: str) -> Tensor:
    """A rank's values of a name; padding is a finite number that must not matter."""
    numbers = [step[chosen[at[0]]].values[name][at[1]].item() if at else -0.25 for at in held]
    return torch.tensor(numbers, dtype=torch.float64)


def run_on_ranks(
    losses: dict[str, Loss], cases: dict[str, set[tuple[str, int]]]
) -> dict[tuple[str, str, int], Outcome]:
    """On a rank: every loss in its layouts and CP sizes, differentiated by the log-probs."""
    start_process_group()
    # Of consecutive ranks; every rank must make every group.
    groups = {size: [dist.new_group(list(range(k, k + size))) for k in range(0, RANKS, size)] for size in CP_SIZES}
    rank, step, outcomes = int(os.environ["RANK"]), rollouts(), {}
    masks = [rollout.mask for rollout in step]
    totals = StepTotals.of(Samples(masks, **ids_of(step, [*map(len, masks)])), dp_group=None)
    for place, cp_size in CASES:
        dp_rank, cp_rank = divmod(rank, cp_size)
        group = groups[cp_size][dp_rank] if cp_size > 1 else None
        hands = [
            (chosen, *hand_of(step, chosen, place, cp_size, cp_rank, group, totals))
            for chosen in dealt(len(step), RANKS // cp_size)[dp_rank]
            if chosen or place is not bshd  # there are no batches of no rows
        ]
        for name, loss in losses.items():
            if (place.__name__, cp_size) not in cases[name]:
                continue
            share = 0.0
            slopes: dict[Token, float] = {}
            for chosen, tokens, held in hands:
                leaf = tokens.values["log_probs"].detach().requires_grad_()
                losses_here = loss(replace(tokens, values={**tokens.values, "log_probs": leaf}))
                mask = torch.from_numpy(tokens.local.mask).view(leaf.shape) / tokens.local.copies
                part = (losses_here.masked_fill(mask == 0, 0) * mask * tokens.values["coefficients"]).sum()
                part.backward()
                share += float(part.detach())
                assert leaf.grad is not None
                for at, slope in zip(held, leaf.grad.flatten().tolist(), strict=True):
                    if at is None:
                        assert slope == 0, (name, place.__name__, cp_size)
                    else:
                        key = chosen[at[0]], at[1]
                        slopes[key] = slopes.get(key, 0) + slope
            outcomes[name, place.__name__, cp_size] = Outcome(share, slopes)
    dist.barrier()
    return outcomes


def ids_of(step: Sequence[Rollout], lengths: Sequence[int]) -> dict[str, Any]:
    turns = [
        [*rollout.turns, *[""] * (length - len(rollout.mask))] for rollout, length in zip(step, lengths, strict=True)
    ]
    named = {
        "rollout_ids": [rollout.rollout_id for rollout in step],
        "prompt_ids": [rollout.prompt_id for rollout in step],
    }
    return {**named, "ids": {"turn": turns}}


def hand_of(
    step: Sequence[Rollout], chosen: Sequence[int], place: Place, cp_size: int, cp_rank: int, group: Any, totals: Any
) -> tuple[Tokens, list[Token]]:
    """A rank's part of a micro-batch, and which tokens it is by the oracle."""
    placed = laid_out(place, tuple(len(step[i].mask) for i in chosen), cp_size)
    lengths = placed.mask_lengths or [len(step[i].mask) for i in chosen]
    masks = [
        torch.nn.functional.pad(step[i].mask, (0, length - len(step[i].mask)))
        for i, length in zip(chosen, lengths, strict=True)
    ]
    samples = Samples(masks, layout=placed.layout, **ids_of([step[i] for i in chosen], lengths))
    held = placed.held[cp_rank]
    shape = placed.shape(len(held)) if chosen else (len(held),)
    values = {name: flat(step, chosen, held, name).reshape(shape) for name in step[0].values}
    return Tokens(samples.local(cp_rank, cp_size), group, values, totals, samples), held


def expected(formula: Formula, per: str) -> tuple[float, dict[Token, float], float]:
    """Value, slope at each token, and scale of the step's loss; `per` rollout or turn joins its tokens."""
    step = rollouts()
    leaves = [rollout.values["log_probs"].clone().requires_grad_() for rollout in step]
    units: dict[object, list[tuple[int, int]]] = {}
    for i, rollout in enumerate(step):
        for t, turn in enumerate(rollout.turns):
            units.setdefault({"rollout": rollout.rollout_id, "sample": i, "turn": turn}[per], []).append((i, t))
    units.pop("", None)  # tokens of no turn are masked
    terms = list[Tensor]()
    for members in units.values():
        joined = {name: torch.stack([step[i].values[name][t] for i, t in members]) for name in step[0].values}
        joined["log_probs"] = torch.stack([leaves[i][t] for i, t in members])
        mask = torch.stack([step[i].mask[t] for i, t in members]).double()
        terms.append((formula(joined, mask) * mask * joined["coefficients"])[mask != 0])
    loss = torch.cat(terms)
    slopes = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
    of_tokens: dict[Token, float] = {
        (i, t): entry for i, slope in enumerate(slopes) for t, entry in enumerate(slope.tolist())
    }
    return float(loss.detach().sum()), of_tokens, float(loss.detach().abs().sum())


def error_of(parts: Sequence[Outcome], value: float, slopes: dict[Token, float], scale: float) -> float:
    """The worse of value's and gradient's error of the sum over all ranks, as `oracle.worst_error`."""
    slopes_of_ranks: dict[Token, float] = {}
    for at, slope in (entry for part in parts for entry in part.slopes.items()):
        slopes_of_ranks[at] = slopes_of_ranks.get(at, 0) + slope
    assert slopes_of_ranks.keys() == slopes.keys()
    largest = max(map(abs, slopes.values()))
    in_gradient = oracle.worst_of(*(abs(slopes_of_ranks[at] - slopes[at]) / largest for at in slopes))
    return oracle.worst_error(abs(sum(part.share for part in parts) - value) / scale, in_gradient, len(slopes))
