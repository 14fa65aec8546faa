"""From gradients of ranks to one step: places, sums over ranks that hold copies, strays and ids, worked out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl_loss import Contiguous, Gathered, Samples, ZigzagResponse, ZigzagTHD
from megatron_rl_loss.audit.assembly import Part, Rows, log_prob_gap, measured_step
from megatron_rl_loss.audit.tokens import Split

CU = [0, 4, 12]
MASKS = [torch.tensor([0.0, 1, 1]), torch.tensor([1.0, 1, 0, 0.5, 1])]


def parts_of(samples: Samples, cp_size: int, gradient: Any, dp_rank: int = 0, microbatch: int = 0) -> list[Part]:
    """A micro-batch whose token at buffer position p has the gradient that a function of p and the rank says."""
    found = []
    for rank in range(cp_size):
        local = samples.local(rank, cp_size)
        positions = local.positions.numpy()
        gradients = np.array([gradient(p, rank) for p in positions], np.float32)
        rows = Rows.of(local) if rank == 0 else None
        place = {"dp_rank": dp_rank, "cp_rank": rank, "microbatch": microbatch}
        found.append(Part(**place, rows=rows, positions=positions, gradients=gradients))
    return found


def samples_of(layout: Any, **ids: Any) -> Samples:
    return Samples(MASKS, layout=layout, **ids)


def test_tokens_are_in_their_places_and_padding_is_stray() -> None:
    samples = samples_of(ZigzagTHD(CU, total_lengths=[3, 5]))
    step = measured_step(parts_of(samples, 2, lambda p, rank: p + 1), 2.0, Split(cp_size=2))
    assert step.weights.tolist() == [2, 4, 6, 10, 12, 14, 16, 18]
    assert step.stray == (4, 2.0 * (4 + 10 + 11 + 12))
    assert step.tokens.mask.tolist() == [0, 1, 1, 1, 1, 0, 0.5, 1]
    assert step.tokens.sample.tolist() == [0] * 3 + [1] * 5
    assert step.tokens.position.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert step.tokens.cp_rank.tolist() == [0, 1, 1, 0, 0, 1, 1, 1]
    assert step.tokens.total_lengths.tolist() == [3, 5]
    assert step.tokens.response_lengths is None


@pytest.mark.parametrize(("backward", "expected"), [("sum", 7.0), ("slice", 3.5)])
def test_copies_add_up_unless_a_gather_hands_back_slices(backward: Any, expected: float) -> None:
    samples = samples_of(Gathered(CU, total_lengths=[3, 5], backward=backward))
    step = measured_step(parts_of(samples, 2, lambda p, rank: 3 + rank), 1.0, Split(cp_size=2))
    assert set(step.weights.tolist()) == {expected}
    assert set(step.tokens.cp_rank.tolist()) == {-1}


@pytest.mark.parametrize("layout", [ZigzagTHD(CU, total_lengths=[3, 5]), Gathered(CU, total_lengths=[3, 5])])
def test_log_probs_of_ranks_are_put_together(layout: Any) -> None:
    parts = parts_of(samples_of(layout), 2, lambda p, rank: 0)
    parts = [replace(part, log_probs=np.stack([-part.positions, -part.positions * 1.5])) for part in parts]
    gap = log_prob_gap([*parts, *parts_of(samples_of(layout), 2, lambda p, rank: 0)])  # another term has none
    assert gap is not None
    assert [one.tolist() for one in gap.gaps] == [[0, -0.5, -1], [-2, -2.5, -3, -3.5, -4]]
    assert gap.num_tokens.tolist() == [2, 4]
    assert log_prob_gap([]) is None


def test_order_and_numbers_over_ranks_and_microbatches() -> None:
    one = samples_of(Contiguous(CU, total_lengths=[3, 5]), rollout_ids=["a", "b"], prompt_ids=[7, 7])
    two = samples_of(Contiguous(CU, total_lengths=[3, 5]), rollout_ids=["b", "c"], prompt_ids=[9, 7])
    empty = Samples([])
    parts = [
        *parts_of(two, 1, lambda p, rank: 3, dp_rank=1),
        *parts_of(empty, 1, lambda p, rank: 1, microbatch=1),
        *parts_of(one, 1, lambda p, rank: 1),
    ]
    step = measured_step(parts, 1.0, Split(dp_size=2))
    assert step.weights.tolist() == [1] * 8 + [3] * 8
    assert step.tokens.dp_rank.tolist() == [0] * 8 + [1] * 8
    assert step.tokens.rollout.tolist() == [0] * 3 + [1] * 5 + [1] * 3 + [2] * 5
    assert step.tokens.prompt.tolist() == [0] * 8 + [1] * 3 + [0] * 5
    assert step.tokens.sample.tolist() == [0] * 3 + [1] * 5 + [2] * 3 + [3] * 5
    assert step.tokens.total_lengths.tolist() == [3, 5, 3, 5]


def test_responses_know_their_lengths_and_nan_stays_where_it_was() -> None:
    samples = Samples(MASKS, layout=ZigzagResponse([9, 6], [3, 5]))
    step = measured_step(parts_of(samples, 2, lambda p, rank: np.nan if p == 4 else 1), 1.0, Split(cp_size=2))
    assert step.tokens.total_lengths.tolist() == [9, 6]
    assert step.tokens.response_lengths.tolist() == [3, 5]
    assert np.isnan(step.weights).nonzero()[0].tolist() == [4]


def test_a_step_without_tokens() -> None:
    step = measured_step([], 1.0, Split(), unknown=("nobody said",))
    assert len(step.tokens) == len(step.weights) == 0
    assert step.unknown == ("nobody said",)
