"""What ranks tell each other of a measured step, before they compare weights: words, and numbers of a fixed size."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.core.taps import Declared, Tap
from megatron_rl_loss.proof.anchor import Factor
from megatron_rl_loss.proof.outcomes import TOLERANCES, FactorState, Gradient, Losses

#: Reasons of other ranks beyond these say nothing new; nor does the rest of a long one.
_MOST_REASONS, _MOST_WORDS = 3, 600


@dataclass
class StepState:
    """What ranks know of a step, joined with `+`: words and numbers whose size does not depend on the step's."""

    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    uncertain: list[str] = field(default_factory=list)  # why anchors have no factor
    factors: dict[tuple[int, str], Factor] = field(default_factory=dict)  # by pipeline stage and parameter
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
    is_dynamic: bool = False  # some micro-batches have a context-parallel group of their own

    def __add__(self, other: "StepState") -> "StepState":
        a, b = vars(self), vars(other)
        joined: dict[str, Any] = {name: a[name] | b[name] for name in a if isinstance(a[name], set | bool)}
        for name in ("faults", "unknown", "uncertain"):
            joined[name] = [text[:_MOST_WORDS] for text in dict.fromkeys(a[name] + b[name])][:_MOST_REASONS]
        names = {**self.terms, **other.terms}  # in the order of the loss
        joined["terms"] = {name: _few(self.terms.get(name, set()) | other.terms.get(name, set())) for name in names}
        tokens = self.tokens[0] + other.tokens[0], self.tokens[1] + other.tokens[1]
        state = StepState(**joined, off=max(self.off, other.off), tokens=tokens, factors=dict(self.factors))
        for (stage, _), factor in other.factors.items():
            state.add_factor(stage, factor)
        return state

    @property
    def gradient(self) -> Gradient:
        order: tuple[Gradient, ...] = ("overflow", "finite", "zero", "unseen")
        return next((state for state in order if state in self.gradients), "unseen")

    @property
    def factor_state(self) -> FactorState:
        return "certified" if self.factors and not self.unknown else "unknown"

    @property
    def losses(self) -> Losses:
        return "seen" if self.terms else "unseen"

    @property
    def factor(self) -> Factor:
        """That of the last pipeline stage that has one, by its first anchor."""
        last = max((stage for stage, _ in self.factors), default=0)
        return next((factor for (stage, _), factor in self.factors.items() if stage == last), Factor())

    @property
    def anchors(self) -> list[str]:
        return [*dict.fromkeys(name for _, name in self.factors)]

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

    def check_factor(self, place: tuple[int, str], factor: Factor, reference: Factor) -> None:
        """Add a fault if a factor is not the other one, within the rounding of both."""
        stage, name = place
        if abs(factor.value / reference.value - 1) > factor.rounding + reference.rounding:
            fault = (
                f"Gradients are multiplied by {factor.value:.6g} at {name} (pipeline stage {stage}), "
                f"{reference.value:.6g} at {reference.name}: no weight holds for all parameters."
            )
            self.faults += [fault] if fault not in self.faults else []

    def add_factor(self, stage: int, factor: Factor) -> None:
        """Add a factor. It is a fault if parameters of one name have several, on tensor-parallel ranks or in chunks."""
        known = self.factors.setdefault((stage, factor.name), factor)
        self.check_factor((stage, factor.name), factor, known)

    def check_factors(self) -> None:
        """Add the faults that numbers of all ranks show together."""
        for place, factor in self.factors.items():
            self.check_factor(place, factor, self.factor)
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
