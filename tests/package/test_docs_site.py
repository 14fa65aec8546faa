"""The documentation builds as a site, strictly: pages, links, anchors."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

OWN = ROOT / ".venv-docs" / "bin" / "python"
PYTHON = sys.executable if importlib.util.find_spec("mkdocs") else os.environ.get("DOCS_PYTHON", str(OWN))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs mkdocs: run tools/docs.sh once"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("docs", "examples", "tools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in [*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "mkdocs.yml"]:
        shutil.copy(file, tmp_path)
    return tmp_path


def build(root: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"DOCS_PYTHON": PYTHON}
    return subprocess.run([root / "tools" / "docs.sh"], capture_output=True, text=True, env=environment)


def test_the_site_has_every_page(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy / "build" / "site"
    for page in (copy / "docs").rglob("*.md"):
        made = site / page.relative_to(copy).with_suffix(".html")
        assert made.is_file() or (made.with_name("index.html").is_file() and page.name == "README.md"), page
    if (site / "docs" / "api").exists():
        assert 'id="make_pg_loss_reducer"' in (site / "docs" / "api" / "reduction.html").read_text()


def test_a_link_that_leads_nowhere_fails_it(copy: Path) -> None:
    """Negative control."""
    page = copy / "docs" / "exactness.md"
    page.write_text(page.read_text() + "\n[a page](none.md), [a heading](architecture.md#none)\n")
    done = build(copy)
    assert done.returncode != 0
    assert "'none.md'" in done.stderr
    assert "'#none'" in done.stderr
