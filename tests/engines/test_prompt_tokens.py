"""Prompt ids against the prompts' tokens: ids moved by a row, and what looks like it and is sound."""

import pytest

from megatron_rl_loss.core.aggregation import LossModes
from megatron_rl_loss.engines.prompt_tokens import is_by_prompt, misplaced_ids

PROMPTS = ["[1]", "[1]", "[2]", "[2]", "[3]", "[3]"]


@pytest.mark.parametrize(
    ("ids", "prompts", "is_misplaced"),
    [
        ("aabbcc", PROMPTS, False),
        ("caabbc", PROMPTS, True),  # moved by a row
        ("aabbca", PROMPTS, True),  # one row
        ("aabbbb", PROMPTS, False),  # merged: group sizes tell
        ("aaabbb", ["[1]", "[1, 2]", "[1, 3]", "[2]", "[2, 2]", "[2, 3]"], False),  # turns
        ("aabbcc", ["[1]"] * 4 + ["[3]"] * 2, False),  # a prompt twice
    ],
)
def test_ids_that_stand_at_other_rows(ids: str, prompts: list[str], is_misplaced: bool) -> None:
    says = misplaced_ids(list(ids), prompts, None)
    assert ("ids stand at other rows" in says) == is_misplaced == (says != "")


@pytest.mark.parametrize(
    ("ids", "group_size", "is_split"),
    [
        ("aabbcc", 2, False),
        ("abccdd", 2, True),  # an id for each row of a group
        ("aabcdd", 2, True),
        ("aabbcc", 4, False),  # filters made groups smaller
        ("abccdd", None, False),
    ],
)
def test_rows_of_a_group_with_several_ids(ids: str, group_size: int | None, is_split: bool) -> None:
    says = misplaced_ids(list(ids), PROMPTS, None, group_size)
    assert ("2 rows with the same prompt tokens have 2 prompt ids where 2 are generated" in says) == is_split
    assert bool(says) == is_split
    twice = misplaced_ids(["a", "a", "b", "b"], ["[1]"] * 4, None, 2)
    assert not twice, "a prompt that came twice has the rows of two groups"


def test_modes_that_need_prompts() -> None:
    assert is_by_prompt(LossModes.resolve("prompt_mean"))
    assert not is_by_prompt(LossModes.resolve("sample_mean"))
