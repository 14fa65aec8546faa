"""One step of the gradients of ranks: places, sums over ranks that hold copies, strays and ids, worked out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl_loss import Contiguous, Gathered, Samples, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.audit.assembly import Part, differ_over_cp, log_prob_gap, measured_step, portable
from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.audit.tokens import MeasuredStep, Split

CU, LENGTHS = [0, 4, 12], [3, 5]
MASKS = [torch.tensor([0.0, 1, 1]), torch.tensor([1.0, 1, 0, 0.5, 1])]


def parts_of(layout: Any, gradient: Any, cp_size: int = 2, masks: Any = MASKS, ids: Any = None, **at: int) -> Any:
    """A micro-batch whose token at buffer position p has the gradient that a function of p and the rank says."""
    samples = Samples(masks, layout=layout, **(ids or {}))
    for rank in range(cp_size):
        local = samples.local(rank, cp_size)
        gradients: Any = np.array([gradient(p, rank) for p in local.positions], np.float32)
        place: Any = {"dp_rank": 0, "microbatch": 0, "cp_rank": rank} | at
        yield Part.of(local, gradients, None if rank else portable(samples), **place)


def step_of(layout: Any, gradient: Any, factor: float = 1.0) -> MeasuredStep:
    return measured_step([*parts_of(layout, gradient)], factor, Split(cp_size=2))


def test_tokens_are_in_their_places_and_padding_is_stray() -> None:
    step = step_of(ZigzagTHD(CU, total_lengths=LENGTHS), lambda p, rank: p + 1, 2.0)
    assert step.weights.tolist() == [2, 4, 6, 10, 12, 14, 16, 18]
    assert step.stray == (4, 2.0 * (4 + 10 + 11 + 12))
    assert step.tokens.mask.tolist() == [0, 1, 1, 1, 1, 0, 0.5, 1]
    assert step.tokens.sample.tolist() == [0] * 3 + [1] * 5
    assert step.tokens.position.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert step.tokens.cp_rank.tolist() == [0, 1, 1, 0, 0, 1, 1, 1]
    assert step.tokens.ids == {}
    response = step_of(ZigzagResponse([9, 6], LENGTHS), lambda p, rank: np.nan if p == 4 else 1)
    assert np.isnan(response.weights).nonzero()[0].tolist() == [4]
    nothing = measured_step([], 1.0, Split(), unknown=("nobody said",))
    assert (len(nothing.tokens), len(nothing.weights), nothing.unknown) == (0, 0, ("nobody said",))


@pytest.mark.parametrize(("backward", "expected"), [("sum", 7.0), ("slice", 3.5)])
def test_copies_add_up_unless_a_gather_hands_back_slices(backward: Any, expected: float) -> None:
    step = step_of(Gathered(CU, total_lengths=LENGTHS, backward=backward), lambda p, rank: 3 + rank)
    assert (set(step.weights.tolist()), set(step.tokens.cp_rank.tolist())) == ({expected}, {-1})


def test_ids_per_token_are_columns_as_they_are_given() -> None:
    turns = [[0, 0, -1], [0, 1, 1, -1, 2]]
    masks = [[1, 1, 0], [1, 1, 1, 0, 1]]
    layout = ZigzagTHD(CU, total_lengths=LENGTHS)
    step = measured_step(
        parts_of(layout, lambda *_: 1, masks=masks, ids={"ids": {"turn": turns}}), 1.0, Split(cp_size=2)
    )
    assert step.tokens.per_token == {"turn"}
    assert step.tokens.ids["turn"].tolist() == [*turns[0], *turns[1]]


@pytest.mark.parametrize("backward", ["sum", "slice"])
def test_ranks_of_a_gather_that_hands_back_slices_must_have_the_same_gradients(backward: Any) -> None:
    layout = Gathered(CU, total_lengths=LENGTHS, backward=backward)
    for step, differs in ((0.0, False), (1e-5, False), (1.0, True)):
        parts = [*parts_of(layout, lambda p, rank, step=step: 3 + p + rank * step)]
        assert differ_over_cp(parts) == (differs and backward == "slice")


def test_order_and_numbers_over_ranks_and_microbatches() -> None:
    layout = Contiguous(CU, total_lengths=LENGTHS)
    parts = [
        *parts_of(layout, lambda *_: 3, 1, ids={"rollout_ids": [5, 8], "ids": {"session": [2**60 + 1, 7]}}, dp_rank=1),
        *parts_of(None, lambda *_: 1, 1, masks=[], microbatch=1),
        *parts_of(layout, lambda *_: 1, 1, ids={"rollout_ids": [3, 5], "ids": {"session": [7, 7]}}),
    ]
    step = measured_step(parts, 1.0, Split(dp_size=2))
    for column, numbers in {
        "weights": (1, 1, 3, 3), "dp_rank": (0, 0, 1, 1), "rollout": (3, 5, 5, 8),
        "session": (7, 7, 2**60 + 1, 7),
        "sample": (0, 1, 2, 3),
    }.items():  # fmt: skip
        values = step.weights if column == "weights" else step.tokens.column(column)
        assert values.tolist() == np.repeat(numbers, LENGTHS * 2).tolist(), column


@pytest.mark.parametrize("layout", [ZigzagTHD(CU, total_lengths=LENGTHS), Gathered(CU, total_lengths=LENGTHS)])
def test_log_probs_of_ranks_are_put_together(layout: Any) -> None:
    """Samples count that all ranks gave them for; the other micro-batch's second rank, and another term, gave none."""
    with_log_probs = [replace(part, log_probs=np.stack([-part.positions, -part.positions * 1.5])) for k in range(2)
                      for part in [*parts_of(layout, lambda *_: 0, microbatch=k)][: 2 - k]]  # fmt: skip
    gap = log_prob_gap([*with_log_probs, *parts_of(layout, lambda *_: 0)])
    assert gap is not None
    number = 4 if isinstance(layout, Gathered) else 2
    assert [gaps.tolist() for gaps in gap.gaps] == ([[0, -0.5, -1], [-2, -2.5, -3, -3.5, -4]] * 2)[:number]
    assert gap.num_tokens.tolist() == ([2, 4] * 2)[:number]
    assert log_prob_gap([]) is None


def test_ids_of_some_microbatches_alone_are_no_verdict() -> None:
    layout = Contiguous(CU, total_lengths=LENGTHS)
    parts = parts_of(layout, lambda *_: 1, 1, ids={"prompt_ids": [1, 2]}), parts_of(layout, lambda *_: 1, 1, dp_rank=1)
    step = measured_step([*parts[0], *parts[1]], 1.0, Split(dp_size=2), unknown=("before",))
    assert step.unknown[0] == "before"
    assert "Ids are missing in some micro-batches: prompt" in step.unknown[1]
    assert step.tokens.ids == {}


def test_samples_without_entries_are_units() -> None:
    """Three rollouts, the last without a token: each of the others weighs a third."""
    masks = [torch.tensor([1.0, 1]), torch.tensor([1.0]), torch.zeros(0)]
    weights = [1 / 6, 1 / 6, 1 / 3]
    for ids in (None, {"ids": {"turn": [[7, 7], [8], []]}}, {"prompt_ids": ["a", "b", "c"]}):
        step = measured_step([*parts_of(None, lambda p, rank: weights[p], 1, masks, ids)], 1.0, Split())
        assert judge(step, "sample_mean").sound
        assert judge(step, "prompt_mean").sound == ("prompt" in step.tokens.ids)
        assert not judge(replace(step, weights=step.weights * 1.5), "sample_mean").sound
