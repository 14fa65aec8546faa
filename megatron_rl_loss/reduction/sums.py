"""Reducers turn a rank's per-token losses into its share of the step loss.

A rank sums its own weight * loss; the plain sum of all shares, over micro-batches, context-parallel (CP) and
data-parallel (DP) ranks, *is* the step loss. Nothing is divided afterwards, and nothing is read back from a device.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl_loss.errors import place_in_cp
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, ModeFunction
from megatron_rl_loss.modes.weights import checked_weights
from megatron_rl_loss.reduction.taps import observed_taps, tap
from megatron_rl_loss.step.collectives import world_rank
from megatron_rl_loss.step.ids import Ids, IdsByName
from megatron_rl_loss.step.layouts import Layout
from megatron_rl_loss.step.masks import Mask
from megatron_rl_loss.step.samples import Labels, LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import UnitCounting
from megatron_rl_loss.step.values import check_values

logger = logging.getLogger(__name__)

Reducer = Callable[[Tensor], Tensor]


def make_pg_loss_reducer(
    mode: str | Mode | ModeFunction,
    loss_masks: Iterable[Mask],
    *,
    totals: StepTotals,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    ids: IdsByName | None = None,
    labels: Labels | None = None,
    layout: Layout | None = None,
    cp_rank: int | None = None,
    cp_size: int = 1,
) -> "WeightedSum":
    """``reducer(per_token_loss) -> share``: this rank's share of the step loss of one micro-batch.

    >>> masks = [[1, 1, 0], [1]]
    >>> totals = StepTotals.from_loss_masks(masks)
    >>> make_pg_loss_reducer("token_mean", masks, totals=totals)(torch.tensor([1.0, 2.0, 9.0, 6.0]))
    tensor(3.)

    Shares add up. A trainer that averages gradients over ranks (plain `DistributedDataParallel`, FSDP) trains on
    ``world_size * share``, with the number of these ranks.

    Args:
        mode: ``sample_mean``, ``prompt_mean``, ``token_mean``, ``constant``, ``token_sum``, a registered name, another
            framework's (``verl:token-mean``; `python -m megatron_rl_loss modes` lists them), or a function of
            `ModeInputs`.
        loss_masks, rollout_ids, prompt_ids, ids, labels, layout: the micro-batch, as in `Samples`.
        totals: the step's denominators.
        divisor: L of ``constant``, in tokens (the generation budget, say), or d of ``token_sum``; with no other mode.
        units: count every unit (``all``, unless a framework's name says otherwise) or only those with a token of
            nonzero weight (``active``).
        cp_rank, cp_size: this rank's place in its context-parallel group; cp_rank is required where cp_size > 1.

    Returns:
        A `WeightedSum`, to be called. It takes the local per-token losses (float, in the layout's order) and returns a
        0-dim float32 tensor that stays connected to the graph even without active tokens. float16 and bfloat16 are
        summed in float32. NaN and Inf at masked positions are ignored, at active ones they come through. It raises
        ValueError for losses whose shape is not this rank's part of the layout.

    Raises:
        ValueError, TypeError: unknown mode, a divisor that is missing, unusable or without effect, totals without the
            count the mode needs, or that are smaller than this micro-batch; anything `Samples` refuses.
    """
    samples = Samples(loss_masks, layout=layout, rollout_ids=rollout_ids, prompt_ids=prompt_ids, ids=ids, labels=labels)
    aggregation = resolve(mode, divisor=divisor, units=units)
    local = samples.local(place_in_cp(cp_rank, cp_size), cp_size)
    return WeightedSum(checked_weights(aggregation, local, totals), local, aggregation)


class WeightedSum:
    """``sum_t w_t * loss_t`` over the tokens this rank holds; w_t = 0 leaves the token out.

    Attributes:
        weights: float32 [num_local_tokens], in the order of the losses. They move to the device of the losses.
        gradient_scale: the factor of the sum's gradient (see `Gathered`).
        name: of the loss term, for an audit.
        num_uses: the number of sums made with a gradient.
    """

    name = "pg"

    def __init__(self, weights: Tensor, local: LocalTokens, aggregation: Aggregation) -> None:
        self.weights = weights
        self.gradient_scale = local.gradient_scale
        self.num_uses = 0
        self._local, self._aggregation = local, aggregation

    @property
    def by(self) -> str:
        """The aggregation, as all micro-batches and ranks must have it for a sum of that name."""
        return self._aggregation.describe()

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
        flat = values.detach().reshape(-1)
        wrong = ((self.weights_on(flat.device) != 0) & ~flat.isfinite()).nonzero()[:1, 0].tolist()
        for token in wrong:  # none where the sum of finite losses overflows
            sample = int(self._local.sample_index[token])
            place = int(self._local.positions[token]) - self._local.samples.mask_starts[sample]
            logger.warning(
                f"rank {world_rank()}: {what} is {float(flat[token])} at token {place} of sample {sample} of a "
                "micro-batch: the token's mask is not 0, so the step's sum is not finite. Check the token's log-probs "
                "and advantage, or mask it."
            )

    def tap(self, values: Tensor, term: str | None, coef: float) -> Tensor:
        """The values to sum, with a tap on their gradient: that of this term alone."""
        if (taps := observed_taps()) is None:
            return values
        factor = self.gradient_scale * coef
        return tap(
            values if term is None and taps.find(values) else values.view_as(values),
            term or self.name,
            samples=self._local.samples,
            expected_weights=lambda: self.weights * factor,
            coef=None if term is None else coef,
            aggregation=None if term is None else self._aggregation,
        )


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
        ValueError, TypeError: a summand's values that are not one float for each token that this rank holds.
    """
    for one in summands:
        check_values(one.what, one.values, one.reducer._local)
    device, coefs = summands[0].values.device, [one.coef for one in summands]
    sums = _sums([*((one.values, one.reducer) for one in summands), *metrics], device)
    for one, total in zip(summands, sums, strict=False):  # metrics follow
        one.reducer.num_uses += torch.is_grad_enabled()
        if total.is_cpu and not torch.compiler.is_compiling() and not math.isfinite(float(total)):
            one.reducer.report_not_finite(one.what, one.values)
    share = _scaled(sums[0], coefs[0])
    for k in range(1, len(summands)):
        share = share.add(sums[k], alpha=coefs[k])
    values = [one.reducer.tap(one.values, one.term, one.coef) for one in summands]
    weights = [one.reducer.weights_on(device) for one in summands]
    slopes = [one.coef * one.reducer.gradient_scale for one in summands]
    share = _WithGradient.apply(share, weights, slopes, *values)  # type: ignore[no-untyped-call]
    return share, sums[: len(summands)], sums[len(summands) :]


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
            (one, _version(one), slope, row.shape, row.dtype)
            for one, slope, row in zip(weights, slopes, values, strict=True)
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
