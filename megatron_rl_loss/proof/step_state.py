"""What ranks tell each other of a measured step, before they compare weights: words, and numbers of a fixed size."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.core.taps import Declared, Tap
from megatron_rl_loss.proof.factor import MOST_NAMES, Alike, Factor
from megatron_rl_loss.proof.outcomes import TOLERANCES, FactorState, Gradient, Losses, Parameters

#: Reasons of other ranks beyond these say nothing new; nor does the rest of a long one.
_MOST_REASONS, _MOST_WORDS = 3, 600


class Covered(NamedTuple):
    """Numbers of trainable parameters of a pipeline stage.

    Attributes:
        total: all of them.
        covered: those that have the factor.
        zero: those without a gradient.
        unlike: those that have it not.
    """

    total: int = 0
    covered: int = 0
    zero: int = 0
    unlike: int = 0

    def joined(self, other: "Covered") -> "Covered":
        """As the rank that covers fewest sees them."""
        return Covered(
            max(self.total, other.total), min(self.covered, other.covered), max(self.zero, other.zero),
            max(self.unlike, other.unlike),
        )  # fmt: skip


@dataclass
class StepState:
    """What ranks know of a step, joined with `+`: words and numbers whose size does not depend on the step's."""

    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    uncertain: list[str] = field(default_factory=list)  # why parameters have no common factor
    factors: dict[int, Factor] = field(default_factory=dict)  # by pipeline stage
    parameters: dict[int, Covered] = field(default_factory=dict)  # by pipeline stage
    unlike: dict[str, str] = field(default_factory=dict)  # parameters, and what they have in place of the factor
    uncovered: dict[str, str] = field(default_factory=dict)  # parameters of which nothing can be said, and why
    notes: list[str] = field(default_factory=list)  # further words on the measurement of gradients
    coarsest: float = 0.0  # the largest part of a covered parameter's gradient that rounding may be
    gradients: set[Gradient] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)  # of tapped losses
    terms: dict[str, set[Declared]] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)  # terms that some rank has nothing of
    reached: set[str] = field(default_factory=set)  # terms to which a gradient came
    asked: set[str] = field(default_factory=set)  # the policy loss's aggregation, by each rank that computes losses
    forms: set[str] = field(default_factory=set)  # in which micro-batches returned their shares
    unseen: set[str] = field(default_factory=set)  # why the way from losses to shares is not seen
    off: float = 0.0  # the largest error of a reducer's backward pass
    tokens: tuple[int, int] = (0, 0)  # of the model's ids compared with the samples', and different
    uses_plan: bool = False  # some rank's plan weighed losses
    gathers: bool = False  # some losses are of gathered tokens, whose gather's backward is declared and not measured
    is_dynamic: bool = False  # some micro-batches have a context-parallel group of their own

    def __add__(self, other: "StepState") -> "StepState":
        a, b = vars(self), vars(other)
        joined: dict[str, Any] = {name: a[name] | b[name] for name in a if isinstance(a[name], set | bool)}
        for name in ("faults", "unknown", "uncertain", "notes"):
            joined[name] = [text[:_MOST_WORDS] for text in dict.fromkeys(a[name] + b[name])][:_MOST_REASONS]
        names = {**self.terms, **other.terms}  # in the order of the loss
        joined["terms"] = {name: _few(self.terms.get(name, set()) | other.terms.get(name, set())) for name in names}
        for name in ("unlike", "uncovered"):
            joined[name] = dict([*{**b[name], **a[name]}.items()][:MOST_NAMES])
        stages = sorted({**self.parameters, **other.parameters})
        pairs = {n: [of[n] for of in (self.parameters, other.parameters) if n in of] for n in stages}
        joined["parameters"] = {n: of_stage[0].joined(of_stage[-1]) for n, of_stage in pairs.items()}
        for name in ("off", "coarsest"):
            joined[name] = max(a[name], b[name])
        tokens = self.tokens[0] + other.tokens[0], self.tokens[1] + other.tokens[1]
        state = StepState(**joined, tokens=tokens, factors=dict(self.factors))
        for stage, factor in other.factors.items():
            state.add_factor(stage, factor)
        return state

    @property
    def gradient(self) -> Gradient:
        order: tuple[Gradient, ...] = ("failed", "overflow", "finite", "zero", "unseen")
        return next((state for state in order if state in self.gradients), "unseen")

    @property
    def factor_state(self) -> FactorState:
        return "certified" if self.factors and not self.unknown else "unknown"

    @property
    def losses(self) -> Losses:
        return "seen" if self.terms else "unseen"

    @property
    def all_parameters(self) -> Covered:
        """Of all stages."""
        return Covered(*map(sum, zip(*self.parameters.values(), strict=True))) if self.parameters else Covered()

    @property
    def alikeness(self) -> Parameters:
        return "unlike" if self.all_parameters.unlike else "alike"

    @property
    def factor(self) -> Factor:
        """That of the last pipeline stage that has one."""
        return self.factors[max(self.factors)] if self.factors else Factor()

    @property
    def rounding(self) -> str:
        """The type whose rounding the weights have: that of the losses, or a coarser one if the factor is uncertain."""
        if "bfloat16" in self.dtypes or not self.factor.uncertainty <= 2.0**-11:
            return "bfloat16"
        is_exact = self.factor.uncertainty <= 2.0**-18 and self.dtypes <= {"float32", "float64"}
        return "float32" if is_exact else "float16"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.rounding]

    def add(self, term: str, tapped: Tap, tokens: LocalTokens) -> None:
        """Add what a tap of this rank says, and what was seen of its losses."""
        self.dtypes.add(str(tapped.dtype).removeprefix("torch."))
        self.terms[term] = _few(self.terms.get(term, set()) | {tapped.declared})
        share = tapped.share
        arrived = tapped.gradient if share is None else share.slope
        self.reached |= {term} if tapped.is_reached else set()
        if arrived is not None and not bool(arrived.isfinite().all()):
            self.gradients.add("overflow")
        if share is not None:
            self.unseen |= {share.unseen} - {""}
            self.off = max(self.off, 0.0 if share.off is None else float(share.off))
        ids = tokens.samples.tokens
        if tapped.tokens is not None and ids is not None:
            cut = tokens.of(torch.as_tensor(ids, device=tapped.tokens.device).reshape(-1))
            compared, differ = self.tokens
            self.tokens = compared + len(tokens), differ + int((cut != tapped.tokens).sum())

    def add_parameters(self, stage: int, alike: Alike, *, is_one_stage: bool) -> None:
        """Add what sketches say of this rank's parameters."""
        self.parameters[stage] = Covered(alike.total, alike.covered, len(alike.zero), len(alike.unlike))
        place = "" if is_one_stage else f" of pipeline stage {stage}"
        self.unlike, self.uncovered = (
            {f"{name}{place}": words for name, words in found.items()} for found in (alike.unlike, alike.uncovered)
        )
        self.notes, self.coarsest = [*alike.notes], alike.coarsest
        if alike.factor is not None:
            self.add_factor(stage, alike.factor)
        if alike.problem:
            self.uncertain.append(alike.problem)

    def check_factor(self, factor: Factor, reference: Factor) -> None:
        """Add a fault if a factor is not the other one, within the rounding of both."""
        if not factor.is_near(reference):
            at, other = (f" on {of.where}" * bool(of.where) for of in (factor, reference))
            fault = (
                f"Gradients are multiplied by {factor.value:.6g}{at}, by {reference.value:.6g}{other}: no weight holds "
                "for all parameters."
            )
            self.faults += [fault] if fault not in self.faults else []

    def add_factor(self, stage: int, factor: Factor) -> None:
        """Add a factor. That parts of the model have several is a fault; that ranks of one part do is only said."""
        known = self.factors.setdefault(stage, factor)
        if known.where != factor.where:
            self.check_factor(factor, known)
        elif not known.is_near(factor):
            of_stage = self.parameters.get(stage, Covered())
            self.parameters[stage] = of_stage._replace(unlike=of_stage.total)
            pair = " or ".join(f"{value:.6g}" for value in sorted((known.value, factor.value)))
            self.unlike = {"all of them": f"{pair} times the sum, on different ranks"} | self.unlike

    def check_factors(self) -> None:
        """Add the faults that numbers of all ranks show together."""
        for factor in self.factors.values():
            self.check_factor(factor, self.factor)
        if self.off > TOLERANCES["bfloat16"]:
            self.faults.append(
                f"A reducer's backward pass does not send its weights: the largest error is {self.off:.2g}."
            )
        if self.tokens[1]:
            counts = f"{self.tokens[1]} of {self.tokens[0]} tokens differ"
            self.faults.append(f"The layout or the batch given is not the model's: {counts}.")


def _few(declared: set[Declared]) -> set[Declared]:
    """Some of what micro-batches declare, the same on every rank: two that differ say as much as thousands."""
    return set(sorted(declared, key=repr)[:_MOST_REASONS])


def parameters_in_words(state: StepState) -> str:
    """By which gradients a step was measured, and by which not."""
    of_all, rounding = state.all_parameters, state.coarsest
    whose = f"all {of_all.total}" if of_all.covered == of_all.total else f"{of_all.covered} of {of_all.total}"
    told = f"by the gradients of {whose} parameters" if of_all.total > 1 else "by the gradient of the one parameter"
    left = of_all.total - of_all.covered - of_all.zero
    beside = [*state.notes, *[f"{of_all.zero} have none"] * bool(of_all.zero)]
    if left:
        reasons = [f"{name}: {why}" for name, why in state.uncovered.items()]
        beside.append(f"{left} not covered, as {'; '.join(reasons) or 'other ranks say'}")
    if state.tolerance > TOLERANCES["float32"]:
        beside.append(f"weights to within {100 * state.tolerance:.2g} %, gradients to {100 * rounding:.2g} %")
    return told + f" ({', '.join(beside)})" * bool(beside)


def unlike_in_words(state: StepState) -> str:
    """The parameters that have not the factor of the others."""
    of_all, names = state.all_parameters, [f"{name} ({what})" for name, what in state.unlike.items()]
    more = f", and {of_all.unlike - len(names)} more" * (of_all.unlike > len(names))
    return (
        f"{of_all.unlike} of {of_all.total} parameters are not trained by these weights: their final gradients are not "
        f"{state.factor.value:.6g} times the sum over ranks, as those of the others are: {', '.join(names)}{more}."
    )
