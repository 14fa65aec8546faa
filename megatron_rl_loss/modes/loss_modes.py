"""`LossModes`: how the policy loss and each further term of a loss are aggregated, and what a step counts for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction, OwnMode, find_mode
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

        Raises as `megatron_rl_loss.resolve`; a mode that takes a divisor has that of the policy loss.
        """
        terms = dict(self.terms)
        for name, mode in modes.items():
            if mode is not None:
                table_mode = find_mode(mode)
                takes_divisor = isinstance(table_mode, Mode) and table_mode.takes_divisor
                divisor = self.policy.divisor if takes_divisor else None
                terms[name] = resolve(mode, divisor=divisor, units=self.policy.units)
        return replace(self, terms=terms)

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether a mode groups samples by prompt."""
        return any(isinstance(mode, Mode) and mode.unit == "prompt" for mode in self._all)

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
