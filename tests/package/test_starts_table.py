"""The table of what starts ran, on docs/engines.md, against the rows that the start tests recorded."""

import re

import pytest
from repository import ROOT

REAL, PAGE = ROOT / "tests" / "engines" / "real", (ROOT / "docs" / "engines.md").read_text()
HEAD = "| started | evaluation | sleep and wake | resumed |"
#: What the row of a stage is called in docs/bench/engines-cpu.txt, after "started: ".
STAGES = (r"`\w+`.*, an evaluation", "step after sleep", "step from a checkpoint")
FILES = {"train_rl.py": "train_rl", "Megatron-Bridge": "bridge", "ms-swift": "ms_swift", "NeMo-RL": "nemo_rl"}
NAMES = {"train_rl.py": "megatron-lm", "Megatron-Bridge": "bridge"}
RECORDED = re.findall(
    r"^\| (\S+) \| \S+ \| started: (.*) \| \S+ \| (\S+) \|$",
    (ROOT / "docs/bench/engines-cpu.txt").read_text(),
    flags=re.MULTILINE,
)
TABLE = PAGE.partition(HEAD)[2].partition("\n\n")[0]
ROWS = [
    (engine, cells.split(" | "))
    for engines, cells in re.findall(r"^\| (.*?) \| (.*) \|$", TABLE, flags=re.MULTILINE)
    if not engines.startswith("-")
    for engine in engines.split(", ")
]


def test_every_engine_that_starts_has_a_row() -> None:
    assert {engine for engine, *_ in RECORDED} <= {NAMES.get(engine, engine.lower()) for engine, _ in ROWS}


@pytest.mark.parametrize(("engine", "cells"), ROWS, ids=[engine for engine, _ in ROWS])
def test_a_cell_names_what_ran(engine: str, cells: list[str]) -> None:
    """A stage that a start test recorded names the engine's own functions, which the test has; another says why not."""
    recorded = [setting for of, setting, _ in RECORDED if of == NAMES.get(engine, engine.lower())]
    paths = [*REAL.glob(f"test_start_{FILES.get(engine, engine.lower())}.py")]
    if engine in ("slime", "vime", "miles"):
        paths.append(ROOT / "tests" / "support" / "slime_starts.py")
    code = "\n".join(path.read_text().split('"""', 2)[2] for path in paths)  # without what the files say of themselves
    for stage, cell in zip(STAGES, cells, strict=True):
        named = re.findall(r"`([^`]+)`", cell)
        ran = any(re.fullmatch(stage, setting) for setting in recorded)
        assert ran == (not cell.startswith("no: ")), (stage, cell)
        assert not ran or named
        assert not ran or all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code) for name in named), (named, engine)
