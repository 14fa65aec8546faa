"""`LossModes`: how the policy loss and each further term of a loss are aggregated, and what a step counts for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_rl_loss.modes.names import Aggregation, find_name, resolve
from megatron_rl_loss.modes.table import MODES, Mode, ModeFunction, OwnMode, find_mode
from megatron_rl_loss.step.totals import Statistic, UnitCounting


@dataclass(frozen=True)
class LossModes:
    """The aggregation of the policy loss, and by name those of terms; a term without one is aggregated as the policy
    loss."""

    policy: Aggregation
    terms: Mapping[str, Aggregation] = field(default_factory=dict)

    @classmethod
    def resolve(
        cls,
        mode: str | ModeFunction,
        *,
        divisor: float | None = None,
        units: UnitCounting | None = None,
        terms: Mapping[str, str | None] | None = None,
    ) -> "LossModes":
        """From names, or functions, and what else the user gave; raises as `megatron_rl_loss.resolve`."""
        return cls(resolve(mode, divisor=divisor, units=units)).with_terms(terms or {})

    def with_terms(self, modes: Mapping[str, str | None]) -> "LossModes":
        """With a mode for each term by name, counting the units that the policy loss counts; None says nothing.

        Another framework's name brings its own counting. A term by the mode of the policy loss has its divisor too.
        Raises as `megatron_rl_loss.resolve`; ValueError for another mode that needs a divisor.
        """
        terms = dict(self.terms)
        for name, mode in modes.items():
            if mode is None:
                continue
            alias = find_name(mode) if ":" in mode else None
            found = find_mode(mode) if alias is None else MODES.get(alias.mode or "")
            of_policy = found == self.policy.mode and (alias is None or isinstance(alias.divisor, str))
            of_alias = alias is not None and isinstance(alias.divisor, float | int)
            if found is not None and found.needs_divisor and not of_alias and not of_policy:
                raise ValueError(
                    f"the term {name!r} by {mode} beside a policy loss by {self.policy.mode.name}: a divisor that is "
                    f"given is the policy loss's. Pass the term with its own, Term(values, {mode!r}, divisor=...)."
                )
            units = None if ":" in mode else self.policy.units
            terms[name] = resolve(mode, divisor=self.policy.divisor if of_policy else None, units=units)
        return replace(self, terms=terms)

    def describe(self) -> str:
        """Everything that ranks must have alike, in a line."""
        terms = [f"term {name}: {aggregation.describe()}" for name, aggregation in sorted(self.terms.items())]
        return "; ".join([self.policy.describe(), *terms])

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether a mode groups samples by prompt."""
        return self.by_prompt is not None

    @property
    def by_prompt(self) -> str | None:
        """The first mode that groups samples by prompt, and of what it is, for an error; None where none does."""
        of_what = [("", self.policy), *((f" of the term {name!r}", one) for name, one in self.terms.items())]
        named = (f"{one.mode.name!r}{of}" for of, one in of_what if getattr(one.mode, "unit", None) == "prompt")
        return next(named, None)

    @property
    def uses_prompt_ids(self) -> bool:
        """Whether a mode groups samples by prompt, or is the user's own, which may."""
        return self.needs_prompt_ids or any(isinstance(mode, OwnMode) for mode in self._all)

    @property
    def statistics(self) -> dict[str, Statistic]:
        """What the user's own modes need to be counted."""
        own = [mode.statistics for mode in self._all if isinstance(mode, OwnMode)]
        return {name: statistic for statistics in own for name, statistic in statistics.items()}

    @property
    def _all(self) -> list[Mode | OwnMode]:
        return [one.mode for one in (self.policy, *self.terms.values())]
