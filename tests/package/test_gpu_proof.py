"""`tools/gpu_proof.py`: every part of it on the CPU, and what it says of parts that fail or cannot run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from gpu_proof import Part, page, parts, run


@pytest.mark.slow
def test_the_rehearsal_runs_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "tools/gpu_proof.py", "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {one["part"]: one for one in json.loads((tmp_path / "gpu-rehearsal.json").read_text())["parts"]}
    assert list(found) == [part.name for part in parts(True, tmp_path)]
    assert {one["outcome"] for one in found.values()} == {"passed"}
    for name in ("reducers", "logprobs", "segments", "totals"):
        assert found[name]["figures"]
    assert "pg_loss" in "\n".join(found["launch at TP 2 x CP 2"]["output"])
    assert all(f"\n## {name}\n" in (tmp_path / "gpu-rehearsal.md").read_text() for name in found)


def test_a_part_that_fails_or_cannot_run_is_told(tmp_path: Path) -> None:
    failed = run(Part("one", ["python", "-c", "print('the end'); raise SystemExit(3)"]), tmp_path)
    assert failed["outcome"] == "failed with exit status 3"
    assert failed["output"] == ["the end"]
    missing = run(Part("two", ["no such program"], reason="needs 4 GPUs"), tmp_path)
    assert missing["outcome"] == "not run: needs 4 GPUs"
    text = page({"device": "a card"}, [failed, missing], rehearsed=False)
    assert "| two | not run: needs 4 GPUs |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_says_what_it_needs(tmp_path: Path) -> None:
    assert all("GPU" in part.reason for part in parts(False, tmp_path))
