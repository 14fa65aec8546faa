"""Patches of docs/upstream, in a copy of the engine that each is for: the tests that it brings, by their own runner.

A patch must apply to the checkout, its tests must pass in the patched tree, and must fail where only the tests are
added. Nothing of this library is imported there. Set the engine's variable, such as VERL_PATH=~/verl.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkouts
import pytest
import torch
from checkouts import Framework, checkout, load, record_errors
from plants import patched, write_patch
from ranks import run_ranks
from repository import ROOT
from table_step import relative_error
from torch import Tensor

pytestmark = pytest.mark.slow

#: What an engine's own tests import and this repository's environment lacks.
NEEDS = {
    "VERL_PATH": ("ray", "hydra", "tensordict", "codetiming", "transformers", "datasets"),
    "AREAL_PATH": ("numba", "openai", "transformers"),
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


def files_of_tests(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(tests/\S+)$", patch.read_text(), re.MULTILINE)


def run_tests(root: str, patch: Path) -> subprocess.CompletedProcess[str]:
    """The patch's tests, in the tree at `root`, as its maintainers run them on a CPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files_of_tests(patch)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": root, "TORCH_CUDA_ARCH_LIST": "9.0"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_brings_a_test_that_needs_it(patch: Path, tmp_path: Path) -> None:
    framework = framework_of(patch)
    checkout(framework)
    for package in NEEDS[framework.variable]:
        pytest.importorskip(package, reason=f"{package}, which the tests of {patch.name} import, is not installed")
    assert files_of_tests(patch)
    root = patched(framework, tmp_path, patch.name, only="tests/*")
    without = run_tests(root, patch)
    assert re.search(r"\d+ failed", without.stdout), without.stdout + without.stderr
    assert "error" not in without.stdout.splitlines()[-1]
    write_patch(tmp_path, patch.name, leave_out="tests/*")
    ran = run_tests(root, patch)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\d+ passed", ran.stdout)


# ---- what a pack of an engine does to a layer with a state

LENGTHS = [5, 3, 6, 2]
MAMBA_PATCHES = {"VERL_PATH": "verl-mamba-in-packs.patch", "AREAL_PATH": "areal-mamba-in-packs.patch"}


def by_verl(root: str, model: Any, rows: list[Tensor]) -> Tensor:
    (forward,) = load(checkouts.VERL, root, "verl.models.mcore.model_forward")
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    output: Tensor = forward.gptmodel_forward_model_engine(model, nested, {}).values()
    return output


def by_areal(root: str, model: Any, rows: list[Tensor]) -> Tensor:
    (packed,) = load(checkouts.AREAL, root, "areal.engine.megatron_utils.packed_context_parallel")
    bounds = torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = {"input_ids": torch.cat(rows), "cu_seqlens": bounds}
    output: Tensor = packed.packed_context_parallel_forward(model, batch).squeeze(0)
    return output


def error_of_pack(forward: Any, root: str) -> float:
    """On a rank: how far the gradient of a pack is from the sum of its samples' own, relative to its largest entry."""
    import gpt_oracle
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from table_step import start
    from tiny_gpt import Layout, tiny_config
    from tiny_hybrid import MAMBA, tiny_hybrid

    start()
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = tiny_config(Layout(1, False, 1, 1, 1, 1), per_token=False, num_layers=2, **MAMBA)
    model, generator = tiny_hybrid(config, "M-"), torch.Generator().manual_seed(5)
    rows = [torch.randint(gpt_oracle.VOCAB, (length,), generator=generator) for length in LENGTHS]
    weights = torch.randn(sum(LENGTHS), gpt_oracle.VOCAB, generator=generator)

    def gradient_of(packs: list[list[Tensor]]) -> Tensor:
        model.zero_grad()
        outputs = torch.cat([forward(root, model, pack).float() for pack in packs])
        (outputs * weights).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    return relative_error(gradient_of([rows]), gradient_of([[row] for row in rows]))


@pytest.mark.parametrize("forward", [by_verl, by_areal])
def test_a_pack_of_a_hybrid_model_has_the_gradient_of_its_samples(
    forward: Any, record_property: Any, tmp_path: Path
) -> None:
    framework = checkouts.VERL if forward is by_verl else checkouts.AREAL
    (own,) = run_ranks(1, error_of_pack, forward, checkout(framework))
    root = patched(framework, tmp_path, MAMBA_PATCHES[framework.variable])
    (ours,) = run_ranks(1, error_of_pack, forward, root)
    assert ours < 1e-5 < 1e-2 < own
    record_errors(record_property, framework, "a pack on a Mamba layer, `docs/upstream`", own, ours)
