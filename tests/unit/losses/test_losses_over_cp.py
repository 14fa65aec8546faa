"""Losses that couple tokens, as whole steps' value and gradient, in every layout at CP 1, 2 and 4, against float64.

Formulas are stated for one whole sample, with Python's ifs and loops or the papers' products. The losses of one's own
are the page's (docs/losses.md). One launch over gloo runs all losses and all planted bugs (`cp_steps`). Losses of
single tokens are in test_token.py; PPO stands for them here.
"""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cp_steps
import oracle
import pytest
import torch
from cp_steps import CASES, Formula, Loss, Tokens
from pages import code_of
from ranks import run_ranks
from torch import Tensor

from megatron_rl_loss.losses import (
    gae,
    gmpo_loss,
    gspo_loss,
    gspo_token_loss,
    importance_weights,
    keep_sequences,
    ppo_clip_loss,
    segment_extreme,
    segment_mean,
    segment_scan,
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


# --- formulas of what runs along a sequence, by loops over its active tokens


def along(m: Tensor, before: Callable[[list[int]], Any], *, reverse: bool = False) -> Tensor:
    """At each active token what `before` says of the active tokens up to it; 0 elsewhere."""
    active = [t for t in range(len(m)) if m[t] != 0][:: -1 if reverse else 1]
    found = [torch.zeros((), dtype=torch.float64)] * len(m)
    for k, t in enumerate(active):
        found[t] = torch.as_tensor(before(active[: k + 1]), dtype=torch.float64)
    return torch.stack(found)


def discounted(x: Tensor, m: Tensor, gamma: float) -> Callable[[list[int]], Any]:
    return lambda up_to: sum(gamma**j * m[t] * x[t] for j, t in enumerate(reversed(up_to)))


def tied(v: Values) -> Tensor:
    """Log-probs in steps of 1/4, with their gradient."""
    x = v["log_probs"]
    return x - x.detach() + (4 * x.detach()).round() / 4


#: Kind, discount, direction, and whether a token's own value is left out.
SCANS = [
    (kind, gamma, reverse, exclusive)
    for kind, gamma in (("sum", 1.0), ("sum", 0.7), ("sum", 0.0), ("max", 1.0), ("min", 1.0))
    for reverse, exclusive in itertools.product((False, True), repeat=2)
]


def of_scans(v: Values, m: Tensor) -> Tensor:
    x, total = tied(v), torch.zeros(len(m), dtype=torch.float64)
    for n, (kind, gamma, reverse, exclusive) in enumerate(SCANS):
        one = discounted(x, m, gamma)
        if kind != "sum":
            one = lambda chosen, kind=kind: getattr(x[chosen], f"a{kind}")() if chosen else -3.0  # noqa: E731
        total = total + (along(m, lambda t: one(t[:-1] if exclusive else t), reverse=reverse) / 9 + n).sin()  # noqa: B023
    return total


def of_prefix_sum(v: Values, m: Tensor) -> Tensor:
    return (along(m, discounted(v["log_probs"], m, 1)) / 9).sin() * v["log_probs"]


def of_extremes(v: Values, m: Tensor) -> Tensor:
    x = tied(v)[m != 0]
    return (x.amax() - 2 * x.amin().square()).expand(len(m)) if len(x) else torch.zeros(len(m), dtype=torch.float64)


def future_kl(v: Values, m: Tensor) -> Tensor:
    future = along(m, discounted(log_ratio(v).detach(), m, 0.9), reverse=True)
    return surrogate(log_ratio(v).exp(), v["token_advantages"] * future.exp().clamp(0.8, 1.2), 0.2, 0.2)


def prefix_ratio(v: Values, m: Tensor) -> Tensor:
    def clipped(t: list[int], of_ones: bool) -> Tensor:
        log, width = (m[t] * log_ratio(v)[t]).sum(), 0.2 * m[t].sum().sqrt()
        return (log.clamp(-width, width) if of_ones else log).exp()

    a = v["token_advantages"]
    return torch.maximum(*(-a * along(m, lambda t: clipped(t, one)) for one in (False, True)))  # noqa: B023


def smallest_before(v: Values, m: Tensor) -> Tensor:
    ratio = log_ratio(v).exp()
    return -v["token_advantages"] * ratio * along(m, lambda t: ratio[t[:-1]].amin() if t[1:] else 1.0)


def prefix_budget(v: Values, m: Tensor) -> Tensor:
    apart = log_ratio(v).detach().abs()
    within = along(m, lambda t: float((m[t] * apart[t]).sum() <= 0.1 * m[t].sum()))
    return -within * v["token_advantages"] * log_ratio(v).exp()


def trust_region(v: Values, m: Tensor) -> Tensor:
    kept = all(apart <= 0.15 for apart, one in zip(log_ratio(v).abs().tolist(), m.tolist(), strict=True) if one)
    return float(kept) * surrogate(log_ratio(v).exp(), v["token_advantages"], 0.2, 0.2)


def generalised(v: Values, m: Tensor) -> Tensor:
    r, values = v["token_advantages"], v["old_log_probs"]

    def estimate(t: list[int]) -> Any:  # this token last, the response's last first
        deltas = [
            r[b] + 0.9 * (values[a] if a is not None else 0) - values[b] for a, b in zip([None, *t], t, strict=False)
        ]
        return sum(0.72**j * delta for j, delta in enumerate(reversed(deltas)))

    return along(m, estimate, reverse=True) * v["log_probs"]


def members(v: Values, m: Tensor) -> list[Tensor]:
    """Places of each of a rollout's samples that has an active token."""
    places = [torch.nonzero(v["sample"] == i)[:, 0] for i in v["sample"].unique()]
    return [place for place in places if m[place].sum() > 0]


def rewards_as_labels(v: Values, m: Tensor) -> Tensor:
    sums = [torch.ones((), dtype=torch.float64)] * 2
    for t in members(v, m):
        right = bool(v["advantages"][t[0]] > 0)
        sums[right] = sums[right] + (mean(log_ratio(v)[t], m[t]) * (-1 if right else 1)).exp()
    return (sums[0].log() + sums[1].log()).expand(len(m))


def target_policy(v: Values, m: Tensor) -> Tensor:
    if not members(v, m):
        return torch.zeros(len(m), dtype=torch.float64)
    new, old = (torch.stack([(v[x][t] * m[t]).sum() for t in members(v, m)]) for x in ("log_probs", "old_log_probs"))
    q = (old + torch.stack([v["advantages"][t[0]] for t in members(v, m)])).softmax(0)
    return -(q * new.log_softmax(0)).sum().expand(len(m))


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


def scans_here(t: Tokens) -> Tensor:
    x, total = tied(t.values), torch.zeros_like(t.values["log_probs"])
    for n, (kind, gamma, reverse, exclusive) in enumerate(SCANS):
        how: dict[str, Any] = {"kind": kind, "gamma": gamma, "reverse": reverse, "exclusive": exclusive}
        _, found = segment_scan([x.detach().exp(), x], *place(t), empty=0.0 if kind == "sum" else -3.0, **how)
        total = total + (found / 9 + n).sin()
    return total


def prefix_sum_here(t: Tokens) -> Tensor:
    x = t.values["log_probs"]
    return (segment_scan(x, *place(t)) / 9).sin() * x


def extremes_here(t: Tokens, **per: Any) -> Tensor:
    x = tied(t.values)
    highest, lowest = (segment_extreme(x, *place(t), kind=kind, **per) for kind in ("max", "min"))
    return at_tokens(highest - 2 * lowest.square(), t)


def extremes_of_rollouts(t: Tokens) -> Tensor:
    return extremes_here(t, per="rollout", totals=t.totals)


def gae_here(t: Tokens) -> Tensor:
    values = t.values["token_advantages"], t.values["old_log_probs"]
    return gae(*values, *place(t), gamma=0.9, lam=0.8)[0] * t.values["log_probs"]


#: The page's code.
OWN: dict[str, Any] = {}
exec(code_of("losses.md")[-2], OWN)


def own(name: str, t: Tokens, advantages: str = "token_advantages", **per: Any) -> Tensor:
    loss: Tensor = OWN[name](*given(t, advantages), microbatch_of(t), **per)
    return loss


def of_rollouts(name: str) -> Loss:
    """Rollouts stand for prompts: in these steps they lie in one micro-batch."""
    return functools.partial(own, name, advantages="advantages", per="rollout")


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
    "scans": (scans_here, of_scans, "sample_mean"),
    "prefix sum": (prefix_sum_here, of_prefix_sum, "sample_mean"),
    "extremes": (extremes_here, of_extremes, "sample_mean"),
    "extremes of rollouts": (extremes_of_rollouts, of_extremes, "sample_mean"),
    "GAE": (gae_here, generalised, "sample_mean"),
    "FIPO": (functools.partial(own, "future_kl"), future_kl, "token_mean"),
    "CTPO": (functools.partial(own, "prefix_ratio"), prefix_ratio, "sample_mean"),
    "MinPRO": (functools.partial(own, "smallest_before"), smallest_before, "token_mean"),
    "CPPO": (functools.partial(own, "prefix_budget"), prefix_budget, "token_mean"),
    "trust region masking": (functools.partial(own, "trust_region"), trust_region, "sample_mean"),
    "REAL of rollouts": (of_rollouts("rewards_as_labels"), rewards_as_labels, "sample_mean"),
    "TPO of rollouts": (of_rollouts("target_policy"), target_policy, "sample_mean"),
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


def scan_of_own_part(t: Tokens, whole: Tensor | None = None) -> Tensor:
    """Prefix sums of what this rank holds; with `whole`, their gradient alone."""
    x, running = t.values["log_probs"], torch.zeros(())
    found, last = [], None
    for term, active, i in zip((x.flatten() * t.local.mask), t.local.mask != 0, t.local.sample_index, strict=True):
        running, last = term + (running if i == last else 0), i
        found.append(running * active)
    sums = torch.stack(found).view(x.shape) if found else x
    return ((sums if whole is None else whole + sums - sums.detach()) / 9).sin() * x


def scan_without_backward_exchange(t: Tokens) -> Tensor:
    return scan_of_own_part(t, segment_scan(t.values["log_probs"].detach(), *place(t)))


PLANTED: dict[str, tuple[Loss, str]] = {
    "scan of a rank's own part": (scan_of_own_part, "prefix sum"),
    "scan without backward exchange": (scan_without_backward_exchange, "prefix sum"),
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
        "FIPO's weight clips": share(
            lambda v, m: future_kl(v, m) != surrogate(log_ratio(v).exp(), v["token_advantages"], 0.2, 0.2)
        ),
        "CTPO clips": share(
            lambda v, m: prefix_ratio(v, m) != -v["token_advantages"] * along(m, discounted(log_ratio(v), m, 1)).exp()
        ),
        "CPPO drops": share(lambda v, m: (prefix_budget(v, m) == 0) & (m != 0)),
        "a trust region drops": share(lambda v, m: trust_region(v, m) == 0),
        "off-policy mask drops": share(lambda v, m: off_policy_mask(v, m) == 0),
    }
    assert all(0.03 < found < 0.97 for found in shares.values()), shares
