"""docs/architecture.md has a line for every file of the package, and for none that is not there."""

import re

from repository import ROOT


def test_every_file_has_its_line() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    lines = page[page.index("## A line a file") : page.index("## Where to add")]
    named = set(re.findall(r"`(\w+\.(?:py|ini))`", "\n".join(re.findall(r"^\| (.*?) \|", lines, flags=re.MULTILINE))))
    package = ROOT / "megatron_rl_loss"
    files = {path.name for path in [*package.rglob("*.py"), *package.glob("*.ini")]}
    assert named == files
