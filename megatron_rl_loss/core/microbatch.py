"""A micro-batch of a step: reduces its losses, and returns their sum in the form that the trainer takes."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, NoReturn, overload

import numpy as np
import torch
from torch import Tensor

from megatron_rl_loss.core.aggregation import Aggregation, resolve, weigh
from megatron_rl_loss.core.carriers import DEFAULT, LossForm, PairForm, Receipt, find_carrier, find_form
from megatron_rl_loss.core.collectives import Group, rank_in, size_of
from megatron_rl_loss.core.counting import StepTotals, UnitCounting
from megatron_rl_loss.core.errors import check_mapping, is_number
from megatron_rl_loss.core.masks import on_device
from megatron_rl_loss.core.metrics import Metric, Note, aggregation_over
from megatron_rl_loss.core.record import StepRecord
from megatron_rl_loss.core.reducers import Summand, Term, WeightedSum, sum_terms
from megatron_rl_loss.core.samples import LocalTokens, Samples, check_values

#: Policy losses, or the terms of the loss by name; metrics by name.
Losses = Tensor | Term | Mapping[str, Tensor | Term]
Metrics = Mapping[str, Tensor | Metric] | None
#: What Megatron's schedule takes from a loss function: loss, token count, report.
Carried = tuple[Tensor, Tensor, Any]


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
        receipt: the `Receipt` of the last `loss` or `scale_for_trainer`, or None.
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
        return self._record.totals

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
        return self.tokens.of(tensor)

    @cached_property
    def mask(self) -> Tensor:
        """This CP rank's part of the loss mask, shaped as losses: float32 [num_local_tokens].

        With `ZigzagBSHD` [batch, local sequence]. It lies on the device of the plan's model; without one on the host.
        """
        mask, layout = self.tokens.mask.astype(np.float32), self.samples.layout
        with torch.inference_mode(False):  # it serves in training too
            return on_device(mask if layout is None else mask.reshape(layout.rows(len(mask))), self._record.device)

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
        self._record.wrong_tokens.append(differ)
        if differ.is_cpu:
            self._record.check_tokens()

    # --- reducers

    @property
    def weights(self) -> Tensor:
        """The weight of each token that this rank holds in the step loss, float32 [num_local_tokens]; a copy."""
        return self.pg_loss.weights.clone()  # a change in place would be in all later shares

    def __call__(self, per_token_loss: Tensor) -> Tensor:
        """`pg_loss`, whose share is noted as the step's ``pg_loss``.

        Raises ValueError for a micro-batch that was trained on before (`Plan.reset`).
        """
        if torch.is_grad_enabled():
            self._record.check_fresh(self._number)
        share = self.pg_loss(per_token_loss)
        if share.requires_grad and not torch.compiler.is_compiling():
            # A loop of one's own may train on the share as it is: without `scale_for_trainer`, which marks it.
            share.register_hook(partial(self._record.mark_carried, self._number))
        self._note({"pg_loss": Note("mean", share.detach()[None], by=self.pg_loss.by)})
        return share

    @cached_property
    def pg_loss(self) -> WeightedSum:
        """Per-token policy loss -> this rank's share of the step loss, by the mode of the step."""
        return self._reducer("pg", self._record.modes.policy)

    @cached_property
    def sample_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their mean over active samples: for metrics, in any mode."""
        return self._beside("sample_mean", self._aggregation_over("samples"))

    @cached_property
    def token_mean(self) -> WeightedSum:
        """Per-token values -> this rank's share of their token mean: for metrics, in any mode."""
        return self._beside("token_mean", resolve("token_mean"))

    def _beside(self, name: str, aggregation: Aggregation) -> WeightedSum:
        """A reducer other than `pg_loss`, even by the same mode: an audit tells their values apart."""
        reducer = self._reducer(name, aggregation).renamed(name)
        self._reducers[_key(aggregation)._replace(mode=f"beside {name}")] = reducer
        return reducer

    def _reducer(self, name: str, aggregation: Aggregation, mask: str | None = None) -> WeightedSum:
        """The reducer of a mode and mask, made once; that of the policy loss is always named pg."""
        key = _key(aggregation, mask)
        self._record.use.is_used = True
        if key not in self._reducers:
            try:
                local = self.tokens_of(mask)
                weights = weigh(aggregation, local, self.totals.with_mask(mask))
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from error
            self._reducers[key] = WeightedSum(
                weights,
                local,
                aggregation,
                name="pg" if key == _key(self._record.modes.policy) else name,
                number=self._number,
                mask=mask,
                plan=self._record.use,
            )
        return self._reducers[key]

    # --- what a loss function returns

    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Literal["3-tuple"] = "3-tuple") -> Carried: ...
    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: PairForm) -> tuple[Tensor, Any]: ...
    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: LossForm) -> Tensor: ...
    @overload
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: str) -> Any: ...
    def loss(self, losses: Losses, metrics: Metrics = None, *, form: str = DEFAULT.name) -> Any:
        """The return value of a Megatron ``loss_func``: the aggregated loss, a token count, and the report.

        Args:
            losses: this CP rank's unreduced policy losses, in the layout's order; or the terms of the loss by name,
                tensors or `Term`s, which are added up. ``{"pg": losses, "kl": Term(kl, "token_mean", coef=0.01)}``.
            metrics: further per-token values of the same shape, not differentiated; reported as their mean over the
                samples that have an active token, or as a `Metric` says.
            form: as in `scale_for_trainer`.

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
                f"a loss of the terms {list(terms)}: there must be at least one, and none named 'loss', the name of "
                'the sum. Name each term, e.g. {"pg": losses, "kl": Term(kl, coef=0.01)}.'
            )
        of_step = {
            name: metric if isinstance(metric, Metric) else Metric(metric) for name, metric in (metrics or {}).items()
        }
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
            for summand, total in zip(summands, own, strict=True):
                self._record.watched.append((summand.what, summand.values.detach(), total, summand.reducer))
        notes = {"loss": Note("mean", share.detach()[None])} if several else {}
        for (name, term), summand, part in zip(terms.items(), summands, own if several else [share], strict=True):
            mask = term.mask if isinstance(term, Term) else None
            factor = f", coef {summand.coef!r}" if several else ""  # a step has one of each term
            notes[name] = Note("mean", part.detach()[None], mask, summand.reducer.by + factor)
        rest = iter(sums)
        for name, metric in of_step.items():
            notes[name] = metric.note([next(rest) for _ in rows[name]], reducers[name])
        return self.scale_for_trainer(share, self._note(notes), form=form)

    def folded(self, share: Tensor, per_token_loss: Tensor) -> Tensor:
        """A share that was summed by `weights` elsewhere, from losses [num_local_tokens], as `pg_loss` makes it."""
        reducer, scale = self.pg_loss, self.pg_loss.gradient_scale
        reducer.num_uses += torch.is_grad_enabled()
        self._record.watched.append(("per_token_loss", per_token_loss.detach(), share.detach(), reducer))
        share = share.view_as(share) if scale == 1 else share + (scale - 1) * (share - share.detach())
        reducer.hook(share, unseen="folded into the output head")
        return share

    def _reducer_of_metric(self, name: str, metric: Metric) -> WeightedSum:
        reducer = self._reducer(name, self._aggregation_over(metric.over, metric.mask), metric.mask)
        check_values(f"the metric {name!r}", metric.values, self.tokens)
        return reducer

    def _aggregation_over(self, over: str, mask: str | None = None) -> Aggregation:
        return aggregation_over(over, self._record.modes.policy.units, self.totals.with_mask(mask))

    def _summand(self, name: str, term: Tensor | Term) -> Summand:
        """A term with the reducer of its mode and mask; those that share both share the weights."""
        term = term if isinstance(term, Term) else Term(term)
        if not is_number(term.coef) or not abs(term.coef) < 1e30:
            raise ValueError(
                f"the term {name!r} with coef={term.coef!r}: it must be a finite number, below 1e30. Pass 0 to "
                "report a term without training on it."
            )
        aggregation = self._record.modes.of_term(name, term.mode, divisor=term.divisor, units=term.units)
        return Summand(term.values, self._reducer(name, aggregation, term.mask), float(term.coef), name)

    def _note(self, notes: Mapping[str, Note]) -> dict[str, Tensor]:
        """Note parts of the step's values, in the place of earlier ones; a report that `Plan.finish` fills in."""
        self._record.notes[self._number] = dict(notes)
        return {name: self._record.placeholder(note.part.device) for name, note in notes.items()}

    def report(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A report of shares that add up to the step's values, NaN until `Plan.finish` fills them in.

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
    def scale_for_trainer(
        self, share: Tensor, report: Any = None, *, form: Literal["3-tuple"] = "3-tuple"
    ) -> Carried: ...
    @overload
    def scale_for_trainer(self, share: Tensor, report: Any = None, *, form: PairForm) -> tuple[Tensor, Any]: ...
    @overload
    def scale_for_trainer(self, share: Tensor, report: Any = None, *, form: LossForm) -> Tensor: ...
    @overload
    def scale_for_trainer(self, share: Tensor, report: Any = None, *, form: str) -> Any: ...
    def scale_for_trainer(self, share: Tensor, report: Any = None, *, form: str = DEFAULT.name) -> Any:
        """The return value of a loss function for its share: the trainer's own scaling cancels.

        Args:
            share: 0-dim, connected to the graph; shares of all ranks and micro-batches add up to the step loss.
            report: any mapping that your trainer logs, or ``report(...)``; unused with ``sum`` and ``mean``.
            form: ``3-tuple`` (loss, num_tokens, report) or ``2-tuple`` (loss, report) for Megatron's schedule. The loss
                alone for a trainer without that schedule, so in no plan of a Megatron model: ``sum`` where gradients of
                ranks are added, ``mean`` where they are averaged over DP and CP ranks. (loss, report) for an engine
                that scales the loss before Megatron does: ``slime`` (and miles), ``verl``, ``nemo_rl``.

        Raises:
            ValueError: a share that is not a 0-dim tensor, without a graph, or not made by this micro-batch's
                reducers; a micro-batch that was carried for training before (`Plan.reset`); a form that is not exact
                with per-token loss, in a step whose cp_groups change, or in a plan of a Megatron model; another form
                than that of the step's other micro-batches.
        """
        _check_scalar("the loss", share)
        trains = torch.is_grad_enabled()
        if trains and not share.requires_grad:
            raise ValueError(
                "a loss without a graph: training needs its gradient, and pipeline stages would hang without one. Do "
                "not detach the model's output; evaluate under torch.no_grad()."
            )
        if not self._reducers or (trains and not any(reducer.num_uses for reducer in self._reducers.values())):
            raise ValueError(
                "a share that was put together without this micro-batch's reducers, or while gradients were off: only "
                "these know the weights of the step. Reduce per-token losses with pg_loss, sample_mean or token_mean "
                "of this micro-batch, outside torch.no_grad() and reentrant checkpoints (use_reentrant=False)."
            )
        row, record = find_form(form), self._record
        carrier = find_carrier(row, record.per_token_loss, record.dynamic_cp, record.check_form is not None)
        if trains:
            record.check_fresh(self._number)
            record.take_form(row)
            record.mark_carried(self._number)
            # In a compiled graph no hook could be set when the share was made; with several reducers, whose share this
            # is cannot be told.
            used = [reducer for reducer in self._reducers.values() if reducer.num_uses]
            if len(used) == 1 and used[0].was_compiled:
                used[0].hook(share, unseen="compiled")
            for reducer in self._reducers.values():
                reducer.num_uses, reducer.was_compiled = 0, False
        tensors = {"loss": share * self._record.factor(carrier)}
        for part in row.counts:
            count = carrier.counts[part](self.tokens, self.cp_rank) if part in carrier.counts else 1
            tensors[part] = self._record.constant(count, share.device)
        self.receipt = Receipt.of(row, tensors, noted=self._record.notes[self._number])
        return row.assemble({**tensors, "report": {} if report is None else report})

    def keep(self, name: str, samples: Samples) -> None:
        """Go on with samples that have a further mask of that name, in the place of an earlier one."""
        self.samples = samples
        self.kept.add(name)
        self.__dict__.pop("tokens", None)  # the loss mask is the same
        self._reducers = {key: reducer for key, reducer in self._reducers.items() if key.mask != name}


def _key(aggregation: Aggregation, mask: str | None = None) -> _Key:
    mode = aggregation.mode
    return _Key(mode.name, id(mode.function), aggregation.divisor, aggregation.units, mask)


def _check_scalar(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.dim() != 0:
        shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name} is {shown}: it must be a 0-dim tensor. Reduce it (pg_loss or sample_mean).")
