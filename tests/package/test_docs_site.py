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


def build(root: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"DOCS_PYTHON": PYTHON}
    return subprocess.run([root / "tools" / "docs.sh"], capture_output=True, text=True, env=environment)


def test_the_site_has_every_page_and_a_wrong_link_fails_it(tmp_path: Path) -> None:
    for name in ("docs", "examples", "tools", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in [*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "mkdocs.yml"]:
        shutil.copy(file, tmp_path)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "build" / "site"
    for page in (tmp_path / "docs").rglob("*.md"):
        made = site / page.relative_to(tmp_path).with_suffix(".html")
        assert made.is_file() or (made.with_name("index.html").is_file() and page.name == "README.md"), page
    assert 'id="make_pg_loss_reducer"' in (site / "docs" / "api" / "reduction.html").read_text()
    with (tmp_path / "docs" / "exactness.md").open("a") as page:
        page.write("\n[a page](none.md), [a heading](architecture.md#none)\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "'none.md'" in done.stderr
    assert "'#none'" in done.stderr
