"""Completion of the command line, as docs/using.md makes it for Bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import commands_of
from repository import ROOT

from megatron_rl_loss.__main__ import make_parser

COMPLETE = 'COMP_WORDS=({words}); COMP_CWORD={last}; COMPREPLY=(); _shtab_megatron_rl_loss; echo "${{COMPREPLY[@]}}"'


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    words = ["--shell", "bash", "--prog", "megatron-rl-loss", "megatron_rl_loss.__main__.make_parser"]
    assert f'eval "$(shtab {" ".join(words)})"' in list(commands_of((ROOT / "docs/using.md").read_text()))
    made = subprocess.run(
        [sys.executable, "-m", "shtab", *words], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    )
    (tmp_path / "completion.sh").write_text(made.stdout)

    def completed(*words: str) -> list[str]:
        line = COMPLETE.format(words=" ".join(words), last=len(words) - 1)
        script = f"source {tmp_path / 'completion.sh'}; {line}"
        return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()

    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    assert set(completed("megatron-rl-loss", "''")) >= set(commands.choices or ())
    assert completed("megatron-rl-loss", "mo") == ["modes"]
    assert set(completed("megatron-rl-loss", "modes", "--")) >= {"--all", "--json", "--divisor", "--units"}


def test_the_script_of_an_installed_package_has_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 'megatron-rl-loss = "megatron_rl_loss.__main__:main"' in (ROOT / "pyproject.toml").read_text()
    for name, shown in (("/bin/megatron-rl-loss", "megatron-rl-loss"), ("x/__main__.py", "python -m megatron_rl_loss")):
        monkeypatch.setattr(sys, "argv", [name])
        assert make_parser().format_usage().startswith(f"usage: {shown} [-h]")
