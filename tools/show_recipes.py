"""Put the recipes' code into docs/recipes.md: below a paragraph that links to a file, the fenced block shows it whole.

python tools/show_recipes.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
SHOWN = re.compile(
    r"(\]\(\.\./(?P<file>examples/recipes/[\w.]+)\)[^\n]*\n(?:[^\n]+\n)*\n```(?:python|bash)\n).*?(?=^```$)",
    re.DOTALL | re.MULTILINE,
)


def shown_files(page: str) -> list[str]:
    """The files whose code the page shows, in its order."""
    return [found["file"] for found in SHOWN.finditer(page)]


def with_code(page: str) -> str:
    """The page with each of them as it is now."""
    return SHOWN.sub(lambda found: found[1] + (ROOT / found["file"]).read_text(), page)


if __name__ == "__main__":
    PAGE.write_text(with_code(PAGE.read_text()))
