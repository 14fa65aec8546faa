"""Contents of pages: commands and code. Links are checked where the site is built (tools/docs.sh)."""

import re
from collections.abc import Iterator

from repository import ROOT

#: Pages that are written by hand.
ENGINE_PAGES = sorted((ROOT / "docs" / "engines").glob("*.md"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ENGINE_PAGES]

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
BEGINNING = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:tools/\S+\.(?:sh|py)|examples/\S+\.(?:sh|slurm)|python3?|torchrun|pip|sbatch|mkdocs)(?:\s|$)"
)


def commands_of(text: str) -> Iterator[str]:
    """Commands of a page: one line each, comments left out."""
    for block in BLOCK.findall(text):
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            if command := re.sub(r"(^|\s+)#.*$", "", line).strip():
                yield command
    for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)):
        if BEGINNING.match(code):
            yield code


def code_of(page: str, language: str = "python") -> list[str]:
    """The blocks of a page under docs (or README.md) in that language."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def code_under(page: str, heading: str) -> str:
    """The only Python block under a heading of a page, up to the next heading."""
    text = (ROOT / "docs" / page).read_text()
    fences = r"^```.*?^```|(^#+ [^\n]*)$"  # a comment in a block is no heading
    titles = [match for match in re.finditer(fences, text, flags=re.MULTILINE | re.DOTALL) if match[1]]
    ends = [*(title.start() for title in titles[1:]), len(text)]
    bodies = {title[1].lstrip("# "): text[title.end() : end] for title, end in zip(titles, ends, strict=True)}
    (block,) = re.findall(r"^```python\n(.*?)^```", bodies[heading], flags=re.MULTILINE | re.DOTALL)
    return block
