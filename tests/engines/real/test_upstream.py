"""Patches of docs/upstream, in a copy of the engine that each is for: the tests that it brings, by their own runner.

A patch must apply to the checkout, its tests must pass in the patched tree, and must fail where only the tests are
added. Nothing of this library is imported there. Set the engine's variable, such as VERL_PATH=~/verl.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import checkouts
import pytest
from checkouts import Framework, checkout
from plants import patched, write_patch
from repository import ROOT

pytestmark = pytest.mark.slow

#: What an engine's own tests import and this repository's environment lacks.
NEEDS = {
    "VERL_PATH": ("ray", "hydra", "tensordict", "codetiming", "transformers", "datasets"),
    "AREAL_PATH": (),
    "RLINF_PATH": (),
    "SKYRL_PATH": ("ray", "cloudpathlib", "skyrl_gym", "jaxtyping", "loguru", "omegaconf", "transformers"),
}
PATCHES = sorted((ROOT / "docs" / "upstream").glob("*.patch"), key=lambda path: path.name)


def framework_of(patch: Path) -> Framework:
    """The engine that the first word of the file's name names."""
    variable = f"{patch.name.partition('-')[0].upper()}_PATH"
    (of_name,) = (
        value for value in vars(checkouts).values() if isinstance(value, Framework) and value.variable == variable
    )
    return of_name


def tests_in(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(tests/\S+)$", patch.read_text(), re.MULTILINE)


def run_tests(root: str, patch: Path) -> subprocess.CompletedProcess[str]:
    """The patch's tests, in the tree at `root`, as its maintainers run them on a CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests_in(patch)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": root, "TORCH_CUDA_ARCH_LIST": "9.0"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_brings_a_test_that_needs_it(patch: Path, tmp_path: Path) -> None:
    framework = framework_of(patch)
    checkout(framework)
    for package in NEEDS[framework.variable]:
        pytest.importorskip(package, reason=f"{package}, which the tests of {patch.name} import, is not installed")
    assert tests_in(patch)
    root = patched(framework, tmp_path, patch.name, only="tests/*")
    without = run_tests(root, patch)
    assert re.search(r"\d+ failed", without.stdout), without.stdout + without.stderr
    assert "error" not in without.stdout.splitlines()[-1]
    write_patch(tmp_path, patch.name, leave_out="tests/*")
    ran = run_tests(root, patch)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\d+ passed", ran.stdout)
