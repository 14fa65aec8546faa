"""A small trainer in plain torch: D data-parallel x C context-parallel ranks x K micro-batches, in one process.

Tokens have a loss each, which a model with one parameter, the *anchor*, scales by 1. A loss function sees what one CP
rank holds of one micro-batch and returns what its framework wants. The trainer scales and reduces gradients as that
framework does, and the weights of tokens are measured as an audit measures them: the gradient of each token's loss on
its rank, times what the reduced gradient of the anchor is to the sum of its local ones.

Numbers of a step (`Numbers`) are counted here in float64 from the plain lists, for what tests expect.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit.tokens import MeasuredStep, Split, StepTokens


@dataclass(frozen=True)
class Row:
    """One sample: its mask, and the units it belongs to."""

    mask: tuple[float, ...]
    rollout: int
    prompt: int


@dataclass(frozen=True)
class Step:
    """``rows[dp_rank][microbatch]`` are samples.

    `length` is what every row is padded to where rows are not packed (BSHD), None where they are.
    """

    rows: Sequence[Sequence[Sequence[Row]]]
    cp_size: int = 1
    tp_size: int = 1
    length: int | None = None

    @property
    def D(self) -> int:
        return len(self.rows)

    @property
    def K(self) -> int:
        return len(self.rows[0])

    @property
    def C(self) -> int:
        return self.cp_size

    @cached_property
    def numbers(self) -> "Numbers":
        return Numbers(self)

    def holder(self, position: int, length: int) -> int:
        """The CP rank of a position in its row: the zigzag."""
        chunk = -(-(self.length or length) // (2 * self.C))
        return min(position // chunk, 2 * self.C - 1 - position // chunk)


class Numbers:
    """Counts of a step, in float64. d, k, c number DP ranks, micro-batches and CP ranks; i samples of the step."""

    def __init__(self, step: Step) -> None:
        self.D, self.K, self.C, self.TP = step.D, step.K, step.C, step.tp_size
        self.rows = [row for rank in step.rows for chosen in rank for row in chosen]
        self.where = [(d, k) for d, rank in enumerate(step.rows) for k, chosen in enumerate(rank) for _ in chosen]
        self.M = [sum(row.mask) for row in self.rows]
        self.T = sum(self.M)
        self.N = len({row.rollout for row in self.rows})
        self.lengths = [len(row.mask) for row in self.rows]
        self.n = {(d, k): 0.0 for d in range(self.D) for k in range(self.K)}
        self.samples = dict.fromkeys(self.n, 0)
        self.piece = {(d, k, c): 0.0 for d, k in self.n for c in range(self.C)}
        for row, (d, k) in zip(self.rows, self.where, strict=True):
            self.n[d, k] += sum(row.mask)
            self.samples[d, k] += 1
            for position, entry in enumerate(row.mask):
                self.piece[d, k, step.holder(position, len(row.mask))] += entry
        self.masked = [i for i, tokens in enumerate(self.M) if tokens == 0]

    def rank(self, d: int) -> float:
        return sum(tokens for (dp, _), tokens in self.n.items() if dp == d)

    def filled(self, d: int) -> int:
        """Micro-batches of the rank that have an active token."""
        return sum(self.n[d, k] > 0 for k in range(self.K))

    def first_row(self, d: int, k: int) -> Row:
        return self.rows[self.where.index((d, k))]

    def by_microbatch(self, factor: Callable[[int, int], float]) -> dict[str, float]:
        return {f"DP {d}, micro-batch {k}": factor(d, k) for d, k in self.n if self.n[d, k]}

    def by_piece(self, factor: Callable[[int, int, int], float]) -> dict[str, float]:
        return {f"DP {d}, micro-batch {k}, CP {c}": factor(d, k, c) for d, k, c in self.piece if self.piece[d, k, c]}

    def by_rank(self, factor: Callable[[int], float]) -> dict[str, float]:
        return {f"DP {d}": factor(d) for d in range(self.D) if self.rank(d)}

    def by_sample(self, factor: Callable[[int], float]) -> dict[str, float]:
        return {f"sample {i}": factor(i) for i, tokens in enumerate(self.M) if tokens}


@dataclass
class Piece:
    """What a loss function sees: the tokens that one CP rank holds of one micro-batch.

    Attributes:
        losses, mask, sample: of those tokens; samples are numbered in the micro-batch.
        masks: the full masks of the micro-batch's samples.
        n: the micro-batch's mask tokens, on all CP ranks.
        of: counts of the step, where a trainer knows them.
        d, k, c: where this is.
        held: by which the tokens are numbered in the whole step, in the order of `losses`.
    """

    losses: Tensor
    mask: Tensor
    sample: Tensor
    masks: list[Tensor]
    of: Numbers
    d: int
    k: int
    c: int
    rows: Sequence[Row] = ()
    positions: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def sum(self) -> Tensor:
        return (self.losses * self.mask).sum()

    @property
    def n(self) -> Tensor:
        return sum((mask.sum() for mask in self.masks), torch.zeros(()))

    @property
    def n_here(self) -> Tensor:
        return self.mask.sum()

    @property
    def sums(self) -> Tensor:
        """Of each sample, what lies here, [num_samples]."""
        return torch.zeros(len(self.masks)).index_add(0, self.sample, self.losses * self.mask)

    @property
    def tokens(self) -> Tensor:
        """Mask tokens of each sample, on all CP ranks, [num_samples]."""
        return torch.stack([mask.sum() for mask in self.masks]) if self.masks else torch.zeros(0)


#: A loss, or a loss and a token count.
Returned = Tensor | tuple[Tensor, Tensor]
LossFunction = Callable[[Piece], Returned]
#: What becomes of the gradients: (scale of one piece's loss, scale of the sum), from the step and all token counts.
Contract = Callable[[Numbers, Tensor | None, Tensor], tuple[Tensor, Tensor]]

_ONE = torch.ones(())


# ---- what loss functions are made of


def some(count: Tensor) -> Tensor:
    """A count that is at least 1."""
    return count.clamp(min=1)


def share(p: Piece) -> Tensor:
    """The right share of a token mean."""
    return p.sum / p.of.T


def own_mean(p: Piece) -> Tensor:
    """The micro-batch's own token mean, averaged over all micro-batches."""
    return p.sum / some(p.n) / (p.of.D * p.of.K)


# ---- contracts


def summed(of: Numbers, count: Tensor | None, total: Tensor) -> tuple[Tensor, Tensor]:
    """Shares: nothing is scaled, everything is added up."""
    return _ONE, _ONE


def megatron(of: Numbers, count: Tensor | None, total: Tensor) -> tuple[Tensor, Tensor]:
    """The schedule divides by the count, if one is returned, or multiplies by C; and by K. DDP: mean over D x C."""
    first = torch.tensor(float(of.C)) if count is None else 1 / count
    return first / of.K, torch.tensor(1 / (of.D * of.C))


def megatron_per_token(of: Numbers, count: Tensor | None, total: Tensor) -> tuple[Tensor, Tensor]:
    """Sums, divided at the end by all counts; a loss without a count is scaled as ever, and nothing divides it."""
    if count is None:
        return torch.tensor(of.C / of.K), _ONE
    return _ONE, 1 / total


def plain_ddp(of: Numbers, count: Tensor | None, total: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients accumulate over micro-batches and CP ranks; DDP takes the mean over data-parallel ranks."""
    return _ONE, torch.tensor(1 / of.D)


def accumulate(of: Numbers, count: Tensor | None, total: Tensor) -> tuple[Tensor, Tensor]:
    """As a Hugging Face trainer does: divided by the number of accumulation steps, mean over ranks."""
    return torch.tensor(1 / of.K), torch.tensor(1 / of.D)


def measure(
    step: Step,
    loss_function: LossFunction,
    contract: Contract = summed,
    *,
    poisoned: bool = False,
    per_token: bool = False,
    lengths: bool = True,
    facts: dict[str, Any] | None = None,
) -> MeasuredStep:
    """One step, measured. `poisoned`: losses of masked tokens are NaN. `lengths`: say total lengths."""
    of = step.numbers
    generator = torch.Generator().manual_seed(len(of.rows))
    size = sum(of.lengths)
    values = torch.rand(size, generator=generator) + 0.5
    flat_mask = torch.tensor([entry for row in of.rows for entry in row.mask], dtype=torch.float64)
    if poisoned:
        values[flat_mask == 0] = torch.nan
    begin = np.cumsum([0, *of.lengths])
    holders = [step.holder(t, n) for n in of.lengths for t in range(n)]
    local = torch.zeros(())  # the anchor's gradient, summed as each rank has it
    reduced = torch.zeros(())
    returned = []
    for d, rank in enumerate(step.rows):
        for k, chosen in enumerate(rank):
            numbers = [i for i, place in enumerate(of.where) if place == (d, k)]
            for c in range(of.C):
                held = [at for i in numbers for at in range(begin[i], begin[i + 1]) if holders[at] == c]
                at = torch.tensor(held, dtype=torch.int64)
                owner = torch.tensor(
                    [j for j, i in enumerate(numbers) for at_ in range(begin[i], begin[i + 1]) if holders[at_] == c],
                    dtype=torch.int64,
                )
                anchor = torch.ones((), requires_grad=True)
                losses = values[at] * anchor
                losses.retain_grad()
                piece = Piece(
                    losses,
                    flat_mask[at].float(),
                    owner,
                    [torch.tensor(row.mask) for row in chosen],
                    of,
                    d,
                    k,
                    c,
                    chosen,
                )
                piece.positions = at - torch.tensor(begin)[torch.tensor(numbers)[owner]] if numbers else at
                out = loss_function(piece)
                returned.append((out if isinstance(out, tuple) else (out, None), losses, anchor, at))
    counts = [count for (_, count), *_ in returned if count is not None]
    total = torch.stack(counts).sum() if counts else torch.zeros(())
    weights = torch.zeros(size)
    scale = _ONE
    for (loss, count), losses, anchor, at in returned:
        first, scale = contract(of, count, total)
        if not loss.requires_grad:
            continue
        (loss * first).backward()
        if losses.grad is not None:
            weights.index_add_(0, at, losses.grad)
        if anchor.grad is not None:
            local = local + anchor.grad
            reduced = reduced + anchor.grad * scale
    factor = reduced / local if float(local) != 0 else scale
    return MeasuredStep(
        tokens=tokens_of(step, holders, lengths),
        weights=(weights * factor).double().numpy(),
        split=Split(
            num_microbatches=of.K, dp_size=of.D, cp_size=of.C, tp_size=of.TP, per_token=contract is megatron_per_token
        ),
        facts=facts or {},
    )


def tokens_of(step: Step, holders: Sequence[int], lengths: bool = True) -> StepTokens:
    of = step.numbers
    repeat = np.array(of.lengths, np.int64)
    each = {
        "sample": list(range(len(of.rows))),
        "dp_rank": [d for d, _ in of.where],
        "microbatch": [k for _, k in of.where],
        "rollout": [row.rollout for row in of.rows],
        "prompt": [row.prompt for row in of.rows],
    }
    columns = {name: np.repeat(np.array(values, np.int64), repeat) for name, values in each.items()}
    return StepTokens(
        mask=np.array([entry for row in of.rows for entry in row.mask]),
        position=np.array([t for n in of.lengths for t in range(n)], np.int64),
        cp_rank=np.array(holders, np.int64),
        total_lengths=repeat.astype(np.int64) if lengths else None,
        **columns,
    )


def ragged(
    seed: int,
    *,
    D: int = 3,
    C: int = 2,
    K: int = 5,
    TP: int = 1,
    samples: Sequence[int] = (1, 2, 3),
    split_rollouts: bool = False,
    fractional: bool = False,
    masked: float = 0.12,
    empty: Sequence[tuple[int, int]] = (),
    responses: bool = False,
    longest: int = 30,
    length: int | None = None,
    uneven_prompts: bool = False,
) -> Step:
    """A random step: masks of any kind, some samples fully masked, some micro-batches empty, rollouts apart or split.

    Prompts have three rollouts each, or uneven numbers.
    `responses`: masks are 0 up to a place and 1 from there on; otherwise they have holes.
    """
    rng = random.Random(seed)
    number = 0
    rows: list[list[list[Row]]] = []
    for d in range(D):
        rows.append([])
        for k in range(K):
            chosen = []
            for _ in range(rng.choice(samples)):
                n = length or rng.randrange(6, longest)
                if rng.random() < masked or (d, k) in empty:
                    mask = [0.0] * n
                elif responses:
                    prompt = rng.randrange(1, n - 2)
                    mask = [0.0] * prompt + [1.0] * (n - prompt)
                else:
                    mask = [float(rng.random() < 0.7) for _ in range(n)]
                    mask[rng.randrange(n)] = 1.0
                if fractional:
                    mask = [entry * rng.choice([1.0, 0.5, 0.25]) for entry in mask]
                rollout = number - 1 if split_rollouts and number and rng.random() < 0.4 else number
                number = max(number, rollout + 1)
                prompt_id = int(rollout**0.5) if uneven_prompts else rollout // 3
                chosen.append(Row(tuple(mask), rollout, prompt_id))
            rows[-1].append(chosen)
    return Step(rows, C, TP, length)
