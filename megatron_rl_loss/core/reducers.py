"""Reducers turn a rank's per-token losses into its share of the step loss.

A rank sums its own weight * loss; the plain sum of all shares, over micro-batches, context-parallel (CP) and
data-parallel (DP) ranks, *is* the step loss. Nothing is divided afterwards, and nothing is read back from a device.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import world_rank
from megatron_rl_loss.core.counting import UnitCounting
from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.core.samples import LocalTokens, check_values
from megatron_rl_loss.core.taps import SummedShare, Tap, observed_taps, part_of_loss, tap, taps_of
from megatron_rl_loss.core.transfers import to_device

logger = logging.getLogger(__name__)

#: Tokens of which a dot product is as exact as a sum of products; of more, a library may make it on several threads.
_SHORT = 2**12


class WeightedSum:
    """``sum_t w_t * loss_t`` over the tokens this rank holds; w_t = 0 leaves the token out.

    Args:
        weigh: the type of NumPy for floats -> the weights, [num_local_tokens], in the order of the losses.

    Attributes:
        weights: float32 [num_local_tokens]. They move to the device of the losses.
        local: the tokens that this rank holds.
        gradient_scale: the factor of the sum's gradient (see `Gathered`).
        name: of the loss term, for a measurement.
        number: of the micro-batch in the step, for a measurement; None if nobody said it.
        aggregation: the mode, divisor and unit counting of the weights.
        mask: one of the samples' further masks, by which tokens are weighed; None for the loss mask.
        plan: what became of the plan that made it; None without a plan.
    """

    def __init__(
        self,
        weigh: Callable[[type[np.floating[Any]]], Tensor],
        local: LocalTokens,
        aggregation: Aggregation,
        *,
        name: str = "pg",
        number: int | None = None,
        mask: str | None = None,
        plan: Any = None,
    ) -> None:
        self._weigh, self.weights = weigh, weigh(np.float32)
        self._double: Tensor | None = None  # the weights in float64, for float64 losses
        self.aggregation, self.local, self.gradient_scale = aggregation, local, local.gradient_scale
        self.name, self.number, self.mask, self.plan = name, number, mask, plan

    @property
    def by(self) -> str:
        """The aggregation, as all micro-batches and ranks must have it for a sum of that name."""
        return self.aggregation.compared

    def __call__(self, per_token_loss: Tensor) -> Tensor:
        return sum_terms([Summand(per_token_loss, self)])[0]

    def sum(self, values: Tensor) -> Tensor:
        """``sum_t w_t * value_t`` without the tokens of weight 0, where 0 * NaN would be NaN.

        0-dim, in float64 for float64 values, else in float32.
        """
        return self.scaled(self._sum(values if values.dim() == 1 else values.reshape(-1)))

    def sums(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sum of each row, not differentiated; as many launches as for one row."""
        return self._sum(torch.stack([row.detach().reshape(-1) for row in rows])).unbind()

    def _sum(self, values: Tensor) -> Tensor:
        weights = self.weights_on(values.device)
        if values.dtype == torch.float64:
            double = self._weigh(np.float64) if self._double is None else self._double
            self._double = to_device(double, values.device)
            weights = self._double
        if values.dtype != weights.dtype:
            values = values.to(weights.dtype)
        if values.is_cpu and not torch.compiler.is_compiling():  # a device would be waited for
            is_short = values.dim() == 1 and len(weights) <= _SHORT
            total = values.dot(weights) if is_short else (values * weights).sum(-1)
            if all(map(math.isfinite, total.tolist() if total.dim() else [total.item()])):
                return total  # the same, in half the time: nothing has to be left out
        return (values.masked_fill(weights == 0, 0) * weights).sum(-1)

    def scaled(self, share: Tensor) -> Tensor:
        """The share, with its gradient times `gradient_scale`."""
        return share if self.gradient_scale == 1 else share + (self.gradient_scale - 1) * (share - share.detach())

    def weights_on(self, device: torch.device) -> Tensor:
        """The weights, moved to the device once."""
        if device != self.weights.device:
            with torch.inference_mode(False):  # they serve in training too
                self.weights = to_device(self.weights, device)
        return self.weights

    def report_not_finite(self, what: str, values: Tensor) -> None:
        """Log the first active token whose value is NaN or infinite; reads the device.

        No error is raised: other ranks may be waiting in a collective, and a loss scaler may skip the step.
        """
        flat = values.detach().reshape(-1)
        wrong = ((self.weights_on(values.device) != 0) & ~flat.isfinite()).nonzero()[:1, 0].tolist()
        for token in wrong:  # none where the sum of finite losses overflows
            sample, place = self.local.place_of(token)
            logger.warning(
                f"rank {world_rank()}: {what} is {float(flat[token])} at token {place} of sample {sample} of a "
                "micro-batch: the token's mask is not 0, so the step's sum is not finite. Check the token's log-probs "
                "and advantage, or mask it."
            )

    def hook(
        self, share: Tensor, summand: "Summand | None" = None, values: Tensor | None = None, unseen: str = ""
    ) -> None:
        """Let a measurement that observes the step see the share's gradient: of one term of it, or of all of it.

        Of values that nobody else has, gradients are compared with the weights, so that this sum's backward is seen.
        """
        if (taps := taps_of(share)) is None:
            return
        part_of_loss(share)
        if summand is not None and summand.term is None and taps.find(summand.values):  # the user's tap sees more
            tap(summand.values, self.name, samples=self.local.samples)
            return
        coef, term = (1.0, None) if summand is None else (summand.coef, summand.term)
        outputs, is_beside = ([], False) if summand is None else taps.outputs_of(summand.values)
        hooked = SummedShare(self, self.gradient_scale * coef, unseen, outputs, is_beside)
        tapped = Tap(tuple(self.weights.shape), samples=self.local.samples, share=hooked)
        share.register_hook(hooked.see)
        share.register_hook(taps.training_hook(hooked.add, tapped.scales))
        if values is not None and values.requires_grad and coef:
            values.register_hook(hooked.check)
        if term is not None:
            tapped.coef, tapped.aggregation = coef, self.aggregation
        taps.add(tapped, term or self.name, self.number)


@dataclass(frozen=True)
class Term:
    """A term of the loss: ``coef`` times the aggregation of its values.

    Attributes:
        values: one for each token this rank holds, in the layout's order, not reduced; NaN where masked is ignored.
        mode: as ``--loss-aggregation``; None for the one that was declared for the term's name (`plan_step`'s
            ``terms``, ``--kl-loss-aggregation``), or else the policy loss's.
        coef: the factor; negative for a bonus.
        mask: one of the samples' ``term_masks`` in place of the loss mask: its own tokens, its own counts.
        units: which units count, as ``--loss-aggregation-units``; only with a `mode`. None for those that the policy
            loss counts, or that another framework's name brings.
        divisor: L of ``constant`` or d of ``token_sum``, only with such a `mode`; None where it is the policy loss's
            mode, for its divisor.
    """

    values: Tensor
    mode: str | Mode | ModeFunction | None = None
    _: KW_ONLY
    coef: float = 1.0
    mask: str | None = None
    units: UnitCounting | None = None
    divisor: float | None = None


class Summand(NamedTuple):
    """One part of a loss: ``coef`` times the sum of the values; a term of several has a name."""

    values: Tensor
    reducer: WeightedSum
    coef: float = 1.0
    term: str | None = None

    @property
    def what(self) -> str:
        return f"the term {self.term!r}" if self.term else "per_token_loss" if self.reducer.name == "pg" else "a metric"


def sum_terms(summands: Sequence[Summand]) -> tuple[Tensor, list[Tensor]]:
    """This rank's share of the loss, differentiable; and the sums of its terms, without coefficients.

    Raises:
        ValueError, TypeError: a summand's values that are not one float for each token that this rank holds; or that
            have no graph, beside others that have one.
    """
    for summand in summands:
        check_values(summand.what, summand.values, summand.reducer.local)
    if len(summands) > 1:
        _check_trained(summands)
    is_compiling, is_observed = torch.compiler.is_compiling(), observed_taps() is not None
    if torch.is_grad_enabled() and not is_compiling:
        for values, reducer, *_ in summands:
            if values.dtype == torch.float16:
                warn_of_float16(values, reducer.weights)
    trains = any(summand.coef for summand in summands)
    share: Tensor | None = None
    sums: list[Tensor] = []
    rows: list[Tensor] = []
    for summand in summands:
        # A term of coefficient 0 is reported alone: even 0 times a value or slope that is not finite would not be 0.
        is_trained = bool(summand.coef) or not trains
        values = summand.values if is_trained else summand.values.detach()
        if is_observed:
            values = values.view_as(values)  # hooks must not see gradients of other uses of the tensor
        total = summand.reducer.sum(values)
        if total.is_cpu and not is_compiling and not math.isfinite(total.item()):
            summand.reducer.report_not_finite(summand.what, values)
        sums.append(total.detach())
        rows.append(values)
        if is_trained:
            term_share = total if summand.coef == 1 else total * summand.coef
            term_share = (
                term_share if summand.coef else total[None][:0].sum()
            )  # 0 with a graph: 0 times infinity is not 0
            share = term_share if share is None else share + term_share
    assert share is not None  # of no term alone
    for summand, values in zip(summands, rows, strict=True) if is_observed else ():
        summand.reducer.hook(share, summand, values)
    return share, sums


def _check_trained(summands: Sequence[Summand]) -> None:
    """Raise ValueError for a term that would be in the loss and train nothing, beside others that train."""
    trains = torch.is_grad_enabled() and any(summand.values.requires_grad for summand in summands)
    for summand in summands if trains else ():
        if summand.coef and not summand.values.requires_grad:
            raise ValueError(
                f"the term {summand.term!r} with coef={summand.coef!r} and values without a graph: it would be added "
                "to the loss and train nothing. Do not detach it; or pass it as a metric, or with coef=0."
            )


def warn_of_float16(values: Tensor, weights: Tensor) -> None:
    """Log float16 losses whose gradient cannot hold the weights; looks at weights on the host.

    The gradient is scaled in float32 and rounded once, so a loss scale helps. bfloat16 has the range of float32.
    """
    if values.requires_grad and weights.is_cpu and weights.any():
        smallest = float(weights[weights != 0].abs().amin())
        if smallest < torch.finfo(torch.float16).tiny:
            say_float16(math.ceil(-math.log2(smallest)) - 14)  # its normal numbers begin at 2^-14


@functools.cache  # once for each size, not for each micro-batch
def say_float16(bits: int) -> None:
    logger.warning(
        f"losses in float16 with weights that are up to 2^{bits} times too small for it: the gradient of a float16 "
        f"loss is float16, so tokens' weights are rounded, the smallest to 0. Pass float32 losses, or train with a "
        f"loss scale of 2^{bits} at least."
    )
