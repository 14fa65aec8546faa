"""Packaging. torch and NumPy are required; Megatron-Core is an extra, since many bring a checkout or a container."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_rl_loss/__init__.py").read_text())[1]

setup(
    name="megatron-rl-loss",
    version=VERSION,
    description="Policy-gradient loss aggregation for Megatron-Core, exact in every parallel layout",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=["megatron_rl_loss", "megatron_rl_loss.audit", "megatron_rl_loss.frameworks", "megatron_rl_loss.megatron"],
    package_data={"megatron_rl_loss": ["py.typed", "refusals.ini"]},
    python_requires=">=3.10",
    # Lengths and layouts are NumPy arrays: they are the host's, and small operations cost a third of torch's.
    install_requires=["torch>=2.6", "numpy>=1.26"],
    extras_require={
        # 0.17 and 0.18 have other heads of pretrain(); only 0.19 is tested. Megatron saves checkpoints with psutil,
        # uses einops with several distributed-optimizer instances, and logs to TensorBoard when asked.
        "megatron": ["megatron-core>=0.19,<0.20", "psutil", "einops", "tensorboard"],
        # Transformer Engine needs CUDA. NVIDIA Apex is optional too and only built from source: the package called
        # "apex" on the package index is an unrelated web toolkit.
        "te": ["transformer-engine[pytorch]"],
        "demo": ["tabulate"],
        "bench": ["tabulate", "matplotlib"],
        "audit": ["matplotlib"],  # its pictures; verdicts and reports need nothing
        "test": ["matplotlib", "pytest>=8", "pytest-timeout", "hypothesis", "ruff", "mypy", "types-tabulate"],
    },
)
