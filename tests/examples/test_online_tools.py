"""Pictures and tables of online runs: docs/online.md has the numbers of its JSON files, and layouts are compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import compare_layouts
import plot_online
import pytest
from repository import ROOT

NUMBERS = [ROOT / "docs" / "online" / name for name in ("modes-cpu.json", "learning-rate-cpu.json")]
PAGE = " ".join((ROOT / "docs" / "online.md").read_text().split())
TABLE = (ROOT / "docs" / "online" / "rewards-cpu.txt").read_text()


RUNS, OF_RATE = (json.loads(path.read_text()) for path in NUMBERS)


def test_the_page_has_the_numbers_of_the_files() -> None:
    """The table, that every mode rises by at least 0.3 for three seeds, that one is slower, and the times."""
    assert plot_online.table([*RUNS, *OF_RATE]) in TABLE
    assert "(online/rewards-cpu.txt)" in PAGE
    rises = {
        (plot_online.mode_of(run), run["settings"]["seed"]): run["evaluations"][-1]["held_out_reward"]
        - run["evaluations"][0]["held_out_reward"]
        for run in RUNS
    }
    assert len(rises) == 5 * 3
    assert min(rises.values()) >= 0.3
    assert f"rises by {min(rises.values()):.2f} to {max(rises.values()):.2f}" in PAGE
    slower = {seed: min((rise, mode) for (mode, of), rise in rises.items() if of == seed)[1] for _, seed in rises}
    assert set(slower.values()) == {"sample_mean"}
    assert "`sample_mean` is slower here" in PAGE
    seconds = [run["seconds"] for run in RUNS]
    assert f"A run takes {min(seconds):.0f} to {max(seconds):.0f} seconds" in PAGE


def test_what_a_run_left_is_collected(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"seed": 4, "aggregation": "loss aggregation: x", "load": "/a"}))
    lines = [{"step": 0, "held_out_reward": 0.25, "seconds": 3}, {"step": 1, "reward": 1.0, "seconds": 5}]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = plot_online.collect([tmp_path])
    assert run["settings"] == {"seed": 4, "aggregation": "loss aggregation: x"}, "no paths of this machine"
    assert run["evaluations"] == [{"step": 0, "held_out_reward": 0.25}]
    assert run["seconds"] == 5


def test_layouts_are_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences themselves are measured in test_online.py."""
    found = {
        "same": {"loss": 1e-5, "grad norm": 0.0, "weights": 1e-5},
        "off": {"loss": 0, "grad norm": 0, "weights": 0.1},
    }
    monkeypatch.setattr(compare_layouts, "weights_in", lambda _: {})
    monkeypatch.setattr(compare_layouts, "layout_of", str)
    monkeypatch.setattr(compare_layouts, "differences", lambda run, *_: found[str(run)])
    for runs, status in ((["same"], 0), (["same", "off"], 1)):
        monkeypatch.setattr(sys, "argv", ["compare", "--start", "s", "first", *runs])
        with pytest.raises(SystemExit) as ended:
            compare_layouts.main()
        assert ended.value.code == status
    assert capsys.readouterr().out.splitlines()[1:] == [
        "same equals first: loss 1e-05, grad norm 0e+00, weights 1e-05 ✓",
        "off differs from first: loss 0e+00, grad norm 0e+00, weights 1e-01 ✗",
    ]


@pytest.mark.slow
def test_modes_are_compared_by_one_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = "--steps 2 --warm-start-reward 0 --eval-prompts 16 --prompts-per-step 4 --eval-interval 1"
    chosen = {"SEEDS": "3", "MODES": "sample_mean constant", "RUNS": str(tmp_path), "TO": str(tmp_path / "all")}
    done = subprocess.run(
        [str(ROOT / "tools" / "compare_modes.sh"), *flags.split()], capture_output=True, text=True, timeout=600,
        env=os.environ | chosen | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    runs = json.loads((tmp_path / "all.json").read_text())
    assert [(run["settings"]["seed"], run["settings"]["loss_aggregation"]) for run in runs] == [
        (3, mode) for mode in ("sample_mean", "constant")
    ]
    assert all([seen["step"] for seen in run["evaluations"]] == [0, 1, 2] for run in runs)
    assert runs[0]["evaluations"][0] == runs[1]["evaluations"][0], "modes share a warm start"
    assert (tmp_path / "all.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| constant, divisor 24 |" in done.stdout
