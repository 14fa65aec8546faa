"""An audit's measured weights: of this package's losses, of Megatron's stock ones, in every kind of layout.

The model is `tiny_gpt`'s, a real GPT in Megatron's DDP, schedule and finalisation. Expected weights are formulas, from
the float64 oracle and its own zigzag (`audited_gpt.expected_weights`). That a step goes on as if it were not measured
is compared bit by bit.
"""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import gpt_oracle
import numpy as np
import oracle
import pytest
import torch
from audited_gpt import DESCRIBED, MUTATIONS, TAPS, TERMS, Ask, Outcome, correct_masks, expected_weights, run_steps
from missing import has
from ranks import run_ranks
from tiny_gpt import Case, Layout

from megatron_rl_loss import Samples
from megatron_rl_loss.audit.judge import judge
from megatron_rl_loss.audit.megatron.reports import FromRank, assembled
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.taps import GradientSum, Tap
from megatron_rl_loss.proof.factor import Factor
from megatron_rl_loss.proof.step_state import Stage, StepState

pytestmark = pytest.mark.slow

#: What a weight may be off by: its own roundings and those of the factor, which a sum over all tokens averages out.
EXACT = 1e-6

STEP = Case(3, "sample_mean", "all", "mean", bf16=False, optimizer="plain", tied=False, lopsided=False)
PER_TOKEN = STEP._replace(scaling="per token")
OVERLAP = STEP._replace(optimizer="distributed+overlap")
STOCK = ("2-tuple, local", "2-tuple, over CP", "3-tuple")

#: Every mode once.
MODES = [
    Ask(STEP._replace(mode="prompt_mean", units="active", tied=True, optimizer="distributed")),
    Ask(OVERLAP._replace(mode="token_mean", tied=True)),
    Ask(STEP._replace(optimizer="overlap", scaling="averaged in collective")),
    Ask(PER_TOKEN._replace(mode="constant", optimizer="distributed")),
    Ask(STEP._replace(bf16=True, mode="token_sum")),
]
ASKS: list[Ask] = [
    *MODES,
    *(Ask(case, loss) for loss in STOCK for case in (STEP, PER_TOKEN)),
    Ask(OVERLAP, "3-tuple"),
    *(Ask(STEP, loss, attention="hybrid") for loss in ("ours", "3-tuple") if has("HybridModel")),
]
ALONE = [Ask(OVERLAP, "3-tuple"), Ask(STEP, STOCK[0]), MODES[1]]
QUICK, CP_DP, VIRTUAL = Layout(2, True, 1, 1, 2, 1), Layout(1, False, 1, 1, 2, 2), Layout(1, False, 2, 2, 1, 2)
LAYOUTS = [QUICK, CP_DP, VIRTUAL]


def broken(mutation: str) -> Ask:
    """The step of a mutation. `LossAggregation` itself refuses gradients that were there before."""
    return Ask(STEP, "3-tuple" if mutation == "gradients of before" else "ours", mutation=mutation)


STAGES = "stages are scaled apart"
FURTHER = {
    QUICK: [ask._replace(how="alone") for ask in ALONE],
    VIRTUAL: [Ask(STEP, "several terms"), broken(STAGES)],
    CP_DP: [
        Ask(STEP, "several terms"),
        *(Ask(STEP, "3-tuple", how) for how in (*TAPS, *DESCRIBED)),
        *(broken(mutation) for mutation in MUTATIONS if mutation != STAGES),
    ],
}


def in_layout(layout: Layout, ask: Ask) -> Ask:
    """Whole rounds of micro-batches, where Megatron asks for them."""
    return ask if layout.vp == 1 else ask._replace(case=ask.case._replace(microbatches=4))


@functools.cache
def visited(layout: Layout) -> dict[Ask, list[Outcome]]:
    """The outcomes of each rank by ask; one launch for all of a layout."""
    asks = [in_layout(layout, ask) for ask in [*ASKS, *FURTHER.get(layout, [])]]
    rollouts = {shape: gpt_oracle.rollouts_of(shape) for shape in {ask.case.shape(layout) for ask in asks}}
    by_rank = run_ranks(layout.world_size, functools.partial(run_steps, layout, asks, rollouts))
    return {ask: [rank_steps[k] for rank_steps in by_rank] for k, ask in enumerate(asks)}


def outcomes(layout: Layout, ask: Ask) -> list[Outcome]:
    return visited(layout)[in_layout(layout, ask)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_measured_weights_are_the_declared_ones(layout: Layout, record_property: Any) -> None:
    worst = 0.0
    for ask in (in_layout(layout, ask) for ask in ASKS):
        first, *others = outcomes(layout, ask)
        measured = first.measured
        assert all(other.measured is None for other in others)
        assert not measured.unknown, (ask, measured.unknown)
        assert not measured.notes
        expected = expected_weights(layout, ask)
        for name, values in expected.items():
            if name != "weights":
                np.testing.assert_array_equal(getattr(measured.tokens, name), values, err_msg=f"{ask} {name}")
        weights = expected["weights"]
        active = weights != 0
        assert 0 < active.sum() < len(active)
        off = np.abs(measured.weights[active] / weights[active] - 1).max()
        worst = max(worst, off)
        assert off <= EXACT, (ask, off, measured.facts)
        assert not measured.weights[~active].any()
        assert measured.stray == (0, 0.0)
        split = measured.split
        assert (split.num_microbatches, split.dp_size, split.cp_size, split.tp_size, split.pp_size) == (
            ask.case.microbatches, layout.dp, layout.cp, layout.tp, layout.pp,
        )  # fmt: skip
        assert measured.facts["rounding"] == "float32"
        for outcome in (first, *others):
            assert outcome.deviation is None or outcome.deviation <= EXACT
    record_property("audit_weight_error", worst)


def test_the_comparison_sees_another_mode() -> None:
    """Negative control: what is measured of each mode is none of the others' weights."""
    for ask, mode in itertools.product(MODES, oracle.MODES):
        weights = outcomes(QUICK, ask)[0].measured.weights
        other = expected_weights(QUICK, ask._replace(case=ask.case._replace(mode=mode)))["weights"]
        assert np.allclose(weights, other, rtol=1e-3, atol=0) == (mode == ask.case.mode)


def test_a_step_goes_on_as_if_it_were_not_measured() -> None:
    """Gradients and weights after the optimizer's step, every bit of them, on every rank."""
    for ask in ALONE:
        pairs = zip(outcomes(QUICK, ask), outcomes(QUICK, ask._replace(how="alone")), strict=True)
        for measured, unmeasured in pairs:
            for values, others in zip(measured.after, unmeasured.after, strict=True):
                assert values.tobytes() == others.tobytes()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_no_verdict_where_no_one_factor_holds(mutation: str) -> None:
    """The audit gives none even where weights look right with the factor of the configuration."""
    layout, says = VIRTUAL if mutation == STAGES else CP_DP, MUTATIONS[mutation][1]
    first, *_ = outcomes(layout, broken(mutation))
    expected = expected_weights(layout, in_layout(layout, Ask(STEP)))["weights"]
    assert len(first.measured.weights) == len(expected)
    if says:
        assert says in " ".join(first.measured.unknown), first.measured.unknown
    else:  # a loss scale is taken out
        assert not first.measured.unknown
        assert first.measured.facts["loss_scale"] == 2**10
        np.testing.assert_allclose(first.measured.weights, expected, rtol=EXACT)
        assert first.deviation is not None
        assert first.deviation <= EXACT


@pytest.mark.parametrize("layout", [CP_DP, VIRTUAL], ids=str)
def test_declared_terms_are_judged_as_their_own_modes(layout: Layout) -> None:
    """Each term is judged by its own tap, over its own mask; its coefficient is no deviation, another mode is."""
    ask = in_layout(layout, Ask(STEP, "several terms"))
    first, *others = outcomes(layout, ask)
    assert list(first.steps) == list(TERMS)
    masks = {None: None, "correct": correct_masks(gpt_oracle.rollouts_of(ask.case.shape(layout)))}
    for name, (mode, coef, mask) in TERMS.items():
        own = ask.case._replace(mode=mode or ask.case.mode)
        expected = expected_weights(layout, ask._replace(case=own), masks[mask])
        step = first.steps[name]
        assert not step.unknown
        np.testing.assert_array_equal(step.tokens.mask, expected["mask"], err_msg=name)
        np.testing.assert_allclose(step.weights, coef * expected["weights"], rtol=EXACT, atol=0, err_msg=name)
        asked = {term: resolve(declared["mode"], units=declared["units"]) for term, declared in first.expected.items()}
        assert asked[name].mode.name == own.mode
        verdict = judge(step, asked[name])
        assert verdict.sound, str(verdict)
        assert any("coefficient" in note for note in verdict.notes) == (coef != 1)
        other = next(term for term, (mode, *_) in TERMS.items() if (mode or ask.case.mode) != own.mode)
        assert not judge(step, asked[other]).sound, (name, other)
    deviations = [outcome.deviation for outcome in (first, *others) if outcome.deviation is not None]
    assert deviations
    assert max(deviations) <= EXACT


@pytest.mark.parametrize("how", [*TAPS, *DESCRIBED])
def test_taps_that_say_more_or_nothing(how: str) -> None:
    first, *_ = outcomes(CP_DP, Ask(STEP, "3-tuple", how))
    says, said = (TAPS | DESCRIBED)[how][1], first.measured.unknown
    assert says in " ".join(said) if says else not said, said
    expected = expected_weights(CP_DP, Ask(STEP, "3-tuple"))["weights"]
    if how == "terms":
        declared = {
            name: (step.facts.get("coefficient"), step.facts.get("undeclared_term"))
            for name, step in first.steps.items()
        }
        assert declared == {"pg": (None, False), "kl": (0.5, None), "entropy": (None, True)}
        for name, coef in (("pg", 1), ("kl", 0.5), ("entropy", -0.25)):
            np.testing.assert_allclose(first.steps[name].weights, coef * expected, rtol=EXACT, atol=0, err_msg=name)
    if how == "other ids":  # each sample's second
        lengths = [len(rollout.mask) for rollout in gpt_oracle.rollouts_of(STEP.shape(CP_DP))]
        assert f" {sum(length > 1 for length in lengths)} of " in said[0]
    assert (first.measured.facts.get("tokens_compared", 0) > 0) == how.endswith("ids")


def test_a_rank_that_never_taps_a_term_gives_its_tokens_no_weight() -> None:
    """Two DP ranks of a reported step, by hand: one taps the policy loss alone; the same term declared apart."""
    group = SimpleNamespace(size=lambda: 2)
    alone = SimpleNamespace(size=lambda: 1)
    groups: Any = SimpleNamespace(dp=group, dp_cp=group, cp=alone, tp=alone, pp=alone)
    config = SimpleNamespace(calculate_per_token_loss=False, num_moe_experts=None)

    def sent_by(rank: int, **coefs: float) -> FromRank:
        sent = FromRank(StepState(stages={0: Stage(Factor(1.0, 1e-8))}), num_microbatches=1)
        for term, coef in coefs.items():
            hooked = GradientSum(torch.full((2,), coef / 4))
            tapped = Tap((2,), samples=Samples([torch.ones(2)]), coef=coef, hooked=hooked)
            sent.add(term, tapped, Samples([torch.ones(2)]), 1, None, dp_rank=rank, cp_rank=0, microbatch=0)
        return sent

    def verdicts(*from_ranks: FromRank) -> dict[str, Any]:
        steps = assembled(from_ranks, groups, config, 1.0, dynamic_cp=False)
        return {term: judge(step, "token_mean") for term, step in steps.items()}

    sound = verdicts(sent_by(0, pg=1.0, kl=0.5), sent_by(1, pg=1.0, kl=0.5))
    assert (sound["pg"].sound, sound["kl"].sound) == (True, True)
    partly = verdicts(sent_by(0, pg=1.0, kl=0.5), sent_by(1, pg=1.0))
    assert partly["pg"].sound
    assert "2 of 4 active tokens have no weight, all of DP 1" in str(partly["kl"])
    apart = verdicts(sent_by(0, pg=1.0, kl=0.5), sent_by(1, pg=1.0, kl=0.25))
    assert "declare 'kl' differently" in apart["kl"].headline
