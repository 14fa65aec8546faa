"""The comparison of each term of a loss with the weights that it should have, by all ranks of the last stage."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_rl_loss.core.aggregation import Aggregation
from megatron_rl_loss.core.collectives import attempt
from megatron_rl_loss.core.counting import StepTotals
from megatron_rl_loss.core.taps import Declared
from megatron_rl_loss.proof.difference import Compared, may_be_clipped
from megatron_rl_loss.proof.measurement import Measurement
from megatron_rl_loss.proof.outcomes import Weights
from megatron_rl_loss.proof.own_tokens import OwnTokens
from megatron_rl_loss.proof.promises import Promises, misgrouped, other_count, other_data
from megatron_rl_loss.proof.step_state import StepState


@dataclass
class OfTerms:
    """What was found of the loss's terms, in words.

    Attributes:
        proved: terms whose weights are as asked.
        faults: evidence against the step.
        unknown: differences that are no evidence.
        uncovered: what was not compared, and why.
        deviation: the largest relative difference of a term's weights; -1 where none was compared.
        totals: counts of the step, by the first term.
    """

    proved: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    deviation: float = -1.0
    totals: StepTotals | None = None

    def add(self, aim: str, compared: Compared, tolerance: float, doubt: str) -> None:
        """Add a term's weights; `doubt` is why a difference is no evidence.

        Only a mode that averages divides a second time what somebody has divided by a count of tokens.
        """
        self.totals = self.totals or compared.totals
        self.deviation = max(self.deviation, compared.deviation)
        if not compared.deviation <= tolerance:
            (self.unknown if doubt else self.faults).append(f"{aim}: {compared}. {doubt}".rstrip())
        elif compared.before.is_sure and compared.averages:
            self.faults.append(f"{aim}: {compared.before.fault}")
        elif compared.before.is_doubtful and compared.averages:
            self.unknown.append(f"{aim}: {compared.before.fault} Or are these your own weights?")
        elif compared.totals.step_active_tokens:
            self.proved.append(aim)
            self.uncovered += [str(compared.before)] * (not compared.before.is_one)

    @property
    def weights(self) -> Weights:
        if self.faults or self.unknown:
            return "other" if self.faults else "unknown"
        if self.totals is not None and not self.totals.step_active_tokens:
            return "none"  # whatever a term over other tokens shows
        return "as asked" if self.proved else "unknown"


def compare_terms(
    measured: Measurement,
    state: StepState,
    own: OwnTokens | None,
    *,
    policy: str = "the policy loss",
    required: Sequence[str] = (),
    promises: Promises | None = None,
) -> OfTerms:
    """Compare each term; all ranks of the last stage call it, others have nothing to compare.

    Args:
        state, own: of `state_of`.
        policy: words for the policy loss.
        required: names of terms that each micro-batch must have exactly once; otherwise a fault.
        promises: as of `FirstStep`.
    """
    of_terms = OfTerms(faults=[*state.faults])
    if own is None or state.factor_state == "unknown" or state.gradient != "finite" or not state.terms:
        return of_terms
    for name in required:
        if name not in state.terms or f"{name}#2" in state.terms:
            where = "several times in a micro-batch" if name in state.terms else "in no micro-batch"
            of_terms.faults.append(f"The {name} term went through a reducer of this library {where}.")
    first = "pg" if "pg" in state.terms else next(iter(state.terms))
    names = sorted(state.terms, key=lambda name: name != first)
    # What a rank knows of a term's mode may be its own; what is compared is what all ranks can compare.
    whys = {}
    for name in names:
        why_not = partial(_why_not, name, state, own, is_first=name == first)
        whys[name] = measured.exchange.local(why_not, "a rank failed")
    over = measured.ranks.of_loss(is_dynamic=state.is_dynamic).of_loss
    refused = measured.exchange.agree([name for name, why in whys.items() if why], names, over)
    for name in names:
        loss, declared, why = _in_words(name, policy), _declared(state, name), whys[name]
        if why == "no gradient" and declared.coef:
            of_terms.faults.append(f"The {loss} term has a coefficient, {declared.coef:g}, and no gradient reaches it.")
        elif name in refused:
            of_terms.uncovered.append(f"{loss} ({why or 'its mode is not known on every rank'})")
        else:
            _compare(name, f"on {loss}", measured, state, own, of_terms, promises, is_first=name == first)
    return of_terms


def _declared(state: StepState, name: str) -> Declared:
    return min(state.terms[name], key=repr)


def _why_not(name: str, state: StepState, own: OwnTokens, *, is_first: bool) -> str:
    """Why a term is not compared; empty if it can be."""
    declared, asked = _declared(state, name), own.aggregation(name)
    others = {replace(said, doubt="", added="") for said in state.terms[name]}
    if not is_first and not declared.mode:
        return "no mode of its own"
    if len(state.asked) > 1 and (declared.has_policys_mode or not declared.mode):
        return "ranks ask for different modes"
    if len(others) > 1 or (declared.coef is not None and math.isnan(declared.coef)):
        return "its mode or coefficient differs between micro-batches, or is not known"
    if asked is None or (declared.mode and name in state.lacking):
        return "its mode is not known on every rank"
    if declared.coef == 0:
        return "coefficient 0"
    return "no gradient" if name not in state.reached and not is_first else ""


def _compare(
    name: str,
    on_loss: str,
    measured: Measurement,
    state: StepState,
    own: OwnTokens,
    of_terms: OfTerms,
    promises: Promises | None,
    *,
    is_first: bool,
) -> None:
    """Compare a term's weights, and what was promised of the step with what came."""
    asked, declared = own.aggregation(name), _declared(state, name)
    assert asked is not None
    factor = state.factor.value / measured.loss_scale

    def compare_and_judge() -> None:
        compared = own.compare(name, asked, factor, declared.coef or 1.0, measured.exchange)
        _judge(f"{asked} {on_loss}", compared, asked, state, name, of_terms, promises, is_first)

    failure = attempt(compare_and_judge)
    if isinstance(failure, Exception):
        of_terms.unknown.append(f"A rank failed to measure. {type(failure).__name__}: {failure}")


def _judge(
    aim: str,
    compared: Compared,
    asked: Aggregation,
    state: StepState,
    name: str,
    of_terms: OfTerms,
    promises: Promises | None,
    is_first: bool,
) -> None:
    """Add what a comparison shows, on this rank alone."""
    declared = _declared(state, name)
    doubt = next((said.doubt for said in sorted(state.terms[name], key=repr) if said.doubt), "")
    if promises is not None or declared.count is not None:  # an engine said so
        size, is_sure, remedy, data = promises or Promises()
        ids = misgrouped(compared.totals, size, asked, is_sure=is_sure, remedy=remedy)
        of_terms.faults += ids.faults
        of_terms.unknown += ids.doubts
        of_terms.faults += other_data(data, compared.totals) if is_first else []
        doubt = doubt or other_count(declared.count, compared)
    of_terms.unknown += [said.added for said in state.terms[name] if said.added]
    of_terms.add(aim, compared, state.tolerance, doubt or may_be_clipped(compared, state.factor))


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
    of_sizes = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    promised = f" (generated: {group_size} each)" if group_size and {*sizes.tolist()} != {group_size} else ""
    return f"{says}, {len(sizes):,} prompts of {of_sizes}{promised}"
