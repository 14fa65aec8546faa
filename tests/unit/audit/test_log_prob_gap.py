"""`compare_log_probs`: patterns that are planted are named, and nothing else is."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.audit import compare_log_probs

VOCABULARY = 48
Rows = list[Tensor]


@dataclass
class Step:
    """Ragged samples with prompts; log-probs of logits, in float32."""

    logits: Rows
    labels: Rows
    masks: Rows

    def read(self, log_prob: Callable[[Tensor, Tensor], Tensor]) -> Rows:
        return [log_prob(z.double(), y).float() for z, y in zip(self.logits, self.labels, strict=True)]

    @property
    def ours(self) -> Rows:
        return self.read(lambda z, y: z.log_softmax(-1)[torch.arange(len(y)), y])


def drawn(seed: int = 0, padding: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(6, 60, (7,), generator=generator)).tolist()
    masks = []
    for length in lengths:
        mask = (torch.rand(length, generator=generator) < 0.8).float()
        mask[: length // 4] = 0
        mask[length - padding :] = 0
        masks.append(mask)
    return Step(
        [3 * torch.randn(length, VOCABULARY, generator=generator) for length in lengths],
        [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths],
        masks,
    )


def by_rank(values: Tensor, cp_size: int) -> Tensor:
    """Pieces as zigzag ranks hold them, one rank after the other; cut to the length that there was."""
    chunk = math.ceil(len(values) / (2 * cp_size))
    padded = torch.cat([values, torch.full((2 * cp_size * chunk - len(values),), -7.0)])
    pieces = padded.split(chunk)
    return torch.cat([torch.cat([pieces[r], pieces[2 * cp_size - 1 - r]]) for r in range(cp_size)])[: len(values)]


def names(ours: Rows, theirs: Rows, masks: Rows, **options: object) -> list[str]:
    return [one.name for one in compare_log_probs(ours, theirs, masks, **options).patterns]  # type: ignore[arg-type]


def test_the_numbers_are_of_active_tokens() -> None:
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


def test_equal_sides_have_no_pattern() -> None:
    step = drawn()
    gap = compare_log_probs(step.ours, step.ours, step.masks, logits=step.logits, labels=step.labels)
    assert gap.equal
    assert gap.patterns == ()


def noise(rows: Rows, size: float, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return [row + size * torch.randn(row.shape, generator=generator) for row in rows]


def own_slice(tp: int) -> Callable[[Tensor, Tensor], Tensor]:
    size = VOCABULARY // tp
    return lambda z, y: torch.stack([
        row[label] - row[label // size * size : (label // size + 1) * size].logsumexp(0)
        for row, label in zip(z, y, strict=True)
    ])  # fmt: skip


def at(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: (z / temperature).log_softmax(-1)[torch.arange(len(y)), y]


#: What becomes of our log-probs, and what it is called.
PLANTED: dict[str, tuple[Callable[[Step], Rows], str]] = {
    "one later": (lambda step: [row.roll(1) for row in step.ours], "shifted_later"),
    "one earlier": (lambda step: [row.roll(-1) for row in step.ours], "shifted_earlier"),
    **{
        f"CP {size}": (lambda step, size=size: [by_rank(row, size) for row in step.ours], "cp_order")
        for size in (2, 4, 8)
    },
    "temperature": (lambda step: step.read(at(0.7)), "temperature"),
    "hot": (lambda step: step.read(at(1.5)), "temperature"),
    "fewer columns": (
        lambda step: step.read(lambda z, y: z.gather(1, y[:, None])[:, 0] - z[:, :41].logsumexp(-1)),
        "vocabulary_slice",
    ),
    "own slice": (lambda step: step.read(own_slice(4)), "vocabulary_slice"),
    "bfloat16": (lambda step: [row.bfloat16().float() for row in step.ours], "bf16_rounding"),
    "bfloat16 logits": (
        lambda step: [z.bfloat16().float().log_softmax(-1)[torch.arange(len(y)), y]
                      for z, y in zip(step.logits, step.labels, strict=True)],
        "bf16_rounding",
    ),
    "masked": (lambda step: [row * mask for row, mask in zip(step.ours, step.masks, strict=True)], "masked_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_pattern_is_named_alone(name: str, seed: int) -> None:
    step = drawn(seed)
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


@pytest.mark.parametrize("seed", range(3))
def test_samples_in_another_order(seed: int) -> None:
    """Of equal lengths, as rows of a padded batch are."""
    step = drawn(seed)
    rows = [torch.nn.functional.pad(row, (0, 60 - len(row))) for row in step.ours]
    masks = [torch.ones(60)] * len(rows)
    rows = noise(rows, 1.0, seed)
    assert names(rows, [rows[k] for k in (3, 1, 0, 2, 6, 4, 5)], masks) == ["sample_order"]


@pytest.mark.parametrize("seed", range(3))
def test_padding_on_the_other_side(seed: int) -> None:
    step = drawn(seed, padding=3)
    ours, theirs, masks = [], [], []
    for row, mask in zip(step.ours, step.masks, strict=True):
        filler = torch.zeros(70 - len(row))
        ours.append(torch.cat([row, filler]))
        masks.append(torch.cat([mask, filler]))
        end = int(mask.nonzero().max()) + 1
        theirs.append(torch.cat([torch.zeros(70 - end), row[:end]]))
    assert names(ours, theirs, masks) == ["padding_side"]


@pytest.mark.parametrize("cp_size", [2, 4])
def test_responses_alone_in_the_order_of_ranks(cp_size: int) -> None:
    """A prompt stands before each: chunks are cut with it, by the place of a token's logit, one before its own."""
    step = drawn(2)
    prompts = [5, 2, 17, 3, 8, 1, 11]
    theirs = []
    for row, prompt in zip(step.ours, prompts, strict=True):
        total = prompt + len(row)
        chunk = math.ceil(total / (2 * cp_size))
        holder = [min(piece, 2 * cp_size - 1 - piece) for piece in ((prompt + t - 1) // chunk for t in range(len(row)))]
        theirs.append(torch.cat([row[[t for t in range(len(row)) if holder[t] == rank]] for rank in range(cp_size)]))
    totals = [prompt + len(row) for row, prompt in zip(step.ours, prompts, strict=True)]
    masks = [torch.ones(len(row)) for row in step.ours]
    assert names(step.ours, theirs, masks, total_lengths=totals) == ["cp_order"]


def test_chance_is_named_where_a_second_run_shows_it() -> None:
    step = drawn()
    ours, repeat = noise(step.ours, 0.1, 1), noise(step.ours, 0.1, 2)
    assert names(ours, step.ours, step.masks, repeat=repeat) == ["dropout"]
    assert names(ours, step.ours, step.masks, repeat=ours) == []
    assert names(ours, noise(step.ours, 0.5, 3), step.masks, repeat=repeat) == []


def test_two_patterns_that_fit_are_both_named() -> None:
    """Samples of period 4: one later is three earlier, and what 2 ranks hold one after the other may be either."""
    values = torch.tensor([-1.0, -2.0]).repeat(20)
    assert names([values], [values.roll(1)], [torch.ones(40)]) == ["shifted_later", "shifted_earlier"]


def test_random_gaps_have_no_name() -> None:
    for seed in range(200):
        step = drawn(seed)
        ours = [row * (row < [0, -8][seed % 2]) for row in step.ours]  # of most tokens nearly sure, or not
        theirs = noise(ours, [0.1, 0.4, 2.0][seed % 3], seed)
        totals = [len(row) + seed % 9 for row in step.ours]
        given = {"total_lengths": totals, "logits": step.logits, "labels": step.labels}
        gap = compare_log_probs(ours, theirs, step.masks, repeat=ours, **given)  # type: ignore[arg-type]
        assert gap.patterns == ()
        assert not gap.equal


def test_what_does_not_go_together_is_refused() -> None:
    row = torch.zeros(3)
    with pytest.raises(ValueError, match=r"ours of shapes .*one entry per token. Pass a row"):
        compare_log_probs(row, [row], [row])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="theirs"):
        compare_log_probs([row], [row, row], [row])
    with pytest.raises(ValueError, match=r"loss_masks of lengths \[2\], ours \[3\]"):
        compare_log_probs([row], [row], [row[:2]])
    with pytest.raises(ValueError, match="logits without labels"):
        compare_log_probs([row], [row], [row], logits=[torch.zeros(3, 4)])
    with pytest.raises(ValueError, match=r"theirs of shapes \[\(1, 3\)\]: a sample has one entry per token"):
        compare_log_probs([row], [row[None]], [row])
    with pytest.raises(ValueError, match=r"2 total_lengths for 1 samples"):
        compare_log_probs([row], [row], [row], total_lengths=[3, 3])
    with pytest.raises(ValueError, match="a CP size is 0"):
        compare_log_probs([row], [row], [row], cp_sizes=[0])


def test_nan_is_the_largest_gap() -> None:
    row = torch.zeros(3)
    assert "|gap| nan on average, nan at most" in str(compare_log_probs([row, row], [row / 0, row], [row + 1] * 2))
