"""Trainers, a row for each form of a return value: what becomes of a returned loss, stated apart from the carriers.

A test asks `trainer_of` for the row of a form, which names the form that has none.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """A step's split over micro-batches and ranks, and what its loss functions have counted."""

    num_microbatches: int  # of the rank
    dp_size: int
    cp_size: int
    num_tokens: float  # sum of the returned token counts
    rollouts: int

    @property
    def ranks(self) -> int:
        return self.dp_size * self.cp_size


def active_in(masks: Sequence[Tensor]) -> int:
    return sum(int((mask != 0).sum()) for mask in masks)


class Trainer(NamedTuple):
    """What a trainer makes of a return value."""

    #: What the gradient of a returned loss is multiplied by, until those of all ranks and micro-batches are added up.
    factor: Callable[[Split], float]
    #: The counts that it takes beside loss and report, of a micro-batch with these masks.
    counts: Callable[[Sequence[Tensor]], list[int]] = lambda masks: []
    #: The first Megatron-Core whose schedule takes the form.
    since: tuple[int, int] = (0, 15)


#: By form, and whether with per-token loss.
TRAINERS: dict[tuple[str, bool], Trainer] = {
    # Megatron's schedule, then DDP's average; with per-token loss the division by the sum of all token counts.
    ("3-tuple", False): Trainer(lambda s: 1 / s.num_microbatches / s.ranks, lambda masks: [1]),
    ("3-tuple", True): Trainer(lambda s: 1 / max(s.num_tokens, 1), lambda masks: [active_in(masks)]),
    ("2-tuple", False): Trainer(lambda s: s.cp_size / s.num_microbatches / s.ranks),
    # Loops without the schedule, by what they say of gradients; an engine's step may have per-token loss.
    **{("summed over ranks", per_token): Trainer(lambda s: 1) for per_token in (False, True)},
    **{("averaged over ranks", per_token): Trainer(lambda s: 1 / s.ranks) for per_token in (False, True)},
    # Engines, whose real code tests/engines/real runs: what they multiply by, then Megatron.
    ("slime", False): Trainer(lambda s: s.num_microbatches * s.ranks / s.rollouts / s.num_microbatches / s.ranks),
    ("verl", False): Trainer(lambda s: s.num_microbatches * s.cp_size / s.num_microbatches / s.ranks),
    ("verl", True): Trainer(lambda s: s.num_tokens / s.dp_size / s.num_tokens),
    ("nemo_rl", True): Trainer(lambda s: s.num_microbatches / s.cp_size**2 * s.cp_size / s.num_microbatches),
}


def trainer_of(form: str, per_token: bool) -> Trainer:
    has = "with" if per_token else "without"
    assert (form, per_token) in TRAINERS, f"form {form!r} {has} per-token loss: add its trainer to TRAINERS"
    return TRAINERS[form, per_token]


def takes(megatron: str, form: str, per_token: bool) -> bool:
    """True if the schedule of that version of Megatron-Core takes the form."""
    major, minor = re.findall(r"\d+", megatron)[:2]
    return (int(major), int(minor)) >= trainer_of(form, per_token).since
