"""Every loss, its value and gradient, over layouts at CP 1, 2 and 4 against float64.

Formulas are those of `sequence_formulas`. One launch over gloo runs all losses and all planted bugs (`cp_steps`).
"""

import functools
import math
import runpy
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import cp_steps
import pytest
import sequence_formulas as stated
import torch
from cp_steps import CASES, Formula, Loss, Tokens
from ranks import run_ranks
from repository import EXAMPLES
from sequence_formulas import log_ratio
from torch import Tensor

from megatron_rl_loss import (
    Gate,
    Samples,
    gae,
    importance_weights,
    kl_estimate,
    policy_loss,
    segment_mean,
    segment_quantile,
    segment_scan,
    segment_sum,
    to_tokens,
    value_loss,
)
from megatron_rl_loss.core.samples import LocalTokens
from megatron_rl_loss.losses.by_name import POLICY_LOSSES
from megatron_rl_loss.losses.off_policy import keep_sequences
from megatron_rl_loss.losses.sequence import gspo_loss

NAN, INF = math.nan, math.inf
NARROW: dict[str, Any] = {"clip_low": 3e-4, "clip_high": 4e-4}

# --- the formulas from the package, on a rank's tokens


def log_probs_of(t: Tokens, advantages: str = "advantages") -> tuple[Tensor, Tensor, Tensor]:
    return t.values["log_probs"], t.values["old_log_probs"], t.values[advantages]


def place(t: Tokens) -> tuple[Any, Any]:
    return t.local, t.cp_group


def microbatch_of(t: Tokens) -> Any:
    """A `Microbatch`'s place: CP needs no further argument."""
    return SimpleNamespace(tokens=t.local, cp_group=t.cp_group, totals=t.totals)


def at_tokens(of_samples: Tensor, t: Tokens) -> Tensor:
    return to_tokens(of_samples, t.local).view(t.values["log_probs"].shape)


#: The names of policy losses that `named` was asked for: each needs a formula.
NAMED = set[str]()


def named(name: str, advantages: str = "token_advantages", **settings: Any) -> Loss:
    NAMED.add(name)
    return lambda t: policy_loss(name, *log_probs_of(t, advantages), microbatch_of(t), **settings).per_token_loss


def ppo_here(t: Tokens, weights: Tensor | None = None) -> Tensor:
    return named("ppo", clip_high=0.28, dual_clip=1.5, importance_weights=weights)(t)


def value_here(t: Tokens) -> Tensor:
    values, old, target = (t.values[name] for name in ("log_probs", "old_log_probs", "rollout_log_probs"))
    return value_loss(values, target, t.local, old_values=old, clip=0.2)


def kl_here(estimator: Any) -> Loss:
    return lambda t: kl_estimate(*log_probs_of(t)[:2], t.local, estimator=estimator)


def weighted_k3_here(t: Tokens) -> Tensor:
    return kl_estimate(t.values["log_probs"], t.values["rollout_log_probs"], t.local, old_log_probs=log_probs_of(t)[1])


def gspo_here(t: Tokens, at: Any = None, **more: Any) -> Tensor:
    at = place(t) if at is None else (at,)
    loss: Any = gspo_loss
    per_token_loss: Tensor = loss(*log_probs_of(t), *at, **NARROW, **more).per_token_loss
    return per_token_loss


def sequence_tis_together(t: Tokens) -> Tensor:
    """Both statistics of sequence TIS in one collective: a sum is a mean times the sample's mask sum."""
    of_ratio, of_mismatch = segment_mean([log_ratio(t.values), stated.mismatch(t.values)], *place(t))
    mask_sums = torch.from_numpy(t.samples.mask_sums)
    weights = at_tokens(importance_weights((of_mismatch * mask_sums).detach(), Gate(high=1.1, action="clamp")), t)
    return gspo_here(t, mean_log_ratio=of_ratio, importance_weights=weights)


def off_policy_mask_here(t: Tokens) -> Tensor:
    mean_kl = segment_mean(-log_ratio(t.values).detach(), *place(t))
    return ppo_here(t, keep_sequences(at_tokens(mean_kl, t), max_kl=0.01, advantages=t.values["advantages"]))


def gated_here(per_rollout: bool = False, **settings: Any) -> Loss:
    def loss(t: Tokens) -> Tensor:
        old = t.values["old_log_probs"]
        at = (microbatch_of(t), None) if per_rollout else place(t)
        return ppo_here(t, importance_weights(stated.mismatch(t.values), Gate(**settings), *at, log_probs=old))

    return loss


def quantiles_here(t: Tokens) -> Tensor:
    values = [t.values["token_advantages"], t.values["token_advantages"] * 2]
    quantiles = [segment_quantile(values, *place(t), q=q) for q in (0.3, 0.5, 1.0)]
    of_samples = quantiles[0][0] + quantiles[1][1] + 3 * quantiles[2][0]  # twice the values, so the second counts twice
    linear = segment_quantile(values[0], *place(t), q=0.7, interpolates=True)
    return at_tokens(of_samples + 4 * linear, t) * t.values["log_probs"]


def three_here(t: Tokens) -> Tensor:
    """One with gradient by two ways, one without, one of data."""
    now, old = t.values["log_probs"], t.values["old_log_probs"]
    a, b, c = segment_mean([now, now.detach().exp(), old], *place(t))
    return at_tokens(a.square() * b + c * a, t) + now


def scans_here(t: Tokens) -> Tensor:
    now, total = t.values["log_probs"], torch.zeros_like(t.values["log_probs"])
    for n, (gamma, steps, reverse, exclusive) in enumerate(stated.SCANS):
        how: dict[str, Any] = {"gamma": gamma, "steps": steps, "reverse": reverse, "exclusive": exclusive}
        _, sums = segment_scan([now.detach().exp(), now], *place(t), **how)
        total = total + (sums / 9 + n).sin()
    return total


def scans_of_rollouts_here(t: Tokens) -> Tensor:
    now = t.values["log_probs"]
    return (segment_scan(now, microbatch_of(t), per="rollout") / 9).sin() * now


def gae_here(lam: Any = 0.8, steps: str = "token") -> Loss:
    def loss(t: Tokens) -> Tensor:
        values, at = (t.values["token_advantages"], t.values["old_log_probs"]), microbatch_of(t)
        of_samples = torch.from_numpy(t.samples.mask_sums)
        if steps == "turn":  # a turn of one sample alone: ids of sample and turn
            names = [[name and f"{i} {name}" for name in turns_of(t.samples, i)] for i in range(len(t.samples))]
            own = Samples(t.samples.loss_masks, layout=t.samples.layout, ids={"turn": names})
            local = LocalTokens(own, t.local.cp_size, t.local.pieces)
            at = SimpleNamespace(tokens=local, cp_group=t.cp_group, totals=None)
        chosen = (1 - 1 / (0.3 * of_samples.clamp(min=1e-9))).clamp(min=0) if lam is None else lam
        advantages, returns = gae(*values, at, gamma=0.9, lam=chosen, steps=steps)
        assert advantages.dtype == torch.float64
        return (advantages + 0.3 * returns) * t.values["log_probs"]

    return loss


def turns_of(samples: Samples, i: int) -> list[str]:
    """The turn of each mask entry of a sample: by fours, none where it is masked."""
    return [str(k // 4) if entry else "" for k, entry in enumerate(samples.loss_masks[i].tolist())]


#: The functions of the recipe.
OWN = runpy.run_path(str(EXAMPLES / "recipes/paper_losses.py"))


def own(name: str) -> Loss:
    return lambda t: OWN[name](*log_probs_of(t, "token_advantages"), microbatch_of(t))


# --- planted bugs: each shows where tokens are cut


def alone(t: Tokens, statistic: Any) -> Tensor:
    """A statistic of what this rank holds, as if that were all."""
    here = Samples([t.local.mask[t.local.sample_index == i] for i in range(len(t.samples))])
    return statistic(t.values["log_probs"].flatten()[: here.total_tokens], here.local(0, 1))


def sum_without_backward_sum(t: Tokens) -> Tensor:
    """The other ranks' part is a constant: the value is right, the gradient is not."""
    now, own = t.values["log_probs"], alone(t, segment_sum)
    return (at_tokens(segment_sum(now.detach(), *place(t)) + own - own.detach(), t) / 9).sin() * now


def scan_without_backward_exchange(t: Tokens) -> Tensor:
    """The gradient is that of prefix sums of this rank's tokens alone."""
    now, own = t.values["log_probs"], alone(t, segment_scan)
    own = torch.cat([own, now.new_zeros(now.numel() - len(own))]).view(now.shape)
    return ((segment_scan(now.detach(), *place(t)) + own - own.detach()) / 9).sin() * now


def gate_of(*settings: Any) -> Formula:
    return lambda v, m: stated.gated(v, m, *settings)


TABLE: dict[str, tuple[Loss, Formula]] = {
    "three together": (three_here, stated.of_three),
    "scans": (scans_here, stated.of_scans),
    "GSPO of rollouts": (lambda t: gspo_here(t, microbatch_of(t), per="rollout"), stated.gspo),
    "GSPO of turns": (lambda t: gspo_here(t, microbatch_of(t), per="turn"), stated.gspo),
    "scans of rollouts": (scans_of_rollouts_here, stated.of_prefix_sum),
    "GSPO": (gspo_here, stated.gspo),
    "GSPO by name": (named("gspo", "advantages", **NARROW), stated.gspo),
    "LUSPO": (named("luspo", "advantages", **NARROW), stated.gspo),  # another mode makes it another loss
    "GSPO-token": (named("gspo_token"), stated.gspo_token),
    "GMPO": (named("gmpo", "advantages"), stated.gmpo),
    "PPO": (ppo_here, stated.ppo),
    "PPO, bounds": (
        named("ppo", clip_low=1, clip_high=5, dual_clip=1.01), partial(stated.ppo, low=1, high=5, dual=1.01)
    ),
    "PPO, no dual clip": (named("ppo", clip_low=0.1), partial(stated.ppo, low=0.1, high=0.1, dual=None)),
    "CISPO": (named("cispo"), partial(stated.cispo, low=1, high=4)),
    "CISPO, bounds": (named("cispo", clip_low=0.2, clip_high=0.28), stated.cispo),
    "SAPO": (named("sapo"), stated.sapo),
    "SAPO, temperatures": (
        named("sapo", tau_positive=0.3, tau_negative=7), partial(stated.sapo, positive=0.3, negative=7)
    ),
    "DPPO-TV": (named("dppo_tv"), partial(stated.dppo, divergence="tv", threshold=0.15)),
    "DPPO-KL": (named("dppo_kl", threshold=0.01), partial(stated.dppo, divergence="kl", threshold=0.01)),
    "IPO": (named("ipo"), partial(stated.ipo, threshold=0.3)),
    "IPO, threshold": (named("ipo", threshold=0.1), partial(stated.ipo, threshold=0.1)),
    "CFPO": (named("cfpo"), partial(stated.cfpo, epsilon=0.2)),
    "CFPO, epsilon": (named("cfpo", epsilon=0.05), partial(stated.cfpo, epsilon=0.05)),
    "VESPO": (named("vespo"), stated.vespo),
    "VESPO, parameters": (
        named("vespo", k_positive=1, lambda_positive=0.1, k_negative=0.5, lambda_negative=4),
        partial(stated.vespo, positive=(1, 0.1), negative=(0.5, 4)),
    ),
    "VESPO of rollouts": (named("vespo", per="rollout"), stated.vespo),
    "VESPO of turns": (named("vespo", per="turn"), stated.vespo),
    "value": (value_here, partial(stated.critic, clip=0.2)),
    "k1 times the ratio": (
        lambda t: kl_estimate(*log_probs_of(t)[:2], t.local, estimator="k1", old_log_probs=t.values["old_log_probs"]),
        lambda v, m: log_ratio(v).exp() * log_ratio(v),
    ),
    "k2": (kl_here("k2"), lambda v, m: log_ratio(v).square() / 2),
    "k3": (kl_here("k3"), lambda v, m: (-log_ratio(v)).exp() - 1 + log_ratio(v)),
    "k3 times the ratio": (weighted_k3_here, stated.weighted_k3),
    "sequence TIS": (sequence_tis_together, stated.sequence_tis),
    "token TIS by a gate": (gated_here(high=1.2, low=0.9, action="clamp"), gate_of("ratio", None, 0.9, 1.2, True)),
    "IcePop by a gate": (gated_here(high=1.2, low=0.9), gate_of("ratio", None, 0.9, 1.2)),
    "gate of a product": (
        gated_here(level="sequence", aggregate="sum", high=1.1, action="clamp"), gate_of("ratio", "sum", 0, 1.1, True)
    ),
    "gate of a geometric mean": (gated_here(level="sequence", high=1.1, low=0.95), gate_of("ratio", "mean", 0.95, 1.1)),
    "gate of the largest ratio": (
        gated_here(level="sequence", aggregate="max", high=1.5), gate_of("ratio", "max", 0, 1.5)
    ),
    "gate of k1": (gated_here(metric="k1", low=-0.2, high=0.2), gate_of("k1", None, -0.2, 0.2)),
    "gate of k2": (gated_here(metric="k2", high=0.05), gate_of("k2", None, -INF, 0.05)),
    "gate of k3 of rollouts": (
        gated_here(True, metric="k3", level="rollout", aggregate="sum", high=0.3), gate_of("k3", "sum", -INF, 0.3)
    ),
    "gate of TV": (
        gated_here(metric="tv", level="sequence", aggregate="max", high=0.06), gate_of("tv", "max", -INF, 0.06)
    ),
    "gate of a binary KL": (gated_here(metric="binary_kl", high=0.03), gate_of("binary_kl", None, -INF, 0.03)),
    "gate of both binary KLs": (
        gated_here(metric="both_binary_kl", high=0.03), gate_of("both_binary_kl", None, -INF, 0.03)
    ),
    "quantiles": (quantiles_here, stated.of_quantiles),
    "off-policy mask": (off_policy_mask_here, stated.off_policy_mask),
    "GAE": (gae_here(), stated.generalised),
    "GAE, lambda of each sample": (gae_here(None), partial(stated.generalised, adaptive=True)),
    "GAE, turns as steps": (gae_here(steps="turn"), stated.generalised_of_turns),
    "FIPO": (own("future_kl"), stated.future_kl),
    "CTPO": (own("prefix_ratio"), stated.prefix_ratio),
    "CPPO": (own("prefix_budget"), stated.prefix_budget),
    "planted: sum without backward sum": (sum_without_backward_sum, stated.of_sum),
    "planted: scan without backward exchange": (scan_without_backward_exchange, stated.of_prefix_sum),
}  # fmt: skip
EVERYWHERE = [(place.__name__, cp_size) for place, cp_size in CASES]
#: The exchanges between ranks, which run in every layout.
EXCHANGES = {"three together", "scans", "quantiles", "GSPO of rollouts", "GSPO of turns", "scans of rollouts"}
#: What is made of exchanges runs in three layouts of different CP sizes, by its name: a new row moves no other.
WHERE = {
    name: set(EVERYWHERE)
    if name in EXCHANGES or "planted" in name
    else {EVERYWHERE[(zlib.crc32(name.encode()) + 7 * k) % len(EVERYWHERE)] for k in range(3)}
    for name in TABLE
}


def on_rank() -> dict[tuple[str, str, int], cp_steps.Outcome]:
    return cp_steps.run_on_ranks({name: row[0] for name, row in TABLE.items()}, WHERE)


@functools.cache
def outcomes() -> list[dict[tuple[str, str, int], cp_steps.Outcome]]:
    return run_ranks(cp_steps.RANKS, on_rank, timeout_s=600)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_has_a_formula(name: str) -> None:
    assert name in NAMED, f"policy loss {name!r}: add a row named({name!r}) with its formula to TABLE"


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_value_and_gradient_in_every_layout(name: str, record_property: Callable[[str, Any], None]) -> None:
    """The comparison also sees planted bugs, where tokens are cut."""
    per = "turn" if "of turns" in name else "rollout" if "rollouts" in name else "sample"
    right = cp_steps.expected(TABLE[name][1], per=per)
    errors = {at: cp_steps.error_of([of_rank[(name, *at)] for of_rank in outcomes()], *right) for at in WHERE[name]}
    if "planted" not in name:
        record_property("losses_over_cp_error", max(errors.values()))
    for (layout, cp_size), error in errors.items():
        shows = "planted" in name and cp_size > 1 and layout != "gathered"
        assert (error > 1e-3) if shows else (error <= 1e-12), (layout, cp_size, error)


def test_the_data_shows_every_branch() -> None:
    """Clips, masks and caps bind on some tokens and not on others: those change the loss."""
    wide, huge = dict[str, Any](low=1, high=1e9), 1e9
    pairs: dict[str, Iterable[Formula]] = {
        "clip": (stated.ppo, partial(stated.ppo, **wide)),
        "dual clip": (stated.ppo, partial(stated.ppo, dual=None)),
        "CISPO's": (stated.cispo, partial(stated.cispo, **wide)),
        "DPPO's TV": (partial(stated.dppo, divergence="tv", threshold=t) for t in (0.15, huge)),
        "DPPO's KL": (partial(stated.dppo, divergence="kl", threshold=t) for t in (0.01, huge)),
        "IPO's": (partial(stated.ipo, threshold=t) for t in (0.1, huge)),
        "IPO's and DPPO's": (
            partial(stated.ipo, threshold=0.15), partial(stated.dppo, divergence="tv", threshold=0.15)
        ),
        "VESPO's signs": (stated.vespo, partial(stated.vespo, negative=(2, 3))),
        "value": (partial(stated.critic, clip=t) for t in (0.2, huge)),
        "GSPO's": (stated.gspo, lambda v, m: -v["advantages"] * stated.mean(log_ratio(v), m).exp()),
        "GMPO's": (stated.gmpo, lambda v, m: -v["advantages"] * stated.mean(log_ratio(v), m).exp()),
        "sequence TIS": (stated.sequence_tis, lambda v, m: (stated.mismatch(v) * m).sum().exp() * stated.gspo(v, m)),
        "off-policy mask": (stated.off_policy_mask, stated.ppo),
        **{name: (TABLE[name][1], stated.ppo) for name in TABLE if "gate of" in name and "KLs" not in name},
        "both KLs": (TABLE["gate of a binary KL"][1], TABLE["gate of both binary KLs"][1]),
        "CTPO's": (stated.prefix_ratio, lambda v, m: -v["token_advantages"] * stated.scan(log_ratio(v), m, 1).exp()),
        "CPPO's": (stated.prefix_budget, lambda v, m: -v["token_advantages"] * log_ratio(v).exp()),
    }  # fmt: skip
    for name, (bounded, free) in pairs.items():
        of_rollouts = [(rollout.values, rollout.mask.double()) for rollout in cp_steps.rollouts()]
        shown = [(bounded(*inputs) - free(*inputs)).abs() > 1e-9 for inputs in of_rollouts]
        assert 0.02 < float(torch.cat(shown).double().mean()) < 0.97, name
