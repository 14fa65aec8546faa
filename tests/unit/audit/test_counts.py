"""What a loss may have counted, by hand on a small step."""

from typing import Any

import numpy as np
import pytest

from megatron_rl_loss.audit.counts import COUNTINGS, SCOPES, Cells, Count
from megatron_rl_loss.audit.tokens import Split, StepTokens

# DP 2 x CP 2, 2 micro-batches. Of a sample the first half of its positions is CP rank 0's.
#   sample      0       1      2        3         4        5 (fully masked)
#   DP, mb     0, 0    0, 0   0, 1     1, 0      1, 0     1, 1
#   rollout     0       0      1        2         3        4
#   prompt      0       0      0        1         1        1
MASKS = [[1, 1], [1, 0, 0, 1], [0.5, 0.5], [1, 1, 1, 1], [0, 1], [0, 0]]
PLACES = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1)]
ROLLOUTS, PROMPTS = [0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1]
LENGTHS = [len(mask) for mask in MASKS]


def each(values: list[int]) -> Any:
    return np.repeat(np.array(values), LENGTHS)


STEP = StepTokens(
    mask=np.concatenate([np.array(mask, float) for mask in MASKS]),
    sample=each([0, 1, 2, 3, 4, 5]),
    position=np.concatenate([np.arange(n) for n in LENGTHS]),
    dp_rank=each([d for d, _ in PLACES]),
    microbatch=each([k for _, k in PLACES]),
    cp_rank=np.concatenate([np.arange(n) // (n // 2) for n in LENGTHS]),
    rollout=each(ROLLOUTS),
    prompt=each(PROMPTS),
    response_lengths=np.array([1, 3, 2, 4, 1, 2]),
    total_lengths=np.array([2, 4, 2, 4, 2, 2]),
)
CELLS = Cells(STEP, Split(num_microbatches=2, dp_size=2, cp_size=2))

# Cells are (sample, CP rank): 0/0, 0/1, 1/0, 1/1, ... 5/1. What each count is, sample by sample, or cell by cell.
COUNTS: dict[tuple[str, str, str, str], list[float]] = {
    # (what, scope, counting, unit)
    ("tokens", "step", "mask", "scope"): [10] * 6,
    ("tokens", "step", "active", "scope"): [11] * 6,
    ("tokens", "step", "length", "scope"): [16] * 6,
    ("tokens", "step", "response", "scope"): [13] * 6,
    ("tokens", "step", "total", "scope"): [16] * 6,
    ("tokens", "step", "clamped", "scope"): [11] * 6,
    ("tokens", "step", "masked_length", "scope"): [12] * 6,
    ("tokens", "step", "shifted", "scope"): [15] * 6,
    ("tokens", "step", "rectangle", "scope"): [24] * 6,
    ("tokens", "step", "clamped_microbatches", "scope"): [11] * 6,
    ("tokens", "dp_rank", "mask", "scope"): [5, 5, 5, 5, 5, 5],
    ("tokens", "microbatch", "mask", "scope"): [4, 4, 1, 5, 5, 0],
    ("tokens", "microbatch", "clamped", "scope"): [4, 4, 1, 5, 5, 1],
    ("tokens", "microbatch", "rectangle", "scope"): [8, 8, 2, 8, 8, 2],
    ("tokens", "microbatch", "width", "scope"): [4, 4, 2, 4, 4, 2],
    ("tokens", "microbatch", "padded_width", "scope"): [4] * 6,
    ("tokens", "microbatch", "padded_rectangle", "scope"): [8, 8, 4, 8, 8, 4],
    ("tokens", "microbatch_over_dp", "mask", "scope"): [9, 9, 1, 9, 9, 1],
    ("tokens", "step", "mask", "sample"): [2, 2, 1, 4, 1, 0],
    ("tokens", "step", "response", "sample"): [1, 3, 2, 4, 1, 2],
    ("tokens", "step", "mask", "rollout"): [4, 4, 1, 4, 1, 0],
    ("tokens", "step", "mask", "prompt"): [5, 5, 5, 5, 5, 5],
    ("tokens", "microbatch", "mask", "prompt"): [4, 4, 1, 5, 5, 0],
    # Pieces without a token: of micro-batch (0, 1) none, of (1, 1) both; each half token of sample 2 counts as one.
    ("tokens", "step", "clamped_pieces", "scope"): [13] * 12,
    ("tokens", "cp_place", "mask", "scope"): [2, 2, 2, 2, 0.5, 0.5, 2, 3, 2, 3, 0, 0],
    ("tokens", "rank", "mask", "scope"): [2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2, 3, 2, 3, 2, 3],
    ("tokens", "cp_place", "mask", "sample"): [1, 1, 1, 1, 0.5, 0.5, 2, 2, 0, 1, 0, 0],
    ("sample", "step", "all", "scope"): [6] * 6,
    ("sample", "step", "active", "scope"): [5] * 6,
    ("rollout", "step", "all", "scope"): [5] * 6,
    ("rollout", "step", "active", "scope"): [4] * 6,
    ("prompt", "step", "all", "scope"): [2] * 6,
    ("sample", "dp_rank", "all", "scope"): [3] * 6,
    ("sample", "microbatch", "all", "scope"): [2, 2, 1, 2, 2, 1],
    ("sample", "microbatch", "active", "scope"): [2, 2, 1, 2, 2, 0],
    ("rollout", "microbatch", "all", "scope"): [1, 1, 1, 2, 2, 1],
    ("rollout", "step", "all", "prompt"): [2, 2, 2, 3, 3, 3],
    ("sample", "step", "active", "prompt"): [3, 3, 3, 2, 2, 2],
    ("microbatch", "dp_rank", "active", "scope"): [2, 2, 2, 1, 1, 1],
}


@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_what_is_counted_around_every_cell(count: tuple[str, str, str, str]) -> None:
    values = COUNTS[count]
    np.testing.assert_array_equal(CELLS.values(Count(*count)), np.repeat(values, 12 // len(values)))


def test_every_way_of_counting_is_tried() -> None:
    assert {counting for what, _, counting, _ in COUNTS if what == "tokens"} == set(COUNTINGS)
    assert {scope for what, scope, *_ in COUNTS if what == "tokens"} == set(SCOPES)


def test_parts_are_those_the_step_was_split_into() -> None:
    assert CELLS.scopes() == list(SCOPES)
    alone = {name: np.zeros_like(STEP.sample) for name in ("dp_rank", "microbatch", "cp_rank")}
    columns = {**vars(STEP), **alone}
    assert Cells(StepTokens(**columns), Split()).scopes() == ["step"]
    columns["microbatch"] = STEP.microbatch
    assert Cells(StepTokens(**columns), Split(num_microbatches=2)).scopes() == ["step", "microbatch"]


def test_parts_without_a_token_or_an_entry_are_parts() -> None:
    """DP 2 x CP 2 x 3 micro-batches, the third of both ranks without a mask entry."""
    cells = Cells(STEP, Split(num_microbatches=3, dp_size=2, cp_size=2))
    pieces, microbatches = ("dp_rank", "microbatch", "cp_rank"), ("dp_rank", "microbatch")
    assert [cells.number_of_parts(names) for names in (pieces, microbatches, ("rollout",))] == [12, 6, 5]
    everywhere = StepTokens(**{**vars(STEP), "cp_rank": np.full_like(STEP.sample, -1)})  # every CP rank holds all
    assert Cells(everywhere, Split(cp_size=2)).number_of_parts(pieces) == 4


def test_an_average_is_the_steps_count_over_the_number_of_parts() -> None:
    for count, average in {
        Count("tokens", "microbatch"): 10 / 4,
        Count("tokens", "cp_place"): 10 / 8,
        Count("tokens", unit="rollout"): 10 / 5,
        Count("sample", "dp_rank", "all"): 6 / 2,
        Count("sample", counting="active", unit="prompt"): 6 / 2,
        Count("microbatch", "dp_rank", "active"): 4 / 2,
    }.items():
        assert CELLS.average(count) == average, count
