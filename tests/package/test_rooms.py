"""The rooms of the package: imports run one way and in no circle, and one door has all public names."""

import ast
import functools
import graphlib
import importlib
import re
from collections.abc import Iterator

import pytest
from repository import ROOT

import megatron_rl_loss
from megatron_rl_loss import extend

PACKAGE = "megatron_rl_loss"
#: Each room, after all that it may import.
ORDER = ["core", "trees", "proof", "megatron", "planning", "extend", "losses", "logprobs", "audit", "engines"]
ORDER += ["__main__"]
#: Each file of the core, after all that it may import.
CORE = [
    "errors",
    "transfers",
    "collectives",
    "masks",
    "ids",
    "layouts",
    "notebook",
    "samples",
    "segments",
    "counting",
    "modes",
]
CORE += ["aggregation", "taps", "reducers", "metrics", "carriers", "record", "microbatch", "plan", "measure"]
CORE += ["totals_by_hand", "columns"]
#: Rooms that import nothing of the core from this file on, and no other room than those named.
NARROW = {"losses": ("reducers", {"core", "losses"}), "logprobs": ("reducers", {"core", "trees", "losses", "logprobs"})}
NARROW["trees"] = ("counting", {"core", "trees"})
#: The one file of those rooms that knows Megatron's model and a micro-batch of the step.
OF_A_MODEL = f"{PACKAGE}.logprobs.megatron_head"
#: Files of the core that ask the front door for what a shelf has: rows of their tables, and the drawing of a plan.
AT_THE_DOOR = {f"{PACKAGE}.core.{file}" for file in ("aggregation", "carriers", "plan")}
#: Rooms that a launch loads when it uses them: the others, the front, import none of them, not even in a function.
SHELVES = {"losses", "logprobs", "audit", "engines"}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / PACKAGE).rglob("*.py")
}
HOME_OF = vars(megatron_rl_loss)["_HOME_OF"]
FOLDERS = [module for module, path in FILES.items() if path.name == "__init__.py" and module != PACKAGE]


def imports_of(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Modules of the package that a file imports, under TYPE_CHECKING too; True for those inside its functions."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from ((name, late or is_function) for name, late in imports_of(node))
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name if name in FILES else node.module for name in names]
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from ((name, False) for name in modules if name.split(".")[0] == PACKAGE)


@functools.cache
def imports() -> dict[str, list[tuple[str, bool]]]:
    return {module: list(imports_of(ast.parse(path.read_text()))) for module, path in FILES.items()}


def room_of(module: str) -> str:
    """The room; empty for the front door."""
    return [*module.split("."), ""][1]


def is_allowed(module: str, imported: str) -> bool:
    own, other = room_of(module), room_of(imported)
    if not other:  # `refuse_names`, for a room's own names; the version
        return module in {*FOLDERS, *AT_THE_DOOR} or own == "__main__"
    file, imported_file = ([*name.split("."), "", ""][2] for name in (module, imported))
    if own == other == "core":
        return CORE.index(imported_file) < CORE.index(file)
    all_before: tuple[str | None, set[str]] = (None, set(ORDER[: ORDER.index(own) + 1]))
    first_refused, rooms = all_before if module == OF_A_MODEL else NARROW.get(own, all_before)
    is_refused = other == "core" and first_refused is not None and imported_file in CORE[CORE.index(first_refused) :]
    return other in rooms and not is_refused


def test_imports_run_one_way() -> None:
    edges = [(module, name) for module, names in imports().items() for name, _ in names]
    assert [edge for edge in edges if not is_allowed(*edge)] == []


def test_the_front_imports_no_shelf() -> None:
    front = {name for name in FILES if room_of(name) and room_of(name) not in {*SHELVES, "__main__"}}
    assert [(name, other) for name in front for other, _ in imports()[name] if room_of(other) in SHELVES] == []


def test_adapters_use_public_names_and_those_of_extend() -> None:
    """And the first files of the core, of which a share needs nothing: errors to samples."""
    ground = {f"{PACKAGE}.core.{file}" for file in CORE[: CORE.index("counting")]}
    used, beside = set[str](), set[tuple[str, str]]()
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())) if room_of(module) == "engines" else ():
            if isinstance(node, ast.ImportFrom) and room_of(node.module or "") not in ("", "engines", *SHELVES):
                names = {alias.name for alias in node.names}
                used |= names if node.module == f"{PACKAGE}.extend" else set()
                is_of_front = node.module and node.module.startswith(PACKAGE) and node.module not in ground
                beside |= {(module, name) for name in names if is_of_front and HOME_OF.get(name) != node.module}
    assert {(module, name) for module, name in beside if name not in extend.__all__} == set()
    assert used == set(extend.__all__)
    assert extend.__doc__ is not None
    assert set(re.findall(r"`(\w+)`", extend.__doc__)) - {"megatron_rl_loss"} >= used


def test_the_page_lists_the_rooms_in_this_order() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page[page.index("## The folders") : page.index("## Where to add")]
    _, *rooms = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", table, re.MULTILINE)  # the first is the table's head
    assert rooms == ORDER


def test_no_circle() -> None:
    graph = {module: {name for name, late in names if not late} for module, names in imports().items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_negative_control() -> None:
    code = f"if TYPE_CHECKING:\n    from {PACKAGE}.audit import verdicts\ndef f():\n    from {PACKAGE} import losses\n"
    (audit, losses) = imports_of(ast.parse(code))
    assert (audit, losses) == ((f"{PACKAGE}.audit", False), (f"{PACKAGE}.losses", True))
    assert not is_allowed(f"{PACKAGE}.core.layouts", audit[0])
    assert not is_allowed(f"{PACKAGE}.losses.token", f"{PACKAGE}.core.reducers")
    assert not is_allowed(f"{PACKAGE}.core.masks", f"{PACKAGE}.core.samples")
    assert is_allowed(f"{PACKAGE}.core.samples", f"{PACKAGE}.core.masks")
    assert not is_allowed(f"{PACKAGE}.megatron.launch", audit[0])
    assert is_allowed(f"{PACKAGE}.megatron.launch", f"{PACKAGE}.proof.first_step")
    assert not is_allowed(f"{PACKAGE}.proof.first_step", f"{PACKAGE}.megatron.flags")
    assert not is_allowed(f"{PACKAGE}.core.microbatch", PACKAGE)


# --- the front door


def test_all_public_names_are_importable_from_one_place() -> None:
    names = vars(megatron_rl_loss)["__all__"]
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(megatron_rl_loss, name) is getattr(importlib.import_module(HOME_OF[name]), name)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_holds_and_exports_nothing(folder: str) -> None:
    module = importlib.import_module(folder)
    assert module.__doc__
    imported = {name for name, value in vars(module).items() if getattr(value, "__module__", folder) != folder}
    assert {name for name in imported if not name.startswith("__")} <= {"refuse_names"}
    assert not hasattr(module, "__all__")


@pytest.mark.parametrize("folder", sorted({home.rpartition(".")[0] for home in HOME_OF.values()} - {PACKAGE}))
def test_an_import_from_a_folder_says_the_right_one(folder: str) -> None:
    mine = [name for name, home in HOME_OF.items() if home.rpartition(".")[0] == folder]
    assert mine
    module = importlib.import_module(folder)
    for name in mine:
        assert not hasattr(module, name)
        with pytest.raises(AttributeError, match=f"from {PACKAGE} import {name}$"):
            getattr(module, name)
        with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
            exec(f"from {folder} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from {folder} import no_such_name")


def test_a_misspelt_name_is_guessed() -> None:
    with pytest.raises(AttributeError, match="Did you mean Samples"):
        vars(megatron_rl_loss)["__getattr__"]("Smaples")
    for name in ("Smaples", "sample_means", "no_such_name"):
        assert not hasattr(megatron_rl_loss, name)
        assert getattr(megatron_rl_loss, name, 0) == 0
