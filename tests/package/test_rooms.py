"""The folders of the package: imports run one way and in no circle, and each folder says what it holds."""

import ast
import graphlib
import importlib
from collections.abc import Iterator

import pytest
from repository import ROOT

PACKAGE = "megatron_rl_loss"
ORDER = ["errors", "step", "modes", "reduction", "losses", "logprobs", "plan"]
ORDER += ["megatron", "frameworks", "audit", "__main__"]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / PACKAGE).rglob("*.py")
}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
FOLDERS = [module for module, path in FILES.items() if path.name == "__init__.py" and module != PACKAGE]


def imports_of(tree: ast.AST, *, in_functions: bool = False) -> Iterator[str]:
    """Modules of the package that a file imports at module level, or only those inside its functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and in_functions:
            yield from imports_of(ast.Module(node.body, []))
        elif not is_function:
            yield from imports_of(node, in_functions=in_functions)
        if isinstance(node, ast.ImportFrom) and node.module and not in_functions:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else node.module for name in names if name.startswith(PACKAGE))
        elif isinstance(node, ast.Import) and not in_functions:
            yield from (alias.name for alias in node.names if alias.name.startswith(PACKAGE))


def wrong_way(module: str, imported: str) -> bool:
    """Whether a module imports a room that stands above its own, or the front door."""
    own, other = (name.split(".")[1:2] for name in (module, imported))
    return bool(own) and (not other or ORDER.index(other[0]) > ORDER.index(own[0]))


def test_imports_run_one_way_and_in_no_circle() -> None:
    graph = {module: set(imports_of(tree)) for module, tree in TREES.items()}
    assert [(module, name) for module, names in graph.items() for name in names if wrong_way(module, name)] == []
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_one_import_inside_a_function_goes_the_other_way() -> None:
    """A launch that asks for an audit every so many steps imports the audit then."""
    late = [(module, name) for module, tree in TREES.items() for name in imports_of(tree, in_functions=True)]
    assert {module.split(".")[1] for module, name in late if wrong_way(module, name)} <= {"megatron"}
    assert sum(wrong_way(*pair) for pair in late) <= 1


def test_negative_control() -> None:
    tree = ast.parse(f"if True:\n    from {PACKAGE}.audit import judge\ndef f():\n    from {PACKAGE} import losses\n")
    (name,) = imports_of(tree)
    assert wrong_way(f"{PACKAGE}.step.layouts", name)
    assert list(imports_of(tree, in_functions=True)) == [f"{PACKAGE}.losses"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_holds_and_exports_it(folder: str) -> None:
    module = importlib.import_module(folder)
    assert module.__doc__
    assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))
