"""Modes: the factor of a token's mask in its weight, as an expression over counts of the whole step.

Built-in modes and a user's own are written alike: a function of `ModeInputs`, registered under a name.

    sample_mean  = 1 / (tokens("rollout") * units("rollout"))
    session_mean = 1 / (tokens("sample") * samples("session") * units("session"))
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args

import numpy as np

from megatron_rl_loss.core.counting import COUNTINGS, Counted, StepTotals, Sum, UnitCounting, Units
from megatron_rl_loss.core.errors import check_callable, check_choice, check_mapping, did_you_mean
from megatron_rl_loss.core.ids import argument_of
from megatron_rl_loss.core.masks import SMALLEST, Floats
from megatron_rl_loss.core.samples import Samples
from megatron_rl_loss.core.segments import Segments, segments_by

#: Weights beside the mask: a number; one per sample, [num_samples]; or a row per sample, one number per mask entry.
Weights = Any
ModeFunction = Callable[["ModeInputs"], Weights]
Value = TypeVar("Value")
TakesDivisor = Literal["required", "optional", "refused"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to turn token losses into a step loss: ``sum_t m_t * weight_t * loss_t``.

    Attributes:
        function: `ModeInputs` -> the weights beside the mask.
        formula: the step loss, for tables.
        divisor: ``required``, ``optional`` or ``refused``.
        sums: further sums over the step that the function asks for, by name (`ModeInputs.sum`).
    """

    name: str
    function: ModeFunction
    formula: str = ""
    divisor: TakesDivisor = "optional"
    sums: Mapping[str, Sum] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_callable(f"mode {self.name!r}", self.function, "it must be a function of ModeInputs", "Pass a function")
        if not isinstance(self.formula, str):
            raise TypeError(f"formula of {self.name!r} is {self.formula!r}: it must be a text. Write the step loss.")
        check_choice("divisor of a mode", self.divisor, get_args(TakesDivisor))
        check_mapping(f"sums of the mode {self.name!r}", self.sums, 'Pass {"name": Sum(of=..., by=...)}')
        for name, declared in self.sums.items():
            if not isinstance(declared, Sum):
                raise TypeError(
                    f"the sum {name!r} is a {type(declared).__name__}: it must be a Sum. Pass Sum(of=..., by=...)."
                )

    @property
    def is_built_in(self) -> bool:
        """True for the modes of this package."""
        return getattr(self.function, "__module__", None) == __name__

    def __reduce__(self) -> Any:
        """A decorated function is pickled as functions are, by module and name; other modes with their function."""
        module, name = (getattr(self.function, key, "") for key in ("__module__", "__qualname__"))
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is self:
            return _imported, (module, name)
        return super().__reduce__()


def _imported(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


class ModeInputs:
    """A micro-batch, and counts of the whole step at each of its samples: the argument of a mode.

    A key is ``step``, ``sample``, ``rollout``, ``prompt`` or another name of the samples' ids; samples without rollout
    ids are rollouts. By ids per token, [num_samples] stands for an array of rows: one per sample, with a number for
    each mask entry (NaN where the token is in no unit), so that arithmetic goes on as with numbers.

    Attributes:
        batch: masks, ids, labels and layout of the micro-batch.
        totals: of the step; None in a rehearsal, before the step is counted: the micro-batch then stands for it.
        divisor: as the user gave it, or None.
        counting: which units count, one of `COUNTINGS`: ``all``, or ``active`` ones with a token that is not
            masked, or these and the ``counted`` ones that a label names.
        asked: the keys that the mode has asked for.
        averages: it has asked for numbers of tokens, by which it divides.
    """

    def __init__(
        self, mode: Mode, batch: Samples, totals: StepTotals | None, divisor: float | None, counting: UnitCounting
    ) -> None:
        self._mode, self.batch, self.totals, self.divisor, self.counting = mode, batch, totals, divisor, counting
        self.averages = False
        self.asked: set[str] = set()
        self._by_key: dict[str, Segments] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            known = [*(key for key in vars(self) if key[0] != "_"), "label", "samples", "sum", "tokens", "units"]
            raise AttributeError(f"step.{name}: a mode's inputs have no such attribute. {did_you_mean(name, known)}.")

    def tokens(self, key: str) -> Floats | float:
        """Mask tokens of each sample's unit, float64 [num_samples], or of the step; at least 1e-30."""
        self.averages = True
        if key == "step":
            return max(self.batch.mask_sums.sum() if self.totals is None else self.totals.step_tokens, SMALLEST)
        return self._at_samples(key, "tokens", self.batch.mask_sums, SMALLEST)

    def samples(self, key: str) -> Floats:
        """Number of samples, all or active, that each sample's unit has, float64 [num_samples]; at least 1."""
        self._check_labels()
        return self._at_samples(key, self.counting, np.ones(len(self.batch)), 1)

    def sum(self, name: str) -> Floats:
        """A declared sum over each sample's unit, float64 [num_samples]."""
        if name not in self._mode.sums:
            declares = ", ".join(self._mode.sums) or "none"
            raise ValueError(
                f"the sum {name!r} of the mode {self._mode.name!r}, which declares {declares}: "
                f"a step counts declared sums alone. Register the mode with sums={{{name!r}: Sum(of=...)}}."
            )
        declared = self._mode.sums[name]
        return self._at_samples(declared.by, declared, declared.values(self.batch))

    def units(self, key: str) -> int:
        """Number of such units in the step, all or active; at least 1."""
        segments = self._segments(key)
        self._check_labels()
        if self.totals is None or key == "step":
            return 1
        units = self._units(self.totals, key)
        if segments.have_ids != units.have_ids and key != "sample":
            with_ids, without = ("a micro-batch", "totals") if segments.have_ids else ("totals", "a micro-batch")
            raise ValueError(
                f"{with_ids} with {key} ids, {without} without: their units would differ. Give both the same ids, or "
                "neither."
            )
        return max(self._known(units.number, self.counting, key), 1)

    def label(self, name: str) -> Any:
        """The samples' labels of that name, an array where each is a number; ValueError where there are none."""
        return self.batch.label(name)

    def _segments(self, key: str) -> Segments:
        """The segments by a key that the mode asks for; ValueError for one that the samples lack."""
        if key not in self._by_key:
            self.asked.add(key)
            self._by_key[key] = segments_by(key, self.batch, f"loss aggregation {self._mode.name!r}")
        return self._by_key[key]

    def _check_labels(self) -> None:
        """Raise ValueError where the unit counting reads labels that the samples lack."""
        for name in COUNTINGS[self.counting].labels:
            self.batch.label(name)

    def _at_samples(self, key: str, counted: Counted, own: Floats, least: float = -np.inf) -> Floats:
        """What is counted of each sample's unit; `own` is the number of each sample, where it is a unit alone."""
        segments = self._segments(key)
        if self.totals is None or not segments.have_ids:
            if self.totals is not None and key in self.totals.units and self.totals.units[key].have_ids:
                self.units(key)  # refuses totals by id
            segment_counts = segments.spread(own)
        else:
            units = self._units(self.totals, key)
            self._known(units.counts, counted, key)
            segment_counts = units.at(counted, segments.ids, argument_of(key), segments.sample)
        return segments.at_entries(np.maximum(segment_counts, least))

    def _units(self, totals: StepTotals, key: str) -> Units:
        return self._known(totals.units, key, key)

    def _known(self, counts: Mapping[Any, Value], counted: Any, key: str) -> Value:
        """The entry of counts by a key; ValueError where the step was counted without it."""
        if counted not in counts:
            what = f"{key} units" if counted == key else f"a declared sum by {key}"
            if isinstance(counted, str) and counted != key:
                what = f"{counted} by {key}"
            raise ValueError(
                f"totals without {what}: {self._mode.name!r} needs them. Make the totals with the samples' ids "
                "and labels (StepTotals.of, for declared sums with sums=), or declare the mode to the "
                "plan (terms=)."
            )
        return counts[counted]


_MODES: dict[str, Mode] = {}


def register_loss_mode(
    name: str,
    *,
    formula: str = "",
    divisor: TakesDivisor = "optional",
    sums: Mapping[str, Sum] | None = None,
) -> Callable[[ModeFunction], Mode]:
    """Decorator: make a function of `ModeInputs` a mode, a choice of ``--loss-aggregation`` and wherever modes go.

    The returned weights, 0 or above, are multiplied by the mask, so no mode can train masked tokens. Register before
    flags are parsed. Arguments as the attributes of `Mode`.

    >>> @register_loss_mode("task_mean")
    ... def task_mean(step):
    ...     return 1 / (step.tokens("sample") * step.samples("task") * step.units("task"))

    Raises ValueError for a name that is taken, a keyword or no identifier, and TypeError for an object that is not
    callable and a formula that is no text.
    """
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name in _MODES:
        rule = "it must be a Python identifier that is not taken, and no keyword"
        raise ValueError(f"mode name {name!r}: {rule}. Choose another name.")

    def register(function: ModeFunction) -> Mode:
        _MODES[name] = Mode(name=name, function=function, formula=formula, divisor=divisor, sums=sums or {})
        return _MODES[name]

    return register


def register_pg_loss_reducer(name: str, **attributes: Any) -> Callable[[ModeFunction], Mode]:
    """An alias of `register_loss_mode`."""
    return register_loss_mode(name, **attributes)


def available_modes() -> tuple[str, ...]:
    """The built-in modes and every registered one."""
    return tuple(_MODES)


def find_mode(name: str) -> Mode | None:
    """The mode of that name, or None."""
    return _MODES.get(name)


def load_function(path: str, flag: str, rule: str, remedy: str, kind: type | tuple[()] = ()) -> Any:
    """The function, or object of that kind, at the path in a flag.

    Raises ValueError for a path that names no module and function or does not load, and TypeError, with the given rule
    and remedy, for another object.
    """
    module, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module.startswith(".") or not separator or not module or not name:
        raise ValueError(f"{flag} {path!r}: it must name a module and a function. Write pkg.mod.fn or pkg.mod:fn.")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{flag} {path!r}: it does not load ({error}). Check the spelling, and that the module's folder is on "
            "PYTHONPATH."
        ) from error
    if not isinstance(function, kind):
        check_callable(f"{flag} {path!r}", function, rule, remedy)
    return function


@register_loss_mode("sample_mean", formula="1/N sum_i (sum_t l*m / M_i)", divisor="refused")
def sample_mean(step: ModeInputs) -> Weights:
    return 1 / (step.tokens("rollout") * step.units("rollout"))


@register_loss_mode("prompt_mean", formula="1/P sum_g (sum_{t in g} l*m / M_g)", divisor="refused")
def prompt_mean(step: ModeInputs) -> Weights:
    return 1 / (step.tokens("prompt") * step.units("prompt"))


@register_loss_mode("token_mean", formula="sum l*m / sum m", divisor="refused")
def token_mean(step: ModeInputs) -> Weights:
    return 1 / step.tokens("step")


@register_loss_mode("constant", formula="sum l*m / (L*N)", divisor="required")
def constant(step: ModeInputs) -> Weights:
    return 1 / ((step.divisor or 0) * step.units("rollout"))


@register_loss_mode("token_sum", formula="sum l*m / d")
def token_sum(step: ModeInputs) -> Weights:
    return 1 / (step.divisor or 1.0)


@register_loss_mode("session_mean", formula="1/S sum_s 1/n_s sum_i (sum_t l*m / M_i)", divisor="refused")
def session_mean(step: ModeInputs) -> Weights:
    return 1 / (step.tokens("sample") * step.samples("session") * step.units("session"))


@register_loss_mode("turn_mean", formula="1/U sum_u (sum_{t in u} l*m / M_u)", divisor="refused")
def turn_mean(step: ModeInputs) -> Weights:
    return 1 / (step.tokens("turn") * step.units("turn"))


@cache
def unit_mean(key: str) -> Mode:
    """The mode ``1/U sum_u (sum_{t in u} l*m / M_u)`` over the units of that key."""
    return Mode(name=f"mean over {key}", function=lambda step: 1 / (step.tokens(key) * step.units(key)))
