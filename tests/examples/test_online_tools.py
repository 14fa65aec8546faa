"""Tables of online runs, and the comparison of layouts."""

import json
import sys
from pathlib import Path

import compare_layouts
import plot_online
import pytest


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
    errors_of = {
        "same": {"loss": 1e-5, "grad norm": 0.0, "weights": 1e-5},
        "off": {"loss": 0, "grad norm": 0, "weights": 0.1},
    }
    monkeypatch.setattr(compare_layouts, "weights_in", lambda _: {})
    monkeypatch.setattr(compare_layouts, "layout_of", str)
    monkeypatch.setattr(compare_layouts, "differences", lambda run, *_: errors_of[str(run)])
    for runs, status in ((["same"], 0), (["same", "off"], 1)):
        monkeypatch.setattr(sys, "argv", ["compare", "--start", "s", "first", *runs])
        with pytest.raises(SystemExit) as ended:
            compare_layouts.main()
        assert ended.value.code == status
    assert capsys.readouterr().out.splitlines()[1:] == [
        "same equals first: loss 1e-05, grad norm 0e+00, weights 1e-05 ✓",
        "off differs from first: loss 0e+00, grad norm 0e+00, weights 1e-01 ✗",
    ]
