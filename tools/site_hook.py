"""A hook of mkdocs.yml: puts the source of each page beside its HTML, and an index of these sources, llms.txt.

A reader that is a program takes `docs/tasks.md` in place of `docs/tasks.html`. The index follows https://llmstxt.org:
the name, what it is, and under a heading for each part of the navigation its pages with their first sentence.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Nav = Sequence[Any]


def pages_of(nav: Nav, part: str = "Pages") -> Iterator[tuple[str, str, str]]:
    """Part, title ("" for that of the page) and path of each page of the navigation; parts are one level deep."""
    for entry in nav:
        if isinstance(entry, str):
            yield part, "", entry
        else:
            for title, inside in entry.items():
                yield from [(part, title, inside)] if isinstance(inside, str) else pages_of(inside, title)


def opening(page: str) -> tuple[str, str]:
    """The title of a page, and its first sentence without links and marks."""
    title = re.search(r"^# (.+)$", page, re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    prose = next((text for text in paragraphs if re.match(r"[A-Za-z`*\[]", text.strip())), "")
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split())).replace("*", "")
    return title[1] if title else "", re.split(r"(?<=\.)\s", words)[0].rstrip(":")


def index_of(name: str, nav: Nav, folder: Path) -> str:
    """The text of llms.txt for pages in a folder."""
    first = next(path for _, _, path in pages_of(nav))
    lines = [f"# {name}", "", f"> {opening((folder / first).read_text(encoding='utf-8'))[1]}"]
    parts = dict[str, list[str]]()
    for part, title, path in pages_of(nav):
        own_title, sentence = opening((folder / path).read_text(encoding="utf-8"))
        parts.setdefault(part, []).append(f"- [{title or own_title}]({path}): {sentence}")
    for part, entries in parts.items():
        lines += ["", f"## {part}", "", *entries]
    return "\n".join([*lines, ""])


def on_post_build(config: Mapping[str, Any]) -> None:
    """Write the sources and the index into the built site; mkdocs calls it."""
    pages, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for _, _, path in pages_of(config["nav"]):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages / path, site / path)
    (site / "llms.txt").write_text(index_of(config["site_name"], config["nav"], pages), encoding="utf-8")
