"""Losses and estimates that couple tokens, stated for one whole sample in float64, with Python's ifs and loops.

`v` has a value for each token by name, `m` is its mask; of a rollout, its samples are one after the other.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Values = dict[str, Tensor]


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

    advantages = along(m, estimate, reverse=True)
    return (advantages + 0.3 * torch.where(m != 0, advantages + values, 0)) * v["log_probs"]


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
