"""Policy-gradient loss aggregation for Megatron-Core, exact in every parallel layout.

Every name that a user types is importable from here: `__init__.pyi` lists them. Importing the package loads none of its
folders, and no Megatron. This door alone knows all folders; of these each imports those below it.
"""

import ast
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

#: Public names by the module that defines each: what the stub imports as itself, as type checkers read a stub.
_HOME_OF = {
    name.name: str(line.module)
    for line in ast.parse(Path(__file__ + "i").read_text(encoding="utf-8")).body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
    if name.asname == name.name
}

#: Modules that add what other projects have to tables of the core: names of modes, forms of return values.
FURTHER_TABLES = ["megatron_rl_loss.engines.names", "megatron_rl_loss.engines.forms"]

__all__ = sorted(_HOME_OF)


def refuse_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module: of a name that is public elsewhere the error has the right import."""

    def refuse(name: str) -> Any:
        if name in _HOME_OF:
            raise AttributeError(f"{name} is not in {module}. Write: from {__name__} import {name}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return refuse


def load_further_tables() -> None:
    """Load the modules that add to the core's tables; the core calls it for a name that its own tables lack."""
    for module in FURTHER_TABLES:
        import_module(module)


def plot_plan(plan: Any, path: Any, title: str) -> None:
    """Draw the weights of a plan; `Plan.plot` calls it, as the core knows no picture."""
    import_module(f"{__name__}.audit.picture").plot_weights(plan, path, title=title)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    close = get_close_matches(name, _HOME_OF, n=1)
    if close and not find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"{__name__} has no name {name!r}. Did you mean {close[0]}?", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
