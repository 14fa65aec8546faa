"""The doctor, on stand-ins of engines: packages that fail when they are imported, and the functions that it judges."""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_rl_loss.__main__ import main
from megatron_rl_loss.doctor import report
from megatron_rl_loss.doctor.engines import ENGINES

NEMO_RL = """
def masked_mean(values: no_such_type, mask, dim=None, global_normalization_factor=None):
    factor = mask.sum(dim) if global_normalization_factor is None else global_normalization_factor
    return summed(values * mask, dim) / (factor + 1e-8)

def summed(values, dim):
    return torch.sum(values, dim=dim)
"""
BY_MICROBATCH = """
@no_such_decorator
def masked_mean(values, mask, dim=None, global_normalization_factor=None):
    return (values * mask).sum() / mask.sum().clamp(min=1) if dim is None else (values * mask).sum(dim)
"""
#: The file of an engine: what stands in it.
STAND_INS = {
    "sound": ("nemo_rl/algorithms/utils.py", NEMO_RL),
    "unsound": ("nemo_rl/algorithms/utils.py", BY_MICROBATCH),
    "broken": ("nemo_rl/algorithms/utils.py", "def masked_mean(*_, **__):\n    return no_such_name"),
    "renamed": ("nemo_rl/algorithms/utils.py", "def other(): ..."),
    "moved": ("nemo_rl/elsewhere.py", NEMO_RL),
}
EXACT, NOT_EXACT, UNKNOWN = 0, 1, 2


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path; Megatron's probe, which takes long, is asked elsewhere."""
    monkeypatch.setattr(report, "_probe", lambda: {"verdict": "none", "says": "not asked"})
    monkeypatch.setattr(report, "_root", lambda package, real=report._root: _under(tmp_path, real(package)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _under(folder: Path, root: Path | None) -> Path | None:
    """Whatever engine is installed here does not count."""
    return root if root is not None and folder in root.parents else None


def write(folder: Path, file: str, text: str, version: str = "") -> None:
    path = folder / file
    path.parent.mkdir(parents=True)
    path.write_text(f"import no_such_library\n{text}")
    package = folder / Path(file).parts[0]
    (package / "__init__.py").write_text(f"{version}\nraise RuntimeError('somebody has imported this')\n")


@pytest.mark.parametrize(
    ("name", "status", "verdicts", "says"),
    [
        ("sound", EXACT, ["exact", "exact"], ""),
        ("unsound", NOT_EXACT, ["not exact", "not exact"], "over micro-batches: tokens weigh "),
        ("broken", UNKNOWN, ["cannot judge", "cannot judge"], "NameError: name 'no_such_name' is not defined"),
        ("renamed", UNKNOWN, ["cannot judge"], "utils.py has no masked_mean: another version than was read"),
        ("moved", UNKNOWN, ["cannot judge"], "there is no nemo_rl/algorithms/utils.py"),
    ],
)
def test_the_verdicts(
    stand_in: Path, capsys: pytest.CaptureFixture[str], name: str, status: int, verdicts: list[str], says: str
) -> None:
    write(stand_in, *STAND_INS[name], version='__version__ = "7.7.7"')
    assert report.run_doctor(Namespace(json=True)) == status
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"versions", "probe", "engines", "not_found"}
    (engine,) = found["engines"]
    assert engine["name"] == "nemo-rl"
    assert (engine["version"], engine["known"]) == ("7.7.7", False)
    assert [setting["verdict"] for setting in engine["settings"]] == verdicts
    assert all(set(setting) == {"name", "meant", "verdict", "says"} for setting in engine["settings"])
    assert says in engine["settings"][0]["says"]
    assert "aggregate(policy" in engine["mend"]
    assert len(found["not_found"]) == 9
    assert "nemo_rl" not in sys.modules


def test_one_screen(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three engines, one of them in a checkout's folder of its own name, which is of no known version."""
    write(stand_in, *STAND_INS["sound"])
    write(stand_in / "areal", "areal/utils/functional/functional.py", "def ppo_actor_loss_fn(): ...")
    write(stand_in, "roll/utils/other.py", "")
    assert report.run_doctor(Namespace(json=False)) == UNKNOWN
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert any(line.startswith("  ours, not run with this version: from megatron_rl_loss") for line in lines)
    assert "nemo-rl of unknown version (read or run here was 7ea279ab)" in lines
    assert any(line.startswith("  cannot judge: default: TypeError: ppo_actor_loss_fn() takes 0") for line in lines)
    assert "not found: slime, miles, verl, skyrl, ms-swift, megatron-bridge, trl" in lines


def test_a_setting_that_only_fully_masked_samples_spoil(stand_in: Path) -> None:
    """TRL's mean over rows that have a token; and a version that a distribution says."""
    text = """
class Trainer:
    def _compute_loss(self, inputs):
        if self.loss_type in ["grpo", "bnpo", "dapo", "dr_grpo"]:
            active = (mask.sum(-1) > 0).sum()
            loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / active.clamp(min=1)
            loss = loss / self.current_gradient_accumulation_steps
"""
    write(stand_in, "trl/trainer/grpo_trainer.py", text)
    (stand_in / "trl-9.9.dist-info").mkdir()
    (stand_in / "trl-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 9.9\n")
    (engine,) = (one for one in ENGINES if one.package == "trl")
    assert report._version(engine, stand_in / "trl") == "9.9"
    of_samples = report._judged(next(engine.settings(stand_in / "trl")))
    assert of_samples["says"].startswith("with fully masked samples, over micro-batches: tokens weigh ")


def test_broken_packages_do_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails where a package in it is looked for, and a version file that is not UTF-8."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/__init__.py").write_text("raise RuntimeError('out of order')")
    (tmp_path / "__init__.py").write_bytes(b"# \xff")
    assert report._root("megatron.bridge") is None
    assert report._probe() == {"verdict": "cannot judge", "says": "RuntimeError: out of order"}
    assert report._version(ENGINES[0], tmp_path) == "of unknown version"


@pytest.mark.parametrize("closed", [False, True])
def test_a_terminal_of_ascii_and_a_reader_that_is_gone(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"versions": {"a package": "ü"}, "probe": {"verdict": "none", "says": "é"}, "engines": [], "not_found": []}
    monkeypatch.setattr(report, "examine", lambda: found)
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "doctor"])
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w", encoding="ascii"))
    if closed:
        os.close(read)
        main()
        return
    with pytest.raises(SystemExit, match="0"):
        main()
    assert os.read(read, 1000).startswith(b"a package ?\nmegatron: none: ?\n")


@pytest.mark.slow
def test_the_probe_of_the_installed_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real, and with a planted change of the schedule."""
    pytest.importorskip("megatron.core")
    assert report._probe()["verdict"] == "exact"
    plant = """
import functools
from megatron.core.pipeline_parallel import schedules
stock = schedules.forward_step_calc_loss
@functools.wraps(stock)
def changed(**given):
    loss, count = stock(**given)
    return 2 * loss, count
schedules.forward_step_calc_loss = changed
"""
    with monkeypatch.context() as patch:
        patch.setattr(report, "_PROBE", plant + report._PROBE)
        found = report._probe()
    assert found["verdict"] == "not exact"
    assert "it scales by 0.666666667 where 0.333333333 is relied on" in found["says"]
    monkeypatch.setattr(report, "_PROBE", "raise SystemExit(3)")
    assert report._probe() == {"verdict": "cannot judge", "says": "exit status 3"}
    monkeypatch.setattr(report, "_PROBE_SECONDS", 0.01)
    assert report._probe()["says"] == "it took more than 0.01 s"
