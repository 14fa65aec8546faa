"""docs/vectors.json: what the oracle gives, and what the library gives; the recipe tells right from wrong."""

import json
import subprocess
import sys
from itertools import chain
from typing import Any

import oracle
import pytest
import torch
import vectors
from repository import ROOT

from megatron_rl_loss import Samples, plan_step

PATH = ROOT / "docs" / "vectors.json"
RECIPE = ROOT / "examples" / "recipes" / "check_vectors.py"


def test_the_file_is_what_the_oracle_gives() -> None:
    assert PATH.read_text() == vectors.text(), "python tools/vectors.py docs/vectors.json; raise VERSION"


@pytest.mark.filterwarnings("ignore:one (prompt|session) has tokens of all")
@pytest.mark.parametrize("units", oracle.BY_MASKS)
@pytest.mark.parametrize("mode", [*oracle.MODES, *oracle.BY_IDS])
def test_the_library_gives_these_numbers_in_float64(mode: str, units: Any) -> None:
    for step in json.loads(PATH.read_text())["steps"]:
        ids = {"session": step["session_ids"], "turn": step["turn_ids"]}
        samples = Samples(step["masks"], rollout_ids=step["rollout_ids"], prompt_ids=step["prompt_ids"], ids=ids)
        divisor = oracle.divisor_of(mode, step["divisor"], optional=True)
        (microbatch,) = plan_step([samples], mode, divisor=divisor, units=units, dp_group=None)
        losses = torch.tensor([*chain(*step["losses"])], dtype=torch.float64, requires_grad=True)
        share = microbatch.loss(losses)
        share.backward()
        expected = step["modes"][mode][units]
        assert share.item() == pytest.approx(expected["value"], rel=1e-12, abs=1e-15)
        assert losses.grad.tolist() == pytest.approx([*chain(*expected["weights"])], rel=1e-12)


def test_the_recipe_tells_right_from_wrong() -> None:
    """Its own loss is a token mean."""

    def run(mode: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, str(RECIPE), str(PATH), mode], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert run("token_mean") == (0, "all steps agree\n")
    status, says = run("sample_mean")
    assert status == 1
    assert says.startswith("step 0: off by ")


def test_the_recipe_says_how_it_is_called() -> None:
    done = subprocess.run([sys.executable, str(RECIPE)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "usage: python check_vectors.py vectors.json MODE\n"
