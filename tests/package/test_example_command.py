"""``python -m megatron_rl_loss example``: what there is, copies that hold what they need, and nothing overwritten."""

import os
import sys
from pathlib import Path

import pytest
from refusals import Refusal, refusal_tests
from repository import EXAMPLES

from megatron_rl_loss.__main__ import (
    copy_example,
    example_files,
    examples_folder,
    find_example,
    format_examples,
    main,
    with_companions,
)

FOLDER = {
    "train.py": "import cpu\nfrom shapes.round import ball\n",
    "cpu.py": "",
    "unused.py": "",
    "shapes/__init__.py": "",
    "shapes/round.py": "def ball():\n    import shapes.corners\n",
    "shapes/corners.py": "text = 'cornerstones.txt, edges.text: no files; edges.txt is one'",
    "shapes/edges.txt": "",
    "stones.txt": "",
    "notes.txt": "the launcher's",
    "train.sh": "exec python $here/train.py --data ./notes.txt",
    "recipes/train.py": "import cpu  # that of its own folder, where there is none",
    "__pycache__/train.pyc": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FOLDER.items():
        path = tmp_path / "examples" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "examples"


def test_a_file_goes_with_what_it_imports_or_names_and_they_do(folder: Path) -> None:
    assert example_files(folder) == sorted(name for name in FOLDER if "__pycache__" not in name)
    shapes = ["shapes/__init__.py", "shapes/corners.py", "shapes/edges.txt", "shapes/round.py"]
    assert with_companions("train.py", folder) == ["train.py", "cpu.py", *shapes]
    assert with_companions("train.sh", folder) == ["train.sh", "cpu.py", "notes.txt", *shapes, "train.py"]
    assert with_companions("recipes/train.py", folder) == ["recipes/train.py"]
    assert with_companions("shapes/corners.py", folder) == ["shapes/corners.py", "shapes/edges.txt"]


def test_a_name_may_leave_out_suffix_and_folder(folder: Path) -> None:
    names = {"cpu": "cpu.py", "cpu.py": "cpu.py", "shapes/round": "shapes/round.py", "edges": "shapes/edges.txt"}
    assert {name: find_example(name, folder) for name in names} == names
    assert find_example("train.py", folder) == "train.py"


REFUSALS: dict[str, Refusal] = {
    "an example that there is not": (
        lambda: find_example("pretrain_grop", EXAMPLES),
        ValueError,
        r"example 'pretrain_grop': there is none of that name\. Did you mean pretrain_grpo\.py\?",
        lambda: find_example("pretrain_grpo", EXAMPLES),
    ),
    "an example whose name two files have": (
        lambda: find_example("launch_grpo", EXAMPLES),
        ValueError,
        r"there are several of that name\. Write one of launch_grpo\.sh, launch_grpo\.slurm",
        lambda: find_example("launch_grpo.sh", EXAMPLES),
    ),
    "a copy of an example over a file": (
        lambda: copy_example("pretrain_grpo", EXAMPLES),
        ValueError,
        r"a copy overwrites nothing, and .*pretrain_grpo\.py.* is there already\. Choose another folder with --to",
        lambda: find_example("pretrain_grpo.py", EXAMPLES),
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


def test_every_example_that_is_code_says_what_it_is() -> None:
    assert examples_folder().samefile(EXAMPLES)
    for line in format_examples().splitlines():
        file, *said = line.split(maxsplit=1)
        assert said or not file.endswith((".py", ".sh", ".slurm")) or file.endswith("__init__.py"), line
