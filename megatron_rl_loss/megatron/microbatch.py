"""A micro-batch with what it takes to reduce its losses, and the carriers that get a share past Megatron's scaling.

How Megatron scales a loss (0.19; `core/pipeline_parallel/schedules.py` `forward_step_calc_loss`,
`core/distributed/distributed_data_parallel.py`, `finalize_model_grads.py`), and how a rank's share of the step loss is
returned so that the gradient is exactly that of the sum of all shares:

| carrier | per-token loss | returned (loss, num_tokens)                     | Megatron divides the gradient by |
|---------|----------------|-------------------------------------------------|----------------------------------|
| A       | off            | share * num_microbatches * dp_cp size, 1        | num_microbatches * dp_cp size    |
| C       | on             | share * step_active_tokens, local active tokens | the sum of num_tokens over dp_cp |

Carrier C counts real tokens, so auxiliary losses that Megatron divides by them keep their scale.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from megatron_rl_loss.losses.segments import OfTokens, Per, Replicated, segment_mean, segment_sum, to_tokens
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.weights import missing_counts
from megatron_rl_loss.reduction.metrics import MODE_OF, Metric, Parts
from megatron_rl_loss.reduction.sums import WeightedSum, reducer_of
from megatron_rl_loss.reduction.terms import Term, WeighedTerm, sum_terms
from megatron_rl_loss.step.collectives import Group
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals

#: What Megatron's schedule takes from a loss function: loss, token count, report.
Carried = tuple[Tensor, Tensor, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step on this rank: what its micro-batches share."""

    aggregation: Aggregation
    totals: StepTotals
    num_microbatches: int
    cp_rank: int
    cp_size: int
    dp_cp_size: int
    per_token: bool
    cp_group: Group | None = None
    terms: Mapping[str, Aggregation] = field(default_factory=dict)
    parts: Parts = field(default_factory=Parts)
    report_keys: list[str] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)  # modes of metrics
    _constants: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def num_shares(self) -> int:
        """Shares that Megatron averages where it does not calculate per-token loss."""
        return self.num_microbatches * self.dp_cp_size

    def constants_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A token count of 1, and the denominator of a reported share; made once a step."""
        if device not in self._constants:
            one = torch.ones((), dtype=torch.int32, device=device)
            self._constants[device] = one, torch.tensor(1 / self.num_shares, dtype=torch.float32, device=device)
        return self._constants[device]


class Handed(NamedTuple):
    """A tensor that was handed out, and how often it had been changed in place by then."""

    value: Tensor
    version: int


class Microbatch:
    """A micro-batch of the user's iterator, with what it takes to reduce its losses.

    Attributes:
        data: what the user's iterator gave.
        samples: what `samples_of` said of it.
        totals: denominators of the whole step.
        handed_out: loss and token count as `loss` or `carry` returned them last, or None.
        known: by name, what a forward pass before the step gave for this rank's tokens (see `forward_pass`).
    """

    def __init__(self, data: Any, samples: Samples, step: Step) -> None:
        self.handed_out: tuple[Handed, Handed] | None = None
        self.known: dict[str, Tensor] = {}
        self._reduced = False
        self._reducers: dict[Any, WeightedSum] = {}
        self.data = data
        self.samples = samples
        self.totals = step.totals
        self._step = step

    @cached_property
    def pg_loss(self) -> WeightedSum:
        """Per-token policy loss -> this rank's share of the step loss, by the asked mode."""
        return self._reducer(self._step.aggregation, "pg")

    @cached_property
    def sample_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their sample mean: for metrics, whatever the mode."""
        self._step.uses.add("sample_mean")
        if self._step.aggregation.mode.name == "sample_mean":
            return self.pg_loss  # one vector of weights for both
        return self._reducer(resolve("sample_mean", units=self._step.aggregation.units), "sample_mean")

    @cached_property
    def token_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their token mean: for metrics, whatever the mode."""
        self._step.uses.add("token_mean")
        return self._reducer(resolve("token_mean"), "token_mean")

    def _reducer(self, aggregation: Aggregation, name: str, mask: str | None = None) -> WeightedSum:
        self._reduced = True
        local = self.tokens
        if mask is not None:
            local = self.samples.with_mask(mask).local(self._step.cp_rank, self._step.cp_size)
        reducer = reducer_of(aggregation, local, self.totals.with_mask(mask))
        reducer.name = name
        return reducer

    @cached_property
    def tokens(self) -> LocalTokens:
        """What this CP rank holds of the micro-batch."""
        return self.samples.local(self._step.cp_rank, self._step.cp_size)

    @property
    def cp_group(self) -> Group | None:
        """The context-parallel group."""
        return self._step.cp_group

    @overload
    def segment_sum(self, values: Tensor, *, per: Per = ...) -> Replicated: ...
    @overload
    def segment_sum(self, values: Sequence[Tensor], *, per: Per = ...) -> tuple[Replicated, ...]: ...
    def segment_sum(self, values: Tensor | Sequence[Tensor], *, per: Per = "sample") -> Any:
        """`segments.segment_sum` over this micro-batch's samples or rollouts, whole ones: one number a sample."""
        return segment_sum(values, self.tokens, self.cp_group, per=per, totals=self.totals)

    @overload
    def segment_mean(self, values: Tensor, *, per: Per = ...) -> Replicated: ...
    @overload
    def segment_mean(self, values: Sequence[Tensor], *, per: Per = ...) -> tuple[Replicated, ...]: ...
    def segment_mean(self, values: Tensor | Sequence[Tensor], *, per: Per = "sample") -> Any:
        """`segments.segment_mean` over this micro-batch's samples or rollouts, whole ones: one number a sample."""
        return segment_mean(values, self.tokens, self.cp_group, per=per, totals=self.totals)

    def to_tokens(self, of_samples: Tensor) -> OfTokens:
        """A number a sample -> its sample's number at every token that this rank holds, [num_local_tokens]."""
        return to_tokens(of_samples, self.tokens)

    def local(self, tensor: Tensor) -> Tensor:
        """This CP rank's part of a model input or of anything else that has a value a token.

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
        of_rows = self.samples.loss_shapes(num_local, self._step.cp_size)  # a cut of the whole buffer would mix rows
        if tensor.shape[:2].numel() != total_tokens or (rows, num_local // rows) not in [(1, num_local), *of_rows]:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)}: it must have a value for each of the micro-batch's "
                f"{total_tokens} tokens. Pass the whole, uncut tensor, in the order of the layout."
            )
        return self.tokens.of(tensor.flatten(0, 1)).unflatten(0, (rows, -1))

    def loss(
        self, losses: Tensor | Mapping[str, Tensor | Term], metrics: Mapping[str, Tensor | Metric] | None = None
    ) -> Carried:
        """What a Megatron ``loss_func`` returns: the aggregated loss, a token count, and the report.

        Args:
            losses: this CP rank's unreduced policy losses, in the layout's order; or the terms of the loss by name,
                tensors or `Term`s, which are added up. ``{"pg": losses, "kl": Term(kl, "token_mean", coef=0.01)}``.
            metrics: further per-token values of the same shape, not differentiated; reported as their sample mean, or
                as a `Metric` says.

        Reported are the loss as ``pg_loss``, or for several terms as ``loss`` and each term, without its coefficient,
        by its own name. Extremes and variances are NaN unless `LossAggregation.wrap_schedule` ran the schedule.

        Raises:
            ValueError: losses or metrics that are not this rank's part of the layout; a metric with the name of the
                loss or of a term; no term; a term's mode or mask that nothing was counted for; metrics whose names
                differ from those of the step's first micro-batch (Megatron would miss them).
        """
        metrics = metrics or {}
        terms = losses if isinstance(losses, Mapping) else {"pg_loss": losses}
        several = isinstance(losses, Mapping)
        taken = {"loss", *terms} if several else {"pg_loss"}
        if clash := sorted(taken & set(metrics)):
            raise ValueError(
                f"a metric named {clash[0]!r}: the loss itself, or a term of it, is reported by that name. Choose "
                "another name."
            )
        plain = [values for values in metrics.values() if not isinstance(values, Metric)]
        if not isinstance(losses, Mapping | Term) and len(plain) == len(metrics):
            metric_sum = self.sample_mean if metrics else None
            share, sums = self.pg_loss.with_metrics(losses, plain, metric_sum)
            return self.carry(share, {"pg_loss": share, **dict(zip(metrics, sums, strict=True))})
        if not terms or (several and "loss" in terms):
            raise ValueError(
                f"a loss of the terms {list(terms)}: there must be one at least, and none named 'loss', which is their "
                'sum. Name each term, e.g. {"pg": losses, "kl": Term(kl, coef=0.01)}.'
            )
        weighed = [self._weighed(name, term) for name, term in terms.items()]
        asked = {name: one if isinstance(one, Metric) else Metric(one) for name, one in metrics.items()}
        reducers = {name: self._reducer_of_metric(name, metric) for name, metric in asked.items()}
        rows = [(row, reducers[name]) for name, metric in asked.items() for row in metric.rows()]
        share, own, sums = sum_terms(weighed, rows)
        report = {"loss": share, **dict(zip(terms, own, strict=True))} if several else {"pg_loss": share}
        found = iter(sums)
        for name, metric in asked.items():
            if metric.is_sum:
                report[name] = next(found)
                continue
            report[name] = torch.full_like(share.detach(), math.nan)  # until the step is finished
            if metric.is_extreme:
                part = metric.extreme(reducers[name])
            else:
                part = torch.stack([next(found) for _ in range(3)]).double()
            self._step.parts.add(name, metric.kind, part)
        return self.carry(share, report)

    def _reducer_of_metric(self, name: str, metric: Metric) -> WeightedSum:
        if metric.over == "samples" and metric.mask is None:
            reducer = self.sample_mean
        else:
            aggregation = resolve(MODE_OF[metric.over], units=self._step.aggregation.units)
            reducer = self._reducer_by(name, aggregation, metric.mask)
        reducer.check("a metric", metric.values)
        return reducer

    def _weighed(self, name: str, term: Tensor | Term) -> WeighedTerm:
        """A term with the reducer of its mode and mask; those that share both share the weights."""
        term = term if isinstance(term, Term) else Term(term)
        policy = self._step.aggregation
        if term.mode is not None:
            aggregation = resolve(term.mode, divisor=term.divisor, units=term.units or policy.units)
        elif term.units is None and term.divisor is None:
            aggregation = self._step.terms.get(name, policy)
        else:
            raise ValueError(
                f"the term {name!r} with units or a divisor and no mode: they are a mode's. Give the term the mode too."
            )
        if not math.isfinite(term.coef):
            raise ValueError(
                f"the term {name!r} with coef={term.coef!r}: it must be finite. Pass a number; 0 reports a term "
                "without training on it."
            )
        return WeighedTerm(name, term.values, self._reducer_by(name, aggregation, term.mask), term.coef)

    def _reducer_by(self, name: str, aggregation: Aggregation, mask: str | None) -> WeightedSum:
        """Made once for each mode and mask."""
        key = aggregation.mode, aggregation.divisor, aggregation.units, mask
        if key not in self._reducers:
            self._reducers[key] = self._made_reducer(name, aggregation, mask)
        return self._reducers[key]

    def _made_reducer(self, name: str, aggregation: Aggregation, mask: str | None) -> WeightedSum:
        if mask is None and _same(aggregation, self._step.aggregation):
            return self.pg_loss
        totals = self.totals.with_mask(mask)
        with_rollout_ids = self.samples.rollout_ids is not None
        if missing := missing_counts(aggregation, totals, with_rollout_ids=with_rollout_ids):
            raise ValueError(
                f"{name!r} by {aggregation.mode.name} and totals without {', '.join(missing)}: what a term or a metric "
                "needs is counted with the step, before its first micro-batch. Declare its mode: LossAggregation(..., "
                f"terms={{{name!r}: {aggregation.mode.name!r}}}), or its flag."
            )
        return self._reducer(aggregation, name, mask)

    def carry(self, share: Tensor, report: Mapping[str, Tensor]) -> Carried:
        """Hand Megatron a share of the step loss that was put together by hand (a sum of `pg_loss` and a KL term, say).

        Args:
            share: 0-dim, connected to the graph; shares of all ranks and micro-batches add up to the step loss.
            report: shares by name; Megatron logs each one's sum over all ranks and micro-batches.

        Raises:
            ValueError: values that are not 0-dim tensors, a share without a graph, or of a micro-batch whose reducers
                were never used; names that differ from those of the step's first micro-batch.
        """
        step = self._step
        _check_shares({"the loss": share, **report})
        if not self._reduced:
            raise ValueError(
                "a share that was put together without this micro-batch's reducers: it cannot be a share of this "
                "step's loss. Reduce per-token losses with pg_loss, sample_mean or token_mean of this micro-batch."
            )
        if torch.is_grad_enabled() and not share.requires_grad:
            raise ValueError(
                "a loss without a graph: Megatron would skip the backward pass, or hang in it with pipeline stages. Do "
                "not detach the model's output."
            )
        if not step.report_keys:
            step.report_keys.extend(report)
        elif set(step.report_keys) != set(report):
            raise ValueError(
                f"a micro-batch that reports {list(report)} after one that reported {step.report_keys}: Megatron takes "
                "the names from a step's first micro-batch. Report the same names every time."
            )
        # Megatron sums [numerator, denominator] over micro-batches and dp_cp ranks, then divides: here by 1.
        one, denominator = step.constants_on(share.device)
        halves = [half for value in report.values() for half in (value.detach().to(denominator), denominator)]
        pairs = dict(zip(report, torch.stack(halves).view(-1, 2), strict=True)) if report else {}
        loss, num_tokens = self._carried(share, one)
        self.handed_out = Handed(loss, loss._version), Handed(num_tokens, num_tokens._version)
        return loss, num_tokens, pairs

    def _carried(self, share: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the token count of the carrier: A, or C with per-token loss."""
        step = self._step
        if not step.per_token:
            return share * step.num_shares, one
        if step.totals.step_active_tokens is None:
            raise ValueError(
                "totals without step_active_tokens: per-token loss needs it. Give the count of the whole step."
            )
        return share * step.totals.step_active_tokens, self._local_active_tokens().to(share.device)

    def _local_active_tokens(self) -> Tensor:
        layout = self.samples.layout
        if layout is not None and layout.replicated_over_cp and self._step.cp_rank > 0:
            return torch.zeros((), dtype=torch.int32)  # counted on the first of the ranks that all hold them
        return self.tokens.num_active.to(torch.int32)


def _same(a: Aggregation, b: Aggregation) -> bool:
    return (a.mode, a.divisor, a.units) == (b.mode, b.divisor, b.units)


def _check_shares(shares: Mapping[str, Tensor]) -> None:
    for name, value in shares.items():
        if not isinstance(value, Tensor) or value.dim() != 0:
            shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} is {shown}: it must be a 0-dim tensor. Reduce it (pg_loss or sample_mean).")
