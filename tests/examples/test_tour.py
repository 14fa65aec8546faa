"""docs/tour.ipynb: a fresh interpreter prints what it shows, and draws as many pictures."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tour
from repository import ROOT

KINDS = ("markdown", "code")
SHOWN = json.loads(tour.NOTEBOOK.read_text(encoding="utf-8"))


def printed(notebook: dict[str, Any]) -> list[str]:
    """The text of each code cell; without its numbers for the online run, whose samples depend on rounding."""
    texts = [
        "".join(line for output in cell["outputs"] for line in output.get("text", []))
        for cell in tour.code_cells(notebook)
    ]
    return [*texts[:-1], re.sub(r"[\d,]*\d", "#", texts[-1])]


def pictures(notebook: dict[str, Any]) -> list[int]:
    """The number of each code cell's pictures."""
    return [sum("data" in output for output in cell["outputs"]) for cell in tour.code_cells(notebook)]


@pytest.mark.slow
def test_a_fresh_interpreter_prints_what_the_notebook_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "tools" / "tour.py"), "--out", "again.ipynb"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    again = json.loads((tmp_path / "again.ipynb").read_text(encoding="utf-8"))
    assert printed(again) == printed(SHOWN)
    assert pictures(again) == pictures(SHOWN)


def test_the_notebook_shows_what_it_should() -> None:
    assert tour.NOTEBOOK.stat().st_size <= 300_000
    assert sum(pictures(SHOWN)) == 3
    text = "".join(printed(SHOWN))
    assert text.index("NOT SOUND: my_loss") < text.index("\nSOUND: my_loss is token_mean")
    assert text.count("proved on # tokens") == 2
    assert "rises by more than #.#: True" in text
    assert all(cell["execution_count"] == number for number, cell in enumerate(tour.code_cells(SHOWN), 1))


def test_its_page_has_all_of_it() -> None:
    sources = {kind: ["".join(c["source"]) for c in SHOWN["cells"] if c["cell_type"] == kind] for kind in KINDS}
    page = tour.page(SHOWN)
    assert [source for kind in KINDS for source in sources[kind] if source not in page] == []
    assert page.count("](data:image/png;base64,") == sum(pictures(SHOWN))
