"""Advantages with the aggregation folded in: each is times its token's weight in the step loss, or folding is refused.

Weights are the oracle's. A plain sum has no layout: cuts over micro-batches and CP cannot matter. What a rank folds is,
and the totals are those of all ranks.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from oracle import COUNTINGS, MODES
from refusals import refusal_tests, refusals
from step_samples import step_samples
from steps import divisor_of, ids_of, totals_of
from torch import Tensor

from megatron_rl_loss import Samples, StepTotals, make_pg_loss_reducer, resolve
from megatron_rl_loss.losses import policy_loss, segment_sum, to_tokens
from megatron_rl_loss.modes import weighted_token_mean
from megatron_rl_loss.reduction import fold_into_advantages, is_folded
from megatron_rl_loss.reduction.folding import LOSSES

SAMPLES = step_samples(seed=4)
MASKS = [one.mask for one in SAMPLES]
LENGTHS = [len(mask) for mask in MASKS]
GENERATOR = torch.Generator().manual_seed(4)
# float32 numbers, held exactly in float64
LOG_PROBS = (-2 - torch.rand(sum(LENGTHS), generator=GENERATOR) * 3).double()
OLD = (LOG_PROBS + torch.randn(sum(LENGTHS), generator=GENERATOR) * 0.4).float().double()
ADVANTAGES = list(torch.randn(sum(LENGTHS), generator=GENERATOR).split(LENGTHS))


def fold(mode: str = "token_mean", part: slice = slice(None), **options: Any) -> list[Tensor]:
    """What a rank folds that has this part of the samples."""
    options = {"totals": totals_of(SAMPLES), "divisor": divisor_of(mode), **ids_of(SAMPLES[part]), **options}
    return fold_into_advantages(ADVANTAGES[part], MASKS[part], mode=mode, **options)


@pytest.mark.parametrize(("mode", "units"), COUNTINGS, ids=[f"{m}-{u}" for m, u in COUNTINGS])
def test_an_advantage_is_times_its_tokens_weight(
    mode: str, units: Any, record_property: Callable[[str, object], None]
) -> None:
    """On two ranks; with the totals of one alone it would be another, but in a plain sum."""
    weights = torch.cat(oracle.step_gradient(mode, SAMPLES, divisor_of(mode), units))
    expected = weights * torch.cat(ADVANTAGES).double()
    halves = slice(6), slice(6, None)
    folded = torch.cat([one for part in halves for one in fold(mode, part, units=units)])
    torch.testing.assert_close(folded.double(), expected, rtol=oracle.EXACT, atol=0)
    record_property("folding_error", float(((folded.double() - expected) / expected).nan_to_num().abs().max()))
    local = [one for part in halves for one in fold(mode, part, units=units, totals=totals_of(SAMPLES[part]))]
    assert torch.allclose(torch.cat(local).double(), expected, rtol=1e-3, atol=0) == (mode == "token_sum")


def test_numbers_a_sample_are_values_of_all_its_tokens() -> None:
    numbers = [float(i) - 2.5 for i in range(len(MASKS))]
    options: dict[str, Any] = {"mode": "sample_mean", "totals": totals_of(SAMPLES), **ids_of(SAMPLES)}
    rows = [torch.full((len(mask),), a) for a, mask in zip(numbers, MASKS, strict=True)]
    expected = torch.cat(fold_into_advantages(rows, MASKS, **options))
    for given in (numbers, torch.tensor(numbers), [torch.tensor(a) for a in numbers], torch.tensor(numbers).bfloat16()):
        folded = torch.cat(fold_into_advantages(given, MASKS, **options))
        assert folded.dtype == torch.float32
        torch.testing.assert_close(folded, expected)


def test_parts_share_no_storage_and_have_no_graph() -> None:
    """One that is sent elsewhere takes none along, and one that is changed in place changes no other."""
    leaves = [one.clone().requires_grad_() for one in ADVANTAGES]
    folded = fold_into_advantages(leaves, MASKS, mode="token_mean", totals=totals_of(SAMPLES), **ids_of(SAMPLES))
    assert not any(one.requires_grad for one in folded)
    for one in folded:
        assert one.untyped_storage().nbytes() == one.numel() * one.element_size()


def test_a_mode_that_reads_labels_is_folded_and_reduced() -> None:
    masks, labels = [torch.ones(2), torch.ones(1)], {"weight": [1.0, 3.0]}
    statistics = resolve(weighted_token_mean).mode.statistics  # type: ignore[union-attr]
    totals = StepTotals.from_loss_masks(masks, labels=labels, statistics=statistics)
    folded = fold_into_advantages([2.0, 1.0], masks, mode=weighted_token_mean, totals=totals, labels=labels)
    right = [torch.tensor([0.4, 0.4]), torch.tensor([0.6])]  # weights 1, 1, 3 of 5
    torch.testing.assert_close(folded, right)
    reducer = make_pg_loss_reducer(weighted_token_mean, masks, totals=totals, labels=labels)
    assert float(reducer(torch.tensor([2.0, 2.0, 1.0]))) == pytest.approx(1.4)


def test_nothing_and_masked_nan() -> None:
    totals = StepTotals.from_loss_masks([torch.ones(2)])
    assert fold_into_advantages([], [], mode="token_mean", totals=totals, loss=torch.neg) == []
    masked = fold_into_advantages([1.0], [torch.zeros(2)], mode="token_mean", totals=totals, loss=torch.neg)
    assert masked[0].tolist() == [0, 0]
    nan = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    (folded,) = fold_into_advantages([nan], [torch.tensor([1, 0])], mode="token_sum", totals=totals)
    assert (folded.tolist(), folded.dtype) == ([1, 0], torch.float64)


# ---- once

TWICE: dict[str, Callable[[list[Tensor]], Any]] = {
    "as they are": lambda folded: folded,
    "in another order": lambda folded: sorted(folded, key=lambda one: one.numel()),
    "one of them": lambda folded: [torch.zeros_like(one) for one in folded[:-1]] + folded[-1:],
    "copied": copy.deepcopy,
    "pickled": lambda folded: pickle.loads(pickle.dumps(folded)),
}


@pytest.mark.parametrize("passed", TWICE.values(), ids=TWICE.keys())
def test_folding_twice_is_refused(passed: Callable[[list[Tensor]], Any]) -> None:
    """The bug of SkyRL #925's review: the critic's pass and the policy's each normalised the batch's advantages."""
    folded = passed(fold())
    assert is_folded(folded)
    assert is_folded(folded[-1])
    masks = [torch.ones(one.numel()) for one in folded]
    totals = StepTotals.from_loss_masks(masks)
    with pytest.raises(ValueError, match="folded already: folding them again would divide by the step's counts twice"):
        fold_into_advantages(folded, masks, mode="token_mean", totals=totals)
    new = [one + 0 for one in folded]  # the mark does not survive that: said in the docstring
    assert not is_folded(new)
    fold_into_advantages(new, masks, mode="token_mean", totals=totals)


# ---- losses of all tokens, by their advantages

RATIO = (LOG_PROBS - OLD).exp()
LOCAL = Samples(MASKS).local(0, 1)
OfAdvantages = Callable[[Tensor], Tensor]


def ours(name: str, **settings: Any) -> OfAdvantages:
    """A loss of this package, whose formula tests/unit/losses proves."""
    return lambda a: policy_loss(name, LOG_PROBS, OLD, a, LOCAL, **settings).per_token_loss


def vespo(a: Tensor) -> Tensor:
    """A Gamma-shaped weight of the sequence's ratio, its parameters by the sign of the advantage."""
    log_ratio, power = to_tokens(segment_sum(LOG_PROBS - OLD, LOCAL), LOCAL), torch.where(a >= 0, 2.0, 3.0)
    return -(power + power * log_ratio - power * log_ratio.exp()).exp() * a * LOG_PROBS


def covariance(a: Tensor) -> Tensor:
    return (a - a.mean()) * (LOG_PROBS - LOG_PROBS.mean())


def kl_cov(a: Tensor) -> Tensor:
    kl, found = (LOG_PROBS - OLD).abs(), covariance(a)
    return -a * RATIO + torch.where(found >= found.median(), kl, 0.0)


PPO = ours("ppo", clip_high=0.28)
HOMOGENEOUS: dict[str, OfAdvantages] = {
    "ppo_clip": PPO,
    "dual_clip": ours("ppo", dual_clip=1.5),
    "cispo": ours("cispo"),
    "sapo": ours("sapo"),
    "gspo": ours("gspo", clip_low=0.2, clip_high=0.28),
    "dppo": ours("dppo_tv"),
    "vespo": vespo,
    "reinforce": lambda a: -a * LOG_PROBS,
    "importance_sampling": lambda a: -a * RATIO,
    "rollout_is": lambda a: -torch.where((RATIO > 0.8) & (RATIO < 1.28), RATIO, 0.0) * a * LOG_PROBS,
}
OTHER_NAMES = {"ppo", "regular", "vanilla", "gpg"}
REFUSED_LOSSES: dict[str, OfAdvantages] = {
    "ppo_clip+kl": lambda a: PPO(a) + 0.001 * ((OLD - LOG_PROBS).expm1() - OLD + LOG_PROBS),
    "ppo_clip + entropy": lambda a: PPO(a) + 0.001 * LOG_PROBS.exp() * LOG_PROBS,
    "dro": lambda a: -(LOG_PROBS * a - 0.5 * 0.05 * (LOG_PROBS - OLD).square()),
    "clip_cov": lambda a: PPO(a) * ((covariance(a) < 0.1) | (covariance(a) > 5)),
    "kl_cov": kl_cov,
}


def test_every_known_loss_is_written_out_here() -> None:
    assert {name for name, reason in LOSSES.items() if reason is None} == {*HOMOGENEOUS, *OTHER_NAMES}


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_homogeneous_losses_are_accepted_by_name_and_tried_out(name: str) -> None:
    for mode in MODES:
        assert torch.equal(torch.cat(fold(mode, loss=name)), torch.cat(fold(mode, loss=HOMOGENEOUS[name])))


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_other_losses_are_refused_by_name_and_when_tried_out(name: str) -> None:
    with pytest.raises(ValueError, match=r"with folded advantages: .*Aggregate the losses with make_pg_loss_reducer"):
        fold(loss=name)
    with pytest.raises(ValueError, match=r"not positively homogeneous in the advantage"):
        fold(loss=REFUSED_LOSSES[name])


THREE = [torch.tensor([1, 1, 0])]


def tried(loss: OfAdvantages) -> list[Tensor]:
    advantages = [torch.tensor([1.1, -2.0, float("nan")])]
    return fold_into_advantages(advantages, THREE, mode="token_mean", totals=StepTotals(step_tokens=3), loss=loss)


def of_nan(a: Tensor) -> Tensor:
    return -a * torch.tensor([1, float("nan"), 1])


def kinked(by: float, dtype: torch.dtype) -> tuple[OfAdvantages]:
    return (lambda a: (-1.3 * a * (1 + by * (a.abs() < 0.4))).to(dtype),)


HALF = torch.bfloat16  # in which a product is rounded to 2^-8
NOT_HOMOGENEOUS = "not positively homogeneous"
# ---- bad input

PAIR = [torch.tensor([1, 0]), torch.tensor([1])]
SOUND = ([1.0, 3.0],)


def of_two(advantages: Any, mode: Any = "token_mean", loss: Any = None) -> list[Tensor]:
    totals = StepTotals.from_loss_masks(PAIR)
    return fold_into_advantages(advantages, PAIR, mode=mode, totals=totals, loss=loss)


def with_totals(mode: str, part: slice) -> list[Tensor]:
    return fold(mode, totals=totals_of(SAMPLES[part]))


REFUSALS = {
    **refusals(
        tried,
        ((of_nan,), "a loss whose value is nan", (lambda a: -a / THREE[0],)),
        (kinked(1e-3, torch.float32), NOT_HOMOGENEOUS, (lambda a: -a * a.isfinite().all(),)),
        (kinked(0.05, HALF), NOT_HOMOGENEOUS, kinked(0.0, HALF)),
        ((torch.sum,), r"shape \(\) for advantages of shape.*Return unreduced losses", (lambda a: a.exp() * 0,)),
    ),
    **refusals(with_totals, *(((mode, slice(4)), "Make the totals from", (mode, slice(None))) for mode in MODES)),
    **refusals(
        of_two,
        (([1.0],), "1 advantages for 2 loss masks", SOUND),
        ((torch.ones(2, 2),), r"advantages is a tensor of shape \(2, 2\).*Pass list\(advantages\)", SOUND),
        (([torch.ones(2), torch.ones(2)],), r"advantages of sample 1 are \(2,\).*mask's 1 entries", SOUND),
        (([torch.ones(2), 1.0],), r"advantages of sample 1 are 1.0.*a number for every one", SOUND),
        (([torch.ones(2), torch.tensor(1.0)],), r"advantages of sample 1 are \(\)", SOUND),
        (([float("nan"), 1.0],), "NaN or Inf at active tokens", ([torch.tensor([1, float("nan")]), torch.ones(1)],)),
        (([1.0, float("inf")],), "NaN or Inf at active tokens", SOUND),
        (([1.0, 1.0], "token_mean", "ppoclip"), "no 'ppoclip' among the known ones. Choose one of ppo_clip,", SOUND),
        (([1.0, 1.0], "token_mean", "geo_mean"), "it averages a sequence's advantages itself", SOUND),
        (
            ([1.0, 3.0], lambda inputs: torch.tensor([2.0, -1.0])),
            r"weights below 0 from the mode .*lambda",
            ([1.0, 3.0], lambda inputs: torch.tensor([2.0, 1.0])),
        ),
    ),
    **refusals(
        of_two,
        (([True, False],), "advantages of torch.bool", SOUND),
        (([torch.ones(2).cfloat(), torch.ones(1).cfloat()],), "advantages of torch.complex64", SOUND),
        error=TypeError,
    ),
}


test_refusals = refusal_tests(REFUSALS)
