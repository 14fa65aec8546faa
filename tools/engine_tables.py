"""Put the rows that a run of the engines' tests printed into docs/bench/engines-cpu.txt, and their numbers on the page.

    python tools/engine_tables.py LOG docs/bench/engines-cpu.txt docs/engines.md  # as tools/test_engines.sh does

Rows of an engine's version that the run has take the place of that version's; other rows stay. So do the counts of
planted faults of rows with an engine in which the run planted none. The page has the engines' own errors above 1e-5, in
one row for versions with the same ones, the largest error with this library, and the sums of the counts.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

_OWN = "| engine | version | setting: own error |"
_ENGINES, _PLANTED = "| engine | version | setting |", "| engine | planted |"
_OF_LAUNCHES = "`LossAggregation`, a loop of your own"


def rows_of(text: str, columns: int) -> list[tuple[str, ...]]:
    """The cells of each row of tables with that many columns, without their heads."""
    rows = [tuple(re.split(r" \| ", line[2:-2])) for line in re.findall(r"^\| .* \|$", text, re.MULTILINE)]
    return [row for row in rows if len(row) == columns and row[0] != "engine"]


def merged_errors(before: str, log: str) -> list[tuple[str, ...]]:
    """Rows of errors, by engine and in the order of the run."""
    new = rows_of(log, 5)
    measured = {row[:2] for row in new}
    return sorted([*(row for row in rows_of(before, 5) if row[:2] not in measured), *new], key=lambda row: row[0])


def merged_counts(before: str, log: str) -> list[tuple[str, ...]]:
    """Rows of counts: planted faults, those that stopped, those that are said not to be proved."""
    outcomes: dict[str, list[str]] = {}
    for engine, _, outcome in rows_of(log, 3):
        outcomes.setdefault(engine, []).append(outcome)
    counted = []
    for row in rows_of(before, 4):
        names = [name.lower().replace("_", "-") for name in row[0].split(", ")]
        row_outcomes = [outcome for name in names for outcome in outcomes[name]] if {*names} <= outcomes.keys() else []
        if row[0] == _OF_LAUNCHES:
            known = {name.lower() for other in rows_of(before, 4) for name in other[0].split(", ")}
            row_outcomes = [outcome for name, those in outcomes.items() if name not in known for outcome in those]
        stopped = row_outcomes.count("stopped")
        counted.append(
            (row[0], *map(str, (len(row_outcomes), stopped, len(row_outcomes) - stopped))) if row_outcomes else row
        )
    return counted


def table(text: str, head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """The text with these rows in the place of those of the table with that head."""
    begin = text.index("\n", text.index("\n", text.index(head)) + 1) + 1
    end = re.compile(r"^(?!\|)|\Z", re.MULTILINE).search(text, begin)
    assert end is not None
    return text[:begin] + "".join(f"| {' | '.join(row)} |\n" for row in rows) + text[end.start() :]


def page_of(page: str, errors: list[tuple[str, ...]], counts: list[tuple[str, ...]]) -> str:
    """The engines' page with the numbers of these rows."""
    own: dict[tuple[str, str], list[str]] = {}
    for engine, version, setting, error, _ in errors:
        if error != "-" and float(error) > 1e-5:
            own.setdefault((engine, version), []).append(f"{setting}: {error}")
    versions: dict[tuple[str, str], list[str]] = {}
    for (engine, version), settings in own.items():
        versions.setdefault((engine, "; ".join(settings)), []).append(version)
    rows = [(engine, ", ".join(of_all), settings) for (engine, settings), of_all in versions.items()]
    page = table(page, _OWN, rows)
    largest = max((row[4] for row in errors if row[4] != "-"), key=float)
    planted, stopped, said = (sum(int(row[column]) for row in counts) for column in (1, 2, 3))
    for pattern, number in (
        (r"(?<=is at most )\S+(?=\.)", largest),
        (r"(?<=plant \[)\d+(?= faults\])", planted),
        (r"\d+(?=\s+abort before the optimizer)", stopped),
        (r"(?<=of )\d+(?= the line says)", said),
    ):
        page, number_of_places = re.subn(pattern, str(number), page)
        assert number_of_places == 1, f"the engines' page must have one place for {pattern}"
    return page


def main(log: str, file: str, page: str) -> None:
    before, printed = Path(file).read_text(), Path(log).read_text()
    errors = merged_errors(before.partition("Faults planted")[0], printed)
    counts = merged_counts(before.partition("Faults planted")[2], printed)
    Path(file).write_text(table(table(before, _ENGINES, errors), _PLANTED, counts))
    Path(page).write_text(page_of(Path(page).read_text(), errors, counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
