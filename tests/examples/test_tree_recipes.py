"""Recipes of samples that share prefixes: as launched, their gradients are those of each sample on its own.

Beside each a control: a branch that sees another, or positions that go on behind another branch, make them differ.
"""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from repository import EXAMPLES
from scripts import printed_by

from megatron_rl_loss import PrefixTree
from megatron_rl_loss.__main__ import copy_example

pytestmark = pytest.mark.slow


def blind(tree: Any, q: Any, k: Any, v: Any) -> Any:
    """Attention that sees all slots before: those of other branches, too."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def launched(folder: Path, script: str, change: str) -> str:
    """On a rank: what the script prints; with a change of what a tree does."""
    if change == "branches see each other":
        PrefixTree.attend = blind  # type: ignore[method-assign,assignment]
    elif change == "positions go on":
        PrefixTree.rotary_by_depth = lambda tree, model: contextlib.nullcontext()  # type: ignore[method-assign,assignment]
    return printed_by(folder, script)


def differences(printed: list[str]) -> list[float]:
    return [float(value) for value in re.findall(r"gradients differ by (\S+) of the largest", "".join(printed))]


@pytest.mark.parametrize("change", ["", "branches see each other"])
def test_plain_torch_with_ddp(change: str) -> None:
    printed = run_ranks(2, launched, EXAMPLES / "recipes", "tree_ddp.py", change)
    assert "proved on 1,024 tokens of 16 samples, 2 prompts of 8; by the gradients of all" in printed[0]
    slots = [int(number) for number in re.findall(r"(\d+) slots", printed[0])]
    assert slots == [256 + 8 * 64, 8 * (256 + 64)]
    (difference,) = differences(printed)
    assert difference > 1e-3 if change else difference < 2e-6


@pytest.mark.parametrize("change", ["", "positions go on"])
def test_megatrons_schedule_with_tensor_and_pipeline_parallelism(change: str, tmp_path: Path) -> None:
    copy_example("tree_gpt", tmp_path)
    printed = run_ranks(4, launched, tmp_path, "tree_gpt.py", change)
    text = "".join(printed)
    assert "proved on 256 tokens of 8 samples, 1 prompts of 8; by the gradients of all" in text
    assert sorted(map(int, re.findall(r"(\d+) slots", text))) == [2 * (192 + 4 * 32), 8 * 224]
    assert len(differences(printed)) == 4
    worst = max(differences(printed))
    assert worst > 1e-3 if change else worst < 2e-6
