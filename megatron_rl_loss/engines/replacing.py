"""Replacement of an engine's functions: parameters are validated, all modules get ours, once, and `undo` restores."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_rl_loss.core.collectives import world_rank
from megatron_rl_loss.core.errors import print_text
from megatron_rl_loss.engines.places import Call

_MARK = "_replaced_by_megatron_rl_loss"
#: The kind of a replacement that changes what is trained.
AGGREGATION = "a loss aggregation"
#: What this process did to engines: `Replaced` and announced lines by themselves, proofs by the number of their loss.
#: A registry of the process, since engines call what we put into their modules, and unpickle losses at every step.
_REGISTRY: dict[object, object] = {}


class Function(NamedTuple):
    """A function of a module, class or object; `call(stock, arguments)` takes its place.

    `arguments` are those of a call by name; `stock()` calls the engine's function with the values in `arguments`.
    `also_in` selects, by name, further modules among those that imported the function; `bool` selects all. A function
    has one replacement of a `kind`.
    """

    owner: Any
    name: str
    parameters: Sequence[str]
    call: Call
    also_in: Callable[[str], bool] = lambda module: False
    kind: str = AGGREGATION

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}.{self.name}"


class Replaced:
    """Functions that stay replaced until `undo`, all or none; `str` lists their places.

    Attributes:
        proof: the proof of the first training step; `undo` ends it.
        later: functions that `add` replaces when a run needs them, by name.
        now: what the engine computes, for those of its functions that are called meanwhile; None between steps.

    Raises ValueError for a function that is missing, lacks a parameter, or is replaced already, in a base class or
    a subclass too.
    """

    def __init__(self, engine: str, versions: str, functions: Sequence[Function]) -> None:
        self.engine, self.versions = engine, versions
        self.proof: Any = None
        self.now: Any = None
        self.later: dict[str, list[Function]] = {}
        self._all: list[tuple[Function, Any, Any, Any]] = []
        self._put(functions)
        announce(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a method that an engine sends to a worker by value: what that worker has replaced itself, if anything."""
        return _replaced_here, (self.engine,), vars(self).copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not vars(self):
            vars(self).update(state)

    def __str__(self) -> str:
        held = holders([replacement for *_, replacement in self._all])
        places = {f"{module.__name__}.{name}" for each in held for module, name in each}
        places = {place for place in places if place.partition(".")[0] != __name__.partition(".")[0]}
        return f"{self.engine}: replaced {', '.join(sorted(places | {str(function) for function, *_ in self._all}))}"

    def add(self, names: Sequence[str]) -> None:
        """Replace functions of `later` too, those of these names, once."""
        for name in names:
            self._put(self.later.pop(name, []))

    def _put(self, functions: Sequence[Function]) -> None:
        """All functions, or none."""
        for function in functions:
            owner, name = function.owner, function.name
            stock = getattr(owner, name, None)
            parameters = () if stock is None else tuple(inspect.signature(stock).parameters)
            if stock is None or not set(function.parameters) <= set(parameters):
                raise ValueError(
                    f"{self.engine} with {'no ' if stock is None else ''}{function}({', '.join(parameters)}): this "
                    f"package expects {name}({', '.join(function.parameters)}). Use {self.engine} {self.versions}."
                )
            for holder in [each for each in _with_subclasses(owner) if is_replaced(each, name, function.kind)]:
                raise ValueError(
                    f"{function._replace(owner=holder)}, which has {function.kind} already: a second one would apply "
                    "or measure weights twice. Do it once, for a class or for its subclass."
                )
        new = []
        for function in functions:
            owner, name = function.owner, function.name
            stock = getattr(owner, name)
            new.append((function, stock, vars(owner).get(name), _wrapped(function, stock)))
        for function, _, _, replacement in new:
            setattr(function.owner, function.name, replacement)
        self._all += new
        self.put_everywhere()

    def replacement(self, function: Any) -> Any:
        """What took the function's place, for a caller that took the engine's before; else the function itself."""
        return next((replacement for _, stock, _, replacement in self._all if stock is function), function)

    def put_everywhere(self) -> None:
        """Replace the functions in modules that were loaded later, too."""
        held = holders([stock for _, stock, *_ in self._all])
        for (function, _, _, replacement), places in zip(self._all, held, strict=True):
            for module, name in places:
                if function.also_in(module.__name__):
                    setattr(module, name, replacement)

    def undo(self) -> None:
        """Restore the engine's functions in every module that holds ours."""
        held = holders([replacement for *_, replacement in self._all])
        for (function, stock, raw, replacement), places in zip(self._all, held, strict=True):
            owner, name = function.owner, function.name
            if vars(owner).get(name) is replacement:
                delattr(owner, name) if raw is None else setattr(owner, name, raw)
            for module, name in places:
                setattr(module, name, stock)
        if self.proof is not None:
            self.proof.is_over = True
        for key in [key for key, entry in _REGISTRY.items() if entry is self]:
            del _REGISTRY[key]


def is_replaced(owner: Any, name: str, kind: str = AGGREGATION) -> bool:
    """True if that function of the owner, or of a base class, has a replacement of the kind."""
    bases = getattr(owner, "__mro__", type(owner).__mro__)
    return any(kind in getattr(vars(each).get(name), _MARK, ()) for each in (owner, *bases))


def _with_subclasses(owner: Any) -> list[Any]:
    subclasses: list[type] = type.__subclasses__(owner) if isinstance(owner, type) else []
    return [owner, *(below for subclass in subclasses for below in _with_subclasses(subclass))]


def holders(functions: Sequence[Any]) -> list[list[tuple[Any, str]]]:
    """For each function, the loaded modules that hold it, by whatever name; in one pass over all of their names."""
    held: dict[int, list[tuple[Any, str]]] = {id(function): [] for function in functions}
    modules = {id(module): module for module in list(sys.modules.values()) if hasattr(module, "__name__")}.values()
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in held:
                held[id(value)].append((module, name))
    return [held[id(function)] for function in functions]


def announce(line: object, is_first: bool | None = None) -> None:
    """Add the line to `active`, and print it on one rank, by default the first, with the process it speaks of."""
    is_new = line not in _REGISTRY
    once(line, lambda: line)
    rank, (engine, _, says) = world_rank() or int(os.environ.get("RANK", "0")), str(line).partition(": ")
    if is_new and (rank == 0 if is_first is None else is_first):
        if is_driver():
            print_text(f"megatron_rl_loss in {engine} driver: {says}; each worker prints a line of its own")
        else:
            print_text(f"megatron_rl_loss in {engine} worker {rank}: {says}")


def is_driver() -> bool:
    """True in a process that uses Ray and is none of Ray's actors: what it replaces is not replaced in the workers."""
    ray = sys.modules.get("ray")
    if ray is None or "RANK" in os.environ:
        return False
    return not (ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def once(key: object, make: Callable[[], object]) -> Any:
    """The thing of this key; made when this process asks for it first."""
    if key not in _REGISTRY:
        _REGISTRY[key] = make()
    return _REGISTRY[key]


def installed(engine: str) -> Any:
    """The `Replaced` of that engine in this process, or None."""
    return next((entry for entry in _REGISTRY if isinstance(entry, Replaced) and entry.engine == engine), None)


def _replaced_here(engine: str) -> Any:
    return installed(engine) or object.__new__(Replaced)


def active() -> list[str]:
    """A line for each adapter that is active in this process."""
    return [str(entry) for entry in dict.fromkeys(_REGISTRY.values()) if isinstance(entry, str | Replaced)]


def _wrapped(function: Function, stock: Any) -> Any:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return function.call(lambda: stock(*bound.args, **bound.kwargs), bound.arguments)

    setattr(replacement, _MARK, {function.kind, *getattr(stock, _MARK, ())})
    return replacement
