"""The factor between the sum of backward's gradients over ranks and the final ones, and the parameters that have it.

With S_k the sketches of a parameter's gradients from backward passes, added up over the ranks whose tokens it is
trained on, and F_k those of the gradient that the optimizer gets, a step that scales all parameters alike has

    F_k = f * S_k + rounding    for one f, every parameter and every pattern k.

f is the weighted median of the parameters' own factors <F, S> / <S, S>, then their mean, weighed by precision. Each
parameter is then held to it. Whoever has another one is named: it contradicts, and is not left out.

R roundings of type eps along the way have the size eps / 5 * sqrt(R) of the norm of what is added up. The bound below
is ten times that. Partial sums have the norm N of their terms where these are independent, and where the first half of
the ranks cancels the second, that times R / 12 at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl_loss.proof.outcomes import Gradient

#: An error counts as rounding up to this multiple of eps * sqrt(roundings) * norm.
_SLACK = 2.0
#: Rounding is at least of this size: that of sketches, which are float64 themselves.
_LEAST_EPS = 2.0**-40
#: Sums of this many roundings times eps may stand still, so that errors add up instead of averaging out.
_STAGNATES = 0.5
#: Rounding above this part of a parameter's gradient hides what may have been done to it.
_TOO_COARSE = 0.25
#: A factor that is less certain cannot tell wrong weights from rounding.
_TOO_UNCERTAIN = 2.0**-6
#: Factors of several stages or ranks are one number if they differ by less than this many uncertainties.
_ALIKE = 8.0
#: As many names of parameters are told as say something new.
MOST_NAMES = 3

ZERO, _NO_MULTIPLE = "its final gradient is 0", "no multiple of the sum over ranks"
_REDUCE = "Reduce every gradient once, over all ranks of the plan and inside the measured step, and zero it before"
_AS_IF = (
    "those of ranks or micro-batches were scaled, clipped or left out, or zeroed between micro-batches, or were not 0 "
    "before the step"
)


@dataclass(frozen=True)
class Factor:
    """The factor f of the parameters of one rank.

    Attributes:
        uncertainty: the relative error of f.
        where: the rank's place in words: pipeline stage and tensor-parallel rank, where there are several.
    """

    value: float = math.nan
    uncertainty: float = math.nan
    where: str = ""

    @property
    def rounding(self) -> float:
        """The difference from another factor that rounding explains."""
        return _ALIKE * self.uncertainty

    def is_near(self, other: "Factor") -> bool:
        """True if the two are one number, within the rounding of both."""
        return abs(self.value / other.value - 1) <= self.rounding + other.rounding


@dataclass
class Parameter:
    """A trainable parameter, and how its gradients are rounded on their way.

    Attributes:
        eps: of the coarsest type that a gradient has until it is final.
        tiny: of that type, the smallest number that has all its digits.
        roundings: additions and products along the way, one for each micro-batch and each rank.
        why: the reason that nothing can be said of it; empty for none.
    """

    name: str
    numel: int
    eps: float
    tiny: float
    roundings: float = 3.0
    why: str = ""

    @classmethod
    def of(cls, name: str, values: Tensor, dtypes: Sequence[torch.dtype]) -> "Parameter":
        info = max((torch.finfo(dtype) for dtype in dtypes), key=lambda info: info.eps)
        return cls(name, values.numel(), max(info.eps, _LEAST_EPS), info.smallest_normal)


@dataclass
class Alike:
    """What sketches say of one rank's parameters.

    Attributes:
        factor: f; None where most parameters have no common one.
        problem: why there is none.
        gradient: of all parameters together.
        total, covered: numbers of parameters.
        zero: parameters without a gradient on any rank.
        uncovered: parameters of which nothing can be said, and why.
        unlike: parameters that have not the factor, and what they have instead.
        coarsest: the largest part of a covered parameter's gradient that rounding may be.
        worst: the largest error of a covered parameter, in units of the bound.
        notes: what else there is to say, for the line.
        limits: why the factor says nothing of the final gradients.
        faults: evidence that tokens do not weigh what they should: a sum that some ranks have no part in.
    """

    total: int = 0
    factor: Factor | None = None
    problem: str = ""
    gradient: Gradient = "unseen"
    covered: int = 0
    zero: list[str] = field(default_factory=list)
    uncovered: dict[str, str] = field(default_factory=dict)
    unlike: dict[str, str] = field(default_factory=dict)
    coarsest: float = 0.0
    worst: float = 0.0
    notes: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def no_factor(why: str) -> str:
    return f"The scaling of gradients cannot be measured: {why}."


class Fit:
    """The factor of parameters of which `summed` [parameters, patterns + 1] was added up to give `final`.

    Args:
        least_eps: rounding on the way is at least of this size, whatever types are seen.
    """

    def __init__(self, parameters: Sequence[Parameter], summed: Tensor, final: Tensor, least_eps: float = 0.0) -> None:
        self.parameters, self.summed, self.final = parameters, summed, final
        sums, finals = summed[:, :-1], final[:, :-1]
        eps = torch.tensor([max(parameter.eps, least_eps) for parameter in parameters], dtype=torch.float64)
        roundings = torch.tensor([parameter.roundings for parameter in parameters], dtype=torch.float64)
        sizes = [parameter.tiny * math.sqrt(parameter.numel) for parameter in parameters]
        floor = torch.tensor(sizes, dtype=torch.float64) * eps * roundings.sqrt()
        self._relative, self._floor = _SLACK * eps * roundings.sqrt(), floor
        self._stagnates = eps * roundings > _STAGNATES
        cancelling = summed[:, -1].clamp(min=0) * (1 + roundings / 32)
        self._norm = torch.maximum(cancelling.sqrt(), sums.square().mean(1).sqrt())
        self.ratios = torch.nan_to_num((finals * sums).sum(1) / sums.square().sum(1), nan=math.nan, posinf=math.nan)
        told = torch.tensor([not parameter.why for parameter in parameters], dtype=torch.bool)  # of none too
        self.informs = told & ~self._stagnates & (sums.abs().amax(1) > 0) & self.ratios.isfinite()
        self.value, self.uncertainty, self.is_certain = math.nan, math.inf, False
        if bool(self.informs.any()):
            self._solve()

    def _solve(self) -> None:
        sums, finals = self.summed[:, :-1], self.final[:, :-1]
        weight = torch.where(self.informs, sums.square().sum(1) / self._norm.square(), 0.0)
        order = self.ratios.nan_to_num().argsort()
        reached = weight[order].cumsum(0)
        value = float(self.ratios.nan_to_num()[order][int((reached >= reached[-1] / 2).nonzero()[0])])
        for _ in range(2):
            agree = self.informs & (self._errors(value) <= self._bound(value))
            if bool(agree.any()):
                each = torch.where(agree, 1 / self._norm.square().clamp(min=1e-300), 0.0)[:, None]
                value = float((each * finals * sums).sum() / (each * sums.square()).sum())
        agree = self.informs & (self._errors(value) <= self._bound(value))
        precision = ((value * sums[agree]) / self._bound(value)[agree, None]).square().sum()
        # The bound is ten times the usual size of an error, and half of it five times that of their mean.
        self.uncertainty = 0.5 / math.sqrt(float(precision)) if float(precision) else math.inf
        self.value, self.agree = value, agree
        self.share = float(weight[agree].sum() / weight.sum())
        self.is_certain = bool(value) and self.share > 0.5 and self.uncertainty <= _TOO_UNCERTAIN

    def _errors(self, value: float) -> Tensor:
        return (self.final[:, :-1] - value * self.summed[:, :-1]).abs().amax(1)

    def _bound(self, value: float) -> Tensor:
        final_norm = self.final[:, -1].clamp(min=0).sqrt()
        return self._relative * torch.maximum(abs(value) * self._norm, final_norm) + self._floor

    def leans_on(self, own: Tensor) -> bool:
        """True if what is left of final gradients is a part of one rank's, `own`, and so no rounding.

        Errors of rounding have no direction. With s the usual size of one, of each parameter, the part of `own` in them
        is known to 1 / sqrt(sum own^2 / s^2), and is nothing below four times that.
        """
        size = (0.1 * self._bound(self.value))[self.agree, None].clamp(min=1e-300)
        errors = (self.final - self.value * self.summed)[self.agree, :-1] / size
        whole, part = self.summed[self.agree, :-1] / size, own[self.agree, :-1] / size
        part = part - whole * ((part * whole).sum() / whole.square().sum())  # the factor has the rest
        information = float(part.square().sum())
        return information > 0 and abs(float((errors * part).sum())) > 4 * math.sqrt(information)

    def ratio_to_factor(self, number: int) -> float:
        """A parameter's own factor by that of the others; NaN where either is unknown."""
        return self.multiple(number) / self.value if self.is_certain else math.nan

    def multiple(self, number: int) -> float:
        """The factor of a parameter by itself; NaN if its final gradient is no multiple of the sum."""
        ratio = float(self.ratios[number])
        if not math.isfinite(ratio) or not ratio:
            return math.nan
        return ratio if bool(self._errors(ratio)[number] <= self._bound(ratio)[number]) else math.nan

    def alike(self, where: str = "") -> Alike:
        """The factor, and each parameter held to it."""
        alike = Alike(total=len(self.parameters))
        both = torch.stack([self.summed, self.final])
        if not bool(both.isfinite().all()):
            alike.gradient = "overflow"
            alike.problem = no_factor("gradients are not finite")
            return alike
        has_sum, has_final = self.summed[:, -1] > 0, self.final[:, -1] > 0
        alike.gradient = "finite" if bool(has_sum.any()) else "zero" if alike.total else "unseen"
        if alike.gradient != "finite":
            alike.problem = no_factor("gradients are 0" if alike.total else "no parameter is trainable")
        elif self.is_certain:
            alike.factor = Factor(self.value, self.uncertainty, where)
        value = self.value if self.is_certain else 0.0
        errors, bounds = self._errors(value), self._bound(value)
        for number, parameter in enumerate(self.parameters):
            if parameter.why:
                alike.uncovered[parameter.name] = parameter.why
            elif not (has_sum[number] or has_final[number]):
                alike.zero.append(parameter.name)
            elif bool(self._stagnates[number]):
                alike.uncovered[parameter.name] = f"{parameter.roundings:.0f} roundings of {parameter.eps:.1g} each"
            elif not self.is_certain or errors[number] > bounds[number]:
                alike.unlike[parameter.name] = self._in_words(number)
            else:
                self._cover(number, alike, float(errors[number] / bounds[number]))
        if alike.gradient == "finite" and alike.factor is None:
            self._refuse(alike)
        return alike

    def _cover(self, number: int, alike: Alike, error: float) -> None:
        largest = max(float(self.final[number, -1].sqrt()), self.value * float(self.summed[number, :-1].abs().amax()))
        coarse = float(self._bound(self.value)[number]) / max(abs(largest), 1e-300)
        if coarse > _TOO_COARSE:
            alike.uncovered[self.parameters[number].name] = f"rounding may be {coarse:.2g} of its gradient"
            return
        alike.covered += 1
        alike.coarsest, alike.worst = max(alike.coarsest, coarse), max(alike.worst, error)

    def _in_words(self, number: int) -> str:
        """What a parameter's final gradient is in place of f times the sum."""
        if not bool(self.final[number, -1] > 0):
            return ZERO
        if not bool(self.summed[number, -1] > 0):
            return "its final gradient came from no backward pass that was seen"
        ratio = self.multiple(number)
        if math.isnan(ratio):
            return _NO_MULTIPLE
        return f"{ratio / self.value:.4g} times the others" if self.is_certain else f"{ratio:.4g} times the sum"

    def _refuse(self, alike: Alike) -> None:
        """Say why most parameters have no common factor."""
        if bool(self.informs.any()) and self.share > 0.5 and self.value and not self.uncertainty <= _TOO_UNCERTAIN:
            alike.problem = no_factor(f"gradients cancel, and rounding may be {self.uncertainty:.2g} of the rest")
            alike.uncovered |= dict.fromkeys(alike.unlike, "no factor")
            alike.unlike = {}
        elif alike.unlike:
            said, few = set(alike.unlike.values()), [*alike.unlike.items()][:MOST_NAMES]
            names, each = ", ".join(name for name, _ in few), ", ".join(f"{name} ({what})" for name, what in few)
            subject = f"the final gradients of {len(alike.unlike)} of {alike.total} parameters"
            if said == {ZERO}:
                says = (
                    "all final gradients are 0, as if they were zeroed before the measured step was over. End the "
                    "`with` before optimizer.zero_grad()"
                )
            elif _NO_MULTIPLE in said:
                says = f"{subject}, as {names}, are {_NO_MULTIPLE}, as if {_AS_IF}. {_REDUCE}"
            else:
                says = f"{subject} have no common factor: {each}"
            alike.problem = no_factor(says)
        else:
            why = "; ".join(f"{name} ({why})" for name, why in [*alike.uncovered.items()][:MOST_NAMES])
            alike.problem = no_factor(f"nothing can be said of {why}")
