"""What pages show: their commands."""

import re
from collections.abc import Iterator

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
BEGINNING = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:tools/\S+\.(?:sh|py)|examples/\S+\.(?:sh|slurm)|python3?|torchrun|pip|sbatch|mkdocs)(?:\s|$)"
)


def commands_of(text: str) -> Iterator[str]:
    """Of a page: one line each, comments left out."""
    for block in BLOCK.findall(text):
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            if command := re.sub(r"(^|\s+)#.*$", "", line).strip():
                yield command
    for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)):
        if BEGINNING.match(code):
            yield code
