"""The layout of tests: shared code is in `support`, and `unit` runs without Megatron."""

import ast
import functools
import re
from pathlib import Path

from repository import ROOT

import megatron_rl_loss

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
#: Public names that need Megatron.
OF_MEGATRON = {
    f"megatron_rl_loss.{name}" for name, home in vars(megatron_rl_loss)["_HOME_OF"].items() if ".megatron" in home
}
SUPPORT = {path.stem: path for path in (ROOT / "tests" / "support").glob("*.py")}


def imports_of_tests(code: str) -> list[str]:
    """Imports of a file from modules of tests; most files need no parse to show that there are none."""
    if not re.search(r"^\s*(?:from|import)\b.*\btest_", code, re.MULTILINE):
        return []
    return [name for name in imported(code) if any(part.startswith("test_") for part in name.split("."))]


@functools.cache
def imported(code: str) -> set[str]:
    """Modules that a file imports anywhere, and what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_nothing_is_imported_from_a_module_of_tests() -> None:
    assert [path for path in [*TESTS, *SUPPORT.values()] if imports_of_tests(path.read_text())] == []
    assert imports_of_tests("def f():\n    from test_a import g\n")  # negative control


def test_no_two_modules_have_one_name() -> None:
    names = [path.stem for path in [*TESTS, *SUPPORT.values()]]
    assert len(set(names)) == len(names)


def test_unit_tests_need_no_megatron() -> None:
    waiting = [*(ROOT / "tests" / "unit").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    seen: set[Path] = set()
    while waiting:
        seen.add(path := waiting.pop())
        modules = imported(path.read_text())
        assert not [name for name in modules if re.match(r"megatron(\.|$)|megatron_rl_loss\.megatron\b", name)], path
        assert not modules & OF_MEGATRON, path
        waiting += [SUPPORT[name] for name in modules & set(SUPPORT) if SUPPORT[name] not in seen]
    assert {path.stem for path in seen} & SUPPORT.keys()
