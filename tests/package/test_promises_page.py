"""The table of the engines' page that says what the proof notices, from the registry of the promises' plants."""

import importlib
import sys

import pytest
from promises import EDITS, ENGINES, HOOKS, NOT_SEEN, OWN, PROMISES, SITES, own_faults, table
from repository import ROOT


def test_the_page_has_the_registrys_table() -> None:
    assert table() in (ROOT / "docs" / "engines.md").read_text(), f"the table must be:\n{table()}"


def test_each_promise_has_one_plant() -> None:
    for change, outcomes in PROMISES.items():
        for engine in outcomes:
            of_term = change.startswith("term added to the loss function") and engine in SITES
            plants = [of_term, engine in EDITS.get(change, {}), engine in OWN.get(change, {})]
            assert sum(plants) == 1, (change, engine)
    assert all(engine in PROMISES[change] for plants in (EDITS, OWN) for change in plants for engine in plants[change])


@pytest.mark.parametrize("engine", ENGINES)
def test_faults_that_are_named_are_among_the_engines_own(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests" / "engines" / "real"), *sys.path])
    module = importlib.import_module(f"test_real_{'slime_miles' if engine in HOOKS else engine}")
    named = {faults[engine] for faults in OWN.values() if engine in faults}
    assert named <= own_faults(module)
    assert NOT_SEEN not in [PROMISES[change][engine] for change, faults in OWN.items() if engine in faults]
