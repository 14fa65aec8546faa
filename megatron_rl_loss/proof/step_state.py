"""What ranks tell each other of a measured step before they compare weights, of a size that does not depend on it.

Whatever is only to be said is a finding. The rest are the facts that a comparison needs from other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_rl_loss.core.collectives import StepGroups
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.core.taps import Declared, Tap
from megatron_rl_loss.core.transfers import to_device
from megatron_rl_loss.proof.factor import MOST_NAMES, Alike, Factor, no_factor
from megatron_rl_loss.proof.findings import GIVEN, IN_PART, NOT_PROVED, WRONG, Finding, joined
from megatron_rl_loss.proof.outcomes import TOLERANCES, Gradient

#: Two declarations that differ say as much as thousands.
_MOST_DECLARED = 3


@dataclass
class Stage:
    """The trainable parameters of a pipeline stage.

    Attributes:
        factor: f; None where most parameters have no common one.
        problem: why there is none.
        total, covered, zero: numbers of all parameters, of those that have the factor, of those without a gradient.
        num_unlike: of those that have it not; `unlike` says of some of them what they have instead.
        uncovered: parameters of which nothing can be said, and why.
        notes: further words on the measurement.
        coarsest: the largest part of a covered parameter's gradient that rounding may be.
    """

    factor: Factor | None = None
    problem: str = ""
    total: int = 0
    covered: int = 0
    zero: int = 0
    num_unlike: int = 0
    unlike: dict[str, str] = field(default_factory=dict)
    uncovered: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    coarsest: float = 0.0

    @classmethod
    def of(cls, alike: Alike, place: str) -> "Stage":
        """What sketches say of one rank's parameters. `place`: words behind their names; empty for one stage."""
        unlike, uncovered = (
            {f"{name}{place}": words for name, words in named.items()} for named in (alike.unlike, alike.uncovered)
        )
        return cls(
            alike.factor, alike.problem, alike.total, alike.covered, len(alike.zero), len(alike.unlike), unlike,
            uncovered, [*alike.notes], alike.coarsest,
        )  # fmt: skip

    def joined(self, other: "Stage") -> "Stage":
        """As the rank that covers fewest sees them."""
        unlike, num_unlike = {**other.unlike, **self.unlike}, max(self.num_unlike, other.num_unlike)
        a, b = self.factor, other.factor
        if a is not None and b is not None and a.where == b.where and not a.is_near(b):
            pair = " or ".join(f"{value:.6g}" for value in sorted((a.value, b.value)))
            unlike = {"all of them": f"{pair} times the sum, on different ranks", **unlike}
            num_unlike = max(self.total, other.total)
        return Stage(
            factor=a or b,
            problem=self.problem or other.problem,
            total=max(self.total, other.total),
            covered=min(self.covered, other.covered),
            zero=max(self.zero, other.zero),
            num_unlike=num_unlike,
            unlike=dict([*unlike.items()][:MOST_NAMES]),
            uncovered=dict([*{**other.uncovered, **self.uncovered}.items()][:MOST_NAMES]),
            notes=[*dict.fromkeys(self.notes + other.notes)],
            coarsest=max(self.coarsest, other.coarsest),
        )


@dataclass
class TermState:
    """A term of the loss.

    Attributes:
        declared: by micro-batches, a few of those that differ.
        is_reached: a gradient came to it.
        is_everywhere: each rank that computes losses has some of it; known once ranks have joined.
    """

    declared: set[Declared] = field(default_factory=set)
    is_reached: bool = False
    is_everywhere: bool = True

    def joined(self, other: "TermState") -> "TermState":
        few = sorted(self.declared | other.declared, key=repr)[:_MOST_DECLARED]  # the same on every rank
        return TermState(set(few), self.is_reached or other.is_reached, self.is_everywhere and other.is_everywhere)


@dataclass
class StepState:
    """What ranks know of a step.

    Attributes:
        findings: of the measurement and of this rank's losses.
        gradients: of some rank each.
        stages: by pipeline stage.
        terms: in the order of the loss.
        dtypes: of tapped losses.
        asked: the policy loss's aggregation, by each rank that computes losses.
        tokens: of the model's ids compared with the samples', and different.
        added: what losses have beside their terms.
        uses_plan: some rank's plan weighed losses.
        is_dynamic: some micro-batches have a context-parallel group of their own.
        over: the ranks that the step's tokens are spread over, once ranks have joined.
        is_comparable: `can_be_compared`, on all ranks alike.
    """

    findings: list[Finding] = field(default_factory=list)
    gradients: set[Gradient] = field(default_factory=set)
    stages: dict[int, Stage] = field(default_factory=dict)
    terms: dict[str, TermState] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    tokens: tuple[int, int] = (0, 0)
    added: set[str] = field(default_factory=set)
    uses_plan: bool = False
    is_dynamic: bool = False
    over: StepGroups = field(default_factory=StepGroups)
    is_comparable: bool = False

    def can_be_compared(self) -> bool:
        """True if terms can be compared: gradients are finite and have a factor, and nothing is known against it."""
        is_limited = any(finding.severity is NOT_PROVED for finding in self.findings)
        return self.gradient == "finite" and bool(self.terms) and bool(self.factors) and not is_limited

    def joined(self, other: "StepState") -> "StepState":
        """What both know."""
        stages, terms, apart = dict(self.stages), dict(self.terms), list[Finding]()
        for number, stage in other.stages.items():
            if known := stages.get(number):
                apart += _apart(stage.factor, known.factor)
            stages[number] = stage if known is None else known.joined(stage)
        for name, term in other.terms.items():
            terms[name] = terms[name].joined(term) if name in terms else term
        return StepState(
            joined(self.findings, other.findings, apart),
            self.gradients | other.gradients,
            dict(sorted(stages.items())),
            terms,
            self.dtypes | other.dtypes,
            self.asked | other.asked,
            (self.tokens[0] + other.tokens[0], self.tokens[1] + other.tokens[1]),
            self.added | other.added,
            self.uses_plan or other.uses_plan,
            self.is_dynamic or other.is_dynamic,
        )

    @property
    def gradient(self) -> Gradient:
        order: tuple[Gradient, ...] = ("failed", "overflow", "finite", "zero", "unseen")
        return next((state for state in order if state in self.gradients), "unseen")

    @property
    def factors(self) -> list[Factor]:
        return [stage.factor for stage in self.stages.values() if stage.factor is not None]

    @property
    def factor(self) -> Factor:
        """That of most parameters, whichever stages have them."""
        # Of several that are near each other the last one: its stage computes the losses.
        numbers = [(self._number_near(factor), place) for place, factor in enumerate(self.factors)]
        return self.factors[max(numbers)[1]] if numbers else Factor()

    def _number_near(self, factor: Factor) -> int:
        """How many parameters have it, on all stages that have a factor near it."""
        stages = self.stages.values()
        return sum(max(1, stage.covered) for stage in stages if stage.factor and stage.factor.is_near(factor))

    @property
    def has_common_factor(self) -> bool:
        """True if most of the parameters that have a factor have that one."""
        number = sum(max(1, stage.covered) for stage in self.stages.values() if stage.factor is not None)
        return 2 * self._number_near(self.factor) > number

    @property
    def problems(self) -> list[str]:
        """Why stages have no factor."""
        return [*dict.fromkeys(stage.problem for stage in self.stages.values() if stage.problem)]

    @property
    def rounding(self) -> str:
        """The type whose rounding the weights have: that of the losses, or a coarser one if the factor is uncertain."""
        if "bfloat16" in self.dtypes or not self.factor.uncertainty <= 2.0**-11:
            return "bfloat16"
        is_exact = self.factor.uncertainty <= 2.0**-18 and self.dtypes <= {"float32", "float64"}
        return "float32" if is_exact else "float16"

    @property
    def tolerance(self) -> float:
        """Of what all weights are multiplied by, which is as certain as the factor."""
        return TOLERANCES[self.rounding]

    @property
    def tolerance_of_each(self) -> float:
        """Of a token's weight against the others', which the factor does not touch."""
        coarse = self.dtypes - {"float32", "float64"}
        return max([TOLERANCES["float32"], *(TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) for dtype in coarse)])

    def add(self, name: str, tapped: Tap, tokens: LocalTokens) -> None:
        """Add what a tap of this rank says, and what was seen of its losses."""
        self.dtypes.add(str(tapped.dtype).removeprefix("torch."))
        share = tapped.share
        arrived = tapped.gradient if share is None else share.slope
        term = TermState({tapped.declared}, tapped.is_reached)
        self.terms[name] = self.terms[name].joined(term) if name in self.terms else term
        if arrived is not None and not bool(arrived.isfinite().all()):
            self.gradients.add("overflow")
        if share is not None:
            self._add_share(share.unseen, 0.0 if share.off is None else float(share.off))
        ids = tokens.samples.tokens
        if tapped.tokens is not None and ids is not None:
            cut = tokens.of(to_device(torch.as_tensor(ids), tapped.tokens.device).reshape(-1))
            compared, differ = self.tokens
            self.tokens = compared + len(tokens), differ + int((cut != tapped.tokens).sum())

    def _add_share(self, unseen: str, off: float) -> None:
        findings = []
        if unseen:
            findings.append(Finding(GIVEN, f"from the share on ({unseen})"))
        if off > TOLERANCES["bfloat16"]:
            says = f"A reducer's backward pass does not send its weights: the largest error is {off:.2g}."
            findings.append(Finding(WRONG, says))
        self.findings = joined(self.findings, findings)

    def parameters(self) -> list[Finding]:
        """What all ranks together show of parameters and tokens."""
        findings = [finding for factor in self.factors for finding in _apart(factor, self.factor)]
        if self.factors and not self.has_common_factor:
            findings.append(Finding(NOT_PROVED, no_factor("pipeline stages scale gradients by different factors")))
        if self.tokens[1]:
            counts = f"{self.tokens[1]} of {self.tokens[0]} tokens differ"
            findings.append(Finding(WRONG, f"The layout or the batch given is not the model's: {counts}."))
        if self.factors and sum(stage.num_unlike for stage in self.stages.values()):
            whole = _total([*self.stages.values()])
            is_none = whole.num_unlike >= whole.total  # each rank has a factor, and no two the same one
            findings.append(Finding(NOT_PROVED if is_none else IN_PART, unlike_in_words(self)))
        return findings


def _apart(factor: Factor | None, reference: Factor | None) -> list[Finding]:
    """That two parts of the model have several factors, each within the rounding of its own."""
    if factor is None or reference is None or factor.where == reference.where or factor.is_near(reference):
        return []
    values = f"{factor.value:.6g} on {factor.where}, by {reference.value:.6g} on {reference.where}"
    return [Finding(IN_PART, f"Gradients are multiplied by {values}: no weight holds for all parameters.")]


def _total(stages: Sequence[Stage]) -> Stage:
    """The numbers and words of all stages."""
    whole = Stage()
    for stage in stages:
        whole = replace(
            whole.joined(stage),
            total=whole.total + stage.total,
            covered=whole.covered + stage.covered,
            zero=whole.zero + stage.zero,
            num_unlike=whole.num_unlike + stage.num_unlike,
        )
    return whole


def parameters_in_words(state: StepState) -> Finding:
    """By which gradients a step was measured, and by which not."""
    whole = _total([*state.stages.values()])
    whose = f"all {whole.total}" if whole.covered == whole.total else f"{whole.covered} of {whole.total}"
    told = f"by the gradients of {whose} parameters" if whole.total > 1 else "by the gradient of the one parameter"
    left = whole.total - whole.covered - whole.zero - whole.num_unlike
    beside = [*whole.notes, *only_if(whole.zero, [f"{whole.zero} have none"])]
    if left > 0:
        reasons = [f"{name}: {why}" for name, why in whole.uncovered.items()]
        beside.append(f"{left} not covered, as {'; '.join(reasons) or 'other ranks say'}")
    if state.tolerance > TOLERANCES["float32"]:
        beside.append(f"weights to within {100 * state.tolerance:.2g} %, gradients to {100 * whole.coarsest:.2g} %")
    return Finding(IN_PART if left > 0 else GIVEN, told + only_if(beside, f" ({', '.join(beside)})"))


def unlike_in_words(state: StepState) -> str:
    """The parameters that have not the factor of the others."""
    whole = _total([*state.stages.values()])
    if whole.num_unlike >= whole.total and (apart := whole.unlike.get("all of them")):
        why = f"the final gradients are {apart}. Copies of a model that all take a step are then no longer equal"
        return no_factor(why)
    names = [f"{name} ({what})" for name, what in whole.unlike.items()]
    more = only_if(whole.num_unlike > len(names), f", and {whole.num_unlike - len(names)} more")
    if "all of them" in whole.unlike:
        more = ""
    return (
        f"{whole.num_unlike} of {whole.total} parameters are not trained by these weights: their final gradients are "
        f"not {state.factor.value:.6g} times the sum over ranks, as those of the others are: {', '.join(names)}{more}."
    )
