"""The tables of docs/bench/engines-cpu.txt, and the numbers of the engines' page, from what a run printed."""

import re
from pathlib import Path

import engine_tables
from repository import ROOT

PAGE, FILE = ROOT / "docs/engines.md", ROOT / "docs/bench/engines-cpu.txt"
LOG = """\
| engine | version | setting | its own error | with ours |
|---|---|---|---|---|
| verl | `1dda039b` | a, b | 0.5 | 1e-07 |
| engine | fault planted in its code | outcome |
|---|---|---|
| verl | doubled | stopped |
| verl | ids shifted | not proved, as it says |
| slime | doubled | stopped |
"""


def written(tmp_path: Path, log: str) -> tuple[str, str]:
    """The file of tables, and the page."""
    file, page, printed = tmp_path / "tables.txt", tmp_path / "page.md", tmp_path / "log"
    file.write_text(FILE.read_text())
    page.write_text(PAGE.read_text())
    printed.write_text(log)
    engine_tables.main(str(printed), str(file), str(page))
    return file.read_text(), page.read_text()


def test_rows_of_a_run_take_the_place_of_their_versions(tmp_path: Path) -> None:
    before, (after, page) = FILE.read_text(), written(tmp_path, LOG)
    assert written(tmp_path, "") == (before, PAGE.read_text())
    assert "| verl | `1dda039b` | a, b | 0.5 | 1e-07 |\n| vime" in after
    assert after.count("`1dda039b`") == 1
    assert after.count("| verl | 0.9.1 |") == before.count("| verl | 0.9.1 |") > 1
    assert "| verl | 2 | 1 | 1 |\n" in after
    (row,) = [line for line in before.splitlines() if line.startswith("| slime, miles |")]
    assert row in after  # the run planted none in miles
    assert "| verl | `1dda039b` | a, b: 0.5 |\n" in page
    planted, stopped, said = (
        sum(int(row[column]) for row in engine_tables.rows_of(after.partition("Faults planted")[2], 4))
        for column in (1, 2, 3)
    )
    assert planted == stopped + said
    assert f"plant [{planted} faults]" in page
    assert f"plant [{planted} faults]" not in PAGE.read_text()
    assert re.search(rf"{stopped}\s+abort before the optimizer, and of {said} the line says", page)
