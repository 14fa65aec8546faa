"""Faults planted in a copy of an engine's real code, and the table of what became of them."""

from pathlib import Path
from typing import Any

import pytest
from checkouts import Framework, checkout
from ranks import RankError, run_ranks


def planted(framework: Framework, folder: Path, edits: dict[str, tuple[str, str]]) -> str:
    """A copy of the checkout with edits by file: what stands there once or more, and what comes in its place.

    Files are links to the checkout's, but for the edited ones.
    """
    root, package = Path(checkout(framework)), framework.proof.partition("/")[0]
    for source in (one for one in (root / package).rglob("*") if one.is_file()):
        copy = folder / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(source)
    for path, (old, new) in edits.items():
        text = (root / path).read_text()
        assert old in text, f"{path} has no {old!r}"
        (folder / path).unlink()
        (folder / path).write_text(text.replace(old, new))
    return str(folder)


def assert_stopped(record_property: Any, framework: Framework, plant: str, match: str, *launch: Any) -> None:
    """A launch that ends on its ranks with that error; `launch` is what `run_ranks` takes."""
    with pytest.raises(RankError, match=match):
        run_ranks(*launch)
    record_plant(record_property, framework, plant, "stopped")


def record_plant(record_property: Any, framework: Framework, plant: str, outcome: str) -> None:
    """For the table at the end of a run."""
    engine = framework.variable.removesuffix("_PATH").lower().replace("_", "-")
    record_property("plant", (engine, plant, outcome))
