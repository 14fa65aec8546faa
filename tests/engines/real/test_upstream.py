"""The changes of docs/upstream, applied to checkouts: VERL_PATH=~/verl SLIME_PATH=~/slime SKYRL_PATH=~/SkyRL.

With each, the engine's own code is exact where an adapter corrects it today, or carries what a hook lacks today.
"""

import importlib
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import pytest
from bigram_step import TOLERANCE
from checkouts import SKYRL, SLIME, VERL, Framework, record_errors
from logit_table import make_step
from plants import planted
from ranks import run_ranks
from repository import ROOT
from slime_launches import TOLERANCE as TOLERANCE_OF_SLIME
from slime_launches import case
from world import CP, DP

from megatron_rl_loss.engines import slime

test_real_skyrl, test_real_slime_miles, test_real_verl = (
    importlib.import_module(f"test_real_{name}") for name in ("skyrl", "slime_miles", "verl")
)

pytestmark = pytest.mark.slow


def patched(framework: Framework, folder: Path, name: str) -> str:
    """A copy of the checkout with that patch."""
    patch, root = ROOT / "docs/upstream" / name, planted(framework, folder, {})
    for line in patch.read_text().splitlines():
        if line.startswith("+++ b/"):
            file = folder / line.removeprefix("+++ b/")
            text = file.read_text()
            file.unlink()  # a link to the checkout's own
            file.write_text(text)
    applied = subprocess.run(["git", "apply", str(patch)], cwd=folder, capture_output=True, text=True)
    assert not applied.returncode, applied.stderr
    return root


def test_verl_counts_every_token_under_cp(tmp_path: Path, record_property: Any) -> None:
    root = patched(VERL, tmp_path, "verl-count-under-cp.patch")
    for results in run_ranks(DP * CP, test_real_verl.modes_in_its_engine, root, True, False):
        errors = [error for error in results.values() if isinstance(error, float)]
        assert len(errors) >= 4
        assert max(errors) < oracle.EXACT
        record_errors(record_property, VERL, "verl-count-under-cp.patch, CP 2 with per-token loss", own=max(errors))


def test_skyrl_averages_kl_over_the_tokens_of_the_step(tmp_path: Path, record_property: Any) -> None:
    root = patched(SKYRL, tmp_path, "skyrl-kl-by-step-tokens.patch")
    of_kl = {"stock": "regular", "mode": "token_mean", "settings": {"kl": "token_mean"}, "terms": ["kl"]}
    for results in run_ranks(2, test_real_skyrl.train, root, 1, [of_kl | sizes for sizes in test_real_skyrl.SIZES]):
        error = max(result["errors"]["gradient"] for result in results)
        assert error < TOLERANCE
        record_errors(record_property, SKYRL, "skyrl-kl-by-step-tokens.patch, KL penalty", own=error)


def train_by_keywords(root: str) -> list[list[float]]:
    """On a rank of slime: a reducer that asks for the arguments and the batch, and takes the masks from there."""

    def by_keywords(totals: Any, responses: Any, _: Any, per_token: bool, *, args: Any, batch: Any) -> Any:
        assert args.loss_type == "policy_loss"
        return slime.sample_mean(totals, responses, batch["loss_masks"], per_token)

    vars(importlib.import_module("logit_table"))["by_keywords"] = by_keywords
    launch = case("slime", "sample_mean", "sample_mean", [partial(make_step, 7, DP)])
    launch["flags"]["custom_pg_loss_reducer_function_path"] = "logit_table.by_keywords"
    results: list[list[float]] = test_real_slime_miles.train("slime", root, CP, [launch])
    return results


def test_slime_passes_what_a_reducer_names(tmp_path: Path, record_property: Any) -> None:
    root = patched(SLIME, tmp_path, "slime-reducer-keywords.patch")
    for (errors,) in run_ranks(DP * CP, train_by_keywords, root):
        assert max(errors) < TOLERANCE_OF_SLIME
        record_errors(record_property, SLIME, "slime-reducer-keywords.patch", ours=max(errors))
