"""A function of the user's, named on a command line: ``pkg.mod.fn`` or ``pkg.mod:fn``."""

import importlib
from collections.abc import Callable
from typing import Any

from megatron_rl_loss.checks import check_callable
from megatron_rl_loss.errors import refused


def load_function(path: str, flag: str, rule: str, remedy: str) -> Callable[..., Any]:
    """The function at the path that a flag was given.

    Args:
        rule, remedy: what to say of something there that cannot be called.

    Raises:
        ValueError: a path that names no module and function, or that does not load.
        TypeError: a path that is no string; what is there cannot be called.
    """
    if not isinstance(path, str):
        raise refused("path_no_string", flag=flag, path=path)
    module_name, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module_name.startswith(".") or not separator or not module_name or not name:
        raise refused("path_incomplete", flag=flag, path=path)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise refused("path_does_not_load", flag=flag, path=path, error=error) from error
    check_callable(f"{flag} {path!r}", function, rule, remedy)
    return function
