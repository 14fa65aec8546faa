"""What packaging computes: the examples in a wheel, and README's links. All else is in `pyproject.toml`."""

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
PACKAGE = "megatron_rl_loss"
REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "")


class BuildWithExamples(build_py):
    """The examples go into a wheel, for `python -m megatron_rl_loss example`; an editable install finds them here."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            into = Path(self.build_lib, PACKAGE, "examples")
            shutil.copytree(HERE / "examples", into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


def for_an_index(page: str, repository: str) -> str:
    """Links and pictures for a page outside the repository: absolute where its address is known, else their words."""
    parts = re.split(r"(```.*?```)", page, flags=re.DOTALL)
    text = "".join(parts[::2])
    targets = dict(re.findall(r"^\[([^][]+)\]: (\S+)$", text, flags=re.MULTILINE))

    def link(match: "re.Match[str]") -> str:
        mark, words, target = match[1], match[2], match[3] or targets.get(match[2])
        if target is None or re.match("https?:", target):
            return match[0]
        kind = "raw" if mark else "blob"
        return f"{mark}[{words}]({repository}/{kind}/main/{target})" if repository else words

    for i in range(0, len(parts), 2):
        without = re.sub(r"^\[[^][]+\]: \S+\n", "", parts[i], flags=re.MULTILINE)
        parts[i] = re.sub(r"(!?)\[([^][]+)\](?:\(([^()]+)\))?", link, without)
    return "".join(parts)


setup(
    long_description=for_an_index((HERE / "README.md").read_text(), REPOSITORY_URL),
    long_description_content_type="text/markdown",
    project_urls={"Repository": REPOSITORY_URL} if REPOSITORY_URL else {},
    cmdclass={"build_py": BuildWithExamples},
)
