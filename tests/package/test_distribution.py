"""sdist and wheel: what is in them, that it works where only they are, and what type checkers see.

Built by this environment's setuptools, installed without dependencies beside this environment's torch: no network.
`tools/check_package.sh` does it for real, with every Python and its own torch.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.slow

#: What a working copy may hold beside the files of the repository: .gitignore's, and its own folder.
NOT_OURS = shutil.ignore_patterns(
    *(".git", ".github", ".venv*", ".versions", "__pycache__", "*.egg-info", "build", "dist"),
    *(".*_cache", ".hypothesis", "runs", ".ci"),
)
BACKEND = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def run(*command: "str | Path", cwd: Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def built(kind: str, root: Path, into: Path) -> Path:
    name = run(sys.executable, "-c", BACKEND, f"build_{kind}", into, cwd=root).stdout.splitlines()[-1]
    return into / name


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist of a copy of this working tree."""
    work = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, work / "copy", ignore=NOT_OURS)
    with tarfile.open(built("sdist", work / "copy", work)) as archive:
        archive.extractall(work, filter="data")
    (folder,) = work.glob("megatron_rl_loss-*/")
    return folder


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as pip does it."""
    return built("wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that has the wheel, and torch and the rest from this one."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (where,) = folder.glob("lib/python3*/site-packages")
    # A path, not a site folder: this environment's own editable install is not followed.
    (where / "outer.pth").write_text(sysconfig.get_path("purelib"))
    zipfile.ZipFile(wheel).extractall(where)
    return python


def files_below(folder: Path) -> set[str]:
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in paths if "__pycache__" not in name}


def test_the_sdist_is_the_repository_and_its_tests_run(sdist: Path) -> None:
    packed = {name for name in files_below(sdist) if ".egg-info/" not in name} - {"PKG-INFO", "setup.cfg"}
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.split()
        hosting_files = (".ci/", ".github/", ".pre-commit-config.yaml")
        assert packed == {name for name in listed if (ROOT / name).exists() and not name.startswith(hosting_files)}
    assert {"tests/support/oracle.py", "tools/test.sh", "docs/architecture.md", "constraints.txt"} <= packed
    tests = ["tests/unit/core/test_errors.py", "tests/package/test_structure.py"]
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=sdist)
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


def test_the_wheel_holds_the_package_and_the_examples(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    examples = {f"examples/{name}" for name in files_below(ROOT / "examples")}
    package = files_below(ROOT / "megatron_rl_loss")
    assert {"py.typed", "__init__.pyi"} <= package
    assert names == {f"megatron_rl_loss/{name}" for name in package | examples}


def test_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    head, _, readme = archive.read(name).decode().partition("\n\n")
    pythons = {f"Classifier: Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)}
    expected = {"License-Expression: Apache-2.0", "Requires-Python: >=3.10", "Classifier: Typing :: Typed", *pythons}
    assert expected <= set(head.splitlines())
    assert "://" not in head, "no address is made up"
    assert not re.findall(r"\](?:\(|: )(?!https?:)[\w./]+", readme), "they lead nowhere from a package index"
    assert "python -m megatron_rl_loss example" in readme


def test_its_links_lead_somewhere_where_the_address_is_said(
    sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPOSITORY_URL", "https://host.example/us")
    code = "import setuptools.build_meta as backend, sys; backend.prepare_metadata_for_build_wheel(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=sdist)
    head, _, readme = next(tmp_path.glob("*.dist-info/METADATA")).read_text().partition("\n\n")
    assert "Project-URL: Repository, https://host.example/us" in head
    assert "](https://host.example/us/raw/main/docs/matter.png)" in readme
    assert "[verl](https://host.example/us/blob/main/docs/engines/verl.md)" in readme
    assert "](docs/" not in readme


def test_the_wheel_works_where_only_it_is(python: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tools" / "check_install.py", tmp_path)
    assert "all checks pass" in run(python, "check_install.py", cwd=tmp_path).stdout


USER = """
from megatron_rl_loss import StepTotals, make_pg_loss_reducer

reducer = make_pg_loss_reducer("token_mean", [], totals=StepTotals.of([]))
reveal_type(reducer)
reducer("losses")
"""


def test_users_get_types(python: Path, tmp_path: Path) -> None:
    """A run of mypy on a user's script in another folder."""
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
    )
    said = run(sys.executable, "-m", "mypy", "--python-executable", python, "user.py", cwd=tmp_path, check=False).stdout
    assert 'Revealed type is "megatron_rl_loss.core.reducers.WeightedSum"' in said, said
    assert not re.search("import-untyped|import-not-found", said)
