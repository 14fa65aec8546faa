"""A loss of several terms, each with an aggregation of its own: one sum, one autograd node, one pass.

``share = sum_k coef_k * sum_t w_kt * values_kt``, w_k the weights of the term's own mode, unit counting and mask. What
each term is by itself, without its coefficient, comes along, and so do metrics.
"""

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rl_loss.modes.table import ModeFunction
from megatron_rl_loss.reduction.sums import WeightedSum, sums_by_weights
from megatron_rl_loss.reduction.tap import is_observed
from megatron_rl_loss.step.totals import UnitCounting


@dataclass(frozen=True)
class Term:
    """A term of the loss: ``coef`` times the aggregation of its values.

    Attributes:
        values: one for each token this rank holds, in the layout's order, not reduced; NaN where masked is ignored.
        mode: how they are aggregated, as ``--loss-aggregation``; None for the one that was declared for the term's name
            (`LossAggregation`'s ``terms``, ``--kl-loss-aggregation``), or else the policy loss's.
        coef: the factor; negative for a bonus.
        mask: one of the samples' ``term_masks`` in place of the loss mask: its own tokens, its own counts.
        units, divisor: as in `make_pg_loss_reducer`; only with a `mode`.
    """

    values: Tensor
    mode: str | ModeFunction | None = None
    _: KW_ONLY
    coef: float = 1.0
    mask: str | None = None
    units: UnitCounting | None = None
    divisor: float | None = None


@dataclass(frozen=True)
class WeighedTerm:
    """A term's values and what reduces them."""

    name: str
    values: Tensor
    reducer: WeightedSum
    coef: float

    def heard(self) -> "WeighedTerm":
        """The term with losses that an audit hears, apart from what else is made of them; without one, itself."""
        if not is_observed():
            return self
        values = self.values.view_as(self.values)
        self.reducer.tap(values, self.name, self.coef)
        return replace(self, values=values)


def sum_terms(
    terms: Sequence[WeighedTerm], metrics: Sequence[tuple[Tensor, WeightedSum]] = ()
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """This rank's share of the loss; each term's own share, without its coefficient; and those of the metrics.

    Only the first is differentiable. Raises ValueError as `WeightedSum` does.
    """
    for term in terms:
        term.reducer.check("a term", term.values)
    terms = [term.heard() for term in terms]
    for values, reducer in metrics:
        reducer.check("a metric", values)
    rows = [*((term.values, term.reducer) for term in terms), *metrics]
    device = terms[0].values.device
    coefs = _on(device, tuple(float(term.coef) for term in terms))
    with torch.no_grad():
        sums = sums_by_weights([(values.detach(), reducer) for values, reducer in rows], device)
        total = sums[: len(terms)].mul(coefs).sum()
    weights = [term.reducer.weights_on(device) for term in terms]
    share: Tensor = _SumOfTerms.apply(weights, coefs, [total], *(term.values for term in terms))  # type: ignore[no-untyped-call]
    own = list(sums.unbind())
    return terms[0].reducer.scaled(share), own[: len(terms)], own[len(terms) :]


@functools.lru_cache(maxsize=64)
def _on(device: torch.device, coefs: tuple[float, ...]) -> Tensor:
    """Made once: bringing numbers to a device would wait for it."""
    return torch.tensor(coefs, dtype=torch.float32, device=device)


class _SumOfTerms(torch.autograd.Function):
    """A sum that is already known, with the gradient of every term."""

    @staticmethod
    def forward(ctx: Any, weights: list[Tensor], coefs: Tensor, total: list[Tensor], *values: Tensor) -> Tensor:
        ctx.save_for_backward(coefs, *weights)
        ctx.like = [(one.shape, one.dtype) for one in values]
        return total[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        coefs, *weights = ctx.saved_tensors
        scaled = (coefs * gradient).unbind()
        found: list[Tensor | None] = [None] * len(weights)
        for k, (weight, (shape, dtype)) in enumerate(zip(weights, ctx.like, strict=True)):
            if ctx.needs_input_grad[3 + k]:
                found[k] = (scaled[k] * weight).to(dtype).view(shape)
        return None, None, None, *found
