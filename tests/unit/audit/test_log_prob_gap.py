"""`compare_log_probs`: patterns that are planted are named, and nothing else is."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refusal_tests, refusals
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_loss import compare_log_probs

VOCABULARY = 48
Rows = list[Tensor]


def drawn(seed: int = 0) -> Any:
    """Ragged samples with prompts, their logits and, as `ours`, the log-probs of these."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(6, 60, (7,), generator=generator)).tolist()
    masks = [(torch.rand(length, generator=generator) < 0.8).float() for length in lengths]
    for mask in masks:
        mask[: len(mask) // 4] = 0
    logits = [3 * torch.randn(length, VOCABULARY, generator=generator) for length in lengths]
    labels = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    step = SimpleNamespace(logits=logits, labels=labels, masks=masks)
    return SimpleNamespace(**vars(step), ours=read(step, at(1)))


def read(step: Any, log_prob: Callable[[Tensor, Tensor], Tensor]) -> Rows:
    """Log-probs of logits, in float32."""
    return [log_prob(z.double(), y).float() for z, y in zip(step.logits, step.labels, strict=True)]


def at(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: (z / temperature).log_softmax(-1)[torch.arange(len(y)), y]


def noise(rows: Rows, size: float, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return [row + size * torch.randn(row.shape, generator=generator) for row in rows]


def names(ours: Rows, theirs: Rows, masks: Rows, **options: Any) -> list[str]:
    return [one.name for one in compare_log_probs(ours, theirs, masks, **options).patterns]


def test_the_numbers_are_of_active_tokens_and_nan_is_the_largest() -> None:
    ours, masks = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0])], [torch.tensor([1.0, 0, 1]), torch.zeros(1)]
    theirs = [torch.tensor([-1.5, -9.0, -2.75]), torch.tensor([-1.0])]
    gap = compare_log_probs(ours, theirs, masks)
    assert [one.tolist() for one in gap.gaps] == [[-0.5, -7.0, 0.25], [3.0]]
    assert gap.num_tokens.tolist() == [2, 0]
    assert gap.mean.tolist() == [0.375, 0]
    assert gap.largest.tolist() == [0.5, 0]
    assert gap.total.tolist() == [-0.25, 0]
    assert str(gap) == (
        "log-probs of 2 tokens: |gap| 0.375 on average, 0.5 at most\n  no pattern fits: these numbers are what is known"
    )
    row = torch.zeros(3)
    assert "|gap| nan on average, nan at most" in str(compare_log_probs([row, row], [row / 0, row], [row + 1] * 2))
    step = drawn()
    equal = compare_log_probs(step.ours, step.ours, step.masks, logits=step.logits, labels=step.labels)
    assert (equal.equal, equal.patterns) == (True, ())


# ---- of one step, read otherwise


def by_rank(values: Tensor, cp_size: int) -> Tensor:
    """Pieces as zigzag ranks hold them, one rank after the other; cut to the length that there was."""
    chunk = math.ceil(len(values) / (2 * cp_size))
    pieces = pad(values, (0, 2 * cp_size * chunk - len(values)), value=-7.0).split(chunk)
    return torch.cat([pieces[k] for r in range(cp_size) for k in (r, 2 * cp_size - 1 - r)])[: len(values)]


def fewer_columns(z: Tensor, y: Tensor) -> Tensor:
    return z.gather(1, y[:, None])[:, 0] - z[:, :41].logsumexp(-1)


def own_slice(z: Tensor, y: Tensor) -> Tensor:
    """Over the label's own quarter of the vocabulary."""
    quarters = z.unflatten(1, (4, -1))[torch.arange(len(y)), y // (VOCABULARY // 4)]
    return z.gather(1, y[:, None])[:, 0] - quarters.logsumexp(-1)


#: What becomes of our log-probs, and what it is called.
PLANTED: dict[str, tuple[Callable[[Any], Rows], str]] = {
    "one later": (lambda step: [row.roll(1) for row in step.ours], "shifted_later"),
    "one earlier": (lambda step: [row.roll(-1) for row in step.ours], "shifted_earlier"),
    "CP 2": (lambda step: [by_rank(row, 2) for row in step.ours], "cp_order"),
    "CP 8": (lambda step: [by_rank(row, 8) for row in step.ours], "cp_order"),
    "temperature": (lambda step: read(step, at(0.7)), "temperature"),
    "hot": (lambda step: read(step, at(1.5)), "temperature"),
    "fewer columns": (lambda step: read(step, fewer_columns), "vocabulary_slice"),
    "own slice": (lambda step: read(step, own_slice), "vocabulary_slice"),
    "bfloat16": (lambda step: [row.bfloat16().float() for row in step.ours], "bf16_rounding"),
    "bfloat16 logits": (lambda step: read(step, lambda z, y: at(1)(z.bfloat16().float(), y)), "bf16_rounding"),
    "masked": (lambda step: [row * mask for row, mask in zip(step.ours, step.masks, strict=True)], "masked_tokens"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pattern_is_named_alone(name: str) -> None:
    step, seed = drawn(1), 1
    plant, expected = PLANTED[name]
    theirs = plant(step)
    labels = [label.where(mask != 0, -100) for label, mask in zip(step.labels, step.masks, strict=True)]
    logits = {"logits": step.logits, "labels": labels}
    assert names(step.ours, theirs, step.masks, **logits) == [expected]
    back = names(theirs, step.ours, step.masks, **logits)  # it is the other side that is odd
    assert back == [expected.replace("later", "x").replace("earlier", "later").replace("x", "earlier")]
    if expected in ("temperature", "vocabulary_slice"):
        assert names(step.ours, theirs, step.masks) == []  # not known of log-probs alone
    if expected not in ("bf16_rounding", "masked_tokens"):
        usual = {"tolerance": 0.06}
        assert names(step.ours, noise(theirs, 0.01, seed), step.masks, **logits, **usual) == [expected]
        assert names(step.ours, noise(theirs, 0.5, seed), step.masks, **logits, **usual) == []


# ---- where more than our log-probs is changed

Sides = tuple[Rows, Rows, Rows, dict[str, Any]]


def another_order() -> Sides:
    """Of equal lengths, as rows of a padded batch are."""
    rows = noise([pad(row, (0, 60 - len(row))) for row in drawn().ours], 1.0, 0)
    return rows, [rows[k] for k in (3, 1, 0, 2, 6, 4, 5)], [torch.ones(60)] * len(rows), {}


def other_padding() -> Sides:
    step = drawn()
    rows, masks = ([pad(row[:-3], (0, 73 - len(row))) for row in values] for values in (step.ours, step.masks))
    ends = [int(mask.nonzero().max()) + 1 for mask in masks]
    theirs = [pad(row[:end], (70 - end, 0)) for row, end in zip(rows, ends, strict=True)]
    return rows, theirs, masks, {}


def responses(cp_size: int) -> Sides:
    """A prompt stands before each: chunks are cut with it, by the place of a token's logit, one before its own."""
    step, prompts, theirs = drawn(2), [5, 2, 17, 3, 8, 1, 11], []
    totals = [prompt + len(row) for row, prompt in zip(step.ours, prompts, strict=True)]
    for row, prompt, total in zip(step.ours, prompts, totals, strict=True):
        chunks = (torch.arange(len(row)) + prompt - 1) // math.ceil(total / (2 * cp_size))
        holder = torch.minimum(chunks, 2 * cp_size - 1 - chunks)
        theirs.append(row[holder.argsort(stable=True)])
    return step.ours, theirs, [torch.ones(len(row)) for row in step.ours], {"total_lengths": totals}


def chance(apart: float, of_repeat: float) -> Sides:
    """A second run of ours is as far from ours as theirs are, or not."""
    step = drawn()
    ours = noise(step.ours, 0.1, 1)
    return ours, noise(step.ours, apart, 3), step.masks, {"repeat": noise(ours, of_repeat, 2)}


TWO_WAYS, ENDS = torch.tensor([-1.0, -2.0]).repeat(20), other_padding()
SIDES: dict[str, tuple[Sides, list[str]]] = {
    "another order": (another_order(), ["sample_order"]),
    "padding on the other side": (ENDS, ["padding_side"]),
    "ours on that side": ((ENDS[1], ENDS[0], [(row != 0).float() for row in ENDS[1]], {}), ["padding_side"]),
    "responses of 2 ranks": (responses(2), ["cp_order"]),
    "responses of 4 ranks": (responses(4), ["cp_order"]),
    "dropout": (chance(0, 0.14), ["dropout"]),
    "no dropout": (chance(0, 0), []),
    "more than dropout": (chance(0.5, 0.14), []),
    "one later is one earlier": (
        ([TWO_WAYS], [TWO_WAYS.roll(1)], [torch.ones(40)], {}), ["shifted_later", "shifted_earlier"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sides", "expected"), SIDES.values(), ids=SIDES)
def test_a_pattern_of_more_than_log_probs_is_named_alone(sides: Sides, expected: list[str]) -> None:
    *three, options = sides
    assert names(*three, **options) == expected


def test_random_gaps_have_no_name() -> None:
    for seed in range(30):
        step = drawn(seed)
        ours = [row * (row < [0, -8][seed % 2]) for row in step.ours]  # of most tokens nearly sure, or not
        theirs = noise(ours, [0.1, 0.4, 2.0][seed % 3], seed)
        totals = [len(row) + seed % 9 for row in step.ours]
        given = {"total_lengths": totals, "logits": step.logits, "labels": step.labels}
        gap = compare_log_probs(ours, theirs, step.masks, repeat=ours, **given)
        assert (gap.patterns, gap.equal) == ((), False)


ROW = torch.zeros(3)


def compared(ours: Any = (ROW,), theirs: Any = (ROW,), masks: Any = (ROW,), **more: Any) -> Any:
    return compare_log_probs(ours, theirs, masks, **more)


REFUSALS = refusals(
    compared,
    ((ROW,), r"ours of shapes .*one entry per token. Pass a row", ()),
    (((ROW,), (ROW, ROW)), "theirs", ()),
    (((ROW,), (ROW[None],)), r"theirs of shapes \[\(1, 3\)\]: a sample has one entry per token", ()),
    (((ROW,), (ROW,), (ROW[:2],)), r"loss_masks of lengths \[2\], ours \[3\]", ()),
    ({"logits": [torch.zeros(3, 4)]}, "logits without labels", {}),
    ({"total_lengths": [3, 3]}, r"2 total_lengths for 1 samples", {"total_lengths": [4]}),
    ({"cp_sizes": [0]}, "a CP size is 0", {"cp_sizes": [1]}),
)

test_refusals = refusal_tests(REFUSALS)
