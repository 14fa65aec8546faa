"""Losses that couple tokens, as whole steps' value and gradient, in every layout at CP 1, 2 and 4, against float64.

Formulas are stated for one whole sample, with Python's ifs or the papers' products. One launch over gloo runs all
losses and all planted bugs (`cp_steps`). Losses of single tokens are in test_token.py; PPO stands for them here.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cp_steps
import oracle
import pytest
import torch
from cp_steps import CASES, Formula, Loss, Tokens
from ranks import run_ranks
from torch import Tensor

from megatron_rl_loss.losses import (
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    importance_weights,
    keep_sequences,
    ppo_clip_loss,
    segment_mean,
    segment_sum,
    to_tokens,
)

Values = dict[str, Tensor]
NARROW: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4}

# --- the formulas, for one sample; m its mask


def log_ratio(v: Values) -> Tensor:
    return v["log_probs"] - v["old_log_probs"]


def mismatch(v: Values) -> Tensor:
    return v["old_log_probs"] - v["rollout_log_probs"]


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
    return surrogate(mean(log_ratio(v), m).exp().expand(len(m)), v["advantages"], 3e-4, 4e-4)


def gspo_token(v: Values, m: Tensor) -> Tensor:
    s = mean(log_ratio(v), m).exp().detach() * v["log_probs"].exp() / v["log_probs"].exp().detach()
    return surrogate(s, v["token_advantages"], 3e-4, 4e-4)


def gmpo(v: Values, m: Tensor) -> Tensor:
    """sgn(A) * (prod_t |min(r A, clip(r, e^-0.4, e^0.4) A)|^m)^(1/M), of a sample's one advantage."""
    a, r = v["advantages"], log_ratio(v).exp()
    chosen = torch.minimum(r * a, r.clamp(torch.tensor(-0.4).double().exp(), torch.tensor(0.4).double().exp()) * a)
    product = (chosen.abs() ** m).prod()
    return -(a.sign() * (product ** (1 / m.sum()) if m.sum() > 0 else product * a.abs()))


def sequence_tis(v: Values, m: Tensor) -> Tensor:
    return (mismatch(v) * m).sum().exp().clamp(max=1.1) * gspo(v, m)


def off_policy_mask(v: Values, m: Tensor) -> Tensor:
    far = mean(-log_ratio(v), m).detach() > 0.01
    return torch.where((v["advantages"] < 0) & far, 0, ppo(v, m))


def of_sum(v: Values, m: Tensor) -> Tensor:
    return ((v["log_probs"] * m).sum() / 9).sin() * v["log_probs"]


def of_three(v: Values, m: Tensor) -> Tensor:
    a, b, c = (mean(x, m) for x in (v["log_probs"], v["log_probs"].detach().exp(), v["old_log_probs"]))
    return a.square() * b + c * a + v["log_probs"]


# --- the same from the package, on a rank's tokens


def given(t: Tokens, advantages: str = "token_advantages") -> tuple[Tensor, Tensor, Tensor]:
    return t.values["log_probs"], t.values["old_log_probs"], t.values[advantages]


def place(t: Tokens) -> tuple[Any, Any]:
    return t.local, t.cp_group


def at_tokens(of_samples: Tensor, t: Tokens) -> Tensor:
    return to_tokens(of_samples, t.local).view(t.values["log_probs"].shape)


def ppo_here(t: Tokens, weights: Tensor | None = None) -> Tensor:
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
    return ppo_clip_loss(*given(t), **clip, importance_weights=weights).per_token_loss


def gspo_here(t: Tokens, **more: Any) -> Tensor:
    return gspo_loss(*given(t, "advantages"), *place(t), **NARROW, **more).per_token_loss


def gspo_of_rollouts(t: Tokens) -> Tensor:
    return gspo_here(t, per="rollout", totals=t.totals)


def microbatch_of(t: Tokens) -> Any:
    """What a `Microbatch` says of its place: CP needs no further argument."""
    return SimpleNamespace(tokens=t.local, cp_group=t.cp_group, totals=t.totals)


def gspo_token_here(t: Tokens) -> Tensor:
    return gspo_token_loss(*given(t), microbatch_of(t), **NARROW).per_token_loss


def gmpo_here(t: Tokens) -> Tensor:
    return gmpo_loss(*given(t, "advantages"), microbatch_of(t)).per_token_loss


def sequence_tis_together(t: Tokens) -> Tensor:
    """Its two statistics in one collective: a sum is a mean times the sample's mask sum."""
    of_ratio, of_mismatch = segment_mean([log_ratio(t.values), mismatch(t.values)], *place(t))
    weights = at_tokens(importance_weights(of_mismatch * t.samples.mask_sums, high=1.1), t)
    return gspo_here(t, mean_log_ratio=of_ratio, importance_weights=weights)


def off_policy_mask_here(t: Tokens) -> Tensor:
    mean_kl = segment_mean(-log_ratio(t.values).detach(), *place(t))
    return ppo_here(t, keep_sequences(at_tokens(mean_kl, t), max_kl=0.01, advantages=t.values["advantages"]))


def sum_here(t: Tokens) -> Tensor:
    x = t.values["log_probs"]
    return (at_tokens(segment_sum(x, *place(t)), t) / 9).sin() * x


def three_here(t: Tokens) -> Tensor:
    """One with gradient by two ways, one without, one of data."""
    x, old = t.values["log_probs"], t.values["old_log_probs"]
    a, b, c = segment_mean([x, x.detach().exp(), old], *place(t))
    return at_tokens(a.square() * b + c * a, t) + x


TABLE: dict[str, tuple[Loss, Formula, str]] = {
    "PPO": (ppo_here, ppo, "prompt_mean"),
    "GSPO": (gspo_here, gspo, "sample_mean"),
    "GSPO of rollouts": (gspo_of_rollouts, gspo, "sample_mean"),
    "GSPO-token": (gspo_token_here, gspo_token, "sample_mean"),
    "GMPO": (gmpo_here, gmpo, "sample_mean"),
    "sequence TIS": (sequence_tis_together, sequence_tis, "sample_mean"),
    "off-policy mask": (off_policy_mask_here, off_policy_mask, "sample_mean"),
    "sum": (sum_here, of_sum, "sample_mean"),
    "three together": (three_here, of_three, "sample_mean"),
}

# --- planted bugs: each shows where tokens are cut


def own_part(x: Tensor, t: Tokens) -> Tensor:
    """Of each sample's sum, what this rank adds."""
    number = len(t.samples)
    zeros = x.new_zeros(number + 1)  # where there is no sample, padding has the first one's index
    return zeros.index_add(0, t.local.sample_index, x.flatten() * t.local.mask)[:number]


def sum_without_backward_sum(t: Tokens) -> Tensor:
    """The other ranks' part is a constant: the value is right, the gradient is not."""
    x = t.values["log_probs"]
    own = own_part(x, t)
    return (at_tokens(segment_sum(x.detach(), *place(t)) + own - own.detach(), t) / 9).sin() * x


def no_sum_at_all(t: Tokens) -> Tensor:
    x = t.values["log_probs"]
    return (at_tokens(own_part(x, t), t) / 9).sin() * x


PLANTED: dict[str, tuple[Loss, str]] = {
    "sum without backward sum": (sum_without_backward_sum, "sum"),
    "no sum at all": (no_sum_at_all, "sum"),
}


@functools.cache
def errors_of(name: str, of: str) -> dict[tuple[str, int], float]:
    _, formula, mode = TABLE[of]
    right = cp_steps.expected(formula, mode, per="rollout" if "rollouts" in of else "sample")
    places = [(place.__name__, cp_size) for place, cp_size in CASES]
    return {at: cp_steps.error_of([of_rank[(name, *at)] for of_rank in outcomes()], *right) for at in places}


@functools.cache
def outcomes() -> list[dict[tuple[str, str, int], cp_steps.Outcome]]:
    losses = {name: row[0] for name, row in [*TABLE.items(), *PLANTED.items()]}
    return run_ranks(
        cp_steps.RANKS, cp_steps.run_on_ranks, losses, {name: row[2] for name, row in TABLE.items()}, timeout_s=600
    )


@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient_in_every_layout(name: str, record_property: Callable[[str, Any], None]) -> None:
    errors = errors_of(name, name)
    record_property("losses_over_cp_error", max(errors.values()))
    assert max(errors.values()) <= oracle.EXACT, errors


@pytest.mark.parametrize("name", PLANTED)
def test_the_comparison_sees_planted_bugs(name: str) -> None:
    for (layout, cp_size), error in errors_of(name, PLANTED[name][1]).items():
        shows = cp_size > 1 and layout != "gathered"
        assert (error > 1e-3) if shows else (error <= oracle.EXACT), (layout, cp_size, error)


def test_the_data_shows_every_branch() -> None:
    """Clips, masks and caps bind on some tokens and not on others."""
    step = cp_steps.rollouts()

    def share(chosen: Callable[[Values, Tensor], Any]) -> float:
        shown = [torch.as_tensor(chosen(one.values, one.mask.double())).expand(len(one.mask)) for one in step]
        return float(torch.cat(shown).double().mean())

    shares = {
        "PPO clips": share(lambda v, m: ppo(v, m) != -v["token_advantages"] * log_ratio(v).exp()),
        "GSPO clips": share(lambda v, m: gspo(v, m) != -v["advantages"] * mean(log_ratio(v), m).exp()),
        "GMPO clips": share(lambda v, m: log_ratio(v).abs() > 0.4),
        "sequence TIS caps": share(lambda v, m: (mismatch(v) * m).sum().exp() > 1.1),
        "off-policy mask drops": share(lambda v, m: off_policy_mask(v, m) == 0),
    }
    assert all(0.03 < found < 0.97 for found in shares.values()), shares
