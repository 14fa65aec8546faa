"""The comparison of a step's terms with what was asked, on one rank and without a launch."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_loss import Microbatch, Samples, StepTotals, Term, make_pg_loss_reducer, plan_step, ppo_clip_loss, tap
from megatron_rl_loss.core.aggregation import resolve
from megatron_rl_loss.core.taps import Taps, observe
from megatron_rl_loss.proof.difference import named
from megatron_rl_loss.proof.exchange import Exchange
from megatron_rl_loss.proof.factor import Alike, Factor
from megatron_rl_loss.proof.findings import GIVEN, IN_PART, NOT_PROVED, WRONG, Finding, outcome_of, texts_of
from megatron_rl_loss.proof.measurement import Ranks
from megatron_rl_loss.proof.own_tokens import state_of
from megatron_rl_loss.proof.promises import Promises
from megatron_rl_loss.proof.step_state import StepState
from megatron_rl_loss.proof.terms import Comparison, compare_terms

RIGHT = Factor(1.0, 1e-8)
STEP = [Samples([[1, 1, 0]], prompt_ids=["a"]), Samples([[1], [0, 1]], prompt_ids=["a", "b"])]
POLICY = "token_mean on the policy loss"


def compared(
    loss_of: Callable[[Microbatch], Tensor],
    *,
    factor: Factor = RIGHT,
    mode: Any = "token_mean",
    samples: list[Samples] = STEP,
    **options: Any,
) -> tuple[StepState, Comparison]:
    """What is found of a step in which each micro-batch's loss goes back, and gradients are scaled by the factor."""
    plan, taps = plan_step(samples, mode, dp_group=None), Taps()
    measured: Any = SimpleNamespace(
        ranks=Ranks(), exchange=Exchange(), taps=taps, findings=[], gradient="finite", computes_loss=True,
        alike=Alike(total=3, factor=factor, covered=3), expected=resolve(mode), loss_scale=1.0,
        plan=plan.record.use, takes_forms_of="",
    )  # fmt: skip
    with observe(taps):
        for microbatch in plan:
            taps.begin_microbatch()
            loss_of(microbatch).backward()
    state, own = state_of(measured, plan.record.use, None)
    return state, compare_terms(measured, state, own, **options)


def faults(found: StepState | Comparison) -> list[str]:
    return texts_of(found.findings, WRONG)


def doubts(found: StepState | Comparison) -> list[str]:
    return texts_of(found.findings, NOT_PROVED)


def gaps(found: Comparison) -> list[str]:
    texts = texts_of(found.findings, IN_PART, GIVEN)
    return [text.removeprefix("not covered: ") for text in texts if text.startswith("not covered: ")]


def losses_of(microbatch: Microbatch) -> Tensor:
    return torch.arange(1.0, len(microbatch.tokens) + 1, requires_grad=True) * 1.0


def loss(microbatch: Microbatch, **terms: Any) -> Tensor:
    """The policy loss, with terms of other values and these modes and coefficients."""
    by_name = {name: Term(losses_of(microbatch), **settings) for name, settings in terms.items()}
    losses = losses_of(microbatch)
    return microbatch.loss({"pg": losses, **by_name} if by_name else losses)


def test_weights_as_asked_are_proved() -> None:
    state, comparison = compared(loss)
    assert (comparison.proved, comparison.findings) == ([POLICY], [Finding(GIVEN, "losses as given")])
    assert 0 <= comparison.deviation < 1e-6
    assert ([*state.terms], state.factors, state.gradient, state.uses_plan) == (["pg"], [RIGHT], "finite", True)
    assert (state.terms["pg"].is_reached, state.dtypes, state.findings) == (True, {"float32"}, [])


def test_a_term_over_masked_tokens_proves_nothing_of_a_step_without_a_token() -> None:
    """As an entropy bonus over whole responses; the proof waits for a step with one."""

    def with_entropy(microbatch: Microbatch) -> Tensor:
        responses = Samples([[1] * len(mask) for mask in microbatch.samples.loss_masks])
        entropies = tap(losses_of(microbatch), "entropy", samples=responses, aggregation=resolve("token_mean"))
        return microbatch.loss(losses_of(microbatch)) + entropies.sum() / 6

    masked = [Samples([[0, 0, 0]]), Samples([[0], [0, 0]])]
    _, comparison = compared(with_entropy, samples=masked)
    assert (comparison.proved, faults(comparison)) == (["token_mean on entropy"], [])
    assert comparison.totals is not None
    assert not comparison.totals.step_active_tokens


def test_of_several_losses_without_a_name_the_policy_loss_is_the_one_in_the_asked_mode() -> None:
    """Whichever is made first: a reducer made by hand says nothing else of its loss."""
    totals = StepTotals.of([[1, 1, 0], [1], [0, 1]])

    def by_hand(microbatch: Microbatch) -> Tensor:
        masks = microbatch.samples.loss_masks
        other, policy = (make_pg_loss_reducer(mode, masks, totals=totals) for mode in ("sample_mean", "token_mean"))
        return other(losses_of(microbatch)) + policy(losses_of(microbatch))

    state, comparison = compared(by_hand)
    assert state.asked == {resolve("token_mean").compared}
    assert (comparison.proved, faults(comparison)) == ([POLICY], [])
    assert gaps(comparison) == ["loss number 2 of a micro-batch (no mode of its own)"]


def test_larger_groups_than_were_generated_are_told() -> None:
    """Two samples of prompt a, where one was generated of each: a fault, or a doubt where prompts may come twice."""
    for is_sure, findings_of_kind in ((True, faults), (False, doubts)):
        _, comparison = compared(loss, mode="prompt_mean", promises=Promises(1, is_group_size_sure=is_sure))
        assert "A prompt has 2 samples where 1 are generated: prompts share an id" in findings_of_kind(comparison)[0]
        assert len(faults(comparison)) == is_sure


def test_losses_of_other_data_than_the_steps_are_told() -> None:
    """Once, though each token that came has the right weight; terms beside the policy loss may have other masks."""
    _, comparison = compared(loss, promises=Promises(data=(4.0, 3)))
    assert outcome_of(comparison.findings) is GIVEN
    _, comparison = compared(partial(loss, kl={"coef": 0.1}), promises=Promises(data=(5.0, 3)))
    (fault,) = faults(comparison)
    assert fault.startswith(
        "The step's data has 5 mask tokens of 3 samples, and its losses had 4 mask tokens of 3 samp"
    )


def test_a_factor_is_told_with_its_place() -> None:
    _, comparison = compared(loss, factor=Factor(0.25, 1e-8))
    fault, returned = faults(comparison)
    assert returned == "The plan was made without a Megatron model, for gradients summed over ranks."
    assert fault.startswith(f"{POLICY}: tokens weigh 0.25 times what they should; furthest off: token 0 of sample 0 of")
    assert (outcome_of(comparison.findings), comparison.proved) == (WRONG, [])


def test_other_weights_are_told_with_the_token_that_is_furthest_off() -> None:
    def own_loss(microbatch: Microbatch) -> Tensor:
        weights = microbatch.weights.clone()
        if len(weights) == 3 and len(microbatch.samples) == 2:  # the second micro-batch: the last token weighs thrice
            weights[2] *= 3
        losses = tap(losses_of(microbatch), samples=microbatch.samples)
        return (losses * weights).sum()

    _, comparison = compared(own_loss)
    assert faults(comparison)[:1] == [
        f"{POLICY}: tokens weigh 1 to 3 times what they should; furthest off: token 1 of sample 1 of micro-batch 1 on "
        "DP 0, CP 0 (rank 0)."
    ]

    def masked_too(microbatch: Microbatch) -> Tensor:
        losses = tap(losses_of(microbatch), samples=microbatch.samples)
        return (losses * (microbatch.weights + 0.125 * (microbatch.weights == 0))).sum()

    _, comparison = compared(masked_too)
    assert faults(comparison)[:1] == [
        f"{POLICY}: masked tokens weigh up to 0.5 times what the heaviest token should; furthest off: token 2 of "
        "sample 0 of micro-batch 0 on DP 0, CP 0 (rank 0)."
    ]


@pytest.mark.parametrize(
    ("kl", "proved", "uncovered"),
    [
        ([{"mode": "sample_mean"}] * 2, ["sample_mean on kl"], []),
        ([{"mode": "sample_mean", "coef": 0.5}] * 2, ["sample_mean on kl"], []),
        ([{}] * 2, ["token_mean on kl"], []),
        ([{"coef": 0.5}] * 2, ["token_mean on kl"], []),
        ([{"coef": 0}] * 2, [], ["kl (coefficient 0)"]),
        ([{"coef": 0.5}, {"coef": 0.25}], [],
         ["kl (its mode or coefficient differs between micro-batches, or is not known)"]),
        ([{"mode": "sample_mean"}, {"mode": "prompt_mean"}], [],
         ["kl (its mode or coefficient differs between micro-batches, or is not known)"]),
    ],
)  # fmt: skip
def test_further_terms(kl: list[Any], proved: list[str], uncovered: list[str]) -> None:
    """By their own modes and coefficients; what nobody can know of a term is said, and is no fault."""
    settings = iter(kl)
    _, comparison = compared(lambda microbatch: loss(microbatch, kl=next(settings)))
    assert (comparison.proved, gaps(comparison), faults(comparison)) == ([POLICY, *proved], uncovered, [])


def test_taps_of_further_terms() -> None:
    """A tap without a mode of its own or with a coefficient that may be any is not compared."""
    for options, reason in (
        ({}, "no mode of its own"),
        ({"coef": math.nan, "aggregation": plan_step(STEP, "token_mean", dp_group=None).record.modes.policy},
         "its mode or coefficient differs between micro-batches, or is not known"),
    ):  # fmt: skip

        def two_taps(microbatch: Microbatch, options: dict[str, Any] = options) -> Tensor:
            tapped = tap(losses_of(microbatch), "kl", samples=microbatch.samples, **options)
            return loss(microbatch) + (tapped * microbatch.weights).sum()

        _, comparison = compared(two_taps)
        assert (comparison.proved, gaps(comparison)) == ([POLICY], [f"kl ({reason})"])


def test_a_term_that_nothing_reaches_is_a_fault() -> None:
    """A term with a coefficient; and one that must be there, once."""
    policy = plan_step(STEP, "token_mean", dp_group=None).record.modes.policy

    def unreached(microbatch: Microbatch) -> Tensor:
        tap(losses_of(microbatch), "kl", samples=microbatch.samples, aggregation=policy, coef=0.5)
        return loss(microbatch)

    _, comparison = compared(unreached)
    assert faults(comparison) == ["The kl term has a coefficient, 0.5, and no gradient reaches it."]
    _, comparison = compared(loss, required=["pg", "kl"])
    assert faults(comparison) == ["The kl term went through a reducer of this library in no micro-batch."]

    def twice(microbatch: Microbatch) -> Tensor:
        return loss(microbatch) + sum(tap(losses_of(microbatch), "kl").sum() for _ in range(2))

    _, comparison = compared(twice, required=["kl"])
    assert faults(comparison)[0] == (
        "The kl term went through a reducer of this library several times in a micro-batch."
    )


def test_losses_that_were_made_and_thrown_away_do_not_count() -> None:
    def thrown_away(microbatch: Microbatch) -> Tensor:
        masks = [torch.from_numpy(mask) for mask in microbatch.samples.loss_masks]
        make_pg_loss_reducer("token_mean", masks, totals=microbatch.totals)(losses_of(microbatch))
        return microbatch.loss(losses_of(microbatch))

    state, comparison = compared(thrown_away)
    assert ([*state.terms], comparison.proved, faults(comparison)) == (["pg"], [POLICY], [])


def test_a_micro_batch_that_was_not_trained_on_weighs_nothing() -> None:
    """In the schedule and in a loop of one's own, whose plan knows it too."""

    def first_alone(microbatch: Microbatch, form: Any = "3-tuple") -> Tensor:
        if len(microbatch.samples) > 1:
            return torch.zeros(1, requires_grad=True).sum()
        returned = microbatch.loss(losses_of(microbatch), form=form)
        return returned if isinstance(returned, Tensor) else returned[0]

    for form, factor in (("3-tuple", 0.5), (None, 1.0)):
        state, comparison = compared(partial(first_alone, form=form), factor=Factor(factor, 1e-8))
        assert faults(state) == [
            "Of 2 micro-batches of the plan, [1] were not trained on in this step: the weights of the others hold only "
            "for the whole plan."
        ]
        says = (
            f"{POLICY}: tokens weigh 0 to 1 times what they should; furthest off: token 0 of sample 0 of micro-batch 1"
        )
        assert faults(comparison)[0].startswith(says)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, " (0.5 = 1/CP = 1/DP)"), (2.00001, " (2 = CP = DP)"), (1 / 12.0001, " (0.08333 = 1/(CP*K) = 1/(DP*K))"),
        (12, " (12 = CP*K = DP*K)"), (5, ""),
    ],
)  # fmt: skip
def test_a_constant_factor_is_named_by_the_counts_of_the_step(value: float, text: str) -> None:
    assert named(value, {"CP": 2, "DP": 2, "TP": 1, "K": 6}) == text


@pytest.mark.parametrize(
    ("mode", "divides_again"),
    [
        ("sample_mean", True),
        (lambda step: 1 / (step.tokens("sample") * step.units("sample")), True),  # a mode of one's own averages, too
        (lambda step: 1 / step.units("prompt"), False),  # a mean over prompts of sums: losses may be divided before
        ("token_sum", False),
    ],
)
def test_losses_that_are_divided_before_a_mode_that_averages(mode: Any, divides_again: bool) -> None:
    """A mode divides by numbers of tokens if it reads them, whether or not it takes a divisor; else it may be meant."""

    def divided(microbatch: Microbatch) -> Tensor:
        log_probs = torch.full((len(microbatch.tokens),), -1.0, requires_grad=True) * 1.0
        policy = ppo_clip_loss(log_probs, log_probs.detach(), torch.ones(len(log_probs)), microbatch)
        sample_factors = torch.tensor([1.0, 3.0] if len(microbatch.samples) == 2 else [7.0])
        sizes = sample_factors.repeat_interleave(torch.tensor(microbatch.samples.mask_lengths))
        return microbatch.loss(policy.per_token_loss / sizes)

    samples = [Samples([[1] * 7], prompt_ids=["a"]), Samples([[1], [1, 1, 1]], prompt_ids=["a", "b"])]
    _, comparison = compared(divided, mode=mode, samples=samples)
    assert ["averages them again" in text for text in faults(comparison)] == [True] * divides_again
    assert len(texts_of(comparison.findings, IN_PART)) == (not divides_again)
