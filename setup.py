"""Packaging. torch and NumPy are required; Megatron-Core is an extra, since many bring a checkout or a container."""

import os
import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
PACKAGE = "megatron_rl_loss"
VERSION = re.search(r'__version__ = "(.+)"', (HERE / PACKAGE / "__init__.py").read_text())[1]


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
    name="megatron-rl-loss",
    version=VERSION,
    description="Policy-gradient loss aggregation for Megatron-Core, exact in every parallel layout",
    long_description=for_an_index((HERE / "README.md").read_text(), os.environ.get("REPOSITORY_URL", "")),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "RLHF", "GRPO", "PPO", "loss", "Megatron", "context parallelism"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    # The root is named, so that an editable install puts it on the path: type checkers do not see import hooks.
    package_dir={"": "."},
    packages=find_packages(include=[PACKAGE, f"{PACKAGE}.*"]),
    package_data={"": ["*"]},
    cmdclass={"build_py": BuildWithExamples},
    python_requires=">=3.10",
    # NumPy works on masks that are on the host: its small operations cost a third of torch's.
    install_requires=["torch>=2.6", "numpy>=1.26"],
    extras_require={
        # Loops of one's own run on all of these (tools/test_versions.sh); `pretrain` is tested on 0.19. Megatron saves
        # checkpoints with psutil, uses einops with several distributed-optimizer instances, and logs to TensorBoard.
        "megatron": ["megatron-core>=0.15,<0.21", "psutil", "einops", "tensorboard"],
        # Transformer Engine needs CUDA. NVIDIA Apex is optional too and only built from source: the package called
        # "apex" on the package index is an unrelated web toolkit.
        "te": ["transformer-engine[pytorch]"],
        "demo": ["tabulate", "matplotlib"],
        "bench": ["tabulate", "matplotlib"],
        "audit": ["matplotlib"],  # its pictures; verdicts and reports need nothing
        # tqdm: Megatron's static inference engine.
        "test": [
            "matplotlib",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "tqdm",
            "ruff",
            "mypy",
            "types-tabulate",
        ],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5"],
    },
)
