"""A function of the user's, named on a command line: ``pkg.mod.fn`` or ``pkg.mod:fn``."""

import importlib
from typing import Any

from megatron_rl_loss.errors import check_callable


def load_function(path: str, flag: str, rule: str, remedy: str, kind: type | tuple[()] = ()) -> Any:
    """The function, or object of that kind, at the path in a flag.

    Raises ValueError for a path that names no module and function or does not load, and TypeError, with the given rule
    and remedy, for another object.
    """
    module, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module.startswith(".") or not separator or not module or not name:
        raise ValueError(f"{flag} {path!r}: it must name a module and a function. Write pkg.mod.fn or pkg.mod:fn.")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{flag} {path!r}: it does not load ({error}). Check the spelling, and that the module's folder is on "
            "PYTHONPATH."
        ) from error
    if not isinstance(function, kind):
        check_callable(f"{flag} {path!r}", function, rule, remedy)
    return function
