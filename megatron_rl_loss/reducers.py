"""Reducers: closures that turn a rank's per-token losses into its share of the step loss.

Every mode is one weight a token, w = mask / (D * U): D the tokens of the token's unit, U the units of the step, both
over the whole step. A rank sums its own w * loss; the plain sum of all shares, over micro-batches, context-parallel
(CP) and data-parallel (DP) ranks, *is* the step loss. Nothing is divided afterwards.

| mode          | unit         | D                          | U               | step loss                       |
|---------------|--------------|----------------------------|-----------------|---------------------------------|
| `sample_mean` | rollout      | mask tokens of the rollout | N rollouts      | (1/N) sum_i sum_t l*m / M_i     |
| `prompt_mean` | prompt group | mask tokens of the group   | P prompt groups | (1/P) sum_g sum_{t in g} l*m/M_g |
| `token_mean`  | the step     | mask tokens of the step    | 1               | sum l*m / sum m                 |
| `constant`    | rollout      | L, the divisor             | N rollouts      | sum l*m / (L * N)               |
| `token_sum`   | the step     | d, the divisor or 1        | 1               | sum l*m / d                     |
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_rl_loss import host_kernels
from megatron_rl_loss.errors import explain
from megatron_rl_loss.layouts import Layout
from megatron_rl_loss.names import aliases_of, resolve_name
from megatron_rl_loss.samples import Ids, Samples, host_work
from megatron_rl_loss.totals import StepTotals, UnitTokens

Reducer = Callable[[Tensor], Tensor]
Units = Literal["all", "active"]

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant", "token_sum")
_WITH_DIVISOR = ("constant", "token_sum")


@dataclass(frozen=True, kw_only=True)
class ReducerInputs:
    """What a reducer factory is given: one micro-batch, the step it belongs to and this rank's place.

    Attributes:
        samples: masks, ids and layout of the micro-batch.
        totals: denominators of the whole step.
        divisor: ``--loss-aggregation-divisor``, or None.
        units: whether fully masked units count (``all``) or not (``active``).
        cp_rank, cp_size: this rank's place in its context-parallel group.
    """

    samples: Samples
    totals: StepTotals
    divisor: float | None = None
    units: Units = "all"
    cp_rank: int = 0
    cp_size: int = 1

    def weighted_sum(self, token_weights: Sequence[Tensor]) -> Reducer:
        """The reducer ``sum_t w_t * loss_t``, from full-length weights, one 1-D tensor a sample like its mask."""
        if not all(isinstance(weights, Tensor) and weights.dim() == 1 for weights in token_weights):
            given = f"token weights {[getattr(weights, 'shape', type(weights)) for weights in token_weights[:8]]}"
            raise TypeError(explain(given, "they must be 1-D tensors", "Return one tensor a sample"))
        lengths = [weights.numel() for weights in token_weights]
        if lengths != self.samples.mask_lengths.tolist():
            given = f"token weights of lengths {lengths[:8]}"
            rule = f"they must have the lengths of the loss masks, {self.samples.mask_lengths[:8].tolist()}"
            raise ValueError(explain(given, rule, "Return one weight a mask entry"))
        buffer = self.samples.in_buffer(token_weights)
        if not bool(torch.isfinite(buffer).all()):
            raise ValueError(
                explain("token weights with NaN or Inf", "they must be finite", "Use 0 to leave tokens out")
            )
        weights = self.samples.local(buffer, self.cp_rank, self.cp_size)
        return WeightedSum.of(self, weights / self.copies)

    @property
    def copies(self) -> int:
        """CP ranks that hold each token, and add their shares of it."""
        layout = self.samples.layout
        return self.cp_size if layout is not None and layout.replicated_over_cp else 1


ReducerFactory = Callable[[ReducerInputs], Reducer]

_REGISTERED: dict[str, ReducerFactory] = {}


def register_pg_loss_reducer(name: str) -> Callable[[ReducerFactory], ReducerFactory]:
    """Decorator: make a reducer factory a choice of ``--loss-aggregation`` and of `make_pg_loss_reducer`.

    The factory takes `ReducerInputs` and returns a `Reducer`, whose values must add up over micro-batches, CP and DP
    ranks to the step loss. Register before the flags are parsed.

    >>> @register_pg_loss_reducer("half_sum")
    ... def half_sum(inputs):
    ...     return inputs.weighted_sum([mask / 2 for mask in inputs.samples.loss_masks])

    Raises:
        ValueError: the name is taken or empty.
        TypeError: what is registered cannot be called.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(explain(f"reducer name {name!r}", "it must be a Python identifier", "Choose a plain name"))
    if name in available_modes():
        raise ValueError(explain(f"reducer name {name!r}", "it is taken", "Choose another name"))

    def register(factory: ReducerFactory) -> ReducerFactory:
        if not callable(factory):
            given = f"reducer {name!r} is a {type(factory).__name__}"
            raise TypeError(explain(given, "it must be a function of ReducerInputs", "Register a function"))
        _REGISTERED[name] = factory
        return factory

    return register


def available_modes() -> tuple[str, ...]:
    """The built-in modes and every registered reducer."""
    return (*MODES, *_REGISTERED)


def make_pg_loss_reducer(
    mode: str,
    loss_masks: Sequence[Tensor],
    *,
    totals: StepTotals,
    divisor: float | None = None,
    units: Units | None = None,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    layout: Layout | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> Reducer:
    """A closure ``reducer(per_token_loss) -> share``: this rank's share of the step loss of one micro-batch.

    >>> masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    >>> totals = StepTotals.from_loss_masks(masks)
    >>> make_pg_loss_reducer("token_mean", masks, totals=totals)(torch.tensor([1.0, 2.0, 9.0, 6.0]))
    tensor(3.)

    The same factory serves metrics (clip fraction, KL, entropy), which keep ``sample_mean`` whatever the loss does.

    Args:
        mode: ``sample_mean``, ``prompt_mean``, ``token_mean``, ``constant``, ``token_sum``, a registered name or
            another framework's (``verl:token-mean``; `python -m megatron_rl_loss modes` lists them).
        loss_masks, rollout_ids, prompt_ids, layout: the micro-batch, as in `Samples`.
        totals: the step's denominators.
        divisor: L of ``constant``, in tokens (the generation budget, say), or d of ``token_sum``; with no other mode.
        units: count every unit (``all``, unless a framework's name says otherwise) or only those with a token of
            nonzero weight (``active``).
        cp_rank, cp_size: this rank's place in its context-parallel group.

    Returns:
        The closure. It takes the local per-token losses (float, in the layout's order) and returns a 0-dim float32
        tensor that stays connected to the graph even without active tokens. float16 and bfloat16 are summed in
        float32. NaN and Inf at masked positions are ignored, at active ones they come through. It raises ValueError
        for losses whose shape is not this rank's part of the layout.

    Raises:
        ValueError, TypeError: unknown mode, a divisor that is missing, unusable or without effect, totals without the
            count the mode needs, anything `Samples` refuses.
    """
    samples = Samples(loss_masks, layout=layout, rollout_ids=rollout_ids, prompt_ids=prompt_ids)
    named = resolve_name(mode, divisor=divisor, units=units)
    inputs = ReducerInputs(
        samples=samples, totals=totals, divisor=named.divisor, units=named.units, cp_rank=cp_rank, cp_size=cp_size
    )
    return build_reducer(named.mode, inputs)


def build_reducer(mode: str | ReducerFactory, inputs: ReducerInputs) -> Reducer:
    """`make_pg_loss_reducer` for inputs that are already put together; `mode` may be a factory itself."""
    check_units(inputs.units)
    if isinstance(mode, str):
        check_mode(mode, inputs.divisor)
    factory = _REGISTERED.get(mode) if isinstance(mode, str) else mode
    if factory is not None:
        reducer = factory(inputs)
        if not callable(reducer):
            given = f"the reducer factory {mode!r} returned {reducer!r}"
            rule = "it must return a function of the per-token losses"
            raise TypeError(explain(given, rule, "Return inputs.weighted_sum(...), say"))
        return reducer
    assert isinstance(mode, str)
    sample_weights = _unit_weights(mode, inputs) / inputs.copies
    weights = inputs.samples.weighted_mask(sample_weights, inputs.cp_rank, inputs.cp_size)
    return WeightedSum.of(inputs, weights, ignores_masked=True)


def check_mode(mode: str, divisor: float | None) -> None:
    """Refuse a mode that is unknown, and a divisor that is missing, unusable or without effect."""
    if mode not in available_modes():
        remedy = f"Choose one of {', '.join((*available_modes(), *aliases_of(mode)))}"
        raise ValueError(explain(f"loss aggregation {mode!r}", "there is no such mode", remedy))
    if divisor is None:
        if mode == "constant":
            given = "loss aggregation 'constant' without a divisor"
            remedy = "Give one, e.g. the generation budget in tokens (--loss-aggregation-divisor 40960)"
            raise ValueError(explain(given, "it divides by a constant number of tokens", remedy))
        return
    if mode in MODES and mode not in _WITH_DIVISOR:
        given = f"divisor {divisor!r} with loss aggregation {mode!r}"
        remedy = "Drop the divisor or choose 'constant'"
        raise ValueError(explain(given, "only 'constant' and 'token_sum' have a divisor", remedy))
    check_divisor(divisor)


def check_units(units: str) -> None:
    """Refuse a unit counting that does not exist."""
    if units not in get_args(Units):
        given = f"unit counting {units!r}"
        raise ValueError(explain(given, "there is no such counting", f"Choose one of {', '.join(get_args(Units))}"))


def check_divisor(divisor: float) -> None:
    """Refuse a divisor that is not a usable number of tokens."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        given = f"divisor {divisor!r} ({type(divisor).__name__})"
        raise TypeError(explain(given, "it must be a number", "Pass a number of tokens"))
    # Beyond 1e30 either way the float32 weights of tokens would vanish or be infinite.
    if not 1e-30 < divisor < 1e30:
        given = f"divisor {divisor!r}"
        rule = "it must be finite and above 0 (above 1e-30 and below 1e30)"
        raise ValueError(explain(given, rule, "Pass a number of tokens"))


@host_work
def _unit_weights(mode: str, inputs: ReducerInputs) -> Tensor:
    """1 / (D * U) of the unit of each sample, float64 [num_samples]; 0 for units without an active token."""
    samples, totals = inputs.samples, inputs.totals
    if not len(samples):
        return samples.mask_sums()
    if mode == "token_sum":  # one unit of a size that is given: no count of the step is needed
        return _constant(1 / (inputs.divisor or 1), samples)
    if totals.rollout_tokens is not None and samples.rollout_ids is None:
        given = "totals made with rollout_ids, a micro-batch without"
        raise ValueError(explain(given, "its units cannot be told", "Pass rollout_ids with every micro-batch"))
    if mode == "constant" and totals.rollout_tokens is None and samples.rollout_ids is not None:
        given = "a micro-batch with rollout_ids, totals made without"
        remedy = "Make the totals with them; if num_rollouts counts rollouts already, leave them out here"
        raise ValueError(explain(given, "the totals may count samples for rollouts", remedy))
    field = "step_tokens"
    if mode == "token_mean":
        num_units, unit_tokens = 1, _constant(_known(totals, field, mode), samples)
    else:
        field = (
            f"num_{'active_' if inputs.units == 'active' else ''}{'prompts' if mode == 'prompt_mean' else 'rollouts'}"
        )
        num_units = _known(totals, field, mode)
        if mode == "constant":
            assert inputs.divisor is not None  # check_mode saw to it
            unit_tokens = _constant(inputs.divisor, samples)
        else:
            unit_tokens = _unit_tokens(mode, samples, totals)
    denominator = unit_tokens * num_units
    if bool(((denominator == 0) & (samples.mask_sums() > 0)).any()):  # they would silently weigh nothing
        tokens = "" if mode in ("token_mean", "constant") else " or its unit's tokens"
        given = f"active tokens in a micro-batch, and totals whose {field}{tokens} are 0"
        raise ValueError(explain(given, "the totals must be those of the whole step", "Make them from all its masks"))
    return torch.where(denominator > 0, 1 / denominator, 0.0)


def _constant(value: float, samples: Samples) -> Tensor:
    return torch.full((len(samples),), float(value), dtype=torch.float64, device="cpu")


def _unit_tokens(mode: str, samples: Samples, totals: StepTotals) -> Tensor:
    """Mask tokens of the unit of each sample, over the whole step, float64 [num_samples]."""
    if mode == "sample_mean" and samples.rollout_ids is None:
        return samples.mask_sums()
    field, name, ids = "rollout_tokens", "rollout_ids", samples.rollout_ids
    if mode == "prompt_mean":
        field, name, ids = "prompt_tokens", "prompt_ids", samples.prompt_ids
        if ids is None:
            given = "loss aggregation 'prompt_mean' without prompt_ids"
            raise ValueError(explain(given, "it averages inside each prompt group", "Pass prompt_ids, one a sample"))
    assert ids is not None
    tokens: UnitTokens = _known(totals, field, mode)
    return tokens.of(name, ids)


def _known(totals: StepTotals, field: str, mode: str) -> Any:
    value = getattr(totals, field)
    if value is None:
        remedy = "Make the totals with the ids of the samples (StepTotals.from_loss_masks), or give the count yourself"
        raise ValueError(explain(f"totals without {field}", f"loss aggregation {mode!r} needs it", remedy))
    return value


class WeightedSum:
    """``sum_t w_t * loss_t`` over the tokens this rank holds, with w_t = 0 meaning "ignore the token".

    Attributes:
        weights: float32 [num_local_tokens], in the order of the losses. They move to the device of the losses.
    """

    def __init__(
        self, weights: Tensor, shapes: list[tuple[int, ...]], hint: Callable[[int], str], ignores_masked: bool
    ) -> None:
        self.weights = weights
        self._shapes = shapes
        self._hint = hint
        self._ignores_masked = ignores_masked  # the tokens of weight 0 are those that the loss mask leaves out

    @classmethod
    def of(cls, inputs: ReducerInputs, weights: Tensor, ignores_masked: bool = False) -> "WeightedSum":
        """From the weights of this rank's tokens, [num_local_tokens]."""

        def hint(num_losses: int) -> str:
            return _layout_hint(num_losses, weights.numel(), inputs.samples)

        return cls(weights.float(), inputs.samples.loss_shapes(weights.numel(), inputs.cp_size), hint, ignores_masked)

    def __call__(self, per_token_loss: Tensor) -> Tensor:
        return self.with_metrics(per_token_loss, [], self)[0]

    def with_metrics(
        self, per_token_loss: Tensor, metrics: Sequence[Tensor], metric_sum: "WeightedSum"
    ) -> tuple[Tensor, list[Tensor]]:
        """This sum of the losses, and `metric_sum` of further values, not differentiated: one pass over all of them."""
        self._check(per_token_loss)
        for values in metrics:
            metric_sum._check(values)
        weights = self._weights_on(per_token_loss.device)
        metric_weights = metric_sum._weights_on(metrics[0].device) if metrics else weights
        rows = [values.detach().reshape(-1) for values in (per_token_loss, *metrics)]
        if per_token_loss.device.type == "cpu" and not torch.compiler.is_compiling():
            if weights is metric_weights:
                totals = _host_sums(rows, weights)
            else:
                totals = _host_sums(rows[:1], weights) + _host_sums(rows[1:], metric_weights)
        else:
            same_ignored = self._ignores_masked and metric_sum._ignores_masked
            totals = _sums_without_looking(rows, weights, metric_weights, same_ignored)
        share = totals[0]
        if torch.is_grad_enabled() and per_token_loss.requires_grad:
            share = _WithGradient.apply(per_token_loss, weights, [share])  # type: ignore[no-untyped-call]
        return share, totals[1:]

    def _check(self, values: Tensor) -> None:
        if not isinstance(values, Tensor) or not values.is_floating_point():
            kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(explain(f"per_token_loss is {kind}", "it must be a float tensor", "Pass unreduced losses"))
        if tuple(values.shape) not in self._shapes:
            given = f"per_token_loss of shape {tuple(values.shape)}"
            rule = f"this rank's part of the layout is {' or '.join(map(str, self._shapes))}"
            raise ValueError(explain(given, rule, self._hint(values.numel())))

    def _weights_on(self, device: torch.device) -> Tensor:
        if self.weights.device != device:
            self.weights = self.weights.to(device, non_blocking=True)
        return self.weights


class _WithGradient(torch.autograd.Function):
    """A weighted sum that is already known, with its gradient: one node, which keeps nothing but the weights."""

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


def _host_sums(rows: list[Tensor], weights: Tensor) -> list[Tensor]:
    rows = [row.float().contiguous() for row in rows]
    if len(rows) > 1 and host_kernels.available() and host_kernels.are_readable([*rows, weights]):
        return list(host_kernels.weighted_sums(rows, weights))
    return [_host_dot(row, weights) for row in rows]


def _host_dot(values: Tensor, weights: Tensor) -> Tensor:
    total = torch.dot(values, weights)
    if not math.isfinite(total.item()):  # 0 * NaN is NaN: again, without the tokens that do not count
        total = torch.dot(values.masked_fill(weights == 0, 0), weights)
    return total


def _sums_without_looking(
    rows: list[Tensor], weights: Tensor, metric_weights: Tensor, same_ignored: bool
) -> list[Tensor]:
    """The sum of the first row by `weights` and of the others by `metric_weights`, with no branch on a value.

    A GPU need not be waited for, and the number of kernels depends neither on samples nor on metrics.
    """
    table = torch.stack(rows).float()
    if weights is metric_weights:
        table.mul_(weights).masked_fill_(weights == 0, 0)  # 0 * NaN is NaN
    else:
        table[0].mul_(weights)
        table[1:].mul_(metric_weights)
        if same_ignored:
            table.masked_fill_(weights == 0, 0)
        else:
            table[0].masked_fill_(weights == 0, 0)
            table[1:].masked_fill_(metric_weights == 0, 0)
    return list(table.sum(1))


def _layout_hint(num_losses: int, num_local: int, samples: Samples) -> str:
    """What a wrong number of losses most likely means."""
    if num_losses == 1:
        return "Pass unreduced losses, one a token"
    if num_losses == num_local:
        return "The number of tokens fits: transpose to batch first if it is [s, b], or flatten in the layout's order"
    layout = samples.layout
    if layout is not None and num_losses == layout.total_tokens:
        return "These are all tokens of the micro-batch: if losses are not cut over CP ranks, the layout is Gathered"
    if num_losses == int(samples.mask_lengths.sum()):
        return "These are the unpadded, uncut tokens: cut and pad them as the layout says, or change the layout"
    if num_losses == int(samples.active_tokens().sum()):
        return "These are the active tokens only: pass the losses of all positions, or ZigzagResponse for responses"
    if layout is not None and num_losses and layout.total_tokens % num_losses == 0:
        return f"These are 1/{layout.total_tokens // num_losses} of the micro-batch: check that cp_size is right"
    return "Pass the losses of this micro-batch, cut as its layout says"
