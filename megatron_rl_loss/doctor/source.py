"""A function out of a source file: the file is not imported, nothing else of it runs, and nothing of CUDA starts."""

import __future__

import ast
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

#: What stands in such a function for a module or an object of the engine: some names.
Named = SimpleNamespace


def lift(file: Path, name: str, **given: Any) -> Callable[..., Any]:
    """A function of a file, with the functions of the file that it calls. Else it knows torch and `given`.

    Raises ValueError for a file that is not there or has no such function.
    """
    functions = {node.name: node for node in ast.walk(_parsed(file)) if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise ValueError(f"{file.name} has no {name}: another version than was read")
    namespace: dict[str, Any] = {"torch": torch, "math": math, "partial": functools.partial, **given}
    waiting = [name]
    while waiting:
        node = functions[waiting.pop()]
        node.decorator_list = []
        _run(node, file, namespace)
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        waiting += sorted((used & functions.keys()) - namespace.keys())
    function: Callable[..., Any] = namespace[name]
    return function


def lift_branches(file: Path, name: str, setting: str, makes: str) -> Callable[..., Any]:
    """The last ``if``, ``elif`` of a function that looks at a setting and makes a variable: of names, its value."""
    functions = [one for one in ast.walk(_parsed(file)) if isinstance(one, ast.FunctionDef) and one.name == name]
    branches = [one for function in functions for one in function.body if isinstance(one, ast.If)]
    makers = [one for one in branches if any(ast.unparse(node).startswith(f"{makes} = ") for node in one.body)]
    chosen = [one for one in makers if setting in ast.unparse(one.test)]
    if not chosen:
        raise ValueError(f"{file.name} has no branches by {setting} in {name}: another version than was read")

    def value(**names: Any) -> Any:
        namespace = {"torch": torch, **names}
        _run(chosen[-1], file, namespace)
        return namespace[makes]

    return value


def _run(node: ast.stmt, file: Path, namespace: dict[str, Any]) -> None:
    flags = __future__.annotations.compiler_flag  # annotations name what is not there
    exec(compile(ast.Module([node], []), str(file), "exec", flags, dont_inherit=True), namespace)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    if not file.is_file():
        raise ValueError(f"there is no {Path(*file.parts[-3:])}: another version than was read")
    return ast.parse(file.read_text())
