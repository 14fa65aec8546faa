"""The tables of docs/bench/engines-cpu.txt, from what a run printed."""

from pathlib import Path

import engine_tables
from repository import ROOT

FILE = ROOT / "docs/bench/engines-cpu.txt"
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


def written(tmp_path: Path, log: str) -> str:
    file, printed = tmp_path / "tables.txt", tmp_path / "log"
    file.write_text(FILE.read_text())
    printed.write_text(log)
    engine_tables.main(str(printed), str(file))
    return file.read_text()


def test_rows_of_a_run_take_the_place_of_their_versions(tmp_path: Path) -> None:
    before, after = FILE.read_text(), written(tmp_path, LOG)
    assert written(tmp_path, "") == before
    assert "| verl | `1dda039b` | a, b | 0.5 | 1e-07 |\n| vime" in after
    assert after.count("`1dda039b`") == 1
    assert after.count("| verl | 0.9.1 |") == before.count("| verl | 0.9.1 |") > 1
    assert "| verl | 2 | 1 | 1 |\n" in after
    (row,) = [line for line in before.splitlines() if line.startswith("| slime, miles |")]
    assert row in after  # the run planted none in miles
