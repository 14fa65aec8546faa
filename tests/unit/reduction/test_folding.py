"""Advantages with the aggregation folded in: the plain sum of the losses is the step loss, or folding is refused.

The losses here are written out in float64 and apart from the package; the step loss is the oracle's. A plain sum has no
layout: cuts over micro-batches and CP cannot matter. What a rank folds is, and the totals are those of all ranks.
"""

import copy
import doctest
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from oracle import COUNTINGS, MODES
from torch import Tensor

from megatron_rl_loss import StepTotals
from megatron_rl_loss.losses import ppo_clip_loss
from megatron_rl_loss.reduction import fold_into_advantages, folding, is_folded
from megatron_rl_loss.reduction.folding import LOSSES

DIVISOR = 5.5
TOLERANCE = oracle.EXACT  # losses and their sum are float64 here, weights and folded advantages float32


def test_docstring_example() -> None:
    result = doctest.testmod(folding)
    assert (result.attempted, result.failed) == (3, 0)


# ---- losses of a token: (log_probs, old_log_probs, advantages, mask) -> losses, 1-D tensors of a sample


def ratio(log_probs: Tensor, old: Tensor) -> Tensor:
    return (log_probs - old).exp()


def ppo_clip(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    r = ratio(log_probs, old)
    return torch.maximum(-advantages * r, -advantages * r.clamp(0.8, 1.28))


def dual_clip(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    loss = ppo_clip(log_probs, old, advantages, mask)
    return torch.where(advantages < 0, torch.minimum(loss, -1.5 * advantages), loss)


def cispo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -ratio(log_probs, old).clamp(max=1.28).detach() * advantages * log_probs


def sapo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    temperature = torch.where(advantages > 0, 1.0, 1.05)
    return -torch.sigmoid(temperature * (ratio(log_probs, old) - 1)) * 4 / temperature * advantages


def gspo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    weights = (mask != 0).double()
    s = (((log_probs - old) * weights).sum() / weights.sum().clamp(min=1)).exp()
    return torch.maximum(-advantages * s, -advantages * s.clamp(0.8, 1.28))


def reinforce(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -advantages * log_probs


def importance_sampling(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -advantages * ratio(log_probs, old)


def rollout_is(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    r = ratio(log_probs, old)
    return -torch.where((r > 0.8) & (r < 1.28), r, 0.0).detach() * advantages * log_probs


def dppo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    moved = log_probs.exp() - old.exp()
    valid = torch.where(advantages > 0, moved <= 0.05, moved >= -0.05)
    return -advantages * ratio(log_probs, old).clamp(max=20).detach() * log_probs * valid


def vespo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A Gamma-shaped weight of the sequence's ratio, its parameters by the sign of the advantage."""
    log_ratio = ((log_probs - old) * (mask != 0)).sum().clamp(-20, 20)
    power = torch.where(advantages >= 0, 2.0, 3.0)
    phi = (power + power * log_ratio - power * log_ratio.exp()).exp().detach()
    return -phi * advantages * log_probs


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
HOMOGENEOUS: dict[str, Loss] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "sapo": sapo,
    "gspo": gspo,
    "reinforce": reinforce,
    "importance_sampling": importance_sampling,
    "rollout_is": rollout_is,
    "dppo": dppo,
    "vespo": vespo,
}
OTHER_NAMES = {"ppo": "ppo_clip", "regular": "ppo_clip", "vanilla": "ppo_clip", "gpg": "reinforce"}


def with_kl(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return ppo_clip(log_probs, old, advantages, mask) + 0.001 * ((old - log_probs).expm1() - old + log_probs)


def with_entropy(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return ppo_clip(log_probs, old, advantages, mask) + 0.001 * log_probs.exp() * log_probs


def dro(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -(log_probs * advantages - 0.5 * 0.05 * (log_probs - old).square())


def clip_cov(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Tokens whose covariance of advantage and log-prob lies between bounds are left out."""
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    return ppo_clip(log_probs, old, advantages, mask) * ((covariance < 0.1) | (covariance > 5))


def kl_cov(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    covariance = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    kl = (log_probs - old).abs()
    return -advantages * ratio(log_probs, old) + torch.where(covariance >= covariance.median(), kl, 0.0)


REFUSED_LOSSES: dict[str, Loss] = {
    "ppo_clip+kl": with_kl,
    "ppo_clip + entropy": with_entropy,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


# ---- steps


class Step:
    """Random ragged samples: some fully masked, fractional masks, rollouts of several samples, uneven prompt groups."""

    def __init__(self, seed: int, binary: bool = False) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.samples: list[oracle.Sample] = []
        for i in range(rng.randint(6, 10)):
            length = rng.randint(1, 9)
            mask = [rng.choice([0, 1] if binary else [0, 0.5, 1, 1]) for _ in range(length)]
            if i in (1, 4):
                mask = [0] * length
            one = oracle.sample([0] * length, mask, rollout_id=f"r{i - i % 3 // 2}", prompt_id=f"p{min(i // 3, 2)}")
            self.samples.append(one)
        lengths = [len(one.mask) for one in self.samples]
        # float32 numbers, held exactly in float64
        self.log_probs = [(-2 - torch.rand(n) * 3).double().requires_grad_() for n in lengths]
        self.old = [
            (p.detach() + torch.randn(n) * 0.4).float().double() for p, n in zip(self.log_probs, lengths, strict=True)
        ]
        self.advantages = [torch.randn(n) for n in lengths]

        self.masks = [one.mask for one in self.samples]
        self.ids = {
            "rollout_ids": [one.rollout_id for one in self.samples],
            "prompt_ids": [one.prompt_id for one in self.samples],
        }

    def totals(self, part: slice = slice(None)) -> StepTotals:
        return StepTotals.from_loss_masks(self.masks[part], **{name: ids[part] for name, ids in self.ids.items()})

    def fold(self, mode: str, part: slice = slice(None), **options: Any) -> list[Tensor]:
        """What a rank folds that has this part of the samples."""
        options = {"totals": self.totals(), "divisor": divisor_of(mode), **options}
        options |= {name: ids[part] for name, ids in self.ids.items()}
        return fold_into_advantages(self.advantages[part], self.masks[part], mode=mode, **options)

    def fold_on_two_ranks(self, mode: str, **options: Any) -> list[Tensor]:
        return self.fold(mode, slice(4), **options) + self.fold(mode, slice(4, None), **options)

    def losses(self, loss: Loss, advantages: Sequence[Tensor]) -> list[Tensor]:
        parts = zip(self.log_probs, self.old, advantages, self.masks, strict=True)
        return [loss(p, old, a.double(), mask) for p, old, a, mask in parts]

    def plain_sum(self, loss: Loss, advantages: Sequence[Tensor]) -> Tensor:
        return torch.cat(self.losses(loss, advantages)).sum()

    def oracle_loss(self, loss: Loss, mode: str, units: str = "all") -> Tensor:
        losses = self.losses(loss, self.advantages)
        samples = [replace(one, losses=values) for one, values in zip(self.samples, losses, strict=True)]
        return oracle.step_loss(mode, samples, divisor_of(mode), units)


def divisor_of(mode: str) -> float | None:
    return DIVISOR if mode in ("constant", "token_sum") else None


def gradients(total: Tensor, step: Step) -> Tensor:
    return torch.cat(list(torch.autograd.grad(total, step.log_probs, materialize_grads=True)))


def error_of(total: Tensor, expected: Tensor, step: Step) -> float:
    slopes = gradients(expected, step)
    gradient = (gradients(total, step) - slopes).abs().max() / slopes.abs().max()
    scale = float((slopes.abs()).sum())
    return oracle.worst_of(abs(float(total.detach()) - float(expected.detach())) / scale, float(gradient))


@pytest.mark.parametrize(("mode", "units"), COUNTINGS, ids=[f"{m}-{u}" for m, u in COUNTINGS])
def test_the_plain_sum_is_the_step_loss(mode: str, units: str, record_property: Callable[[str, object], None]) -> None:
    worst = 0.0
    for seed, (name, loss) in enumerate(HOMOGENEOUS.items()):
        step = Step(seed)
        folded = step.fold_on_two_ranks(mode, units=units, loss=name)
        worst = max(worst, error_of(step.plain_sum(loss, folded), step.oracle_loss(loss, mode, units), step))
    assert worst < TOLERANCE
    record_property("folding_error", worst)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token_sum"])  # which needs no totals
def test_the_comparison_sees_totals_of_one_rank_only(mode: str) -> None:
    step = Step(2)
    halves = [slice(4), slice(4, None)]
    local = [one for part in halves for one in step.fold(mode, part, totals=step.totals(part))]
    for folded, is_right in ((local, False), (step.fold_on_two_ranks(mode), True)):
        error = error_of(step.plain_sum(ppo_clip, folded), step.oracle_loss(ppo_clip, mode), step)
        assert (error < TOLERANCE) if is_right else (error > 0.05)


def test_the_packages_own_loss_and_a_mask_applied_twice() -> None:
    """With 0/1 masks a trainer may multiply by the mask again (SkyRL does)."""
    step = Step(3, binary=True)

    def loss(p: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return ppo_clip_loss(p, old, advantages, clip_high=0.28).per_token_loss * mask

    total = step.plain_sum(loss, step.fold("prompt_mean", loss="ppo_clip"))
    assert error_of(total, step.oracle_loss(ppo_clip, "prompt_mean"), step) < TOLERANCE


def padded(tensors: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True).double()


def test_skyrls_documented_scaling() -> None:
    """advantages / denominator on the padded matrix, as its `loss_reduction` is defined, here for 0/1 masks."""
    step = Step(5, binary=True)
    masks, advantages, prompts = padded(step.masks), padded(step.advantages), step.ids["prompt_ids"]
    rows, lengths = len(masks), masks.sum(-1, keepdim=True).clamp(min=1)
    of_prompt = [max(float(masks[[other == one for other in prompts]].sum()), 1) for one in prompts]
    expected = {
        "skyrl:token_mean": advantages / masks.sum(),
        "skyrl:sequence_mean": advantages / (rows * lengths),
        "skyrl:seq_mean_token_sum_norm": advantages / (rows * DIVISOR),
        "skyrl:prompt_mean": advantages / (len(set(prompts)) * torch.tensor(of_prompt)[:, None]),
    }
    totals = StepTotals.from_loss_masks(step.masks, prompt_ids=prompts)
    for name, scaled in expected.items():
        divisor = DIVISOR if name.endswith("norm") else None
        options: dict[str, Any] = {"mode": name, "totals": totals, "divisor": divisor, "prompt_ids": prompts}
        folded = padded(fold_into_advantages(step.advantages, step.masks, **options))
        torch.testing.assert_close(folded, scaled * masks, rtol=oracle.EXACT, atol=0, msg=name)


def test_numbers_a_sample_are_values_of_all_its_tokens() -> None:
    step = Step(1)
    numbers = [float(i) - 2.5 for i in range(len(step.masks))]
    step.advantages = [torch.full((len(mask),), a) for a, mask in zip(numbers, step.masks, strict=True)]
    expected = step.fold("sample_mean")
    for given in (numbers, torch.tensor(numbers), [torch.tensor(a) for a in numbers], torch.tensor(numbers).bfloat16()):
        options: dict[str, Any] = {"mode": "sample_mean", "totals": step.totals(), **step.ids}
        for one, other in zip(fold_into_advantages(given, step.masks, **options), expected, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other)


def test_parts_share_no_storage_and_have_no_graph() -> None:
    """One that is sent elsewhere takes none along, and one that is changed in place changes no other."""
    step = Step(1)
    step.advantages = [one.requires_grad_() for one in step.advantages]
    folded = step.fold("sample_mean")
    assert not any(one.requires_grad for one in folded)
    for one in folded:
        assert one.untyped_storage().nbytes() == one.numel() * one.element_size()
    kept = [one.clone() for one in folded[1:]]
    folded[0].fill_(7)
    assert all(map(torch.equal, folded[1:], kept))


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
    folded = passed(Step(4).fold("token_mean"))
    assert is_folded(folded)
    assert is_folded(folded[-1])
    masks = [torch.ones(one.numel()) for one in folded]
    totals = StepTotals.from_loss_masks(masks)
    with pytest.raises(ValueError, match="folded already: folding them again would divide by the step's counts twice"):
        fold_into_advantages(folded, masks, mode="token_mean", totals=totals)
    new = [one + 0 for one in folded]  # the mark does not survive that: said in the docstring
    assert not is_folded(new)
    fold_into_advantages(new, masks, mode="token_mean", totals=totals)


# ---- losses


def test_every_known_loss_is_written_out_here() -> None:
    assert {name for name, reason in LOSSES.items() if reason is None} == {*HOMOGENEOUS, *OTHER_NAMES}


def flat_loss(step: Step, loss: Loss) -> Callable[[Tensor], Tensor]:
    lengths = [len(mask) for mask in step.masks]
    if loss in (clip_cov, kl_cov):  # of the batch as a whole
        return lambda advantages: loss(torch.cat(step.log_probs), torch.cat(step.old), advantages, advantages)
    return lambda advantages: torch.cat(step.losses(loss, advantages.split(lengths)))


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_homogeneous_losses_are_accepted_by_name_and_tried_out(name: str) -> None:
    step = Step(8)
    for mode in MODES:
        step.fold(mode, loss=name)
        step.fold(mode, loss=flat_loss(step, HOMOGENEOUS[name]))


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_other_losses_are_refused_by_name_and_when_tried_out(name: str) -> None:
    step = Step(9)
    losses = flat_loss(step, REFUSED_LOSSES[name])
    with pytest.raises(ValueError, match=r"with folded advantages: .*Aggregate the losses with make_pg_loss_reducer"):
        step.fold("token_mean", loss=name)
    with pytest.raises(ValueError, match=r"not positively homogeneous in the advantage"):
        step.fold("token_mean", loss=losses)
    plain, folded = (losses(torch.cat(a)) for a in (step.advantages, step.fold("token_mean")))  # as it would have gone
    weights = torch.cat(step.masks).double() / oracle.mask_tokens(step.samples)
    assert error_of(folded[weights != 0].sum(), (plain * weights).sum(), step) > 1e-3


def test_a_loss_is_tried_out_where_tokens_are_active_and_must_be_finite_there() -> None:
    masks, totals = [torch.tensor([1, 1, 0])], StepTotals(step_tokens=4)
    advantages = [torch.tensor([1.0, -2.0, float("nan")])]

    def fold(loss: Callable[[Tensor], Tensor]) -> None:
        fold_into_advantages(advantages, masks, mode="token_mean", totals=totals, loss=loss)

    fold(lambda given: -given * given.isfinite().all())  # it is given no NaN
    fold(lambda given: -given / torch.tensor([1, 1, 0]))
    fold(lambda given: (-given).bfloat16())
    with pytest.raises(ValueError, match="a loss whose value is nan"):
        fold(lambda given: -given * torch.tensor([1, float("nan"), 1]))
    with pytest.raises(ValueError, match="not positively homogeneous"):
        fold(lambda given: -given * (1 + 1e-3 * (given.abs() < 0.3)))  # beyond the rounding of float32


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("ppoclip", "there is no 'ppoclip' among the known ones. Choose one of ppo_clip, ppo,.*or pass the loss as a"),
        ("geo_mean", "it averages a sequence's advantages itself"),
        (lambda advantages: advantages.sum(), r"shape \(\) for advantages of shape.*Return unreduced losses"),
    ],
)
def test_refused_losses(loss: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Step(9).fold("token_mean", loss=loss)


# ---- bad input


@pytest.mark.parametrize("mode", MODES)
def test_totals_of_less_than_these_samples_are_refused(mode: str) -> None:
    step = Step(12)
    with pytest.raises(ValueError, match="Make the totals from"):
        step.fold(mode, totals=step.totals(slice(4)))
    step.fold(mode, totals=step.totals())


MASKS = [torch.tensor([1, 0]), torch.tensor([1])]


def test_weights_below_zero_are_refused() -> None:
    totals = StepTotals.from_loss_masks(MASKS)
    folded = fold_into_advantages([1.0, 3.0], MASKS, mode=lambda inputs: torch.tensor([2.0, 1.0]), totals=totals)
    assert [one.tolist() for one in folded] == [[2, 0], [3]]
    with pytest.raises(ValueError, match=r"weights below 0 from the mode .*lambda"):
        fold_into_advantages([1.0, 3.0], MASKS, mode=lambda inputs: torch.tensor([2.0, -1.0]), totals=totals)


@pytest.mark.parametrize(
    ("advantages", "error", "text"),
    [
        ([1.0], ValueError, "1 advantages for 2 loss masks"),
        (torch.ones(2, 2), ValueError, r"advantages is a tensor of shape \(2, 2\).*Pass list\(advantages\)"),
        ([torch.ones(2), torch.ones(2)], ValueError, r"advantages of sample 1 are \(2,\).*mask's 1 entries"),
        ([torch.ones(2), 1.0], ValueError, r"advantages of sample 1 are 1.0.*a number for every one"),
        ([torch.ones(2), torch.tensor(1.0)], ValueError, r"advantages of sample 1 are \(\)"),
        ([float("nan"), 1.0], ValueError, "NaN or Inf at active tokens"),
        ([1.0, float("inf")], ValueError, "NaN or Inf at active tokens"),
        ([True, False], TypeError, "advantages of torch.bool"),
        ([torch.ones(2).cfloat(), torch.ones(1).cfloat()], TypeError, "advantages of torch.complex64"),
    ],
)
def test_bad_advantages(advantages: Any, error: type[Exception], text: str) -> None:
    totals = StepTotals.from_loss_masks(MASKS)
    with pytest.raises(error, match=text):
        fold_into_advantages(advantages, MASKS, mode="token_mean", totals=totals)
    fold_into_advantages([torch.tensor([1.0, float("nan")]), torch.ones(1)], MASKS, mode="token_mean", totals=totals)
