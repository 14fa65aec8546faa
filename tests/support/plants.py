"""Faults planted in a copy of an engine's real code, and the table of what became of them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkouts import Framework, checkout
from ranks import RankError, run_ranks
from repository import ROOT

from megatron_rl_loss import extend

UPSTREAM = ROOT / "docs" / "upstream"
#: What the first step says of a loss with a term that the engine's config does not name.
MORE_TERMS = f"NOT PROVED: {extend.MORE_TERMS}"


class Plant(NamedTuple):
    """A fault: its edits by file, the error that stops it, the case and the (ranks, context-parallel ranks) of it."""

    fault: str
    edits: dict[str, tuple[str, str]]
    match: str = "was expected, but the first training step does something else"
    case: dict[str, Any] = {}  # noqa: RUF012
    world: tuple[int, int] = (1, 1)


def planted(framework: Framework, folder: Path, edits: dict[str, tuple[str, str]]) -> str:
    """A copy of the checkout with edits by file: what stands there once or more, and what comes in its place.

    Files are links to the checkout's, but for the edited ones.
    """
    root, package = Path(checkout(framework)), framework.proof.partition("/")[0]
    for source in (path for path in (root / package).rglob("*") if path.is_file()):
        copy = folder / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(source)
    for beside in root.iterdir():
        if beside.name != package:
            (folder / beside.name).symlink_to(beside)
    for path, (old, new) in edits.items():
        text = (root / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (folder / path).unlink()
        (folder / path).write_text(text.replace(old, new))
    return str(folder)


def patched(framework: Framework, folder: Path, name: str, only: str = "*") -> str:
    """A copy of the checkout with that patch of docs/upstream, or with its changes to the files `only`."""
    root = planted(framework, folder, {})
    for top in {path.partition("/")[0] for path in _paths_of(name)}:  # `planted` links what is not the engine's package
        beside = folder / top
        if beside.is_symlink() and beside.is_dir():
            original = beside.resolve()
            beside.unlink()
            shutil.copytree(original, beside, copy_function=os.symlink)
    write_patch(folder, name, only)
    return root


def write_patch(folder: Path, name: str, only: str = "*", leave_out: str = "") -> None:
    """Apply that patch of docs/upstream to the files in `folder` that are `only` and not `leave_out`."""
    for path in filter(Path.is_symlink, (folder / path for path in _paths_of(name))):
        text = path.read_text()
        path.unlink()  # a link to the checkout's own
        path.write_text(text)
    chosen = [f"--exclude={leave_out}"] * bool(leave_out) + [f"--include={only}"]
    command = ["git", "apply", *chosen, str(UPSTREAM / name)]
    applied = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not applied.returncode, applied.stderr


def _paths_of(name: str) -> list[str]:
    lines = (UPSTREAM / name).read_text().splitlines()
    return [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]


def assert_stopped(record_property: Any, framework: Framework, plant: str, match: str, *launch: Any) -> None:
    """A launch that ends on its ranks with that error; `launch` is what `run_ranks` takes."""
    with pytest.raises(RankError, match=match):
        run_ranks(*launch)
    record_plant(record_property, framework, plant, "stopped")


def assert_stops(record_property: Any, framework: Framework, train: Any, plant: Plant, folder: Path) -> None:
    """All ranks end before the optimizer's step."""
    root, case = planted(framework, folder, plant.edits), {"mode": "sample_mean", "settings": {}} | plant.case
    assert_stopped(
        record_property, framework, plant.fault, plant.match, plant.world[0], train, root, plant.world[1], [case]
    )


def assert_unproved(record_property: Any, framework: Framework, train: Any, plant: Plant, folder: Path) -> None:
    """A launch goes on, and says of its first step that it is not proved, with these words."""
    case = {"mode": "sample_mean", "settings": {}, "outcome": "not proved", "says": plant.match} | plant.case
    run_ranks(plant.world[0], train, planted(framework, folder, plant.edits), plant.world[1], [case])
    record_plant(record_property, framework, plant.fault, "says that it is not proved")


def record_plant(record_property: Any, framework: Framework, plant: str, outcome: str) -> None:
    """Record a planted fault for the table at the end of a run."""
    engine = framework.variable.removesuffix("_PATH").lower().replace("_", "-")
    record_property("plant", (engine, plant, outcome))
