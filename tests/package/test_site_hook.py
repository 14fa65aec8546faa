"""`tools/site_hook.py`: the sources of pages beside the site, and llms.txt. `tools/docs.sh` builds the site itself."""

import re
from pathlib import Path

import site_hook
from pages import PAGES
from repository import ROOT

#: As mkdocs reads a nav: pages with and without titles of their own, and a part of several pages.
NAV = [
    {"Start": "README.md"},
    {"Use it": [{"Tasks": "docs/tasks.md"}, "docs/check.md"]},
    {"Changes": "CHANGELOG.md"},
]


def test_sources_and_index_are_written_beside_the_pages(tmp_path: Path) -> None:
    site_hook.on_post_build({"docs_dir": str(ROOT), "site_dir": str(tmp_path), "site_name": "a site", "nav": NAV})
    text = (tmp_path / "llms.txt").read_text()
    head, *sections = text.split("\n## ")
    assert re.fullmatch(r"# a site\n\n> [A-Z][^\n]*\.\n", head)
    assert [section.partition("\n")[0] for section in sections] == ["Pages", "Use it"]
    links = re.findall(r"^- \[([^\]]+)\]\((\S+)\): \S.*$", text, flags=re.MULTILINE)
    assert links == [
        *(("Start", "README.md"), ("Changes", "CHANGELOG.md"), ("Tasks", "docs/tasks.md")),
        ("Check your own trainer", "docs/check.md"),
    ]
    for _, path in links:
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()


def test_every_page_opens_with_a_sentence() -> None:
    for page in PAGES:
        title, sentence = site_hook.opening(page.read_text())
        assert title, page
        assert len(sentence.split()) >= 4, (page, sentence)
        assert not re.search(r"\]\(|^[|#>]", sentence), (page, sentence)


def test_marks_links_and_blocks_are_no_part_of_a_sentence() -> None:
    page = (
        "![x](y.png)\n\n# A title\n\n```bash\nCode. Here\n```\n\n| a |\n\n[A **link**](z.md) of\nit: first. Second.\n"
    )
    assert site_hook.opening(page) == ("A title", "A link of it: first.")
    assert site_hook.opening("no title here:\n") == ("", "no title here")


def test_the_site_has_the_hook() -> None:
    assert re.search(r"^hooks:\n  - tools/site_hook\.py\b", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
