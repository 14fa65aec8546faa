"""An empty `transformer_engine`, for what imports it without use: Megatron-Bridge, on a machine without a GPU.

Megatron-Core is imported before, so it knows that there is none.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import megatron.core.extensions.transformer_engine  # noqa: F401
import torch


class _Empty(ModuleType):
    """A module that has every name: a capital one is a class, another a module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _module(f"{self.__name__}.{name}") if name[0].islower() else type(name, (torch.nn.Module,), {})


def _module(name: str) -> ModuleType:
    module = _Empty(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, _Finder())
    module.__path__ = []
    sys.modules[name] = module
    return module


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.split(".")[0] == "transformer_engine"
        return importlib.machinery.ModuleSpec(name, self) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    sys.meta_path.append(_Finder())
