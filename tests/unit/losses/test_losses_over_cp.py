"""Losses that couple tokens, as whole steps' value and gradient, in every layout at CP 1, 2 and 4, against float64.

Formulas are those of `sequence_formulas`; the losses of one's own are the page's (docs/losses.md). One launch over gloo
runs all losses and all planted bugs (`cp_steps`). Losses of single tokens: test_policy_losses.py; here PPO stands for
them.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cp_steps
import oracle
import pytest
import sequence_formulas as stated
import torch
from cp_steps import CASES, Formula, Loss, Tokens
from pages import code_of
from ranks import run_ranks
from sequence_formulas import Values, along, discounted, log_ratio
from torch import Tensor

from megatron_rl_loss import losses
from megatron_rl_loss.losses import segment_extreme, segment_mean, segment_scan, segment_sum, to_tokens

pytestmark = pytest.mark.slow

NARROW: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4}

# --- the same from the package, on a rank's tokens


def given(t: Tokens, advantages: str = "advantages") -> tuple[Tensor, Tensor, Tensor]:
    return t.values["log_probs"], t.values["old_log_probs"], t.values[advantages]


def place(t: Tokens) -> tuple[Any, Any]:
    return t.local, t.cp_group


def microbatch_of(t: Tokens) -> Any:
    """What a `Microbatch` says of its place: CP needs no further argument."""
    return SimpleNamespace(tokens=t.local, cp_group=t.cp_group, totals=t.totals)


def at_tokens(of_samples: Tensor, t: Tokens) -> Tensor:
    return to_tokens(of_samples, t.local).view(t.values["log_probs"].shape)


def ppo_here(t: Tokens, weights: Tensor | None = None) -> Tensor:
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
    return losses.ppo_clip_loss(*given(t, "token_advantages"), **clip, importance_weights=weights).per_token_loss


def gspo_here(t: Tokens, **more: Any) -> Tensor:
    return losses.gspo_loss(*given(t), *place(t), **NARROW, **more).per_token_loss


def gspo_token_here(t: Tokens, **more: Any) -> Tensor:
    tokens = given(t, "token_advantages")
    return losses.gspo_token_loss(*tokens, microbatch_of(t), **NARROW, **more).per_token_loss


def sequence_tis_together(t: Tokens) -> Tensor:
    """Its two statistics in one collective: a sum is a mean times the sample's mask sum."""
    of_ratio, of_mismatch = segment_mean([log_ratio(t.values), stated.mismatch(t.values)], *place(t))
    weights = at_tokens(losses.importance_weights(of_mismatch * t.samples.mask_sums, high=1.1), t)
    return gspo_here(t, mean_log_ratio=of_ratio, importance_weights=weights)


def off_policy_mask_here(t: Tokens) -> Tensor:
    mean_kl = segment_mean(-log_ratio(t.values).detach(), *place(t))
    return ppo_here(t, losses.keep_sequences(at_tokens(mean_kl, t), max_kl=0.01, advantages=t.values["advantages"]))


def three_here(t: Tokens) -> Tensor:
    """One with gradient by two ways, one without, one of data."""
    x, old = t.values["log_probs"], t.values["old_log_probs"]
    a, b, c = segment_mean([x, x.detach().exp(), old], *place(t))
    return at_tokens(a.square() * b + c * a, t) + x


def scans_here(t: Tokens) -> Tensor:
    x, total = stated.tied(t.values), torch.zeros_like(t.values["log_probs"])
    for n, (kind, gamma, reverse, exclusive) in enumerate(stated.SCANS):
        how: dict[str, Any] = {"kind": kind, "gamma": gamma, "reverse": reverse, "exclusive": exclusive}
        _, found = segment_scan([x.detach().exp(), x], *place(t), empty=0.0 if kind == "sum" else -3.0, **how)
        total = total + (found / 9 + n).sin()
    return total


def extremes_here(t: Tokens, **per: Any) -> Tensor:
    x = stated.tied(t.values)
    highest, lowest = (segment_extreme(x, *place(t), kind=kind, **per) for kind in ("max", "min"))
    return at_tokens(highest - 2 * lowest.square(), t)


def gae_here(t: Tokens) -> Tensor:
    values = t.values["token_advantages"], t.values["old_log_probs"]
    advantages, returns = losses.gae(*values, *place(t), gamma=0.9, lam=0.8)
    return (advantages + 0.3 * returns) * t.values["log_probs"]


#: The page's code.
OWN: dict[str, Any] = {}
exec(code_of("losses.md")[-2], OWN)


def own(name: str, advantages: str = "token_advantages", **per: Any) -> Loss:
    """With `per` rollout, rollouts stand for prompts: in these steps they lie in one micro-batch."""
    return lambda t: OWN[name](*given(t, advantages), microbatch_of(t), **per)


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


def scan_without_backward_exchange(t: Tokens) -> Tensor:
    """The gradient is that of prefix sums of what this rank holds."""
    x, running = t.values["log_probs"], torch.zeros(())
    found, last = [], None
    for term, active, i in zip((x.flatten() * t.local.mask), t.local.mask != 0, t.local.sample_index, strict=True):
        running, last = term + (running if i == last else 0), i
        found.append(running * active)
    sums = torch.stack(found).view(x.shape) if found else x
    return ((segment_scan(x.detach(), *place(t)) + sums - sums.detach()) / 9).sin() * x


ROLLOUT = {"advantages": "advantages", "per": "rollout"}
TABLE: dict[str, tuple[Loss, Formula, str]] = {
    "three together": (three_here, stated.of_three, "sample_mean"),
    "scans": (scans_here, stated.of_scans, "sample_mean"),
    "extremes": (extremes_here, stated.of_extremes, "sample_mean"),
    "extremes of rollouts": (
        lambda t: extremes_here(t, per="rollout", totals=t.totals), stated.of_extremes, "sample_mean"
    ),
    "REAL of rollouts": (own("rewards_as_labels", **ROLLOUT), stated.rewards_as_labels, "sample_mean"),
    "PPO": (ppo_here, stated.ppo, "prompt_mean"),
    "GSPO": (gspo_here, stated.gspo, "sample_mean"),
    "GSPO of rollouts": (lambda t: gspo_here(t, per="rollout", totals=t.totals), stated.gspo, "sample_mean"),
    "GSPO-token": (gspo_token_here, stated.gspo_token, "sample_mean"),
    "GSPO-token, its mean given": (
        lambda t: gspo_token_here(t, mean_log_ratio=segment_mean(log_ratio(t.values), *place(t))),
        stated.gspo_token, "sample_mean",
    ),
    "GMPO": (lambda t: losses.gmpo_loss(*given(t), microbatch_of(t)).per_token_loss, stated.gmpo, "sample_mean"),
    "sequence TIS": (sequence_tis_together, stated.sequence_tis, "sample_mean"),
    "off-policy mask": (off_policy_mask_here, stated.off_policy_mask, "sample_mean"),
    "GAE": (gae_here, stated.generalised, "sample_mean"),
    "FIPO": (own("future_kl"), stated.future_kl, "token_mean"),
    "CTPO": (own("prefix_ratio"), stated.prefix_ratio, "sample_mean"),
    "MinPRO": (own("smallest_before"), stated.smallest_before, "token_mean"),
    "CPPO": (own("prefix_budget"), stated.prefix_budget, "token_mean"),
    "trust region masking": (own("trust_region"), stated.trust_region, "sample_mean"),
    "TPO of rollouts": (own("target_policy", **ROLLOUT), stated.target_policy, "sample_mean"),
    "planted: sum without backward sum": (sum_without_backward_sum, stated.of_sum, "sample_mean"),
    "planted: scan without backward exchange": (scan_without_backward_exchange, stated.of_prefix_sum, "sample_mean"),
}  # fmt: skip
EVERYWHERE = [(place.__name__, cp_size) for place, cp_size in CASES]
#: What each exchange does in every layout; what is made of them in three layouts of different CP sizes.
WHERE = {
    name: set(EVERYWHERE) if n < 5 or "planted" in name else {EVERYWHERE[(5 * n + 7 * k) % 24] for k in range(3)}
    for n, name in enumerate(TABLE)
}


def on_rank() -> dict[tuple[str, str, int], cp_steps.Outcome]:
    return cp_steps.run_on_ranks(*({name: row[part] for name, row in TABLE.items()} for part in (0, 2)), WHERE)


@functools.cache
def outcomes() -> list[dict[tuple[str, str, int], cp_steps.Outcome]]:
    return run_ranks(cp_steps.RANKS, on_rank, timeout_s=600)


@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient_in_every_layout(name: str, record_property: Callable[[str, Any], None]) -> None:
    """And the comparison sees planted bugs, where tokens are cut."""
    _, formula, mode = TABLE[name]
    right = cp_steps.expected(formula, mode, per="rollout" if "rollouts" in name else "sample")
    errors = {at: cp_steps.error_of([of_rank[(name, *at)] for of_rank in outcomes()], *right) for at in WHERE[name]}
    if "planted" not in name:
        record_property("losses_over_cp_error", max(errors.values()))
    for (layout, cp_size), error in errors.items():
        shows = "planted" in name and cp_size > 1 and layout != "gathered"
        assert (error > 1e-3) if shows else (error <= oracle.EXACT), (layout, cp_size, error)


def test_the_data_shows_every_branch() -> None:
    """Clips, masks and caps bind on some tokens and not on others."""
    branches: dict[str, Callable[[Values, Tensor], Any]] = {
        "PPO clips": lambda v, m: stated.ppo(v, m) != -v["token_advantages"] * log_ratio(v).exp(),
        "GSPO clips": lambda v, m: stated.gspo(v, m) != -v["advantages"] * stated.mean(log_ratio(v), m).exp(),
        "GMPO clips": lambda v, m: log_ratio(v).abs() > 0.4,
        "sequence TIS caps": lambda v, m: (stated.mismatch(v) * m).sum().exp() > 1.1,
        "FIPO's weight clips": lambda v, m: (
            along(m, discounted(log_ratio(v), m, 0.9), reverse=True).exp() - 1
        ).abs() > 0.2,
        "CTPO clips": lambda v, m: (
            stated.prefix_ratio(v, m) != -v["token_advantages"] * along(m, discounted(log_ratio(v), m, 1)).exp()
        ),
        "CPPO drops": lambda v, m: (stated.prefix_budget(v, m) == 0) & (m != 0),
        "a trust region drops": lambda v, m: stated.trust_region(v, m) == 0,
        "off-policy mask drops": lambda v, m: stated.off_policy_mask(v, m) == 0,
    }  # fmt: skip
    for name, binds in branches.items():
        shown = [
            torch.as_tensor(binds(one.values, one.mask.double())).expand(len(one.mask)) for one in cp_steps.rollouts()
        ]
        assert 0.03 < float(torch.cat(shown).double().mean()) < 0.97, name
