"""Reducers turn a rank's per-token losses into its share of the step loss.

A rank sums its own weight * loss; the plain sum of all shares, over micro-batches, context-parallel (CP) and
data-parallel (DP) ranks, *is* the step loss. Nothing is divided afterwards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_loss.errors import place_in_cp
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import ModeFunction, OwnMode
from megatron_rl_loss.modes.weights import weigh, weigh_at_the_door
from megatron_rl_loss.reduction.tap import Declared, is_listening, tap
from megatron_rl_loss.step.ids import Ids
from megatron_rl_loss.step.layouts import Layout
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals, UnitCounting

Reducer = Callable[[Tensor], Tensor]


def make_pg_loss_reducer(
    mode: str | ModeFunction,
    loss_masks: Sequence[Tensor],
    *,
    totals: StepTotals,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    layout: Layout | None = None,
    cp_rank: int | None = None,
    cp_size: int = 1,
) -> "WeightedSum":
    """``reducer(per_token_loss) -> share``: this rank's share of the step loss of one micro-batch.

    >>> masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    >>> totals = StepTotals.from_loss_masks(masks)
    >>> make_pg_loss_reducer("token_mean", masks, totals=totals)(torch.tensor([1.0, 2.0, 9.0, 6.0]))
    tensor(3.)

    The same factory serves metrics (clip fraction, KL, entropy), which keep ``sample_mean`` whatever the loss does.

    Shares add up. Where gradients are averaged over ranks instead (plain `DistributedDataParallel`, FSDP), train on
    ``world_size * share``, with the ranks that are averaged over.

    Args:
        mode: ``sample_mean``, ``prompt_mean``, ``token_mean``, ``constant``, ``token_sum``, a registered name, another
            framework's (``verl:token-mean``; `python -m megatron_rl_loss modes` lists them), or a function of
            `ModeInputs`.
        loss_masks, rollout_ids, prompt_ids, layout: the micro-batch, as in `Samples`.
        totals: the step's denominators.
        divisor: L of ``constant``, in tokens (the generation budget, say), or d of ``token_sum``; with no other mode.
        units: count every unit (``all``, unless a framework's name says otherwise) or only those with a token of
            nonzero weight (``active``).
        cp_rank, cp_size: this rank's place in its context-parallel group; a rank of several must be given.

    Returns:
        A `WeightedSum`, to be called. It takes the local per-token losses (float, in the layout's order) and returns a
        0-dim float32 tensor that stays connected to the graph even without active tokens. float16 and bfloat16 are
        summed in float32. NaN and Inf at masked positions are ignored, at active ones they come through. It raises
        ValueError for losses whose shape is not this rank's part of the layout.

    Raises:
        ValueError, TypeError: unknown mode, a divisor that is missing, unusable or without effect, totals without the
            count the mode needs, or that are smaller than this micro-batch; anything `Samples` refuses.
    """
    samples = Samples(loss_masks, layout=layout, rollout_ids=rollout_ids, prompt_ids=prompt_ids)
    aggregation = resolve(mode, divisor=divisor, units=units)
    local = samples.local(place_in_cp(cp_rank, cp_size), cp_size)
    return WeightedSum(weigh_at_the_door(aggregation, local, totals), local, aggregation)


def reducer_of(aggregation: Aggregation, local: LocalTokens, totals: StepTotals) -> "WeightedSum":
    """`make_pg_loss_reducer` of parts that are made and checked already."""
    return WeightedSum(weigh(aggregation, local, totals), local, aggregation)


class WeightedSum:
    """``sum_t w_t * loss_t`` over the tokens this rank holds, with w_t = 0 meaning "ignore the token".

    Attributes:
        weights: float32 [num_local_tokens], in the order of the losses. They move to the device of the losses.
        gradient_scale: the gradient is that of so many sums (see `Gathered`).
        zero_only_where_masked: whether no other token than those that the loss mask leaves out has weight 0.
        name: of the loss term, for an audit.
    """

    name = "pg"

    def __init__(self, weights: Tensor, local: LocalTokens, aggregation: Aggregation) -> None:
        self.weights = weights
        self.gradient_scale = local.gradient_scale
        self.zero_only_where_masked = not isinstance(aggregation.mode, OwnMode)
        self._samples = local.samples
        self._aggregation = aggregation
        self._shapes = local.samples.loss_shapes(weights.numel(), local.cp_size)

    def __call__(self, per_token_loss: Tensor) -> Tensor:
        return self.with_metrics(per_token_loss, [])[0]

    def with_metrics(
        self, per_token_loss: Tensor, metrics: Sequence[Tensor], metric_sum: "WeightedSum | None" = None
    ) -> tuple[Tensor, list[Tensor]]:
        """This sum of the losses, and sums of further values, not differentiated, by `metric_sum` (by default this)."""
        self.check("per_token_loss", per_token_loss)
        if is_listening():
            self.tap(per_token_loss, self.name)
        metric_sum = metric_sum or self
        for values in metrics:
            metric_sum.check("a metric", values)
        device = per_token_loss.device
        weights = self.weights_on(device)
        metric_weights = weights if metric_sum is self else metric_sum.weights_on(device)
        if not _may_look(weights):
            with torch.no_grad():
                rows = [values.reshape(-1) for values in (per_token_loss, *metrics)]
                same_zeros = metric_sum is self or (self.zero_only_where_masked and metric_sum.zero_only_where_masked)
                share, *sums = _sums_without_looking(rows, weights, metric_weights, same_zeros)
            share = _WithGradient.apply(per_token_loss, weights, [share])  # type: ignore[no-untyped-call]
            return self.scaled(share), sums
        share = self.scaled(_sum_of_losses(per_token_loss, weights))
        if not metrics:
            return share, []
        with torch.no_grad():
            return share, _sums_of_metrics([values.reshape(-1) for values in metrics], metric_weights)

    def tap(self, values: Tensor, name: str, coef: float | None = None) -> None:
        """Let an audit hear the gradient of these losses, and what it should be; of a term with its coefficient."""
        declared = None if coef is None else Declared(self._aggregation, coef)
        factor = self.gradient_scale * (1.0 if coef is None else coef)
        tap(values, name, samples=self._samples, asked=lambda: self.weights * factor, declared=declared)

    def scaled(self, share: Tensor) -> Tensor:
        """The same value with `gradient_scale` times its gradient."""
        if self.gradient_scale == 1:
            return share
        return share + (self.gradient_scale - 1) * (share - share.detach())

    def check(self, what: str, values: Tensor) -> None:
        """Refuse what is not one float for each token that this rank holds."""
        check_values(what, values, self._shapes, self.weights.numel(), self._samples)

    def weights_on(self, device: torch.device) -> Tensor:
        """The weights, moved to the device once."""
        if self.weights.device != device:
            self.weights = self.weights.to(device, non_blocking=True)
        return self.weights


def _may_look(values: Tensor) -> bool:
    """Whether branching on a value costs nothing: nobody waits for a host, nor is its program recorded."""
    return values.is_cpu and not torch.compiler.is_compiling()


class _WithGradient(torch.autograd.Function):
    """A weighted sum that is already known, with its gradient: one launch, and nothing kept but the weights."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, weights: Tensor, total: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.shape, ctx.dtype = losses.shape, losses.dtype
        # In a list and detached: a tensor argument, or a view, could not be returned and then changed in place.
        return total[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        return (gradient * weights).to(ctx.dtype).view(ctx.shape), None, None


# Products are added by torch's own sum, pairwise and in few-term blocks whatever the CPU: a BLAS `dot` may run through
# all tokens in one float32 sum, 1e-3 off at 4 million tokens. Tokens of weight 0 are ignored: 0 * NaN would be NaN.

#: From so many float32 tokens on, writing products on the host costs more than adding them: they are not written.
_MANY = 2**19
#: Tokens in a row of `_sum_of_products`: few enough that its plain float32 sum is as good as a pairwise one.
_ROW = 128
_ZERO, _ONE = torch.zeros(1, 1, device="cpu"), torch.ones(1, 1, device="cpu")


def _sum_of_losses(losses: Tensor, weights: Tensor) -> Tensor:
    """On the host, where autograd's own nodes cost less than `_WithGradient` if tokens are not many."""
    if losses.numel() >= _MANY and losses.dtype == torch.float32:
        with torch.no_grad():
            share = _sum_of_products(losses.reshape(-1), weights)
            if not math.isfinite(share.item()):
                share = (losses.reshape(-1) * weights).masked_fill_(weights == 0, 0).sum()
        return _WithGradient.apply(losses, weights, [share])  # type: ignore[no-untyped-call]
    weights = weights if losses.dim() == 1 else weights.view(losses.shape)
    share = (losses * weights).sum()
    if not math.isfinite(share.item()):
        share = (losses.masked_fill(weights == 0, 0) * weights).sum()
    return share if share.dtype is torch.float32 else share.float()


def _sum_of_products(values: Tensor, weights: Tensor) -> Tensor:
    """Of many float32 tokens, in one pass: by rows, and then over the rows.

    Group norm's gradient of its scale is a row's sum of products where the mean is 0 and the deviation 1. No other
    operation of torch multiplies and adds in one pass, but for BLAS's.
    """
    number, rest = divmod(len(values), _ROW)
    rows = [part[: number * _ROW].contiguous().view(1, number, _ROW) for part in (weights, values)]
    scale = weights[:number]  # not read
    of_rows = torch.ops.aten.native_group_norm_backward(
        *rows, _ZERO, _ONE, scale, 1, number, _ROW, 1, [False, True, False]
    )[1]
    total = of_rows.sum()
    return total + (values[-rest:] * weights[-rest:]).sum() if rest else total


#: Tokens that are summed at a time on the host, so that products of all rows stay in its cache.
_BLOCK = 2**16


def _sums_of_metrics(rows: list[Tensor], weights: Tensor) -> list[Tensor]:
    """On the host."""
    if len(weights) >= _MANY and all(row.dtype == torch.float32 for row in rows):
        sums = torch.stack([_sum_of_products(row, weights) for row in rows])
    else:
        blocks = zip(*(row.split(_BLOCK) for row in rows), weights.split(_BLOCK), strict=True)
        sums = torch.stack([torch.stack(parts).float().mul_(weight).sum(1) for *parts, weight in blocks]).sum(0)
    if not all(map(math.isfinite, sums.tolist())):
        sums = (torch.stack(rows).float() * weights).masked_fill_(weights == 0, 0).sum(1)
    return list(sums.unbind())


def sums_by_weights(rows: Sequence[tuple[Tensor, WeightedSum]], device: torch.device) -> Tensor:
    """The sum of each row by its reducer's weights, float32 [len(rows)], not differentiated."""
    values = [row.reshape(-1) for row, _ in rows]
    weights = [reducer.weights_on(device) for _, reducer in rows]
    if not _may_look(weights[0]):
        table = torch.stack(values).float()
        alike = weights[0] if all(one is weights[0] for one in weights) else torch.stack(weights)
        return table.mul_(alike).masked_fill_(alike == 0, 0).sum(1)
    found: list[Tensor] = [torch.zeros(())] * len(rows)
    for weight in {id(one): one for one in weights}.values():
        of_it = [k for k, one in enumerate(weights) if one is weight]
        for k, total in zip(of_it, _sums_of_metrics([values[k] for k in of_it], weight), strict=True):
            found[k] = total
    return torch.stack(found)


def _sums_without_looking(
    rows: list[Tensor], weights: Tensor, metric_weights: Tensor, same_zeros: bool
) -> list[Tensor]:
    """The sum of the first row by `weights` and of the others by `metric_weights`, with no branch on a value.

    A device need not be waited for, and the number of launches depends neither on samples nor on rows.
    """
    table = torch.stack(rows).float()
    if weights is metric_weights:
        table.mul_(weights)
    else:
        table[0].mul_(weights)
        table[1:].mul_(metric_weights)
    if same_zeros:
        table.masked_fill_(weights == 0, 0)
    else:
        table[0].masked_fill_(weights == 0, 0)
        table[1:].masked_fill_(metric_weights == 0, 0)
    return list(table.sum(1).unbind())


def check_values(
    what: str, values: Tensor, shapes: Sequence[tuple[int, ...]], num_local: int, samples: Samples
) -> None:
    """Refuse what is not one float for each token that a rank holds."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{what} is {kind}: it must be a float tensor. Pass unreduced losses.")
    if values.shape not in shapes:
        hint = _layout_hint(values.numel(), num_local, samples)
        shown = " or ".join(map(str, shapes))
        raise ValueError(f"{what} of shape {tuple(values.shape)}: this rank's part of the layout is {shown}. {hint}.")


def _layout_hint(num_losses: int, num_local: int, samples: Samples) -> str:
    """What a wrong number of losses most likely means."""
    if num_losses == 1:
        return "Pass unreduced losses, one a token"
    if num_losses == num_local:
        return "The number of tokens fits: transpose to batch first if it is [s, b], or flatten in the layout's order"
    layout = samples.layout
    if layout is not None and num_losses == layout.total_tokens:
        return "These are all tokens of the micro-batch: if losses are not cut over CP ranks, the layout is Gathered"
    if num_losses == sum(samples.mask_lengths):
        return "These are the unpadded, uncut tokens: cut and pad them as the layout says, or change the layout"
    if samples.flat_mask.is_cpu and num_losses == int(samples.active_tokens.sum()):
        return "These are the active tokens only: pass the losses of all positions, or ZigzagResponse for responses"
    if layout is not None and num_losses and layout.total_tokens % num_losses == 0:
        return f"These are 1/{layout.total_tokens // num_losses} of the micro-batch: check that cp_size is right"
    return "Pass the losses of this micro-batch, cut as its layout says"
