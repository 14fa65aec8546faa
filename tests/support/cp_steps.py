"""Whole steps on real context-parallel (CP) groups over gloo: a loss's value and gradient, to be compared with float64.

Four ranks hold a step: 4 / cp_size data-parallel ranks of two micro-batches each, laid out by `placements`, so that
what a rank holds is the oracle's word. A loss is a function of a micro-batch's tokens, here and in the oracle.
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

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer
from megatron_rl_loss.step import LocalTokens

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

    def moved(self, name: str, values: Tensor) -> "Rollout":
        return replace(self, values={**self.values, name: values})


def rollouts(seed: int = 3, *, flags: bool = False) -> list[Rollout]:
    """Ragged samples: fractional masks or 0/1, two fully masked, log-ratios on both sides of every clip range.

    Samples 4 and 5 are one rollout, and so are 7 and 8; at masked positions anything finite.
    """
    rng = random.Random(seed)
    step = []
    for i, length in enumerate([5, 1, 12, 3, 8, 2, 17, 6, 1, 9, 4]):
        mask = [rng.choice([1, 1, 0] if flags else [1, 0.5, 1, 0]) for _ in range(length)]
        if i in (1, 7):
            mask = [0] * length
        elif not any(mask):
            mask[-1] = 1
        sign = rng.choice([-1, 1])

        def drawn(low: float, high: float, length: int = length) -> Tensor:
            return torch.tensor([rng.uniform(low, high) for _ in range(length)])

        old = drawn(-4, -1)
        width = rng.choice([0.002, 0.1, 0.8])  # GSPO's ranges are narrow, PPO's are not
        values = {
            "log_probs": old + drawn(-width, width) + rng.uniform(-width, width) / 3,
            "old_log_probs": old,
            "rollout_log_probs": old + drawn(-0.6, 0.6),
            "ref_log_probs": drawn(-4, -1),
            "advantages": sign * rng.uniform(0.3, 2) * torch.ones(length),
            "token_advantages": drawn(-2, 2),
            "values": drawn(-1, 1),
            "old_values": drawn(-1, 1),
            "returns": drawn(-1, 1),
            "entropy": drawn(0, 2),
        }
        joined = {5: 4, 8: 7}.get(i, i)
        exact = {name: value.double() for name, value in values.items()}
        step.append(Rollout(torch.tensor(mask, dtype=torch.float32), exact, f"r{joined}", f"p{min(joined // 3, 2)}"))
    return step


@dataclass(frozen=True)
class Tokens:
    """What a rank has in hand of a micro-batch when it computes a loss."""

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
    """What a rank, or all together, found: its share and the slope at each token, (sample, position) -> slope."""

    share: float
    slopes: dict[Token, float]


def groups_of(cp_size: int) -> list[Any]:
    """CP groups of consecutive ranks; every rank must call it."""
    return [dist.new_group(list(range(first, first + cp_size))) for first in range(0, RANKS, cp_size)]


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
    losses: dict[str, Loss], wanted: dict[str, str], modes: dict[str, str], flags: bool = False
) -> dict[tuple[str, str, int], Outcome]:
    """On a rank: every loss in every layout and CP size, differentiated by the values of a name (`wanted`)."""
    start_process_group()
    groups = {cp_size: groups_of(cp_size) for cp_size in CP_SIZES}
    rank, step, found = int(os.environ["RANK"]), rollouts(flags=flags), {}
    ids: Any = {"rollout_ids": [one.rollout_id for one in step], "prompt_ids": [one.prompt_id for one in step]}
    totals = StepTotals.from_loss_masks([one.mask for one in step], dp_group=None, **ids)
    for (place, cp_size), name in itertools.product(CASES, losses):
        dp_rank, cp_rank = divmod(rank, cp_size)
        group = groups[cp_size][dp_rank] if cp_size > 1 else None
        share, slopes = 0.0, {}
        for chosen in dealt(len(step), RANKS // cp_size)[dp_rank]:
            if not chosen and place is bshd:
                continue  # there are no batches of no rows
            tokens, held = hand_of(step, chosen, place, cp_size, cp_rank, group, totals)
            leaf = tokens.values[wanted[name]].requires_grad_()
            mode = modes.get(name, "sample_mean")
            reducer = make_pg_loss_reducer(
                mode,
                tokens.samples.loss_masks,
                totals=totals,
                divisor=DIVISOR if mode in ("constant", "token_sum") else None,
                rollout_ids=[step[i].rollout_id for i in chosen],
                prompt_ids=[step[i].prompt_id for i in chosen],
                layout=tokens.samples.layout,
                cp_rank=cp_rank,
                cp_size=cp_size,
            )
            part = reducer(losses[name](tokens))
            part.backward()
            share += float(part.detach())
            for at, slope in zip(held, leaf.grad.flatten().tolist(), strict=True):
                if at is None:
                    assert slope == 0, (name, place.__name__, cp_size)
                else:
                    key = chosen[at[0]], at[1]
                    slopes[key] = slopes.get(key, 0) + slope
        found[name, place.__name__, cp_size] = Outcome(share, slopes)
    dist.barrier()
    return found


def hand_of(
    step: Sequence[Rollout], chosen: Sequence[int], place: Place, cp_size: int, cp_rank: int, group: Any, totals: Any
) -> tuple[Tokens, list[Token]]:
    """A rank's part of a micro-batch, and which tokens it is by the oracle."""
    placed = laid_out(place, tuple(len(step[i].mask) for i in chosen), cp_size)
    lengths = placed.mask_lengths or [len(step[i].mask) for i in chosen]
    masks = [
        torch.cat([step[i].mask, torch.zeros(length - len(step[i].mask))])
        for i, length in zip(chosen, lengths, strict=True)
    ]
    samples = Samples(
        masks,
        layout=placed.layout,
        rollout_ids=[step[i].rollout_id for i in chosen],
        prompt_ids=[step[i].prompt_id for i in chosen],
    )
    held = placed.held[cp_rank]
    shape = placed.shape(len(held)) if chosen else (len(held),)
    values = {name: flat(step, chosen, held, name).reshape(shape) for name in step[0].values}
    return Tokens(samples.local(cp_rank, cp_size), group, values, totals, samples), held


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """The step's value and slopes: what all ranks add up to."""
    slopes: dict[Token, float] = {}
    for outcome in outcomes:
        for at, slope in outcome.slopes.items():
            slopes[at] = slopes.get(at, 0) + slope
    return Outcome(sum(outcome.share for outcome in outcomes), slopes)


def expected(
    formula: Formula, wanted: str, mode: str = "sample_mean", *, flags: bool = False, per: str = "sample"
) -> tuple[float, dict[Token, float], float]:
    """Value, slope at each token, and scale of the step's loss in float64; `per` rollout joins its samples."""
    step = rollouts(flags=flags)
    leaves = [one.values[wanted].clone().requires_grad_() for one in step]
    moved = [one.moved(wanted, leaf) for one, leaf in zip(step, leaves, strict=True)]
    units: dict[object, list[Rollout]] = {}
    for i, one in enumerate(moved):
        units.setdefault(one.rollout_id if per == "rollout" else i, []).append(one)
    losses = []
    for members in units.values():
        joined = {name: torch.cat([one.values[name] for one in members]) for name in members[0].values}
        whole = formula(joined, torch.cat([one.mask for one in members]).double())
        losses += list(whole.split([len(one.mask) for one in members]))
    samples = [
        oracle.Sample(loss, one.mask, one.rollout_id, one.prompt_id) for loss, one in zip(losses, moved, strict=True)
    ]
    divisor = DIVISOR if mode in ("constant", "token_sum") else None
    loss = oracle.step_loss(mode, samples, divisor)
    slopes = torch.autograd.grad(loss, leaves, materialize_grads=True)
    of_tokens: dict[Token, float] = {(i, t): x for i, slope in enumerate(slopes) for t, x in enumerate(slope.tolist())}
    detached = [replace(one, losses=one.losses.detach()) for one in samples]
    return float(loss.detach()), of_tokens, oracle.step_scale(mode, detached, divisor)


def error_of(outcome: Outcome, value: float, slopes: dict[Token, float], scale: float) -> float:
    """The worse of value's and gradient's error, as `oracle.worst_error`: at most `oracle.EXACT`."""
    assert outcome.slopes.keys() == slopes.keys()
    largest = max(map(abs, slopes.values()))
    in_gradient = oracle.worst_of(*(abs(outcome.slopes[at] - slopes[at]) / largest for at in slopes))
    return oracle.worst_error(abs(outcome.share - value) / scale, in_gradient, len(slopes))
