"""`tools/gpu_proof.py`: every part of it on the CPU, and what it says of parts that fail or cannot run."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_proof
import pytest
import torch
from gpu_proof import Part, page, parts, run
from interpreted import import_triton_anew
from ranks import run_ranks
from repository import ROOT


def ran(words: list[str]) -> tuple[int, str]:
    """On a rank: how Python ends with these words, and what it prints; of tests, whether they are there."""
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        if words[:2] == ["-m", "pytest"]:
            return int(pytest.main([*words[2:], "--collect-only"])), printed.getvalue()
        if "compare_kernels" in words[0]:
            import_triton_anew()
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    return 0, printed.getvalue()


def run_warm(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
    """`subprocess.run`, but Python has imported torch before; a shell script prints what it hands to Python."""
    command = command[3:]  # without the time limit
    if command[0] != sys.executable:
        return subprocess.run(command, env=env | {"PYTHON": "echo"}, **options)
    ((code, printed),) = run_ranks(1, ran, command[1:])
    return SimpleNamespace(returncode=code, stdout=printed)


def test_the_benchmark_of_log_probs_runs_at_tiny_sizes_and_tells_what_it_leaves_out() -> None:
    words = ["tools/bench/logprobs.py", "--sizes", "16x32", "--seconds", "0.05", "--repeats", "1"]
    ((code, printed),) = run_ranks(1, ran, words)
    assert code == 0
    for way in ("floor", "products", "megatron", "ours", "ours, kept ids, entropy", "ours, one pass, entropy"):
        assert re.search(rf" {way}  ", printed), way
    assert "read_by plain torch" in printed
    assert "not to be had here: liger, transformer_engine, flash_attn" in printed
    assert "no time is left" not in printed
    ((_, printed),) = run_ranks(1, ran, [*words, "--limit", "0.001"])  # nothing can run
    assert printed.count("no time is left") == 3
    assert not re.search(" ours  ", printed)


@pytest.mark.slow
def test_the_rehearsal_runs_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch itself: test_example.py."""
    monkeypatch.setattr(gpu_proof, "subprocess", SimpleNamespace(run=run_warm, PIPE=-1, STDOUT=-2))
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", "--rehearse", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_proof.main()
    by_part = {part["part"]: part for part in json.loads((tmp_path / "gpu-rehearsal.json").read_text())["parts"]}
    assert {part["outcome"] for part in by_part.values()} == {"passed"}, by_part
    assert not ended.value.code
    assert list(by_part) == [part.name for part in parts(True, tmp_path)]
    assert next(iter(by_part)) == "logprobs"
    for name in ("reducers", "logprobs", "segments", "totals"):
        assert by_part[name]["figures"]
    assert "--nproc-per-node 4" in "\n".join(by_part["launch at TP 2 x CP 2"]["output"])
    assert all(f"\n## {name}\n" in (tmp_path / "gpu-rehearsal.md").read_text() for name in by_part)


def test_a_part_that_fails_or_cannot_run_is_told(tmp_path: Path) -> None:
    failed = run(Part("one", ["python", "-c", "print('the end'); raise SystemExit(3)"]), tmp_path)
    assert failed["outcome"] == "failed with exit status 3"
    assert failed["output"] == ["the end"]
    sleep = ["python", "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    slow = run(Part("slow", sleep, seconds=1), tmp_path)
    assert (slow["outcome"], slow["output"]) == ("failed: still running after 1 s", ["begun"])
    missing = run(Part("two", ["no such program"], reason="needs 4 GPUs"), tmp_path)
    assert missing["outcome"] == "not run: needs 4 GPUs"
    text = page({"device": "a card"}, [failed, missing], rehearsed=False)
    assert "| two | not run: needs 4 GPUs |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_says_what_it_needs(tmp_path: Path) -> None:
    assert all("GPU" in part.reason for part in parts(False, tmp_path))
