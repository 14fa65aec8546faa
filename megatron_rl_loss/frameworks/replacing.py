"""Replacement of an engine's functions: parameters are validated, all modules get ours, once, and `undo` restores."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_rl_loss.modes.aggregation import Aggregation
from megatron_rl_loss.step.collectives import world_rank

_MARK = "_replaced_by_megatron_rl_loss"
_ACTIVE: list[object] = []


class Function(NamedTuple):
    """A function of a module, class or object; `call(stock, given)` takes its place.

    `given` are the arguments of a call by name; `stock()` calls the engine's function with the values in `given`.
    `also_in` selects, by name, further modules among those that imported the function; `bool` selects all.
    """

    owner: Any
    name: str
    parameters: Sequence[str]
    call: Callable[[Callable[[], Any], dict[str, Any]], Any]
    also_in: Callable[[str], bool] = lambda module: False

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}.{self.name}"


class Replaced:
    """Functions that stay replaced until `undo`, all or none; `str` lists their places.

    Attributes:
        proof: the proof of the first training step; `undo` ends it.
        now: what the engine computes, for those of its functions that are called meanwhile; None between steps.

    Raises ValueError for a function that is missing, lacks a parameter, or is replaced already, in a base class too.
    """

    def __init__(self, engine: str, versions: str, functions: Sequence[Function]) -> None:
        for one in functions:
            stock = getattr(one.owner, one.name, None)
            found = () if stock is None else tuple(inspect.signature(stock).parameters)
            if stock is None or not set(one.parameters) <= set(found):
                raise ValueError(
                    f"{engine} with {'no ' if stock is None else ''}{one}({', '.join(found)}): this package expects "
                    f"{one.name}({', '.join(one.parameters)}). Use {engine} {versions}."
                )
            bases = getattr(one.owner, "__mro__", type(one.owner).__mro__)
            if any(hasattr(vars(each).get(one.name), _MARK) for each in (one.owner, *bases)):
                raise ValueError(
                    f"{one}, which has a loss aggregation already: a second one would apply weights twice. Aggregate "
                    "once, for a class or for its subclass."
                )
        self.engine = engine
        self.proof: Any = None
        self.now: Any = None
        stocks = [(one, getattr(one.owner, one.name), vars(one.owner).get(one.name)) for one in functions]
        self._all = [(one, stock, raw, _wrapped(one, stock)) for one, stock, raw in stocks]
        for one, _, _, ours in self._all:
            setattr(one.owner, one.name, ours)
        self.put_everywhere()
        announce(self)

    def __str__(self) -> str:
        places = {f"{module.__name__}.{name}" for *_, ours in self._all for module, name in holders(ours)}
        return f"{self.engine}: replaced {', '.join(sorted(places | {str(one) for one, *_ in self._all}))}"

    def put_everywhere(self) -> None:
        """Replace the functions in modules that were loaded later, too."""
        for one, stock, _, ours in self._all:
            for module, name in holders(stock):
                if one.also_in(module.__name__):
                    setattr(module, name, ours)

    def undo(self) -> None:
        """Restore the engine's functions in every module that holds ours."""
        for one, stock, raw, ours in self._all:
            if vars(one.owner).get(one.name) is ours:
                delattr(one.owner, one.name) if raw is None else setattr(one.owner, one.name, raw)
            for module, name in holders(ours):
                setattr(module, name, stock)
        if self.proof is not None:
            self.proof.is_over = True
        _ACTIVE.remove(self)


def holders(function: Any) -> list[tuple[Any, str]]:
    """Loaded modules that hold the function, by whatever name."""
    modules = {id(one): one for one in list(sys.modules.values()) if hasattr(one, "__name__")}.values()
    return [(one, name) for one in modules for name, value in list(vars(one).items()) if value is function]


def announce(line: object, is_first: bool | None = None) -> None:
    """Add the line to `active`, and print it on one rank, by default the first."""
    if line not in _ACTIVE:
        _ACTIVE.append(line)
        if (world_rank() or int(os.environ.get("RANK", "0"))) == 0 if is_first is None else is_first:
            print(f"megatron_rl_loss in {line}", flush=True)


def prove(engine: str, asked: Aggregation, **words: Any) -> Any:
    """The `FirstStep`, with its `words`, of this process's next training step; None without Megatron."""
    if "megatron.core.pipeline_parallel" not in sys.modules:
        announce(f"{engine}: NOT PROVED: Megatron-Core is not loaded")
        return None
    from megatron_rl_loss.proof.first_step import prove_engine

    return prove_engine(asked, f"{engine}'s policy loss", **words)


def installed(engine: str) -> Any:
    """The `Replaced` of that engine in this process, or None."""
    return next((one for one in _ACTIVE if isinstance(one, Replaced) and one.engine == engine), None)


def active() -> list[str]:
    """A line for each adapter that is active in this process."""
    return [str(one) for one in _ACTIVE]


def _wrapped(one: Function, stock: Any) -> Any:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def ours(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return one.call(lambda: stock(*bound.args, **bound.kwargs), bound.arguments)

    setattr(ours, _MARK, True)
    return ours
