"""The comparison of each term of a loss with the weights that it should have, by all ranks of the last stage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import attempt
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.errors import only_if
from megatron_rl_loss.core.taps import Declared
from megatron_rl_loss.proof.difference import Compared, may_be_clipped
from megatron_rl_loss.proof.findings import GIVEN, IN_PART, NOT_PROVED, WRONG, Finding, Severity
from megatron_rl_loss.proof.measurement import Measurement, failed_in_words
from megatron_rl_loss.proof.own_tokens import OwnTokens
from megatron_rl_loss.proof.promises import Promises, other_count, other_data
from megatron_rl_loss.proof.step_state import StepState

#: Why a term is not compared of which the loss has nothing.
_NO_WEIGHT = "coefficient 0"
#: A smaller relative difference of weights may be rounding of a term that was added, whose slopes may be far larger.
_ROUNDED = 2.0**-10


@dataclass
class Comparison:
    """What was found of the loss's terms.

    Attributes:
        findings: on terms that are not as asked, or not decided.
        proved: terms whose weights are as asked.
        deviation: the largest relative difference of a term's weights; -1 where none was compared.
        totals: counts of the step, by the first term.
        wrong: the weights of the first term that are not as asked; None where there is none.
    """

    findings: list[Finding] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    deviation: float = -1.0
    totals: StepTotals | None = None
    wrong: Compared | None = None

    def find(self, severity: Severity, *texts: str) -> None:
        self.findings += [Finding(severity, text) for text in texts]

    def add(self, aim: str, compared: Compared, state: StepState, doubt: str, returned: str) -> None:
        """Add a term's weights.

        Args:
            state: of which the tolerances are.
            doubt: why a difference is no evidence; empty where it is.
            returned: what may explain one.
        """
        self.totals = self.totals or compared.totals
        self.deviation = max(self.deviation, compared.deviation)
        before, is_as_asked = compared.before, compared.is_as_asked(state.tolerance, state.tolerance_of_each)
        if doubt and not is_as_asked:
            self.find(NOT_PROVED, f"{aim}: {compared}. {doubt}")
        elif not is_as_asked:
            self.find(WRONG, f"{aim}: {compared}.", *only_if(returned, [returned]))
            self.wrong = self.wrong or compared
        elif fault := before.fault(averages=compared.averages):
            self.find(WRONG, f"{aim}: {fault}")
        elif compared.totals.step_active_tokens:
            self.proved.append(aim)
            if compared.gap:
                self.find(IN_PART, compared.gap)
            if before.lacks:
                self.find(GIVEN, "losses as given")


def compare_terms(
    measured: Measurement,
    state: StepState,
    own: OwnTokens | None,
    *,
    policy: str = "the policy loss",
    required: Sequence[str] = (),
    promises: Promises | None = None,
) -> Comparison:
    """Compare each term; all ranks of the last stage call it, others have nothing to compare.

    Args:
        state, own: of `state_of`.
        policy: words for the policy loss.
        required: names of terms that each micro-batch must have exactly once; otherwise a fault.
        promises: as of `FirstStep`.
    """
    comparison = Comparison()
    if own is None or not state.is_comparable:
        return comparison
    exchange = measured.exchange
    for name in required:
        if name not in state.terms or f"{name}#2" in state.terms:
            where = "several times in a micro-batch" if name in state.terms else "in no micro-batch"
            comparison.find(WRONG, f"The {name} term went through a reducer of this library {where}.")
    exchange.local(lambda: comparison.find(NOT_PROVED, *sorted(state.added)), None)
    first = "pg" if "pg" in state.terms else next(iter(state.terms))
    names = sorted(state.terms, key=lambda name: name != first)
    # What a rank knows of a term's mode may be its own; what is compared is what all ranks can compare.
    whys = {}
    for name in names:
        why_not = partial(_why_not, name, state, own, is_first=name == first)
        whys[name] = exchange.local(why_not, "a rank failed")
    refused = exchange.agree([name for name, why in whys.items() if why], names, state.over.loss_groups)
    for name in names:
        if name in refused:
            say = partial(_say_refused, name, whys[name], state, comparison, policy)
            exchange.local(say, None)
        else:
            _compare(name, policy, measured, state, own, comparison, promises, is_first=name == first)
    return comparison


def _say_refused(name: str, why: str, state: StepState, comparison: Comparison, policy: str) -> None:
    loss, declared = _in_words(name, policy), _declared(state, name)
    if why == "no gradient" and declared.coef:
        comparison.find(WRONG, f"The {loss} term has a coefficient, {declared.coef:g}, and no gradient reaches it.")
        return
    severity = GIVEN if why == _NO_WEIGHT else IN_PART
    comparison.find(severity, f"not covered: {loss} ({why or 'its mode is not known on every rank'})")


def _declared(state: StepState, name: str) -> Declared:
    return min(state.terms[name].declared, key=repr)


def _why_not(name: str, state: StepState, own: OwnTokens, *, is_first: bool) -> str:
    """Why a term is not compared; empty if it can be."""
    declared, asked = _declared(state, name), own.aggregation(name)
    others = {replace(said, doubt="") for said in state.terms[name].declared}
    if not is_first and not declared.mode:
        return "no mode of its own"
    if len(state.asked) > 1 and (declared.has_policys_mode or not declared.mode):
        return "ranks ask for different modes"
    if len(others) > 1 or (declared.coef is not None and math.isnan(declared.coef)):
        return "its mode or coefficient differs between micro-batches, or is not known"
    if asked is None or (declared.mode and not state.terms[name].is_everywhere):
        return "its mode is not known on every rank"
    if declared.coef == 0:
        return _NO_WEIGHT
    return "no gradient" if not state.terms[name].is_reached and not is_first else ""


def _compare(
    name: str,
    policy: str,
    measured: Measurement,
    state: StepState,
    own: OwnTokens,
    comparison: Comparison,
    promises: Promises | None,
    *,
    is_first: bool,
) -> None:
    """Compare a term's weights, and what was promised of the step with what came."""

    def asked_of() -> tuple[Aggregation, float, float]:
        asked = own.aggregation(name)
        assert asked is not None
        return asked, state.factor.value / measured.loss_scale, _declared(state, name).coef or 1.0

    def compare_and_judge() -> None:
        compared = own.compare(name, asked_of, state.over, measured.exchange)
        asked, _, _ = asked_of()
        _judge(
            f"{asked} on {_in_words(name, policy)}", compared, asked, state, own, name, comparison, promises, is_first
        )

    failure = attempt(compare_and_judge)
    if isinstance(failure, Exception):
        comparison.find(NOT_PROVED, failed_in_words(failure))


def _judge(
    aim: str,
    compared: Compared,
    asked: Aggregation,
    state: StepState,
    own: OwnTokens,
    name: str,
    comparison: Comparison,
    promises: Promises | None,
    is_first: bool,
) -> None:
    """Add what a comparison shows, on this rank alone."""
    declared = _declared(state, name)
    doubt = next((said.doubt for said in sorted(state.terms[name].declared, key=repr) if said.doubt), "")
    if promises is not None or declared.count is not None:  # an engine said so
        promises = promises or Promises()
        ids = promises.misgrouped(compared.totals, asked)
        comparison.find(WRONG, *ids.faults, *(other_data(promises.data, compared.totals) if is_first else []))
        comparison.find(NOT_PROVED, *ids.doubts)
        comparison.find(IN_PART, *ids.assumptions)
        doubt = doubt or other_count(declared.count, compared)
    if state.added and compared.deviation < _ROUNDED:
        doubt = doubt or "The slopes of what was added round those by which it was measured."
    comparison.add(aim, compared, state, doubt or may_be_clipped(compared, state.factor), own.returned)


def _in_words(term: str, policy: str) -> str:
    """The term's name; or which loss it is of several that name no term."""
    name, _, number = term.partition("#")
    return f"loss number {number} of a micro-batch" if number and name == "pg" else policy if name == "pg" else term


def sizes_in_words(totals: StepTotals, group_size: int | None) -> str:
    """The step in numbers, which people compare with their intentions."""
    says = f"{totals.step_active_tokens:,} tokens of {totals.units['sample'].number['all']:,} samples"
    if "prompt" not in totals.units:
        return says
    sizes = totals.units["prompt"].counts["all"].astype(int)
    range_of_sizes = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    promised = f" (generated: {group_size} each)" if group_size and {*sizes.tolist()} != {group_size} else ""
    return f"{says}, {len(sizes):,} prompts of {range_of_sizes}{promised}"
