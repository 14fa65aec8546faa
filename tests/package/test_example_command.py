"""``python -m megatron_rl_loss example``: what there is, copies that hold what they need, and nothing overwritten."""

import ast
import os
import sys
from pathlib import Path

import pytest
from refusals import Refusal, refusal_tests
from repository import EXAMPLES

from megatron_rl_loss import __main__ as command
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
        r"example 'pretrain_grop': there is none of that name\. Did you mean pretrain_grpo\.py\?",
        lambda: find_example("pretrain_grpo"),
    ),
    "an example whose name two files have": (
        lambda: find_example("launch_grpo"),
        ValueError,
        r"there are several of that name\. Write one of launch_grpo\.sh, launch_grpo\.slurm",
        lambda: find_example("launch_grpo.sh"),
    ),
    "a copy of an example over a file": (
        lambda: copy_example("pretrain_grpo", EXAMPLES),
        ValueError,
        r"a copy overwrites nothing, and .*pretrain_grpo\.py.* is there already\. Choose another folder with --to",
        lambda: find_example("pretrain_grpo.py"),
    ),
}


test_refusals = refusal_tests(REFUSALS)


def test_the_command_copies_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an interpreter of its own: test_commands.py."""
    monkeypatch.setattr(sys, "argv", ["megatron_rl_loss", "example", "pretrain_grpo", "--to", str(tmp_path / "new")])
    main()
    copied = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "new" / "pretrain_grpo.py") in copied
    for file in copied:
        assert Path(file).read_bytes() == (EXAMPLES / Path(file).name).read_bytes()
    assert os.access(tmp_path / "new" / "launch_grpo.sh", os.X_OK)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "error: a copy of example 'pretrain_grpo': a copy overwrites nothing" in capsys.readouterr().err
    (tmp_path / "rollouts.py").write_text("mine")  # one that it would need
    with pytest.raises(ValueError, match="overwrites nothing"):
        copy_example("pretrain_grpo", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts.py", "new"}


def test_every_example_says_what_it_is() -> None:
    for line in format_examples().splitlines():
        assert len(line.split(maxsplit=1)) == 2, line
