"""A micro-batch of a step: reduces its losses, and returns their sum in the form that the trainer takes."""

import math
import warnings
from collections.abc import Mapping
from copy import copy
from functools import cached_property, partial
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from megatron_rl_loss.errors import check_mapping, is_number
from megatron_rl_loss.modes.names import Aggregation, resolve
from megatron_rl_loss.modes.weights import weigh
from megatron_rl_loss.plan.carriers import Form, PairForm, find_carrier
from megatron_rl_loss.plan.facts import StepFacts
from megatron_rl_loss.plan.returned import Receipt
from megatron_rl_loss.reduction.metrics import Metric, Note, mode_over
from megatron_rl_loss.reduction.sums import Summand, Term, WeightedSum, sum_terms
from megatron_rl_loss.step.collectives import Group, rank_in, size_of
from megatron_rl_loss.step.masks import on_device
from megatron_rl_loss.step.samples import LocalTokens, Samples
from megatron_rl_loss.step.totals import StepTotals
from megatron_rl_loss.step.units import UnitCounting
from megatron_rl_loss.step.values import check_values

#: Policy losses, or the terms of the loss by name; metrics by name.
Losses = Tensor | Term | Mapping[str, Tensor | Term]
Metrics = Mapping[str, Tensor | Metric] | None
#: What Megatron's schedule takes from a loss function: loss, token count, report.
Carried = tuple[Tensor, Tensor, Any]
_Key = tuple[str, int, float | None, UnitCounting, str | None]


class Microbatch:
    """A micro-batch of a `Plan`, which reduces its losses.

    Attributes:
        samples: its masks, ids and layout.
        data: the user's own batch, where `LossAggregation` took it from an iterator; freed after the step.
        receipt: the `Receipt` of the last `loss` or `carry`, or None.
        log_probs: by name, the values of a forward pass before the step for this rank's tokens (see `ForwardPass`).
        cp_group: the context-parallel group: the micro-batch's own, else the launch's.
        cp_rank, cp_size: this rank's place among the ranks that the micro-batch is cut for.
        kept: names of masks that `Plan.keep` added.
    """

    def __init__(self, samples: Samples, number: int, facts: StepFacts) -> None:
        self.samples = samples
        self.data: Any = None
        self.receipt: Receipt | None = None
        self.log_probs: dict[str, Tensor] = {}
        self.cp_group: Group | None = facts.groups.cp_group if samples.cp_group is None else samples.cp_group
        self.cp_rank, self.cp_size = rank_in(self.cp_group), size_of(self.cp_group)
        self._number, self._facts = number, facts
        self._reducers: dict[_Key, WeightedSum] = {}
        self.kept = set[str]()

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(
            f"microbatch[{key!r}]: a Microbatch is not your batch. Write microbatch = next_microbatch(data_iterator), "
            "then batch = microbatch.data."
        )

    @property
    def totals(self) -> StepTotals:
        """Denominators of the whole step."""
        return self._facts.totals

    @cached_property
    def tokens(self) -> LocalTokens:
        """The tokens of the micro-batch that this CP rank holds."""
        return self.samples.local(self.cp_rank, self.cp_size)

    def tokens_of(self, mask: str | None) -> LocalTokens:
        """`tokens` by one of the further masks; for None by the loss mask."""
        return self.tokens if mask is None else self.samples.with_mask(mask).local(self.cp_rank, self.cp_size)

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
        if tensor.dim() >= 2 and tensor.shape[0] != total_tokens and tensor.shape[:2].numel() == total_tokens:
            rows, num_local = tensor.shape[0], len(self.tokens)
            if (rows, num_local // rows) in [(1, num_local), *self.tokens.loss_shapes]:  # other cuts would mix rows
                return self.tokens.of(tensor.flatten(0, 1)).unflatten(0, (rows, -1))
        return self.tokens.of(tensor)  # refuses another number of tokens

    def check_tokens(self, tokens: Tensor) -> None:
        """Compare the model's local tokens with the plan's cut of ``Samples(tokens=...)``: the layouts must agree.

        A difference raises ValueError: at once on the host; of tokens on a device in `Plan.finish`, since nothing is
        read back before.
        """
        if self.samples.tokens is None:
            raise ValueError(
                "check_tokens of Samples without tokens: there is nothing to compare. Pass Samples(..., tokens=...)."
            )
        whole = torch.as_tensor(self.samples.tokens, device=tokens.device).reshape(-1)
        cut = self.local(whole)
        if cut.numel() != tokens.numel():
            raise ValueError(
                f"{tokens.numel()} local tokens: this rank's part of the layout is {cut.numel()}. Cut the model's "
                "input as the layout says, or change the layout."
            )
        differ = (cut != tokens.reshape(-1)).sum()
        self._facts.wrong_tokens.append(differ)
        if differ.is_cpu:
            self._facts.check_tokens()

    # --- reducers

    @property
    def weights(self) -> Tensor:
        """The weight of each token that this rank holds in the step loss, float32 [num_local_tokens]."""
        return self.pg_loss.weights

    def __call__(self, per_token_loss: Tensor) -> Tensor:
        """`pg_loss`, whose share is noted as the step's ``pg_loss``.

        Raises ValueError for a micro-batch that was trained on before (`Plan.restart`).
        """
        if torch.is_grad_enabled():
            self._facts.check_fresh(self._number)
        share = self.pg_loss(per_token_loss)
        if share.requires_grad and not torch.compiler.is_compiling():  # a loop may train on it without `carry`
            share.register_hook(partial(self._facts.mark_carried, self._number))
        self._note({"pg_loss": Note("mean", share.detach()[None], by=self.pg_loss.by)})
        return share

    @cached_property
    def pg_loss(self) -> WeightedSum:
        """Per-token policy loss -> this rank's share of the step loss, by the mode of the step."""
        return self._reducer("pg", self._facts.modes.policy)

    @cached_property
    def sample_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their sample mean: for metrics, in any mode."""
        return self._beside("sample_mean", resolve("sample_mean", units=self._facts.modes.policy.units))

    @cached_property
    def token_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their token mean: for metrics, in any mode."""
        return self._beside("token_mean", resolve("token_mean"))

    def _beside(self, name: str, aggregation: Aggregation) -> WeightedSum:
        """A reducer other than `pg_loss`, even by the same mode: an audit tells their values apart."""
        reducer = copy(self._reducer(name, aggregation))
        reducer.name = name
        self._reducers[(f"beside {name}", *_key(aggregation)[1:])] = reducer
        return reducer

    def _reducer(self, name: str, aggregation: Aggregation, mask: str | None = None) -> WeightedSum:
        """The reducer of a mode and mask, made once; that of the policy loss is always named pg."""
        key = _key(aggregation, mask)
        if key not in self._reducers:
            try:
                local = self.tokens_of(mask)
                weights = weigh(aggregation, local, self.totals.with_mask(mask))
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error
            self._reducers[key] = WeightedSum(weights, local, aggregation)
            self._reducers[key].name = "pg" if key == _key(self._facts.modes.policy) else name
        return self._reducers[key]

    # --- what a loss function returns

    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Literal["3-tuple"] = "3-tuple") -> Carried: ...
    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: PairForm) -> tuple[Tensor, Any]: ...
    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Literal["sum", "mean"]) -> Tensor: ...
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Form = "3-tuple") -> Any:
        """The return value of a Megatron ``loss_func``: the aggregated loss, a token count, and the report.

        Args:
            losses: this CP rank's unreduced policy losses, in the layout's order; or the terms of the loss by name,
                tensors or `Term`s, which are added up. ``{"pg": losses, "kl": Term(kl, "token_mean", coef=0.01)}``.
            metrics: further per-token values of the same shape, not differentiated; reported as their sample mean, or
                as a `Metric` says.
            form: as in `carry`.

        Reported are the loss as ``pg_loss``, or for several terms as ``loss`` and each term, without its coefficient,
        by its own name. All are NaN until `Plan.finish`, which `LossAggregation` calls after the schedule.

        Raises:
            ValueError: losses or metrics that are not this rank's part of the layout; a metric with the name of the
                loss or of a term; no term; a term's mode or mask that nothing was counted for.
        """
        check_mapping("metrics", metrics or {}, 'Pass {"entropy": entropies}')
        several = isinstance(losses, Mapping)
        terms = losses if isinstance(losses, Mapping) else {"pg_loss": losses}
        if not terms or (several and "loss" in terms):
            raise ValueError(
                f"a loss of the terms {list(terms)}: there must be one at least, and none named 'loss', the name of "
                'the sum. Name each term, e.g. {"pg": losses, "kl": Term(kl, coef=0.01)}.'
            )
        of_step = {name: one if isinstance(one, Metric) else Metric(one) for name, one in (metrics or {}).items()}
        if clash := sorted(of_step.keys() & ({"loss", *terms} if several else terms.keys())):
            raise ValueError(
                f"a metric named {clash[0]!r}: the loss or one of its terms is reported by that name. Choose another "
                "name."
            )
        if isinstance(losses, Mapping | Term):
            summands = [self._summand(name, term) for name, term in terms.items()]
        else:
            summands = [Summand(losses, self.pg_loss)]
        reducers = {name: self._reducer_of_metric(name, metric) for name, metric in of_step.items()}
        rows = {name: metric.rows() for name, metric in of_step.items()}
        share, own, sums = sum_terms(summands, [(row, reducers[name]) for name in rows for row in rows[name]])
        if not share.is_cpu:
            for one, total in zip(summands, own, strict=True):
                self._facts.watched.append((one.what, one.values.detach(), total, one.reducer))
        notes = {"loss": Note("mean", share.detach()[None])} if several else {}
        for (name, term), summand, part in zip(terms.items(), summands, own if several else [share], strict=True):
            mask = term.mask if isinstance(term, Term) else None
            notes[name] = Note("mean", part.detach()[None], mask, summand.reducer.by)
        rest = iter(sums)
        for name, metric in of_step.items():
            notes[name] = metric.note([next(rest) for _ in rows[name]], reducers[name])
        return self.carry(share, self._note(notes), form=form)

    def folded(self, share: Tensor, per_token_loss: Tensor) -> Tensor:
        """A share that was summed by `weights` elsewhere, from losses [num_local_tokens], as `pg_loss` makes it."""
        reducer, scale = self.pg_loss, self.pg_loss.gradient_scale
        reducer.num_uses += torch.is_grad_enabled()
        self._facts.watched.append(("per_token_loss", per_token_loss.detach(), share.detach(), reducer))
        return share if scale == 1 else share + (scale - 1) * (share - share.detach())

    def _reducer_of_metric(self, name: str, metric: Metric) -> WeightedSum:
        aggregation = resolve(mode_over(metric.over), units=self._facts.modes.policy.units)
        reducer = self._reducer(name, aggregation, metric.mask)
        check_values(f"the metric {name!r}", metric.values, self.tokens)
        return reducer

    def _summand(self, name: str, term: Tensor | Term) -> Summand:
        """A term with the reducer of its mode and mask; those that share both share the weights."""
        term = term if isinstance(term, Term) else Term(term)
        if not is_number(term.coef) or not math.isfinite(term.coef):
            raise ValueError(
                f"the term {name!r} with coef={term.coef!r}: it must be a finite number. Pass 0 to report a term "
                "without training on it."
            )
        aggregation = self._facts.modes.of_term(name, term.mode, divisor=term.divisor, units=term.units)
        return Summand(term.values, self._reducer(name, aggregation, term.mask), term.coef, name)

    def _note(self, notes: Mapping[str, Note]) -> dict[str, Tensor]:
        """Note parts of the step's values, in the place of earlier ones; a report that `Plan.finish` fills in."""
        self._facts.notes[self._number] = dict(notes)
        return {name: self._facts.constant(math.nan, note.part.device) for name, note in notes.items()}

    def report(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A report for `carry`, of shares that add up to the step's values: NaN until `Plan.finish` fills them in.

        Args:
            shares: 0-dim, by name, each from a reducer of this micro-batch.

        Raises:
            ValueError: values that are not 0-dim tensors, or that lie on several devices.
        """
        for name, value in shares.items():
            _check_scalar(name, value)
        if len(devices := {str(value.device) for value in shares.values()}) > 1:
            raise ValueError(f"shares on {sorted(devices)}: shares are reduced together. Move them to one device.")
        return self._note({name: Note("mean", value.detach()[None]) for name, value in shares.items()})

    @overload
    def carry(self, share: Tensor, report: Any = None, *, form: Literal["3-tuple"] = "3-tuple") -> Carried: ...
    @overload
    def carry(self, share: Tensor, report: Any = None, *, form: PairForm) -> tuple[Tensor, Any]: ...
    @overload
    def carry(self, share: Tensor, report: Any = None, *, form: Literal["sum", "mean"]) -> Tensor: ...
    def carry(self, share: Tensor, report: Any = None, *, form: Form = "3-tuple") -> Any:
        """The return value of a loss function for its share: the trainer's own scaling cancels.

        Args:
            share: 0-dim, connected to the graph; shares of all ranks and micro-batches add up to the step loss.
            report: any mapping that your trainer logs, or ``report(...)``; unused with ``sum`` and ``mean``.
            form: ``3-tuple`` (loss, num_tokens, report) or ``2-tuple`` (loss, report) for Megatron's schedule. The loss
                alone for a trainer without that schedule: ``sum`` where gradients of ranks are added, ``mean`` where
                they are averaged over DP and CP ranks. (loss, report) for an engine that scales the loss before
                Megatron does: ``slime`` (and miles), ``verl``, ``nemo_rl``.

        Raises:
            ValueError: a share that is not a 0-dim tensor, without a graph, or not made by this micro-batch's
                reducers; a micro-batch that was carried for training before (`Plan.restart`); a form that is not exact
                with per-token loss, or in a step whose cp_groups change.
        """
        _check_scalar("the loss", share)
        trains = torch.is_grad_enabled()
        if trains and not share.requires_grad:
            raise ValueError(
                "a loss without a graph: training needs its gradient, and pipeline stages would hang without one. Do "
                "not detach the model's output; evaluate under torch.no_grad()."
            )
        if not self._reducers or (trains and not any(one.num_uses for one in self._reducers.values())):
            raise ValueError(
                "a share that was put together without this micro-batch's reducers: only these know the step's "
                "weights. Reduce per-token losses with pg_loss, sample_mean or token_mean of this micro-batch."
            )
        carrier = find_carrier(form, self._facts.per_token_loss, self._facts.dynamic_cp)
        if trains:
            self._facts.check_fresh(self._number)
            self._facts.mark_carried(self._number)
            for reducer in self._reducers.values():
                reducer.num_uses = 0
        carried = [share * self._facts.factor(carrier)]
        if form == "3-tuple":
            count = 1
            if carrier.num_tokens != "one":  # where all CP ranks hold all tokens, the first of them counts them
                count = 0 if self.tokens.copies > 1 and self.cp_rank > 0 else self.tokens.num_active
            carried.append(self._facts.constant(count, share.device))
        self.receipt = Receipt.of(*carried, noted=self._facts.notes[self._number])
        return carried[0] if form in ("sum", "mean") else (*carried, {} if report is None else report)

    def gap(self, name: str, values: Tensor) -> Tensor:
        """The largest ``|values - log_probs[name]|`` at this rank's active tokens, 0-dim; 0 without one.

        The gap is 0 where the training pass runs the kernels of the forward pass before the step, without dropout. On
        the host a gap above 1e-4 warns: the measured policy is then not the one in training. Raises ValueError for
        values of another shape, and for a name of no forward pass.
        """
        if name not in self.log_probs:
            raise ValueError(
                f"gap({name!r}) with values of the forward passes: {', '.join(self.log_probs) or 'none'}: the pass "
                f"must run before the step. Call forward.log_probs({name!r}, ...) in before_step."
            )
        check_values(f"values beside log_probs[{name!r}]", values, self.tokens)
        gaps = (values.detach().float() - self.log_probs[name].float().view_as(values)).abs().flatten()
        active = on_device(self.tokens.mask != 0, gaps.device)
        gap = torch.cat([gaps.new_zeros(1), gaps.masked_fill(~active, 0)]).max()
        if gap.is_cpu and not gap <= 1e-4:
            warnings.warn(
                f"{name} of the training pass and of the forward pass before it differ by up to {float(gap):.2g} at a "
                "token: thresholds and survivors come from the earlier pass. Switch dropout off, and run the same "
                "kernels in both.",
                stacklevel=2,
            )
        return gap

    def keep(self, name: str, samples: Samples) -> None:
        """Go on with samples that have a further mask of that name, in the place of an earlier one."""
        self.samples = samples
        self.kept.add(name)
        self.__dict__.pop("tokens", None)
        self._reducers = {key: reducer for key, reducer in self._reducers.items() if key[-1] != name}


def _key(aggregation: Aggregation, mask: str | None = None) -> _Key:
    mode = aggregation.mode  # a callable object need not be hashable; the reducer keeps it
    return mode.name, id(mode.function), aggregation.divisor, aggregation.units, mask


def _check_scalar(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.dim() != 0:
        shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} is {shown}: it must be a 0-dim tensor. Reduce it (pg_loss or sample_mean).")
