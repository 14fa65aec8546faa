"""Names in the package say what a thing is: no ``of_...``, and no variable that says only that it was given or made."""

import ast
from collections.abc import Iterator

import pytest
from repository import ROOT

ROOMS = sorted(path.name for path in (ROOT / "megatron_rl_loss").iterdir() if (path / "__init__.py").exists())
#: Variables that do not say what they hold.
VAGUE = {"one", "given", "found", "made", "ours"}


def names_in(tree: ast.AST) -> Iterator[str]:
    """What a file names: functions, classes, parameters, variables, attributes, and modules as it calls them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2]


def wrong_names(code: str) -> set[str]:
    return {name for name in names_in(ast.parse(code)) if name.lower().lstrip("_").startswith("of_") or name in VAGUE}


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_names_say_what_they_name(room: str) -> None:
    folder = ROOT / "megatron_rl_loss" / room
    paths = [*(folder.rglob("*.py") if room else folder.glob("*.py"))]
    assert paths
    wrong = {path.name: names for path in paths if (names := wrong_names(path.read_text()))}
    assert (wrong, [path.name for path in paths if path.stem.startswith("of_")]) == ({}, [])


@pytest.mark.parametrize(
    "code", ["of_rank = 1", "def f(of_rank): ...", "def _of_rank(): ...", "self._of_rank = 1", "for one in x: ...",
             "if (found := 1): ...", "class C:\n    given: int", "import a.of_rank", "lambda made: 1",
             "ours, theirs = x", "_OF_RANKS = 1"],
)  # fmt: skip
def test_a_wrong_name_would_be_seen(code: str) -> None:
    """Negative control."""
    assert len(wrong_names(code)) == 1
    assert wrong_names("class Sum:\n    of: int\n\nunits_of = rank_weights = 1") == set()
