"""``python -m megatron_rl_loss example``: the list, complete copies, and no file overwritten.

The output of every command, too: in any locale, into a closed pipe, without standard output.
"""

import ast
import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import Refusal, refusal_tests
from repository import EXAMPLES, ROOT

from megatron_rl_loss import __main__ as command
from megatron_rl_loss import __version__
from megatron_rl_loss.__main__ import copy_example, example_names, find_example, format_examples, main


def missing(folder: Path) -> set[str]:
    """Files and modules of the examples that a folder's files import, or name as ``$here/...``, and that it lacks."""
    known = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.*")}
    wanted = set[str]()
    for path in folder.rglob("*"):
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                wanted |= {f"{module.replace('.', '/')}.py" for module in modules}
        elif path.suffix in (".sh", ".slurm"):
            wanted |= {word.strip('"').rpartition("/")[2] for word in path.read_text().split() if "/" in word}
    return {name for name in wanted & known if not (folder / name).exists()}


@pytest.mark.parametrize("name", example_names())
def test_an_example_goes_with_what_it_imports_and_launches(name: str, tmp_path: Path) -> None:
    copied = copy_example(name, tmp_path)
    assert tmp_path / Path(name).name in copied
    assert missing(tmp_path) == set()


def test_a_missing_companion_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(command, "COMPANIONS", {})
    for name, lacks in (("online_grpo", "online/task.py"), ("launch_grpo.sh", "arithmetic.jsonl")):
        copy_example(name, tmp_path / name)
        assert lacks in missing(tmp_path / name)


def test_a_name_may_leave_out_suffix_and_folder() -> None:
    names = {"on_cpu": "on_cpu.py", "own_mode.py": "recipes/own_mode.py", "recipes/slime": "recipes/slime.sh"}
    assert {name: find_example(name) for name in names} == names


REFUSALS: dict[str, Refusal] = {
    "an example that there is not": (
        lambda: find_example("pretrain_grop"),
        ValueError,
        r"example 'pretrain_grop': there is no such example\. Did you mean pretrain_grpo\?",
        lambda: find_example("pretrain_grpo"),
    ),
    "an example whose name two files have": (
        lambda: find_example("launch_grpo"),
        ValueError,
        r"several examples have that name\. Write one of launch_grpo\.sh, launch_grpo\.slurm",
        lambda: find_example("launch_grpo.sh"),
    ),
}


test_refusals = refusal_tests(REFUSALS)


def test_the_command_copies_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command in an interpreter of its own: test_an_audited_script_and_a_closed_pipe."""
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "example", "pretrain_grpo", "--to", str(tmp_path / "new")])
    copy_example("on_cpu", tmp_path / "new")  # two files of which this one needs, too
    main()
    copied = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "new" / "pretrain_grpo.py") in copied
    for file in copied:
        assert Path(file).read_bytes() == (EXAMPLES / Path(file).name).read_bytes()
    assert os.access(tmp_path / "new" / "launch_grpo.sh", os.X_OK)
    main()  # all of it is there, and equal
    assert capsys.readouterr().out.splitlines() == copied
    (tmp_path / "rollouts.py").write_text("mine")  # one that it needs
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    says = "error: a copy of example 'pretrain_grpo': a copy overwrites nothing, and these files differ: "
    assert f"{says}{tmp_path}/rollouts.py. Choose" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts.py", "new"}
    assert (tmp_path / "rollouts.py").read_text() == "mine"


def test_equal_files_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written will do, if it has all files; so will the examples' own."""
    copied = copy_example("on_cpu", tmp_path)
    (tmp_path / "packed_attention.py").unlink()
    written: list[Path] = []
    monkeypatch.setattr(shutil, "copy", lambda source, copy: written.append(copy))
    assert copy_example("on_cpu", tmp_path) == copied
    assert written == [tmp_path / "packed_attention.py"]
    copy_example("on_cpu", EXAMPLES)
    assert len(written) == 1


def test_a_link_to_nothing_is_not_written_through(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere.py", tmp_path / "copies"
    folder.mkdir()
    (folder / "plain_ddp.py").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"these files differ: .*plain_ddp.py"):
        copy_example("plain_ddp", folder)
    assert not elsewhere.exists()


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "--version"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out == f"megatron_rl_loss {__version__}\n"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"a copy of example 'on_cpu' in the folder '{folder}': .*with --to\."):
            copy_example("on_cpu", folder)

    def read_only(source: Path, copy: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(copy))

    monkeypatch.setattr(shutil, "copy", read_only)
    with pytest.raises(ValueError, match=r"cannot be written \(Read-only file system: .*on_cpu\.py\)"):
        copy_example("on_cpu", tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["exampel"], "command 'exampel': there is no such command. Did you mean example?"),
        (["example", "own_mod"], "example 'own_mod': there is no such example. Did you mean own_mode?"),
        (["audit", "no_such.py"], "audit of 'no_such.py': there is no such file. Give the path of your script"),
        (["audit", "--step", "0", "script.py"], "argument --step: '0': a training step is an int >= 1"),
        (
            ["audit", "--plot", "no_folder/step.html", "script.py"],
            "a picture to draw into 'no_folder/step.html': the folder",
        ),
        (["audit", "--plot", "step", "script.py"], "a picture to draw into 'step': the suffix must name a format"),
        (["log-probs", "b.pt", "a.pt"], "a.pt: there is no such file. Give the paths of two dumps"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_wrong_names_end_with_one_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"error: {says}" in capsys.readouterr().err.splitlines()[-1]


COMMANDS = (
    ["modes"],
    ["modes", "prompt_mean"],
    ["example"],
    ["example", "own_mode"],
    ["--help"],
    ["audit", "--fail", "script.py"],
)


def run(words: list[str], stdout: io.TextIOWrapper | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a command with that standard output; its audit finds a fault and draws bars."""
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", *words])
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(command, "run_audit", lambda options: ("NOT SOUND: \u2584\u2584", 1))
    try:
        return main()
    except SystemExit as end:  # --help
        return int(end.code or 0)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_closed_pipe_ends_quietly(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`| head`, which has read enough. A buffer that cannot be written raises again when the interpreter ends."""
    monkeypatch.chdir(tmp_path)
    for buffering in (-1, 1):  # as of a pipe; as with PYTHONUNBUFFERED
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w", buffering) as stdout:
            assert run(words, stdout, monkeypatch) == (words[0] == "audit")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_terminal_that_knows_ascii_alone(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stdout = io.TextIOWrapper(printed := io.BytesIO(), encoding="ascii")
    assert run(words, stdout, monkeypatch) == (words[0] == "audit")
    assert printed.getvalue().strip()
    assert words[0] != "audit" or b"NOT SOUND: ??" in printed.getvalue()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_without_standard_output(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no `sys.stdout` where a shell closed it, by ``>&-``."""
    monkeypatch.chdir(tmp_path)
    assert run(words, None, monkeypatch) == (words[0] == "audit")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["print('it runs')", "raise BrokenPipeError('of a socket')"])
def test_an_audited_script_and_a_closed_pipe(script: str, tmp_path: Path) -> None:
    """A script that prints into it ends quietly; an error of its own is shown, of the same type, too."""
    (tmp_path / "script.py").write_text(script)
    reader, writer = os.pipe()
    if script.startswith("print"):
        os.close(reader)
    words = [sys.executable, "-u", "-m", "megatron_rl_loss", "audit", "script.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert ("Traceback" in done.stderr) == (not script.startswith("print")), done.stderr


IN_ASCII = """
import locale, sys
from pathlib import Path
from megatron_rl_loss import __main__ as command
assert locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8")
command.EXAMPLES = Path("examples")
for words in ([], ["one", "--to", sys.argv[1]]):
    sys.argv[1:] = ["example", *words]
    command.main()
"""


@pytest.mark.slow
def test_examples_in_a_locale_without_unicode(tmp_path: Path) -> None:
    (tmp_path / "examples" / "recipes").mkdir(parents=True)
    shutil.copy(EXAMPLES / "on_cpu.py", tmp_path / "examples")
    (tmp_path / "examples" / "one.py").write_text('"""Σ l·m."""\n', encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", IN_ASCII, "tö"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["on_cpu.py", "one.py", "t??/one.py"]
    assert (tmp_path / "tö" / "one.py").read_text(encoding="utf-8") == '"""Σ l·m."""\n'


def test_every_example_says_what_it_is() -> None:
    for line in format_examples().splitlines():
        assert len(line.split(maxsplit=1)) == 2, line
