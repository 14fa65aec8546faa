"""The package as installed: what it imports, what it asks for, and where its host work is done."""

import functools
import re
import subprocess
from importlib import metadata
from typing import Any

import oracle
import pytest
import torch
from interpreter import begin, finish
from placements import PLACES, laid_out
from repository import ROOT

import megatron_rl_loss
from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer
from megatron_rl_loss.core.modes import available_modes

FRESH = """
import sys
def loaded(*roots):
    return [name for name in sys.modules if name.split('.')[0] in roots]
import megatron_rl_loss
print(loaded('megatron_rl_loss', 'torch', 'numpy', 'megatron'))
for name, home in megatron_rl_loss._HOME_OF.items():
    if not {'megatron', 'proof', 'megatron_head'} & set(home.split('.')):
        getattr(megatron_rl_loss, name)
from megatron_rl_loss.engines import slime, verl
slime.constant_8
print(loaded('megatron', 'transformer_engine', 'apex'))
sys.modules['megatron'] = None
megatron_rl_loss.LossAggregation
"""


@functools.cache
def begun() -> "subprocess.Popen[str]":
    return begin(FRESH)


#: Begun beside the first tests: see conftest.
start_early = begun


@pytest.mark.slow
def test_a_fresh_process_imports_little_and_no_megatron() -> None:
    """The front door loads no room; of the rooms only the adapter needs Megatron, and says what to install."""
    done = finish(begun())
    assert done.stdout.splitlines() == ["['megatron_rl_loss']", "[]"], done.stderr
    assert done.returncode != 0
    assert "ImportError: megatron_rl_loss.megatron needs Megatron-Core" in done.stderr
    assert "pip install 'megatron-rl-loss[megatron]'" in done.stderr


def test_torch_and_numpy_are_the_requirements() -> None:
    requires = metadata.requires("megatron-rl-loss")
    assert requires is not None
    assert [r for r in requires if "extra ==" not in r] == ["torch>=2.6", "numpy>=1.26"]
    extras = {"megatron", "te", "demo", "bench", "audit", "test", "docs"}
    assert {*(metadata.metadata("megatron-rl-loss").get_all("Provides-Extra") or [])} == extras
    assert not any(r.lower().startswith("apex") for r in requires)


def test_public_is_what_the_stub_imports_as_itself() -> None:
    stub = (ROOT / "megatron_rl_loss" / "__init__.pyi").read_text()
    lines = {line for line in stub.splitlines() if " as " in line}
    homes = vars(megatron_rl_loss)["_HOME_OF"]
    assert {f"from {home} import {name} as {name}" for name, home in homes.items()} == lines
    assert {"Any", "Callable"} & homes.keys() == set()


def test_badges_say_what_the_package_says() -> None:
    badges = {path.stem: path.read_text() for path in (ROOT / "docs" / "badges").glob("*.svg")}
    said = metadata.metadata("megatron-rl-loss")
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(said.get_all("Classifier") or []))
    megatrons = re.search(
        r"Megatron-Core: (\S+ to \S+, main)", (ROOT / "megatron_rl_loss/megatron/versions.py").read_text()
    )
    assert megatrons is not None
    shown = {
        "python": f"{pythons[0]} to {pythons[-1]}",
        "megatron": megatrons[1],
        "licence": said["License-Expression"],
    }
    assert badges.keys() == shown.keys()
    for name, text in shown.items():
        assert re.search(f': {text}">', badges[name]), name
        assert f">{text}</text>" in badges[name], name


def test_host_work_stays_on_the_host_whatever_the_default_device() -> None:
    """``torch.set_default_device("cuda")`` is such a default. The meta device stands in for it: it holds no numbers."""
    masks = [torch.tensor([1.0, 1, 0, 1]), torch.tensor([1.0, 0])]
    ids: dict[str, Any] = {"rollout_ids": ["a", "a"], "prompt_ids": [0, 0]}
    ids["ids"] = {"session": [3, 3], "turn": [[0, 0, -1, 1], [0, -1]]}
    with torch.device("meta"):
        totals = StepTotals.of(Samples(masks, **ids))
        for placed in [laid_out(place, (4, 2), 2) for place in PLACES]:
            sizes = placed.mask_lengths or [4, 2]
            padded = [[*mask.tolist(), *[0] * (size - len(mask))] for mask, size in zip(masks, sizes, strict=True)]
            turns = [[*row, *[-1] * (size - len(row))] for row, size in zip(ids["ids"]["turn"], sizes, strict=True)]
            sized_ids = {**ids, "ids": {**ids["ids"], "turn": turns}}
            samples = Samples(padded, layout=placed.layout, **sized_ids)
            for mode in available_modes():
                rank: Any = {"cp_rank": 1, "cp_size": 2}
                rank["divisor"] = oracle.divisor_of(mode, 8)
                reducer = make_pg_loss_reducer(mode, samples, totals=totals, **rank)
                assert reducer.weights.device.type == "cpu"
        share = make_pg_loss_reducer("prompt_mean", Samples(masks, **ids), totals=totals)
    assert float(share(torch.tensor([1.0, 2, 3, 4, 5, 6]))) == (1 + 2 + 4 + 5) / 4
