"""A micro-batch of a step: reduces its losses, and returns their sum in the form that the trainer takes."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_choice
from megatron_rl_loss.losses.ratio import check_same_shape
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.table import Mode, OwnMode
from megatron_rl_loss.modes.weights import missing_counts
from megatron_rl_loss.plan.carriers import Form, PairForm, find_carrier
from megatron_rl_loss.plan.returned import Receipt
from megatron_rl_loss.reduction.metrics import MODE_OF, Metric
from megatron_rl_loss.reduction.sums import Summand, Term, WeightedSum, reducer_of, sum_terms
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals, UnitCounting

if TYPE_CHECKING:
    from megatron_rl_loss.plan.plan import Plan

#: Policy losses, or the terms of the loss by name; metrics by name.
Losses = Tensor | Term | Mapping[str, Tensor | Term]
Metrics = Mapping[str, Tensor | Metric] | None
#: What Megatron's schedule takes from a loss function: loss, token count, report.
Carried = tuple[Tensor, Tensor, Any]
_Key = tuple[Mode | OwnMode, float | None, UnitCounting, str | None]


class Microbatch:
    """A micro-batch of a `Plan`, with what it takes to reduce its losses.

    Attributes:
        samples: its masks, ids and layout.
        data: what the user's iterator gave, where `LossAggregation` took it from one.
        receipt: what `loss` or `carry` returned last, or None.
        log_probs: by name, what a forward pass before the step gave for this rank's tokens (see `ForwardPass`).
    """

    def __init__(self, samples: Samples, plan: "Plan", data: Any = None) -> None:
        self.samples = samples
        self.data = data
        self.receipt: Receipt | None = None
        self.log_probs: dict[str, Tensor] = {}
        self._plan = plan
        self._reducers: dict[_Key, WeightedSum] = {}
        self._shares: dict[str, Tensor] = {}

    @property
    def totals(self) -> StepTotals:
        """Denominators of the whole step."""
        return self._plan.totals

    @property
    def weights(self) -> Tensor:
        """What each token that this rank holds counts in the step loss, float32 [num_local_tokens]."""
        return self.pg_loss.weights

    def __call__(self, per_token_loss: Tensor) -> Tensor:
        """`pg_loss`, whose share `report` then gives by default."""
        share = self.pg_loss(per_token_loss)
        self._shares = {"pg_loss": share.detach()}  # not the share itself, which would keep its graph
        return share

    @cached_property
    def pg_loss(self) -> WeightedSum:
        """Per-token policy loss -> this rank's share of the step loss, by the mode of the step."""
        return self._reducer("pg", self._plan.modes.policy)

    @cached_property
    def sample_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their sample mean: for metrics, whatever the mode."""
        self._plan.metric_modes.add("sample_mean")
        return self._reducer("sample_mean", resolve("sample_mean", units=self._plan.modes.policy.units))

    @cached_property
    def token_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their token mean: for metrics, whatever the mode."""
        self._plan.metric_modes.add("token_mean")
        return self._reducer("token_mean", resolve("token_mean"))

    def _reducer(self, name: str, aggregation: Aggregation, mask: str | None = None) -> WeightedSum:
        """Made once for each mode and mask; the one of the policy loss is named pg, whoever needs it first."""
        key = _key(aggregation, mask)
        if key not in self._reducers:
            self._reducers[key] = reducer_of(aggregation, self._tokens_of(mask), self.totals.with_mask(mask))
            self._reducers[key].name = "pg" if key == _key(self._plan.modes.policy) else name
            self._reducers[key].reads_device = self._plan.reads_device
        return self._reducers[key]

    def _counted_reducer(self, name: str, aggregation: Aggregation, mask: str | None) -> WeightedSum:
        """The reducer of a term or a metric, if the step counted what it needs."""
        if _key(aggregation, mask) == _key(self._plan.modes.policy):
            return self.pg_loss
        totals = self.totals.with_mask(mask)
        with_rollout_ids = self.samples.rollout_ids is not None
        if missing := missing_counts(aggregation, totals, with_rollout_ids=with_rollout_ids):
            raise ValueError(
                f"{name!r} by {aggregation.mode.name} and totals without {', '.join(missing)}: what a term or a metric "
                "needs is counted with the step, before its first micro-batch. Declare its mode to LossAggregation or "
                f"plan_step, terms={{{name!r}: {aggregation.mode.name!r}}}, or by its flag."
            )
        return self._reducer(name, aggregation, mask)

    @cached_property
    def tokens(self) -> LocalTokens:
        """What this CP rank holds of the micro-batch."""
        return self.samples.local(*self._place)

    def _tokens_of(self, mask: str | None) -> LocalTokens:
        """`tokens` by one of the further masks; for None by the loss mask."""
        if mask is None:
            return self.tokens
        return self.samples.with_mask(mask).local(*self._place)

    def has_tokens(self, mask: str | None = None) -> bool:
        """Whether this CP rank holds an active token of the loss mask, or of a further one. Waits for a device."""
        return bool(self._tokens_of(mask).num_active)

    def _add_mask(self, name: str, samples: Samples, counted: StepTotals) -> None:
        """`Plan.keep`: go on with samples that have a further mask, and with its counts over the step."""
        totals = replace(self.totals, by_mask={**self.totals.by_mask, name: counted})
        self.samples, self._plan = samples, replace(self._plan, totals=totals)
        self._reducers = {key: reducer for key, reducer in self._reducers.items() if key[-1] != name}

    def gap(self, name: str, values: Tensor) -> Tensor:
        """The largest ``|values - log_probs[name]|`` at this rank's active tokens, 0-dim; 0 without one.

        0 where the training pass runs the kernels of the forward pass before the step, without dropout. Above 1e-4 it
        warns: what was measured is of another policy than the one in training. (On a device in a launch's first step
        alone, for which the host waits.) Raises ValueError for values of another shape.
        """
        check_choice("forward pass", name, self.log_probs)
        check_same_shape(f"values and log_probs[{name!r}]", values, self.log_probs[name])
        gaps = (values.detach().float() - self.log_probs[name].float()).abs().flatten()
        gap = torch.cat([gaps.new_zeros(1), gaps[self.tokens.mask.to(gaps.device) != 0]]).max()
        if (values.is_cpu or self._plan.reads_device) and not gap <= 1e-4:
            warnings.warn(
                f"{name}: the training pass and the forward pass before it differ by up to {float(gap):.2g} at a "
                "token. Thresholds and survivors are the earlier pass's. Switch dropout off, and run the same kernels.",
                stacklevel=2,
            )
        return gap

    @property
    def _place(self) -> tuple[int, int]:
        own = self.samples.cp_group
        return (self._plan.cp_rank, self._plan.cp_size) if own is None else (own.rank(), own.size())

    @property
    def cp_rank(self) -> int:
        """This rank's place in `cp_group`."""
        return self._place[0]

    @property
    def cp_size(self) -> int:
        """Ranks that the micro-batch is cut for."""
        return self._place[1]

    @property
    def cp_group(self) -> Group | None:
        """The context-parallel group: the micro-batch's own, else the launch's."""
        return self._plan.cp_group if self.samples.cp_group is None else self.samples.cp_group

    def local(self, tensor: Tensor) -> Tensor:
        """This CP rank's part of a model input, or of anything else with a value per token.

        Args:
            tensor: [total_tokens, ...], or with the tokens in two dimensions, [1, total_tokens, ...] or
                [batch, sequence, ...], in the order of the layout's buffer.

        Returns:
            [num_local_tokens, ...], or [1, num_local_tokens, ...] or [batch, local sequence, ...], as given.

        Raises:
            ValueError: a tensor of another number of tokens.
        """
        total_tokens = self.samples.total_tokens
        if tensor.dim() < 2 or tensor.shape[0] == total_tokens:
            return self.tokens.of(tensor)
        rows, num_local = tensor.shape[0], len(self.tokens)
        of_rows = self.tokens.loss_shapes  # a cut of the whole buffer would mix rows
        if tensor.shape[:2].numel() != total_tokens or (rows, num_local // rows) not in [(1, num_local), *of_rows]:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)}: it must have a value for each of the micro-batch's "
                f"{total_tokens} tokens. Pass the whole, uncut tensor, in the order of the layout."
            )
        return self.tokens.of(tensor.flatten(0, 1)).unflatten(0, (rows, -1))

    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Literal["3-tuple"] = "3-tuple") -> Carried: ...
    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: PairForm) -> tuple[Tensor, Any]: ...
    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Literal["sum", "mean"]) -> Tensor: ...
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Form = "3-tuple") -> Any:
        """What a Megatron ``loss_func`` returns: the aggregated loss, a token count, and the report.

        Args:
            losses: this CP rank's unreduced policy losses, in the layout's order; or the terms of the loss by name,
                tensors or `Term`s, which are added up. ``{"pg": losses, "kl": Term(kl, "token_mean", coef=0.01)}``.
            metrics: further per-token values of the same shape, not differentiated; reported as their sample mean, or
                as a `Metric` says.
            form: as in `carry`.

        Reported are the loss as ``pg_loss``, or for several terms as ``loss`` and each term, without its coefficient,
        by its own name. Extremes and variances are NaN until `Plan.finish_metrics`, which `LossAggregation` calls.

        Raises:
            ValueError: losses or metrics that are not this rank's part of the layout; a metric with the name of the
                loss or of a term; no term; a term's mode or mask that nothing was counted for; metrics whose names
                differ from those of the step's first micro-batch (Megatron would miss them).
        """
        several = isinstance(losses, Mapping)
        terms = losses if isinstance(losses, Mapping) else {"pg_loss": losses}
        if not terms or (several and "loss" in terms):
            raise ValueError(
                f"a loss of the terms {list(terms)}: there must be one at least, and none named 'loss', which is their "
                'sum. Name each term, e.g. {"pg": losses, "kl": Term(kl, coef=0.01)}.'
            )
        of_step = {name: one if isinstance(one, Metric) else Metric(one) for name, one in (metrics or {}).items()}
        if clash := sorted(of_step.keys() & ({"loss", *terms} if several else terms.keys())):
            raise ValueError(
                f"a metric named {clash[0]!r}: the loss itself, or a term of it, is reported by that name. Choose "
                "another name."
            )
        summands = (
            [self._summand(name, term) for name, term in terms.items()]
            if isinstance(losses, Mapping | Term)
            else [Summand(losses, self.pg_loss)]
        )
        reducers = {name: self._reducer_of_metric(name, metric) for name, metric in of_step.items()}
        share, own, sums = sum_terms(
            summands, [(row, reducers[name]) for name, metric in of_step.items() for row in metric.rows()]
        )
        report = {"loss": share, **dict(zip(terms, own, strict=True))} if several else {"pg_loss": share}
        masked = {name: one.mask for name, one in (*terms.items(), *of_step.items()) if isinstance(one, Term | Metric)}
        self._plan.report_masks.update({name: mask for name, mask in masked.items() if mask is not None})
        rest = iter(sums)
        for name, metric in of_step.items():
            if metric.is_sum:
                report[name] = next(rest)
                continue
            report[name] = torch.full_like(share.detach(), math.nan)  # until the step is finished
            if metric.is_extreme:
                part = metric.extreme(reducers[name])
            else:
                part = torch.stack([next(rest) for _ in range(3)]).double()
            self._plan.parts.add(name, metric.kind, part)
        self._shares = {name: value.detach() for name, value in report.items()}
        return self.carry(share, None if form in ("sum", "mean") else self.report(), form=form)

    def _reducer_of_metric(self, name: str, metric: Metric) -> WeightedSum:
        if metric.over == "samples" and metric.mask is None:
            reducer = self.sample_mean
        else:
            aggregation = resolve(MODE_OF[metric.over], units=self._plan.modes.policy.units)
            reducer = self._counted_reducer(name, aggregation, metric.mask)
        reducer.check("a metric", metric.values)
        return reducer

    def _summand(self, name: str, term: Tensor | Term) -> Summand:
        """A term with the reducer of its mode and mask; those that share both share the weights."""
        term = term if isinstance(term, Term) else Term(term)
        policy = self._plan.modes.policy
        if term.mode is not None:
            aggregation = resolve(term.mode, divisor=term.divisor, units=term.units or policy.units)
        elif term.units is None and term.divisor is None:
            aggregation = self._plan.modes.terms.get(name, policy)
        else:
            raise ValueError(
                f"the term {name!r} with units or a divisor and no mode: they are a mode's. Give the term the mode too."
            )
        if not isinstance(term.coef, Real) or not math.isfinite(term.coef):
            raise ValueError(
                f"the term {name!r} with coef={term.coef!r}: it must be a finite number. 0 reports a term without "
                "training on it."
            )
        return Summand(term.values, self._counted_reducer(name, aggregation, term.mask), term.coef, name)

    def report(self, shares: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What Megatron's `pretrain` logs as the sum of shares over all ranks and micro-batches: pairs by name.

        Each is ``[share, 1 / number of shares]``: `pretrain` sums both over micro-batches and ranks, and divides.

        Args:
            shares: 0-dim, by name; by default those of the last `loss` or call of this micro-batch.

        Raises:
            ValueError: values that are not 0-dim tensors; names that differ from those of the step's first micro-batch.
        """
        shares = self._shares if shares is None else shares
        for name, value in shares.items():
            _check_scalar(name, value)
        names = self._plan.report_names
        if not names or self._plan.aligns_reports:
            names.extend(name for name in shares if name not in names)
        elif set(names) != set(shares):
            raise ValueError(
                f"a micro-batch that reports {list(shares)} after one that reported {names}: Megatron takes the names "
                "from a step's first micro-batch. Report the same names every time."
            )
        if not shares:
            return {}
        _, denominator = self._plan.constants_on(next(iter(shares.values())).device)
        halves = [half for value in shares.values() for half in (value.detach().to(denominator), denominator)]
        return dict(zip(shares, torch.stack(halves).view(-1, 2), strict=True))

    @overload
    def carry(self, share: Tensor, report: Any = None, *, form: Literal["3-tuple"] = "3-tuple") -> Carried: ...
    @overload
    def carry(self, share: Tensor, report: Any = None, *, form: PairForm) -> tuple[Tensor, Any]: ...
    @overload
    def carry(self, share: Tensor, report: Any = None, *, form: Literal["sum", "mean"]) -> Tensor: ...
    def carry(self, share: Tensor, report: Any = None, *, form: Form = "3-tuple") -> Any:
        """What a loss function returns for its share, so that the trainer's own scaling cancels.

        Args:
            share: 0-dim, connected to the graph; shares of all ranks and micro-batches add up to the step loss.
            report: whatever your trainer logs, as it is: any mapping, nested or not; ``report()`` for `pretrain`. A
                loss alone goes without it.
            form: ``3-tuple`` (loss, num_tokens, report) or ``2-tuple`` (loss, report) for Megatron's schedule; without
                it the loss alone, for a trainer that adds up the gradients of ranks, ``sum``, or averages them over DP
                and CP ranks, ``mean``; (loss, report) for the loss function of an engine that scales it before
                Megatron does: ``slime`` (and miles), ``verl``, ``nemo_rl``.

        Raises:
            ValueError: a share that is not a 0-dim tensor, without a graph, or of a micro-batch whose reducers were
                never used; a form that is not exact with per-token loss, or in a step whose cp_groups change.
        """
        _check_scalar("the loss", share)
        if not self._reducers:
            raise ValueError(
                "a share that was put together without this micro-batch's reducers: it cannot be a share of this "
                "step's loss. Reduce per-token losses with pg_loss, sample_mean or token_mean of this micro-batch."
            )
        if torch.is_grad_enabled() and not share.requires_grad:
            raise ValueError(
                "a loss without a graph: Megatron would skip the backward pass, or hang in it with pipeline stages. Do "
                "not detach the model's output."
            )
        carrier = find_carrier(form, self._plan.per_token_loss, self._plan.dynamic_cp)
        loss = share * self._plan.factor(carrier)
        if form in ("sum", "mean"):
            self.receipt = Receipt.of(loss)
            return loss
        report = {} if report is None else report
        if form != "3-tuple":
            self.receipt = Receipt.of(loss)
            return loss, report
        one, _ = self._plan.constants_on(share.device)
        num_tokens = one if carrier.num_tokens == "one" else self._local_active_tokens().to(share.device)
        self.receipt = Receipt.of(loss, num_tokens)
        return loss, num_tokens, report

    def _local_active_tokens(self) -> Tensor:
        layout = self.samples.layout
        if layout is not None and layout.replicated_over_cp and self.cp_rank > 0:
            return torch.zeros((), dtype=torch.int32)  # counted on the first of the ranks that all hold them
        return self.tokens.num_active.to(torch.int32)


def _key(aggregation: Aggregation, mask: str | None = None) -> _Key:
    return aggregation.mode, aggregation.divisor, aggregation.units, mask


def _check_scalar(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.dim() != 0:
        shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} is {shown}: it must be a 0-dim tensor. Reduce it (pg_loss or sample_mean).")
