"""How the tests are laid out: what they share is in `support`, and `unit` runs without Megatron."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
SUPPORT = {path.stem: path for path in (ROOT / "tests" / "support").glob("*.py")}


def imported(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Modules that a file imports; with `everywhere`, inside functions too."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts(path: Path) -> set[str]:
    return {part for name in imported(path) for part in name.split(".")}


@pytest.mark.parametrize("path", [*TESTS, *SUPPORT.values()], ids=lambda path: path.stem)
def test_nothing_is_imported_from_a_module_of_tests(path: Path) -> None:
    assert not [part for part in parts(path) if part.startswith("test_")]


def test_an_import_of_a_module_of_tests_would_be_seen(tmp_path: Path) -> None:
    """Negative control."""
    path = tmp_path / "test_b.py"
    path.write_text("def f():\n    from test_a import g\n    import tests.unit.test_c as c\n")
    assert {"test_a", "test_c"} <= parts(path)


def test_no_two_modules_have_one_name() -> None:
    names = [path.stem for path in [*TESTS, *SUPPORT.values()]]
    assert len(set(names)) == len(names)


def test_unit_tests_need_no_megatron() -> None:
    waiting = [path for path in TESTS if path.parent.name == "unit"] + [ROOT / "tests" / "conftest.py"]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        modules = set(imported(path))
        assert not [name for name in modules if name.split(".")[0] == "megatron"], path
        assert not [name for name in modules if name.startswith("megatron_rl_loss.megatron")], path
        waiting += [SUPPORT[name] for name in modules & set(SUPPORT) if SUPPORT[name] not in seen]
    assert len(seen) > 10
