"""`resolve`: an `Aggregation` from our names, other frameworks' (``verl:seq-mean-token-mean``) or functions."""

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_rl_loss.errors import check_choice, is_number
from megatron_rl_loss.modes.table import Mode, ModeFunction, find_mode
from megatron_rl_loss.step.units import COUNTINGS, UnitCounting


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """A mode, a divisor and a unit counting; validated when it is made.

    Attributes:
        mode: how token losses become a step loss.
        divisor: D of a mode that takes one, else None.
        units: which units count, one of `COUNTINGS`.
    """

    mode: Mode
    divisor: float | None = None
    units: UnitCounting = "all"

    def __post_init__(self) -> None:
        check_choice("unit counting", self.units, COUNTINGS)
        if self.divisor is None:
            if self.mode.divisor == "required":
                raise ValueError(
                    f"loss aggregation {self.mode.name!r} without a divisor: the mode divides by a constant. "
                    "Give a number of tokens, e.g. the generation budget: --loss-aggregation-divisor 40960, in code "
                    "divisor=40960."
                )
            return
        shown = f"divisor {self.divisor!r} with loss aggregation {self.mode.name!r}"
        if self.mode.divisor == "refused":
            raise ValueError(f"{shown}: this mode takes none. Drop the divisor, or choose constant or token_sum.")
        if not is_number(self.divisor):
            raise TypeError(
                f"{shown}: a divisor must be a Python number. Pass a number of tokens; of a tensor, .item()."
            )
        if not 1e-30 < self.divisor < 1e30:
            raise ValueError(f"{shown}: a divisor must be between 1e-30 and 1e30. Pass a number of tokens.")
        object.__setattr__(self, "divisor", float(self.divisor))  # a Fraction has no format

    def __str__(self) -> str:
        """The mode, its divisor if it has one, and its unit counting where that is not the usual one."""
        divisor = "" if self.divisor is None else f" with divisor {self.divisor:g}"
        return f"{self.mode.name}{divisor}" + f", counting {self.units} units" * (self.units != "all")

    def describe(self) -> str:
        """All settings in a line, for the log."""
        divisor = "" if self.divisor is None else f", divisor {self.divisor:.15g}"
        return f"loss aggregation: {self.mode.name}{divisor}, counting {self.units} units"

    @cached_property
    def compared(self) -> str:
        """The settings that micro-batches and ranks must have alike.

        A function of the user's is in them with a digest, since its name does not say what it does.
        """
        if self.mode.is_built_in:
            return self.describe()
        from megatron_rl_loss.modes.fingerprint import fingerprint

        return f"{self.describe()} (function {fingerprint(self.mode)})"


def resolve(
    asked: str | Mode | ModeFunction, *, divisor: float | None = None, units: UnitCounting | None = None
) -> Aggregation:
    """The aggregation of a mode, its name, another framework's ``framework:name``, or a function of `ModeInputs`.

    >>> resolve("verl:seq-mean-token-sum-norm", divisor=4096).mode.name
    'constant'

    Args:
        divisor, units: None for what the user left out.

    Raises:
        ValueError: an unknown name; a name whose loss depends on the cut of the step; a divisor that is missing,
            unusable, without effect, or another than the name's. The message lists the names or the nearest mode.
        TypeError: an object that is neither a name nor a function; a divisor that is no number.
    """
    mode = find_mode(asked) if isinstance(asked, str) else asked
    if isinstance(asked, str) and mode is None:
        from megatron_rl_loss.modes.names import of_peer  # a long table, which a launch by our own names does not need

        name, divisor, units = of_peer(asked, divisor, units)
        return resolve(name, divisor=divisor, units=units)
    if not isinstance(mode, Mode):
        if not callable(mode):
            raise TypeError(
                f"loss aggregation {asked!r} ({type(asked).__name__}): it must be a mode, its name or a function of "
                "ModeInputs. Pass one of them; a Term takes a factor as coef=."
            )
        mode = Mode(name=_name_of(mode), function=mode)
    return Aggregation(mode=mode, divisor=divisor, units=units or "all")


def _name_of(function: Any) -> str:
    """Module and name of a function, or of the class of a callable object: the same on every rank."""
    function = function.func if isinstance(function, functools.partial) else function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
