"""A train_rl.py of Megatron-LM in small: rows, bins, the iterator's batches, its loss function.

As core_v0.19.0 and main d98e8a64 have them. No `World`: bins of rows are that script's micro-batches.
"""

import random
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

SEQ_LENGTH = 96


@dataclass
class Row:
    """A row of tokens: a mask entry a token, and the loss of every token but the first, at the position before it."""

    token_mask: Tensor
    losses: Tensor
    prompt: int

    @property
    def sample(self) -> oracle.Sample:
        return oracle.Sample(self.losses, self.token_mask[1:], None, self.prompt)


def make_rows(seed: int, num_rows: int) -> list[Row]:
    """Ragged rows whose prompts are masked; some masked in whole, as those that train_rl.py fills up with."""
    rng = random.Random(seed)
    rows = []
    for i in range(num_rows):
        length = rng.choice([2, 3, 5, 9, 14, 20])
        prompt = rng.randrange(1, length)
        mask = [0.0] * prompt + [float(rng.random() < 0.8) for _ in range(length - prompt)]
        if i in (1, 6):
            mask = [0.0] * length
        losses = torch.tensor([rng.uniform(-3, 3) for _ in range(length - 1)], dtype=torch.float64)
        rows.append(Row(torch.tensor(mask), losses, i // 3))
    return rows


@dataclass
class Bin:
    """A rank's micro-batch: rows (by number) in slots of a packed row, or a row each."""

    numbers: list[int]
    starts: list[int]
    packed: bool

    @staticmethod
    def pack(rows: list[Row], numbers: list[int], slot_multiple: int) -> "Bin":
        starts = [0]
        for i in numbers:
            starts.append(starts[-1] + -(-len(rows[i].token_mask) // slot_multiple) * slot_multiple)
        return Bin(numbers, starts, True)

    def slots(self, rows: list[Row]) -> list[list[oracle.Token]]:
        """The row and the place of the loss at each token position p of a slot; that loss is token p + 1's."""
        sizes = [SEQ_LENGTH] * len(self.numbers)
        if self.packed:
            sizes = [end - begin for begin, end in pairwise(self.starts)]
        slots: list[list[oracle.Token]] = [
            [(i, t) if t + 1 < len(rows[i].token_mask) else None for t in range(size)]
            for i, size in zip(self.numbers, sizes, strict=True)
        ]
        if self.packed and self.starts[-1] < SEQ_LENGTH:
            slots.append([None] * (SEQ_LENGTH - self.starts[-1]))
        return slots

    def held(self, rows: list[Row], cp_losses: str, cp_rank: int, cp: int) -> list[oracle.Token]:
        slots = self.slots(rows)
        if cp_losses == "sliced":
            return oracle.zigzag(slots, cp_rank, cp)
        whole = [token for slot in slots for token in slot]
        rest = [whole[k : k + SEQ_LENGTH] for k in range(0, len(whole), SEQ_LENGTH)]
        return [token for row in rest for token in row[:-1]]

    def shape(self, values: Tensor) -> Tensor:
        """[rows, positions]"""
        return values.reshape(1 if self.packed else len(self.numbers), -1)

    def token_masks(self, rows: list[Row]) -> Tensor:
        masks = torch.zeros(1 if self.packed else len(self.numbers), SEQ_LENGTH)
        for k, i in enumerate(self.numbers):
            begin = self.starts[k] if self.packed else 0
            masks[0 if self.packed else k, begin : begin + len(rows[i].token_mask)] = rows[i].token_mask
        return masks


def runtime_state(bins: list[Bin], rows: list[Row]) -> SimpleNamespace:
    """Megatron's RL runtime state, as far as it tells of the packing of one DP rank."""
    masks = torch.cat([packed_bin.token_masks(rows) for packed_bin in bins]) if bins else torch.zeros(0, SEQ_LENGTH)
    info = SimpleNamespace(
        bin_seq_indices=[packed_bin.numbers for packed_bin in bins],
        seq_starts={k: packed_bin.starts if packed_bin.numbers else [] for k, packed_bin in enumerate(bins)},
        seq_lengths=[len(row.token_mask) for row in rows],
    )
    return SimpleNamespace(packing_context=SimpleNamespace(packed_loss_mask=masks, packing_info=info))


def install_state(state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(get_rl_runtime_state=lambda: state)
    for name, value in (("megatron.rl", ModuleType("megatron.rl")), ("megatron.rl.rl_utils", module)):
        monkeypatch.setitem(sys.modules, name, value)


def batch_of(packed_bin: Bin, rows: list[Row], index: int) -> Any:
    if packed_bin.packed:
        return (torch.tensor(index),)
    masks = packed_bin.token_masks(rows)
    nothing = torch.zeros(len(packed_bin.numbers))
    return [nothing, nothing, nothing, masks, nothing, nothing, nothing]


def loss_func(
    loss_mask: Tensor, kl_term: Tensor, ratios: Tensor, entropy_term: Tensor, truncated_from_above: Tensor,
    truncated_from_below: Tensor, output_tensor: Tensor,
) -> Any:  # fmt: skip
    """train_rl.py's (0.19 at cp 1, main): a bin's token sum and its token count, of at least 1."""
    total = loss_mask.sum().clamp(min=1)
    losses = torch.nan_to_num(output_tensor)
    return (losses * loss_mask).sum(), total.int(), {}


def terms(output: Tensor, loss_mask: Tensor) -> Any:
    values = output.detach()
    return partial(loss_func, loss_mask, 2 * values, 3 * values, 4 * values, values > 0, values < -1)


def step_of(seed: int, dp: int, cp: int, *, packed: bool, cp_losses: str) -> tuple[list[Row], list[list[Bin]]]:
    """Rows dealt unevenly over bins of DP ranks: all ranks have three bins, some may be empty when packed."""
    rows = make_rows(seed, 13)
    rng = random.Random(seed)
    # 2 * cp as main pads slots under context parallelism; unaligned without it.
    multiple = 2 * cp if cp_losses == "sliced" or cp > 1 else 1
    dealt: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(dp)]
    for i in rng.sample(range(len(rows)), len(rows)):
        fits = [
            numbers
            for bins in dealt
            for numbers in bins
            if not packed or Bin.pack(rows, [*numbers, i], multiple).starts[-1] <= SEQ_LENGTH
        ]
        rng.choice(fits).append(i)
    everyone = [numbers for bins in dealt for numbers in bins]
    for numbers in everyone:
        if not packed and not numbers:  # every unpacked micro-batch has a row
            numbers.append(max(everyone, key=len).pop())
    pack = partial(Bin.pack, rows, slot_multiple=multiple) if packed else partial(Bin, starts=[], packed=False)
    return rows, [[pack(numbers=numbers) for numbers in bins] for bins in dealt]
