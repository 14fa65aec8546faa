"""`LossModes`: the aggregation of the policy loss and of each further term, and the sums that they declare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl_loss.errors import check_mapping
from megatron_rl_loss.modes.aggregation import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.weights import rehearse
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.units import Sum, UnitCounting


@dataclass(frozen=True)
class LossModes:
    """The aggregations of the policy loss and, by name, of terms; a term without one has the policy loss's."""

    policy: Aggregation
    terms: Mapping[str, Aggregation] = field(default_factory=dict)

    @classmethod
    def resolve(
        cls,
        mode: str | Mode | ModeFunction,
        *,
        divisor: float | None = None,
        units: UnitCounting | None = None,
        terms: Mapping[str, str | Mode | ModeFunction | None] | None = None,
    ) -> "LossModes":
        """The modes by names or functions; raises as `make_pg_loss_reducer`."""
        check_mapping("terms", terms or {}, 'Pass {"kl": "token_mean"}')
        return cls(resolve(mode, divisor=divisor, units=units)).with_terms(terms or {})

    def with_terms(self, modes: Mapping[str, str | Mode | ModeFunction | None]) -> "LossModes":
        """With a mode for each term by name; None leaves the term the policy loss's."""
        declared = {name: self.of_term(name, mode) for name, mode in modes.items() if mode is not None}
        return replace(self, terms={**self.terms, **declared})

    def of_term(
        self,
        name: str,
        mode: str | Mode | ModeFunction | None = None,
        *,
        divisor: float | None = None,
        units: UnitCounting | None = None,
    ) -> Aggregation:
        """The aggregation of a term: by the term's own mode, else the declared one, else the policy loss's.

        A term counts the units that the policy loss counts; another framework's name brings its own counting. A term
        with the policy loss's mode has the same divisor. ValueError for a divisor or a counting without a mode.
        """
        if mode is None:
            if divisor is not None or units is not None:
                raise ValueError(
                    f"the term {name!r} with units or a divisor and no mode: both are settings of a mode. Pass the "
                    "term's mode too."
                )
            return self.terms.get(name, self.policy)
        is_peer = isinstance(mode, str) and ":" in mode
        if divisor is None and mode in (self.policy.mode, self.policy.mode.name, self.policy.mode.function):
            divisor = self.policy.divisor
        try:
            return resolve(mode, divisor=divisor, units=units or (None if is_peer else self.policy.units))
        except ValueError as error:
            rule = f"{error}"
            if divisor is None and "without a divisor" in rule:  # the flag and plan_step's argument are the policy's
                rule = (
                    rule.partition(". Give")[0] + f". Pass Term(values, {mode!r}, divisor=...), or take another mode."
                )
            raise ValueError(f"the term {name!r}: {rule}") from error

    def describe(self) -> str:
        """All settings that ranks must have alike, in a line."""
        terms = [f"term {name}: {aggregation.compared}" for name, aggregation in sorted(self.terms.items())]
        return "; ".join([self.policy.compared, *terms])

    @property
    def sums(self) -> list[Sum]:
        """The sums that the modes declare, each once, in the same order on every rank."""
        modes = [self.policy.mode, *(aggregation.mode for _, aggregation in sorted(self.terms.items()))]
        return list(dict.fromkeys(declared for mode in modes for _, declared in sorted(mode.sums.items())))

    def rehearse(self, samples: Samples, masks: Sequence[str] = ()) -> set[str]:
        """The keys that the modes ask for; ValueError for samples that lack a key or a label, before the count."""
        asked = rehearse(self.policy, samples).asked
        for aggregation in self.terms.values():
            for name in (None, *masks):
                asked |= rehearse(aggregation, samples.with_mask(name)).asked
        return asked
