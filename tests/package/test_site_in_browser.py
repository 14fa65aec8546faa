"""The built site in a real browser, headless, from files: no page is wider than the screen, and search answers.

`tools/docs.sh` builds it. Skipped where it is not built, or where there is no Chromium.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

SITE = ROOT / "build" / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: tools/docs.sh"),
]

#: What is wider than its place: the page itself, and what programs print, whose lines wrap.
WIDTHS = """
const over = (node) => node.scrollWidth - node.clientWidth;
const printed = [...document.querySelectorAll(".language-text code, .language-console code")];
found({page: over(document.documentElement), printed: Math.max(0, ...printed.map(over))});
"""
SEARCH = """
const field = document.querySelector("[data-md-component=search-query]");
document.querySelector("[data-md-toggle=search]").click();
field.focus();
field.value = "prompt_mean";
field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true, key: "n"}));
const links = () => [...document.querySelectorAll(".md-search-result__link")].map((link) => link.href);
setTimeout(() => found(links()), 3000);
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    shutil.copytree(SITE, folder)
    return folder


def asked(page: Path, script: str, width: int, milliseconds: int) -> Any:
    """What the script finds in a page, opened as a file in a window of that width."""
    text = page.read_text()
    report = 'const found = (value) => document.documentElement.setAttribute("data-found", JSON.stringify(value));'
    wrapped = f'<script>addEventListener("load", () => setTimeout(() => {{{report}\n{script}}}, 500));</script>'
    probe = page.with_name(f"probe-{page.name}")
    probe.write_text(text.replace("</body>", wrapped + "</body>"))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--window-size={width},900"]
    command.append(f"--virtual-time-budget={milliseconds}")
    done = subprocess.run([*command, probe.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found is not None, (page, done.stderr[-2000:])
    return json.loads(html.unescape(found[1]))


PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_wider_than_the_screen(page: str, copied: Path) -> None:
    """At a width below the column of a wide screen."""
    assert asked(copied / page, WIDTHS, 500, 3000) == {"page": 0, "printed": 0}


def test_search_answers_in_a_file(copied: Path) -> None:
    links = asked(copied / "docs" / "proof.html", SEARCH, 1280, 15000)
    assert any("docs/names.html" in link or "docs/data.html" in link or "index.html" in link for link in links)
