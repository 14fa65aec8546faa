"""Reducers turn a rank's per-token losses into its share of the step loss.

A rank sums its own weight * loss; the plain sum of all shares, over micro-batches, context-parallel (CP) and
data-parallel (DP) ranks, *is* the step loss. Nothing is divided afterwards, and nothing is read back from a device.
"""

import functools
import logging
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import world_rank
from megatron_rl_loss.core.counting import UnitCounting
from megatron_rl_loss.core.modes import Mode, ModeFunction
from megatron_rl_loss.core.samples import LocalTokens, check_values
from megatron_rl_loss.core.taps import SummedShare, Tap, observed_taps, tap

logger = logging.getLogger(__name__)


class WeightedSum:
    """``sum_t w_t * loss_t`` over the tokens this rank holds; w_t = 0 leaves the token out.

    Attributes:
        weights: float32 [num_local_tokens], in the order of the losses. They move to the device of the losses.
        gradient_scale: the factor of the sum's gradient (see `Gathered`).
        name: of the loss term, for an audit.
        number: of the micro-batch in the step, for an audit; None if nobody said it.
        aggregation: the mode, divisor and unit counting of the weights.
        mask: one of the samples' further masks, by which tokens are weighed; None for the loss mask.
        plan: what became of the plan that made it; None without a plan.
        num_uses: the number of sums made with a gradient.
        was_compiled: the last of these was made in a compiled graph, where no hook can be set.
    """

    def __init__(
        self,
        weights: Tensor,
        local: LocalTokens,
        aggregation: Aggregation,
        *,
        name: str = "pg",
        number: int | None = None,
        mask: str | None = None,
        plan: Any = None,
    ) -> None:
        self.weights, self.aggregation, self._local = weights, aggregation, local
        self.gradient_scale = local.gradient_scale
        self.name, self.number, self.mask, self.plan = name, number, mask, plan
        self.num_uses, self.was_compiled = 0, False

    def renamed(self, name: str) -> "WeightedSum":
        """A sum by the same weights under another name."""
        other = copy(self)
        other.name = name
        return other

    @property
    def by(self) -> str:
        """The aggregation, as all micro-batches and ranks must have it for a sum of that name."""
        return self.aggregation.compared

    def __call__(self, per_token_loss: Tensor) -> Tensor:
        return sum_terms([Summand(per_token_loss, self)])[0]

    def weights_on(self, device: torch.device) -> Tensor:
        """The weights, moved to the device once."""
        if self.weights.device != device:
            with torch.inference_mode(False):  # they serve in training too
                # Nobody changes them on the host while they are copied; from a device the host has to wait.
                self.weights = self.weights.to(device, non_blocking=self.weights.is_cpu)
        return self.weights

    def report_not_finite(self, what: str, values: Tensor) -> None:
        """Log the first active token whose value is NaN or infinite; reads the device.

        No error is raised: other ranks may be waiting in a collective, and a loss scaler may skip the step.
        """
        log_not_finite(what, values, self.weights_on(values.device), self._local)

    def hook(
        self, share: Tensor, summand: "Summand | None" = None, values: Tensor | None = None, unseen: str = ""
    ) -> None:
        """Let an audit that observes the step have the share's gradient: of one term of it, or of all of it.

        Of values that nobody else has, gradients are compared with the weights, so that this sum's backward is seen.
        """
        if (taps := observed_taps()) is None or not (torch.is_grad_enabled() and share.requires_grad):
            return
        if summand is not None and summand.term is None and taps.find(summand.values):  # the user's tap sees more
            tap(summand.values, self.name, samples=self._local.samples)
            return
        coef, term = (1.0, None) if summand is None else (summand.coef, summand.term)
        outputs = [] if summand is None else taps.outputs_of(summand.values)
        hooked = SummedShare(self, self.gradient_scale * coef, unseen, outputs)
        share.register_hook(hooked.add)
        if values is not None and values.requires_grad and coef:
            values.register_hook(hooked.check)
        tapped = Tap(tuple(self.weights.shape), samples=self._local.samples, share=hooked)
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
        units, divisor: as in `make_pg_loss_reducer`; only with a `mode`.
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


def sum_terms(
    summands: Sequence[Summand], metrics: Sequence[tuple[Tensor, WeightedSum]] = ()
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """This rank's share of the loss, differentiable; and the sums of its terms, without coefficients, and of metrics.

    A metric is values that `check_values` has passed, and the reducer that they are summed by.

    Raises:
        ValueError, TypeError: a summand's values that are not one float for each token that this rank holds; or that
            have no graph, beside others that have one.
    """
    for summand in summands:
        check_values(summand.what, summand.values, summand.reducer._local)
    if len(summands) == 1 and not metrics and (share := _plain_share(summands[0])) is not None:
        return share, [share.detach()], []
    _check_trained(summands)
    trains = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if trains and any(summand.values.dtype == torch.float16 for summand in summands):
        warn_of_float16([(summand.values, summand.reducer.weights) for summand in summands])
    device, coefs = summands[0].values.device, [summand.coef for summand in summands]
    sums = _sums([*((summand.values, summand.reducer) for summand in summands), *metrics], device)
    for summand, total in zip(summands, sums, strict=False):  # metrics follow
        summand.reducer.num_uses += torch.is_grad_enabled()
        summand.reducer.was_compiled |= torch.compiler.is_compiling()
        if total.is_cpu and not torch.compiler.is_compiling() and not math.isfinite(float(total)):
            summand.reducer.report_not_finite(summand.what, summand.values)
    trained = [(total, coef) for total, coef in zip(sums, coefs, strict=False) if coef]  # 0 times infinity is not 0
    share = _scaled(*trained[0]) if trained else torch.zeros_like(sums[0])
    for total, coef in trained[1:]:
        share = share.add(total, alpha=coef)
    # A term of coefficient 0 sends no gradient: even 0 times a slope that is not finite would not be 0.
    values = [summand.values if summand.coef or not trained else summand.values.detach() for summand in summands]
    if observed_taps() is not None:
        values = [row.view_as(row) for row in values]  # hooks must not see gradients of other uses of the tensor
    weights = [summand.reducer.weights_on(device) for summand in summands]
    slopes = [summand.coef * summand.reducer.gradient_scale for summand in summands]
    share = _WithGradient.apply(share, weights, slopes, *values)  # type: ignore[no-untyped-call]
    for summand, row in zip(summands, values, strict=True):
        summand.reducer.hook(share, summand, row)
    return share, sums[: len(summands)], sums[len(summands) :]


def _plain_share(summand: Summand) -> Tensor | None:
    """The share of one float32 row on the host as torch's own product and sum; None where that would not do.

    Of few tokens this takes a third of the time of `_WithGradient`, whose forward and backward run in Python. On a
    device both ways launch as many kernels, and whether a share is finite cannot be asked without waiting.
    """
    values, reducer = summand.values, summand.reducer
    if not values.is_cpu or values.dtype != torch.float32 or torch.compiler.is_compiling():
        return None
    if summand.coef != 1 or reducer.gradient_scale != 1 or observed_taps() is not None:
        return None
    weights = reducer.weights_on(values.device)
    share = (values * (weights if values.dim() == 1 else weights.view(values.shape))).sum()
    if not math.isfinite(share.item()):  # NaN at a masked token, or a bad loss, which is reported
        return None
    reducer.num_uses += torch.is_grad_enabled()
    return share


def _check_trained(summands: Sequence[Summand]) -> None:
    """Raise ValueError for a term that would be in the loss and train nothing, beside others that train."""
    trains = torch.is_grad_enabled() and any(summand.values.requires_grad for summand in summands)
    for summand in summands if trains else ():
        if summand.coef and not summand.values.requires_grad:
            raise ValueError(
                f"the term {summand.term!r} with coef={summand.coef!r} and values without a graph: it would be added "
                "to the loss and train nothing. Do not detach it; or pass it as a metric, or with coef=0."
            )


def _version(weights: Tensor) -> int:
    """The number of changes in place; a compiled graph has no number for it."""
    return 0 if torch.compiler.is_compiling() else weights._version


def _scaled(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1 else value * factor  # of few tokens this product costs as much as their sum


class _WithGradient(torch.autograd.Function):
    """A loss that is known already, with its gradient at each row of values: slope * weights. Keeps the weights."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weights: list[Tensor], slopes: list[float], *values: Tensor) -> Tensor:
        # Not save_for_backward: weights are the reducer's and no graph's, and to save them takes as long as to sum.
        ctx.rows = [
            (weight, _version(weight), slope, row.shape, row.dtype)
            for weight, slope, row in zip(weights, slopes, values, strict=True)
        ]
        return loss.clone()  # the caller may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_values: list[Tensor | None] = [None, None, None]
        for (weights, version, slope, shape, dtype), is_needed in zip(ctx.rows, ctx.needs_input_grad[3:], strict=True):
            if _version(weights) != version:
                raise RuntimeError(
                    "reducer.weights were changed in place between a forward pass and its backward pass: the losses "
                    "would be trained by the weights of another micro-batch. Copy new weights after the backward pass, "
                    "or keep a reducer for each micro-batch in flight."
                )
            of_values.append((_scaled(gradient, slope) * weights).to(dtype).view(shape) if is_needed else None)
        return tuple(of_values)


def _sums(rows: Sequence[tuple[Tensor, WeightedSum]], device: torch.device) -> list[Tensor]:
    """The sum of each row by its reducer's weights, not differentiated; launches grow with the reducers alone."""
    tables: dict[WeightedSum, list[Tensor]] = {}
    for values, reducer in rows:
        tables.setdefault(reducer, []).append(values.detach().reshape(-1))
    sums = {
        reducer: iter(_sums_of_rows(table, reducer.weights_on(device)).unbind()) for reducer, table in tables.items()
    }
    return [next(sums[reducer]) for _, reducer in rows]


def _sums_of_rows(rows: list[Tensor], weights: Tensor) -> Tensor:
    """``sum_t w_t * row_t`` of each row, float32, without the tokens of weight 0, where 0 * NaN would be NaN.

    torch's own sum adds in few-term blocks on every CPU. A BLAS dot product may add 4 million products one by one.
    """
    products = rows[0][None].float() * weights if len(rows) == 1 else torch.stack(rows).float().mul_(weights)
    if products.is_cpu and not torch.compiler.is_compiling():
        # Leaving tokens out takes several times as long as the sum. A device would be waited for.
        sums = products.sum(1)
        if all(map(math.isfinite, sums.tolist())):
            return sums
    return products.masked_fill_(weights == 0, 0).sum(1)


# --- what is logged of losses that cannot be summed or trained exactly


def log_not_finite(what: str, values: Tensor, weights: Tensor, local: LocalTokens) -> None:
    """`WeightedSum.report_not_finite`."""
    flat = values.detach().reshape(-1)
    wrong = ((weights != 0) & ~flat.isfinite()).nonzero()[:1, 0].tolist()
    for token in wrong:  # none where the sum of finite losses overflows
        sample, place = local.place_of(token)
        logger.warning(
            f"rank {world_rank()}: {what} is {float(flat[token])} at token {place} of sample {sample} of a "
            "micro-batch: the token's mask is not 0, so the step's sum is not finite. Check the token's log-probs "
            "and advantage, or mask it."
        )


def warn_of_float16(rows: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Log float16 losses whose gradient cannot hold the weights, of (losses, weights); looks at weights on the host.

    The gradient is scaled in float32 and rounded once, so a loss scale helps. bfloat16 has the range of float32.
    """
    for values, weights in rows:
        if values.dtype == torch.float16 and values.requires_grad and weights.is_cpu and weights.any():
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
