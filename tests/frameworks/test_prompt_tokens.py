"""Prompt ids against the prompts' tokens: ids moved by a row, and what looks like it and is sound."""

import pytest

from megatron_rl_loss.frameworks.prompt_tokens import is_by_prompt, misplaced_ids
from megatron_rl_loss.modes.loss_modes import LossModes

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


def test_modes_that_need_prompts() -> None:
    assert is_by_prompt(LossModes.resolve("prompt_mean"))
    assert not is_by_prompt(LossModes.resolve("sample_mean"))
