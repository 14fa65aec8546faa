"""`open_plan`: a step whose denominators are known at its end, for samples that arrive call by call.

A weight is m / (D * U). D comes with the samples of a unit. U, the number of units (or the tokens) of the step, is
known when the last call has been trained on. Until then a *nominal* number stands for it. A gradient is linear in 1/U,
so it is exact once it is multiplied by nominal / U, if all that was added to it was divided by that one U.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_loss.errors import check_int
from megatron_rl_loss.modes.loss_modes import LossModes
from megatron_rl_loss.modes.names import Aggregation
from megatron_rl_loss.plan.checks import StepGroups, check_samples
from megatron_rl_loss.plan.late_counts import ClosedPlan, LateCount, nominal_totals
from megatron_rl_loss.plan.microbatch import Losses, Metrics, Microbatch
from megatron_rl_loss.plan.plan import Plan
from megatron_rl_loss.reduction.metrics import Metric
from megatron_rl_loss.reduction.sums import Summand, Term, WeightedSum
from megatron_rl_loss.step.collectives import (
    Group,
    all_reduce,
    attempt,
    raise_together,
    several,
    size_of,
    stated_dp_group,
)
from megatron_rl_loss.step.samples import Samples
from megatron_rl_loss.step.totals import StepTotals, TokensById, UnitCounting, reduce_step_totals

#: What returns a share past factors that hang on no count of the step, but for the tokens of per-token loss.
_FORMS = ("3-tuple", "2-tuple", "mean", "sum")


def open_plan(
    mode: str,
    *,
    divisor: float | None = None,
    units: UnitCounting | None = None,
    terms: Mapping[str, str | None] | None = None,
    term_masks: Sequence[str] = (),
    dp_group: Group | EllipsisType | None = ...,
    cp_group: Group | None = None,
    replica_groups: Sequence[Group] = (),
    per_token_loss: bool = False,
    nominal: int = 1,
    nominal_tokens: int | None = None,
) -> "OpenPlan":
    """A step that is planned call by call: `OpenPlan.add`, forward and backward, as often as you like; then `close`.

    >>> plan = open_plan("token_mean", dp_group=None)
    >>> shares = [plan.add([Samples([torch.ones(n)])])[0](torch.ones(n)) for n in (2, 3)]
    >>> float(sum(shares)) * plan.close().factor
    1.0

    Args:
        mode, divisor, units, terms, term_masks, dp_group, cp_group, replica_groups, per_token_loss: as in `plan_step`.
        nominal: stands for the count that the mode divides by, the same on all ranks. About its size keeps gradients
            in the range of a narrow dtype; the result does not depend on it.
        nominal_tokens: stands for the active tokens of the step, by which Megatron divides per-token loss; default:
            `nominal`. `ClosedPlan.factor` is 1 where tokens and count are in the step as they are here.

    Raises:
        ValueError, TypeError: unusable settings; a mode of one's own; a term that divides by another late count than
            the policy loss: one factor on the gradients cannot mend both.
    """
    modes = LossModes.resolve(mode, divisor=divisor, units=units, terms=terms)
    dp_group = stated_dp_group(dp_group, "an open plan")
    groups = StepGroups(dp_group=dp_group, cp_group=cp_group, replica_groups=replica_groups)
    return OpenPlan(modes, groups, per_token_loss, term_masks, nominal, nominal_tokens)


class OpenPlan:
    """A step of which some calls were planned. `add` asks no other rank; ranks may differ in their numbers of calls."""

    has_passes = False  # whether terms by other counts are trained on in passes, with gradients of their own

    def __init__(
        self,
        modes: LossModes,
        groups: StepGroups,
        per_token: bool,
        term_masks: Sequence[str] = (),
        nominal: int = 1,
        nominal_tokens: int | None = None,
    ) -> None:
        self.modes, self.nominal = modes, nominal
        self.nominal_tokens = nominal if nominal_tokens is None else nominal_tokens
        for name in ("nominal", "nominal_tokens"):
            check_int(name, getattr(self, name), 1, "Pass about what the step will have, or leave it out")
        self.settings = (
            f"{modes.describe()}; per-token loss {per_token}; nominal {nominal}, {self.nominal_tokens} tokens"
        )
        self._groups, self._term_masks, self._per_token = groups, tuple(term_masks), per_token
        self.late_count = LateCount.of(modes.policy.mode, modes.policy.units)
        self.form: str | None = None  # of what the loss function returned
        self.late_counts = {"pg_loss": self.late_count, "loss": self.late_count}
        self._whole_kinds = {self.late_count.whole}  # kinds of units that are trained on by their tokens
        self._calls: list[tuple[Sequence[Samples] | None, StepTotals]] = []
        self.num_losses: list[int] = []  # that micro-batches of each call returned on this rank
        self._is_open = True
        of_terms = {name: LateCount.of(one.mode, one.units) for name, one in modes.terms.items()}
        self.counts = list(dict.fromkeys([self.late_count, *(of_terms.values() if self.has_passes else ())]))
        self.current_count = self.late_count  # of the counts, the one whose terms this pass trains on
        for name, late in of_terms.items():
            self.check_term(name, late)

    def check_term(self, name: str, late: LateCount) -> None:
        """Refuse to train on a term by another count than the policy loss's, unless it has gradients of its own."""
        if late not in self.counts:
            raise ValueError(
                f"the term {name!r} divides by {late}, the policy loss by {self.late_count}: one factor at the end "
                "scales all gradients. Use a mode with the policy loss's count, coef=0 to report it, plan_step, or "
                "megatron_rl_loss.megatron.open_plan, which is told the term's mode."
            )
        self._whole_kinds.add(late.whole)

    def add(self, samples: Sequence[Samples] | None, *, num_microbatches: int | None = None) -> Plan:
        """The micro-batches of a call, to be trained on before `close`; its gradients are added to those before it.

        A rollout, for ``sample_mean``, or a prompt group, for ``prompt_mean``, must come as a whole: in one call, on
        one DP rank. `close` finds out on which rank one did not. `samples` and `num_microbatches` are as in
        `plan_step`, of this call on this rank. Raises ValueError and TypeError as `plan_step`, on this rank alone.
        """
        self._require_open()
        samples = check_samples(samples, num_microbatches, self.modes, self._groups, self._term_masks)
        if any(one.cp_group is not None for one in samples or ()):
            raise ValueError(
                "Samples with a cp_group of their own in an open plan: a call's units are counted before its ranks "
                "meet. Use plan_step, or a fixed cp_group."
            )
        totals = self._count(samples or [])
        call = _Call(
            samples=samples,
            modes=self.modes,
            totals=nominal_totals(totals, self.nominal, self.nominal_tokens),
            num_microbatches=len(samples or ()) if num_microbatches is None else num_microbatches,
            per_token_loss=self._per_token,
            **self._groups.of_plan,
            open_plan=self,
            number=len(self._calls),
        )
        self._calls.append((samples, totals))
        self.num_losses.append(0)
        return call

    def _count(self, samples: Sequence[Samples] | Exception | None, **groups: Any) -> StepTotals:
        groups |= {"masks": self._term_masks, "settings": self.settings}
        return reduce_step_totals(samples, count_prompts=self.modes.uses_prompt_ids, **groups)

    def close(self) -> ClosedPlan:
        """Count the step over all calls and ranks, in one round of collectives; all ranks call it together.

        Then multiply all gradients by `ClosedPlan.factor`, once they are summed over ranks and before they are clipped.

        Raises:
            BadBatchError: on every rank, as `plan_step`, and where a unit did not come as a whole. The plan stays open.
        """
        closed = self._closed()
        self._is_open = False
        return closed

    def _closed(self) -> ClosedPlan:
        self._require_open()
        groups = self._groups
        described = attempt(self._described)
        totals = self._count(described, dp_group=groups.dp_group, replica_groups=groups.replicas)
        parts = {kind: self._part(kind, totals) for kind in ("rollout", "prompt")}
        failure = next((ValueError(text) for kind, text in parts.items() if text and kind in self._whole_kinds), None)
        # A stage that reads no data does not know units by id, nor one without a loss what its function returned.
        divides = self._per_token and self.form == "3-tuple"
        counts = [late.in_step(totals) or 0 for late in self.counts]
        found = torch.tensor([failure is not None, divides, *counts], dtype=torch.float64, device="cpu")
        every_group = several(groups.dp_group, *groups.replicas)
        for group in every_group:
            all_reduce(found, group, dist.ReduceOp.MAX)
        failed, divides, *counts = found.tolist()
        raise_together(failed > 0, failure, every_group)
        # With per-token loss Megatron divides by the tokens of the step; a share was multiplied by the nominal ones.
        numerator = self.nominal * (totals.step_active_tokens or 0) / self.nominal_tokens if divides else self.nominal
        by = {late: count if late.name else self.nominal for late, count in zip(self.counts, counts, strict=True)}
        count = by[self.late_count]
        return ClosedPlan(
            factor=numerator / count if numerator and count else 1.0,
            totals=totals,
            counts=by,
            divides_by_tokens=bool(divides),
            numerator_scale=self.nominal,
            num_ranks=size_of(groups.dp_group) * size_of(groups.cp_group),
            late_counts=dict(self.late_counts),
            split_units=[kind for kind, text in parts.items() if text],
        )

    def _described(self) -> list[Samples] | None:
        """The samples of all calls, None on a stage without data. Raises what is to be raised on all ranks."""
        if self._calls and all(samples is None for samples, _ in self._calls):
            return None
        return [one for samples, _ in self._calls for one in samples or ()]

    def _part(self, kind: str, totals: StepTotals) -> str | None:
        """What to say of a unit that a call on this rank held a part of; None where there is none."""
        for number, (samples, of_call) in enumerate(self._calls):
            of_samples = [ids for one in samples or () if (ids := getattr(one, f"{kind}_ids")) is not None]
            for mask in (None, *self._term_masks) if of_samples else ():
                of_both = [getattr(one.with_mask(mask), f"{kind}s").tokens for one in (of_call, totals)]
                if not isinstance(of_both[0], TokensById):
                    continue  # units of the kind are not counted
                here, whole = (tokens.of(f"{kind}_ids", torch.cat(of_samples)) for tokens in of_both)
                for at in ((here > 0) & (whole - here > 1e-9 * whole)).nonzero()[:1, 0].tolist():
                    return (
                        f"a {kind} with {float(here[at]):g} mask tokens in call {number} of this rank and "
                        f"{float(whole[at]):g} in the step: its weights were made without the rest. Add all samples of "
                        f"a {kind} in one call on one DP rank, or use plan_step."
                    )
        return None

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError("a plan that was closed or abandoned: its step is over. Open one for the next step.")


@dataclass(frozen=True, kw_only=True)
class _Call(Plan):
    """A call's micro-batches."""

    open_plan: OpenPlan
    number: int

    def measure(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, and `keep` and `sum_by` too: a call is not the step, and ranks may differ in their calls."""
        raise ValueError(
            "measure, keep or sum_by in an open plan: they are of the whole step, which is not known before close(). "
            "Use plan_step."
        )

    keep = sum_by = measure


class _OpenMicrobatch(Microbatch):
    """A micro-batch whose shares are by the nominal count."""

    _plan: _Call

    _is_split = False  # whether the share at hand is of the terms by one count alone

    def _late(self, reducer: WeightedSum) -> LateCount:
        mode, _, units, mask = next(key for key, one in self._reducers.items() if one is reducer)
        return LateCount.of(mode, units, mask)

    def loss(self, losses: Losses, metrics: Metrics = None, *, form: Any = "3-tuple") -> Any:
        """As `Microbatch.loss`; of terms by several counts, those by the one that is trained on in this pass."""
        if len(self._plan.open_plan.counts) > 1 and isinstance(losses, Tensor):
            losses = Term(losses)
        return super().loss(losses, metrics, form=form)

    def _counted_reducer(self, name: str, aggregation: Aggregation, mask: str | None) -> WeightedSum:
        if not len(self.samples):  # of a filler, whose call may have counted no units
            return self._reducer(name, aggregation, mask)
        return super()._counted_reducer(name, aggregation, mask)

    def _summand(self, name: str, term: Tensor | Term) -> Summand:
        summand = super()._summand(name, term)
        late, opened = self._late(summand.reducer), self._plan.open_plan
        if summand.coef:
            opened.check_term(name, late)
        opened.late_counts[name] = late
        self._is_split = True
        return summand if late == opened.current_count else summand._replace(coef=0.0)

    def _reducer_of_metric(self, name: str, metric: Metric) -> WeightedSum:
        if not metric.is_sum:
            raise ValueError(
                f"the metric {name!r} of kind {metric.kind!r} in an open plan: its parts are finished with a step that "
                "is one call. Report a mean, or use plan_step."
            )
        reducer = super()._reducer_of_metric(name, metric)
        self._plan.open_plan.late_counts[name] = self._late(reducer)
        return reducer

    def carry(self, share: Tensor, report: Any = None, *, form: Any = "3-tuple") -> Any:
        """As `Microbatch.carry`; a plan's calls all return one form, and none of an engine."""
        opened = self._plan.open_plan
        if form not in _FORMS or opened.form not in (None, form):
            raise ValueError(
                f"form={form!r} in an open plan that has returned {opened.form!r}: what is returned is scaled at the "
                f"step's end, all alike. Choose one of {', '.join(map(repr, _FORMS))} for all calls."
            )
        opened.form = form
        is_split, self._is_split = self._is_split, False
        if len(opened.counts) > 1 and not is_split:
            raise ValueError(
                "a share that was put together by hand in an open plan of several counts: which part divides by which "
                "is not known. Return microbatch.loss({name: Term(...)})."
            )
        opened.num_losses[self._plan.number] += 1
        return super().carry(share, report if opened.current_count == opened.late_count else {}, form=form)


_Call.microbatch_class = _OpenMicrobatch
