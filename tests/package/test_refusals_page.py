"""docs/refusals.md is what the tables of the tests say."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import list_refusals
import pytest
from repository import ROOT

PAGE = ROOT / "docs" / "refusals.md"
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron.core") is None, reason="needs Megatron")


def checked(page: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it imports the tests that hold the tables."""
    command = [sys.executable, str(ROOT / "tools" / "list_refusals.py"), "--check", "--page", str(page)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_megatron
def test_the_committed_page_is_what_the_tool_writes() -> None:
    done = checked(PAGE)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_megatron
def test_a_page_with_another_row_is_not(tmp_path: Path) -> None:
    """Negative control."""
    page = tmp_path / "refusals.md"
    lines = PAGE.read_text().splitlines(keepends=True)
    page.write_text("".join(lines[:-1]))
    done = checked(page)
    assert done.returncode == 1
    assert "Run python tools/list_refusals.py" in done.stderr


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
