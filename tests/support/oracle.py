"""The package's results, stated a second time: float64, plain loops, nothing imported from the package.

`step_loss` and `step_gradient` are the formulas of the modes. The rest says, token by token, what each
context-parallel (CP) rank holds: a buffer is a list of tokens, and a rank's part is picked from it by hand.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Token = tuple[int, int] | None  # (sample, position in its mask), None in padding
NAN = float("nan")
BY_IDS = ("session_mean", "turn_mean")  # modes over units of further ids: `weights_by_ids`


class Counting(NamedTuple):
    """A unit counting: a unit counts if one of its parts does. A part is what one sample has of the unit."""

    #: Mask entries of a part, and the sample's label of that name -> whether the part counts.
    counts: Callable[[Sequence[float], Any], bool]
    label: str | None = None


UNITS = {
    "all": Counting(lambda entries, label: True),
    "active": Counting(lambda entries, label: any(entries)),
    "counted": Counting(lambda entries, label: any(entries) or label != 0, "counted"),
}
#: Countings that need no label, which every step can be counted by.
BY_MASKS = [name for name, row in UNITS.items() if row.label is None]

#: The largest relative error of rounding a number to float32.
ROUNDING = 2.0**-24
#: Of a token's weight and gradient in float32, with room to spare: 1/(D*U) is rounded, so is its product with the mask
#: and with 1/copies, and what a trainer scales it by and divides it by again: at most 16 roundings.
EXACT = 16 * ROUNDING


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample: a loss and a mask entry a token. Losses at masked positions are never looked at."""

    losses: Tensor  # float64 [length]
    mask: Tensor  # any real dtype [length]
    rollout_id: int | str | None = None
    prompt_id: int | str | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)

    def poisoned(self, value: float = NAN) -> "Sample":
        """The sample with `value` as loss at masked positions, which no reader may read."""
        return replace(self, losses=self.losses.masked_fill(self.mask == 0, value))


def sample(
    losses: Sequence[float], mask: Sequence[float], rollout_id: int | str | None = None, prompt_id: int | str = 0
) -> Sample:
    return Sample(torch.tensor(losses, dtype=torch.float64), torch.tensor(mask).float(), rollout_id, prompt_id)


# The batch that can be worked out by hand, and its values with L = 8.
WORKED = [
    sample([1, 2, 3, 4], [1, 1, 1, 1], prompt_id=0),
    sample([5, 6], [1, 1], prompt_id=0),
    sample([-1, 0.5, 2, 7, 1, 3], [1, 1, 0, 1, 0, 0], prompt_id=1),
    sample([2], [0], prompt_id=1),
]
WORKED_DIVISOR = 8.0


class Row(NamedTuple):
    """A mode: ``(1/U) sum over units of (sum l*m) / D``."""

    #: Number and sample -> the unit that the sample is in.
    unit: Callable[[int, Sample], object]
    #: Mask tokens of a unit and the divisor, if one is given -> D.
    size: Callable[[float, float | None], float]
    #: The loss of `WORKED`, counting all units, and those with an active token.
    worked: tuple[float, float]
    #: Whether it takes the divisor L or d.
    divisor: Literal["required", "optional", "refused"] = "refused"


def rollout_of(number: int, sample: Sample) -> object:
    return ("alone", number) if sample.rollout_id is None else sample.rollout_id


ROWS = {
    "sample_mean": Row(
        rollout_of, lambda tokens, _: tokens, ((10 / 4 + 11 / 2 + 6.5 / 3) / 4, (10 / 4 + 11 / 2 + 6.5 / 3) / 3)
    ),
    "prompt_mean": Row(
        lambda _, sample: sample.prompt_id, lambda tokens, _: tokens, ((21 / 6 + 6.5 / 3) / 2, (21 / 6 + 6.5 / 3) / 2)
    ),
    "token_mean": Row(lambda *_: "the step", lambda tokens, _: tokens, (27.5 / 9, 27.5 / 9)),
    "constant": Row(rollout_of, lambda _, divisor: divisor or NAN, (27.5 / 32, 27.5 / 24), "required"),
    "token_sum": Row(lambda *_: "the step", lambda _, divisor: divisor or 1.0, (27.5 / 8, 27.5 / 8), "optional"),
}
MODES = tuple(ROWS)
COUNTINGS = [(mode, units) for mode in MODES for units in BY_MASKS]
WORKED_VALUES = {
    (mode, units): value
    for mode, row in ROWS.items()
    for units, value in zip(("all", "active"), row.worked, strict=True)
}


def divisor_of(mode: Any, value: float, *, optional: bool = False) -> float | None:
    """The value for a mode that needs a divisor, or if `optional` for one that takes it; None for all others."""
    row = ROWS.get(mode) if isinstance(mode, str) else None
    takes = row is not None and (row.divisor == "required" or (optional and row.divisor == "optional"))
    return value if takes else None


def units_of(mode: str, samples: Sequence[Sample]) -> list[list[int]]:
    """The samples of each unit of the step."""
    units: dict[object, list[int]] = {}
    for i, sample in enumerate(samples):
        units.setdefault(ROWS[mode].unit(i, sample), []).append(i)
    return list(units.values())


def part_counts(units: str, entries: Sequence[float], labels: Mapping[str, Any]) -> bool:
    row = UNITS[units]
    return row.counts(entries, None if row.label is None else labels[row.label])


def unit_counts(units: str, members: Sequence[Sample]) -> bool:
    return any(part_counts(units, sample.mask.double().tolist(), sample.labels) for sample in members)


def mask_tokens(samples: Sequence[Sample]) -> float:
    return sum(float(sample.mask.double().sum()) for sample in samples)


def step_loss(mode: str, samples: Sequence[Sample], divisor: float | None = None, units: str = "all") -> Tensor:
    """(1/U) sum over units of (sum l*m) / D, float64. `divisor`: D of constant, and of token_sum, 1 if None.

    Beside the `MODES`, ``vl_norm``: see `vl_norm`.
    """
    if mode == "vl_norm":
        return vl_norm(samples)
    total = torch.zeros((), dtype=torch.float64)
    counted = 0
    for unit in units_of(mode, samples):
        members = [samples[i] for i in unit]
        tokens = mask_tokens(members)
        counted += unit_counts(units, members)
        if tokens > 0:
            active = [
                (sample.losses[sample.mask != 0] * sample.mask[sample.mask != 0].double()).sum() for sample in members
            ]
            total = total + torch.stack(active).sum() / ROWS[mode].size(tokens, divisor)
    return total / max(counted, 1)


def step_weights(
    mode: str, samples: Sequence[Sample], divisor: float | None = None, units: str = "all"
) -> list[list[float]]:
    """The weight of every token, mask included: m / (D * U), by plain loops."""
    of_units = units_of(mode, samples)
    sizes = [mask_tokens([samples[i] for i in unit]) for unit in of_units]
    number = max(sum(unit_counts(units, [samples[i] for i in unit]) for unit in of_units), 1)
    weights = [[0.0] * len(sample.mask) for sample in samples]
    for unit, size in zip(of_units, sizes, strict=True):
        beside = ROWS[mode].size(size, divisor)
        for i in unit if size else ():
            weights[i] = [entry / (beside * number) for entry in samples[i].mask.double().tolist()]
    return weights


def weights_by_ids(
    mode: str,
    masks: Sequence[Tensor],
    sessions: Sequence[object],
    turns: Sequence[Sequence[object]],
    units: str,
    labels: Sequence[Mapping[str, Any]] | None = None,
) -> list[list[float]]:
    """Weights of `BY_IDS`, mask included, of a session per sample and a turn per token; "" is no turn.

    Of units that count there is at least one, as in the library: a counting may leave out units with active tokens.
    """
    rows = [mask.double().tolist() for mask in masks]
    of_samples = labels or [{} for _ in rows]
    if mode == "turn_mean":
        tokens: dict[object, float] = {}
        counting = set[object]()
        for row, of_row, of_sample in zip(rows, turns, of_samples, strict=True):
            parts: dict[object, list[float]] = {}
            for entry, turn in zip(row, of_row, strict=True):
                if turn != "":
                    parts.setdefault(turn, []).append(entry)
            for turn, entries in parts.items():
                tokens[turn] = tokens.get(turn, 0.0) + sum(entries)
                counting |= {turn} if part_counts(units, entries, of_sample) else set()
        number = max(len(counting), 1)
        return [
            [entry / tokens[turn] / number if entry else 0.0 for entry, turn in zip(row, of_row, strict=True)]
            for row, of_row in zip(rows, turns, strict=True)
        ]
    counted = [
        session
        for session, row, of_sample in zip(sessions, rows, of_samples, strict=True)
        if part_counts(units, row, of_sample)
    ]
    number = max(len(set(counted)), 1)
    return [
        [entry / sum(row) / max(counted.count(session), 1) / number if entry else 0.0 for entry in row]
        for session, row in zip(sessions, rows, strict=True)
    ]


def vl_norm(samples: Sequence[Sample], alpha: float = 0.75) -> Tensor:
    """sum_i M_i^-alpha (sum_t l*m) / sum_j M_j^-alpha, over samples with an active token."""
    total, powers = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        if mask_tokens([sample]) > 0:
            power = mask_tokens([sample]) ** -alpha
            powers += power
            total = total + power * (sample.losses[sample.mask != 0] * sample.mask[sample.mask != 0].double()).sum()
    return total / powers


def step_gradient(
    mode: str, samples: Sequence[Sample], divisor: float | None = None, units: str = "all"
) -> list[Tensor]:
    """d step_loss / d loss of every token, a float64 tensor a sample."""
    leaves = [sample.losses.clone().requires_grad_() for sample in samples]
    moved = [replace(sample, losses=leaf) for sample, leaf in zip(samples, leaves, strict=True)]
    loss = step_loss(mode, moved, divisor, units)
    if not loss.requires_grad:  # no active token
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def step_scale(mode: str, samples: Sequence[Sample], divisor: float | None = None, units: str = "all") -> float:
    """The step loss of the absolute losses: what rounding errors of the step loss are relative to."""
    return float(step_loss(mode, [replace(sample, losses=sample.losses.abs()) for sample in samples], divisor, units))


def sum_error(num_terms: int) -> float:
    """The bound for a float32 sum of `num_terms` weighted losses, in any order, relative to their absolute sum.

    Every weight and product is `EXACT`, and every addition rounds once.
    """
    return EXACT + num_terms * ROUNDING


def chain_error(num_layers: int, longest: int) -> float:
    """The bound for a layered model in float32, relative to a tensor's largest entry, whatever adds up products.

    Forward and backward a value goes through six sums of at most `longest` terms a layer. Their roundings are as good
    as independent, so n of them add up to sqrt(n); eight times that is not seen.
    """
    return 8 * math.sqrt(2 * num_layers * 6 * longest) * ROUNDING


def num_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.mask) for sample in samples)


def worst_of(*errors: float) -> float:
    """The largest of the errors; infinite if one is NaN, which `max` may leave out."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def worst_error(in_value: float, in_gradient: float, num_terms: int) -> float:
    """The worse of two relative errors, at most `EXACT`: the value's is in units of what its sum may be."""
    return worst_of(in_value * EXACT / sum_error(num_terms), in_gradient)


# --- what a CP rank holds


def padded_slots(lengths: Sequence[int], sizes: Sequence[int]) -> list[list[Token]]:
    """Every sample at the head of its own slot."""
    return [
        [(i, t) if t < length else None for t in range(size)]
        for i, (length, size) in enumerate(zip(lengths, sizes, strict=True))
    ]


def zigzag(slots: list[list[Token]], cp_rank: int, cp_size: int) -> list[Token]:
    """The cp_rank-th and the cp_rank-th last of each slot's 2 * cp_size chunks."""
    held: list[Token] = []
    for slot in slots:
        n = len(slot) // (2 * cp_size)
        chunks = [slot[k * n : (k + 1) * n] for k in range(2 * cp_size)] if cp_size > 1 else [slot, []]
        held += chunks[cp_rank] + chunks[-1 - cp_rank]
    return held


def contiguous(slots: list[list[Token]], cp_rank: int, cp_size: int) -> list[Token]:
    """The cp_rank-th of cp_size equal pieces of the whole buffer."""
    buffer = [token for slot in slots for token in slot]
    n = len(buffer) // cp_size
    return buffer[cp_rank * n : (cp_rank + 1) * n]


def contiguous_per_slot(slots: list[list[Token]], cp_rank: int, cp_size: int) -> list[Token]:
    return [token for slot in slots for token in contiguous([slot], cp_rank, cp_size)]


def response_only(
    total_lengths: Sequence[int], responses: Sequence[int], padded: Sequence[int], cp_rank: int, cp_size: int
) -> list[Token]:
    """slime's rule: the response tokens whose logit (one earlier) lies in the rank's two chunks of the sample."""
    held: list[Token] = []
    for i, (total, response) in enumerate(zip(total_lengths, responses, strict=True)):
        chunk = -(-padded[i] // (2 * cp_size))
        for piece in (cp_rank, 2 * cp_size - 1 - cp_rank):
            for logit in range(piece * chunk, (piece + 1) * chunk):
                position = logit + 1 - (total - response)
                if 0 <= position < response:
                    held.append((i, position))
    return held
