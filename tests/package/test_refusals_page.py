"""docs/refusals.md is what the tables of the tests say."""

import importlib.util
import sys
from pathlib import Path

import list_refusals
import pytest
from repository import ROOT

PAGE = ROOT / "docs" / "refusals.md"
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron.core") is None, reason="needs Megatron")


@needs_megatron
def test_the_committed_page_is_what_the_tool_writes() -> None:
    assert list_refusals.page() == PAGE.read_text()


@needs_megatron
def test_a_page_with_another_row_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    page = tmp_path / "refusals.md"
    command = ["list_refusals.py", "--check", "--page", str(page)]
    monkeypatch.setattr(sys, "argv", command)
    page.write_text(PAGE.read_text())
    list_refusals.main()
    lines = PAGE.read_text().splitlines(keepends=True)
    page.write_text("".join(lines[:-1]))
    with pytest.raises(SystemExit, match=r"Run python tools/list_refusals\.py"):
        list_refusals.main()


def test_every_table_of_refusals_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_refusals.left_out() == []
    monkeypatch.setattr(list_refusals, "TABLES", list_refusals.TABLES[1:])
    assert list_refusals.left_out() == ["unit/test_samples.py: REFUSALS"]


def test_patterns_are_shown_as_text() -> None:
    assert (
        list_refusals.plain(r"(?s)shape \(2, 3\).*Pass list\(loss_masks\)") == "shape (2, 3) ... Pass list(loss_masks)"
    )
    assert list_refusals.plain(r"rollouts\.all is 0.5[?]") == "rollouts.all is 0.5?"
    assert list_refusals.cell("a | b") == r"`a \| b`"
    assert list_refusals.cell("pass `x`") == "`` pass `x` ``"


def test_the_page_has_a_row_for_each_wrong_use_and_no_legal_one() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "where tested" not in line]
    assert len(rows) > 300
    assert sum("divided by the number of micro-batches" in row for row in rows) == 1
    assert not any(row.startswith("| right |") for row in rows)
    assert "refusals.md" in (ROOT / "docs" / "exactness.md").read_text()
