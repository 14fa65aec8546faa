"""A micro-batch of a step: reduces its losses, and returns their sum in the form that the trainer takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation, weigh
from megatron_rl_loss.core.carriers import Receipt, find_carrier, find_form
from megatron_rl_loss.core.collectives import Group, rank_in, size_of
from megatron_rl_loss.core.counting import StepTotals, UnitCounting
from megatron_rl_loss.core.errors import check_mapping, is_number
from megatron_rl_loss.core.metrics import Metric, Note, aggregation_over
from megatron_rl_loss.core.record import PlanUse, StepRecord
from megatron_rl_loss.core.reducers import Summand, Term, WeightedSum, sum_terms
from megatron_rl_loss.core.samples import LocalTokens, Samples, check_values
from megatron_rl_loss.core.taps import observed_taps
from megatron_rl_loss.core.transfers import on_device, to_device

#: Policy losses, or the terms of the loss by name; metrics by name.
Losses: TypeAlias = "Tensor | Term | Summed | Mapping[str, Tensor | Term]"
Metrics = Mapping[str, Tensor | Metric] | None


@dataclass(frozen=True)
class Summed:
    """This rank's share of the policy loss, summed in an output head, and the losses; made by `Microbatch.summed`.

    Attributes:
        share: 0-dim, connected to the graph.
        values: the losses, as `Microbatch.loss` takes them; not differentiated.
    """

    share: Tensor
    values: Tensor


class _Key(NamedTuple):
    """What reducers of a micro-batch differ by."""

    mode: str
    function: int  # by its identity: a callable object need not be hashable, and the reducer keeps it
    divisor: float | None
    units: UnitCounting
    mask: str | None


class Microbatch:
    """A micro-batch of a `Plan`, which reduces its losses.

    Attributes:
        samples: its masks, ids and layout.
        data: the user's own batch, where `LossAggregation` took it from an iterator; freed after the step.
        receipt: the `Receipt` of the last `loss`, or None.
        log_probs: by name, the values of a forward pass before the step for this rank's tokens (see `ForwardPass`).
        cp_group: the context-parallel group: the micro-batch's own, else the launch's.
        cp_rank, cp_size: this rank's place among the ranks that the micro-batch is cut for.
        kept: names of masks that `keep_tokens` added.
    """

    def __init__(self, samples: Samples, number: int, record: StepRecord) -> None:
        self.samples = samples
        self.data: Any = None
        self.receipt: Receipt | None = None
        self.log_probs: dict[str, Tensor] = {}
        self.cp_group: Group | None = record.groups.cp_group if samples.cp_group is None else samples.cp_group
        self.cp_rank, self.cp_size = rank_in(self.cp_group), size_of(self.cp_group)
        self._number, self._record = number, record
        self._tokens: dict[str | None, LocalTokens] = {}
        self._reducers: dict[_Key, WeightedSum] = {}
        self.kept = set[str]()

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(
            f"microbatch[{key!r}]: a Microbatch is not your batch. Write microbatch = next_microbatch(data_iterator), "
            "then batch = microbatch.data."
        )

    @property
    def plan(self) -> PlanUse:
        """What became of the plan that it is of."""
        return self._record.use

    @property
    def totals(self) -> StepTotals:
        """Denominators of the whole step."""
        return self._record.totals

    @property
    def tokens(self) -> LocalTokens:
        """The tokens of the micro-batch that this CP rank holds."""
        return self.tokens_of(None)

    def tokens_of(self, mask: str | None) -> LocalTokens:
        """`tokens` by one of the further masks; for None by the loss mask. To look at them is not to train on them."""
        if mask not in self._tokens:
            self._tokens[mask] = self.samples.with_mask(mask).local(self.cp_rank, self.cp_size)
        return self._tokens[mask]

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
        return self.tokens.of(tensor)

    @cached_property
    def mask(self) -> Tensor:
        """This CP rank's part of the loss mask, shaped as losses: float32 [num_local_tokens].

        With `ZigzagBSHD` [batch, local sequence]. It lies on the device of the plan's model; without one on the host.
        """
        mask, layout = self.tokens.mask.astype(np.float32), self.samples.layout
        shaped = mask if layout is None else mask.reshape(layout.rows(len(mask)))
        with torch.inference_mode(False):  # it serves in training too
            return on_device(shaped, self._record.trainer.device)

    def check_tokens(self, tokens: Tensor) -> None:
        """Compare the model's local tokens with the plan's cut of ``Samples(tokens=...)``: the layouts must agree.

        A `PrefixTree` knows the tokens of its slots, and takes no ``tokens=`` for this.
        A difference raises ValueError: at once on the host; of tokens on a device in `Plan.finish`, since nothing is
        read back before.
        """
        layout = self.samples.layout
        known = None if layout is None else layout.model_tokens(self.cp_rank, self.cp_size)
        if known is None and self.samples.tokens is None:
            raise ValueError(
                "check_tokens of Samples without tokens: there is nothing to compare. Pass Samples(..., tokens=...)."
            )
        if not isinstance(tokens, Tensor):
            raise TypeError(
                f"check_tokens of a {type(tokens).__name__}: it must be the tensor that the model received. Pass the "
                "model's input ids."
            )
        if known is None:
            cut = self.local(to_device(torch.as_tensor(self.samples.tokens), tokens.device).reshape(-1))
        else:
            cut = on_device(known, tokens.device)
        if cut.numel() != tokens.numel():
            raise ValueError(
                f"{tokens.numel()} local tokens: this rank's part of the layout is {cut.numel()}. Cut the model's "
                "input as the layout says, or change the layout."
            )
        differ = (cut != tokens.reshape(-1)).sum()
        self._record.wrong_tokens.append(differ)
        if differ.is_cpu:
            self._record.check_tokens()

    # --- reducers

    @property
    def weights(self) -> Tensor:
        """The weight of each token that this rank holds in the step loss, float32 [num_local_tokens]; a copy."""
        return self._policy.weights.clone()  # a change in place would be in all later shares

    def weights_on(self, device: torch.device) -> Tensor:
        """`weights` on a device, moved there once. Not to be changed."""
        return self._policy.weights_on(device)

    @cached_property
    def _policy(self) -> WeightedSum:
        """Per-token policy loss -> this rank's share of the step loss, by the mode of the step."""
        return self._reducer("pg", self._record.modes.policy)

    def _reducer(self, name: str, aggregation: Aggregation, mask: str | None = None) -> WeightedSum:
        """The reducer of a mode and mask, made once; that of the policy loss is always named pg."""
        key = _key(aggregation, mask)
        self.plan.is_used = True
        if key not in self._reducers:
            try:
                local = self.tokens_of(mask)
                self._reducers[key] = WeightedSum(
                    partial(weigh, aggregation, local, self.totals.with_mask(mask)),
                    local,
                    aggregation,
                    name="pg" if key == _key(self._record.modes.policy) else name,
                    number=self._number,
                    mask=mask,
                    plan=self._record.use,
                )
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error
        return self._reducers[key]

    # --- what a loss function returns

    def loss(self, losses: Losses, metrics: Metrics = None, *, form: str | None = None) -> Any:
        """The aggregated loss, as the trainer of the plan takes it.

        In a loop of your own a tensor, whose ``backward()`` you call. Of a plan that has a Megatron model what a
        ``loss_func`` returns to the schedule: (loss, num_tokens, report).

        Args:
            losses: this CP rank's unreduced policy losses, in the layout's order; or the terms of the loss by name,
                tensors or `Term`s, which are added up: ``{"pg": losses, "kl": Term(kl, "token_mean", coef=0.01)}``.
                Or what the model returned with an output head that sums (`Summed`).
            metrics: further per-token values of the same shape, not differentiated; reported as their mean over the
                samples that have an active token, or as a `Metric` says.
            form: another return value: ``2-tuple`` (loss, report) for Megatron's schedule; ``slime`` (and miles),
                ``verl``, ``nemo_rl`` (loss, report) for an engine that scales the loss before Megatron does.

        Reported are the loss as ``pg_loss``, or for several terms as ``loss`` and each term, without its coefficient,
        by its own name. All are NaN until `Plan.finish`, which `LossAggregation` calls after the schedule.

        Raises:
            ValueError: losses or metrics that are not this rank's part of the layout; losses without a graph in
                training; a metric with the name of the loss or of a term; no term; a term's mode or mask that nothing
                was counted for; a micro-batch that was trained on before (`Plan.reset`); a form that is not exact with
                per-token loss, or in a step whose cp_groups change; another form than that of the step's other
                micro-batches.
        """
        check_mapping("metrics", metrics or {}, 'Pass {"entropy": entropies}')
        has_names = isinstance(losses, Mapping)
        if has_names:
            check_mapping("losses", losses, 'Pass {"pg": losses, "kl": Term(kl, coef=0.01)}')
        terms = losses if isinstance(losses, Mapping) else {"pg_loss": losses}
        if not terms or (has_names and "loss" in terms):
            raise ValueError(
                f"a loss of the terms {list(terms)}: there must be at least one, and none named 'loss', the name of "
                'the sum. Name each term, e.g. {"pg": losses, "kl": Term(kl, coef=0.01)}.'
            )
        step_metrics = {
            name: metric if isinstance(metric, Metric) else Metric(metric) for name, metric in (metrics or {}).items()
        }
        if clash := sorted(step_metrics.keys() & ({"loss", *terms} if has_names else terms.keys())):
            raise ValueError(
                f"a metric named {clash[0]!r}: the loss or one of its terms is reported by that name. Choose another "
                "name."
            )
        reducers = {name: self._reducer_of_metric(name, metric) for name, metric in step_metrics.items()}
        if isinstance(losses, Summed):
            share, parts = losses.share, [losses.share.detach()]
            summands = [Summand(losses.values, self._policy)]
        else:
            summands = [self._summand(name, term, has_names) for name, term in terms.items()]
            share, parts = sum_terms(summands)
        if not share.is_cpu or isinstance(losses, Summed):  # else looked at by the sum
            for summand, part in zip(summands, parts, strict=True):
                self._record.watched.append((summand.what, summand.values.detach(), part, summand.reducer))
        notes = {"loss": Note("mean", share.detach()[None])} if has_names else {}
        for name, summand, part in zip(terms, summands, parts, strict=True):
            # A step has one mode and one coefficient of each term.
            by = f"{summand.reducer.by}, coef {summand.coef!r}"
            notes[name] = Note("mean", (part if has_names else share.detach())[None], summand.reducer.mask, by)
        rows = {name: metric.rows() for name, metric in step_metrics.items()}
        for reducer in dict.fromkeys(reducers.values()):
            names = [name for name in step_metrics if reducers[name] is reducer]
            sums = iter(reducer.sums([row for name in names for row in rows[name]]))
            notes |= {name: step_metrics[name].note([next(sums) for _ in rows[name]], reducer) for name in names}
        return self._returned(share, self._note(notes), form)

    def summed(self, share: Tensor, per_token_loss: Tensor) -> Summed:
        """What `loss` takes of an output head, which summed its losses [num_local_tokens] by `weights` itself."""
        share = self._policy.scaled(share)
        self._policy.hook(share, unseen="summed in the output head")
        return Summed(share, per_token_loss)

    def _reducer_of_metric(self, name: str, metric: Metric) -> WeightedSum:
        loss_units, totals = self._record.modes.policy.units, self.totals.with_mask(metric.mask)
        reducer = self._reducer(name, aggregation_over(metric.over, loss_units, totals), metric.mask)
        check_values(f"the metric {name!r}", metric.values, self.tokens)
        return reducer

    def _summand(self, name: str, term: Any, has_names: bool) -> Summand:
        """A term with the reducer of its mode and mask; those that share both share the weights."""
        if not has_names and not isinstance(term, Term):
            return Summand(term, self._policy)
        term = term if isinstance(term, Term) else Term(term)
        if not is_number(term.coef) or not abs(term.coef) < 1e30:
            raise ValueError(
                f"the term {name!r} with coef={term.coef!r}: it must be a finite number, below 1e30. Pass 0 to "
                "report a term without training on it."
            )
        aggregation = self._record.modes.term_aggregation(name, term.mode, divisor=term.divisor, units=term.units)
        return Summand(term.values, self._reducer(name, aggregation, term.mask), float(term.coef), name)

    def _note(self, notes: Mapping[str, Note]) -> dict[str, Tensor]:
        """Note parts of the step's values, in the place of earlier ones; a report that `Plan.finish` fills in."""
        self._record.notes[self._number] = dict(notes)
        return {name: self._record.placeholder(note.part.device) for name, note in notes.items()}

    def _returned(self, share: Tensor, report: dict[str, Tensor], form: str | None) -> Any:
        """What the trainer takes, so that its own scaling cancels."""
        record = self._record
        row = record.trainer.form if form is None else find_form(form)
        carrier = find_carrier(row, record.trainer.per_token_loss, record.dynamic_cp)
        if torch.is_grad_enabled():
            if not share.requires_grad:
                raise ValueError(
                    "a loss without a graph: training needs its gradient, and pipeline stages would hang without one. "
                    "Do not detach the model's output; evaluate under torch.no_grad()."
                )
            record.check_fresh(self._number)
            record.take_form(row)
            record.is_carried[self._number] = True
            record.use.was_compiled |= torch.compiler.is_compiling()
        tensors = {"loss": share * record.factor(carrier)}
        for part in row.counts:
            count = carrier.counts[part](self.tokens, self.cp_rank) if part in carrier.counts else 1
            tensors[part] = record.constant(count, share.device)
        self.receipt = Receipt.of(row, tensors, self._record.notes[self._number])
        if (taps := observed_taps()) is not None:
            taps.receipt = self.receipt
        return row.assemble({**tensors, "report": report})

    def add_up(self, name: str, *numbers: float) -> list[float]:
        """The sums of these numbers over the micro-batches of this rank that gave some by that name."""
        before = self._record.counted.get(name, [0.0] * len(numbers))
        self._record.counted[name] = [a + b for a, b in zip(before, numbers, strict=True)]
        return self._record.counted[name]

    def keep(self, name: str, samples: Samples) -> None:
        """Go on with samples that have a further mask of that name, in the place of an earlier one."""
        self.samples = samples
        self.kept.add(name)
        self._tokens.clear()
        self._reducers = {key: reducer for key, reducer in self._reducers.items() if key.mask != name}


def _key(aggregation: Aggregation, mask: str | None = None) -> _Key:
    mode = aggregation.mode
    return _Key(mode.name, id(mode.function), aggregation.divisor, aggregation.units, mask)
