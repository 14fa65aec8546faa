"""The modes, as data: what a unit is, and what a unit's sum is divided by. Every mode is one weight per token,

    w = mask / (D * U),    D the size of the token's unit, U the number of units, both over the whole step.

L is the divisor of `constant`, d that of `token_sum`; l a token's loss, m its mask, M a sum of masks.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor

from megatron_rl_loss.errors import check_callable
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import Statistic, StepTotals, UnitCounting

Unit = Literal["step", "rollout", "prompt"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One row of the table.

    Attributes:
        unit: what is averaged over: its number in the step is U.
        size: D: the mask ``tokens`` of the unit, or the ``divisor`` that the user gives.
        formula: the step loss.
        default_divisor: the divisor where the user gives none; None if one must be given.
    """

    name: str
    unit: Unit
    size: Literal["tokens", "divisor"]
    formula: str
    default_divisor: float | None = None

    @functools.cached_property
    def takes_divisor(self) -> bool:
        return self.size == "divisor"

    @property
    def needs_divisor(self) -> bool:
        return self.takes_divisor and self.default_divisor is None


MODES = {
    mode.name: mode
    for mode in (
        Mode(name="sample_mean", unit="rollout", size="tokens", formula="1/N sum_i (sum_t l*m / M_i)"),
        Mode(name="prompt_mean", unit="prompt", size="tokens", formula="1/P sum_g (sum_{t in g} l*m / M_g)"),
        Mode(name="token_mean", unit="step", size="tokens", formula="sum l*m / sum m"),
        Mode(name="constant", unit="rollout", size="divisor", formula="sum l*m / (L*N)"),
        Mode(name="token_sum", unit="step", size="divisor", formula="sum l*m / d", default_divisor=1.0),
    )
}


@dataclass(frozen=True, kw_only=True)
class ModeInputs:
    """What a mode of one's own is given: a micro-batch and the step it belongs to.

    Attributes:
        samples: masks, ids and layout of the micro-batch.
        totals: denominators of the whole step.
        divisor: ``--loss-aggregation-divisor``, or None.
        units: whether fully masked units count (``all``) or not (``active``).
        mode: the mode that is asked, whose statistics `statistic` looks up.
    """

    samples: Samples
    totals: StepTotals
    divisor: float | None = None
    units: UnitCounting = "all"
    mode: "OwnMode | None" = None

    def statistic(self, name: str) -> Tensor:
        """What the step's samples of each sample's key add up to, float64 [num_samples] on the host."""
        assert self.mode is not None
        statistic, full_name = statistics_of(self.mode.function)[name], f"{self.mode.name}.{name}"
        if statistic.of_rollouts and self.samples.rollout_ids is None:
            return statistic.values(self.samples)
        if full_name not in self.totals.statistics:
            raise ValueError(
                f"totals without the statistic {name!r} of the mode {self.mode.name}: it is counted with the step, "
                "before its first micro-batch. Make the totals with statistics=resolve(mode).mode.statistics, or let "
                "LossAggregation make them."
            )
        return self.totals.statistics[full_name].of(full_name, statistic.keys(full_name, self.samples))


#: Weights beside the mask: a number, one per sample [num_samples], or a tensor per sample, one per token of its mask.
Weights = float | Tensor | Sequence[Tensor]
ModeFunction = Callable[[ModeInputs], Weights]


@dataclass(frozen=True)
class OwnMode:
    """A mode that a user's function makes."""

    name: str
    function: ModeFunction

    @property
    def needs_divisor(self) -> bool:
        """Whether its function says so, by an attribute of that name."""
        return bool(getattr(self.function, "needs_divisor", False))

    @property
    def statistics(self) -> dict[str, Statistic]:
        """What it needs to be counted over the step, by names that are its own."""
        return {f"{self.name}.{name}": statistic for name, statistic in statistics_of(self.function).items()}


def with_statistics(**statistics: Statistic) -> Callable[[ModeFunction], ModeFunction]:
    """Decorator: sums over the step that a mode of one's own needs; `ModeInputs.statistic` gives them by name.

    >>> @with_statistics(tokens=Statistic(of=lambda samples: samples.mask_sums))
    ... def my_token_mean(inputs):
    ...     return 1 / inputs.statistic("tokens").clamp(min=1)
    """

    def declare(function: ModeFunction) -> ModeFunction:
        @functools.wraps(function)
        def mode(*args: ModeInputs, **kwargs: object) -> Weights:
            if len(args) != 1 or kwargs:  # slime's and miles's flag for hooks has the name of ours
                call = f"the mode {function.__qualname__} called with {len(args) + len(kwargs)} arguments"
                raise _no_sums_in_hooks(call, "slime or miles")
            return function(*args)

        mode.statistics = statistics  # type: ignore[attr-defined]
        return mode

    return declare


#: By framework: how to train on folded advantages.
_ON_FOLDED_ADVANTAGES = {
    "slime or miles": "multiply them by the global batch size, and use ...slime.constant_1",
    "verl": "and use token-sum",
}


def _no_sums_in_hooks(given: str, framework: str) -> ValueError:
    return ValueError(
        f"{given}: this mode declares sums over the whole step, which {framework} does not let a hook make. Fold its "
        "weights into the advantages (fold_into_advantages, with totals that hold its statistics), "
        f"{_ON_FOLDED_ADVANTAGES[framework]}."
    )


def check_no_declared_sums(mode: object, framework: str) -> None:
    """Refuse a mode, by name or itself, whose statistics a framework's hook cannot count."""
    function = _REGISTERED.get(mode) if isinstance(mode, str) else mode
    if callable(function) and statistics_of(function):
        name = mode if isinstance(mode, str) else getattr(mode, "__qualname__", mode)
        raise _no_sums_in_hooks(f"the mode {name} in {framework}", framework)


def statistics_of(function: ModeFunction) -> dict[str, Statistic]:
    """What `with_statistics` declared; none without."""
    return dict(getattr(function, "statistics", {}))


_REGISTERED: dict[str, ModeFunction] = {}
_Function = TypeVar("_Function", bound=ModeFunction)


def register_pg_loss_reducer(name: str) -> Callable[[_Function], _Function]:
    """Decorator: make a function a mode, a choice of ``--loss-aggregation`` and of everything that takes a mode.

    The function takes `ModeInputs` and returns `Weights` beside the mask; the mask is multiplied to them, so that no
    mode can train what is masked. Sums of weight * mask * loss over everything must be the step loss. Register before
    the flags are parsed.

    >>> @register_pg_loss_reducer("half_sum")
    ... def half_sum(inputs):
    ...     return 0.5

    Raises:
        ValueError: the name is taken or no identifier.
        TypeError: what is registered cannot be called.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"mode name {name!r}: it must be a Python identifier. Choose a plain name.")
    if name in available_modes():
        raise ValueError(f"mode name {name!r}: it is taken. Choose another name.")

    def register(function: _Function) -> _Function:
        check_callable(f"mode {name!r}", function, "it must be a function of ModeInputs", "Register a function")
        _REGISTERED[name] = function
        return function

    return register


def available_modes() -> tuple[str, ...]:
    """The built-in modes and every registered one."""
    return (*MODES, *_REGISTERED)


def find_mode(name: str) -> Mode | OwnMode | None:
    """The mode of that name, or None."""
    return OwnMode(name, _REGISTERED[name]) if name in _REGISTERED else MODES.get(name)
