"""Advantages with the aggregation folded in: the plain sum of the losses is the step loss, or folding is refused.

The losses here are written out in float64 and apart from the package; the step loss is the oracle's.
"""

import copy
import doctest
import itertools
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import oracle
import pytest
import torch
from oracle import COUNTINGS, MODES
from torch import Tensor

from megatron_rl_loss import ModeInputs, StepTotals
from megatron_rl_loss.losses import ppo_clip_loss
from megatron_rl_loss.modes import table as modes
from megatron_rl_loss.reduction import fold_into_advantages, folding, is_folded
from megatron_rl_loss.reduction.folding import LOSSES

DIVISOR = 5.5
TOLERANCE = oracle.EXACT  # losses and their sum are float64 here, weights and folded advantages float32


# ---- losses of a token: (log_probs, old_log_probs, advantages, masks) -> losses, lists of 1-D tensors


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

    def __len__(self) -> int:
        return len(self.samples)

    def ids(self, chosen: list[int]) -> dict[str, list[Any]]:
        return {
            "rollout_ids": [self.samples[i].rollout_id for i in chosen],
            "prompt_ids": [self.samples[i].prompt_id for i in chosen],
        }

    def masks(self, chosen: list[int]) -> list[Tensor]:
        return [self.samples[i].mask for i in chosen]

    def totals(self, chosen: list[int] | None = None) -> StepTotals:
        chosen = list(range(len(self))) if chosen is None else chosen
        return StepTotals.from_loss_masks(self.masks(chosen), **self.ids(chosen))

    def fold(self, chosen: list[int], **options: Any) -> list[Tensor]:
        options = {"totals": self.totals(), **options}
        return fold_into_advantages(
            [self.advantages[i] for i in chosen], self.masks(chosen), **options, **self.ids(chosen)
        )

    def losses(self, loss: Loss, advantages: list[Tensor]) -> list[Tensor]:
        parts = zip(self.log_probs, self.old, advantages, self.masks(list(range(len(self)))), strict=True)
        return [loss(p, old, a.double(), mask) for p, old, a, mask in parts]

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


def deal(count: int, ranks: int, rng: random.Random) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for i in range(count):
        rng.choice(dealt).append(i)
    return dealt


def summed_over_ranks(step: Step, folded: list[Tensor], loss: Loss, cp_size: int, rng: random.Random) -> Tensor:
    """A trainer that only sums: over micro-batches, and over the tokens each CP rank holds of them."""
    total = torch.zeros((), dtype=torch.float64)
    losses = step.losses(loss, folded)
    lengths = [len(mask) for mask in step.masks(list(range(len(step))))]
    for microbatch in deal(len(step), rng.randint(1, 4), rng):
        sizes = [-(-lengths[i] // (2 * cp_size)) * 2 * cp_size for i in microbatch]
        slots = oracle.padded_slots([lengths[i] for i in microbatch], sizes)
        for cp_rank in range(cp_size):
            for token in oracle.zigzag(slots, cp_rank, cp_size):
                if token is not None:
                    total = total + losses[microbatch[token[0]]][token[1]]
    return total


LAYOUTS = list(itertools.product((1, 2, 4), (1, 2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(("dp_size", "cp_size"), LAYOUTS, ids=[f"dp{d}-cp{c}" for d, c in LAYOUTS])
@pytest.mark.parametrize(("mode", "units"), COUNTINGS, ids=[f"{m}-{u}" for m, u in COUNTINGS])
def test_the_plain_sum_is_the_step_loss(
    mode: str, units: str, dp_size: int, cp_size: int, record_property: Callable[[str, object], None]
) -> None:
    worst = 0.0
    for seed, (name, loss) in enumerate(HOMOGENEOUS.items()):
        step, rng = Step(seed), random.Random(seed)
        folded: list[Any] = [None] * len(step)
        for chosen in deal(len(step), dp_size, rng):
            mine = step.fold(chosen, mode=mode, units=units, divisor=divisor_of(mode), loss=name)
            for i, part in zip(chosen, mine, strict=True):
                folded[i] = part
        total = summed_over_ranks(step, folded, loss, cp_size, rng)
        worst = max(worst, error_of(total, step.oracle_loss(loss, mode, units), step))
    assert worst < TOLERANCE
    record_property("folding_error", worst)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token_sum"])  # which needs no totals
def test_the_comparison_sees_totals_of_one_rank_only(mode: str) -> None:
    step, rng = Step(2), random.Random(2)
    for local in (False, True):
        folded: list[Any] = [None] * len(step)
        for chosen in ([0, 1, 2, 3], list(range(4, len(step)))):
            totals = step.totals(chosen if local else None)
            mine = step.fold(chosen, mode=mode, divisor=divisor_of(mode), totals=totals)
            for i, part in zip(chosen, mine, strict=True):
                folded[i] = part
        total = summed_over_ranks(step, folded, ppo_clip, 2, rng)
        error = error_of(total, step.oracle_loss(ppo_clip, mode), step)
        assert (error > 0.05) if local else (error < TOLERANCE)


def test_the_packages_own_loss_and_a_mask_applied_twice() -> None:
    """With 0/1 masks a trainer may multiply by the mask again (SkyRL does)."""
    step = Step(3, binary=True)
    everything = list(range(len(step)))
    folded = step.fold(everything, mode="prompt_mean", loss="ppo_clip")
    total = sum(
        (ppo_clip_loss(p, old, a.double(), clip_high=0.28).per_token_loss * mask).sum()
        for p, old, a, mask in zip(step.log_probs, step.old, folded, step.masks(everything), strict=True)
    )
    assert error_of(total, step.oracle_loss(ppo_clip, "prompt_mean"), step) < TOLERANCE


def test_skyrls_documented_scaling() -> None:
    """advantages / denominator on the padded matrix, as its `loss_reduction` is defined, here for 0/1 masks."""
    step = Step(5, binary=True)
    everything = list(range(len(step)))
    alone = [replace(one, rollout_id=None) for one in step.samples]
    masks = torch.nn.utils.rnn.pad_sequence(step.masks(everything), batch_first=True).double()
    advantages = torch.nn.utils.rnn.pad_sequence(step.advantages, batch_first=True).double()
    rows, lengths = len(masks), masks.sum(-1, keepdim=True).clamp(min=1)
    prompts = sorted({one.prompt_id for one in alone}, key=str)
    of_prompt = {p: sum(float(one.mask.sum()) for one in alone if one.prompt_id == p) for p in prompts}
    per_prompt = torch.tensor([[len(prompts) * max(of_prompt[one.prompt_id], 1)] for one in alone])
    expected = {
        "skyrl:token_mean": advantages / masks.sum(),
        "skyrl:sequence_mean": advantages / (rows * lengths),
        "skyrl:seq_mean_token_sum_norm": advantages / (rows * DIVISOR),
        "skyrl:prompt_mean": advantages / per_prompt,
    }
    prompt_ids = [one.prompt_id for one in alone]
    totals = StepTotals.from_loss_masks(step.masks(everything), prompt_ids=prompt_ids)
    for name, scaled in expected.items():
        folded = fold_into_advantages(
            step.advantages,
            step.masks(everything),
            mode=name,
            totals=totals,
            prompt_ids=prompt_ids,
            divisor=DIVISOR if name.endswith("norm") else None,
        )
        padded = torch.nn.utils.rnn.pad_sequence(folded, batch_first=True)
        torch.testing.assert_close(padded.double(), scaled * masks, rtol=oracle.EXACT, atol=0, msg=name)


def test_numbers_a_sample_are_values_of_all_its_tokens() -> None:
    step = Step(1)
    everything = list(range(len(step)))
    numbers = [float(i) - 2.5 for i in everything]
    spread = [torch.full((len(mask),), a) for a, mask in zip(numbers, step.masks(everything), strict=True)]
    options = {"mode": "sample_mean", "totals": step.totals(), **step.ids(everything)}
    expected = fold_into_advantages(spread, step.masks(everything), **options)
    for given in (numbers, torch.tensor(numbers), [torch.tensor(a) for a in numbers], torch.tensor(numbers).bfloat16()):
        folded = fold_into_advantages(given, step.masks(everything), **options)
        for one, other in zip(folded, expected, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other)


def test_parts_share_no_storage() -> None:
    """One that is sent elsewhere takes none along, and one that is changed in place changes no other."""
    step = Step(1)
    folded = step.fold(list(range(len(step))), mode="sample_mean")
    filled = [one for one in folded if one.numel()]
    assert len({one.untyped_storage().data_ptr() for one in filled}) == len(filled) > 2
    for one in filled:
        assert one.untyped_storage().nbytes() == one.numel() * one.element_size()
    kept = [one.clone() for one in folded[1:]]
    folded[0].fill_(7)
    assert all(map(torch.equal, folded[1:], kept))


def test_nothing_and_masked_nan() -> None:
    totals = StepTotals.from_loss_masks([torch.ones(2)])
    assert fold_into_advantages([], [], mode="token_mean", totals=totals, loss=torch.neg) == []
    masked = fold_into_advantages([1.0], [torch.zeros(2)], mode="token_mean", totals=totals, loss=torch.neg)
    assert masked[0].tolist() == [0, 0]
    nan = float("nan")
    (folded,) = fold_into_advantages(
        [torch.tensor([1.0, nan])], [torch.tensor([1, 0])], mode="token_sum", totals=totals
    )
    assert folded.tolist() == [1, 0]


def test_under_no_grad_and_without_a_graph() -> None:
    step = Step(2)
    everything = list(range(len(step)))
    leaves = [a.clone().requires_grad_() for a in step.advantages]
    with torch.no_grad():
        folded = fold_into_advantages(
            leaves, step.masks(everything), mode="token_mean", totals=step.totals(), **step.ids(everything)
        )
    assert not any(one.requires_grad for one in folded)


# ---- once


TWICE: dict[str, Callable[[list[Tensor]], Any]] = {
    "as they are": lambda folded: folded,
    "in another list": lambda folded: [*folded],
    "in another order": lambda folded: sorted(folded, key=lambda one: one.numel()),
    "one of them": lambda folded: [torch.zeros_like(one) for one in folded[:-1]] + folded[-1:],
    "copied": copy.deepcopy,
    "pickled": lambda folded: pickle.loads(pickle.dumps(folded)),
}


@pytest.mark.parametrize("passed", TWICE.values(), ids=TWICE.keys())
def test_folding_twice_is_refused(passed: Callable[[list[Tensor]], Any]) -> None:
    """The bug of SkyRL #925's review: the critic's pass and the policy's each normalised the batch's advantages."""
    step = Step(4)
    folded = step.fold(list(range(len(step))), mode="token_mean")
    again = passed(folded)
    assert is_folded(again)
    masks = [torch.ones(one.numel()) for one in again]
    totals = StepTotals.from_loss_masks(masks)
    with pytest.raises(ValueError, match="folded already: folding them again would divide by the step's counts twice"):
        fold_into_advantages(again, masks, mode="token_mean", totals=totals)
    fold_into_advantages([one + 0 for one in again], masks, mode="token_mean", totals=totals)


def test_the_mark_and_its_limits() -> None:
    step = Step(4)
    folded = step.fold(list(range(len(step))), mode="token_mean")
    assert is_folded(folded)
    assert is_folded(folded[0])
    assert not is_folded(step.advantages)
    assert not is_folded([1.0, 2.0])
    assert not is_folded(torch.nn.utils.rnn.pad_sequence(folded))  # a new tensor: said in the docstring
    assert not is_folded([one * 2 for one in folded])


def test_what_the_refused_second_fold_would_do() -> None:
    step = Step(6)
    everything = list(range(len(step)))
    folded = [one.clone() for one in step.fold(everything, mode="token_mean")]
    twice = fold_into_advantages(
        folded, step.masks(everything), mode="token_mean", totals=step.totals(), **step.ids(everything)
    )
    binary = [one.mask != 0 for one in step.samples]
    tokens = oracle.mask_tokens(step.samples)
    for one, other, mask, at in zip(folded, twice, step.masks(everything), binary, strict=True):
        torch.testing.assert_close(other[at], (one * mask / tokens)[at])


# ---- losses


def test_every_known_loss_is_written_out_here() -> None:
    assert {name for name, reason in LOSSES.items() if reason is None} == {*HOMOGENEOUS, *OTHER_NAMES}


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_homogeneous_losses_are_accepted_by_name_and_tried_out(name: str) -> None:
    assert LOSSES[name] is None
    step = Step(8)
    everything = list(range(len(step)))
    for mode in MODES:
        step.fold(everything, mode=mode, divisor=divisor_of(mode), loss=name)
        step.fold(everything, mode=mode, divisor=divisor_of(mode), loss=flat_loss(step, HOMOGENEOUS[name]))


def flat_loss(step: Step, loss: Loss) -> Callable[[Tensor], Tensor]:
    lengths = [len(one.mask) for one in step.samples]
    if loss in (clip_cov, kl_cov):  # of the batch as a whole
        return lambda advantages: loss(torch.cat(step.log_probs), torch.cat(step.old), advantages, advantages)
    return lambda advantages: torch.cat(step.losses(loss, list(advantages.split(lengths))))


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_other_losses_are_refused_by_name_and_when_tried_out(name: str) -> None:
    step = Step(9)
    everything = list(range(len(step)))
    with pytest.raises(ValueError, match=r"with folded advantages: .*Aggregate the losses with make_pg_loss_reducer"):
        step.fold(everything, mode="token_mean", loss=name)
    with pytest.raises(ValueError, match=r"not positively homogeneous in the advantage"):
        step.fold(everything, mode="token_mean", loss=flat_loss(step, REFUSED_LOSSES[name]))
    folded = step.fold(everything, mode="token_mean")  # as it would have gone
    losses = flat_loss(step, REFUSED_LOSSES[name])
    flat = [losses(torch.cat(a)) for a in (step.advantages, folded)]
    weights = torch.cat(step.masks(everything)).double() / oracle.mask_tokens(step.samples)
    assert error_of(flat[1][weights != 0].sum(), (flat[0] * weights).sum(), step) > 1e-3


def test_a_loss_is_tried_out_where_tokens_are_active_and_must_be_finite_there() -> None:
    masks, totals = [torch.tensor([1, 1, 0])], StepTotals(step_tokens=4)
    advantages = [torch.tensor([1.0, -2.0, float("nan")])]

    def fold(loss: Callable[[Tensor], Tensor]) -> None:
        fold_into_advantages(advantages, masks, mode="token_mean", totals=totals, loss=loss)

    fold(lambda given: -given * given.isfinite().all())  # it is given no NaN
    fold(lambda given: -given / torch.tensor([1, 1, 0]))
    with pytest.raises(ValueError, match="a loss whose value is nan"):
        fold(lambda given: -given * torch.tensor([1, float("nan"), 1]))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("ppoclip", "there is no 'ppoclip' among the known ones. Choose one of ppo_clip, ppo,.*or pass the loss as a"),
        ("geo_mean", "it averages a sequence's advantages itself"),
        (lambda advantages: advantages.sum(), r"shape \(\) for advantages of shape.*Return unreduced losses"),
    ],
)
def test_refused_losses(loss: Any, text: str) -> None:
    step = Step(9)
    with pytest.raises(ValueError, match=text):
        step.fold(list(range(len(step))), mode="token_mean", loss=loss)


# ---- coverage and bad input


def changed(totals: StepTotals, field: str, value: Any) -> StepTotals:
    """With another count; its name as in error texts."""
    kind, _, name = field.partition(".")
    return replace(totals, **{kind: replace(getattr(totals, kind), **{name: value}) if name else value})


@pytest.mark.parametrize("field", ["step_tokens", "rollouts.all", "rollouts.active", "prompts.all", "prompts.active"])
def test_totals_of_less_than_these_samples_are_refused(field: str) -> None:
    step = Step(10)
    everything = list(range(len(step)))
    whole = step.totals()
    for mode in MODES:
        step.fold(everything, mode=mode, divisor=divisor_of(mode), totals=whole)
        # Either with these samples or with another count of the same totals.
        text = (
            f"samples whose {field} alone are .*Make the totals from all samples|active units of .*Count the whole step"
        )
        count = attrgetter(field)(whole) - 1
        with pytest.raises(ValueError, match=text):
            step.fold(everything, mode=mode, divisor=divisor_of(mode), totals=changed(whole, field, count))


@pytest.mark.parametrize("kind", ["rollout", "prompt"])
def test_a_unit_with_more_tokens_here_than_in_the_step_is_refused(kind: str) -> None:
    step = Step(11)
    everything = list(range(len(step)))
    ids = step.ids(everything)[f"{kind}_ids"]
    tokens: dict[str, float] = {}
    for unit, mask in zip(ids, step.masks(everything), strict=True):
        tokens[unit] = tokens.get(unit, 0) + float(mask.sum())
    unit = max(tokens, key=lambda name: tokens[name])
    step.fold(everything, mode="token_mean", totals=changed(step.totals(), f"{kind}s.tokens", tokens))
    tokens[unit] -= 0.5
    with pytest.raises(ValueError, match=f"a {kind} with {tokens[unit] + 0.5:g} mask tokens in these samples"):
        step.fold(everything, mode="token_mean", totals=changed(step.totals(), f"{kind}s.tokens", tokens))


def test_totals_of_one_rank_are_refused_where_they_show() -> None:
    step = Step(12)
    half = list(range(len(step) // 2))
    with pytest.raises(ValueError, match="Make the totals from"):
        step.fold(list(range(len(step))), mode="token_mean", totals=step.totals(half))


MASKS = [torch.tensor([1, 0]), torch.tensor([1])]


def test_weights_below_zero_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def signed(inputs: ModeInputs) -> Tensor:
        return torch.tensor(signs)

    monkeypatch.setattr(modes, "_REGISTERED", {"signed": signed})
    totals = StepTotals.from_loss_masks(MASKS)
    signs = (2.0, 1.0)
    folded = fold_into_advantages([1.0, 3.0], MASKS, mode="signed", totals=totals)
    assert [one.tolist() for one in folded] == [[2, 0], [3]]
    signs = (2.0, -1.0)
    with pytest.raises(ValueError, match="weights below 0 from the mode 'signed'"):
        fold_into_advantages([1.0, 3.0], MASKS, mode="signed", totals=totals)


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


def test_docstring_example() -> None:
    result = doctest.testmod(folding)
    assert (result.attempted, result.failed) == (3, 0)
