"""Every loss as a whole step's value and gradient, in every layout at CP 1, 2 and 4 over gloo, against float64.

Formulas are stated for one whole sample, with Python's ifs or the papers' products. `cp_steps` runs the step; what one
token's loss is in all corners (clips, overflow, dtypes) is in test_losses.py and test_off_policy.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import cp_steps
import oracle
import pytest
import torch
from cp_steps import CASES, Formula, Loss, Outcome, Tokens
from ranks import run_ranks
from torch import Tensor

from megatron_rl_loss.losses import (
    cispo_loss,
    distillation_advantages,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    importance_weights,
    keep_sequences,
    kl_estimate,
    ppo_clip_loss,
    sapo_loss,
    segment_mean,
    segment_sum,
    to_tokens,
    truncated_importance_weights,
    value_loss,
)

Values = dict[str, Tensor]
NARROW = {"clip_low": 3e-4, "clip_high": 4e-4}

# --- the formulas, for one sample; m its mask


def log_ratio(v: Values) -> Tensor:
    return v["log_probs"] - v["old_log_probs"]


def mean(x: Tensor, m: Tensor) -> Tensor:
    return (x * m).sum() / m.sum() if m.sum() > 0 else 0 * x.sum()


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


def ppo(v: Values, m: Tensor) -> Tensor:
    return surrogate(log_ratio(v).exp(), v["token_advantages"], 0.2, 0.28, 1.5)


def gspo(v: Values, m: Tensor) -> Tensor:
    s = mean(log_ratio(v), m).exp()
    return surrogate(s.expand(len(m)), v["advantages"], 3e-4, 4e-4)


def gspo_token(v: Values, m: Tensor) -> Tensor:
    s = mean(log_ratio(v), m).exp().detach() * v["log_probs"].exp() / v["log_probs"].exp().detach()
    return surrogate(s, v["token_advantages"], 3e-4, 4e-4)


def gmpo(v: Values, m: Tensor) -> Tensor:
    """sgn(A) * (prod_t |min(r A, clip(r, e^-0.4, e^0.4) A)|^m)^(1/M), of a sample's one advantage."""
    a, r = v["advantages"], log_ratio(v).exp()
    chosen = torch.minimum(r * a, r.clamp(torch.tensor(-0.4).double().exp(), torch.tensor(0.4).double().exp()) * a)
    product = (chosen.abs() ** m).prod()
    return -(a.sign() * (product ** (1 / m.sum()) if m.sum() > 0 else product * a.abs()))


def cispo(v: Values, m: Tensor) -> Tensor:
    return -log_ratio(v).exp().clamp(max=1.5).detach() * v["token_advantages"] * v["log_probs"]


def sapo(v: Values, m: Tensor) -> Tensor:
    a, r = v["token_advantages"], log_ratio(v).exp()
    tau = torch.tensor([1.0 if x > 0 else 1.05 for x in a.tolist()], dtype=torch.float64)
    return -a * 4 / tau / (1 + (-tau * (r - 1)).exp())


def dppo(v: Values, m: Tensor, *, kl: bool, threshold: float) -> Tensor:
    a, p, q = v["token_advantages"], v["log_probs"].exp(), v["old_log_probs"].exp()
    far = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log() if kl else (p - q).abs()
    moves_away = ((a > 0) & (p > q)) | ((a < 0) & (p < q))
    return torch.where(moves_away & (far > threshold), 0, -a * p / q)


def kl(v: Values, m: Tensor, *, estimator: str) -> Tensor:
    d = v["log_probs"] - v["ref_log_probs"]
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimator]


def value(v: Values, m: Tensor) -> Tensor:
    moved = v["old_values"] + (v["values"] - v["old_values"]).clamp(-0.3, 0.3)
    return torch.maximum((v["values"] - v["returns"]) ** 2, (moved - v["returns"]) ** 2) / 2


def distillation(v: Values, m: Tensor) -> Tensor:
    a = v["ref_log_probs"] - v["old_log_probs"]
    return surrogate(log_ratio(v).exp(), a, 0.2, 0.28)


def mismatch(v: Values) -> Tensor:
    return v["old_log_probs"] - v["rollout_log_probs"]


def token_tis(v: Values, m: Tensor) -> Tensor:
    return mismatch(v).exp().clamp(max=1.2) * ppo(v, m)


def icepop(v: Values, m: Tensor) -> Tensor:
    k = mismatch(v).exp()
    return torch.where((k < 0.7) | (k > 1.4), 0, k) * ppo(v, m)


def sequence_tis(v: Values, m: Tensor) -> Tensor:
    return (mismatch(v) * m).sum().exp().clamp(max=1.1) * gspo(v, m)


def geometric_mis(v: Values, m: Tensor) -> Tensor:
    weight = mean(mismatch(v), m).exp()
    return ppo(v, m) * (weight if 0.9 <= weight <= 1.1 else 0)


def off_policy_mask(v: Values, m: Tensor) -> Tensor:
    far = mean(-log_ratio(v), m).detach() > 0.01
    return torch.where((v["advantages"] < 0) & far, 0, ppo(v, m))


def trust_region_mask(v: Values, m: Tensor) -> Tensor:
    d = log_ratio(v)
    return ppo(v, m) if mean((-d).exp() - 1 + d, m) <= 0.02 else 0 * ppo(v, m)


# --- the same from the package, on a rank's tokens


def given(t: Tokens, advantages: str = "token_advantages") -> tuple[Tensor, Tensor, Tensor]:
    return t.values["log_probs"], t.values["old_log_probs"], t.values[advantages]


def place(t: Tokens) -> tuple[Any, Any]:
    return t.local, t.cp_group


def at_tokens(of_samples: Tensor, t: Tokens) -> Tensor:
    return to_tokens(of_samples, t.local).view(t.values["log_probs"].shape)


def ppo_of(t: Tokens, weights: Tensor | None = None) -> Tensor:
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
    return ppo_clip_loss(*given(t), **clip, importance_weights=weights).per_token_loss


def gspo_of(t: Tokens) -> Tensor:
    return gspo_loss(*given(t, "advantages"), *place(t), **NARROW).per_token_loss


def gspo_token_of(t: Tokens) -> Tensor:
    return gspo_token_loss(*given(t), *place(t), **NARROW).per_token_loss


def gspo_of_rollouts(t: Tokens) -> Tensor:
    return gspo_loss(*given(t, "advantages"), *place(t), **NARROW, per="rollout", totals=t.totals).per_token_loss


def gmpo_of(t: Tokens) -> Tensor:
    return gmpo_loss(*given(t, "advantages"), *place(t)).per_token_loss


def cispo_of(t: Tokens) -> Tensor:
    return cispo_loss(*given(t), clip_high=0.5).per_token_loss


def sapo_of(t: Tokens) -> Tensor:
    return sapo_loss(*given(t)).per_token_loss


def dppo_of(t: Tokens, *, divergence: Any, threshold: float) -> Tensor:
    return dppo_loss(*given(t), divergence=divergence, threshold=threshold).per_token_loss


def kl_of(t: Tokens, *, estimator: Any) -> Tensor:
    return kl_estimate(t.values["log_probs"], t.values["ref_log_probs"], estimator=estimator)


def value_of(t: Tokens) -> Tensor:
    return value_loss(t.values["values"], t.values["returns"], old_values=t.values["old_values"], clip=0.3)


def nll_of(t: Tokens) -> Tensor:
    return -t.values["log_probs"]


def entropy_of(t: Tokens) -> Tensor:
    return -t.values["entropy"]


def distillation_of(t: Tokens) -> Tensor:
    advantages = distillation_advantages(t.values["old_log_probs"], t.values["ref_log_probs"])
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
    return ppo_clip_loss(*given(t)[:2], advantages, **clip).per_token_loss


def token_tis_of(t: Tokens) -> Tensor:
    return ppo_of(t, truncated_importance_weights(t.values["old_log_probs"], t.values["rollout_log_probs"], cap=1.2))


def icepop_of(t: Tokens) -> Tensor:
    return ppo_of(t, importance_weights(mismatch(t.values), low=0.7, high=1.4, outside="drop"))


def sequence_tis_of(t: Tokens) -> Tensor:
    """Its two statistics in one collective: a sum is a mean times the sample's mask sum."""
    of_ratio, of_mismatch = segment_mean([log_ratio(t.values), mismatch(t.values)], *place(t))
    weights = at_tokens(importance_weights(of_mismatch * t.samples.mask_sums, high=1.1), t)
    given_mean: dict[str, Any] = NARROW | {"mean_log_ratio": of_ratio, "importance_weights": weights}
    return gspo_loss(*given(t, "advantages"), *place(t), **given_mean).per_token_loss


def sequence_tis_by_sum(t: Tokens) -> Tensor:
    weights = at_tokens(importance_weights(segment_sum(mismatch(t.values), *place(t)), high=1.1), t)
    return gspo_loss(*given(t, "advantages"), *place(t), **NARROW, importance_weights=weights).per_token_loss


def geometric_mis_of(t: Tokens) -> Tensor:
    of_mismatch = segment_mean(mismatch(t.values), *place(t))
    return ppo_of(t, at_tokens(importance_weights(of_mismatch, low=0.9, high=1.1, outside="drop"), t))


def off_policy_mask_of(t: Tokens) -> Tensor:
    mean_kl = segment_mean(-log_ratio(t.values).detach(), *place(t))
    return ppo_of(t, keep_sequences(at_tokens(mean_kl, t), max_kl=0.01, advantages=t.values["advantages"]))


def trust_region_mask_of(t: Tokens) -> Tensor:
    k3 = kl_estimate(t.values["log_probs"], t.values["old_log_probs"])
    return ppo_of(t, at_tokens(keep_sequences(segment_mean(k3.detach(), *place(t)), max_kl=0.02), t))


# --- name: the loss, its formula, the mode; by what it is differentiated, where not by the log-probs

TABLE: dict[str, tuple[Loss, Formula, str]] = {
    "PPO": (ppo_of, ppo, "prompt_mean"),
    "GSPO": (gspo_of, gspo, "sample_mean"),
    "GSPO of rollouts": (gspo_of_rollouts, gspo, "sample_mean"),
    "GSPO-token": (gspo_token_of, gspo_token, "sample_mean"),
    "LUSPO": (gspo_of, gspo, "constant"),
    "GMPO": (gmpo_of, gmpo, "sample_mean"),
    "CISPO": (cispo_of, cispo, "token_mean"),
    "SAPO": (sapo_of, sapo, "sample_mean"),
    "DPPO tv": (
        functools.partial(dppo_of, divergence="tv", threshold=0.03),
        functools.partial(dppo, kl=False, threshold=0.03),
        "token_mean",
    ),
    "DPPO kl": (
        functools.partial(dppo_of, divergence="kl", threshold=0.005),
        functools.partial(dppo, kl=True, threshold=0.005),
        "token_mean",
    ),
    **{
        f"KL {k}": (functools.partial(kl_of, estimator=k), functools.partial(kl, estimator=k), "token_mean")
        for k in ("k1", "k2", "k3")
    },
    "value": (value_of, value, "token_mean"),
    "NLL": (nll_of, lambda v, m: -v["log_probs"], "token_mean"),
    "entropy": (entropy_of, lambda v, m: -v["entropy"], "sample_mean"),
    "distillation": (distillation_of, distillation, "token_sum"),
    "TIS": (token_tis_of, token_tis, "sample_mean"),
    "IcePop": (icepop_of, icepop, "token_mean"),
    "sequence TIS, one collective": (sequence_tis_of, sequence_tis, "sample_mean"),
    "sequence TIS": (sequence_tis_by_sum, sequence_tis, "sample_mean"),
    "geometric MIS": (geometric_mis_of, geometric_mis, "constant"),
    "off-policy mask": (off_policy_mask_of, off_policy_mask, "sample_mean"),
    "trust-region mask": (trust_region_mask_of, trust_region_mask, "token_mean"),
}
WANTED = dict.fromkeys(TABLE, "log_probs") | {"value": "values", "entropy": "entropy"}
LOSSES = {name: loss for name, (loss, _, _) in TABLE.items()}
MODES = {name: mode for name, (_, _, mode) in TABLE.items()}


@functools.cache
def outcomes() -> list[dict[tuple[str, str, int], Outcome]]:
    return run_ranks(cp_steps.RANKS, cp_steps.run_on_ranks, LOSSES, WANTED, MODES)


def right(name: str) -> tuple[float, dict[Any, float], float]:
    _, formula, mode = TABLE[name]
    return cp_steps.expected(formula, WANTED[name], mode, per="rollout" if "rollouts" in name else "sample")


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient_in_every_layout(name: str, record_property: Callable[[str, Any], None]) -> None:
    expected = right(name)
    errors = {
        (place.__name__, cp_size): cp_steps.error_of(
            cp_steps.together([of_rank[name, place.__name__, cp_size] for of_rank in outcomes()]), *expected
        )
        for place, cp_size in CASES
    }
    record_property("losses_over_cp_error", max(errors.values()))
    assert max(errors.values()) <= oracle.EXACT, errors


def test_the_data_shows_every_branch() -> None:
    """Clips, masks and caps bind on some tokens and not on others; no two losses are the same."""
    step = cp_steps.rollouts()

    def share(chosen: Callable[[Values, Tensor], Tensor]) -> float:
        return float(torch.cat([chosen(one.values, one.mask.double()).double() for one in step]).mean())

    def somewhere(of_sample: Callable[[Values, Tensor], bool]) -> float:
        return share(lambda v, m: torch.full((len(m),), float(of_sample(v, m))))

    shares = {
        "PPO clips": share(lambda v, m: ppo(v, m) != -v["token_advantages"] * log_ratio(v).exp()),
        "GSPO clips": somewhere(lambda v, m: bool(gspo(v, m)[0] != -v["advantages"][0] * mean(log_ratio(v), m).exp())),
        "GMPO clips": share(lambda v, m: log_ratio(v).abs() > 0.4),
        "CISPO clips": share(lambda v, m: log_ratio(v).exp() > 1.5),
        "DPPO tv": share(lambda v, m: dppo(v, m, kl=False, threshold=0.03) == 0),
        "DPPO kl": share(lambda v, m: dppo(v, m, kl=True, threshold=0.005) == 0),
        "TIS caps": share(lambda v, m: mismatch(v).exp() > 1.2),
        "IcePop drops": share(lambda v, m: icepop(v, m) == 0),
        "sequence TIS caps": somewhere(lambda v, m: bool((mismatch(v) * m).sum().exp() > 1.1)),
        "geometric MIS drops": somewhere(lambda v, m: not 0.9 <= float(mean(mismatch(v), m).exp()) <= 1.1),
        "off-policy mask drops": share(lambda v, m: off_policy_mask(v, m) == 0),
        "trust-region mask drops": share(lambda v, m: trust_region_mask(v, m) == 0),
        "value clips": share(lambda v, m: value(v, m) != (v["values"] - v["returns"]) ** 2 / 2),
    }
    assert all(0.03 < found < 0.97 for found in shares.values()), shares


# --- planted bugs


def clip_before_the_sum(t: Tokens) -> Tensor:
    """GSPO with tokens' ratios clipped, as GMPO's are."""
    x, old, advantages = given(t, "advantages")
    clipped = (x - old).clamp(-3e-4, 4e-4)
    return gspo_loss(
        x, old, advantages, *place(t), **NARROW, mean_log_ratio=segment_mean(clipped, *place(t))
    ).per_token_loss


def gmpo_without_backward_sum(t: Tokens) -> Tensor:
    """Each rank goes back through its own part of the mean alone."""
    x, old, advantages = given(t, "advantages")
    whole = gmpo_loss(x.detach(), old, advantages, *place(t)).per_token_loss
    bounded = torch.where(advantages < 0, (x - old).clamp(min=-0.4), (x - old).clamp(max=0.4))
    own = x.new_zeros(len(t.samples) + 1).index_add(0, t.local.sample_index, bounded.flatten() * t.local.mask)
    own = own[:-1] / t.samples.mask_sums.clamp(min=1e-9)
    return whole * at_tokens(own - own.detach(), t).exp()


PLANTED: dict[str, tuple[Loss, str]] = {
    "clip before the sum": (clip_before_the_sum, "GSPO"),
    "no backward sum": (gmpo_without_backward_sum, "GMPO"),
}


@pytest.mark.slow
def test_the_comparison_sees_planted_bugs() -> None:
    losses = {name: loss for name, (loss, _) in PLANTED.items()}
    found = run_ranks(cp_steps.RANKS, cp_steps.run_on_ranks, losses, dict.fromkeys(PLANTED, "log_probs"), {})
    for name, (_, of) in PLANTED.items():
        expected = right(of)
        for where, cp_size in CASES:
            outcome = cp_steps.together([of_rank[name, where.__name__, cp_size] for of_rank in found])
            error = cp_steps.error_of(outcome, *expected)
            shows = name == "clip before the sum" or (cp_size > 1 and where.__name__ != "gathered")
            assert (error > 1e-3) if shows else (error <= oracle.EXACT), (name, where.__name__, cp_size, error)
