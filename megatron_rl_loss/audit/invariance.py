"""`check_reducer`: does a mode give every token the same weight however a step is cut? Try your own before training."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.audit.drawn_steps import DrawnStep
from megatron_rl_loss.modes.names import resolve
from megatron_rl_loss.modes.table import ModeFunction, OwnMode
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.step.layouts import Contiguous, Gathered, Layout, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals, UnitCounting


@dataclass(frozen=True)
class Breach:
    """A cut under which tokens have other weights than in the uncut step; of all that were seen, on the smallest step.

    Attributes:
        cut: how the step was cut.
        found, expected: the weight of the token that is furthest off, with the cut and without.
        samples: how many samples the step had.
        error: what the mode raised, if it did; then there are no weights.
    """

    cut: str
    found: float
    expected: float
    samples: int
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.cut}: it raises {self.error} (a step of {self.samples} samples)"
        factor = f", a factor of {self.found / self.expected:.4g}" if self.expected else ""
        numbers = f"a token weighs {self.found:.6g} where it should weigh {self.expected:.6g}{factor}"
        return f"{self.cut}: {numbers} (a step of {self.samples} samples)"


@dataclass(frozen=True)
class ModeReport:
    """What `check_reducer` found.

    Attributes:
        mode: the mode's name.
        draws: random steps that were tried.
        lowest_sum, highest_sum: the sum of all weights of a step, over the draws: 1 for a mean.
        negative: whether a weight was below 0.
        breaches: one a cut that changes weights; none if the mode is invariant.
    """

    mode: str
    draws: int
    lowest_sum: float
    highest_sum: float
    negative: bool
    breaches: tuple[Breach, ...]

    @property
    def invariant(self) -> bool:
        return not self.breaches

    def __str__(self) -> str:
        verdict = "the same weights in every cut" if self.invariant else "NOT invariant"
        sums = f"weights of a step sum to {self.lowest_sum:.6g} to {self.highest_sum:.6g}"
        lines = [f"{self.mode}: {verdict}, {self.draws} random steps; {sums}"]
        lines += ["some weights are below 0"] if self.negative else []
        return "\n".join([*lines, *map(str, self.breaches)])


def check_reducer(
    mode: str | ModeFunction,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    draws: int = 20,
    seed: int = 0,
) -> ModeReport:
    """Draw ragged steps, cut each into micro-batches and CP ranks in every layout, and compare the weights of tokens.

    Cutting over data-parallel ranks is cutting into micro-batches: totals are the whole step's either way.

    >>> print(check_reducer("token_mean", draws=3))
    token_mean: the same weights in every cut, 3 random steps; weights of a step sum to 1 to 1

    Args:
        mode, divisor, units: as in `make_pg_loss_reducer`.
        draws: random steps; half of them with rollouts that are split over samples.
        seed: of the random steps.

    Raises:
        ValueError, TypeError: what `make_pg_loss_reducer` says of the mode's name and the divisor.
    """
    aggregation = resolve(mode, divisor=divisor, units=units)
    sums: list[float] = []
    negative = False
    worst: dict[str, Breach] = {}
    for draw in range(draws):
        step = DrawnStep.random(random.Random(f"{seed}/{draw}"), split_rollouts=draw % 2 == 1)
        declared = aggregation.mode.statistics if isinstance(aggregation.mode, OwnMode) else {}
        totals = step.totals_with(declared)

        def weights_of(
            chosen: Sequence[int], cut: "_Cut", step: DrawnStep = step, totals: StepTotals = totals
        ) -> list[Tensor]:
            return cut.token_weights(
                step, chosen, lambda samples, rank, size: weigh(aggregation, samples.local(rank, size), totals)
            )

        everything = range(len(step.masks))
        whole = torch.cat(weights_of(everything, _UNCUT))
        sums.append(float(whole.double().sum()))
        negative |= bool((whole < 0).any())
        for cut in _CUTS:
            try:
                parts = [part for chosen in cut.microbatches(everything) for part in weights_of(chosen, cut)]
                breach = _compare(cut.name, torch.cat(parts), whole, len(step.masks))
            except Exception as error:
                breach = Breach(cut.name, 0, 0, len(step.masks), error=f"{type(error).__name__}: {error}")
            if breach and (cut.name not in worst or breach.samples < worst[cut.name].samples):
                worst[cut.name] = breach
    return ModeReport(aggregation.mode.name, draws, min(sums), max(sums), negative, tuple(worst.values()))


def _compare(cut: str, found: Tensor, expected: Tensor, samples: int) -> Breach | None:
    off = (found.double() - expected.double()).abs()
    # A few roundings of float32.
    allowed = 1e-6 * torch.maximum(found.abs(), expected.abs()).double()
    if bool((off <= allowed).all()):
        return None
    at = int((off - allowed).argmax())
    return Breach(cut, float(found[at]), float(expected[at]), samples)


@dataclass(frozen=True)
class _Cut:
    """A way of cutting a step: micro-batches of `size` samples (None: one of all), a layout, a number of CP ranks."""

    name: str
    size: int | None
    layout: Callable[[list[int], int], Layout] | None = None
    cp_size: int = 1
    pad_masks: bool = False

    def microbatches(self, everything: Sequence[int]) -> Iterator[Sequence[int]]:
        size = self.size or len(everything)
        for begin in range(0, len(everything), size):
            yield everything[begin : begin + size]

    def token_weights(
        self, step: DrawnStep, chosen: Sequence[int], weigh_rank: Callable[[Samples, int, int], Tensor]
    ) -> list[Tensor]:
        """The weight of each mask entry of the chosen samples, added up over CP ranks."""
        masks = [step.masks[i] for i in chosen]
        lengths = [len(mask) for mask in masks]
        layout = None if self.layout is None else self.layout(lengths, self.cp_size)
        if self.pad_masks:
            slots = [_padded(length, self.cp_size) for length in lengths]
            masks = [
                torch.nn.functional.pad(mask, (0, slot - len(mask))) for mask, slot in zip(masks, slots, strict=True)
            ]
        samples = Samples(
            masks,
            layout=layout,
            prompt_ids=[step.prompt_ids[i] for i in chosen],
            labels={
                name: [_as_long(entries[i], mask) for i, mask in zip(chosen, masks, strict=True)]
                for name, entries in step.labels.items()
            },
            rollout_ids=None if step.rollout_ids is None else [step.rollout_ids[i] for i in chosen],
        )
        buffer = torch.zeros(samples.total_tokens)
        for rank in range(self.cp_size):
            positions = samples.local(rank, self.cp_size).positions
            buffer.index_add_(0, positions, weigh_rank(samples, rank, self.cp_size))
        marks = samples.in_buffer([torch.full((len(mask),), i + 1) for i, mask in enumerate(masks)])
        return [buffer[marks == i + 1][:length] for i, length in enumerate(lengths)]


def _as_long(entry: Any, mask: Tensor) -> Any:
    """A label of each token, as long as a padded mask."""
    return torch.nn.functional.pad(entry, (0, len(mask) - len(entry)), value=-1) if isinstance(entry, Tensor) else entry


def _padded(length: int, cp_size: int) -> int:
    return -(-length // (2 * cp_size)) * 2 * cp_size + 2 * cp_size  # a chunk more than is needed


def _bounds(lengths: list[int], cp_size: int) -> list[int]:
    return [0, *np.cumsum([_padded(length, cp_size) for length in lengths]).tolist()]


_UNCUT = _Cut("uncut", None)
_CUTS = (
    _Cut("micro-batches of 1 sample", 1),
    _Cut("micro-batches of 2 samples", 2),
    _Cut("unpadded masks in padded slots", 2, lambda n, cp: ZigzagTHD(_bounds(n, cp), total_lengths=n)),
    _Cut("padded masks", 2, lambda n, cp: ZigzagTHD(_bounds(n, cp)), pad_masks=True),
    *(_Cut(f"zigzag, CP {cp}", 2, lambda n, cp: ZigzagTHD(_bounds(n, cp), total_lengths=n), cp) for cp in (2, 4)),
    _Cut("zigzag, CP 2, padded masks", None, lambda n, cp: ZigzagTHD(_bounds(n, cp)), 2, pad_masks=True),
    _Cut("contiguous, CP 2", 2, lambda n, cp: Contiguous(_bounds(n, cp), total_lengths=n), 2),
    _Cut("responses alone, CP 2", 2, lambda n, cp: ZigzagResponse([length + 3 for length in n], n), 2),
    _Cut("gathered, CP 2", 2, lambda n, cp: Gathered(_bounds(n, cp), total_lengths=n), 2),
)
