"""What is drawn and told of online runs: docs/online.md has the numbers of its JSON files, and layouts are compared."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_layouts
import plot_online
import pytest
import torch
from repository import ROOT
from torch.distributed.checkpoint import FileSystemWriter, save

NUMBERS = [ROOT / "docs" / "online" / name for name in ("modes-cpu.json", "learning-rate-cpu.json")]
PAGE = (ROOT / "docs" / "online.md").read_text()


def runs() -> list[dict[str, Any]]:
    return [run for path in NUMBERS for run in json.loads(path.read_text())]


def test_the_page_has_the_table_of_its_numbers() -> None:
    assert plot_online.table(runs()) in PAGE


def test_every_run_rises_by_what_the_page_says() -> None:
    """At least 0.3, for three seeds, in every mode."""
    rises: dict[str, dict[int, float]] = {}
    for run in json.loads(NUMBERS[0].read_text()):
        first, *_, last = run["evaluations"]
        rises.setdefault(plot_online.mode_of(run), {})[run["settings"]["seed"]] = (
            last["held_out_reward"] - first["held_out_reward"]
        )
    assert len(rises) == 5
    assert all(set(of_mode) == {0, 1, 2} for of_mode in rises.values())
    found = [rise for of_mode in rises.values() for rise in of_mode.values()]
    assert f"rises by {min(found):.2f} to {max(found):.2f}" in PAGE
    assert min(found) >= 0.3
    seconds = [run["seconds"] for run in json.loads(NUMBERS[0].read_text())]
    assert f"{min(seconds):.0f} to {max(seconds):.0f} seconds a run" in PAGE


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, some in {"all.png": json.loads(NUMBERS[0].read_text()), "one.png": runs()[:1]}.items():
        plot_online.plot(some, tmp_path / name)
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_a_run_left_is_collected(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"seed": 4, "aggregation": "loss aggregation: x", "load": "/a"}))
    lines = [{"step": 0, "held_out_reward": 0.25, "seconds": 3}, {"step": 1, "reward": 1.0, "seconds": 5}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = plot_online.collect([tmp_path])
    assert run["settings"] == {"seed": 4, "aggregation": "loss aggregation: x"}, "no paths of this machine"
    assert run["evaluations"] == [{"step": 0, "held_out_reward": 0.25}]
    assert run["seconds"] == 5


def left(folder: Path, weights: list[float], loss: float = 0.5, cp: int = 1) -> Path:
    """What a run of two steps leaves."""
    folder.mkdir()
    settings = {"tensor_model_parallel_size": 1, "context_parallel_size": cp, "world_size": 2 * cp}
    (folder / "settings.json").write_text(json.dumps(settings | {"samples_per_rollout": 1}))
    lines = [{"step": 0}, {"pg_loss": 0.25, "grad_norm": 1.0}, {"pg_loss": loss, "grad_norm": 2.0}]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save({"w": torch.tensor(weights)}, storage_writer=FileSystemWriter(folder / "weights"), no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")  # of torch, about saving without a process group
def test_layouts_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = left(tmp_path / "start", [0.0, 0.0]) / "weights"
    reference = left(tmp_path / "reference", [3.0, 4.0])  # moved by 5
    same = left(tmp_path / "same", [3.0, 4.00005], loss=0.500005, cp=2)
    off = left(tmp_path / "off", [3.0, 4.5])

    def said(*folders: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compare", "--start", str(start), *map(str, folders)])
        with pytest.raises(SystemExit) as ended:
            compare_layouts.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    assert said(reference, same) == (
        0,
        "CP 2 x DP 2 equals DP 2: loss 1e-05, grad norm 0e+00, weights 1e-05 ✓\n",
    )
    status, text = said(reference, same, off)
    assert status == 1
    assert text.splitlines()[1] == "DP 2 differs from DP 2: loss 0e+00, grad norm 0e+00, weights 1e-01 ✗"


@pytest.mark.slow
def test_modes_are_compared_by_one_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = "--steps 2 --warm-start-reward 0 --eval-prompts 16 --prompts-per-step 4 --eval-interval 1"
    chosen = {"SEEDS": "3 4", "MODES": "sample_mean constant", "RUNS": str(tmp_path), "TO": str(tmp_path / "all")}
    done = subprocess.run(
        [str(ROOT / "tools" / "compare_modes.sh"), *flags.split()],
        env=os.environ | chosen | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    runs = json.loads((tmp_path / "all.json").read_text())
    assert [(run["settings"]["seed"], run["settings"]["loss_aggregation"]) for run in runs] == [
        (seed, mode) for seed in (3, 4) for mode in ("sample_mean", "constant")
    ]
    assert all([seen["step"] for seen in run["evaluations"]] == [0, 1, 2] for run in runs)
    for one, other in (runs[:2], runs[2:]):
        assert one["evaluations"][0] == other["evaluations"][0], "modes share a warm start"
    assert runs[0]["evaluations"][0] != runs[2]["evaluations"][0], "seeds do not"
    assert (tmp_path / "all.png").exists()
    assert "| constant, divisor 24 |" in done.stdout
